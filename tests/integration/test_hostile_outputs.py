"""What the exporters and qat.py leave alone, and what they say about a split that cannot be used, with real weights."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml
from qat_runs import quantize
from random_networks import TINY, random_network, save_float

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_float(tmp_path_factory.mktemp("hostile") / "tiny.pt", random_network(TINY))


@pytest.mark.parametrize("kind", ["headers can be read", "nothing can be read"])
def test_training_images_that_cannot_be_read_are_not_called_missing(network: Path, tmp_path: Path, capsys, kind: str):
    content = b"no image"
    if kind == "headers can be read":
        noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
        content = cv2.imencode(".png", noise)[1].tobytes()[:6000]
    (tmp_path / "images").mkdir()
    for index in range(3):
        (tmp_path / f"images/{index}.png").write_bytes(content)
    names = [str(index) for index in range(TINY["nc"])]
    data = tmp_path / "data.yaml"
    data.write_text(yaml.safe_dump({"path": str(tmp_path), "train": "images", "val": "images", "names": names}))
    words = ("--ptq-only", "--no-eval-origin", "--no-eval-ptq")
    assert quantize(network, data, tmp_path / "runs", *words) == 2
    err = capsys.readouterr().err
    assert "none of" in err
    assert "3 images can be " in err
    assert str(tmp_path / "images/0.png") in err
    assert "empty" not in err
