"""How an exported file is typed: by the network, the operator set that was asked for, and the installed TensorRT."""

import pytest

from utils.onnx_graph import export
from utils.onnx_graph.export import ExportConfig


@pytest.mark.parametrize(
    ("quantized", "asked", "typing", "opset"),
    [
        (True, {}, "strong", 19), (False, {}, "weak", 17), (True, {"opset": 17}, "weak", 17),
        (True, {"opset": 20}, "strong", 20), (False, {"opset": 20}, "weak", 20),
        (True, {"typing": "weak"}, "weak", 17), (False, {"typing": "strong"}, "strong", 17),
    ],
)  # fmt: skip
def test_typing_follows_from_network_and_opset(quantized, asked, typing, opset):
    config = ExportConfig(**{"typing": "auto", **asked}).resolved(quantized)
    assert (config.typing, config.opset) == (typing, opset)


@pytest.mark.parametrize(
    ("installed", "typing"),
    [({}, "strong"), ({"tensorrt": "8.6.1"}, "weak"), ({"tensorrt-cu12": "10.11.0.33"}, "weak"),
     ({"tensorrt": "10.12.0"}, "strong"), ({"tensorrt": "11.4.0.12"}, "strong"), ({"tensorrt": "unknown"}, "strong")],
)  # fmt: skip
def test_an_installed_tensorrt_decides(installed, typing, monkeypatch):
    def version(name: str) -> str:
        if name not in installed:
            raise export.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(export.metadata, "version", version)
    assert ExportConfig(typing="auto").resolved(quantized=True).typing == typing
