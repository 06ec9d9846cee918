"""What a bug report needs to know: torch's report of the environment, TensorRT, and what files say of themselves."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from models.quantize import __version__
from utils.core.errors import QatError
from utils.core.files import check_file, file_hash
from utils.core.text import short_repr
from utils.jobs.dependencies import ENGINES
from utils.reports.machine import output_of
from utils.trt import tensorrt_api
from utils.trt.engine_file import EngineNote
from utils.trt.preflight import OnnxFile

ROOT = Path(__file__).resolve().parents[2]


def describe(files: Iterable[str | Path] = ()) -> str:
    """Text for a bug report, files last; it works where torch and TensorRT are not installed.

    Raises:
        InputError: a file is missing.
    """
    commit = output_of("git", f"--git-dir={ROOT / '.git'}", "rev-parse", "HEAD").strip() or "unknown"
    try:
        tensorrt = tensorrt_api.load_tensorrt().name
    except QatError as error:
        tensorrt = str(error)
    if importlib.util.find_spec("torch") is None:
        libraries = f"PyTorch is not installed; Python {platform.python_version()} on {platform.platform()}"
    else:
        from torch.utils.collect_env import get_pretty_env_info

        libraries = get_pretty_env_info().strip()
    overlay = f"Overlay: {__version__}, in a folder at commit {commit}\nTensorRT: {tensorrt}"
    return "\n\n".join([overlay, libraries, *map(_describe_file, files)])


def _describe_file(file: str | Path) -> str:
    """Size, digest and metadata; of a path its last name only, and no class names, which are nobody's business."""
    path = check_file(file, "expected a .onnx, .engine, .plan or .pt")
    lines = [f"{path.name}: {path.stat().st_size:,} bytes, SHA-256 {file_hash(path)}"]
    try:
        for name, value in _metadata(path).items():
            if name != "names" and value not in ("", None, {}, ()):
                text = value if isinstance(value, str) else short_repr(value)
                lines.append(f"  {name}: {Path(text).name if Path(text).is_absolute() else text}")
    except (QatError, ImportError) as error:
        lines.append(f"  {str(error).replace(str(path), path.name)}")
    return "\n".join(lines)


def _metadata(path: Path) -> Mapping[str, Any]:
    suffix = path.suffix.lower()
    if suffix == ".onnx":
        model = OnnxFile.read(path)
        return {"opset": model.opset, "inputs": model.inputs, "outputs": model.outputs, **model.metadata}
    if suffix in ENGINES:
        note = vars(EngineNote.load(path))
        return {**note, **note["metadata"], "metadata": None, "tuning": None}
    if suffix == ".pt":
        from models.quantize import checkpoint

        content = checkpoint.summary(path) or {"kind": "a float checkpoint, or another file of PyTorch's"}
        return {**content, **content.get("extra", {}), "extra": None}
    return {}
