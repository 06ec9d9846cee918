"""What a bug report is asked for: complete where libraries are, useful where they are not, and nobody's business."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from one_conv import write_onnx
from torch.utils import collect_env

from utils.core.files import save_torch
from utils.trt import tensorrt_api
from utils.trt.engine_file import EngineNote

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "scripts"))
import make_report  # noqa: E402


def run(*words) -> int:
    return make_report.run([str(word) for word in words])


@pytest.fixture
def quick(monkeypatch):
    """torch's report takes ten seconds."""
    monkeypatch.setattr(collect_env, "get_pretty_env_info", lambda: "PyTorch version: some")


def test_it_says_what_is_there(capsys):
    assert run("--environment") == 0
    found = capsys.readouterr().out
    assert f"Overlay: {(ROOT / 'VERSION').read_text().strip()}" in found
    assert f"TensorRT: {tensorrt_api.load_tensorrt().name}\n" in found
    assert f"PyTorch version: {torch.__version__}\n" in found
    assert f"Python version: {sys.version.split()[0]} " in found


def test_files_say_what_they_are_and_not_whose(tmp_path, quick):
    metadata = {"names": json.dumps({0: "secret thing"}), "stride": "32", "empty": "", "data": "/data/bob lee/set.yaml"}
    engine = tmp_path / "a.engine"
    engine.write_bytes(b"plan")
    EngineNote(onnx="/home/ann/a.onnx", api="TensorRT 8.6.0", gpu="NVIDIA A", metadata={"typing": "weak"}).save(engine)
    content = {
        "format": "yolov9-quantized", "format_version": 1, "version": "0.1.0", "names": {0: "secret thing"},
        "recipe": {"float": []}, "yaml": {"head": []}, "quantized_state": {"w": torch.zeros(2)},
        "extra": {"ap": 0.5, "float_weights": "/home/ann/best.pt"},
    }  # fmt: skip
    save_torch(content, tmp_path / "int8.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "int8.pt").read_bytes()[:400])
    onnx = write_onnx(tmp_path / "a.onnx", quantized=True, metadata=metadata)
    files = [onnx, engine, tmp_path / "int8.pt", tmp_path / "cut.pt", ROOT / "data/demo/gelan-digits.pt"]
    text = make_report.environment_text(files)
    for line in ("stride: 32", "data: set.yaml", "onnx: a.onnx", "api: TensorRT 8.6.0", "typing: weak", "ap: 0.5",
                 "version: 0.1.0", "recipe: {'float': []}", "float_weights: best.pt"):  # fmt: skip
        assert f"\n  {line}\n" in text
    assert "cut.pt is not a PyTorch checkpoint, or it is truncated" in text
    assert "a float checkpoint" in text.split("gelan-digits.pt")[1]
    for private in ("secret", "lee", "ann", "empty", "quantized_state", str(tmp_path)):
        assert private not in text
