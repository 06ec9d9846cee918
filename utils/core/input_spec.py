"""The form in which a network takes images, as its file names it, and the shapes and values that follow from it.

    float   FP32 or FP16, RGB in 0..1
    uint8   RGB as images have it, 0..255: Cast and Mul 1/255 are in the graph

A network of one channel takes grey images in place of RGB; its first convolution, or a file's input, has one channel.
`utils/onnx_graph/passes/take_bytes.py` gives a file its form, `as_feed` of `utils/runners/base.py` makes its input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from utils.core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["float", "uint8"]
Axes = Literal["nchw", "nhwc"]
Size = TypeVar("Size")
DEFAULT_BATCH = (1, 8, 16)  # images at a time, at least, mostly and at most: of a file that takes any number
LARGEST_SIDE, LARGEST_BATCH = 8192, 4096  # pixels (a batch of one takes 0.8 GB as float32) and images
KIND_KEY, LAYOUT_KEY = "input_form", "input_layout"  # of a file's metadata
COLOURS = (1, 3)  # channels of grey and of RGB images
GREY_BITS = 15
GREY_WEIGHTS = (9798, 19235, 3735)  # of red, green and blue, in 2^15ths: those of cv2.cvtColor, 0.299, 0.587 and 0.114
HALF_OF_A_GREY = 1 << (GREY_BITS - 1)  # so that the shift rounds


@dataclass(frozen=True)
class InputSpec:
    """Input of a network: the kind of values, the order of axes (nhwc for uint8 only), 3 channels or 1."""

    kind: Kind = "float"
    layout: Axes = "nchw"
    channels: int = 3

    @classmethod
    def of_file(cls, entries: Mapping[str, str], dtype: str, shape: Sequence[int | None] = ()) -> InputSpec:
        """The form of a file, by its metadata, or else its input's dtype (torch's name) and shape (None: dynamic).

        `InputError` for a file that takes INT8 images.
        """
        if "int8" in (entries.get(KIND_KEY), dtype):
            raise InputError("the file takes INT8 images; expected FP32 or uint8: export it with --input uint8")
        kind: Kind = "uint8" if dtype == "uint8" else "float"
        layout = entries.get(LAYOUT_KEY)
        if not layout:
            channels_are_last = len(shape) == 4 and shape[3] in COLOURS and shape[1] not in COLOURS
            layout = "nhwc" if channels_are_last and kind == "uint8" else "nchw"
        channels = None
        if len(shape) == 4:
            channels = shape[3] if layout == "nhwc" else shape[1]
        return cls(kind, cast(Axes, layout), channels or 3)

    def metadata(self) -> dict[str, str]:
        """Metadata of a file with this input."""
        return {KIND_KEY: self.kind, LAYOUT_KEY: self.layout, "channels": str(self.channels)}

    def nchw(self, shape: Sequence[Size]) -> tuple[Size, Size, Size, Size]:
        """A shape of this layout, as batch, channels, height and width."""
        if self.layout == "nhwc":
            batch, height, width, channels = shape
        else:
            batch, channels, height, width = shape
        return batch, channels, height, width

    def own(self, shape: Sequence[Size]) -> tuple[Size, Size, Size, Size]:
        """Batch, channels, height and width, in this layout's order."""
        batch, channels, height, width = shape
        if self.layout == "nhwc":
            return batch, height, width, channels
        return batch, channels, height, width


FLOATS = InputSpec()


def channels_of(model: Any) -> int:
    """Channels of the images that a torch network takes: those of its first convolution; `InputError` if not 1 or 3."""
    widths = (module.in_channels for module in model.modules() if hasattr(module, "in_channels"))
    channels: int = next(widths, 3)
    if channels not in COLOURS:
        raise InputError(f"the model takes images of {channels} channels; expected 3 (RGB) or 1 (grey)")
    return channels


def with_channels(images: Tensor, channels: int) -> Tensor:
    """Uint8 RGB `[B, 3, H, W]` as cv2.cvtColor's grey `[B, 1, H, W]` for one channel; RGB for three."""
    if images.shape[1] == channels:
        return images
    planes = images.int().unbind(1)
    weighted = [plane * weight for plane, weight in zip(planes, GREY_WEIGHTS, strict=True)]
    grey = sum(weighted, start=HALF_OF_A_GREY) >> GREY_BITS
    return grey.to(images.dtype)[:, None]


def size_in(entries: Mapping[str, Any]) -> int | tuple[int, int] | None:
    """The side, or (height, width), of images in pixels that a checkpoint's entries name as `imgsz`, if they do."""
    size: Any = entries.get("imgsz")
    is_pair = isinstance(size, (list, tuple)) and len(size) == 2
    height, width = size if is_pair else (size, size)
    for side in (height, width):
        if type(side) is not int or not 1 <= side <= LARGEST_SIDE:
            return None
    return height if height == width else (height, width)
