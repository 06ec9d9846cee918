"""Weights files of which one thing is wrong: one line that names it, exit code 2, and nothing is written."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from qat_runs import quantize, write_small_set
from random_networks import TINY, random_network, save_float, save_quantized
from torch import nn

import export_qat
import export_yoloV9
import qat
import reparameterization
from models.quantize import checkpoint
from models.quantize.finetune import Finetuner
from models.quantize.recipe import Finetune
from utils import upstream
from utils.core.errors import CheckpointError

DELETED = object()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_float(tmp_path_factory.mktemp("weights") / "tiny.pt", random_network(TINY))


@pytest.fixture(scope="module")
def quantized(weights: Path) -> Path:
    return save_quantized(weights.with_name("int8.pt"), weights)


@pytest.fixture(scope="module")
def stored(quantized: Path) -> dict[str, Any]:
    return torch.load(quantized, weights_only=True)


@pytest.fixture(scope="module")
def network(weights: Path) -> nn.Module:
    return upstream.read_checkpoint(weights)["model"].float()


def line_of(error: BaseException, path: Path) -> str:
    message = str(error)
    assert "\n" not in message
    assert str(path) in message
    assert len(message) < 900
    return message


# --- quantized --------------------------------------------------------------------------------------------------------

WEIGHT = "model.0.conv.weight"


def amax_of(stored: dict[str, Any]) -> str:
    return next(name for name in stored["quantized_state"] if name.endswith("_amax"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("names", 5, "names is 5, expected a mapping"),
        ("names", {0: "only"}, "expected names of 10 classes"),
        ("names", {str(index): "x" for index in range(10)}, "a key of names is '0'"),
        ("nc", "ten", "nc is 'ten'"),
        ("nc", 10**12, "nc is 1000000000000"),
        ("nc", 11, "expected names of 11 classes"),
        ("stride", 64, "stride is 64, expected 32"),
        ("stride", [32], "stride is [32]"),
        ("recipe", "int8", "recipe is 'int8', expected a mapping"),
        ("recipe", {"head": 5}, "its network cannot be built (head is 5"),
        ("recipe", {"float": ["model.99"]}, "'model.99'"),
        ("yaml", None, "yaml is None, expected a mapping"),
        ("yaml", {}, "its network cannot be built (the model description lacks nc"),
        ("yaml", {**TINY, "head": TINY["head"][:-1]}, "damaged or from another version"),
        ("version", 1, "version is 1, expected a text"),
        ("library", "other", "library is 'other', expected torch or modelopt or pytorch-quantization"),
        ("extra", [1], "extra is [1], expected a mapping"),
        ("extra", {"a": torch.ones(2)}, "extra.a is Tensor float32 [2]"),
        ("quantized_state", [], "quantized_state is [], expected a mapping"),
        ("quantized_state", {WEIGHT: 1.0}, "quantized_state.model.0.conv.weight is 1.0, expected a tensor"),
        ("format_version", torch.ones(2), "damaged|has format"),
        ("surprise", 1, "surprise is 1, expected no such field"),
        ("names", DELETED, "names is missing"),
        ("yaml", DELETED, "yaml is missing"),
    ],
)
def test_a_field_of_a_quantized_checkpoint(tmp_path, stored, field, value, message):
    content = {**stored, field: value}
    if value is DELETED:
        del content[field]
    path = tmp_path / "changed.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path)
    assert any(text in line_of(caught.value, path) for text in message.split("|")), caught.value


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (WEIGHT, lambda value: value[:-1], "is Tensor float32 [7, 3, 3, 3], expected Tensor float32 [8, 3, 3, 3]"),
        (WEIGHT, lambda value: value.half(), "is Tensor float16 [8, 3, 3, 3], expected Tensor float32 [8, 3, 3, 3]"),
        (WEIGHT, lambda value: value.to_sparse(), "is a float checkpoint"),
        (
            WEIGHT,
            lambda value: value.new_zeros(()).expand(10**6, 10**6),
            "is not a PyTorch checkpoint, or it is truncated",
        ),
        (WEIGHT, lambda value: value * math.nan, f"{WEIGHT} holds NaN or infinity"),
        (WEIGHT, lambda value: value / 0, f"{WEIGHT} holds NaN or infinity"),
        ("amax", lambda value: value * 0, "holds a range that is not positive"),
        ("amax", lambda value: -value, "holds a range that is not positive"),
        ("amax", lambda value: value * math.nan, "holds NaN or infinity"),
        (
            "amax",
            lambda value: value[..., None],
            "is Tensor float32 [8, 1, 1, 1, 1], expected Tensor float32 [8, 1, 1, 1]",
        ),
    ],
)
def test_a_tensor_of_a_quantized_checkpoint(tmp_path, stored, name, change, message):
    name = amax_of(stored) if name == "amax" else name
    path = tmp_path / "changed.pt"
    torch.save(
        {**stored, "quantized_state": {**stored["quantized_state"], name: change(stored["quantized_state"][name])}},
        path,
    )
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path)
    assert message in line_of(caught.value, path)


def test_a_dead_channel_that_was_calibrated_has_a_range_and_loads(tmp_path, weights):
    content = upstream.read_checkpoint(weights)
    with torch.no_grad():
        content["model"].model[0].conv.weight.zero_()
        content["model"].model[0].bn.bias.zero_()
    torch.save(content, tmp_path / "dead.pt")
    checkpoint.load(save_quantized(tmp_path / "int8.pt", tmp_path / "dead.pt"))


@pytest.mark.parametrize("program", ["eval", "export", "deepstream"])
def test_programs_end_with_one_line_and_2(tmp_path, stored, capsys, program, demo_data):
    path = tmp_path / "changed.pt"
    torch.save({**stored, "names": 5}, path)
    before = sorted(tmp_path.iterdir())
    words = ["--weights", str(path), "--device", "cpu"]
    code = {
        "eval": lambda: qat.main(["eval", *words, "--data", str(demo_data), "--project", str(tmp_path / "runs")]),
        "export": lambda: export_qat.main(words),
        "deepstream": lambda: export_yoloV9.main(words),
    }[program]()
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{path} is damaged or from another version: names is 5" in err
    assert sorted(tmp_path.iterdir()) == before


# --- float ------------------------------------------------------------------------------------------------------------


def spoil(name: str, value: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        *way, last = name.split("/")
        for part in way:
            model = model[int(part)] if part.lstrip("-").isdigit() else getattr(model, part)
        if value is DELETED:
            delattr(model, last)
        else:
            setattr(model, last, value)

    return change


def fill(name: str, value: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        with torch.no_grad():
            model.state_dict()[name].view(-1)[0] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil("names", DELETED), "names is None"),
        (spoil("names", 5), "names is 5"),
        (spoil("names", ["a"]), "expected names of 10 classes"),
        (spoil("names", dict.fromkeys(range(10), b"x")), "names.0 is b'x', expected the name of a class"),
        (spoil("stride", DELETED), "stride is None, expected a tensor"),
        (spoil("stride", "big"), "stride is 'big', expected a tensor"),
        (spoil("stride", torch.tensor([8.0, 16.0, 64.0])), "stride is [8.0, 16.0, 64.0]"),
        (spoil("stride", torch.tensor([8.0, 16.0, math.nan])), "stride is [8.0, 16.0, nan]"),
        (spoil("stride", torch.tensor([8.0, 16.0, 1e9])), "stride is [8.0, 16.0, 1000000000.0]"),
        (spoil("model/-1/stride", torch.tensor([8.0, 16.0, 16.0])), "stride is [8.0, 16.0, 16.0], expected [8.0"),
        (spoil("model/-1/nc", 11), "expected names of 11 classes"),
        (spoil("model/-1/nc", "ten"), "nc is 'ten'"),
        (spoil("model/-1/nc", 10**9), "nc is 1000000000"),
        (spoil("model/-1/nm", 32), "nm is 32, expected none: a DDetect has no masks"),
        (spoil("model/-1/nm", "many"), "nm is 'many', expected none"),
        (spoil("model", nn.Identity()), "model is 'Identity', expected a sequence of layers"),
        (spoil("model", nn.Sequential()), "model is 'Sequential'"),
        (spoil("model/2/i", 7), "model.2.i is 7, expected 2"),
        (spoil("model/2/f", 7), "model.2.f[0] is 7, expected a layer before it"),
        (spoil("model/2/f", "x"), "model.2.f[0] is 'x'"),
        (spoil("save", None), "save is None"),
        (spoil("yaml", 5), "the model description is a int"),
        (spoil("model/0/conv", nn.Conv2d(3, 9, 3, 2, 1)), "model.0.bn.weight is Parameter float32 [8], expected"),
        (spoil("model/0/conv/in_channels", 10**5), "model.0.conv.weight is Parameter float32 [8, 3, 3, 3], expected"),
        (spoil("model/0/conv/stride", "x"), "its network does not compute (TypeError"),
        (spoil("model/0/conv/stride", (4, 4)), "damaged or from another version"),
        (spoil("model/7/scale_factor", 1e5), "damaged or from another version"),
        (fill("model.0.conv.weight", math.nan), "model.0.conv.weight holds NaN or infinity"),
        (fill("model.3.cv1.bn.weight", math.inf), "model.3.cv1.bn.weight holds NaN or infinity"),
        (fill("model.0.bn.running_var", -1.0), "model.0.bn.running_var holds a negative variance"),
    ],
)
def test_a_field_of_a_float_checkpoint(tmp_path, network, change, message):
    model = copy.deepcopy(network)
    change(model)
    path = tmp_path / "changed.pt"
    torch.save({"model": model, "ema": None}, path)
    with pytest.raises(CheckpointError) as caught:
        upstream.load_float(path)
    assert any(text in line_of(caught.value, path) for text in message.split("|")), caught.value


def test_a_network_without_a_head_and_one_of_another_task(tmp_path, network):
    model = copy.deepcopy(network)
    del model.model[-1]
    torch.save({"model": model}, tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match=r"model.8 is 'Concat', expected one of Detect, DDetect, Segment, DSeg"):
        upstream.load_float(tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="ends in Concat"):
        upstream.load_training(tmp_path / "none.pt")


@pytest.mark.parametrize(
    "content",
    [
        {"model": torch.ones(5)},
        {"ema": torch.ones(5), "model": None},
        {"model": nn.Conv2d(1, 1, 1)},
        {"model": {"yaml": 1, "model": 2}},
        {"model": 5, "x" * 5000: 1, torch.ones(3): 2},
        {},
        [1],
        "text",
    ],
)
def test_what_holds_no_network(tmp_path, content):
    torch.save(content, tmp_path / "a.pt")
    for load in (upstream.load_float, upstream.load_training):
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path / "a.pt")
        line_of(caught.value, tmp_path / "a.pt")


@pytest.mark.parametrize("program", ["quantize", "eval", "sensitive", "calibrate", "export", "deepstream", "convert"])
def test_programs_end_with_one_line_and_2_for_float_weights(tmp_path, network, capsys, program, demo_data):
    model = copy.deepcopy(network)
    model.stride = "big"
    path = tmp_path / "changed.pt"
    torch.save({"model": model}, path)
    words = ["--weights", str(path), "--device", "cpu"]
    runs = [*words, "--data", str(demo_data), "--project", str(tmp_path / "runs")]
    mains = {"export": export_qat.main, "deepstream": export_yoloV9.main, "convert": reparameterization.main}
    code = mains[program](words) if program in mains else qat.main([program, *runs])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (f"{path} is damaged or from another version: stride is 'big'" in err) == (program != "convert")
    assert [one.name for one in tmp_path.iterdir()] == ["changed.pt"]


def test_the_check_leaves_the_network_as_it_was(weights, network):
    found, before = vars(upstream.load_float(weights).model.model[-1]), vars(network.model[-1])
    assert set(found) == set(before)
    assert found.get("shape") == before.get("shape")
    assert torch.equal(found["anchors"].float(), before["anchors"].float())
    assert not found["_forward_pre_hooks"]


# --- a run's files ----------------------------------------------------------------------------------------------------


def test_an_optimizer_of_another_network_is_named(network):
    tuner = Finetuner(copy.deepcopy(network), copy.deepcopy(network), Finetune(), device=torch.device("cpu"))
    for parameter in tuner._parameters:
        parameter.grad = torch.zeros_like(parameter)
    tuner.optimizer.step()
    whole = copy.deepcopy(tuner.state_dict())
    tuner.load_state_dict(whole)
    changes: list[tuple[Callable[[dict], None], str]] = [
        (
            lambda state: state["state"][0].update(exp_avg=torch.ones(2)),
            r"exp_avg of parameter 0 is Tensor float32 \[2\]",
        ),
        (lambda state: state["state"][0].update(exp_avg_sq=-torch.ones_like(state["state"][0]["exp_avg"])), "negative"),
        (lambda state: state["state"][0].pop("step"), "step of parameter 0 is None"),
        (lambda state: state["state"].update({999: {}}), "parameter 999 is none of"),
        (lambda state: state["param_groups"][0].update(betas="x"), "betas is 'x'"),
        (lambda state: state["param_groups"][0].update(params=[0]), r"params is \[0\]"),
        (lambda state: state["param_groups"][0].pop("eps"), "eps is None"),
    ]
    for change, message in changes:
        damaged = copy.deepcopy(whole)
        change(damaged["optimizer"])
        with pytest.raises(CheckpointError, match=message):
            tuner.load_state_dict(damaged)


@pytest.mark.slow
def test_a_resumed_run_refuses_a_damaged_checkpoint_of_its_own(weights, demo_data, tmp_path, capsys):
    data = write_small_set(tmp_path / "set", demo_data)
    assert quantize(weights, data, tmp_path, "--ptq-only", "--no-eval-origin") == 0
    run = tmp_path / "exp"
    state = torch.load(run / "weights/last.pt", weights_only=True)
    torch.save({**state, "finished": False}, run / "weights/last.pt")
    file = run / "weights" / state["checkpoint"]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    capsys.readouterr()
    assert qat.main(["quantize", "--resume", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{file} is damaged" in error
