"""Weakly and strongly typed networks in TensorRT: operator sets, float types, and the versions that want each.

weak     TensorRT chooses the types: versions 8.6 to 10.11
strong   the types are those of the file: version 10.12 and later
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Typing = Literal["weak", "strong"]
FloatType = Literal["FP32", "FP16"]


class FileTypes(NamedTuple):
    """Properties of a file of one typing: operator sets if it is quantized, and the type of its other values."""

    opsets: range
    floats: FloatType


TYPINGS: dict[Typing, FileTypes] = {
    "weak": FileTypes(range(13, 18), "FP32"),  # TensorRT 8.6 reads no newer operators
    "strong": FileTypes(range(19, 21), "FP16"),  # FP16 scales came with 19
}
STRONG_FROM = (10, 12)  # TensorRT's version whose release notes call weak typing deprecated


def wanted_typing(version: str) -> Typing:
    """Typing of ONNX files for a TensorRT of a version, such as '10.13.0'; `ValueError` for another text."""
    major, minor = map(int, version.split(".")[:2])
    return "strong" if (major, minor) >= STRONG_FROM else "weak"
