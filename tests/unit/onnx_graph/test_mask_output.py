"""Masks in a file's graph, in ONNX Runtime, against torchvision's ROIAlign and the masks of the evaluation loop."""

import numpy as np
import onnx
import pytest
import torch
from deepstream_parser import masked_objects_in, parse_masks_as_deepstream
from mask_graph import FIXED, HEIGHT, WIDTH, pooled, prediction, raw_graph
from qdq_graph import results

from utils.core.tasks import DETECT, Prediction
from utils.evaluation.masks import Masks
from utils.evaluation.nms import non_max_suppression
from utils.onnx_graph import output_formats
from utils.onnx_graph.output_formats import NmsSettings
from utils.onnx_graph.view import drop_unused, metadata_of

ALL = NmsSettings("onnx", 60, 0.6, 0.3)


def run(model: onnx.ModelProto, found: Prediction, **more: np.ndarray) -> dict[str, np.ndarray]:
    batch, _, height, width = found.prototypes.shape
    images = np.zeros((batch, 3, height * 4, width * 4), np.float32)
    return results(model, images=images, raw=found.raw.numpy(), maps=found.prototypes.numpy(), **more)


def detections(found: Prediction, settings: NmsSettings) -> list[torch.Tensor]:
    overlap = 1.0 if settings.kind == "none" else settings.iou_thres
    return non_max_suppression(found, settings.conf_thres, overlap, max_det=settings.topk)


@pytest.mark.parametrize("side", [160, 56, 5])
@pytest.mark.parametrize("kind", ["onnx", "none"])
@pytest.mark.parametrize("dynamic", [(), ("batch",), tuple(FIXED)], ids=["static", "batch", "all"])
def test_masks_in_boxes_are_those_of_roi_align(side, kind, dynamic):
    settings = NmsSettings(kind, 60, 0.6, 0.3)
    model = output_formats.end2end(settings, side).attach(raw_graph(dynamic=dynamic))
    shape = [dim.dim_param or dim.dim_value for dim in model.graph.output[-1].type.tensor_type.shape.dim]
    assert (model.graph.output[-1].name, shape) == ("det_masks", ["batch" if dynamic else 3, 60, side * side])
    raw = prediction(1, 2, 96, 64) if "height" in dynamic else prediction()
    found = run(model, raw)
    counts = []
    for image, rows in enumerate(detections(raw, settings)):
        count = found["num_dets"][image, 0]
        counts.append(count)
        assert count == len(rows)
        np.testing.assert_allclose(found["det_boxes"][image, :count], rows[:, :4], atol=1e-4)
        masks = found["det_masks"][image].reshape(-1, side, side)
        np.testing.assert_allclose(masks[:count], pooled(raw, image, rows, side), atol=2e-5)
        assert not masks[count:].any()
    assert min(counts[0], *counts[2:], 61) > 30
    assert counts[1] == 0


@pytest.mark.parametrize("dynamic", [(), tuple(FIXED)], ids=["static", "all"])
def test_masks_on_the_grid_are_the_loops(dynamic):
    model = output_formats.end2end(ALL, 0).attach(raw_graph(dynamic=dynamic))
    raw = prediction()
    found = run(model, raw)
    assert found["det_masks"].shape == (3, 60, HEIGHT // 4, WIDTH // 4)
    rows = detections(raw, ALL)
    masks = Masks.of(raw, rows, (HEIGHT, WIDTH))
    for image, one in enumerate(rows):
        inside = masks.pixels(image, torch.arange(len(one))).numpy()
        np.testing.assert_array_equal(found["det_masks"][image, : len(one)] > 0.5, inside)
        assert not found["det_masks"][image, len(one) :].any()
        sums = np.einsum("kn,khw->nhw", raw.coefficients[image][:, one[:, 6].long()], raw.prototypes[image])
        shares = found["det_masks"][image, : len(one)]
        np.testing.assert_allclose(shares, np.where(shares > 0, 1 / (1 + np.exp(-sums)), 0), atol=2e-6)


@pytest.mark.parametrize("opset", [13, 17, 18, 20])
def test_operators_are_standard_ones_of_every_opset(opset):
    for form in (output_formats.end2end(ALL), output_formats.end2end(ALL, 0), output_formats.deepstream(ALL)):
        for dynamic in ((), ("batch",)):
            model = form.attach(raw_graph(opset, dynamic))
            assert {node.domain for node in model.graph.node} == {""}
            run(model, prediction())


# --- behind the plugin ------------------------------------------------------------------------------------------------


def without_plugin(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph behind TensorRT's plugin: what that returns are inputs."""
    plugin = next(node for node in model.graph.node if node.op_type == "EfficientNMS_TRT")
    values = [value for value in model.graph.output if value.name in plugin.output]
    model.graph.input.extend(values)
    model.graph.node.remove(plugin)
    for value in values:
        if len(model.graph.output) > 1:
            model.graph.output.remove(value)
    drop_unused(model)
    return model


@pytest.mark.parametrize("side", [32, 0])
def test_masks_behind_a_plugin_that_rounds_boxes_to_fp16(side):
    """The anchor is found again; the mask is cut out by the box as it was returned."""
    settings = NmsSettings("efficient", 60, 0.6, 0.3)
    model = output_formats.end2end(settings, side).attach(raw_graph(dynamic=tuple(FIXED)))
    assert [value.name for value in model.graph.output] == [*DETECT.detections, "det_masks"]
    raw = prediction(2)
    raw.raw[:, :2] += 600  # where FP16 has steps of half a pixel; the prototypes lie there too
    raw = Prediction(raw.raw, torch.nn.functional.pad(raw.prototypes, (150, 0, 150, 0)))
    expected = detections(raw, settings)
    given = {
        "num_dets": np.array([[len(rows)] for rows in expected], np.int32),
        "det_boxes": np.full((3, 60, 4), 7, np.float32),  # behind the last detection anything may lie
        "det_scores": np.zeros((3, 60), np.float32), "det_classes": np.zeros((3, 60), np.int32),
    }  # fmt: skip
    for image, rows in enumerate(expected):
        rows[:, :4] = rows[:, :4].half().float()
        given["det_boxes"][image, : len(rows)] = rows[:, :4]
    found = run(without_plugin(model), raw, **given)["det_masks"]
    for image, rows in enumerate(expected):
        if side:
            masks = pooled(raw, image, rows, side).flatten(1)
        else:
            size = tuple(4 * cells for cells in raw.prototypes.shape[2:])
            masks = Masks.of(raw, expected, size).pixels(image, torch.arange(len(rows)))
        one = found[image, : len(rows)]
        np.testing.assert_allclose(one if side else one > 0.5, masks, atol=2e-5)
        assert not found[image, len(rows) :].any()


# --- DeepStream -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [(), ("batch",)], ids=["static", "batch"])
def test_deepstream_parser_finds_boxes_and_masks(dynamic):
    model = output_formats.deepstream(ALL).attach(raw_graph(dynamic=dynamic))
    grid = (HEIGHT // 4, WIDTH // 4)
    raw = prediction()
    found = run(model, raw)
    assert list(found) == ["output"]
    assert found["output"].shape == (3, 60, 6 + grid[0] * grid[1])
    assert metadata_of(model)["nms"].startswith('{"kind": "onnx", "topk": 60, ')
    thresholds = [0.3, 0.9, 0.3, 0.5, 0.3]
    for image, rows in enumerate(detections(raw, ALL)):
        objects = parse_masks_as_deepstream(found["output"][image], WIDTH, HEIGHT, thresholds)
        masks = pooled(raw, image, rows, grid)
        expected = masked_objects_in(rows[:, :6].numpy(), masks.numpy(), WIDTH, HEIGHT, thresholds)
        assert len(objects) == len(expected)
        assert (len(objects) > 15) == (image != 1)
        for (box, mask), (other, wanted) in zip(objects, expected, strict=True):
            np.testing.assert_allclose(box, other, atol=1e-4)
            np.testing.assert_allclose(mask, wanted, atol=2e-5)
