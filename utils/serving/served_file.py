"""What a server has to know about an ONNX file or an engine, whatever reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.core.errors import InputError
from utils.core.input_form import InputForm
from utils.core.tasks import DETECTIONS, SEGMENT, Layout, Task, task_of_outputs
from utils.runners.base import literal

PLAN, ONNX = "tensorrt_plan", "onnxruntime_onnx"
FILE_NAMES = {PLAN: "model.plan", ONNX: "model.onnx"}  # that Triton looks for
# torch's name of a type → Triton's; its clients leave the prefix out
TYPES = {
    "float32": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16", "float64": "TYPE_FP64",
    "uint8": "TYPE_UINT8", "int8": "TYPE_INT8", "int32": "TYPE_INT32", "int64": "TYPE_INT64", "bool": "TYPE_BOOL",
}  # fmt: skip
Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class Tensor:
    """An input or output: `shape` with the batch, None where any size goes; `dtype` is torch's name for it."""

    name: str
    dtype: str
    shape: Shape

    @property
    def kind(self) -> str:
        """Triton's name of the type.

        Raises:
            InputError: it has none.
        """
        if self.dtype not in TYPES:
            raise InputError(f"{self.name} is {self.dtype}, which Triton has no name for; there is {', '.join(TYPES)}")
        return TYPES[self.dtype]


@dataclass(frozen=True)
class ServedFile:
    """A network in a file.

    Attributes:
        platform: PLAN or ONNX.
        inputs, outputs: what it takes and gives.
        metadata: what it says about itself.
        profile: of an engine, or what one is to be built for: the least and the largest shape of the input that takes
            images, in its own layout.
        unfit: why this platform cannot run it, '' if it can.
        pending: the engine is not built yet, and `path` is the ONNX file that it is to be built from.
    """

    path: Path
    platform: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    metadata: Mapping[str, str]
    profile: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    unfit: str = ""
    pending: bool = False

    @property
    def images(self) -> Tensor:
        """The input.

        Raises:
            InputError: it is not one batch of images.
        """
        if len(self.inputs) != 1 or len(self.inputs[0].shape) != 4:
            found = ", ".join(f"{one.name} {list(one.shape)}" for one in self.inputs)
            raise InputError(f"{self.path} takes {found}; expected one input [batch, 3, height, width]")
        return self.inputs[0]

    @property
    def form(self) -> InputForm:
        """The form in which it takes images."""
        return InputForm.of_file(self.metadata, self.images.dtype, self.images.shape)

    @property
    def task(self) -> Task:
        """What it is for."""
        return task_of_outputs(self.metadata, {one.name: len(one.shape) for one in self.outputs})

    @property
    def has_nms(self) -> bool:
        """Whether it gives detections and not raw predictions."""
        return set(DETECTIONS) <= {one.name for one in self.outputs}

    @property
    def batched(self) -> bool:
        """Whether its batch size is dynamic, so that a server can make batches of requests."""
        return all(one.shape and one.shape[0] is None for one in (*self.inputs, *self.outputs))

    @property
    def names(self) -> list[str]:
        """Names of the classes in the order of their numbers; empty where the file does not say them.

        Raises:
            InputError: they are not one name for each number from 0 on.
        """
        text = self.metadata.get("names", "")
        if not text:
            return []
        found: Any = literal(text)
        try:
            named = {
                int(key): str(name) for key, name in (enumerate(found) if isinstance(found, list) else found.items())
            }
        except (ValueError, TypeError, AttributeError):
            raise InputError(
                f"{self.path} says that its classes are {text!r:.60}; expected a name for each number"
            ) from None
        if sorted(named) != list(range(len(named))):
            raise InputError(f"{self.path} names the classes {sorted(named)[:5]}...; expected 0 to {len(named) - 1}")
        return [named[number] for number in range(len(named))]

    @property
    def classes(self) -> int | None:
        """How many classes there are, by the shape of raw predictions or else by the names; None if nothing says it."""
        shapes = {one.name: one.shape for one in self.outputs}
        raw, maps = shapes.get(SEGMENT.prediction, ()), shapes.get(SEGMENT.prototypes, ())
        if len(raw) == 3 and raw[1] and not self.has_nms:
            nm = maps[1] if len(maps) == 4 else 0
            return None if nm is None else Layout.of_rows(raw[1], nm).nc
        return len(self.names) or None

    def check(self) -> None:
        """Raise `InputError` for a file that cannot be served."""
        self.images, self.form  # noqa: B018  # they raise
        if self.unfit:
            raise InputError(f"{self.path}: {self.unfit}")
        if self.metadata.get("form") == "deepstream":
            raise InputError(f"{self.path} has DeepStream's form of output; give a file of export_qat.py's")
        if not self.has_nms and self.task.prediction not in {one.name for one in self.outputs}:
            found = ", ".join(one.name for one in self.outputs)
            raise InputError(f"{self.path} gives {found}; expected {self.task.prediction}, or {', '.join(DETECTIONS)}")
        if self.classes is not None and self.names and len(self.names) != self.classes:
            raise InputError(f"{self.path} has {self.classes} classes and names {len(self.names)} of them")
        if self.profile and self.batched and self.profile[0][0] > 1:
            raise InputError(
                f"{self.path} takes {self.profile[0][0]} images at least, and requests of one would fail; build it "
                f"with --batch-size 1 {self.profile[1][0]} {self.profile[1][0]}"
            )
