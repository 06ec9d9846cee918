"""The doors: who may import upstream, the quantizer libraries and TensorRT; and what a program's -h costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = sorted([*ROOT.glob("models/**/*.py"), *ROOT.glob("utils/**/*.py")])
PROGRAMS = ["qat.py", "qat.py quantize", "qat.py sensitive", "qat.py calibrate", "qat.py eval",
            "export_qat.py", "export_yoloV9.py",
            "reparameterization.py", "val_trt.py", "scripts/make_report.py", "scripts/run_upstream.py",
            "scripts/compare_placement.py", "scripts/build_engine.py", "scripts/inspect_engine.py",
            "scripts/benchmark_trt.py", "scripts/check_engine_setup.py",
            "data/demo/make_digits.py"]  # fmt: skip
OURS = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__") for path in LIBRARY
}
OURS |= {name.rpartition(".")[0] for name in OURS}


def imported(source: str) -> set[str]:
    """Dotted names that a module imports, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def doors(source: str) -> set[str]:
    """Which of the guarded things a module imports."""
    found = set()
    for name in imported(source):
        top = name.split(".")[0]
        if top in ("modelopt", "pytorch_quantization"):
            found.add("quantizer library")
        elif top.startswith("tensorrt"):
            found.add("TensorRT")
        elif top in ("models", "utils") and not {name, name.rpartition(".")[0]} & (OURS - {"models", "utils"}):
            found.add("upstream")
    return found


ALLOWED = {
    "upstream": {"utils/upstream.py", "utils/upstream_shims.py"},
    "quantizer library": {"models/quantize/backend.py"},
    "TensorRT": set(),  # utils/engine/tensorrt_api.py imports it by name, which this walk does not see
}


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_through_the_doors(path):
    name = path.relative_to(ROOT).as_posix()
    for door in doors(path.read_text(encoding="utf-8")):
        assert name in ALLOWED[door], f"{name} imports {door}"


@pytest.mark.parametrize(
    ("source", "door"),
    [
        ("def f():\n    from utils.general import LOGGER", "upstream"),
        ("import models.yolo", "upstream"),
        ("from models.common import Conv", "upstream"),
        ("import modelopt.torch.quantization as mtq", "quantizer library"),
        ("from pytorch_quantization.nn import TensorQuantizer", "quantizer library"),
        ("import tensorrt as trt", "TensorRT"),
        ("import tensorrt_rtx", "TensorRT"),
    ],
)
def test_the_walk_sees_a_forbidden_import(source, door):
    assert doors(source) == {door}


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_answers_at_once_and_without_heavy_imports(program):
    command = [sys.executable, "-X", "importtime", *program.split(), "-h"]
    began = time.perf_counter()
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr[-500:]
    assert "usage" in result.stdout.lower() or "python " in result.stdout
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")}
    assert not loaded & {"torch", "onnx", "onnxruntime", "modelopt", "tensorrt", "cv2", "matplotlib", "numpy"}
    assert time.perf_counter() - began < 10  # a second on an idle machine; what costs time is named above


def test_no_package_file_shadows_upstreams():
    assert not (ROOT / "models/__init__.py").exists()
    assert not (ROOT / "utils/__init__.py").exists()


def test_every_file_of_the_library_is_on_the_map():
    text = (ROOT / "models/quantize/__init__.py").read_text(encoding="utf-8")
    files = {path.name for path in (ROOT / "models/quantize").glob("*.py")} - {"__init__.py"}
    assert {name for name in files if not re.search(rf"\b{re.escape(name)}", text)} == set()
