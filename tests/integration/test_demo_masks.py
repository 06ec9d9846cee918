"""The demo model with masks: its size, and the network that its training starts from."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from utils import upstream
from utils.core.errors import InputError


@pytest.fixture
def train_masks(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    """data/demo/train_masks.py, which is no package member."""
    monkeypatch.setattr(sys, "path", [str(checkout / "data" / "demo"), *sys.path])
    sys.modules.pop("train_masks", None)
    import train_masks

    return train_masks


def test_training_starts_with_the_boxes_and_classes_of_the_detector(train_masks, checkout: Path, tmp_path: Path):
    demo = checkout / "data" / "demo"
    train_masks.write_start(demo / "gelan-digits.pt", demo / "gelan-digits-seg.yaml", tmp_path / "start.pt")
    found, detector = (upstream.load_float(path) for path in (tmp_path / "start.pt", demo / "gelan-digits.pt"))
    assert sum(parameter.numel() for parameter in found.model.parameters()) == 900_494
    assert found.names == detector.names
    images = torch.rand(2, 3, 96, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rows, (_, coefficients, prototypes) = found.model(images)
        torch.testing.assert_close(rows[:, : 4 + found.nc], detector.model(images)[0], rtol=0, atol=0)
    assert coefficients.shape[1] == prototypes.shape[1] == 32
    assert prototypes.shape[2:] == (24, 16)
    assert (tmp_path / "start.pt").stat().st_size <= 2_300_000


def test_a_description_of_another_network_is_refused(train_masks, checkout: Path, tmp_path: Path):
    text = (checkout / "data/demo/gelan-digits-seg.yaml").read_text()
    shallow, count = re.subn(r"RepNCSPELAN4, \[96, 80, 40, 1\]\],  # 20", "Conv, [96, 1]],  # 20", text)
    assert count == 1
    (tmp_path / "other.yaml").write_text(shallow)
    with pytest.raises(InputError, match=r"has no model\.20\.[\w.]+, which .*gelan-digits\.pt has"):
        train_masks.write_start(checkout / "data/demo/gelan-digits.pt", tmp_path / "other.yaml", tmp_path / "start.pt")
    assert not (tmp_path / "start.pt").exists()
