"""Placement on upstream's own networks: nothing but rounding changes, and a saved network comes back as it was."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import check_golden
from random_networks import TINY, narrow, random_network, save_float, save_quantized
from torch import nn

from models.quantize import backend, checkpoint, flow, placement, rules
from models.quantize.fake_quantize import representable
from models.quantize.modules import QuantConv2d
from models.quantize.recipe import Recipe
from utils import upstream
from utils.core.errors import CheckpointError, InputError

X = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
DEMO = "data/demo/gelan-digits.yaml"


def outputs(model: nn.Module) -> list[torch.Tensor]:
    """All tensors that the network gives: predictions, features, masks."""
    with torch.no_grad():
        return list(tensors(model(X)))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    for item in value:
        yield from tensors(item)


def pair(config) -> tuple[nn.Module, nn.Module]:
    """The fused float network, and a copy with quantizers."""
    original = upstream.fuse(random_network(config))
    quantized = copy.deepcopy(original)
    placement.apply(quantized, placement.plan(quantized, Recipe()))
    return upstream.call_fused(original), quantized


def check(config, file: Path, golden: str) -> None:
    """Its placement.txt. Quantizers off: the float network's outputs. Saved and loaded again: the quantized one's."""
    original, quantized = pair(config)
    plan = quantized.quantization_plan
    assert plan.unknown == {}
    assert plan.fallback == ()
    check_golden(golden, placement.describe(plan))
    convolutions = {name for name, module in quantized.named_modules() if isinstance(module, nn.Conv2d)}
    assert convolutions - set(plan.convolutions) == {f"model.{len(quantized.model) - 1}.dfl.conv"}
    with placement.quantizers_off(quantized):
        for ours, theirs in zip(outputs(quantized), outputs(original), strict=True):
            assert torch.equal(ours, theirs)
    expected = outputs(quantized)
    assert not torch.equal(expected[0], outputs(original)[0])
    nc = quantized.model[-1].nc
    checkpoint.save(file, quantized, recipe=Recipe(), names=quantized.names, nc=nc, stride=32, yaml=quantized.yaml)
    for ours, theirs in zip(
        outputs(checkpoint.load_quantized(file, [type(quantized.model[-1]).__name__]).model), expected, strict=True
    ):
        assert torch.equal(ours, theirs)


def test_demo_network_without_rounding_is_the_float_network_bit_for_bit(tmp_path):
    check(DEMO, tmp_path / "int8.pt", "placement/gelan-digits.txt")


DEPLOYED = ["gelan-t", "gelan-s", "gelan-m", "gelan-c", "gelan-e", "gelan", "yolov7-af"]
SEGMENTERS = ["segment/gelan-c-seg", "segment/gelan-c-dseg", "segment/yolov7-af-seg", "panoptic/gelan-c-pan"]


@pytest.mark.parametrize("name", [*DEPLOYED, *SEGMENTERS])
def test_upstreams_network_without_rounding_is_the_float_network_bit_for_bit(name, upstream_yaml, tmp_path):
    """gelan-c with all of its channels, others with a quarter: no quantizer depends on how many there are."""
    config = upstream_yaml(name) if name == "gelan-c" else narrow(upstream_yaml(name))
    check(config, tmp_path / "int8.pt", f"placement/{Path(name).name}.txt")


def test_a_network_with_relu_is_placed_as_with_silu(upstream_yaml, tmp_path):
    """A YAML's `activation` changes no quantizer: they stand behind the activation, whichever it is."""
    import yaml

    config = {**yaml.safe_load(upstream_yaml("gelan-t").read_text()), "activation": "nn.ReLU()"}
    check(config, tmp_path / "int8.pt", "placement/gelan-t.txt")
    kinds = {type(module) for module in checkpoint.load_quantized(tmp_path / "int8.pt", ["DDetect"]).model.modules()}
    assert nn.ReLU in kinds
    assert nn.SiLU not in kinds


def test_every_class_in_upstreams_yamls_has_a_row_or_a_reason(checkout):
    """With the networks above, all that upstream has: what no row describes here is a training head."""
    files = sorted(checkout.glob("models/*/*.yaml"))
    assert len(files) >= 20
    seen = set()
    for file in files:
        name = f"{file.parent.name}/{file.stem}".removeprefix("detect/")
        if name in (*DEPLOYED, *SEGMENTERS) or name.startswith("hub/"):  # hub: see below
            continue
        model = upstream.fuse(random_network(narrow(file)))
        without = set(flow.read(model).unknown.values())
        assert without <= set(rules.NO_ROW), f"{file.name}: {without} has no row in rules.py"
        seen |= {type(module).__name__ for module in model.modules()}
    assert set(rules.NO_ROW) - seen == {"DualDetect", "TripleDetect"}  # in no YAML, but in upstream's code


def test_hub_yamls_cannot_be_built_by_upstream_itself(upstream_yaml):
    """YOLOv3 gives anchors, which upstream's heads no longer take."""
    with pytest.raises(InputError, match="cannot build this model description"):
        upstream.build_model(upstream_yaml("hub/yolov3"))


def test_users_own_module_falls_back_to_its_convolutions_with_a_warning(caplog):
    class Mine(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)

        def forward(self, x):
            return self.two(torch.tanh(self.one(x)))

    model = upstream.fuse(random_network(TINY))
    mine = Mine(24)
    mine.f, mine.i, mine.type = model.model[4].f, 4, "Mine"
    model.model[4] = nn.Sequential(model.model[4], mine)
    model.model[4].f, model.model[4].i, model.model[4].type = mine.f, 4, "Mine"
    plan = placement.plan(model, Recipe())
    placement.apply(model, plan)
    assert plan.fallback == ("model.4.1.one", "model.4.1.two")
    assert "model.4.1 is a Mine, which has no row in rules.py" in caplog.text
    outputs(model)


def test_every_concat_of_gelan_c_has_one_scale_for_inputs_and_result(upstream_yaml):
    model = upstream.fuse(random_network(upstream_yaml("gelan-c")))
    operations = flow.read(model).operations
    plan = placement.plan(model, Recipe())
    scale = {tensor.name: tensor.scale for tensor in plan.tensors}
    concats = [op for op in operations if op.kind == "move" and len(op.inputs) > 1]
    assert len(concats) == 4 + 3 * 8 + 1 + 5  # top level, three in each RepNCSPELAN4, SPPELAN, one in each ADown
    for operation in concats:
        joined = {scale[value.name] for value in (*operation.inputs, *operation.outputs)}
        assert len(joined) == 1


def test_head_options_on_a_real_head():
    model = upstream.fuse(random_network(TINY))
    head = len(model.model) - 1
    for option, count in (("int8", 0), ("last-conv-float", 6), ("float", 18)):
        plan = placement.plan(model, Recipe(head=option))
        kept = plan.float_convolutions
        assert len(kept) == count
        assert all(path.startswith(f"model.{head}.") for path in kept)


def test_weights_have_one_positive_scale_an_output_channel():
    _, quantized = pair(TINY)
    convolutions = [module for module in quantized.modules() if isinstance(module, QuantConv2d)]
    assert convolutions
    for conv in convolutions:
        amax = backend.get_amax(conv.weight_quantizer).flatten()
        expected = conv.weight.detach().abs().amax((1, 2, 3)).clamp(min=backend.SMALLEST_AMAX)
        assert torch.equal(amax, representable(expected))


def test_saved_network_computes_the_same_in_a_fresh_process(tmp_path, checkout):
    weights = save_float(tmp_path / "float.pt", random_network(TINY))
    file = save_quantized(tmp_path / "int8.pt", weights, Recipe(head="last-conv-float", float=("model.3.cv1",)))
    here = checkpoint.load_quantized(file)
    assert here.recipe.float == ("model.3.cv1",)
    torch.save({"x": X, "y": outputs(here.model)[0]}, tmp_path / "expected.pt")
    code = (
        "import sys, torch; from models.quantize import checkpoint\n"
        "torch.set_num_threads(int(sys.argv[3]))\n"  # sums depend on how many threads share them
        "e = torch.load(sys.argv[2]); m = checkpoint.load_quantized(sys.argv[1]).model\n"
        "with torch.no_grad(): assert torch.equal(m(e['x'])[0], e['y'])\n"
    )
    command = [sys.executable, "-c", code, str(file), str(tmp_path / "expected.pt"), str(torch.get_num_threads())]
    result = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr[-800:]


def test_checkpoint_holds_no_code_and_full_precision(tmp_path):
    weights = save_float(tmp_path / "float.pt", random_network(TINY))
    file = save_quantized(tmp_path / "int8.pt", weights)
    content = torch.load(file, weights_only=True)
    assert {value.dtype for value in content["quantized_state"].values() if value.is_floating_point()} == {
        torch.float32
    }
    assert content["recipe"] == Recipe().to_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["quantized_state"].popitem(), "placed quantizers differently"),
        (lambda content: content.update(format_version=99), "has format 99"),
        (lambda content: content.pop("yaml"), "KeyError: 'yaml'"),
    ],
)
def test_checkpoint_of_another_version_or_not_whole_is_refused(tmp_path, change, message):
    weights = save_float(tmp_path / "float.pt", random_network(TINY))
    file = save_quantized(tmp_path / "int8.pt", weights)
    content = torch.load(file, weights_only=True)
    change(content)
    torch.save(content, file)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load_quantized(file)
