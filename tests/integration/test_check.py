"""What `--check` finds: nothing in good files of every form, and each mistake that is put into one."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from exported_files import export_onnx
from forms import LOW, SIDE, images, write_networks
from onnx import ModelProto, numpy_helper

import export_qat
from utils.evaluation.data_yaml import load_data
from utils.jobs import export
from utils.jobs.compare_outputs import DIFFERENT_ROWS, OTHER_DETECTIONS, OTHER_MASKS, check_images, check_onnx
from utils.jobs.compare_tensors import COEFFICIENTS, LIMITS, PIXELS, PROTOTYPES, RESULT, STEPPED
from utils.jobs.open import Network, load_network
from utils.onnx_graph.export import ExportConfig, ExportResult, export_forms
from utils.onnx_graph.output_formats import NmsSettings, deepstream, end2end, plain

CPU, NAN = torch.device("cpu"), float("nan")
ONNX, EFFICIENT = NmsSettings("onnx", 40, 0.6, LOW), NmsSettings("efficient", 40, 0.6, LOW)
FORMS = {
    "detector": {
        "plain": plain(), "deepstream": deepstream(), "onnx": end2end(ONNX), "efficient": end2end(EFFICIENT),
        "none": end2end(NmsSettings("none", 20, 0.6, LOW)),
    },
    "masks": {
        "plain": plain(), "box": end2end(ONNX, 28), "grid": end2end(ONNX, 0), "efficient": end2end(EFFICIENT, 28),
        "none": end2end(NmsSettings("none", 40, 0.6, LOW, agnostic=True), 28),
        "efficient grid": end2end(EFFICIENT, 0), "deepstream": deepstream(EFFICIENT),
        "deepstream onnx": deepstream(ONNX),
    },
}  # fmt: skip
Change = Callable[[ModelProto], None]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_networks(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def exported(weights, tmp_path_factory) -> dict[str, tuple[Network, dict[str, ExportResult]]]:
    """Networks and results of every form, by task and kind, such as 'masks float'."""
    found = {}
    for task, forms in FORMS.items():
        for kind in ("float", "quantized"):
            folder, network = tmp_path_factory.mktemp(task), load_network(weights[f"{task} {kind}"], CPU)
            files = {folder / f"{name}.onnx": form for name, form in forms.items()}
            config = ExportConfig((SIDE, SIDE), 3, for_int8_kernels=task == "detector")
            results = export_forms(network.model, config, files, network.metadata())
            found[f"{task} {kind}"] = network, dict(zip(forms, results, strict=True))
    return found


@pytest.mark.parametrize("kind", ["float", "quantized"])
@pytest.mark.parametrize(("task", "form"), [(task, form) for task, forms in FORMS.items() for form in forms])
def test_nothing_in_good_files(task, kind, form, exported):
    network, results = exported[f"{task} {kind}"]
    parity = check_onnx(results[form].path, network.model, images(4), results[form].quantizers)
    assert parity.problems == ()
    assert (parity.stretches == {}) == (kind == "float")
    assert 0 < parity.outputs["box"] < (0.01 if kind == "float" else 2)  # single INT8 steps are no mistake


@pytest.mark.parametrize("kind", ["float", "quantized"])
@pytest.mark.parametrize("options", [{"typing": "strong"}, {"dynamic": "all", "simplify": True, "int8_weights": True}])
def test_masks_are_alike_in_every_typing(kind, options, weights, tmp_path):
    network, config = load_network(weights[f"masks {kind}"], CPU), ExportConfig((SIDE, SIDE), **options)
    result = export_onnx(network.model, config, tmp_path / "a.onnx", network.metadata())
    parity = check_onnx(result.path, network.model, images(3), result.quantizers, half=config.half)
    assert parity.problems == ()
    masks = parity.outputs if kind == "float" else parity.stretches
    assert masks[COEFFICIENTS] < LIMITS[COEFFICIENTS][1 + config.half] / 2


def edit(graph: ModelProto, name: str, how: Callable[[np.ndarray], np.ndarray]) -> None:
    (tensor,) = (tensor for tensor in graph.graph.initializer if tensor.name == name)
    value = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.array(how(value), value.dtype, order="C"), name))


def scaled(name: str, factor: object) -> Change:
    return lambda graph: edit(graph, name, lambda value: value * np.asarray(factor))


def constants(kind: str, old: float, new: float) -> Change:
    """Nodes of a type have `new` where they had the constant `old`."""

    def change(graph: ModelProto) -> None:
        tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
        names = {node.input[1] for node in graph.graph.node if node.op_type == kind}
        for name in names & tensors.keys():
            if tensors[name].ravel().tolist() == [old]:
                edit(graph, name, lambda value: np.full_like(value, new))

    return change


moved_bins = constants("Sub", 0.5, -0.5)  # samples lie a cell lower or further right than they should
no_crop = constants("Mul", 0.25, 0.5)  # the graph crops with boxes twice as large


def swapped_inputs(graph: ModelProto) -> None:
    """The last Sub reads its inputs the wrong way round."""
    node = [item for item in graph.graph.node if item.op_type == "Sub"][-1]
    node.input[0], node.input[1] = node.input[1], node.input[0]


def smaller_overlap(graph: ModelProto) -> None:
    node = next(item for item in graph.graph.node if item.op_type == "NonMaxSuppression")
    scaled(node.input[3], 0.5)(graph)


def half_boxes(graph: ModelProto) -> None:
    node = next(item for item in graph.graph.node if item.op_type == "Mul" and item.name.startswith("/end2end"))
    scaled(node.input[1], 0.8)(graph)


def other_anchor(graph: ModelProto) -> None:
    """Coefficients are those of the farthest box."""
    largest = [item for node in graph.graph.node if node.op_type == "TopK" for item in node.attribute]
    (attribute,) = (item for item in largest if item.name == "largest" and item.i == 0)
    attribute.i = 1


def other_order(graph: ModelProto) -> None:
    """The prototypes' channels the other way round: sizes and statistics stay."""
    for name in ("model.11.proto.conv.weight", "model.11.proto.conv.bias"):
        edit(graph, name, lambda value: value[::-1])


@pytest.mark.parametrize(
    ("network", "form", "change", "message"),
    [
        ("detector float", "plain", scaled("model.3.cv4.conv.weight", 1.1), "box: "),
        ("detector float", "plain", scaled("model.9.cv3.0.2.weight", 0.9), "score: "),
        ("detector float", "efficient", scaled("model.9.cv2.0.2.bias", 1.5), "box: "),
        ("detector float", "plain", scaled("model.9.cv2.0.2.bias", NAN), "box: nan px apart"),
        ("detector quantized", "plain", scaled("model.9.cv2.0.2.bias", NAN), f"{RESULT}: nan"),
        ("detector quantized", "plain", scaled("model.0.conv.bias", 1.2), STEPPED),
        ("detector quantized", "onnx", scaled("/model.0/act/Mul/scale", 1.1), STEPPED),
        ("detector quantized", "plain", scaled("model.9.cv2.0.2.bias", 1.5), RESULT),
        ("detector float", "deepstream", swapped_inputs, DIFFERENT_ROWS),
        ("detector float", "efficient", half_boxes, OTHER_DETECTIONS),
        ("detector quantized", "onnx", smaller_overlap, OTHER_DETECTIONS),
        *(("masks float", form, moved_bins, OTHER_MASKS)
          for form in ("box", "none", "efficient", "deepstream", "deepstream onnx")),
        *(("masks float", form, other_anchor, OTHER_MASKS) for form in ("efficient", "deepstream")),
        *(("masks float", form, no_crop, OTHER_MASKS) for form in ("grid", "efficient grid")),
        ("masks float", "plain", scaled("model.11.proto.conv.weight", 1.05), PROTOTYPES),
        ("masks float", "plain", scaled("model.11.proto.conv.bias", [0.0] + [1.0] * 7), PROTOTYPES),
        ("masks float", "plain", other_order, PIXELS),
        ("masks float", "plain", scaled("model.11.cv4.0.2.weight", 0.9), COEFFICIENTS),
        ("masks float", "plain", scaled("model.11.cv4.0.2.weight", -1), PIXELS),
        ("masks float", "plain", scaled("model.11.proto.conv.weight", NAN), f"{PROTOTYPES}: nan of the largest"),
        ("masks quantized", "plain", scaled("model.11.proto.conv.bias", 1.3), PROTOTYPES),
        ("masks quantized", "plain", scaled("model.11.cv4.1.2.weight", -1), COEFFICIENTS),
        ("masks quantized", "plain", other_order, PIXELS),
    ],
)  # fmt: skip
def test_mistakes_are_found(network, form, change, message, exported, tmp_path):
    original, results = exported[network]
    graph = onnx.load(results[form].path)
    before = graph.SerializeToString()
    change(graph)
    assert graph.SerializeToString() != before
    onnx.save(graph, tmp_path / "changed.onnx")
    problems = check_onnx(tmp_path / "changed.onnx", original.model, images(4), results[form].quantizers).problems
    assert any(problem.startswith(message) for problem in problems), problems
    of_masks = (PROTOTYPES, COEFFICIENTS, PIXELS, OTHER_MASKS)
    assert network.startswith("detector") or all(problem.startswith(of_masks) for problem in problems), problems


def test_a_file_that_differs_is_a_failure(weights, tmp_path, program, monkeypatch):
    original = export.export_forms

    def careless(model, *arguments):
        results = original(model, *arguments)
        with torch.no_grad():
            model.model[0].conv.bias.mul_(1.5)
        return results

    monkeypatch.setattr(export, "export_forms", careless)
    words = ["--weights", weights["detector float"], "--output", tmp_path / "net.onnx", "--imgsz", SIDE]
    code, out, err = program(export_qat.main, *words)
    assert (code, len(err), len(out)) == (1, 1, 1)  # and no next command
    assert f"{tmp_path / 'net.onnx'}: box: " in err[0]
    code, out, err = program(export_qat.main, *words, "--check", 0)
    assert (code, out[-1], err) == (0, "not compared with PyTorch (--check 0)", [])


@pytest.mark.parametrize(("form", "programs"), [("onnx", ["val_trt.py", "engine"]), ("efficient", ["engine"])])
def test_what_comes_next_can_run_the_file(form, programs, exported):
    """ONNX Runtime lacks TensorRT's plugin."""
    network, results = exported["detector float"]
    lines = list(export.engine_commands(network, ExportConfig(), [results[form]]))
    assert [program in line for program, line in zip(programs, lines, strict=True)] == [True] * len(lines)


def test_the_data_sets_images_are_taken(demo_data):
    batch = check_images(3, (96, 64), load_data(demo_data))
    assert batch.shape == (3, 3, 96, 64)
    assert 0 <= batch.min() < batch.max() <= 1
    assert torch.equal(check_images(2, (64, 96), None), check_images(2, (64, 96), None))
