"""A strongly typed file in an ONNX Runtime that computes other values from FP16 scales."""

import pytest
from one_conv import METADATA, write_onnx

from utils.runners import onnxrt
from utils.runners.onnxrt import OnnxRuntimeRunner


@pytest.mark.parametrize(("first", "typing", "warned"), [("99", "strong", 1), ("99", "weak", 0), ("1.16", "strong", 0)])
def test_it_says_so(first, typing, warned, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(onnxrt, "FP16_SCALES", onnxrt.Version(first))
    file = write_onnx(tmp_path / "a.onnx", quantized=True, metadata={**METADATA, "typing": typing, "kind": "ptq"})
    with OnnxRuntimeRunner(file):
        assert len(caplog.messages) == warned == sum("--typing weak" in message for message in caplog.messages)
