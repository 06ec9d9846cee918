"""Files with NMS inside and files for DeepStream, made by the programs, of detectors and of networks with masks.

References of their own: the evaluation loop's NMS and torchvision's ROIAlign on the plain file's outputs, parsers after
the documented layouts of DeepStream-Yolo and DeepStream-Yolo-Seg, torch's main branch. `tests/unit/onnx_graph` tests
the graphs by themselves.
"""

import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from deepstream_parser import masked_objects_in, objects_in, parse_as_deepstream, parse_masks_as_deepstream
from forms import FLAGS, FLAGS_OF, LOW, SIDE, documented_commands, images, run, with_outputs, write_networks
from mask_graph import pooled

import export_qat
import export_yoloV9
from utils import upstream
from utils.core.errors import InputError
from utils.core.tasks import DETECT, SEGMENT, Prediction
from utils.evaluation.detector import Detector
from utils.evaluation.nms import non_max_suppression
from utils.onnx_graph import deepstream
from utils.onnx_graph.view import metadata_of
from utils.runners.onnxrt import OnnxRuntimeRunner
from utils.upstream.description import HEADS, TRAINING_HEADS


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_networks(tmp_path_factory.mktemp("weights"))


def prediction_of(results: dict[str, np.ndarray]) -> Prediction:
    return Prediction.of({name: torch.from_numpy(value) for name, value in results.items()}, SEGMENT)


# --- NMS inside -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float", "quantized"])
@pytest.mark.parametrize("nms", ["onnx", "none"])
@pytest.mark.parametrize("dynamic", ["none", "all"])
def test_detections_are_the_loops(kind, nms, dynamic, weights, tmp_path, program):
    shape = ["--dynamic"] if dynamic == "all" else ["--batch-size", 2]
    weight, path = weights[f"detector {kind}"], tmp_path / "net.onnx"
    words = ["--weights", weight, "--output", path, "--imgsz", SIDE, *shape, "--nms", nms]
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


@pytest.mark.parametrize(
    ("kind", "typing", "nms", "dynamic"),
    [
        ("float", "weak", "onnx", "all"), ("float", "weak", "none", "none"), ("quantized", "weak", "onnx", "none"),
        ("quantized", "weak", "none", "batch"), ("quantized", "strong", "onnx", "batch"),
    ],
)  # fmt: skip
def test_masks_are_those_of_the_plain_file(kind, typing, nms, dynamic, weights, tmp_path, program):
    shape = ["--dynamic", dynamic] if dynamic != "none" else ["--batch-size", 2]
    weight, path = weights[f"masks {kind}"], tmp_path / "net.onnx"
    words = ["--weights", weight, "--output", path, "--imgsz", SIDE, *shape, "--nms", nms]
    words += ["--include", "onnx", "onnx_end2end", *FLAGS_OF[nms], "--mask-resolution", 28, "--typing", typing]
    code, out, err = program(export_qat.main, *words, "--simplify", "--pooler-scale", "0.25", "--sampling-ratio", "0")
    assert (code, err) == (0, [])
    batch = "batch" if dynamic != "none" else 2
    assert f"det_classes [{batch}, 40], det_masks [{batch}, 40, 784]" in "\n".join(out)
    if kind == "quantized":
        assert sum(line.endswith("properties hold") for line in out) == 2
        code, _, err = program(export_qat.main, "--verify", tmp_path / "net-end2end.onnx")
        assert (code, err) == (0, [])
    found = run(tmp_path / "net-end2end.onnx", images())
    given = prediction_of(run(path, images()))
    for index, rows in enumerate(non_max_suppression(given, LOW, 0.6 if nms == "onnx" else 1.0, max_det=40)):
        count = int(found["num_dets"][index, 0])
        assert count == len(rows) > 10
        masks = found["det_masks"][index]
        assert not masks[count:].any()
        apart = np.abs(masks[:count].reshape(-1, 28, 28) - pooled(given, index, rows, 28).numpy())
        assert (apart.max((1, 2)) < 1e-3).mean() > 0.9  # equal scores may come in another order
        assert np.median(apart.max((1, 2))) < 2e-5
    entries = metadata_of(onnx.load(tmp_path / "net-end2end.onnx"))
    assert (entries["form"], entries["task"], entries["nm"]) == ("end-to-end", "segment", "8")
    assert entries["mask_resolution"] == "28"
    assert '"conf_thres": 0.5' in entries["nms"]


# --- DeepStream -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float", "quantized", "dual"])
def test_deepstream_export(kind, weights, tmp_path, program):
    path, network = tmp_path / "net.onnx", "dual" if kind == "dual" else f"detector {kind}"
    shape = ["--dynamic"] if kind != "dual" else ["--batch", 2]
    words = ["--weights", weights[network], "--size", SIDE, 96, "--output", path, "--device", "cpu", "--simplify"]
    code, out, err = program(export_yoloV9.main, *words, *shape)
    assert (code, err) == (0, [])
    batch = 2 if kind == "dual" else "batch"
    model, head, types = {
        "float": ("not quantized", "DDetect", "FP32"),
        "dual": ("not quantized", "DDetect", "FP32"),
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
            result = upstream.load_float(weights[network], (*HEADS, *TRAINING_HEADS)).model(images)[0]
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


def test_a_training_network_exports_its_main_branch_only(weights, tmp_path, program):
    """Nothing of the auxiliary branch is left in the file, not even where shapes are computed."""
    path = tmp_path / "dual.onnx"
    shape = ["--dynamic"]
    assert program(export_qat.main, "--weights", weights["dual"], "--output", path, "--imgsz", SIDE, *shape)[0] == 0
    plain = tmp_path / "plain.onnx"
    words = ("--weights", weights["detector float"], "--output", plain, "--imgsz", SIDE, *shape)
    assert program(export_qat.main, *words)[0] == 0
    kinds = [sorted(node.op_type for node in onnx.load(file).graph.node) for file in (path, plain)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("kind", ["float", "quantized"])
def test_deepstream_export_with_masks(kind, weights, tmp_path, program):
    path = tmp_path / "net.onnx"
    words = ["--weights", weights[f"masks {kind}"], "--size", SIDE, 96, "--output", path, "--dynamic"]
    code, out, err = program(export_yoloV9.main, *words, "--nms", "onnx", *FLAGS)
    assert (code, err) == (0, [])
    assert any("images [batch, 3, 64, 96] -> output [batch, 40, 390], " in line for line in out)
    assert out[-4:-2] == [str(tmp_path / "labels.txt"), str(tmp_path / "config_infer_primary_yoloV9.txt")]
    pictures = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    results = run(with_outputs(path, tmp_path / "both.onnx", SEGMENT.outputs), pictures)
    given = prediction_of(results)
    for index, rows in enumerate(non_max_suppression(given, LOW, 0.6, max_det=40)):
        objects = parse_masks_as_deepstream(results["output"][index], 96, 64, [LOW] * 10)
        expected = masked_objects_in(
            rows[:, :6].numpy(), pooled(given, index, rows, (16, 24)).numpy(), 96, 64, [LOW] * 10
        )
        assert len(objects) == len(expected) > 10
        for (box, mask), (other, wanted) in zip(objects, expected, strict=True):
            np.testing.assert_allclose(box, other, atol=0.05)
            np.testing.assert_allclose(mask, wanted, atol=1e-3)
    config = (tmp_path / deepstream.CONFIG).read_text()
    assert {"infer-dims=3;64;96", "pre-cluster-threshold=0.5", "topk=40"} <= {*config.splitlines()}
    assert ("model-engine-file=net.engine\n" in config) == (kind == "quantized")
    assert (tmp_path / "labels.txt").read_text().startswith("class 0\n")
    with OnnxRuntimeRunner(path, threads=1) as runner, pytest.raises(InputError, match="has DeepStream's form; give"):
        Detector(runner, None)


@pytest.mark.parametrize(("network", "batch"), [("detector float", "batch"), ("masks quantized", 2)])
def test_deepstream_takes_files_with_nms_inside(network, batch, weights, tmp_path, program):
    """The outputs that nvdsinfer_yolo's parsers look for, the masks of one as many rows as columns."""
    masks, path = network == "masks quantized", tmp_path / "net.onnx"
    words = ["--weights", weights[network], "--size", SIDE, 96, "--output", path, "--nms", "onnx"]
    shape = ["--batch", 2] if masks else ["--dynamic"]
    code, out, err = program(export_yoloV9.main, *words, *FLAGS, *shape, "--end2end")
    assert (code, err) == (0, [])
    shapes = f"num_dets [{batch}, 1], det_boxes [{batch}, 40, 4], det_scores [{batch}, 40], det_classes [{batch}, 40], "
    assert f" images [{batch}, 3, 64, 96] -> {shapes}{f'det_masks [{batch}, 40, 25600], ' * masks}" in "\n".join(out)
    found = run(path, torch.zeros(2, 3, 64, 96))
    assert [str(array.dtype) for array in found.values()][:4] == ["int32", "float32", "float32", "int32"]
    written = {Path(file).name: Path(file).read_text() for file in out[-4 + masks : -2]}
    assert [*written] == [deepstream.CONFIG, deepstream.SERVER][: 2 - masks]
    assert f"func-name=NvDsInferYolo{'Mask' if masks else 'NMS'}\n" in written[deepstream.CONFIG]
    assert masks or 'model_name: "net"' in written[deepstream.SERVER]


# --- docs/export.md ---------------------------------------------------------------------------------------------------

FOUR = "num_dets [1, 1], det_boxes [1, 100, 4], det_scores [1, 100], det_classes [1, 100]"
FOUR_DYNAMIC = FOUR.replace("[1,", "[batch,")
DOCUMENTED = {  # heading → names of checkpoints there, and the outputs of each row
    "## Output formats": (
        {"yolov9-c-converted.pt": "detector float", "qat_best.pt": "detector quantized", "yolov9-c.pt": "dual"},
        [*["output0 [1, 14, 84]"] * 4, FOUR, FOUR, FOUR, FOUR_DYNAMIC, "output [batch, 84, 6]", "output [4, 84, 6]"],
    ),
    "## Output formats of segmentation networks": (
        {"qat_best_seg.pt": "masks quantized", "gelan-c-seg.pt": "masks float"},
        [
            "output0 [1, 22, 84], output1 [1, 8, 16, 16]",
            *(f"{FOUR}, det_masks [1, 100, {shape}]" for shape in ("25600", "3136", "25600", "16, 16")),
            f"{FOUR_DYNAMIC}, det_masks [batch, 100, 25600]",
            "output [batch, 100, 262]",
            "output [1, 50, 262]",
        ],
    ),
}


@pytest.mark.parametrize("heading", DOCUMENTED)
def test_documented_commands_do_what_their_rows_say(heading, weights, tmp_path, program):
    names, expected = DOCUMENTED[heading]
    for name, network in names.items():
        (tmp_path / name).write_bytes(weights[network].read_bytes())
    made = []
    for command in documented_commands(heading):
        _, file, *words = shlex.split(command)
        main = {"export_qat.py": export_qat.main, "export_yoloV9.py": export_yoloV9.main}[file]
        words = [str(tmp_path / word) if word in names else word for word in words]
        code, out, err = program(main, *words, "--size" if file == "export_yoloV9.py" else "--imgsz", SIDE)
        assert (code, err) == (0, []), command
        made += [line.partition(" -> ")[2].rpartition("], ")[0] + "]" for line in out if " -> " in line]
    assert made == expected
