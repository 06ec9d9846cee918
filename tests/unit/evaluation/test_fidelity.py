"""Agreement with the float network, scores at its threshold, and groups of images, against plain computations."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from known_sets import CONFIG, NAMES
from torchvision.ops import box_iou

from utils.core.errors import InputError
from utils.core.tasks import DISPLAY_CONF
from utils.evaluation.bootstrap import group_images, image_weights
from utils.evaluation.data_yaml import load_data


@pytest.fixture(scope="module")
def reference(mixed):
    return mixed.evaluate(as_reference=True).reference


def test_agreement_is_ap_with_the_reference_in_place_of_the_labels(mixed, reference, tmp_path, monkeypatch):
    """A dataset whose label files hold the reference's detections has that AP."""
    result = mixed.evaluate(replace(CONFIG, conf_thres=0.3), reference=reference)  # a network that finds less
    shutil.copytree(mixed.folder / "images", tmp_path / "images")
    (tmp_path / "labels/val").mkdir(parents=True)
    for sample in mixed.samples:
        lines = []
        for kind, x1, y1, x2, y2 in reference.detections[str(sample.path)].double().clamp(min=0).tolist():
            box = np.array([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1]) / np.tile(sample.size, 2)
            lines.append(f"{int(kind)} " + " ".join(f"{value:.9f}" for value in box))
        (tmp_path / f"labels/val/{sample.path.stem}.txt").write_text("\n".join(lines))
    (tmp_path / "data.yaml").write_text(f"path: {tmp_path}\ntrain: images/val\nval: images/val\nnames: {list(NAMES)}\n")
    monkeypatch.setattr(mixed, "data", load_data(tmp_path / "data.yaml"))
    expected = mixed.evaluate(replace(CONFIG, conf_thres=0.3))
    monkeypatch.undo()
    assert result.agreement == pytest.approx(expected.ap, abs=0.003)  # label files hold boxes inside the image
    assert 0.3 < result.agreement < 0.97
    assert result.agreement != pytest.approx(result.ap, abs=0.05)
    assert mixed.evaluate(reference=reference).agreement > 0.99
    unlabelled = mixed.evaluate(replace(CONFIG, conf_thres=0.3, unlabelled=True), reference=reference)
    assert unlabelled.ap == unlabelled.agreement == result.agreement


def test_what_is_found_at_a_threshold_is_counted_image_by_image(mixed, reference):
    point = mixed.evaluate().statistics.at_threshold(DISPLAY_CONF, NAMES)
    detections, found = 0, []
    for sample in mixed.samples:
        rows = reference.detections[str(sample.path)].double()
        labels = torch.from_numpy(sample.labels)
        overlap = box_iou(labels[:, 1:], rows[:, 1:]).where(labels[:, :1] == rows[:, 0], 0)
        detections += len(rows)
        if overlap.numel():
            best, label = overlap.max(0)
            found += labels[label[best >= 0.5].unique()].tolist()
    assert (point.objects, point.found) == (sum(len(sample.labels) for sample in mixed.samples), len(found))
    assert 0.5 < point.recall < 0.95
    assert (point.precision, point.recall) == (len(found) / detections, len(found) / point.objects)
    for kind, name in enumerate(NAMES):
        every = sum((sample.labels[:, 0] == kind).sum() for sample in mixed.samples)
        assert point.by_class[name] == (every, sum(row[0] == kind for row in found))
    areas = [np.prod(sample.labels[:, 3:] - sample.labels[:, 1:3], axis=1) for sample in mixed.samples]
    small = sum((one < 32**2).sum() for one in areas)
    assert point.by_size["small"] == (small, sum((row[3] - row[1]) * (row[4] - row[2]) < 32**2 for row in found))
    assert point.by_size["medium"][0] == point.objects - small
    assert list(point.by_size) == ["small", "medium"]
    nothing = mixed.evaluate().statistics.at_threshold(1.0, NAMES)
    assert (nothing.found, nothing.precision, nothing.recall) == (0, 0, 0)


def test_errors_at_a_threshold_are_those_of_drawing_images_again(mixed):
    statistics = mixed.evaluate().statistics
    point, outcomes = statistics.at_threshold(0.3, NAMES), statistics.outcomes()
    _, weights = image_weights(outcomes)
    hit = (outcomes.confidence >= 0.3) & outcomes.correct[:, 0]
    for column in (0, 17):
        drawn = np.repeat(np.arange(len(weights)), weights[:, column])
        found = sum((hit & (outcomes.image == index)).sum() for index in drawn)
        objects = sum((outcomes.label_image == index).sum() for index in drawn)
        detections = sum(((outcomes.confidence >= 0.3) & (outcomes.image == index)).sum() for index in drawn)
        assert point.recall_resampled.ap[column] == pytest.approx(found / objects, abs=1e-6)
        assert point.precision_resampled.ap[column] == pytest.approx(found / detections, abs=1e-6)


def test_the_images_of_a_group_are_drawn_together(mixed):
    alone = mixed.evaluate().statistics.resampled()
    result = mixed.evaluate(replace(CONFIG, groups=r"0{10}\d"))  # the first digit of two: groups of ten images
    statistics = result.statistics
    assert result.groups == 5
    outcomes = statistics.outcomes()
    _, weights = image_weights(outcomes)
    for group in set(outcomes.groups):
        members = weights[[index for index, other in enumerate(outcomes.groups) if other == group]]
        assert (members == members[0]).all()
    assert (weights[[0, 10, 20, 30, 39]].sum(0) == 5).all()
    grouped = statistics.resampled()
    assert not grouped.same_images(alone)
    assert grouped.error != alone.error


def test_groups_come_from_a_file_or_from_names(tmp_path):
    paths = ["a/clip1_003.jpg", "a/clip1_004.jpg", "b/clip22_001.jpg"]
    assert group_images(paths, r"clip\d+") == ["clip1", "clip1", "clip22"]
    file = tmp_path / "groups.txt"
    file.write_text("clip1_003.jpg road\na/clip1_004 road\n\nclip22_001 town\n")
    assert group_images(paths, str(file)) == ["road", "road", "town"]


@pytest.mark.parametrize("groups", ["", "town", "(", "FILE"])
def test_groups_that_do_not_fit_are_refused(tmp_path, groups):
    if groups == "FILE":
        groups = str(tmp_path / "groups.txt")
        (tmp_path / "groups.txt").write_text("clip1_003 road of town\n")
    with pytest.raises(InputError, match="--groups"):
        group_images(["clip1_003.jpg"], groups)
