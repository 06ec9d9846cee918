"""Files that people take for YOLOv9 checkpoints: read where they hold the network, otherwise named in one line."""

import argparse
import copy
import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from random_networks import TINY, random_network
from torch import nn
from torch.optim.swa_utils import AveragedModel

from utils import upstream
from utils.core.errors import CheckpointError


@pytest.fixture(scope="module")
def network():
    return random_network(TINY)


def with_attributes(network: nn.Module, **attributes: Any) -> nn.Module:
    network = copy.deepcopy(network)
    vars(network).update(attributes)
    return network


# what is written of a network → that network
READ = {
    "a bare module": lambda network: network,
    "DataParallel": lambda network: {"model": nn.DataParallel(network), "ema": None},
    "DataParallel, bare": nn.DataParallel,
    "AveragedModel": lambda network: {"model": None, "ema": AveragedModel(network)},
    "stride as a list": lambda network: {"model": with_attributes(network, stride=network.stride.tolist())},
    "attributes that nothing needs": lambda network: with_attributes(
        network, args=argparse.Namespace(lr=0.1), started=datetime.now()
    ),
    "keys that nothing needs": lambda network: {
        "model": network, "when": datetime.now(), "args": argparse.Namespace(lr=0.1), "level": logging.Formatter(),
        "loss": nn.BCELoss(), "optimizer": torch.optim.SGD(network.parameters(), 0.1), "function": len,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_a_file_that_holds_the_network_is_read(network, tmp_path, kind):
    torch.save(READ[kind](network), tmp_path / "a.pt")
    model = upstream.load_float(tmp_path / "a.pt").model
    expected = network.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name].to(value.dtype)) for name, value in model.state_dict().items())


def test_training_options_are_read_from_a_namespace(network, tmp_path):
    opt = argparse.Namespace(imgsz=96, data=Path("digits.yaml"), when=datetime.now())
    torch.save({"model": network, "opt": opt}, tmp_path / "a.pt")
    found = upstream.load_float(tmp_path / "a.pt")
    assert (found.imgsz, found.data) == (96, "digits.yaml")


NAMED = {
    "state_dict": (lambda network: network.state_dict(), r"a state_dict.*torch\.save\("),
    "state_dict of lightning": (lambda network: {"state_dict": network.state_dict(), "epoch": 1}, "a state_dict"),
    "state_dict as model": (lambda network: {"model": network.state_dict()}, "a state_dict"),
    "state_dict as ema": (lambda network: {"ema": {"module": network.state_dict()}}, "a state_dict"),
    "another module": (lambda network: nn.Sequential(nn.Conv2d(3, 3, 1)), "a Sequential.*train.py"),
    "training state": (lambda network: {"epoch": 1, "optimizer": {"state": {0: torch.ones(1)}}}, "keys.*train.py"),
    "a tensor": (lambda network: torch.ones(3), "a Tensor.*train.py"),
    "names None": (lambda network: {"model": with_attributes(network, names=None)}, "names of its classes are None"),
    "own class": (lambda network: {"model": with_attributes(network, own=logging.Formatter())}, "code of your own"),
}


@pytest.mark.parametrize("kind", NAMED)
def test_what_cannot_be_used_is_named_in_one_line(network, tmp_path, kind):
    made, named = NAMED[kind]
    torch.save(made(network), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=rf"^[^\n]*a\.pt[^\n]*{named}[^\n]*$"):
        upstream.load_float(tmp_path / "a.pt")


def test_the_command_for_a_state_dict_makes_a_checkpoint(network, tmp_path, checkout):
    """What the line of a state_dict tells to do."""
    from models.yolo import DetectionModel

    model = DetectionModel(copy.deepcopy(TINY), nc=TINY["nc"])
    model.load_state_dict(network.state_dict())
    torch.save({"model": model}, tmp_path / "new.pt")
    found = upstream.load_float(tmp_path / "new.pt").model
    assert torch.equal(next(found.parameters()), next(network.parameters()))
