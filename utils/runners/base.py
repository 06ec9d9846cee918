"""What runs a network: named inputs to named outputs, the same for PyTorch, ONNX Runtime and TensorRT.

The public methods check the state and the feeds; a subclass only runs the network, as Polygraphy's `BaseRunner` has it.
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

if TYPE_CHECKING:  # a model repository is written without torch
    import torch
    from torch import Tensor


# TensorProto's number of a type → torch's name
ONNX_TYPES = {
    1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64",
    16: "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """An input or output: `shape` has None where any size goes, `dtype` is torch's name for it, such as 'float32'."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str

    @classmethod
    def of_onnx(cls, value: Any) -> TensorSpec:
        """Of an input or output of an ONNX graph, a ValueInfoProto."""
        tensor = value.type.tensor_type
        shape = tuple(dim.dim_value if dim.dim_value > 0 else None for dim in tensor.shape.dim)
        return cls(value.name, shape, ONNX_TYPES.get(tensor.elem_type, f"type {tensor.elem_type}"))

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} [{', '.join('any' if size is None else str(size) for size in self.shape)}]"

    def accepts(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape fits."""
        return len(shape) == len(self.shape) and all(a in (None, b) for a, b in zip(self.shape, shape, strict=True))


class Runner(ABC):
    """A network ready to run, and a context manager: what it holds is released at the end of the `with` block.

    Attributes:
        inputs, outputs: by name, shape and dtype.
        metadata: what the file says about itself: stride, names, task, ... (texts).
        limits: input → min and max shape, where a network of dynamic size takes no other.
        device: where feeds are wanted and outputs come out.
        description: what runs it, and on what, in words.
    """

    def __init__(
        self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], metadata: Mapping[str, str],
        device: torch.device, description: str,
    ) -> None:  # fmt: skip
        self.inputs, self.outputs, self.metadata = tuple(inputs), tuple(outputs), dict(metadata)
        self.limits: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.device, self.description, self._open = device, description, True

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

        `feeds` are one tensor for each input, of its dtype and shape; those on another device are copied. The outputs
        on `device` may be overwritten by the next call.

        Raises:
            InputError: names, dtype or shape of a feed are not what the network takes.
            QatError: the runner is closed.
        """
        self._check_open()
        expected = ", ".join(map(str, self.inputs))
        if set(feeds) != {spec.name for spec in self.inputs}:
            raise InputError(f"received inputs {sorted(feeds)}; the network takes {expected}")
        for spec in self.inputs:
            shape, dtype = feeds[spec.name].shape, str(feeds[spec.name].dtype).removeprefix("torch.")
            if dtype != spec.dtype or not spec.accepts(shape):
                raise InputError(f"input {spec.name} is {dtype} {list(shape)}; the network takes {expected}")
        return self._infer({spec.name: self._to_device(spec.name, feeds[spec.name]) for spec in self.inputs})

    @property
    def names(self) -> dict[int, str] | None:
        """Class names by id, when the metadata has them: as JSON, or as the Python literal that upstream writes."""
        value = literal(self.metadata.get("names", ""))
        value = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
        if not isinstance(value, dict) or not all(str(key).isdigit() for key in value):
            return None
        return {int(key): str(name) for key, name in value.items()}

    @property
    def form(self) -> OutputForm:
        """The form of the outputs, with or without NMS and masks."""
        return OutputForm.of(self.metadata, {spec.name: spec.shape for spec in self.outputs})

    @property
    def task(self) -> Task:
        """What the network is for, by its metadata or else by its outputs."""
        return self.form.task

    @property
    def input_spec(self) -> InputSpec:
        """The form in which the network takes images; see `InputSpec.of_file`."""
        return InputSpec.of_file(self.metadata, self.inputs[0].dtype, self.inputs[0].shape)

    @property
    def stride(self) -> int:
        """Image sizes are multiples of it, in pixels; 32 when the metadata does not say."""
        value = literal(self.metadata.get("stride", ""))
        return int(value) if isinstance(value, (int, float)) and 1 <= value < math.inf else 32

    @property
    def imgsz(self) -> tuple[int, int] | None:
        """(height, width) that the metadata names, in pixels."""
        return imgsz_of(self.metadata)

    def _to_device(self, name: str, feed: Tensor) -> Tensor:
        """The feed where `_infer` wants it."""
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
    """(height, width) in pixels that a file's metadata names; None where it names none."""
    value = literal(metadata.get("imgsz", ""))
    pair = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, (list, tuple)) else ()
    return (pair[0], pair[1]) if len(pair) == 2 and all(isinstance(side, int) for side in pair) else None


def literal(text: str) -> object:
    """A value in a file's metadata: as JSON, or as the Python literal that upstream writes; None if it is neither."""
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: deeply nested
            return read(text)
    return None


def as_feed(images: Tensor, form: InputSpec, dtype: str) -> Tensor:
    """Images in a network's form, on their own device.

    From uint8 `[B, 3, H, W]` RGB to `[B, channels, H, W]`, or `[B, H, W, channels]` for a network that takes them so,
    of a `dtype` by torch's name; bytes of RGB are not copied.
    """
    import torch

    images = with_channels(images, form.channels)
    if form.kind == "uint8":
        return images.permute(0, 2, 3, 1) if form.layout == "nhwc" else images
    return images.to(getattr(torch, dtype)).div_(255)
