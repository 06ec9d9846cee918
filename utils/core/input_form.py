"""In which form a network takes images: as its file says it, and what follows for shapes and values.

    float   FP32 or FP16, RGB in 0..1
    uint8   RGB as images have it, 0..255: Cast and Mul 1/255 are in the graph
    int8    round(pixel / 255 / scale), clipped to INT8: the first QuantizeLinear is not in the graph

`utils/onnx_graph/input_forms.py` gives a file its form, `utils/runners/feeds.py` makes what it takes of images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from utils.core.errors import InputError

Kind = Literal["float", "uint8", "int8"]
Axes = Literal["nchw", "nhwc"]
InputFormat = Literal["linear", "chw4", "chw32"]
Size = TypeVar("Size")
KINDS: tuple[Kind, ...] = ("float", "uint8", "int8")
LAYOUTS: tuple[Axes, ...] = ("nchw", "nhwc")
# How INT8 images lie in an engine's memory; the latter two lay channels side by side.
INPUT_FORMATS: tuple[InputFormat, ...] = ("linear", "chw4", "chw32")
DEFAULT_BATCH = (1, 8, 16)  # images at a time, at least, mostly and at most: of a file that takes any number
KIND_KEY, LAYOUT_KEY, SCALE_KEY = "input_form", "input_layout", "input_scale"  # of a file's metadata


@dataclass(frozen=True)
class InputForm:
    """What a network takes.

    Attributes:
        kind: of values.
        layout: order of the axes.
        scale: of int8; 0 where nothing says it.

    Raises:
        InputError: the kind is none of KINDS, or a kind is asked for in a layout that it has not.
    """

    kind: Kind = "float"
    layout: Axes = "nchw"
    scale: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.layout not in LAYOUTS:
            raise InputError(
                f"an input of {self.kind!r:.40} in {self.layout!r:.40} is unknown; there is {', '.join(KINDS)} in "
                f"{' or '.join(LAYOUTS)}"
            )
        if self.layout == "nhwc" and self.kind != "uint8":
            raise InputError(f"images of {self.kind} are in nchw; in nhwc there are only those of uint8")

    @classmethod
    def of_file(cls, entries: Mapping[str, str], dtype: str, shape: Sequence[int | None] = ()) -> InputForm:
        """The form of a file.

        Args:
            entries: its metadata; a file of others says nothing, and its type and shape are taken for what they are.
            dtype: of the input, torch's name for it.
            shape: of the input, None where dynamic.

        Raises:
            InputError: the metadata say what is not so.
        """
        last = len(shape) == 4 and shape[3] == 3 and shape[1] != 3
        kind = entries.get(KIND_KEY) or (dtype if dtype in ("uint8", "int8") else "float")
        layout = entries.get(LAYOUT_KEY) or ("nhwc" if last and kind == "uint8" else "nchw")
        try:
            scale = float(entries.get(SCALE_KEY) or 0)
        except ValueError:
            scale = math.nan
        if not 0 <= scale < math.inf:
            raise InputError(f"the file's {SCALE_KEY} is {entries[SCALE_KEY]!r:.40}; expected a positive number")
        if layout == "nhwc" and kind in ("float", "int8"):
            raise InputError(f"the file's metadata say that its input is {kind} in nhwc, and only uint8 has that")
        if (kind if kind in ("uint8", "int8") else "float") != (dtype if dtype in ("uint8", "int8") else "float"):
            raise InputError(f"the file's metadata say that its input is {kind:.40}, and it is {dtype}")
        return cls(cast(Kind, kind), cast(Axes, layout), scale if kind == "int8" else 0.0)

    def metadata(self) -> dict[str, str]:
        """What a file says."""
        scale = {SCALE_KEY: repr(self.scale)} if self.kind == "int8" else {}
        return {KIND_KEY: self.kind, LAYOUT_KEY: self.layout, **scale}

    def nchw(self, shape: Sequence[Size]) -> tuple[Size, Size, Size, Size]:
        """A shape of this layout, as batch, channels, height and width."""
        batch, *rest = shape
        channels, height, width = (rest[-1], *rest[:-1]) if self.layout == "nhwc" else rest
        return batch, channels, height, width

    def own(self, shape: Sequence[Size]) -> tuple[Size, Size, Size, Size]:
        """Batch, channels, height and width, in this layout's order."""
        batch, channels, height, width = shape
        return (batch, height, width, channels) if self.layout == "nhwc" else (batch, channels, height, width)

    def __str__(self) -> str:
        """What values it takes, for messages."""
        return {
            "float": "FP32 or FP16 in 0..1",
            "uint8": "the bytes of RGB images",
            "int8": f"INT8 values, round(pixel / 255 / {self.scale:.6g})",
        }[self.kind]


FLOATS = InputForm()
