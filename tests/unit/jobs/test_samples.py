"""Samples of a report: boxes and masks where they are in the image."""

import cv2
import numpy as np
import pytest
import torch
from known_images import MIXED, SQUARE, KnowingModel, write_set
from known_masks import KnowingMasks, masks_by_torch, write_outlined_set

from utils.core.errors import DataError
from utils.evaluation.data_yaml import load_data
from utils.jobs.visualize import best_class, collect_samples
from utils.reports.detections import points_of
from utils.runners.pytorch import TorchRunner

NAMES = ("cat", "dog", "owl")


@pytest.fixture
def known(tmp_path):
    samples = write_outlined_set(tmp_path, 6, SQUARE)
    return samples, load_data(tmp_path / "data.yaml")


def filled(polygons):
    return cv2.fillPoly(np.zeros((64, 64), np.uint8), polygons, 1).astype(bool)


def test_boxes_are_in_pixels_of_the_image_and_images_spread_over_the_split(tmp_path):
    known = {str(sample.path): sample for sample in write_set(tmp_path, 9, MIXED)}
    runner = TorchRunner(KnowingModel([*known.values()], NAMES, 64), "cpu")
    samples = collect_samples({"float": runner}, load_data(tmp_path / "data.yaml"), imgsz=64, count=3, confidence=0.3)
    assert [list(known).index(sample.image) for sample in samples] == [0, 4, 8]
    assert sum(len(sample.predictions["float"]) for sample in samples) > 3
    for sample in samples:
        labels, answers = known[sample.image].labels, known[sample.image].answers
        assert len(sample.truth) == len(labels)
        for box in sample.truth:
            row = labels[np.abs(labels[:, 1:] - box.xyxy).max(1).argmin()]
            assert (box.name, box.xyxy) == (NAMES[int(row[0])], pytest.approx(row[1:], abs=1e-3))
        for box in sample.predictions["float"]:
            assert box.score >= 0.3
            boxes = answers[:, 1:5].clip(0, np.tile(known[sample.image].size, 2))
            assert np.abs(boxes - box.xyxy).max(1).min() < 0.1


def test_of_two_classes_in_one_place_the_better_is_shown():
    rows = torch.tensor([[0.0, 0, 9, 9, 0.5, 0], [0, 0, 9, 9, 0.6, 1], [20, 20, 30, 30, 0.4, 0]])
    assert rows[best_class(rows)][:, 5].tolist() == [1, 0]


def test_masks_of_labels_and_of_detections_have_outlines(known):
    samples, data = known
    model = KnowingMasks(samples, NAMES, 64)
    runners = {"float": TorchRunner(model, "cpu"), "boxes": TorchRunner(KnowingModel(samples, NAMES, 64), "cpu")}
    found = collect_samples(runners, data, imgsz=64, count=6)
    masks = 0
    for sample, one in zip(samples, found, strict=True):
        assert one.image == str(sample.path)
        assert len(one.truth) == len(sample.outlines)
        for box in one.truth:
            corners = [np.concatenate([points.min(0), points.max(0)]) for points in sample.outlines]
            nearest = np.abs(np.array(corners) - box.xyxy).sum(1).argmin()
            theirs = filled([sample.outlines[nearest].astype(np.int32)])
            assert (filled([points_of(text) for text in box.outline]) != theirs).mean() < 0.002
        assert not any(box.outline for box in one.predictions["boxes"])
        boxes = one.predictions["float"]
        expected_masks = masks_by_torch(model, cv2.imread(one.image), [(*box.xyxy, box.score) for box in boxes])
        for box, expected in zip(boxes, expected_masks, strict=True):
            drawn = filled([points_of(text) for text in box.outline])
            assert (drawn != expected).mean() < 0.002
            masks += bool(box.outline)
    assert masks > 5


def test_boxes_as_labels_are_refused_where_a_network_has_masks(known, tmp_path):
    samples, data = known
    labels = tmp_path / "labels/val" / f"{samples[0].path.stem}.txt"
    labels.write_text("0 0.5 0.5 0.2 0.2\n")
    boxes = {"float": TorchRunner(KnowingModel(samples, NAMES, 64), "cpu")}
    assert len(collect_samples(boxes, data, imgsz=64, count=1)[0].truth) == 1
    with pytest.raises(DataError, match=rf"needs outlines, and 1 image of .*; the first: .*{labels.name}"):
        collect_samples({"float": TorchRunner(KnowingMasks(samples, NAMES, 64), "cpu")}, data, imgsz=64, count=1)
