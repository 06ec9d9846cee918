"""Building engines with the real TensorRT-RTX, which needs no GPU for it. No stand-in is used here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from one_conv import METADATA, write_onnx
from onnx import TensorProto

from utils.core.errors import InputError
from utils.trt import tensorrt_api
from utils.trt.build_config import BuildConfig
from utils.trt.builder import build
from utils.trt.engine_file import EngineNote, load_engine
from utils.trt.tune import BuildProcess

FP32, FP16 = TensorProto.FLOAT, TensorProto.FLOAT16
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def rtx():
    return tensorrt_api.load("tensorrt_rtx_bindings")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: None)


def config(**changes):
    return BuildConfig(**{"targets": ("SM89",), "progress": False, **changes})


def test_what_the_module_can_do(rtx):
    assert rtx.name.startswith("TensorRT-RTX 1.")
    assert (rtx.weakly_typed, rtx.strongly_typed, rtx.max_opset) == (False, True, None)
    assert {"SM75", "SM89", "SM120"} <= set(rtx.ahead_of_time)
    assert rtx.torch_type(rtx.module.DataType.HALF) == "float16"


def test_options_exist_in_a_current_tensorrt(rtx, tmp_path):
    """A stand-in takes any option."""
    file = write_onnx(tmp_path / "a.onnx", (2, 3, 64, 96), FP16, quantized=True, opset=19)
    options = {"optimization_level": 2, "max_aux_streams": 3, "timing_iterations": 2}
    assert build(file, tmp_path / "a.engine", config(**options), rtx).note.options == options


def test_a_build_in_a_process_of_its_own_with_a_limit(tmp_path):
    file = write_onnx(tmp_path / "a.onnx", (2, 3, 64, 96), FP16, quantized=True, opset=19)
    with BuildProcess() as process:
        assert process.build(file, tmp_path / "a.engine", config(), 100).error == ""
        late = process.build(file, tmp_path / "b.engine", config(), 0.01)
    assert EngineNote.load(tmp_path / "a.engine").gpu == "SM89"
    assert late.error == "not built within 0 s"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.engine", "a.engine.json", "a.onnx"]


@pytest.mark.parametrize(
    ("quantized", "shape", "changes", "precision"),
    [
        (True, (2, 3, 64, 96), {}, "int8"),
        (False, (1, 3, 64, 96), {"targets": ("SM89", "SM120")}, "fp16"),
        (True, ("b", 3, "h", "w"), {"batch": (1, 2, 4), "height": (32, 64, 64), "width": (32, 96, 96)}, "int8"),
    ],
)
def test_strongly_typed_files(rtx, tmp_path, quantized, shape, changes, precision):
    file = write_onnx(tmp_path / "a.onnx", shape, FP16, quantized=quantized, opset=19)
    result = build(file, tmp_path / "a.engine", config(**changes), rtx)
    assert result.size_bytes > 1000
    note = EngineNote.load(result.path)
    assert (note.typing, note.precision, note.api) == ("strong", precision, rtx.name)
    assert note.gpu == " ".join(changes.get("targets", ("SM89",)))
    assert note.metadata == METADATA
    assert note.warnings == ()
    assert note.profile == ({"images": [[1, 3, 32, 32], [2, 3, 64, 96], [4, 3, 64, 96]]} if "batch" in changes else {})
    assert not list(tmp_path.glob("*.cache"))  # nothing was measured


def test_what_is_refused(rtx, tmp_path):
    full = write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96), quantized=True, opset=19)
    half = write_onnx(tmp_path / "b.onnx", (1, 3, 64, 96), FP16)
    model = onnx.load(half)
    model.graph.node[1].op_type = "Unknown"
    onnx.save(model, tmp_path / "c.onnx")
    for file, changes, said in (
        (full, {}, "--typing strong"),
        (half, {"targets": ()}, r"--target with one of .*SM89"),
        (half, {"targets": ("SM42",)}, r"SM42; it builds for .*SM120"),
        (tmp_path / "c.onnx", {}, r"c.onnx \(node without a name, Unknown\): .*Plugin not found"),
    ):
        with pytest.raises(InputError, match=said):
            build(file, tmp_path / "a.engine", config(**changes), rtx)
    assert not (tmp_path / "a.engine").exists()
    assert build(full, tmp_path / "a.engine", config(allow_fp32=True), rtx).note.precision == "int8"
    with pytest.raises(InputError, match=r"export without NMS$"):
        rtx.register_plugins(rtx.log())
    with pytest.raises(InputError, match="NVIDIA GPU"):
        load_engine(tmp_path / "a.engine", rtx, rtx.log(), None)


def test_progress_monitor(rtx, tmp_path, capsys):
    build(write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96), FP16), tmp_path / "a.engine", config(progress=True), rtx)
    assert "a.engine: Building engine: 100%" in capsys.readouterr().err


def test_ctrl_c_cancels_a_build_in_one_line(tmp_path):
    """TensorRT drops what is raised in what it calls, and prints about it; here it comes while it calls."""
    file = write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96), FP16)
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import os, signal
from pathlib import Path
from utils.trt import builder, tensorrt_api
from utils.trt.build_config import BuildConfig

def struck(api, setup, *words):
    shown(api, setup, *words)
    class Struck(type(setup.progress_monitor)):
        def phase_start(self, *words):
            os.kill(os.getpid(), signal.SIGINT)
            super().phase_start(*words)
    setup.progress_monitor = Struck()

shown, builder._show_progress = builder._show_progress, struck
rtx = tensorrt_api.load("tensorrt_rtx_bindings")
config = BuildConfig(targets=("SM89",), progress=False)
try:
    builder.build(Path({str(file)!r}), Path({str(tmp_path / "a.engine")!r}), config, rtx)
except KeyboardInterrupt:
    sys.exit("interrupted")
"""
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "program.py"]
