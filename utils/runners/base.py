"""Interface to a network that runs: named inputs to named outputs, for PyTorch, ONNX Runtime and TensorRT alike.

The public methods check the state, and names, dtypes and shapes of the feeds; a subclass only runs the network, as
Polygraphy's `BaseRunner` has it.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from utils.core.errors import InputError, QatError
from utils.core.input_spec import InputSpec, with_channels
from utils.core.output_form import OutputForm
from utils.core.tasks import Task

if TYPE_CHECKING:  # utils.serving imports this module without torch
    import torch
    from torch import Tensor


# TensorProto's number of a type → torch's name
ONNX_TYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    16: "bfloat16",
}


@dataclass(frozen=True)
class TensorSpec:
    """An input or output: `shape` has None where any size goes, `dtype` is torch's name for it, such as 'float32'."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str

    @classmethod
    def of_onnx(cls, value: Any) -> TensorSpec:
        """Read the spec of an input or output of an ONNX graph, a ValueInfoProto."""
        tensor = value.type.tensor_type
        shape = tuple(dim.dim_value if dim.dim_value > 0 else None for dim in tensor.shape.dim)
        return cls(value.name, shape, ONNX_TYPES.get(tensor.elem_type, f"type {tensor.elem_type}"))

    def __str__(self) -> str:
        sizes = ["any" if size is None else str(size) for size in self.shape]
        return f"{self.name} {self.dtype} [{', '.join(sizes)}]"

    def accepts(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this shape fits."""
        if len(shape) != len(self.shape):
            return False
        return all(expected in (None, size) for expected, size in zip(self.shape, shape, strict=True))


class Runner(ABC):
    """A network ready to run, and a context manager that releases its resources at the end of the `with` block.

    Attributes:
        inputs, outputs: by name, shape and dtype.
        metadata: properties of the file: stride, names, task, ... (texts).
        limits: input → smallest and largest shape that a network of dynamic size takes; empty if any goes.
        device: the device of feeds and outputs.
        description: runtime and device, in words.
    """

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        metadata: Mapping[str, str],
        device: torch.device,
        description: str,
    ) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.metadata = dict(metadata)
        self.limits: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.device = device
        self.description = description
        self._open = True

    def __enter__(self) -> Runner:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release what the network holds; closing twice is fine."""
        if self._open:
            self._open = False
            self._close()

    def infer(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the network once.

        `feeds` holds a tensor for each input, of its dtype and shape; those on another device are copied. The outputs
        are on `device`, and the next call may overwrite them. `limits` are not checked here.

        Raises:
            InputError: names, dtype or shape of a feed do not fit the network.
            QatError: the runner is closed.
        """
        self._check_open()
        expected = ", ".join(map(str, self.inputs))
        if set(feeds) != {spec.name for spec in self.inputs}:
            raise InputError(f"received inputs {sorted(feeds)}; the model takes {expected}")
        moved = {}
        for spec in self.inputs:
            feed = feeds[spec.name]
            dtype = str(feed.dtype).removeprefix("torch.")
            if dtype != spec.dtype or not spec.accepts(feed.shape):
                raise InputError(f"input {spec.name} is {dtype} {list(feed.shape)}; the model takes {expected}")
            moved[spec.name] = self._to_device(spec.name, feed)
        return self._infer(moved)

    @property
    def names(self) -> dict[int, str] | None:
        """Class names by id, when the metadata has them: as JSON, or as the Python literal that upstream writes."""
        value = literal(self.metadata.get("names", ""))
        if isinstance(value, (list, tuple)):
            value = dict(enumerate(value))
        if not isinstance(value, dict) or not all(str(key).isdecimal() for key in value):
            return None
        return {int(key): str(name) for key, name in value.items()}

    @property
    def form(self) -> OutputForm:
        """The form of the outputs, with or without NMS and masks."""
        return OutputForm.of(self.metadata, {spec.name: spec.shape for spec in self.outputs})

    @property
    def task(self) -> Task:
        """The task of the network, by its metadata or else by its outputs."""
        return self.form.task

    @property
    def input_spec(self) -> InputSpec:
        """The form in which the network takes images; see `InputSpec.of_file`."""
        return InputSpec.of_file(self.metadata, self.inputs[0].dtype, self.inputs[0].shape)

    @property
    def stride(self) -> int:
        """Divisor of image sizes, in pixels; 32 without an entry in the metadata."""
        value = literal(self.metadata.get("stride", ""))
        if isinstance(value, (int, float)) and 1 <= value < math.inf:
            return int(value)
        return 32

    @property
    def imgsz(self) -> tuple[int, int] | None:
        """(height, width) in pixels that the metadata names, None if they do not."""
        return imgsz_of(self.metadata)

    def _to_device(self, name: str, feed: Tensor) -> Tensor:
        """The feed on the device that `_infer` reads from."""
        return feed.to(self.device)

    @abstractmethod
    def _infer(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run the network on checked feeds."""

    @abstractmethod
    def _close(self) -> None:
        """Release resources; called once."""

    def _check_open(self) -> None:
        if not self._open:
            raise QatError(f"this runner ({self.description}) is closed; open the file again")


def imgsz_of(metadata: Mapping[str, str]) -> tuple[int, int] | None:
    """(height, width) in pixels in a file's metadata; None without a valid entry."""
    value = literal(metadata.get("imgsz", ""))
    sides: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value, value]
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        return None
    return (sides[0], sides[1])


def literal(text: str) -> object:
    """A value in a file's metadata: as JSON, or as the Python literal that upstream writes; None if it is neither."""
    for read in (json.loads, ast.literal_eval):
        # TypeError: a list as a key; RecursionError and MemoryError: deeply nested
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return read(text)
    return None


def as_feed(images: Tensor, spec: InputSpec, dtype: str) -> Tensor:
    """Convert images uint8 `[B, 3, H, W]` RGB to the form that a network takes; they stay on their device.

    Returns:
        Bytes `[B, channels, H, W]`, or `[B, H, W, channels]` in NHWC, not copied if RGB; or for a network that takes
        floats `[B, channels, H, W]` in 0..1, of the type that torch calls `dtype`.
    """
    import torch

    images = with_channels(images, spec.channels)
    if spec.kind == "uint8":
        if spec.layout == "nhwc":
            return images.permute(0, 2, 3, 1)
        return images
    return images.to(getattr(torch, dtype)).div_(255)
