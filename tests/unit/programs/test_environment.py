"""What a bug report is asked for: complete where libraries are, useful where they are not, and nobody's business."""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch
from one_conv import write_onnx
from torch.utils import collect_env

from utils.core.files import save_torch
from utils.trt import tensorrt_api
from utils.trt.engine_file import EngineNote

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "scripts"))
import make_report  # noqa: E402


def test_it_says_what_is_there(capsys):
    assert make_report.run(["--environment"]) == 0
    found = capsys.readouterr().out
    assert f"Overlay: {(ROOT / 'VERSION').read_text().strip()}" in found
    assert f"TensorRT: {tensorrt_api.load_tensorrt().name}\n" in found
    assert f"PyTorch version: {torch.__version__}\n" in found


def test_what_runs_without_torch_needs_only_what_the_page_lists(tmp_path):
    section = (ROOT / "docs/jetson.md").read_text(encoding="utf-8").split("## Without torch")[1]
    listed = [word.strip('"').split(">")[0] for line in re.findall(r"pip install (.*?)(?: #|$)", section, re.M)
              for word in line.split() if "cuda" not in word]  # fmt: skip
    for name in listed:  # the packages of this environment that are listed, and what they need
        needs = metadata.distribution(name).requires or []
        listed += [re.match(r"[\w-]+", need)[0] for need in needs if ";" not in need and need not in listed]
        for top in {file.parts[0] for file in metadata.files(name)} - {"..", "__pycache__"}:
            if not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(metadata.distribution(name).locate_file(top))
    (tmp_path / "a.json").symlink_to(ROOT / "tests/data/inspector-8.6.json")
    write_onnx(tmp_path / "a.onnx")
    programs = dict.fromkeys(re.findall(r"\bscripts/\w+\.py", section), "-h")
    assert len(programs) == 2
    words = [*programs.items(), ("scripts/make_report.py", "--environment")]
    for program, rest in [*words, ("scripts/build_engine.py", "a.onnx")]:
        command, env = [sys.executable, "-S", ROOT / program, *rest.split()], {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        expected = (0, 0) if (program, rest) in words else (2, 1)
        assert (done.returncode, len(done.stderr.splitlines())) == expected, done.stderr


def test_files_say_what_they_are_and_not_whose(tmp_path, monkeypatch):
    monkeypatch.setattr(collect_env, "get_pretty_env_info", lambda: "")  # which takes ten seconds
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
    assert "cut.pt is damaged" in text
    assert "a float checkpoint" in text.split("gelan-digits.pt")[1]
    for private in ("secret", "lee", "ann", "empty", "quantized_state", str(tmp_path)):
        assert private not in text
