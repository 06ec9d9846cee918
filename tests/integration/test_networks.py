"""Upstream's networks: placement changes nothing but rounding, a saved network comes back as it was, and checkpoints
load without running code from them."""

import copy
import sys
from pathlib import Path, PosixPath
from types import ModuleType

import numpy as np
import pytest
import torch
from golden import check_golden
from known_images import colour, write_set
from random_networks import TINY, narrow, random_network, save_float, save_quantized
from torch import nn

from models.quantize import checkpoint, flow, placement
from models.quantize.finetune import seed_everything
from models.quantize.recipe import Recipe
from utils import upstream
from utils.core.errors import CheckpointError
from utils.core.tasks import predicted
from utils.evaluation.split import read_images
from utils.upstream.description import AUXILIARY_HEADS

X = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


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


DEPLOYED = ["gelan-t", "gelan-s", "gelan-m", "gelan-c", "gelan-e", "gelan", "yolov7-af"]
SEGMENTERS = ["segment/gelan-c-seg", "segment/gelan-c-dseg", "segment/yolov7-af-seg"]


@pytest.mark.parametrize("name", ["demo", *DEPLOYED, *SEGMENTERS])
def test_a_network_without_rounding_is_the_float_network_bit_for_bit(name, checkout, upstream_yaml, tmp_path):
    """gelan-c with all of its channels, others with a quarter: no quantizer depends on how many there are."""
    file = checkout / "data/demo/gelan-digits.yaml" if name == "demo" else upstream_yaml(name)
    golden = f"placement/{file.stem}.txt"
    check(file if name in ("demo", "gelan-c") else narrow(file), tmp_path / "int8.pt", golden)


def test_a_network_with_relu_is_placed_as_with_silu(upstream_yaml, tmp_path):
    """A YAML's `activation` changes no quantizer: they stand behind the activation, whichever it is."""
    check(narrow(upstream_yaml("gelan-t")) | {"activation": "nn.ReLU()"}, tmp_path / "int8.pt", "placement/gelan-t.txt")
    kinds = {type(module) for module in checkpoint.load_quantized(tmp_path / "int8.pt", ["DDetect"]).model.modules()}
    assert (nn.ReLU in kinds, nn.SiLU in kinds) == (True, False)


def test_every_class_in_upstreams_yamls_has_a_row_or_a_reason(checkout):
    """With the networks above, all that upstream has: what no row describes here is a training head, or refused."""
    files = sorted(checkout.glob("models/*/*.yaml"))
    assert len(files) >= 20
    seen = set()
    for file in files:
        name = f"{file.parent.name}/{file.stem}".removeprefix("detect/")
        if name in (*DEPLOYED, *SEGMENTERS) or name.startswith(
            ("hub/", "panoptic/")
        ):  # hub: upstream itself cannot build these
            continue
        model = upstream.fuse(random_network(narrow(file)))
        without = set(flow.read(model).unknown.values())
        assert without <= set(AUXILIARY_HEADS), f"{file.name}: {without} has no row in rules.py"
        seen |= {type(module).__name__ for module in model.modules()}
    assert set(AUXILIARY_HEADS) - seen == {"DualDetect", "TripleDetect"}  # in no YAML, but in upstream's code


@pytest.fixture(scope="module")
def network():
    return random_network(TINY)


@pytest.mark.parametrize("name", ["gelan-digits", "gelan-digits-seg"])
def test_networks_are_what_torch_reads(name, checkout):
    path = checkout / f"data/demo/{name}.pt"
    model, expected = upstream.read_checkpoint(path)["model"], torch.load(path, weights_only=False)["model"]
    for (where, one), (_, other) in zip(model.named_modules(), expected.named_modules(), strict=True):
        assert type(one) is type(other)
        assert vars(one).keys() == vars(other).keys(), where
    state, other = model.state_dict(), expected.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[key], other[key]) and state[key].dtype == other[key].dtype for key in state)
    with torch.no_grad():
        results = [predicted(upstream.load_float(path).model(X)), predicted(expected.float().eval()(X))]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_full_training_checkpoint_with_ema_optimizer_numpy_and_paths(tmp_path, network):
    content = {
        "epoch": 7, "best_fitness": np.array([0.5]), "model": copy.deepcopy(network).half(),
        "ema": copy.deepcopy(network).half(), "optimizer": {"state": {}, "param_groups": [{"lr": np.float64(0.1)}]},
        "opt": {"save_dir": PosixPath("/elsewhere/runs"), "weights": ""}, "git": None, "date": "2024-01-01",
    }  # fmt: skip
    content["ema"].model[0].conv.weight.data.fill_(0.25)
    torch.save(content, tmp_path / "last.pt")
    source = upstream.load_float(tmp_path / "last.pt")
    assert float(source.model.model[0].conv.weight.detach().mean()) == 0.25  # ema wins
    assert source.names[1] == "class 1"


def test_checkpoint_of_pypis_package_names_its_modules_differently(tmp_path, network, monkeypatch):
    monkeypatch.setitem(sys.modules, "yolov9", ModuleType("yolov9"))
    for name in ("models", "models.common", "models.yolo"):
        monkeypatch.setitem(sys.modules, f"yolov9.{name}", sys.modules[name])
    with monkeypatch.context() as patch:
        for cls in {type(module) for module in network.modules() if type(module).__module__.startswith("models.")}:
            patch.setattr(cls, "__module__", f"yolov9.{cls.__module__}")
        file = save_float(tmp_path / "pip.pt", copy.deepcopy(network))
    assert b"yolov9.models.yolo" in file.read_bytes()
    assert upstream.load_float(file).nc == 10


def test_quantized_where_float_is_needed_and_the_reverse(tmp_path, network):
    weights = save_float(tmp_path / "float.pt", copy.deepcopy(network))
    quantized = save_quantized(tmp_path / "int8.pt", weights)
    with pytest.raises(CheckpointError, match="is a quantized checkpoint"):
        upstream.load_float(quantized)
    with pytest.raises(CheckpointError, match="is an FP32 checkpoint"):
        checkpoint.load_quantized(weights)


def test_a_yamls_activation_does_not_stay_for_the_next_network():
    upstream.build_model({**TINY, "activation": "nn.ReLU()"})
    assert isinstance(upstream.build_model(TINY).model[0].act, nn.SiLU)


def test_fusing_keeps_outputs_and_is_what_upstream_computes(network):
    ours = upstream.call_fused(upstream.fuse(copy.deepcopy(network)))
    theirs = copy.deepcopy(network).fuse()
    with torch.no_grad():
        torch.testing.assert_close(ours(X)[0], network(X)[0], atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(ours(X)[0], theirs(X)[0], atol=1e-4, rtol=1e-5)


HYP = {"mosaic": 1.0} | dict.fromkeys(
    ("mixup", "copy_paste", "degrees", "translate", "scale", "shear", "perspective", "hsv_h", "hsv_s", "hsv_v",
     "flipud", "fliplr"), 0.0)  # fmt: skip


@pytest.mark.parametrize("numbers", [(0, 3, 6, 9), (9,)])
@pytest.mark.parametrize("mosaics", [False, True])
def test_a_dataset_holds_and_draws_from_its_images_alone(tmp_path, numbers, mosaics):
    """Each image has a colour of its own, and the only other one is the grey of what no image covers."""
    samples = write_set(tmp_path, 12, [(64, 64)], split="train")
    files = [str(samples[number].path) for number in numbers]
    images = read_images(files, 3).images
    known = {image.path: (image.labels.rows, image.size, image.labels.polygons) for image in images}
    seed_everything(0)
    dataset = upstream.make_dataset(known, 64, 4, stride=32, augment=mosaics, hyp=HYP if mosaics else None)
    colours, boxes = set(), []
    for index in [*range(len(files))] * 5:
        image, labels, path, _ = dataset[index]
        assert path == files[index]
        colours |= {tuple(pixel) for pixel in image.flatten(1).T.unique(dim=0).tolist()}
        boxes.append(len(labels))
    assert colours - {(114, 114, 114)} == {colour(number)[::-1] for number in numbers}
    if not mosaics:
        assert boxes == [len(samples[number].labels) for number in numbers] * 5
    assert (sum(boxes) > 0) == any(len(samples[number].labels) for number in numbers)
