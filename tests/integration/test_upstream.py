"""The door to upstream: its checkpoints load without running code from them, and what cannot be used is named."""

from __future__ import annotations

import copy
import sys
from pathlib import PosixPath
from types import ModuleType

import numpy as np
import pytest
import torch
from known_images import colour, write_set
from random_networks import TINY, random_network, save_float, save_quantized
from torch import nn

from models.quantize import checkpoint
from models.quantize.finetune import seed_everything
from utils import upstream
from utils.core.errors import CheckpointError
from utils.core.tasks import predicted
from utils.evaluation.images import read_images


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return random_network(TINY)


@pytest.mark.parametrize("name", ["gelan-digits", "gelan-digits-seg"])
def test_networks_are_what_torch_reads(name, checkout):
    path = checkout / f"data/demo/{name}.pt"
    found, expected = upstream.read_checkpoint(path)["model"], torch.load(path, weights_only=False)["model"]
    for (where, one), (_, other) in zip(found.named_modules(), expected.named_modules(), strict=True):
        assert type(one) is type(other)
        assert vars(one).keys() == vars(other).keys(), where
    one, other = found.state_dict(), expected.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one)
    x = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        results = [predicted(upstream.load_float(path).model(x)), predicted(expected.float().eval()(x))]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_full_training_checkpoint_with_ema_optimizer_numpy_and_paths(tmp_path, network):
    file = tmp_path / "last.pt"
    content = {
        "epoch": 7,
        "best_fitness": np.array([0.5]),
        "model": copy.deepcopy(network).half(),
        "ema": copy.deepcopy(network).half(),
        "optimizer": {"state": {}, "param_groups": [{"lr": np.float64(0.1)}]},
        "opt": {"save_dir": PosixPath("/elsewhere/runs"), "weights": ""},
        "git": None,
        "date": "2024-01-01",
    }
    with torch.no_grad():
        content["ema"].model[0].conv.weight.fill_(0.25)
    torch.save(content, file)
    found = upstream.load_float(file)
    assert float(found.model.model[0].conv.weight.detach().mean()) == 0.25  # ema wins
    assert found.names[1] == "class 1"


def test_checkpoint_of_pypis_package_names_its_modules_differently(tmp_path, network, monkeypatch):
    monkeypatch.setitem(sys.modules, "yolov9", ModuleType("yolov9"))
    for name in ("models", "models.common", "models.yolo"):
        monkeypatch.setitem(sys.modules, f"yolov9.{name}", sys.modules[name])
    other = copy.deepcopy(network)
    classes = {type(module) for module in other.modules() if type(module).__module__.startswith("models.")}
    names = {cls: cls.__module__ for cls in classes}
    try:
        for cls in classes:
            cls.__module__ = f"yolov9.{cls.__module__}"
        file = save_float(tmp_path / "pip.pt", other)
    finally:
        for cls, name in names.items():
            cls.__module__ = name
    assert b"yolov9.models.yolo" in file.read_bytes()
    assert upstream.load_float(file).nc == 10


def test_quantized_where_float_is_needed_and_the_reverse(tmp_path, network):
    weights = save_float(tmp_path / "float.pt", copy.deepcopy(network))
    quantized = save_quantized(tmp_path / "int8.pt", weights)
    assert checkpoint.kind(quantized) == "quantized"
    with pytest.raises(CheckpointError, match="is a quantized checkpoint"):
        upstream.load_float(quantized)
    with pytest.raises(CheckpointError, match="is a float checkpoint"):
        checkpoint.load_quantized(weights)


def test_a_yamls_activation_does_not_stay_for_the_next_network():
    upstream.build_model({**TINY, "activation": "nn.ReLU()"})
    assert isinstance(upstream.build_model(TINY).model[0].act, nn.SiLU)


def test_fusing_keeps_outputs_and_is_what_upstream_computes(network):
    x = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    ours = upstream.call_fused(upstream.fuse(copy.deepcopy(network)))
    theirs = copy.deepcopy(network).fuse()
    with torch.no_grad():
        torch.testing.assert_close(ours(x)[0], network(x)[0], atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(ours(x)[0], theirs(x)[0], atol=1e-4, rtol=1e-5)


WITHOUT_CHANGES = dict.fromkeys(
    ("mixup", "copy_paste", "degrees", "translate", "scale", "shear", "perspective", "hsv_h", "hsv_s", "hsv_v",
     "flipud", "fliplr"), 0.0) | {"mosaic": 1.0}  # fmt: skip


def known(files):
    """Images as `make_dataset` takes them."""
    images = read_images(files, 3).images
    return {image.path: (image.labels.rows, image.size, image.labels.polygons) for image in images}


@pytest.mark.parametrize("kept", [(0, 3, 6, 9), (9,), tuple(range(12))])
def test_mosaics_draw_only_from_the_images_that_are_kept(tmp_path, kept):
    """Each image has a colour of its own, and the only other one is the grey of what no image covers."""
    samples = write_set(tmp_path, 12, [(64, 64)], split="train")
    files = [str(samples[index].path) for index in kept]
    seed_everything(0)
    dataset = upstream.make_dataset(known(files), 64, 4, stride=32, augment=True, hyp=WITHOUT_CHANGES)
    allowed = {colour(index)[::-1] for index in kept}
    seen, boxes = set(), 0
    for _ in range(5):
        for index in range(len(dataset)):
            image, labels, path, _ = dataset[index]
            assert path == files[index]
            seen |= {tuple(one) for one in image.flatten(1).T.unique(dim=0).tolist()}
            boxes += len(labels)
    assert len(dataset) == len(kept)
    assert seen - {(114, 114, 114)} == allowed
    assert (boxes > 0) == any(len(samples[index].labels) for index in kept)


def test_labels_follow_the_images_that_are_kept(tmp_path):
    samples = write_set(tmp_path, 8, [(64, 64)], split="train")
    whole, some = (
        upstream.make_dataset(known([str(one.path) for one in part]), 64, 4, stride=32)
        for part in (samples, samples[2::3])
    )
    assert [path for _, _, path, _ in (some[index] for index in range(len(some)))] == [
        str(one.path) for one in samples[2::3]
    ]
    for index, other in enumerate((2, 5)):
        assert torch.equal(some[index][0], whole[other][0])
        assert torch.equal(some[index][1], whole[other][1])
    assert [len(labels) for labels in some.labels] == [len(samples[index].labels) for index in (2, 5)]
