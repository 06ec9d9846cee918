"""Segmentation networks with NMS inside the file and for DeepStream, made by the programs; and what `--check` finds.

References of their own: the evaluation loop's NMS and torchvision's ROIAlign on the plain file's outputs, a parser
after DeepStream-Yolo-Seg's documented layout. tests/unit/onnx_graph/test_mask_output.py tests the graphs by themselves.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from deepstream_parser import masked_objects_in, parse_masks_as_deepstream
from exported_files import export_onnx
from forms import FLAGS, FLAGS_OF, LOW, SIDE, Program, documented_commands, images, lively, with_outputs
from forms import run as run_file
from mask_graph import pooled
from onnx import numpy_helper
from random_networks import TINY, random_network, save_float, save_quantized, tiny_with

import export_qat
import export_yoloV9
from utils.core.errors import InputError
from utils.core.tasks import SEGMENT, Prediction
from utils.evaluation.detector import Detector
from utils.evaluation.nms import non_max_suppression
from utils.jobs.compare_outputs import check_onnx
from utils.jobs.compare_tensors import COEFFICIENTS, LIMITS, PIXELS, PROTOTYPES
from utils.jobs.open import Network, load_network
from utils.onnx_graph import deepstream, output_formats
from utils.onnx_graph.export import ExportConfig, ExportResult, export_forms
from utils.onnx_graph.output_formats import NmsSettings
from utils.onnx_graph.view import metadata_of
from utils.runners.onnxrt import OnnxRuntimeRunner

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small segmentation network with random weights, float and quantized, and a detector."""
    folder = tmp_path_factory.mktemp("mask_forms")
    floating = save_float(folder / "tiny.pt", lively(random_network(tiny_with("DSegment"))))
    return {
        "float": floating,
        "quantized": save_quantized(folder / "tiny-int8.pt", floating),
        "detector": save_float(folder / "detector.pt", random_network(TINY)),
    }


def run(path: Path, images: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in run_file(path, images).items()}


# --- NMS inside -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "typing", "nms", "dynamic"),
    [
        ("float", "weak", "onnx", "all"), ("float", "weak", "none", "none"), ("quantized", "weak", "onnx", "none"),
        ("quantized", "weak", "none", "batch"), ("quantized", "strong", "onnx", "batch"),
    ],
)  # fmt: skip
def test_masks_are_those_of_the_plain_file(
    kind: str, typing: str, nms: str, dynamic: str, weights: dict[str, Path], tmp_path: Path, program: Program
):
    shape = ["--dynamic", dynamic] if dynamic != "none" else ["--batch-size", 2]
    words = ["--weights", weights[kind], "--output", tmp_path / "net.onnx", "--imgsz", SIDE, *shape, "--nms", nms]
    words += ["--include", "onnx", "onnx_end2end", *FLAGS_OF[nms], "--mask-resolution", 28, "--typing", typing]
    code, out, err = program(export_qat.main, *words, "--simplify", "--pooler-scale", "0.25", "--sampling-ratio", "0")
    assert (code, err) == (0, [])
    batch = "batch" if dynamic != "none" else 2
    assert f"det_classes [{batch}, 40], det_masks [{batch}, 40, 784]" in "\n".join(out)
    if kind == "quantized":
        assert sum(line.endswith("properties hold") for line in out) == 2
        code, _, err = program(export_qat.main, "--verify", tmp_path / "net-end2end.onnx")
        assert (code, err) == (0, [])
    plain, found = run(tmp_path / "net.onnx", images()), run(tmp_path / "net-end2end.onnx", images())
    given = Prediction.of(plain, SEGMENT)
    for index, rows in enumerate(non_max_suppression(given, LOW, 0.6 if nms == "onnx" else 1.0, max_det=40)):
        count = int(found["num_dets"][index, 0])
        assert count == len(rows) > 10
        masks = found["det_masks"][index]
        assert not masks[count:].any()
        apart = np.abs(masks[:count].view(-1, 28, 28).numpy() - pooled(given, index, rows, 28).numpy())
        assert (apart.max((1, 2)) < 1e-3).mean() > 0.9  # equal scores may come in another order
        assert np.median(apart.max((1, 2))) < 2e-5
    entries = metadata_of(onnx.load(tmp_path / "net-end2end.onnx"))
    assert (entries["form"], entries["task"], entries["nm"]) == ("end-to-end", "segment", "8")
    assert entries["mask_resolution"] == "28"
    assert '"conf_thres": 0.5' in entries["nms"]


def test_half_has_masks_in_fp32(weights: dict[str, Path], tmp_path: Path, program: Program):
    words = ["--weights", weights["float"], "--output", tmp_path / "net.onnx", "--imgsz", SIDE, "--half"]
    code, out, err = program(export_qat.main, *words, "--include", "onnx_end2end", "--nms", "onnx", *FLAGS)
    assert (code, err) == (0, [])
    assert "det_masks [1, 40, 25600]" in out[0]
    assert run(tmp_path / "net.onnx", images(1))["det_masks"].dtype == torch.float32


# --- DeepStream -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float", "quantized"])
def test_deepstream_export(kind: str, weights: dict[str, Path], tmp_path: Path, program: Program):
    path = tmp_path / "net.onnx"
    words = ["--weights", weights[kind], "--size", SIDE, 96, "--output", path, "--device", "cpu", "--dynamic"]
    code, out, err = program(export_yoloV9.main, *words, "--nms", "onnx", *FLAGS)
    assert (code, err) == (0, [])
    assert any("images [batch, 3, 64, 96] -> output [batch, 40, 390], " in line for line in out)
    assert out[-4:-2] == [str(tmp_path / "labels.txt"), str(tmp_path / "config_infer_primary_yoloV9.txt")]
    pictures = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    results = run(with_outputs(path, tmp_path / "both.onnx", SEGMENT.outputs), pictures)
    given = Prediction.of(results, SEGMENT)
    for index, rows in enumerate(non_max_suppression(given, LOW, 0.6, max_det=40)):
        objects = parse_masks_as_deepstream(results["output"][index].numpy(), 96, 64, [LOW] * 10)
        expected = masked_objects_in(
            rows[:, :6].numpy(), pooled(given, index, rows, (16, 24)).numpy(), 96, 64, [LOW] * 10
        )
        assert len(objects) == len(expected) > 10
        for (box, mask), (other, wanted) in zip(objects, expected, strict=True):
            np.testing.assert_allclose(box, other, atol=0.05)
            np.testing.assert_allclose(mask, wanted, atol=1e-3)
    config = (tmp_path / deepstream.CONFIG).read_text()
    assert "confidence 0.5, overlap 0.6, 40 detections" in config
    assert {"infer-dims=3;64;96", "pre-cluster-threshold=0.5", "topk=40"} <= {*config.splitlines()}
    assert ("model-engine-file=net.engine\n" in config) == (kind == "quantized")
    assert (tmp_path / "labels.txt").read_text().startswith("class 0\n")
    with OnnxRuntimeRunner(path, threads=1) as runner, pytest.raises(InputError, match="has DeepStream's form; give"):
        Detector(runner, None)


@pytest.mark.parametrize(("kind", "batch"), [("detector", "batch"), ("quantized", 2)])
def test_deepstream_takes_files_with_nms_inside(kind, batch, weights, tmp_path: Path, program: Program):
    """The outputs that nvdsinfer_yolo's parsers look for, the masks of one as many rows as columns."""
    masks, path = kind == "quantized", tmp_path / "net.onnx"
    words = ["--weights", weights[kind], "--size", SIDE, 96, "--output", path, "--device", "cpu", "--nms", "onnx"]
    shape = ["--batch", 2] if masks else ["--dynamic"]
    code, out, err = program(export_yoloV9.main, *words, *FLAGS, *shape, "--end2end")
    assert (code, err) == (0, [])
    shapes = f"num_dets [{batch}, 1], det_boxes [{batch}, 40, 4], det_scores [{batch}, 40], det_classes [{batch}, 40], "
    assert f" images [{batch}, 3, 64, 96] -> {shapes}{f'det_masks [{batch}, 40, 25600], ' * masks}" in "\n".join(out)
    found = run_file(path, torch.zeros(2, 3, 64, 96))
    assert [str(array.dtype) for array in found.values()][:4] == ["int32", "float32", "float32", "int32"]
    written = {Path(file).name: Path(file).read_text() for file in out[-4 + masks : -2]}
    assert [*written] == [deepstream.CONFIG, deepstream.SERVER][: 2 - masks]
    assert f"func-name=NvDsInferYolo{'Mask' if masks else 'NMS'}\n" in written[deepstream.CONFIG]
    assert masks or 'model_name: "net"' in written[deepstream.SERVER]


# --- the check --------------------------------------------------------------------------------------------------------


FORMS = {
    "box": output_formats.end2end(NmsSettings("onnx", 40, 0.6, LOW), 28),
    "grid": output_formats.end2end(NmsSettings("onnx", 40, 0.6, LOW), 0),
    "none": output_formats.end2end(NmsSettings("none", 40, 0.6, LOW, agnostic=True), 28),
    "efficient": output_formats.end2end(NmsSettings("efficient", 40, 0.6, LOW), 28),
    "efficient grid": output_formats.end2end(NmsSettings("efficient", 40, 0.6, LOW), 0),
    "deepstream": output_formats.deepstream(NmsSettings("efficient", 40, 0.6, LOW)),
    "deepstream onnx": output_formats.deepstream(NmsSettings("onnx", 40, 0.6, LOW)),
}


@pytest.fixture(scope="module")
def exported(
    weights: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Network, dict[str, ExportResult]]]:
    """Network and results of every form, float and quantized."""
    found = {}
    for kind in ("float", "quantized"):
        folder = tmp_path_factory.mktemp(kind)
        network = load_network(weights[kind], CPU)
        files = {folder / f"{name}.onnx": form for name, form in FORMS.items()}
        results = export_forms(network.model, ExportConfig((SIDE, SIDE), 3), files, network.metadata())
        found[kind] = network, dict(zip(FORMS, results, strict=True))
    return found


@pytest.mark.parametrize("kind", ["float", "quantized"])
@pytest.mark.parametrize("form", FORMS)
def test_check_finds_nothing_in_good_files(kind: str, form: str, exported):
    network, results = exported[kind]
    found = check_onnx(results[form].path, network.model, images(4), results[form].quantizers)
    assert found.problems == ()


def moved_bins(graph: onnx.ModelProto) -> None:
    """Samples lie a cell lower or further right than they should: the constant that is taken from them is -0.5."""
    tensors = {tensor.name: tensor for tensor in graph.graph.initializer}
    for node in graph.graph.node:
        tensor = tensors.get(node.input[1]) if node.op_type == "Sub" else None
        if tensor is not None and numpy_helper.to_array(tensor).ravel().tolist() == [0.5]:
            tensor.CopyFrom(numpy_helper.from_array(np.array(-0.5, np.float32), tensor.name))


def other_anchor(graph: onnx.ModelProto) -> None:
    """Coefficients are those of the farthest box."""
    (node,) = (
        node for node in graph.graph.node
        if node.op_type == "TopK" and any(item.name == "largest" and item.i == 0 for item in node.attribute)
    )  # fmt: skip
    next(item for item in node.attribute if item.name == "largest").i = 1


def no_crop(graph: onnx.ModelProto) -> None:
    """The graph crops with boxes twice as large."""
    tensors = {tensor.name: tensor for tensor in graph.graph.initializer}
    for node in graph.graph.node:
        tensor = tensors.get(node.input[1]) if node.op_type == "Mul" else None
        if tensor is not None and numpy_helper.to_array(tensor).ravel().tolist() == [0.25]:
            tensor.CopyFrom(numpy_helper.from_array(np.array(0.5, np.float32), tensor.name))


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("box", moved_bins), ("none", moved_bins), ("efficient", moved_bins), ("deepstream", moved_bins),
        ("deepstream onnx", moved_bins), ("efficient", other_anchor), ("deepstream", other_anchor), ("grid", no_crop),
        ("efficient grid", no_crop),
    ],
)  # fmt: skip
def test_check_finds_mistakes(form: str, change, exported, tmp_path: Path):
    network, results = exported["float"]
    graph = onnx.load(results[form].path)
    before = graph.SerializeToString()
    change(graph)
    assert graph.SerializeToString() != before
    onnx.save(graph, tmp_path / "changed.onnx")
    problems = check_onnx(tmp_path / "changed.onnx", network.model, images(4)).problems
    assert len(problems) == 1
    assert "masks are not what the file's own coefficients and prototypes make" in problems[0]


HEAD = "model.11"


@pytest.mark.parametrize("kind", ["float", "quantized"])
@pytest.mark.parametrize("options", [{"typing": "strong"}, {"dynamic": "all", "simplify": True, "int8_weights": True}])
def test_check_finds_masks_alike_in_every_typing(kind, options, weights, tmp_path: Path):
    network, config = load_network(weights[kind], CPU), ExportConfig((SIDE, SIDE), **options)
    result = export_onnx(network.model, config, tmp_path / "a.onnx", network.metadata())
    found = check_onnx(result.path, network.model, images(3), result.quantizers, half=config.half)
    assert found.problems == ()
    masks = found.outputs if kind == "float" else found.stretches
    assert masks[COEFFICIENTS] < LIMITS[COEFFICIENTS][1 + config.half] / 2
    assert str(found).count(PROTOTYPES) == (1 if kind == "float" else 2)


def scaled(name: str, factor: object):
    def change(graph: onnx.ModelProto) -> None:
        tensor = next(item for item in graph.graph.initializer if item.name == f"{HEAD}.{name}")
        value = numpy_helper.to_array(tensor)
        value = (value * np.asarray(factor, value.dtype)).astype(value.dtype)
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))

    return change


def other_order(graph: onnx.ModelProto) -> None:
    """The prototypes' channels the other way round: sizes and statistics stay."""
    for tensor in graph.graph.initializer:
        if tensor.name in (f"{HEAD}.proto.conv.weight", f"{HEAD}.proto.conv.bias"):
            value = np.ascontiguousarray(numpy_helper.to_array(tensor)[::-1])
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


@pytest.mark.parametrize(
    ("kind", "change", "found"),
    [
        ("float", scaled("proto.conv.weight", 1.05), PROTOTYPES),
        ("float", scaled("proto.conv.bias", [0.0] + [1.0] * 7), PROTOTYPES),
        ("float", other_order, PIXELS),
        ("float", scaled("cv4.0.2.weight", 0.9), COEFFICIENTS),
        ("float", scaled("cv4.0.2.weight", -1), PIXELS),
        ("float", scaled("proto.conv.weight", np.nan), f"{PROTOTYPES}: nan of the largest"),
        ("quantized", scaled("proto.conv.bias", 1.3), PROTOTYPES),
        ("quantized", scaled("cv4.1.2.weight", -1), COEFFICIENTS),
        ("quantized", other_order, PIXELS),
    ],
)
def test_broken_masks_are_found_and_nothing_else(kind, change, found, weights, tmp_path: Path):
    network, config = load_network(weights[kind], CPU), ExportConfig((SIDE, SIDE), for_int8_kernels=False)
    result = export_onnx(network.model, config, tmp_path / "a.onnx", network.metadata())
    graph = onnx.load(result.path)
    change(graph)
    onnx.save(graph, tmp_path / "changed.onnx")
    problems = check_onnx(tmp_path / "changed.onnx", network.model, images(3), result.quantizers).problems
    assert any(problem.startswith(found) for problem in problems), problems
    assert all(problem.startswith((PROTOTYPES, COEFFICIENTS, PIXELS)) for problem in problems), problems


# --- docs/export.md ---------------------------------------------------------------------------------------------------


def test_documented_commands_do_what_their_rows_say(weights: dict[str, Path], tmp_path: Path, program: Program):
    names = {"qat_best_seg.pt": "quantized", "gelan-c-seg.pt": "float"}
    for name, kind in names.items():
        (tmp_path / name).write_bytes(weights[kind].read_bytes())
    made = []
    for command in documented_commands("## Output formats of segmentation networks"):
        _, file, *words = shlex.split(command)
        main = {"export_qat.py": export_qat.main, "export_yoloV9.py": export_yoloV9.main}[file]
        words = [str(tmp_path / word) if word in names else word for word in words]
        code, out, err = program(main, *words, "--size" if file == "export_yoloV9.py" else "--imgsz", SIDE)
        assert (code, err) == (0, []), command
        made += [line.partition(" -> ")[2].rpartition("], ")[0] + "]" for line in out if " -> " in line]
    four = "num_dets [1, 1], det_boxes [1, 100, 4], det_scores [1, 100], det_classes [1, 100]"
    assert made == [
        "output0 [1, 22, 84], output1 [1, 8, 16, 16]",
        f"{four}, det_masks [1, 100, 25600]",
        f"{four}, det_masks [1, 100, 3136]",
        f"{four}, det_masks [1, 100, 25600]",
        f"{four}, det_masks [1, 100, 16, 16]",
        f"{four.replace('[1,', '[batch,')}, det_masks [batch, 100, 25600]",
        "output [batch, 100, 262]",
        "output [1, 50, 262]",
    ]
