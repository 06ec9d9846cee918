"""Writing labels.txt and nvinfer's configuration without losing what someone else wrote there.

The configuration's last line is a record: the hashes of the rest of it and of the labels that were written with it. A
file that has its recorded hash is ours and is replaced; any other is refused, unless it says what it would say anyway.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from utils.core.errors import InputError, no_file
from utils.core.files import atomic_path
from utils.core.input_files import is_regular
from utils.onnx_graph.deepstream import CONFIG, LABELS

RECORD = "# export_yoloV9.py wrote this file (sha256 {config}) and {name} (sha256 {labels})\n"
_PATTERN = re.compile(rb"# export_yoloV9\.py wrote this file \(sha256 (\w+)\) and \S+ \(sha256 (\w+)\)\r?\n?\Z")
ADVICE = "rename or remove it, or export into another folder with --output"


def paths(onnx: Path) -> tuple[Path, Path]:
    """Where the labels and the configuration of an exported file lie."""
    return onnx.with_name(LABELS), onnx.with_name(CONFIG)


def check_name(onnx: Path) -> None:
    """Raise `InputError` if the name of the ONNX file does not fit on a line of the configuration."""
    if not onnx.name.isprintable():
        raise InputError(f"{onnx.name!r} cannot be written on a line of {CONFIG}; choose another --output")


def check_config(onnx: Path) -> None:
    """Raise `InputError` if a configuration lies there that is not ours, or that was changed since we wrote it."""
    _, config = paths(onnx)
    if _there(config) and not _recorded(config):
        raise InputError(f"{config} was not written by export_yoloV9.py, or has been changed since; {ADVICE}")


def check_labels(onnx: Path, text: str) -> None:
    """Raise `InputError` if labels lie there that are neither these nor those that lie there by our own record."""
    labels, config = paths(onnx)
    if not _there(labels) or labels.read_bytes() == text.encode():
        return
    if not _there(config) or _recorded(config) != _hash(labels.read_bytes()):
        raise InputError(
            f"{labels} holds other classes than this network, and was not written by export_yoloV9.py, or has been "
            f"changed since; {ADVICE}"
        )


def write(onnx: Path, labels: str, config: str) -> tuple[Path, Path]:
    """Write both files, each whole or not at all; `check_config` and `check_labels` have allowed it."""
    written = paths(onnx)
    record = RECORD.format(config=_hash(config.encode()), name=LABELS, labels=_hash(labels.encode()))
    for path, text in zip(written, (labels, config + record), strict=True):
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return written


def _there(path: Path) -> bool:
    """Whether a file lies there; anything else that does is refused."""
    if is_regular(path):
        return True
    if path.is_symlink() or path.exists():
        raise InputError(no_file(path, ADVICE))
    return False


def _recorded(config: Path) -> str:
    """The hash of the labels in the record of a configuration; '' if it has no record, or one that is not true."""
    content = config.read_bytes()
    found = _PATTERN.search(content)
    if found is None or found[1].decode() != _hash(content[: found.start()]):
        return ""
    return found[2].decode()


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
