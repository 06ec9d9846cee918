"""How ONNX files are typed for a TensorRT: weakly, which it chooses precisions for, or strongly, which says them."""

from __future__ import annotations

from typing import Literal

STRONG_FROM = (10, 12)  # where TensorRT's release notes call weak typing deprecated; 11 has none


def wanted_typing(version: str) -> Literal["weak", "strong"]:
    """What TensorRT of a version, such as '10.13.0', wants.

    Raises:
        ValueError: this is no version.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    return "strong" if (major, minor) >= STRONG_FROM else "weak"
