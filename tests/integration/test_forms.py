"""Files with NMS inside and files for DeepStream, made by the programs; and the check that compares them with PyTorch.

References of their own: the evaluation loop's NMS on the plain file's predictions, a parser after DeepStream-Yolo's
documented layout, torch's main branch.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from deepstream_parser import objects_in, parse_as_deepstream
from forms import FLAGS_OF, LOW, SIDE, Program, documented_commands, images, lively, run, with_outputs
from onnx import numpy_helper
from random_networks import TINY, random_network, save_float, save_quantized

import export_qat
import export_yoloV9
from utils import upstream
from utils.core.tasks import DETECT, Prediction
from utils.evaluation.data_yaml import load_data
from utils.evaluation.nms import non_max_suppression
from utils.jobs import compare_outputs, export
from utils.jobs.open import Network, load_network
from utils.onnx_graph import deepstream, output_formats
from utils.onnx_graph.export import ExportConfig, export_forms
from utils.onnx_graph.output_formats import NmsSettings
from utils.onnx_graph.view import metadata_of
from utils.upstream.description import HEADS, TRAINING_HEADS

# two branches: the head's first three inputs are the auxiliary one's
DUAL = copy.deepcopy(TINY) | {"head": [*TINY["head"][:-1], [[3, 4, 5, 3, 8, 6], 1, "DualDDetect", ["nc"]]]}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small network with random weights: as trained with an auxiliary branch, without, and quantized."""
    folder = tmp_path_factory.mktemp("forms")
    floating = save_float(folder / "tiny.pt", lively(random_network(TINY)))
    return {
        "float": floating,
        "quantized": save_quantized(folder / "tiny-int8.pt", floating),
        "dual": save_float(folder / "dual.pt", lively(random_network(DUAL))),
    }


# --- NMS inside -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float", "quantized"])
@pytest.mark.parametrize("nms", ["onnx", "none"])
@pytest.mark.parametrize("dynamic", ["none", "all"])
def test_detections_are_the_loops(
    kind: str, nms: str, dynamic: str, weights: dict[str, Path], tmp_path: Path, program: Program
):
    shape = ["--dynamic"] if dynamic == "all" else ["--batch-size", 2]
    words = ["--weights", weights[kind], "--output", tmp_path / "net.onnx", "--imgsz", SIDE, *shape, "--nms", nms]
    code, out, err = program(export_qat.main, *words, "--include", "onnx", "onnx_end2end", *FLAGS_OF[nms])
    assert (code, err) == (0, [])
    lines = [line for line in out if ".onnx: " in line]
    assert [line.split(": ")[0] for line in lines] == [f"{tmp_path}/net.onnx", f"{tmp_path}/net-end2end.onnx"]
    batch = "batch" if dynamic == "all" else 2
    assert f"num_dets [{batch}, 1], det_boxes [{batch}, 40, 4], det_scores [{batch}, 40]" in lines[1]
    raw = run(tmp_path / "net.onnx", images())["output0"]
    found = run(tmp_path / "net-end2end.onnx", images())
    overlap = 0.6 if nms == "onnx" else 1.0
    prediction = Prediction(torch.from_numpy(raw))
    for index, expected in enumerate(non_max_suppression(prediction, LOW, overlap, max_det=40)):
        count = found["num_dets"][index, 0]
        assert count == len(expected) > 10
        np.testing.assert_allclose(found["det_boxes"][index, :count], expected[:, :4], atol=1e-2)
        np.testing.assert_allclose(found["det_scores"][index, :count], expected[:, 4], atol=1e-6)
        np.testing.assert_array_equal(found["det_classes"][index, :count], expected[:, 5])
    entries = metadata_of(onnx.load(tmp_path / "net-end2end.onnx"))
    assert (entries["form"], entries["kind"]) == ("end-to-end", "float" if kind == "float" else "qat")


# --- the check --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(weights: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    """Network and results of every form, float and quantized."""
    found = {}
    every = [
        output_formats.plain(), output_formats.deepstream(), output_formats.end2end(NmsSettings("onnx", 40, 0.6, LOW)),
        output_formats.end2end(NmsSettings("efficient")), output_formats.end2end(NmsSettings("none", 20, 0.6, LOW)),
    ]  # fmt: skip
    for kind in ("float", "quantized"):
        folder = tmp_path_factory.mktemp(kind)
        network = load_network(weights[kind], torch.device("cpu"))
        files = {folder / f"{index}.onnx": form for index, form in enumerate(every)}
        results = export_forms(network.model, ExportConfig((SIDE, SIDE), 3), files, network.metadata())
        found[kind] = network, dict(zip(("plain", "deepstream", "onnx", "efficient", "none"), results, strict=True))
    return found


def checked(network: Network, result, path: Path | None = None) -> compare_outputs.Parity:
    return compare_outputs.check_onnx(path or result.path, network.model, images(4), result.quantizers)


@pytest.mark.parametrize("kind", ["float", "quantized"])
@pytest.mark.parametrize("form", ["plain", "deepstream", "onnx", "efficient", "none"])
def test_check_finds_nothing_in_good_files(kind: str, form: str, exported: dict[str, tuple]):
    network, results = exported[kind]
    found = checked(network, results[form])
    assert found.problems == ()
    assert (found.stretches == {}) == (kind == "float")
    assert 0 < found.outputs["box"] < (0.01 if kind == "float" else 2)  # single INT8 steps are no mistake


@pytest.mark.parametrize(("form", "programs"), [("onnx", ["val_trt.py", "engine"]), ("efficient", ["engine"])])
def test_what_comes_next_can_run_the_file(form: str, programs: list[str], exported: dict[str, tuple]):
    """ONNX Runtime lacks TensorRT's plugin."""
    network, results = exported["float"]
    lines = list(export.engine_commands(network, ExportConfig(), [results[form]]))
    assert [program in line for program, line in zip(programs, lines, strict=True)] == [True] * len(lines)


def scaled(name: str, factor: float) -> Callable[[onnx.ModelProto], None]:
    def change(graph: onnx.ModelProto) -> None:
        tensor = next(item for item in graph.graph.initializer if item.name == name)
        value = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array((value * factor).astype(value.dtype), name))

    return change


def swapped_inputs(kind: str) -> Callable[[onnx.ModelProto], None]:
    """The tail's last node of a kind reads its first two inputs the wrong way round."""

    def change(graph: onnx.ModelProto) -> None:
        node = [item for item in graph.graph.node if item.op_type == kind][-1]
        node.input[0], node.input[1] = node.input[1], node.input[0]

    return change


def smaller_overlap(graph: onnx.ModelProto) -> None:
    node = next(item for item in graph.graph.node if item.op_type == "NonMaxSuppression")
    scaled(node.input[3], 0.5)(graph)


def half_boxes(graph: onnx.ModelProto) -> None:
    node = next(item for item in graph.graph.node if item.op_type == "Mul" and item.name.startswith("/end2end"))
    scaled(node.input[1], 0.8)(graph)


@pytest.mark.parametrize(
    ("kind", "form", "change", "message"),
    [
        ("float", "plain", scaled("model.3.cv4.conv.weight", 1.1), "box: "),
        ("float", "plain", scaled("model.9.cv3.0.2.weight", 0.9), "score: "),
        ("float", "efficient", scaled("model.9.cv2.0.2.bias", 1.5), "box: "),
        ("float", "plain", scaled("model.9.cv2.0.2.bias", float("nan")), "box: nan px apart"),
        ("quantized", "plain", scaled("model.9.cv2.0.2.bias", float("nan")), "result behind equal INT8 values: nan"),
        ("quantized", "plain", scaled("model.0.conv.bias", 1.2), "share of INT8 values: "),
        ("quantized", "onnx", scaled("/model.0/act/Mul/scale", 1.1), "share of INT8 values: "),
        ("quantized", "plain", scaled("model.9.cv2.0.2.bias", 1.5), "result behind equal INT8 values: "),
        ("float", "deepstream", swapped_inputs("Sub"), "the rows are not the predictions"),
        ("float", "efficient", half_boxes, "detections differ from those of the evaluation loop's NMS"),
        ("quantized", "onnx", smaller_overlap, "detections differ from those of the evaluation loop's NMS"),
    ],
)
def test_check_finds_mistakes(kind: str, form: str, change, message: str, exported: dict[str, tuple], tmp_path: Path):
    network, results = exported[kind]
    graph = onnx.load(results[form].path)
    change(graph)
    onnx.save(graph, tmp_path / "changed.onnx")
    problems = checked(network, results[form], tmp_path / "changed.onnx").problems
    assert any(message in problem for problem in problems), problems


def test_a_file_that_differs_is_a_failure(
    weights: dict[str, Path], tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
):
    original = export.export_forms

    def careless(model, *arguments):
        results = original(model, *arguments)
        with torch.no_grad():
            model.model[0].conv.bias.mul_(1.5)
        return results

    monkeypatch.setattr(export, "export_forms", careless)
    words = ["--weights", weights["float"], "--output", tmp_path / "net.onnx", "--imgsz", SIDE]
    code, out, err = program(export_qat.main, *words)
    assert (code, len(err)) == (1, 1)
    assert err[0].startswith("error: differs from PyTorch, see --debug: ")
    assert f"{tmp_path / 'net.onnx'}: box: " in err[0]
    assert (len(out), out[0].startswith(f"{tmp_path / 'net.onnx'}: ")) == (1, True)  # and no next command
    code, out, err = program(export_qat.main, *words, "--check", 0)
    assert (code, out[-1], err) == (0, "not compared with PyTorch (--check 0)", [])


def test_check_takes_the_data_sets_images(demo_data: Path):
    images = export.check_images(3, (96, 64), load_data(demo_data))
    assert images.shape == (3, 3, 96, 64)
    assert 0 <= images.min() < images.max() <= 1
    made = export.check_images(2, (64, 96), None)
    assert torch.equal(made, export.check_images(2, (64, 96), None))
    assert made.shape == (2, 3, 64, 96)


# --- DeepStream -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float", "quantized", "dual"])
def test_deepstream_export(kind: str, weights: dict[str, Path], tmp_path: Path, program: Program):
    path = tmp_path / "net.onnx"
    shape = ["--dynamic"] if kind != "dual" else ["--batch", 2]
    words = ["--weights", weights[kind], "--size", SIDE, 96, "--output", path, "--device", "cpu", "--simplify"]
    code, out, err = program(export_yoloV9.main, *words, *shape)
    assert (code, err) == (0, [])
    batch = 2 if kind == "dual" else "batch"
    model, head, types = {
        "float": ("not quantized", "DDetect", "FP32"),
        "dual": ("not quantized", "DualDDetect", "FP32"),
        "quantized": ("QAT", "DDetect", "INT8 and FP32 (weakly typed)"),
    }[kind]
    start = f"{path}: {model}, {head}, {types}, opset 17, images [{batch}, 3, 64, 96] -> output [{batch}, 126, 6], "
    assert any(line.startswith(start) for line in out)
    assert out[-4:-2] == [str(tmp_path / "labels.txt"), str(tmp_path / "config_infer_primary_yoloV9.txt")]
    there = f"next, on the machine with the GPU: cd {tmp_path} && trtexec "
    assert out[-2].startswith(there if kind == "quantized" else "next: a pipeline")
    assert out[-1] == "matches PyTorch (rounding only)"

    images = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    results = run(with_outputs(path, tmp_path / "both.onnx", DETECT.outputs), images)
    if kind == "quantized":  # in torch, or in another file, it is single INT8 steps apart: see the check
        raw = results["output0"]
    else:
        with torch.no_grad():
            result = upstream.load_float(weights[kind], (*HEADS, *TRAINING_HEADS)).model(images)[0]
        raw = (result[1] if kind == "dual" else result).numpy()
    for rows, prediction in zip(results["output"], raw, strict=True):
        objects, expected = parse_as_deepstream(rows, 96, 64, [LOW] * 10), objects_in(prediction, 96, 64, [LOW] * 10)
        assert len(objects) == len(expected) > 50
        np.testing.assert_allclose(objects, expected, atol=0.05)

    assert (tmp_path / "labels.txt").read_text() == "".join(f"class {index}\n" for index in range(10))
    config = (tmp_path / deepstream.CONFIG).read_text()
    lines = {"infer-dims=3;64;96", "num-detected-classes=10", f"batch-size={2 if kind == 'dual' else 1}"}
    assert lines <= {*config.splitlines()}
    command = deepstream.trtexec_command("net.onnx", "net.engine", (64, 96), typing="weak", dynamic=True)
    assert (command in config) == out[-2].endswith(command) == (kind == "quantized")


def test_a_training_network_exports_its_main_branch_only(weights: dict[str, Path], tmp_path: Path, program: Program):
    """Nothing of the auxiliary branch is left in the file, not even where shapes are computed."""
    path = tmp_path / "dual.onnx"
    shape = ["--dynamic"]
    assert program(export_qat.main, "--weights", weights["dual"], "--output", path, "--imgsz", SIDE, *shape)[0] == 0
    plain = tmp_path / "plain.onnx"
    assert program(export_qat.main, "--weights", weights["float"], "--output", plain, "--imgsz", SIDE, *shape)[0] == 0
    kinds = [sorted(node.op_type for node in onnx.load(file).graph.node) for file in (path, plain)]
    assert kinds[0] == kinds[1]


# --- docs/export.md ---------------------------------------------------------------------------------------------------


def test_documented_commands_do_what_their_rows_say(weights: dict[str, Path], tmp_path: Path, program: Program):
    commands = documented_commands("## Output formats")
    assert len(commands) >= 9
    names = {"yolov9-c-converted.pt": "float", "qat_best.pt": "quantized", "yolov9-c.pt": "dual"}
    for name, kind in names.items():
        (tmp_path / name).write_bytes(weights[kind].read_bytes())
    made: set[str] = set()
    for command in commands:
        _, file, *words = shlex.split(command)
        main = {"export_qat.py": export_qat.main, "export_yoloV9.py": export_yoloV9.main}[file]
        words = [str(tmp_path / word) if word in names else word for word in words]
        code, out, err = program(main, *words, "--size" if file == "export_yoloV9.py" else "--imgsz", SIDE)
        assert (code, err) == (0, []), command
        assert any(line.startswith(str(tmp_path)) for line in out), command
        made |= {line.partition(" -> ")[2].split()[0] for line in out if " -> " in line}
    assert made == {"output0", "num_dets", "output"}
