"""Where libraries are missing, and what a bug report is asked for: complete, useful, and nobody's business."""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from known_images import write_set
from one_conv import write_onnx
from torch.utils import collect_env

from utils.core.files import save_torch
from utils.trt import tensorrt_api
from utils.trt.engine_file import EngineNote

ROOT = Path(__file__).resolve().parents[3]


def test_it_says_what_is_there(start):
    code, found, _ = start("scripts/make_report.py", "--environment")
    assert code == 0
    assert f"Overlay: {(ROOT / 'VERSION').read_text().strip()}" in found
    assert f"TensorRT: {tensorrt_api.load_tensorrt().name}" in found
    assert f"PyTorch version: {torch.__version__}" in found


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


def test_files_say_what_they_are_and_not_whose(tmp_path, monkeypatch, start):
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
    _, lines, _ = start("scripts/make_report.py", "--environment", *files)
    for line in ("stride: 32", "data: set.yaml", "onnx: a.onnx", "api: TensorRT 8.6.0", "typing: weak", "ap: 0.5",
                 "version: 0.1.0", "recipe: {'float': []}", "float_weights: best.pt"):  # fmt: skip
        assert f"  {line}" in lines
    text = "\n".join(lines)
    assert "cut.pt is damaged" in text
    assert "an FP32 checkpoint" in text.split("gelan-digits.pt")[1]
    for private in ("secret", "lee", "ann", "empty", "quantized_state", str(tmp_path)):
        assert private not in text


# what is not installed

WITHOUT = """
import atexit, importlib.util, runpy, sys, shutil
find, which = importlib.util.find_spec, shutil.which
missing = sys.argv[1].split(",")
importlib.util.find_spec = lambda name, *more: None if name in missing else find(name, *more)
shutil.which = lambda name, *more, **others: None if name in missing else which(name, *more, **others)
sys.argv = sys.argv[2:]
sys.path.insert(0, {root!r})
atexit.register(lambda: print(sorted({{"torch", "onnx", "onnxruntime", "cv2", "tensorrt"}} & set(sys.modules))))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TENSORRT = "tensorrt,tensorrt_rtx,tensorrt_rtx_bindings"
MISSING = [
    (TENSORRT, "scripts/build_engine.py", ("a.onnx",), "TensorRT is not installed"),
    (TENSORRT, "val_trt.py", ("none.engine", "--data", "data.yaml"), "none.engine does not exist"),
    (TENSORRT, "val_trt.py", ("a.onnx", "--data", "data.yaml", "--project", "a.pt"), "cannot write"),
    ("onnxruntime", "val_trt.py", ("--engine-file", "a.onnx", "--data", "data.yaml"), "this needs onnxruntime"),
    ("onnxslim", "export_qat.py", ("--weights", "a.pt", "--simplify"), "this needs onnxslim"),
    ("torch", "qat.py", ("eval", "--weights", "a.pt", "--data", "data.yaml"), "this needs torch"),
    ("tritonclient", "scripts/make_triton.py", ("a.onnx",), "this needs tritonclient"),
]  # fmt: skip


@pytest.mark.parametrize(("missing", "program", "words", "message"), MISSING)
def test_what_is_missing_is_said_before_anything_heavy_is_imported(tmp_path, missing, program, words, message):
    for name in ("m.yaml", "a.onnx", "a.engine", "a.pt"):
        (tmp_path / name).touch()
    write_set(tmp_path, 1)
    command = [sys.executable, "-c", WITHOUT.format(root=str(ROOT)), missing, str(ROOT / program), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {message}")
    assert done.stdout == "[]\n"
