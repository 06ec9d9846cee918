"""The model that is shipped, beside the evaluation loop's NMS, bit for bit."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from utils.core.tasks import Prediction
from utils.evaluation.nms import non_max_suppression
from utils.serving import nms_model
from utils.serving.nms_model import Settings, batch_detections


def crowd(seed: int, anchors: int = 400, nc: int = 3, batch: int = 3) -> np.ndarray:
    """Boxes that overlap much, scores of which many are equal."""
    rng = np.random.default_rng(seed)
    raw = rng.normal(0, 1, (batch, 4 + nc, anchors)).astype(np.float32)
    raw[:, :2] = rng.uniform(0, 100, (batch, 2, anchors))
    raw[:, 2:4] = rng.uniform(0, 40, (batch, 2, anchors))
    raw[:, 4:] = rng.integers(0, 256, (batch, nc, anchors)) / np.float32(255)
    return raw


def odd_crowds():
    """Half precision; values that are not finite, of one image all; boxes without an area in one place."""
    yield crowd(1).astype(np.float16)
    raw = crowd(3)
    raw[0, 0, :50], raw[0, 3, 50:100], raw[1, 4, :200], raw[2] = np.nan, np.inf, np.nan, np.nan
    yield raw
    raw = crowd(4)
    raw[:, 2:4, ::2] = 0
    raw[:, :2, ::4] = 50
    yield raw


@pytest.mark.parametrize(
    "settings",
    [
        Settings(0.25, 0.45, 100), Settings(0.001, 0.7, 300), Settings(0.5, 0.45, 5), Settings(0.25, 0.45, 100, True),
        Settings(0.25, 0.0, 50), Settings(0.0, 1.0, 3000), Settings(1.0, 0.5, 10), Settings(128 / 255, 0.45, 20),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("raw", [crowd(0), *odd_crowds()], ids=["plain", "half", "not finite", "no area"])
def test_keeps_what_the_loop_keeps(settings, raw):
    expected = [rows.numpy() for rows in non_max_suppression(
        Prediction(torch.from_numpy(raw.astype(np.float32))), settings.conf_thres, settings.iou_thres,
        max_det=settings.max_det, agnostic=settings.class_agnostic,
    )]  # fmt: skip
    found = batch_detections(raw, settings)
    assert {array.dtype.itemsize for array in found.values()} == {4}
    assert set(found) == {"num_dets", "det_boxes", "det_scores", "det_classes"}
    for place, rows in enumerate(expected):
        count = found["num_dets"][place, 0]
        assert count == len(rows)
        np.testing.assert_array_equal(found["det_boxes"][place, :count], rows[:, :4])
        np.testing.assert_array_equal(found["det_scores"][place, :count], rows[:, 4])
        np.testing.assert_array_equal(found["det_classes"][place, :count], rows[:, 5])
        assert not found["det_boxes"][place, count:].any()
        assert not found["det_scores"][place, count:].any()
    assert any(len(rows) for rows in expected) == (settings.conf_thres < 1)


def test_parameters_are_read():
    config = {"parameters": {"conf_thres": {"string_value": "0.5"}, "max_det": {"string_value": "7"},
                             "class_agnostic": {"string_value": "true"}}}  # fmt: skip
    assert Settings.of(config) == Settings(0.5, 0.45, 7, True)
    assert Settings.of({}) == Settings()


def test_the_file_needs_nothing_but_numpy():
    names = re.findall(r"^ *(?:from|import) (\w+)", Path(nms_model.__file__).read_text(encoding="utf-8"), re.M)
    assert {*names} - set(sys.stdlib_module_names) == {"numpy", "triton_python_backend_utils"}
