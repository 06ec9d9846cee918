"""Networks that differ from their model description are quantized, evaluated, exported and trained as they are.

What a checkpoint could not hold is refused before anything is calibrated, by its name.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from changed_networks import CHANGES, cut, prune
from forms import lively
from qat_runs import checkpoints, killed, quantize, report_of, write_small_set
from random_networks import TINY, narrow, random_network, save_float, save_quantized, tiny_with
from torch import nn

import export_qat
import qat
import reparameterization
import val_trt
from models.quantize import checkpoint, placement
from models.quantize.flow import export_mode
from utils import upstream
from utils.core.errors import CheckpointError
from utils.jobs.run_state import RunState

pytestmark = pytest.mark.usefixtures("blank_plots")
X = torch.rand(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
NAMES = {number: str(number) for number in range(10)}  # those of the demo set


def changed(change: str, config: Any = TINY) -> Any:
    """A small network with one of the changes."""
    torch.manual_seed(1)
    model = lively(random_network(config))
    CHANGES[change](model)
    model.names = dict(NAMES)
    return model


def predictions(model: nn.Module, images: torch.Tensor = X) -> torch.Tensor:
    """Boxes in pixels and scores, `[B, 14, N]`."""
    with torch.no_grad():
        result: torch.Tensor = model(images)[0]
    return result


def float_predictions(weights: Path) -> torch.Tensor:
    """What the checkpoint's own modules compute, as they were saved."""
    return predictions(torch.load(weights, weights_only=False)["model"].float().eval())


def run_onnx(path: Path, images: torch.Tensor = X) -> np.ndarray:
    """A file's first output, in ONNX Runtime without its own rewrites."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"images": images.numpy()})[0]
    return result


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """The checkpoint of a small pruned network."""
    return save_float(tmp_path_factory.mktemp("pruned") / "pruned.pt", changed("prune"))


@pytest.mark.parametrize("change", CHANGES)
def test_from_quantize_to_onnx(change, data, tmp_path, capsys):
    weights = save_float(tmp_path / "w.pt", changed(change))
    plain = random_network(TINY)
    assert {name: value.shape for name, value in plain.state_dict().items()} != {
        name: value.shape for name, value in upstream.load_float(weights).model.state_dict().items()
    } or change in ("change_activations", "change_description")
    assert quantize(weights, data, tmp_path, "--ptq-only") == 0
    (quantized,) = (tmp_path / "exp/weights").glob("ptq_*.pt")
    model = checkpoint.load_quantized(quantized).model
    expected = float_predictions(weights)
    with placement.quantizers_off(model):
        torch.testing.assert_close(predictions(model), expected, atol=2e-2, rtol=1e-3)  # pixels: boxes of up to 100
    assert not torch.equal(predictions(model), expected)

    words = ["--data", data, "--imgsz", 96, "--batch-size", 2, "--workers", 0, "--device", "cpu", "--project", tmp_path]
    assert qat.main(["eval", "--weights", str(quantized), *map(str, words), "--name", "eval"]) == 0
    rows = {row["stage"]: row for row in report_of(tmp_path / "exp")["rows"]}
    assert report_of(tmp_path / "eval")["rows"][0]["ap"] == pytest.approx(rows["PTQ"]["ap"], abs=1e-9)

    capsys.readouterr()
    exported = ["--weights", quantized, "--imgsz", 96, "--batch-size", 2, "--typing", "weak"]
    assert export_qat.main([*map(str, exported), "--device", "cpu"]) == 0
    assert "matches PyTorch" in capsys.readouterr().out
    result = run_onnx(quantized.with_name(f"{quantized.stem}-int8.onnx"))
    with export_mode():
        difference = np.abs(result - predictions(model).numpy())
    assert np.median(difference) < 1e-3
    assert (difference > 0.1).mean() < 0.06  # values at the middle of two steps are rounded either way
    assert np.median(np.abs(result - expected.numpy())[:, :4]) > 0.02  # pixels: the comparison can fail


def test_a_pruned_demo_model_keeps_its_ap(demo_data, demo_weights, tmp_path):
    """Four of the 40 channels between two convolutions of the head are gone."""
    model: Any = upstream.load_float(demo_weights).model
    first, second, _ = model.model[-1].cv3[0]
    cut(first, second, 0.1)
    torch.save({"model": model, "ema": None}, tmp_path / "pruned.pt")
    few = write_small_set(tmp_path / "set", demo_data, train=32, val=60, spread=True)
    words = ("--imgsz", "320", "--calib-images", "32", "--ptq-only", "--batch-size", "8")
    assert quantize(tmp_path / "pruned.pt", few, tmp_path, *words) == 0
    rows = {row["stage"]: row for row in report_of(tmp_path / "exp")["rows"]}
    assert rows["float"]["ap"] > 0.6
    assert abs(rows["PTQ"]["ap"] - rows["float"]["ap"]) < 0.02


def test_training_is_resumed_to_the_same_end(pruned, data, tmp_path):
    longer = ("--epochs", "2")
    assert quantize(pruned, data, tmp_path / "whole", *longer) == 0
    killed(lambda: quantize(pruned, data, tmp_path / "killed", *longer), RunState, "save", 4)
    assert qat.main(["quantize", "--resume", str(tmp_path / "killed/exp")]) == 0
    runs = [tmp_path / name / "exp" for name in ("whole", "killed")]
    assert checkpoints(runs[0]) == checkpoints(runs[1])
    best = next(name for name in checkpoints(runs[0]) if name.startswith("qat_best"))
    whole, resumed = (checkpoint.load_quantized(run / "weights" / best).model.state_dict() for run in runs)
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    ptq = next(name for name in checkpoints(runs[0]) if name.startswith("ptq"))
    before = checkpoint.load_quantized(runs[0] / "weights" / ptq).model.state_dict()
    trained = [torch.load(run / "weights/last.pt", weights_only=True) for run in runs]
    assert len(trained) == 2
    assert {name: value.shape for name, value in before.items()} == {name: value.shape for name, value in whole.items()}


def test_sensitive_and_reference(pruned, data, tmp_path):
    few = ["--data", data, "--imgsz", 64, "--batch-size", 2, "--workers", 0, "--device", "cpu", "--project", tmp_path]
    words = ["sensitive", "--weights", pruned, *few, "--force", "--calib-images", 4, "--num-image", 4]
    assert qat.main([*map(str, words), "--name", "sensitive", "--calib-method", "max"]) == 0
    quantized = save_quantized(tmp_path / "int8.pt", pruned, imgsz=64)
    compared = [quantized, "--reference", pruned, *few, "--name", "compared"]
    assert val_trt.main([*map(str, compared)]) == 0
    assert [row["stage"] for row in report_of(tmp_path / "compared")["rows"]] == ["float", "PyTorch"]


def shared(model: Any) -> str:
    """Both levels of the head use one convolution."""
    model.model[-1].cv3[1][1] = model.model[-1].cv3[0][1]
    return "model.9.cv3.1.1"


def factorised(model: Any) -> str:
    """A convolution becomes two."""
    block = model.model[1].cv1
    block.conv = nn.Sequential(nn.Conv2d(8, 4, 1, bias=False), nn.Conv2d(4, 16, 3, 2, 1, bias=False))
    return "model.1.cv1"


def activated_branch(model: Any) -> str:
    """An activation in a branch of a RepConvN, which cannot be merged then."""
    model.model[3].cv2[0].m[0].cv1.conv2.act = nn.SiLU()
    return "model.3.cv2.0.m.0.cv1"


def without_statistics(model: Any) -> str:
    """A batch norm that uses those of the batch."""
    model.model[0].bn = nn.BatchNorm2d(8, track_running_stats=False)
    return "model.0"


@pytest.mark.parametrize("change", [shared, factorised, activated_branch, without_statistics])
@pytest.mark.parametrize("command", ["quantize", "sensitive", "calibrate"])
def test_what_cannot_be_rebuilt_is_refused_by_name_before_anything_is_written(change, command, data, tmp_path, capsys):
    torch.manual_seed(1)
    model = lively(random_network(TINY))
    name = change(model)
    model.names = dict(NAMES)
    weights = save_float(tmp_path / "w.pt", model)
    words = [command, "--weights", weights, "--data", data, "--project", tmp_path / "runs", "--workers", 0, "--force"]
    assert qat.main([*map(str, words), "--imgsz", "64", "--device", "cpu"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert f"{name} " in error
    assert str(weights) in error
    assert not (tmp_path / "runs").exists()


def test_a_pruned_training_network_becomes_the_pruned_deployed_network(upstream_yaml, tmp_path, capsys):
    description = narrow(upstream_yaml("yolov9-t"), 1)
    model = random_network(description, nc=3)
    prune_main_branch(model)
    weights, target = save_float(tmp_path / "best.pt", model), tmp_path / "deployed.pt"
    assert reparameterization.main(["--weights", str(weights), "--save", str(target), "--device", "cpu"]) == 0
    deployed = upstream.load_float(target)
    expected = predictions(model.float())[1]
    torch.testing.assert_close(predictions(deployed.model), expected, atol=1e-5, rtol=0)
    plain = random_network(upstream_yaml("gelan-t"), nc=3).state_dict()
    smaller = [name for name, value in deployed.model.state_dict().items() if value.shape != plain[name].shape]
    assert len(smaller) > 50
    read = checkpoint.load_quantized(save_quantized(tmp_path / "int8.pt", target))
    with placement.quantizers_off(read.model):
        torch.testing.assert_close(predictions(read.model), expected, atol=1e-2, rtol=1e-3)
    cfg = ["--weights", weights, "--save", tmp_path / "o.pt", "--cfg", upstream_yaml("gelan-t"), "--device", "cpu"]
    capsys.readouterr()
    assert reparameterization.main([*map(str, cfg)]) == 2
    assert next(iter(smaller)).split(".conv")[0] in capsys.readouterr().err


def prune_main_branch(model: Any) -> None:
    """Prune all blocks; the head has other names for its class branch."""
    head = model.model[-1]
    head.cv3, auxiliary = head.cv5, head.cv3
    prune(model)
    head.cv5, head.cv3 = head.cv3, auxiliary


def test_a_pruned_network_with_masks_is_exported(tmp_path, capsys):
    model = lively(random_network(tiny_with("DSegment")))
    prune(model)
    weights = save_float(tmp_path / "seg.pt", model)
    quantized = save_quantized(tmp_path / "int8.pt", weights)
    words = ["--weights", quantized, "--imgsz", 96, "--typing", "weak", "--device", "cpu"]
    assert export_qat.main([*map(str, words)]) == 0
    assert "matches PyTorch" in capsys.readouterr().out
    network = checkpoint.load_quantized(quantized).model
    with placement.quantizers_off(network):
        ours, theirs = (
            torch.utils._pytree.tree_leaves(one(X)) for one in (network, upstream.load_float(weights).model)
        )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=1e-3)


def test_files_without_modules_are_read_as_before_also_with_other_channels(pruned, tmp_path):
    """As 1.0 and the first files of 2.0 were written: what they lack is in their description, or in their weights."""
    quantized = save_quantized(tmp_path / "int8.pt", pruned)
    content = torch.load(quantized, weights_only=True)
    del content["fp32_modules"]
    content["yaml"]["class_channels"] = 20
    torch.save(content, tmp_path / "before.pt")
    before, now = (checkpoint.load_quantized(file).model for file in (tmp_path / "before.pt", quantized))
    assert torch.equal(predictions(before), predictions(now))


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ("model.0", "class", "builtins.eval"),
        ("model.0", "class", "torch.nn.modules.linear.Linear"),
        ("model.0", "attributes", {"_forward_hooks": {1: "x"}}),
        ("model.0.conv", "parameters", {"weight": [8, 3, 5, 5]}),
        ("model.0.conv", "parameters", {}),
        ("model.9", "attributes", {}),
        ("", "class", "models.common.Conv"),
    ],
)
def test_modules_that_do_not_fit_are_refused(pruned, tmp_path, path, key, value):
    quantized = save_quantized(tmp_path / "int8.pt", pruned)
    content = torch.load(quantized, weights_only=True)
    content["fp32_modules"][path][key] = value
    torch.save(content, quantized)
    with pytest.raises(CheckpointError, match=r"int8\.pt"):
        checkpoint.load_quantized(quantized)
