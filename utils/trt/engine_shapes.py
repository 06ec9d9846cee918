"""Shapes of an engine's inputs and outputs, whatever holds its memory; nothing of torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils.core.errors import InputError

Shape = tuple[int, ...]


def profile(engine: Any, name: str) -> tuple[Shape, Shape, Shape]:
    """Min, opt and max shape; an input of static shape has one, also where TensorRT has no profile for it."""
    fixed = tuple(engine.get_tensor_shape(name))
    if min(fixed) >= 0:
        return fixed, fixed, fixed
    min_shape, opt_shape, max_shape = (tuple(shape) for shape in engine.get_tensor_profile_shape(name, 0))
    return min_shape, opt_shape, max_shape


def limits(engine: Any, name: str) -> tuple[Shape, Shape]:
    """Min and max shape."""
    min_shape, _, max_shape = profile(engine, name)
    return min_shape, max_shape


def set_input_shape(path: Path, context: Any, name: str, shape: Sequence[int], within: tuple[Shape, Shape]) -> None:
    """Tell an execution context the shape of an input.

    Args:
        path: of the engine, for messages.
        within: min and max shape.

    Raises:
        InputError: the shape is outside of them.
    """
    min_shape, max_shape = within
    inside = len(shape) == len(min_shape) and all(
        a <= b <= c for a, b, c in zip(min_shape, shape, max_shape, strict=True)
    )
    if not inside or not context.set_input_shape(name, tuple(shape)):
        raise InputError(
            f"{path} takes {name} from {list(min_shape)} to {list(max_shape)}, not {list(shape)}; "
            "build an engine for that shape"
        )


def shape_now(path: Path, context: Any, name: str) -> Shape:
    """The shape of an input or output, for the shapes that the inputs were given.

    Raises:
        InputError: it is known only after a run.
    """
    shape = tuple(context.get_tensor_shape(name))
    if any(size < 0 for size in shape):
        raise InputError(
            f"{path}: the size of output {name} depends on the data, which is not supported; "
            "export_qat.py writes files whose outputs have known sizes, also with --nms onnx"
        )
    return shape
