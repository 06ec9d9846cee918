"""The one reader of ONNX files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from utils.core.errors import DependencyError, InputError, no_file

if TYPE_CHECKING:
    from onnx import ModelProto


def read_onnx(path: str | Path, *, check: bool = False) -> ModelProto:
    """Read an ONNX file.

    Args:
        check: also run ONNX's checker, which does not know operators of TensorRT's own.

    Raises:
        InputError: the file is missing, or it is not a whole ONNX file.
        DependencyError: onnx is not installed.
    """
    try:
        import onnx
    except ImportError as error:
        raise DependencyError("reading ONNX files needs onnx; install it with: pip install onnx") from error
    path = Path(path)
    if not path.is_file():
        raise InputError(no_file(path, "expected an ONNX file, as export_qat.py writes it"))
    try:
        model = onnx.load(path)
        if check:
            onnx.checker.check_model(model)
    except Exception as error:  # protobuf and the checker raise several unrelated types
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{path} is not an ONNX file, or it is truncated: {reason}") from error
    if not model.graph.input or not model.graph.node:
        raise InputError(f"{path} is not an ONNX file, or it is truncated: it holds no network")
    return model


STRONG_FROM = (10, 12)  # where TensorRT's release notes call weak typing deprecated; 11 has none


def wanted_typing(version: str) -> Literal["weak", "strong"]:
    """What TensorRT of a version, such as '10.13.0', wants.

    Raises:
        ValueError: this is no version.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    return "strong" if (major, minor) >= STRONG_FROM else "weak"
