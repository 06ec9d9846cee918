"""The model that is shipped, beside the evaluation loop's NMS, bit for bit, and beside the masks of exported files."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from mask_graph import raw_graph

from utils.core.tasks import Prediction
from utils.evaluation.nms import non_max_suppression
from utils.onnx_graph.output_formats import NmsSettings, attach_nms
from utils.serving import nms_model
from utils.serving.nms_model import Settings, batch_detections


def crowd(seed: int, anchors: int = 400, nc: int = 3, nm: int = 0, batch: int = 3) -> np.ndarray:
    """Boxes that overlap much, scores of which many are equal."""
    rng = np.random.default_rng(seed)
    raw = rng.normal(0, 1, (batch, 4 + nc + nm, anchors)).astype(np.float32)
    raw[:, :2] = rng.uniform(0, 100, (batch, 2, anchors))
    raw[:, 2:4] = rng.uniform(0, 40, (batch, 2, anchors))
    raw[:, 4 : 4 + nc] = rng.integers(0, 256, (batch, nc, anchors)) / np.float32(255)
    return raw


def loops(raw: np.ndarray, settings: Settings, nm: int = 0) -> list[np.ndarray]:
    prediction = Prediction(torch.from_numpy(raw), torch.zeros(len(raw), nm, 1, 1) if nm else None)
    found = non_max_suppression(
        prediction, settings.conf_thres, settings.iou_thres, max_det=settings.max_det, agnostic=settings.class_agnostic
    )
    return [one.numpy() for one in found]


@pytest.mark.parametrize(
    "settings",
    [
        Settings(0.25, 0.45, 100), Settings(0.001, 0.7, 300), Settings(0.5, 0.45, 5), Settings(0.25, 0.45, 100, True),
        Settings(0.25, 0.0, 50), Settings(0.0, 1.0, 3000), Settings(1.0, 0.5, 10), Settings(128 / 255, 0.45, 20),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1])
def test_keeps_what_the_loop_keeps(settings, seed):
    raw = crowd(seed)
    expected = loops(raw, settings)
    found = batch_detections(raw, None, settings)
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


def test_values_that_are_not_finite_are_left_out_as_in_the_loop():
    raw = crowd(3)
    raw[0, 0, :50], raw[0, 3, 50:100], raw[1, 4, :200], raw[2] = np.nan, np.inf, np.nan, np.nan
    expected = loops(raw, Settings())
    found = batch_detections(raw, None, Settings())
    assert found["num_dets"][:, 0].tolist() == [len(rows) for rows in expected]
    assert found["num_dets"][2, 0] == 0 < found["num_dets"][1, 0]
    np.testing.assert_array_equal(found["det_boxes"][1, : len(expected[1])], expected[1][:, :4])


def test_boxes_without_an_area_do_not_suppress_each_other():
    raw = crowd(4)
    raw[:, 2:4, ::2] = 0
    raw[:, :2, ::4] = 50
    for found, rows in zip(
        batch_detections(raw, None, Settings())["num_dets"][:, 0], loops(raw, Settings()), strict=True
    ):
        assert found == len(rows)


def test_half_precision_is_computed_in_single():
    raw = crowd(5).astype(np.float16)
    found, same = batch_detections(raw, None, Settings()), batch_detections(raw.astype(np.float32), None, Settings())
    for name, array in found.items():
        np.testing.assert_array_equal(array, same[name])
        assert array.dtype == same[name].dtype


@pytest.mark.parametrize("overlap", [0.3, 0.6])
def test_masks_are_those_of_a_file_with_masks_on_the_grid(overlap):
    graph = raw_graph()
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.graph.input}
    rng = np.random.default_rng(2)
    raw = crowd(6, shapes["raw"][2], 5, 8)
    raw[:, 2:4] += 4
    maps = rng.normal(0, 0.5, shapes["maps"]).astype(np.float32)
    ended = attach_nms(graph, NmsSettings("onnx", 30, overlap, 0.3), 0)
    session = onnxruntime.InferenceSession(ended.SerializeToString())
    feeds = {"images": np.zeros(shapes["images"], np.float32), "raw": raw, "maps": maps}
    names = [value.name for value in session.get_outputs()]
    expected = dict(zip(names, session.run(names, feeds), strict=True))
    found = batch_detections(raw, maps, Settings(0.3, overlap, 30))
    np.testing.assert_array_equal(found["num_dets"], expected["num_dets"])
    most = found["num_dets"].max()
    assert 10 < most <= 30
    assert found["det_masks"].shape == (3, most, 16, 24)
    np.testing.assert_allclose(found["det_boxes"], expected["det_boxes"], atol=1e-4)
    np.testing.assert_array_equal(found["det_classes"], expected["det_classes"])
    np.testing.assert_allclose(found["det_masks"], expected["det_masks"][:, :most], atol=1e-5)
    assert not expected["det_masks"][:, most:].any()


def test_an_image_without_detections_has_one_empty_mask():
    found = batch_detections(crowd(0, nm=4), np.ones((3, 4, 8, 8), np.float32), Settings(conf_thres=1.0))
    assert not found["num_dets"].any()
    assert found["det_masks"].shape == (3, 1, 8, 8)
    assert not found["det_masks"].any()


def test_a_large_sum_overflows_to_zero_and_one_without_a_warning():
    raw = crowd(0, nm=1, batch=1)
    raw[:, -1] = np.where(np.arange(raw.shape[2]) % 2, 1e4, -1e4)
    with np.errstate(all="raise", under="ignore"):
        found = batch_detections(raw, np.full((1, 1, 30, 30), 1.0, np.float32), Settings(max_det=20))
    assert set(np.unique(found["det_masks"])) == {0.0, 1.0}


def test_parameters_are_read_and_checked():
    config = {"parameters": {"conf_thres": {"string_value": "0.5"}, "max_det": {"string_value": "7"},
                             "class_agnostic": {"string_value": "true"}}}  # fmt: skip
    assert Settings.of(config) == Settings(0.5, 0.45, 7, True)
    assert Settings.of({}) == Settings()
    for key, value in (("conf_thres", "2"), ("iou_thres", "nan"), ("max_det", "0"), ("max_det", "many")):
        with pytest.raises(ValueError, match=r"many|are 0 to 1"):
            Settings.of({"parameters": {key: {"string_value": value}}})


def test_the_file_needs_nothing_but_numpy():
    tree = ast.parse(Path(nms_model.__file__).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {
        "numpy",
        "triton_python_backend_utils",
    }
