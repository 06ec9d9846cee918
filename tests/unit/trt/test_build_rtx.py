"""Building engines with the real TensorRT-RTX, which needs no GPU for it. No stand-in is used here."""

import time

import onnx
import pytest
from one_conv import METADATA, write_onnx
from onnx import TensorProto

from utils.core.errors import InputError, QatError
from utils.trt import tensorrt_api
from utils.trt.build import build
from utils.trt.engine_file import load_engine
from utils.trt.preflight import BuildConfig
from utils.trt.tensorrt_api import BUILDER_OPTIONS

FP32, FP16 = TensorProto.FLOAT, TensorProto.FLOAT16


@pytest.fixture(scope="module")
def rtx():
    return tensorrt_api.load_tensorrt("tensorrt_rtx_bindings")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: None)


def config(**changes):
    return BuildConfig(**{"targets": ("SM89",), "progress": False, **changes})


def test_a_build_whose_time_is_over_is_given_up(rtx, tmp_path):
    file = write_onnx(tmp_path / "a.onnx", (2, 3, 64, 96), FP16, quantized=True, opset=19)
    with pytest.raises(QatError, match="Build canceled"):
        build(file, tmp_path / "a.engine", config(), rtx, until=time.monotonic())
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]
    assert build(file, tmp_path / "a.engine", config(), rtx, until=time.monotonic() + 100).gpu == "SM89"


@pytest.mark.parametrize(
    ("quantized", "shape", "changes", "precision"),
    [
        (True, (2, 3, 64, 96), {}, "int8"),
        (False, (1, 3, 64, 96), {"targets": ("SM89", "SM120")}, "fp16"),
        (True, ("b", 3, "h", "w"), {"batch": (1, 2, 4), "height": (32, 64, 64), "width": (32, 96, 96)}, "int8"),
        (True, (2, 3, 64, 96), {"optimization_level": 2, "max_aux_streams": 3, "hardware_compatible": "ampere+",
                                "tiling_level": "fast", "max_tactics": 9, "version_compatible": True}, "int8"),
    ],
)  # fmt: skip
def test_strongly_typed_files(rtx, tmp_path, capsys, quantized, shape, changes, precision):
    file = write_onnx(tmp_path / "a.onnx", shape, FP16, quantized=quantized, opset=19)
    note = build(file, tmp_path / "a.engine", config(progress=True, **changes), rtx)
    assert "a.engine: Building engine: 100%" in capsys.readouterr().err
    assert note.options == {name: changes[name] for name in BUILDER_OPTIONS if name in changes}
    assert (tmp_path / "a.engine").stat().st_size > 1000
    assert (note.typing, note.precision, note.api) == ("strong", precision, rtx.name)
    assert rtx.name.startswith("TensorRT-RTX 1.")
    assert note.gpu == " ".join(changes.get("targets", ("SM89",)))
    assert note.metadata == METADATA
    assert note.warnings == () or "hardware_compatible" in changes  # which RTX does not support
    assert note.profile == ({"images": [[1, 3, 32, 32], [2, 3, 64, 96], [4, 3, 64, 96]]} if "batch" in changes else {})
    assert not list(tmp_path.glob("*.cache"))  # nothing was measured


def test_what_is_refused(rtx, tmp_path):
    full = write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96), quantized=True, opset=19)
    half = write_onnx(tmp_path / "b.onnx", (1, 3, 64, 96), FP16)
    model = onnx.load(half)
    model.graph.node[1].op_type = "Unknown"
    onnx.save(model, tmp_path / "c.onnx")
    for file, changes, said in (
        (half, {"targets": ()}, r"--target with one of .*SM89"),
        (half, {"targets": ("SM42",)}, r"SM42; it builds for .*SM120"),
        (tmp_path / "c.onnx", {}, r"c.onnx \(node without a name, Unknown\): .*Plugin not found"),
    ):
        with pytest.raises(InputError, match=said):
            build(file, tmp_path / "a.engine", config(**changes), rtx)
    assert not (tmp_path / "a.engine").exists()
    assert build(full, tmp_path / "a.engine", config(allow_fp32=True), rtx).precision == "int8"
    with pytest.raises(InputError, match=r"export without NMS$"):
        rtx.register_plugins(rtx.log())
    with pytest.raises(InputError, match="NVIDIA GPU"):
        load_engine(tmp_path / "a.engine", rtx, rtx.log(), None)
