"""Resampled AP against images that are really drawn again, and standard errors against other ways to estimate them.

Agreement with the float network, scores at its threshold, and groups of images, against plain computations.
"""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from known_sets import CONFIG, NAMES
from torchvision.ops import box_iou

from utils.core.errors import InputError
from utils.core.score import REPLICATES, difference_error
from utils.core.tasks import DISPLAY_CONF
from utils.evaluation.bootstrap import Outcomes, draw_weights, group_images, image_weights, resample, weighted_ap
from utils.evaluation.data_yaml import load_data
from utils.evaluation.metrics import IOU_THRESHOLDS, SELF_AP, EvalStatistics, ImageOutcome, ap_per_class


def outcomes(rng, images=40, classes=4, detections=12, labels=3, skill=0.7, ties=False) -> Outcomes:
    """An evaluation of random images: a class may be rare, an image empty, a detection wrong or of no label."""
    counts = rng.poisson(labels, images)
    label_image = np.repeat(np.arange(images), counts)
    shares = np.arange(classes, 0, -1) ** 2.0
    label_classes = rng.choice(classes, len(label_image), p=shares / shares.sum()).astype(np.float32)
    image = np.repeat(np.arange(images), detections)
    kinds = rng.integers(classes + 1, size=len(image)).astype(np.float32)
    # scores differ within an image; with `ties` they are the same ones in every image
    confidence = np.concatenate([np.linspace(0.05, 0.6, detections) + (0 if ties else rng.uniform(0, 0.04))
                                 for _ in range(images)]).astype(np.float32)  # fmt: skip
    correct = np.zeros((len(image), 10), bool)
    found = np.flatnonzero(rng.random(len(label_image)) < skill)
    overlap = rng.uniform(0.45, 1.0, len(found))
    image = np.concatenate([image, label_image[found]])
    kinds = np.concatenate([kinds, label_classes[found]])
    sure = np.round(rng.uniform(0.3, 1, len(found)), 6).astype(np.float32)
    confidence = np.concatenate([confidence, sure])
    correct = np.concatenate([correct, overlap[:, None] >= np.array(IOU_THRESHOLDS)])
    order = np.lexsort((-confidence, image))
    paths = [f"val/{index:04}.jpg" for index in range(images)]
    return Outcomes(paths, image[order], correct[order], confidence[order], kinds[order], label_image, label_classes)


def drawn_again(found: Outcomes, drawn: np.ndarray) -> float:
    """AP by `ap_per_class` of the images in `drawn`, an index as often as the image is there."""
    rows = np.concatenate([np.flatnonzero(found.image == index) for index in drawn])
    labels = np.concatenate([found.label_classes[found.label_image == index] for index in drawn])
    return ap_per_class(found.correct[rows], found.confidence[rows], found.classes[rows], labels).mean().ap


def columns(weights: np.ndarray) -> list[np.ndarray]:
    return [np.repeat(np.arange(len(weights)), column) for column in weights.T]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ties", [False, True])
def test_weights_give_what_images_drawn_again_give(seed, ties):
    rng = np.random.default_rng(seed)
    found = outcomes(rng, images=int(rng.integers(5, 60)), labels=float(rng.uniform(0.5, 8)), ties=ties)
    weights = draw_weights(len(found.paths), 25)
    expected = [drawn_again(found, drawn) for drawn in columns(weights)]
    assert weighted_ap(found, weights) == pytest.approx(expected, abs=1e-12)
    assert np.ptp(expected) > 0.01  # the comparison is not about nothing


@pytest.mark.parametrize("labels", [1, 7, 29, 50, 57, 100, 200])
def test_recalls_on_the_grid_fall_on_the_same_side(labels):
    """Recall k/n may equal one of the 101 recalls that are read, or be a rounding error beside it."""
    hits = np.ones((labels, 10), bool)
    hits[1::3, 5:] = False
    found = Outcomes(["a", "b"], np.zeros(labels, int), hits, np.linspace(0.9, 0.1, labels), np.zeros(labels),
                     np.zeros(labels, int), np.zeros(labels))  # fmt: skip
    for copies in (1, 2, 3):
        expected = drawn_again(found, np.zeros(copies, int))
        assert weighted_ap(found, np.array([[copies], [0]]))[0] == pytest.approx(expected, abs=1e-12)


def test_nothing_found_nothing_labelled_and_one_image():
    nothing = np.zeros(0)
    found = Outcomes(["a", "b"], nothing.astype(int), np.zeros((0, 10), bool), nothing, nothing, np.array([0]),
                     np.array([2.0]))  # fmt: skip
    assert (set(resample(found).ap), resample(found).error) == ({0.0}, 0)
    unlabelled = replace(found, label_image=nothing.astype(int), label_classes=nothing)
    assert resample(unlabelled) is None, "AP is not defined"
    one_labelled = replace(found, paths=[*"abcdefgh"], image=np.array([0]), correct=np.ones((1, 10), bool),
                           confidence=np.array([0.9]), classes=np.array([2.0]))  # fmt: skip
    assert resample(one_labelled).error == 0, "resamplings without a label do not count as an AP of 0"
    assert resample(outcomes(np.random.default_rng(0), images=1)) is None


def test_the_draws_are_uniform_and_never_change():
    weights = draw_weights(50, 2000)
    assert (weights.sum(0) == 50).all()
    assert weights.mean(1) == pytest.approx(1, abs=0.1)
    assert weights.var() == pytest.approx(0.98, abs=0.03)  # of a multinomial: 1 - 1/50
    # those of reports that were written before
    assert draw_weights(5, 3).T.tolist() == [[0, 2, 1, 1, 1], [0, 1, 2, 1, 1], [1, 0, 1, 1, 2]]


def test_the_order_of_the_images_does_not_matter():
    """Rectangular evaluation goes through the images in another order."""
    found = outcomes(np.random.default_rng(3))
    turned = len(found.paths) - 1 - np.arange(len(found.paths))
    other = replace(found, paths=found.paths[::-1], image=turned[found.image], label_image=turned[found.label_image])
    assert resample(other).images == resample(found).images
    assert resample(other).ap == pytest.approx(resample(found).ap, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda one: {"confidence": one.confidence / 2}, True),
        (lambda one: {"paths": [f"/elsewhere/{path.rpartition('/')[2]}" for path in one.paths]}, True),
        (lambda one: {"paths": [f"x{path}" for path in one.paths[:-1]] + ["val/other.jpg"]}, False),
        (lambda one: {"label_classes": np.append(one.label_classes[:-1], 7.0)}, False),
        (lambda one: {"label_image": one.label_image[:-1], "label_classes": one.label_classes[:-1]}, False),
        (lambda one: {"paths": [*one.paths, "val/one-more.jpg"]}, False),
    ],
)
def test_only_the_same_images_and_labels_compare(change, same):
    found = outcomes(np.random.default_rng(3))
    other = resample(replace(found, **change(found)))
    assert other.same_images(resample(found)) is same
    assert (difference_error(other, resample(found)) is not None) is same


def test_an_error_is_the_spread_over_sets_of_new_images():
    rng = np.random.default_rng(12)
    changes, errors, alone = [], [], []
    for _ in range(40):
        first = outcomes(rng, images=150, labels=5, skill=0.85, classes=2)
        kept = rng.random(len(first.correct)) > 0.05  # the second loses some hits, and its scores are shaken
        shaken = first.confidence * rng.uniform(0.9, 1.1, len(kept)).astype(np.float32)
        both = first, replace(first, correct=first.correct & kept[:, None], confidence=shaken)
        one, other = (
            ap_per_class(each.correct, each.confidence, each.classes, each.label_classes).mean().ap for each in both
        )
        first, second = (resample(each, 60) for each in both)
        changes.append(other - one)
        errors.append(difference_error(second, first))
        alone.append(first.error)
    assert np.mean(errors) == pytest.approx(np.std(changes, ddof=1), rel=0.35)  # 40 sets know it to 11 %
    assert np.mean(errors) < 0.7 * np.mean(alone)  # both networks find the same images hard


def test_statistics_of_an_evaluation_are_resampled_image_by_image():
    found = outcomes(np.random.default_rng(8), images=20)
    statistics = EvalStatistics()
    for index, path in enumerate(found.paths):
        rows, labels = found.image == index, found.label_classes[found.label_image == index]
        detections = np.column_stack([found.confidence, found.classes, found.classes])[rows]
        statistics.images[path] = ImageOutcome(found.correct[rows], detections, np.column_stack([labels, labels]))
    assert statistics.resampled() == resample(found)
    assert len(resample(found).ap) == REPLICATES


# fidelity


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
    assert result.agreement == pytest.approx(expected.ap / SELF_AP, abs=0.003), "boxes of label files lie inside"
    assert 0.3 < result.agreement < 0.97
    assert result.agreement != pytest.approx(result.ap, abs=0.05)
    assert mixed.evaluate(reference=reference).agreement > 0.99
    unlabelled = mixed.evaluate(replace(CONFIG, conf_thres=0.3, unlabelled=True), reference=reference)
    assert unlabelled.ap == unlabelled.agreement == result.agreement
    nothing = replace(reference, detections={path: rows[:0] for path, rows in reference.detections.items()})
    assert mixed.evaluate(reference=nothing).agreement is None, "there is nothing to agree with"


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
    weights = image_weights(outcomes).weights
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
    weights = image_weights(outcomes).weights
    for group in set(outcomes.groups):
        members = weights[[index for index, other in enumerate(outcomes.groups) if other == group]]
        assert (members == members[0]).all()
    assert (weights[[0, 10, 20, 30, 39]].sum(0) == 5).all()
    grouped = statistics.resampled()
    assert not grouped.same_images(alone)
    assert grouped.error != alone.error


def test_clustered_images_have_a_larger_standard_error():
    """The control of groups: images that are copies of each other say nothing new, and only groups notice."""
    once, copies = outcomes(np.random.default_rng(3), images=30), 6
    many = replace(
        once, paths=[f"{index % 30:03}_{index // 30}" for index in range(30 * copies)],
        image=np.concatenate([once.image + 30 * k for k in range(copies)]), correct=np.tile(once.correct, (copies, 1)),
        confidence=np.tile(once.confidence, copies), classes=np.tile(once.classes, copies),
        label_image=np.concatenate([once.label_image + 30 * k for k in range(copies)]),
        label_classes=np.tile(once.label_classes, copies),
    )  # fmt: skip
    by_image, by_group = resample(many), resample(replace(many, groups=group_images(many.paths, r"\d{3}_")))
    assert by_group.error == pytest.approx(resample(once).error, rel=0.25)
    assert by_image.error < 0.6 * by_group.error


def test_groups_come_from_a_file_or_from_names(tmp_path):
    paths = ["a/clip1_003.jpg", "a/clip1_004.jpg", "b/clip22_001.jpg"]
    assert group_images(paths, r"clip\d+") == ["clip1", "clip1", "clip22"]
    file = tmp_path / "groups.txt"
    file.write_text("clip1_003.jpg road\na/clip1_004 road\n\nclip22_001 town\n")
    assert group_images(paths, str(file)) == ["road", "road", "town"]
    file.write_text("\ufeffold/clip 1/0.rf.jpg a\nold/clip 11/0.rf b\n1.rf c\n")  # one name in several folders
    names = [f"/new/clip {clip}/{frame}.rf.jpg" for clip in (11, 1) for frame in (0, 1)]
    assert group_images(names, str(file)) == ["b", "c", "a", "c"]
    with pytest.raises(InputError, match="jpg is in several groups"):
        group_images(["/new/clip 2/0.rf.jpg"], str(file))


@pytest.mark.parametrize("groups", ["", "town", "(", "FILE"])
def test_groups_that_do_not_fit_are_refused(tmp_path, groups):
    if groups == "FILE":
        groups = str(tmp_path / "groups.txt")
        (tmp_path / "groups.txt").write_text("clip1_003 road of town\n")
    with pytest.raises(InputError, match="--groups"):
        group_images(["clip1_003.jpg"], groups)
