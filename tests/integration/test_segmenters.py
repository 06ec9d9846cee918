"""Segmentation networks: upstream's checkpoints load, are fused and placed; what is not handled yet is refused."""

import copy
import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from exported_files import export_onnx
from known_images import SQUARE
from known_masks import write_outlined_set
from random_networks import random_network, save_float, save_quantized, tiny_with
from torch import Tensor, nn

import export_qat
import export_yoloV9
import qat
import val_trt
from models.quantize import checkpoint, placement
from models.quantize.recipe import Recipe
from utils import upstream
from utils.core.errors import CheckpointError
from utils.core.tasks import predicted
from utils.jobs.sensitivity.units import State, Switches
from utils.onnx_graph.export_config import ExportConfig

HEADS = ("Segment", "DSegment")
X = torch.rand(2, 3, 96, 64, generator=torch.Generator().manual_seed(0))


def everything(result):
    """All tensors of a network's result: predictions, maps, coefficients, prototypes."""
    return [result] if isinstance(result, Tensor) else [one for item in result for one in everything(item)]


def computed(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return everything(model(X))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Checkpoints of each head, float, and of those that are handled quantized."""
    folder = tmp_path_factory.mktemp("segmenters")
    found = {}
    for head in (*HEADS, "Panoptic", "DualDSegment"):
        found[head] = save_float(folder / f"{head}.pt", random_network(tiny_with(head)))
    for head in HEADS:
        found[f"quantized {head}"] = save_quantized(folder / f"{head}-int8.pt", found[head])
    return found


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_upstreams_own_training_ends_and_its_checkpoint_loads(start, tmp_path):
    """`segment/train.py` opens its own file again to strip the optimizer: the head in it names `builtins.getattr`."""
    write_outlined_set(tmp_path / "set", 4, SQUARE, ("a", "b"), splits=("train", "val"))
    (tmp_path / "model.yaml").write_text(json.dumps({**tiny_with("DSegment"), "nc": 2}))
    words = ["scripts/run_upstream.py", "segment/train.py", "--data", tmp_path / "set/data.yaml"]
    words += ["--cfg", tmp_path / "model.yaml", "--weights", "", "--epochs", "1", "--imgsz", "64", "--batch-size", "2"]
    words += ["--hyp", "data/hyps/hyp.scratch-high.yaml", "--workers", "0", "--device", "cpu", "--noplots"]
    words += ["--noval", "--project", tmp_path / "runs"]
    result = start(*words)
    assert result.returncode == 0, result.stderr[-3000:]
    file = tmp_path / "runs/exp/weights/last.pt"
    assert b"getattr" in file.read_bytes()
    assert upstream.read_checkpoint(file)["optimizer"] is None
    found = upstream.load_float(file)
    assert type(found.model).__name__ == "SegmentationModel"
    assert (found.nc, found.names, found.stride) == (2, {0: "a", 1: "b"}, 32)
    assert len(computed(found.model)) == 6
    save_quantized(tmp_path / "int8.pt", file)
    assert checkpoint.load_quantized(tmp_path / "int8.pt").names == found.names


@pytest.mark.parametrize("head", HEADS)
def test_a_checkpoint_computes_what_the_network_that_was_saved_does(head, tmp_path):
    network = random_network(tiny_with(head))
    content = {"epoch": 3, "model": copy.deepcopy(network), "ema": network, "optimizer": {"state": {}}, "date": "today"}
    torch.save(content, tmp_path / "last.pt")
    found = upstream.load_float(tmp_path / "last.pt")
    expected = computed(network)
    assert len(expected) == 6
    assert [one.shape[1] for one in (expected[0], *expected[-2:])] == [4 + 10 + 8, 8, 8]
    for ours, theirs in zip(computed(found.model), expected, strict=True):
        assert torch.equal(ours, theirs)
    again = copy.deepcopy(found.model)
    torch.save({"model": again}, tmp_path / "again.pt")  # as upstream's programs write what they have loaded
    assert torch.equal(computed(upstream.load_float(tmp_path / "again.pt").model)[0], expected[0])


@pytest.mark.parametrize("head", ["DDetect", *HEADS])
def test_fused_it_is_what_upstream_computes(head):
    network = random_network(tiny_with(head))
    ours = upstream.call_fused(upstream.fuse(copy.deepcopy(network)))
    theirs = copy.deepcopy(network).fuse()
    for one, other, before in zip(computed(ours), computed(theirs), computed(network), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(one, before, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("head", HEADS)
def test_placed_saved_and_loaded_it_is_the_same_network(head, files, tmp_path):
    network = upstream.fuse(upstream.load_float(files[head]).model)
    quantized = copy.deepcopy(network)
    placement.apply(quantized, placement.plan(quantized, Recipe()))
    with placement.quantizers_off(quantized):
        for ours, theirs in zip(computed(quantized), computed(upstream.call_fused(network)), strict=True):
            assert torch.equal(ours, theirs)
    stored = checkpoint.load_quantized(files[f"quantized {head}"])
    assert type(stored.model).__name__ == "SegmentationModel"
    assert set(stored.model.quantization_plan.convolutions.values()) == {"int8"}
    before, after = computed(network), computed(stored.model)
    for index in (0, -2, -1):
        assert 0 < (before[index] - after[index]).abs().mean() < 0.1 * before[index].abs().mean() + 1


# --- the outputs of a head, where one tensor was assumed --------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", ["", "quantized "])
@pytest.mark.parametrize(("dynamic", "typing"), [("none", "weak"), ("batch", "strong"), ("all", "weak")])
def test_a_traced_network_has_its_prototypes_as_second_output(head, kind, dynamic, typing, files, tmp_path):
    source = files[f"{kind}{head}"]
    if kind:
        model = checkpoint.load_quantized(source).model
    else:
        model = upstream.call_fused(upstream.fuse(upstream.load_float(source).model))
    before = vars(model.model[-1]).keys()
    config = ExportConfig(imgsz=(96, 64), batch_size=2, dynamic=dynamic, typing=typing)
    result = export_onnx(model, config, tmp_path / "a.onnx", {})
    batch, anchors, size = {
        "none": (2, 126, (24, 16)), "batch": ("batch", 126, (24, 16)),
        "all": ("batch", "anchors", ("mask_height", "mask_width")),
    }[dynamic]  # fmt: skip
    assert result.outputs == {"output0": (batch, 22, anchors), "output1": (batch, 8, *size)}
    assert result.report is None or result.report.ok
    assert vars(model.model[-1]).keys() == before
    if typing == "strong":  # the border of FP32 stands behind the prototypes' SiLU
        producers = {name: node for node in onnx.load(tmp_path / "a.onnx").graph.node for name in node.output}
        assert [producers["output1"].op_type, producers[producers["output1"].input[0]].op_type] == ["Cast", "Mul"]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(tmp_path / "a.onnx"), options, providers=["CPUExecutionProvider"])
    sizes = [(2, 96, 64), (1, 64, 128)] if dynamic == "all" else [(2, 96, 64)]
    for batch, height, width in sizes:
        images = torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected = predicted(model(images))
        found = session.run(["output0", "output1"], {"images": images.numpy()})
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            spread = other.std((0, 2) if other.ndim == 3 else None, keepdim=True).numpy()
            difference = np.abs(one - other.numpy()) / spread
            assert difference.mean() < (0.02 if kind or typing == "strong" else 1e-4), (difference.mean(), spread)


@pytest.mark.parametrize("head", HEADS)
def test_a_network_with_a_quantizer_switched_off_gives_prototypes(head, files):
    model = checkpoint.load_quantized(files[f"quantized {head}"]).model
    last = f"model.{len(model.model) - 1}.proto.{'cv3.conv' if head == 'Segment' else 'conv'}"
    switches, everything = Switches(model), State.of(model.quantization_plan)
    with torch.inference_mode():
        expected = predicted(model(X))
        whole, part = (
            switches.predict(X, State(everything.tensors, everything.weights - off)) for off in (set(), {last})
        )
    assert torch.equal(whole.raw, expected[0])
    assert torch.equal(whole.prototypes, expected[1])
    assert torch.equal(part.raw, whole.raw)
    assert not torch.equal(part.prototypes, whole.prototypes)


# --- what is refused --------------------------------------------------------------------------------------------------


def head_class(name: str) -> type[nn.Module]:
    return upstream.module_classes()[f"models.yolo.{name}"]


@pytest.mark.parametrize(
    "change",
    [
        lambda head: setattr(head, "nm", 7),
        lambda head: setattr(head, "nm", "8"),
        lambda head: delattr(head, "nm"),
        lambda head: delattr(head, "detect"),
        lambda head: setattr(head, "detect", 5),
        lambda head: setattr(head, "detect", type(head).__mro__[1].bias_init),
        lambda head: setattr(head, "detect", head_class("Detect").forward),
        lambda head: setattr(head, "other", head.detect),
        lambda head: setattr(head, "proto", nn.Identity()),
        lambda head: setattr(head, "proto", nn.Conv2d(16, 6, 1)),
    ],
)
def test_a_head_that_is_not_whole(tmp_path, change):
    model = random_network(tiny_with("DSegment"))
    change(model.model[-1])
    torch.save({"model": model}, tmp_path / "changed.pt")
    with pytest.raises(CheckpointError, match=r"changed\.pt"):
        upstream.load_float(tmp_path / "changed.pt")


NAMES = ("quantize", "eval", "sensitive", "calibrate", "export", "deepstream", "val")


@pytest.mark.parametrize(
    ("kind", "name", "named"),
    [
        *(("Panoptic", name, "Panoptic") for name in NAMES),
        *(("DualDSegment", name, "reparameterization.py --weights") for name in NAMES),
        *(("DSegment", name, "outlines") for name in ("quantize", "eval", "val")),  # the demo set's labels are boxes
        *(("quantized Segment", name, "outlines") for name in ("eval", "val")),
        *(("quantized Segment", name, "quantized") for name in ("quantize", "sensitive", "calibrate")),
    ],
)
def test_what_a_job_cannot_use_is_named(kind, name, named, files, demo_data, tmp_path, capsys):
    program = {"export": export_qat, "deepstream": export_yoloV9, "val": val_trt}.get(name, qat)
    words = [name] * (program is qat) + ["--engine-file" if program is val_trt else "--weights", files[kind]]
    words += ["--data", demo_data, "--project", tmp_path / "runs"] * (program in (qat, val_trt))
    code = program.main([str(word) for word in (*words, "--device", "cpu")])
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error: ")]
    assert code == 2
    assert named in line


def test_a_quantized_panoptic_network_is_refused(tmp_path):
    model = upstream.fuse(random_network(tiny_with("Panoptic")))
    placement.apply(model, placement.plan(model, Recipe()))
    content = checkpoint.QuantizedCheckpoint(model, Recipe(), model.names, 10, 32, model.yaml)
    checkpoint.save(tmp_path / "a.pt", content)
    with pytest.raises(CheckpointError, match="Panoptic"):
        checkpoint.load_quantized(tmp_path / "a.pt")
