"""The size and the number of images that a network is given."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from utils.core.errors import InputError
from utils.core.input_spec import COLOURS
from utils.core.options import height_width, size_text

if TYPE_CHECKING:
    from utils.runners.base import Runner, TensorSpec

logger = logging.getLogger(__name__)

DTYPES = ("float32", "float16", "uint8")  # of images
ANY_SIZE = (None, None, None, None)  # of batch, channels, height and width


@dataclass(frozen=True)
class InputPlan:
    """The input that a network will be given.

    Attributes:
        imgsz: (height, width) in pixels.
        batch_size: images that the network is given at a time.
        loaded: images in a batch of the loader, a multiple of `batch_size`, since NMS on a GPU takes hardly longer for
            many images than for few.
    """

    imgsz: tuple[int, int]
    batch_size: int
    loaded: int

    @classmethod
    def of(
        cls,
        runner: Runner,
        imgsz: int | tuple[int, int] | None,
        batch_size: int,
        *,
        rect: bool = False,
    ) -> InputPlan:
        """Plan the input: its size is the network's if that is static, else `imgsz`, rounded up to the stride.

        `imgsz` is the longer side, or (height, width), in pixels; None for the network's own. `InputError` if the
        network takes no images, or has another static size than was asked for.
        """
        _, _, height, width = fixed_sizes(runner)
        fitting = _fitting_batch(runner, batch_size)
        if height is None and width is None:
            size = _dynamic_size(runner, imgsz)
        else:
            size = (height or width or 0, width or height or 0)
            _check_static_size(runner, size, imgsz, rect)
        runs = max(batch_size // fitting, 1)
        if runner.task.prototypes:  # masks take memory
            runs = 1
        return cls(size, fitting, runs * fitting)

    def size(self, rect: bool) -> str:
        """The size of the input in words, such as '640x640'."""
        return f"up to {max(self.imgsz)}, rectangular" if rect else f"{self.imgsz[0]}x{self.imgsz[1]}"


def _fitting_batch(runner: Runner, batch_size: int) -> int:
    """The number of images that the network takes at a time, `batch_size` if it can be."""
    smallest, largest = batch_range(runner)
    is_static = smallest == largest
    if largest is None or largest == batch_size or not (is_static or batch_size > largest):
        return batch_size
    logger.info("the model takes %d images at a time; using that instead of %d", largest, batch_size)
    return largest


def _dynamic_size(runner: Runner, imgsz: int | tuple[int, int] | None) -> tuple[int, int]:
    """(height, width) for a network of dynamic size; `InputError` for one outside of its range."""
    own_size = runner.imgsz
    size = fitting_size(imgsz or own_size, runner.stride)
    text = size_text(size)
    if imgsz and own_size and max(own_size) != max(height_width(imgsz)):
        logger.warning("the input is %s, and the model is for images of %s", text, max(own_size))
    smallest: list[int] = []
    largest: list[int] = []
    for (low, high), side in zip(_ranges(runner)[2:], size, strict=True):
        smallest.append(low or 0)
        largest.append(high or side)
    is_inside = all(low <= side <= high for low, side, high in zip(smallest, size, largest, strict=True))
    if not is_inside:
        limits = f"{'x'.join(map(str, smallest))} to {'x'.join(map(str, largest))}"
        raise InputError(f"--imgsz {text} was given, and the engine takes {limits}; build one for that size")
    return size


def _check_static_size(
    runner: Runner,
    size: tuple[int, int],
    imgsz: int | tuple[int, int] | None,
    rect: bool,
) -> None:
    """Raise `InputError` if a network of static size cannot take images of this size, or rectangles."""
    spec = image_input(runner)
    if imgsz is not None and imgsz != size and imgsz not in size:
        text = size_text(imgsz)
        raise InputError(f"--imgsz {text} was given, and the model takes {spec}; export it for that size")
    if rect:
        raise InputError(f"rectangular inference needs a model of dynamic size; this one takes {spec}")


def fitting_size(imgsz: int | tuple[int, int] | None, stride: int) -> tuple[int, int]:
    """Height and width in pixels, see `height_width`, rounded up to multiples of the stride, with a warning."""
    height, width = height_width(imgsz)
    rounded = (math.ceil(height / stride) * stride, math.ceil(width / stride) * stride)
    if rounded != (height, width):
        message = "image size %s is not a multiple of the stride %d; using %s"
        logger.warning(message, size_text((height, width)), stride, size_text(rounded))
    return rounded


def _ranges(runner: Runner) -> list[tuple[int | None, int | None]]:
    """Smallest and largest batch, channels, height and width, by shape or an engine's profile; None for any."""
    spec = image_input(runner)
    nchw = runner.input_spec.nchw
    low, high = runner.limits.get(spec.name, (ANY_SIZE, ANY_SIZE))
    sides = zip(nchw(spec.shape), nchw(low), nchw(high), strict=True)
    return [(size or smallest, size or largest) for size, smallest, largest in sides]


def fixed_sizes(runner: Runner) -> tuple[int | None, ...]:
    """Batch, channels, height and width, None where several sizes go: an engine's profile may allow only one."""
    return tuple(low if low == high else None for low, high in _ranges(runner))


def batch_range(runner: Runner) -> tuple[int, int | None]:
    """Smallest and largest number of images that the network takes at a time; None for any."""
    smallest, largest = _ranges(runner)[0]
    return smallest or 1, largest


def image_input(runner: Runner) -> TensorSpec:
    """The network's only input; `InputError` if it has several, or one that does not take a batch of images."""
    spec = runner.inputs[0]
    is_batch = len(runner.inputs) == 1 and len(spec.shape) == 4
    if is_batch and spec.dtype in DTYPES:
        channels = runner.input_spec.nchw(spec.shape)[1]
        if channels is None or channels in COLOURS:
            return spec
    inputs = ", ".join(map(str, runner.inputs))
    raise InputError(f"the model takes {inputs}; expected {' or '.join(DTYPES)} [batch, 3 or 1, height, width]")
