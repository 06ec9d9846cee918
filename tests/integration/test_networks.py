"""Placement on upstream's own networks: nothing but rounding changes, and a saved network comes back as it was."""

import copy
from pathlib import Path

import pytest
import torch
from golden import check_golden
from random_networks import narrow, random_network
from torch import nn

from models.quantize import checkpoint, flow, placement
from models.quantize.recipe import Recipe
from utils import upstream
from utils.core.errors import InputError
from utils.upstream.description import AUXILIARY_HEADS

X = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
DEMO = "data/demo/gelan-digits.yaml"


def outputs(model: nn.Module) -> list[torch.Tensor]:
    """All tensors that the network gives: predictions, features, masks."""
    with torch.no_grad():
        return torch.utils._pytree.tree_leaves(model(X))


def check(config, file: Path, golden: str) -> None:
    """Its placement.txt. Quantizers off: the float network's outputs. Saved and loaded again: the quantized one's."""
    original = upstream.fuse(random_network(config))
    quantized = copy.deepcopy(original)
    placement.apply(quantized, placement.plan(quantized, Recipe()))
    upstream.call_fused(original)
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
    content = checkpoint.QuantizedCheckpoint(quantized, Recipe(), quantized.names, nc, 32, quantized.yaml)
    checkpoint.save(file, content)
    for ours, theirs in zip(
        outputs(checkpoint.load_quantized(file, [type(quantized.model[-1]).__name__]).model), expected, strict=True
    ):
        assert torch.equal(ours, theirs)


def test_demo_network_without_rounding_is_the_float_network_bit_for_bit(tmp_path):
    check(DEMO, tmp_path / "int8.pt", "placement/gelan-digits.txt")


DEPLOYED = ["gelan-t", "gelan-s", "gelan-m", "gelan-c", "gelan-e", "gelan", "yolov7-af"]
SEGMENTERS = ["segment/gelan-c-seg", "segment/gelan-c-dseg", "segment/yolov7-af-seg"]


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
    """With the networks above, all that upstream has: what no row describes here is a training head, or refused."""
    files = sorted(checkout.glob("models/*/*.yaml"))
    assert len(files) >= 20
    seen = set()
    for file in files:
        name = f"{file.parent.name}/{file.stem}".removeprefix("detect/")
        if name in (*DEPLOYED, *SEGMENTERS) or name.startswith(("hub/", "panoptic/")):  # hub: see below
            continue
        model = upstream.fuse(random_network(narrow(file)))
        without = set(flow.read(model).unknown.values())
        assert without <= set(AUXILIARY_HEADS), f"{file.name}: {without} has no row in rules.py"
        seen |= {type(module).__name__ for module in model.modules()}
    assert set(AUXILIARY_HEADS) - seen == {"DualDetect", "TripleDetect"}  # in no YAML, but in upstream's code


def test_hub_yamls_cannot_be_built_by_upstream_itself(upstream_yaml):
    """YOLOv3 gives anchors, which upstream's heads no longer take."""
    with pytest.raises(InputError, match="cannot build this model description"):
        upstream.build_model(upstream_yaml("hub/yolov3"))
