"""Files with NMS inside and files for DeepStream, made by the programs, of detectors and of networks with masks; what
`--check` finds: nothing in good files of every form, and each mistake that is put into one.

References of their own: the evaluation loop's NMS and torchvision's ROIAlign on the plain file's outputs, parsers after
the documented layouts of DeepStream-Yolo and DeepStream-Yolo-Seg, torch's main branch. `tests/unit/onnx_graph` tests
the graphs by themselves.
"""

import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from deepstream_parser import masked_objects_in, objects_in, parse_as_deepstream, parse_masks_as_deepstream
from exported_files import export_onnx
from forms import FLAGS, FLAGS_OF, LOW, SIDE, documented_commands, images, run, with_outputs, write_networks
from mask_graph import pooled
from onnx import ModelProto, numpy_helper

import export_qat
import export_yoloV9
from utils import upstream
from utils.core.errors import InputError
from utils.core.tasks import DETECT, SEGMENT, Prediction
from utils.evaluation.data_yaml import load_data
from utils.evaluation.detector import Detector
from utils.evaluation.nms import non_max_suppression
from utils.jobs import export
from utils.jobs.compare_outputs import DIFFERENT_ROWS, OTHER_DETECTIONS, OTHER_MASKS, check_images, check_onnx
from utils.jobs.compare_tensors import COEFFICIENTS, LIMITS, PIXELS, PROTOTYPES, RESULT, STEPPED
from utils.jobs.open import load_network
from utils.onnx_graph import deepstream, output_formats
from utils.onnx_graph.export import export_forms
from utils.onnx_graph.export_config import ExportConfig
from utils.onnx_graph.output_formats import NmsSettings, end2end, plain
from utils.onnx_graph.view import metadata_of
from utils.runners.onnxrt import OnnxRuntimeRunner
from utils.upstream.description import HEADS, TRAINING_HEADS


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
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
    kinds = []
    for network in ("dual", "detector float"):
        words = ("--weights", weights[network], "--output", tmp_path / "net.onnx", "--imgsz", SIDE, "--dynamic")
        assert program(export_qat.main, *words)[0] == 0
        kinds.append(sorted(node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node))
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


# --- docs/formats.md --------------------------------------------------------------------------------------------------

FOUR = "num_dets [1, 1], det_boxes [1, 100, 4], det_scores [1, 100], det_classes [1, 100]"
FOUR_DYNAMIC = FOUR.replace("[1,", "[batch,")
DOCUMENTED = {  # heading → names of checkpoints there, and the outputs of each row
    "## Output formats": (
        {"yolov9-c-converted.pt": "detector float", "qat_best.pt": "detector quantized", "yolov9-c.pt": "dual"},
        [*["output0 [1, 14, 84]"] * 5, FOUR, FOUR, FOUR, FOUR_DYNAMIC, "output [batch, 84, 6]", "output [4, 84, 6]"],
    ),
    "## Output formats of segmentation models": (
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


# --- the check --------------------------------------------------------------------------------------------------------

CPU, NAN = torch.device("cpu"), float("nan")
ONNX, EFFICIENT = NmsSettings("onnx", 40, 0.6, LOW), NmsSettings("efficient", 40, 0.6, LOW)
FORMS = {
    "detector": {
        "plain": plain(), "deepstream": output_formats.deepstream(), "onnx": end2end(ONNX),
        "efficient": end2end(EFFICIENT), "none": end2end(NmsSettings("none", 20, 0.6, LOW)),
    },
    "masks": {
        "plain": plain(), "box": end2end(ONNX, 28), "grid": end2end(ONNX, 0), "efficient": end2end(EFFICIENT, 28),
        "none": end2end(NmsSettings("none", 40, 0.6, LOW, agnostic=True), 28),
        "efficient grid": end2end(EFFICIENT, 0), "deepstream": output_formats.deepstream(EFFICIENT),
        "deepstream onnx": output_formats.deepstream(ONNX),
    },
}  # fmt: skip
Change = Callable[[ModelProto], None]


@pytest.fixture(scope="module")
def exported(weights, tmp_path_factory):
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
    parity = check_onnx(result.path, network.model, images(3), result.quantizers, half=config.floats == "FP16")
    assert parity.problems == ()
    masks = parity.outputs if kind == "float" else parity.stretches
    assert masks[COEFFICIENTS] < LIMITS[COEFFICIENTS][2 if config.floats == "FP16" else 1] / 2


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
