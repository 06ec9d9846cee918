"""What a bug report is asked for: complete where libraries are, useful where they are not, and nobody's business."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from one_conv import write_onnx
from torch.utils import collect_env

from utils.cli import run_program
from utils.core.files import save_torch
from utils.jobs import environment
from utils.trt import tensorrt_api
from utils.trt.engine_file import EngineNote

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "scripts"))
import make_report  # noqa: E402


def run(*words) -> int:
    return run_program(make_report.make_parser(), make_report.main, [str(word) for word in words])


@pytest.fixture
def quick(monkeypatch):
    """torch's report takes ten seconds."""
    monkeypatch.setattr(collect_env, "get_pretty_env_info", lambda: "PyTorch version: some")


def test_it_says_what_is_there(capsys):
    assert run("--environment") == 0
    found = capsys.readouterr().out
    assert f"Overlay: {(ROOT / 'VERSION').read_text().strip()}" in found
    assert f"TensorRT: {tensorrt_api.load().name}\n" in found
    assert f"PyTorch version: {torch.__version__}\n" in found
    assert f"Python version: {sys.version.split()[0]} " in found


def test_it_works_where_nothing_is_installed(tmp_path):
    """A Python without site-packages and a PATH without programs; the files are there, what reads them is not."""
    (tmp_path / "a.onnx").write_bytes(b"1")
    (tmp_path / "a.pt").write_bytes(b"2")
    command = [sys.executable, "-S", "scripts/make_report.py", "--environment", tmp_path / "a.onnx", tmp_path / "a.pt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env={"PATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    overlay, libraries, of_onnx, of_pt = done.stdout.split("\n\n")
    assert "commit unknown" in overlay
    assert "TensorRT is not installed" in overlay
    assert libraries.startswith("PyTorch is not installed; Python 3.")
    assert "pip install onnx" in of_onnx
    assert "No module named 'torch'" in of_pt
    assert hashlib.sha256(b"1").hexdigest() in of_onnx


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
    text = environment.describe(files)
    for line in ("stride: 32", "data: set.yaml", "onnx: a.onnx", "api: TensorRT 8.6.0", "typing: weak", "ap: 0.5",
                 "version: 0.1.0", "recipe: {'float': []}", "float_weights: best.pt"):  # fmt: skip
        assert f"\n  {line}\n" in text
    assert "cut.pt is not a PyTorch checkpoint, or it is truncated" in text
    assert "a float checkpoint" in text.split("gelan-digits.pt")[1]
    for private in ("secret", "lee", "ann", "empty", "quantized_state", str(tmp_path)):
        assert private not in text


def test_a_damaged_note_beside_an_engine_is_said(tmp_path, quick):
    (tmp_path / "a.engine").write_bytes(b"plan")
    (tmp_path / "a.engine.json").write_text("{")
    assert "  a.engine.json is damaged" in environment.describe([tmp_path / "a.engine"])


def test_a_checkout_says_its_commit(tmp_path, monkeypatch, quick):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert "commit unknown" in environment.describe()
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(tmp_path))
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert f"commit {head}" in environment.describe()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give run folders"),
        (["--environment", "--output", "out"], "--output"),
        (["--environment", "missing.onnx"], "missing.onnx"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, said, capsys, quick):
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1
