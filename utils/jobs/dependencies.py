"""What a program needs that may not be installed, said at once: before torch is imported, and before any work."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from utils.core.errors import DependencyError

TRITONCLIENT = 'pip install "tritonclient[http,grpc]"'
INSTALL = {
    "torch": "run install_dependencies.sh in the folder of this overlay's clone",
    "onnx": "run install_dependencies.sh in the folder of this overlay's clone, or pip install onnx",
    "onnxruntime": "run install_dependencies.sh in the folder of this overlay's clone, or pip install onnxruntime",
    "tritonclient": TRITONCLIENT,
    "grpc": TRITONCLIENT,
    "geventhttpclient": TRITONCLIENT,
    "onnxslim": "pip install onnxslim, or leave --simplify out",
}
ENGINES = (".engine", ".plan")


def need(*modules: str) -> None:
    """Raise `DependencyError` for the first module that is not installed; nothing is imported."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            hint = INSTALL.get(name, f"pip install {name}")
            raise DependencyError(f"this needs {name}, which is not installed: {hint}")


def need_tensorrt(trtexec: bool = False) -> None:
    """Raise `DependencyError` if there is no TensorRT, or, where that builds, no `trtexec`; nothing is imported."""
    from utils.trt import tensorrt_api

    if trtexec:
        from utils.trt.trtexec import find_trtexec

        find_trtexec()
    elif tensorrt_api.installed_module() is None:
        tensorrt_api.load_tensorrt()


def need_for(path: str | Path) -> None:
    """The same for what runs a network, by its file's name: `.onnx`, `.engine` or `.plan`, `.pt`."""
    need("torch")
    suffix = Path(path).suffix.lower()
    if suffix == ".onnx":
        need("onnxruntime")
    elif suffix in ENGINES:
        need_tensorrt()
