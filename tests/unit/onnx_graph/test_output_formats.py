"""The output forms against references of their own, on made-up predictions: the evaluation loop's NMS, and parsers."""

import numpy as np
import onnx
import pytest
import torch
from deepstream_parser import objects_in, parse_as_deepstream
from onnx import TensorProto, helper
from qdq_graph import results

from utils.core.tasks import Prediction
from utils.evaluation.nms import non_max_suppression
from utils.onnx_graph import output_formats
from utils.onnx_graph.output_formats import NmsSettings

CLASSES, ANCHORS = 5, 90


def raw_graph(batch: int | str = 2, anchors: int | str = ANCHORS, opset: int = 17, classes: int = CLASSES):
    """A network whose predictions are its input."""
    shape = (batch, 4 + classes, anchors)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("images", "output0")]
    graph = helper.make_graph([helper.make_node("Identity", ["images"], ["output0"])], "raw", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def predictions(batch: int = 2, anchors: int = ANCHORS, classes: int = CLASSES, seed: int = 0) -> torch.Tensor:
    """Boxes that overlap a lot, and scores on a coarse grid, so that many are equal, as an INT8 network's are."""
    random = torch.Generator().manual_seed(seed)
    boxes = torch.rand(batch, 4, anchors, generator=random) * torch.tensor([60, 60, 40, 40]).view(1, 4, 1) + 8
    scores = torch.randint(0, 21, (batch, classes, anchors), generator=random) / 20
    return torch.cat([boxes, scores], 1)


def run(model: onnx.ModelProto, images: torch.Tensor) -> dict[str, np.ndarray]:
    """The outputs; their shapes are those that the graph says."""
    found = results(model, images=images.numpy())
    for value in model.graph.output:
        known = [dim.dim_value or None for dim in value.type.tensor_type.shape.dim]
        sides = zip(known, found[value.name].shape, strict=bool(known))
        assert all(side in (None, real) for side, real in sides)
    return found


def rows(found: dict[str, np.ndarray], image: int) -> np.ndarray:
    """Detections of an image as the loop gives them: x1, y1, x2, y2, score, class."""
    count = found["num_dets"][image, 0]
    parts = found["det_boxes"][image], found["det_scores"][image, :, None], found["det_classes"][image, :, None]
    table = np.concatenate(parts, 1)
    assert not table[count:].any()  # zeros behind the last detection
    return table[:count]


SETTINGS = {
    "defaults": NmsSettings("onnx"),
    "as in evaluation": NmsSettings("onnx", 300, 0.7, 0.001),
    "few": NmsSettings("onnx", 3),
    "agnostic": NmsSettings("onnx", agnostic=True),
    "agnostic, all": NmsSettings("onnx", 300, 0.6, 0.0, agnostic=True),
    "nothing": NmsSettings("onnx", conf_thres=1.0),
    "none": NmsSettings("none", 50),
    "none, all": NmsSettings("none", 600, conf_thres=0.0),
    "none, agnostic": NmsSettings("none", agnostic=True),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("shape", ["static", "dynamic"])
def test_detections_are_those_of_the_evaluation_loop(settings, shape):
    """Also in their order, where scores are equal. Without suppression, the loop suppresses nothing (overlap > 1)."""
    names = {"static": (2, ANCHORS), "dynamic": ("batch", "anchors")}[shape]
    model = output_formats.end2end(settings).attach(raw_graph(*names))
    raw = predictions()
    overlap = 1.0 if settings.kind == "none" else settings.iou_thres
    if settings.kind == "none" and settings.agnostic:
        best, label = raw[:, 4:].max(1, keepdim=True)
        raw = torch.cat([raw[:, :4], torch.zeros_like(raw[:, 4:]).scatter(1, label, best)], 1)
    expected = non_max_suppression(
        Prediction(raw), settings.conf_thres, overlap,
        max_det=settings.topk, agnostic=settings.agnostic and overlap < 1,
    )  # fmt: skip
    found = run(model, predictions())
    assert found["det_scores"].shape == (2, settings.topk)
    assert {name: value.dtype for name, value in found.items()} == {
        "num_dets": np.int32, "det_boxes": np.float32, "det_scores": np.float32, "det_classes": np.int32,
    }  # fmt: skip
    for image, wanted in enumerate(expected):
        np.testing.assert_allclose(rows(found, image), wanted.numpy(), atol=1e-4)
    assert settings.conf_thres == 1 or min(len(wanted) for wanted in expected) > 2


@pytest.mark.parametrize("opset", [13, 17, 18, 20])
def test_operators_are_those_of_every_opset(opset):
    for form in (
        output_formats.end2end(NmsSettings("onnx", agnostic=True)),
        output_formats.end2end(NmsSettings("none")),
        output_formats.deepstream(),
    ):
        model = form.attach(raw_graph(opset=opset))
        assert model.opset_import[0].version == opset
        run(model, predictions())


def test_batch_and_anchors_may_vary_and_a_image_without_detections_is_fine():
    model = output_formats.end2end(NmsSettings("onnx", 30)).attach(raw_graph("batch", "anchors"))
    for batch, anchors in ((1, 4), (3, 50)):
        raw = predictions(batch, anchors)
        raw[-1, 4:] = 0
        found = run(model, raw)
        assert found["num_dets"][-1, 0] == 0
        assert found["det_boxes"].shape == (batch, 30, 4)
        for image, wanted in enumerate(non_max_suppression(Prediction(raw), 0.25, 0.45, max_det=30)):
            np.testing.assert_allclose(rows(found, image), wanted.numpy(), atol=1e-4)


@pytest.mark.parametrize("batch", [2, "batch"])
def test_plugin_gets_what_its_description_asks_for(batch):
    """Its inputs are computed and compared; the plugin itself runs in TensorRT only."""
    settings = NmsSettings("efficient", 42, 0.5, 0.3, agnostic=True)
    model = output_formats.end2end(settings).attach(raw_graph(batch))
    onnx.checker.check_model(model, full_check=True)
    assert [(o.name, o.type.tensor_type.elem_type) for o in model.graph.output] == [
        ("num_dets", TensorProto.INT32), ("det_boxes", TensorProto.FLOAT),
        ("det_scores", TensorProto.FLOAT), ("det_classes", TensorProto.INT32),
    ]  # fmt: skip
    node = model.graph.node[-1]
    assert (node.op_type, list(node.output)) == ("EfficientNMS_TRT", [o.name for o in model.graph.output])
    attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    assert attributes.pop("iou_threshold") == pytest.approx(0.5)
    assert attributes.pop("score_threshold") == pytest.approx(0.3)
    assert attributes == {
        "plugin_version": b"1", "background_class": -1, "score_activation": 0, "box_coding": 0,
        "class_agnostic": 1, "max_output_boxes": 42,
    }  # fmt: skip
    inputs = list(node.input)
    del model.graph.node[-1], model.graph.output[:]
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in inputs)
    raw = predictions()
    boxes, scores = results(model, check=False, images=raw.numpy()).values()
    middle, size = raw[:, :2].mT.numpy(), raw[:, 2:4].mT.numpy()
    np.testing.assert_allclose(boxes, np.concatenate([middle - size / 2, middle + size / 2], 2), atol=1e-5)
    np.testing.assert_array_equal(scores, raw[:, 4:].mT.numpy())


@pytest.mark.parametrize("names", [(2, ANCHORS), ("batch", ANCHORS), ("batch", "anchors")])
def test_deepstream_parser_finds_the_boxes(names):
    model = output_formats.deepstream().attach(raw_graph(*names))
    assert [value.name for value in model.graph.output] == ["output"]
    raw = predictions()
    found = run(model, raw)["output"]
    assert (found.shape, found.dtype) == ((2, ANCHORS, 6), np.float32)
    thresholds = [float(np.float32(value)) for value in (0.25, 0.9, 0.25, 0.5, 0.25)]
    for image in range(2):
        objects = parse_as_deepstream(found[image], 64, 64, thresholds)
        expected = objects_in(raw[image].numpy(), 64, 64, thresholds)
        assert 10 < len(expected) == len(objects) < ANCHORS
        np.testing.assert_allclose(objects, expected, atol=1e-4)
