"""What the exporters and qat.py leave alone, and what they say about a split that cannot be used, with real weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml
from qat_runs import quantize
from random_networks import TINY, random_network, save_float

import export_qat
import export_yoloV9

pytestmark = pytest.mark.timeout(300)
FAST = ("--check", "0", "--device", "cpu")
LABELS, CONFIG = "labels.txt", "config_infer_primary_yoloV9.txt"


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_float(tmp_path_factory.mktemp("hostile") / "tiny.pt", random_network(TINY))


def test_a_checkpoint_by_the_name_of_an_onnx_file_stays(network: Path, tmp_path: Path, capsys):
    mine = Path(shutil.copy(network, tmp_path / "mine.onnx"))
    before = mine.read_bytes()
    assert export_qat.main(["--weights", str(mine), "--imgsz", "64", *FAST]) == 2
    assert f"{mine} is read and would be overwritten" in capsys.readouterr().err
    assert mine.read_bytes() == before
    assert export_qat.main(["--weights", str(mine), "--imgsz", "64", "--output", str(tmp_path / "b.onnx"), *FAST]) == 0
    assert mine.read_bytes() == before


def test_files_of_others_beside_an_export_for_deepstream_stay(network: Path, tmp_path: Path, capsys):
    weights = Path(shutil.copy(network, tmp_path / "tiny.pt"))
    words = ["--weights", str(weights), "--size", "64", *FAST]
    (tmp_path / LABELS).write_text("mine\n")
    assert export_yoloV9.main(words) == 2
    assert f"{tmp_path / LABELS} holds other classes than this network" in capsys.readouterr().err
    assert (tmp_path / LABELS).read_text() == "mine\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [LABELS, "tiny.pt"]  # nothing was exported
    (tmp_path / LABELS).unlink()
    assert export_yoloV9.main(words) == 0
    assert export_yoloV9.main([*words, "--batch", "2"]) == 0  # our own files are replaced
    assert "batch-size=2" in (tmp_path / CONFIG).read_text()
    config = (tmp_path / CONFIG).read_text().replace("topk=300", "topk=10")
    (tmp_path / CONFIG).write_text(config)
    assert export_yoloV9.main(words) == 2
    assert (tmp_path / CONFIG).read_text() == config


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
