"""What a server has to know about an ONNX file or an engine, whatever reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from utils.core.errors import InputError
from utils.core.tasks import DETECTIONS, Task, task_of_outputs
from utils.runners.base import TensorSpec, literal

PLAN, ONNX = "tensorrt_plan", "onnxruntime_onnx"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class ServedFile:
    """A network in a file.

    Attributes:
        path: the file, or the ONNX file of an engine that is built later.
        platform: PLAN or ONNX.
        inputs, outputs: with the batch.
        metadata: of the ONNX file.
        profile: min and max shape of an engine's input, `[B, 3, H, W]` or `[B, H, W, 3]`; None without dynamic axes.
        unfit: why this platform cannot run the file; '' if it can.
    """

    path: Path
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    metadata: Mapping[str, str]
    profile: tuple[Shape, Shape] | None = None
    unfit: str = ""

    @property
    def images(self) -> TensorSpec:
        """The input, with the sizes that an engine's profile leaves no choice about."""
        spec = self.inputs[0]
        if self.profile is None:
            return spec
        axes = zip(spec.shape[1:], self.profile[0][1:], self.profile[1][1:], strict=True)
        fixed = (low if size is None and low == high else size for size, low, high in axes)
        return TensorSpec(spec.name, (spec.shape[0], *fixed), spec.dtype)

    @property
    def pending(self) -> bool:
        """Whether `path` is an ONNX file that the engine is still to be built from."""
        return self.platform == PLAN and self.path.suffix.lower() == ".onnx"

    @property
    def task(self) -> Task:
        """What the network is for."""
        return task_of_outputs(self.metadata, {spec.name: len(spec.shape) for spec in self.outputs})

    @property
    def has_nms(self) -> bool:
        """Whether the outputs are detections, not raw predictions."""
        return set(DETECTIONS) <= {spec.name for spec in self.outputs}

    @property
    def batched(self) -> bool:
        """Whether the batch size is dynamic, so that a server can put requests together."""
        return all(spec.shape and spec.shape[0] is None for spec in (*self.inputs, *self.outputs))

    def check(self) -> None:
        """Raise `InputError` if the file cannot be served."""
        if self.unfit:
            raise InputError(f"{self.path}: {self.unfit}")
        if len(self.inputs) != 1 or len(self.inputs[0].shape) != 4:
            found = ", ".join(map(str, self.inputs))
            raise InputError(f"{self.path} takes {found}; expected one input [batch, 3, height, width]")
        names = {spec.name for spec in self.outputs}
        if not self.has_nms and not set(self.task.outputs) <= names:
            expected = f"{' and '.join(self.task.outputs)}, or {', '.join(DETECTIONS)}, as export_qat.py writes them"
            raise InputError(f"{self.path} gives {', '.join(sorted(names))}; expected {expected}")
        if self.batched and self.profile and self.profile[0][0] > 1:
            least, most = self.profile[0][0], self.profile[1][0]
            raise InputError(
                f"{self.path} has a minimum batch size of {least}, so requests of one image fail; "
                f"build it with --batch-size 1 {most} {most}"
            )
        class_names(self.metadata, self.path)


def class_names(metadata: Mapping[str, str], source: Path) -> list[str]:
    """Names of the classes by id; empty if the metadata has none.

    Raises:
        InputError: the ids in `source` are not 0, 1, 2, ..., or a name is not one line of text.
    """
    text = metadata.get("names", "")
    names = literal(text) if text else []
    if isinstance(names, dict):
        names = [names.get(str(number), names.get(number)) for number in range(len(names))]
    if isinstance(names, list) and None not in names and all(len(f"{name}.".splitlines()) == 1 for name in names):
        return [str(name) for name in names]
    raise InputError(f"{source} names its classes {text!r:.80}; expected one line of text for each id from 0")
