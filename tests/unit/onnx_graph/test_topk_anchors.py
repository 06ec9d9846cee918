"""Decoding of the best anchors only: the detections of a file that decodes all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from decoding_graph import ANCHORS, BATCH, CLASSES, head_graph, images
from onnx import ModelProto

from utils.core.input_spec import FLOATS
from utils.onnx_graph import export, output_formats, topk_anchors
from utils.onnx_graph.output_formats import NmsSettings
from utils.onnx_graph.passes.decode_boxes import decode_boxes

NAMES = ("num_dets", "det_boxes", "det_scores", "det_classes")


def run(model: ModelProto, feed: np.ndarray, names: tuple[str, ...] = NAMES) -> list[np.ndarray]:
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(list(names), {"images": feed})


def tied_images(batch: int = BATCH) -> np.ndarray:
    """Coarse values, so that scores are equal, within an anchor too."""
    return np.round(images(batch) / 4) * 4


def rows_decoded(model: ModelProto) -> int:
    """For how many anchors a softmax is computed, a side."""
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in onnx.shape_inference.infer_shapes(model, data_prop=True).graph.value_info
    }
    return next(shapes[node.output[0]][2] for node in model.graph.node if node.op_type == "Softmax")


@pytest.mark.parametrize("agnostic", [False, True])
@pytest.mark.parametrize("topk", [1, 5, ANCHORS - 1])
@pytest.mark.parametrize("opset", [17, 18])
def test_detections_are_those_of_all_anchors(monkeypatch: pytest.MonkeyPatch, topk: int, agnostic: bool, opset: int):
    graph = decode_boxes(head_graph("batch", opset=opset))
    attach = output_formats.end2end(NmsSettings("none", topk, conf_thres=0.3, agnostic=agnostic)).attach
    few = attach(graph)
    monkeypatch.setattr(output_formats, "keep_best_anchors", lambda model, count: None)
    every = attach(graph)
    assert (rows_decoded(few), rows_decoded(every)) == (topk, ANCHORS)
    for feed in (images(), tied_images(), images(5), np.full_like(images(), -1)):
        expected = run(every, feed)
        for one, other in zip(run(few, feed), expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
    assert run(every, images())[0].min() >= min(topk, 3)


def test_the_numbers_of_the_anchors_are_there_to_compare_with():
    """Ascending, and those of the highest scores."""
    few = output_formats.end2end(NmsSettings("none", 4)).attach(decode_boxes(head_graph()))
    for name, kind, shape in (
        (topk_anchors.ANCHORS, onnx.TensorProto.INT64, [BATCH, 4]),
        ("output0", onnx.TensorProto.FLOAT, [BATCH, 4 + CLASSES, 4]),
    ):
        few.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, shape))
    index, chosen = run(few, images(), (topk_anchors.ANCHORS, "output0"))
    (every,) = run(head_graph(), images(), ("output0",))
    expected = np.sort(np.argsort(-every[:, 4:].max(1), axis=1, kind="stable")[:, :4], axis=1)
    np.testing.assert_array_equal(index, expected)
    np.testing.assert_allclose(chosen, np.take_along_axis(every, index[:, None], 2), atol=2e-4)


@pytest.mark.parametrize(
    ("graph", "settings"),
    [
        (decode_boxes(head_graph()), NmsSettings("onnx", 5)),  # a worse anchor may be left
        (decode_boxes(head_graph()), NmsSettings("none", ANCHORS)),  # all are wanted
        (decode_boxes(head_graph(computed=True)), NmsSettings("none", 5)),  # their number may vary
        (head_graph(), NmsSettings("none", 5)),  # decodes as upstream does
    ],
)
def test_all_anchors_are_decoded_where_that_is_needed(graph: ModelProto, settings: NmsSettings):
    result = output_formats.end2end(settings).attach(graph)
    assert topk_anchors.ANCHORS not in {name for node in result.graph.node for name in node.output}
    assert [len(one) for one in run(result, images())] == [BATCH] * 4


@pytest.mark.parametrize("values", [np.array(8, np.float32), np.array([8], np.float32)], ids=["scalar", "one"])
def test_one_stride_for_all_anchors_is_not_theirs(values: np.ndarray):
    graph = decode_boxes(head_graph())
    node = next(node for node in graph.graph.node if node.op_type == "Mul")
    graph.graph.initializer.append(onnx.numpy_helper.from_array(values, "stride"))
    node.input[1] = "stride"
    assert rows_decoded(output_formats.end2end(NmsSettings("none", 3)).attach(graph)) == ANCHORS


@pytest.mark.parametrize(("exact", "few"), [(ANCHORS - 1, ("strong",)), (ANCHORS, ("weak", "strong"))])
def test_weakly_typed_files_choose_among_no_more_anchors_than_half_precision_can_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exact: int, few: tuple[str, ...]
):
    """TensorRT may sort their numbers in FP16."""
    numbers = np.arange(topk_anchors.WHOLE_IN_HALF + 2)
    assert np.flatnonzero(numbers.astype(np.float16).astype(int) != numbers).tolist() == [numbers[-1]]
    monkeypatch.setattr(topk_anchors, "WHOLE_IN_HALF", exact)
    form, path = output_formats.end2end(NmsSettings("none", 3)), tmp_path / "file.onnx"
    graph = decode_boxes(head_graph(opset=19))
    for typing in ("weak", "strong"):
        export._write(graph, form, path, {"typing": typing}, None, FLOATS)
        assert rows_decoded(onnx.load(path)) == (3 if typing in few else ANCHORS)
