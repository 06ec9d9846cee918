"""The job behind `scripts/make_report.py --environment`: what a bug report needs; nothing is written.

It works where torch and TensorRT are not installed.
"""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from utils.core.errors import QatError
from utils.core.files import check_file, file_hash
from utils.core.text import short_repr

NO_VALUES: tuple[Any, ...] = ("", None, {}, ())


def environment_text(files: Iterable[str | Path] = ()) -> str:
    """Return versions, GPU and driver, then what each file says about itself."""
    from models.quantize import __version__
    from utils.trt import tensorrt_api

    try:
        tensorrt = tensorrt_api.load_tensorrt().name
    except QatError as error:
        tensorrt = str(error)
    if importlib.util.find_spec("torch") is None:
        libraries = f"PyTorch is not installed; Python {platform.python_version()} on {platform.platform()}"
    else:
        from torch.utils.collect_env import get_pretty_env_info

        libraries = get_pretty_env_info().strip()
    return "\n\n".join([f"Overlay: {__version__}\nTensorRT: {tensorrt}", libraries, *map(describe_file, files)])


def describe_file(file: str | Path) -> str:
    """Return size, digest and metadata of a file.

    Of a path only the last name is shown, and no class names: neither is anybody's business.
    """
    path = check_file(file, "expected a .onnx, .engine, .plan or .pt")
    lines = [f"{path.name}: {path.stat().st_size:,} bytes, SHA-256 {file_hash(path)}"]
    metadata: Mapping[str, Any] = {}
    try:
        metadata = metadata_of_file(path)
    except (QatError, ImportError) as error:
        lines.append(f"  {str(error).replace(str(path), path.name)}")
    for name, value in metadata.items():
        if name == "names" or value in NO_VALUES:
            continue
        text = value if isinstance(value, str) else short_repr(value)
        if Path(text).is_absolute():
            text = Path(text).name
        lines.append(f"  {name}: {text}")
    return "\n".join(lines)


def metadata_of_file(path: Path) -> Mapping[str, Any]:
    """Return what a file says about itself; empty for a file of another kind."""
    from utils.trt.engine_file import ENGINE_SUFFIXES, EngineNote

    if path.suffix == ".onnx":
        from utils.trt.onnx_file import OnnxFile

        model = OnnxFile.read(path)
        inputs = ", ".join(map(str, model.inputs))
        outputs = ", ".join(map(str, model.outputs))
        return {"opset": model.opset, "inputs": inputs, "outputs": outputs, **model.metadata}
    if path.suffix in ENGINE_SUFFIXES:
        note = vars(EngineNote.load(path))
        return {**note, **note["metadata"], "metadata": None, "tuning": None}
    if path.suffix == ".pt":
        from models.quantize import checkpoint

        content = checkpoint.summary(path) or {"kind": "an FP32 checkpoint, or another file of PyTorch's"}
        return {**content, **content.get("extra", {}), "extra": None}
    return {}
