"""What a network wants to be given: sizes and batches."""

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


@dataclass(frozen=True)
class InputPlan:
    """The input that a network will be given.

    Attributes:
        imgsz: (height, width) in pixels.
        batch_size: images that the network is given at a time.
        loaded: images in a batch of the loader, a multiple: on a GPU NMS takes hardly longer for many than for few.
    """

    imgsz: tuple[int, int]
    batch_size: int
    loaded: int

    @classmethod
    def of(
        cls, runner: Runner, imgsz: int | tuple[int, int] | None, batch_size: int, *, rect: bool = False
    ) -> InputPlan:
        """What fits both: a network of static size decides; else `imgsz`, rounded up to the stride.

        `imgsz` is the longer side, or (height, width), in pixels; None for the network's own. `InputError` if the
        network takes no images, or has another static size than was asked for.
        """
        _, _, height, width = fixed_sizes(runner)
        smallest, largest = batch_range(runner)
        fitting = largest if largest and (smallest == largest or batch_size > largest) else batch_size
        if fitting != batch_size:
            logger.info("the network takes %d images at a time; using that instead of %d", fitting, batch_size)
        if height is None and width is None:
            known = runner.imgsz
            size = fitting_size(imgsz or known, runner.stride)
            text = size_text(size)
            if imgsz and known and max(known) != max(height_width(imgsz)):
                logger.warning("the input is %s, and the network is for images of %s", text, max(known))
            limits = [(low or 0, high or side) for (low, high), side in zip(_ranges(runner)[2:], size, strict=True)]
            if not all(low <= side <= high for (low, high), side in zip(limits, size, strict=True)):
                least, most = ("x".join(map(str, sides)) for sides in zip(*limits, strict=True))
                found = f"--imgsz {text} was asked for, and the engine takes {least} to {most}"
                raise InputError(f"{found}; build one for that size")
        else:
            size, spec = (height or width or 0, width or height or 0), image_input(runner)
            if imgsz not in (None, size, *size):
                asked = f"--imgsz {size_text(imgsz or 0)} was asked for"
                raise InputError(f"{asked}, and the network takes {spec}; export it for that size")
            if rect:
                raise InputError(f"rectangular inference needs a network of dynamic size; this one takes {spec}")
        several = 1 if runner.task.prototypes else max(batch_size // fitting, 1)  # masks take memory
        return cls(size, fitting, several * fitting)

    def size(self, rect: bool) -> str:
        """The size of the input in words, such as '640x640'."""
        return f"up to {max(self.imgsz)}, rectangular" if rect else f"{self.imgsz[0]}x{self.imgsz[1]}"


def fitting_size(imgsz: int | tuple[int, int] | None, stride: int) -> tuple[int, int]:
    """Height and width in pixels, see `height_width`, rounded up to multiples of the stride, with a warning."""
    sides = height_width(imgsz)
    height, width = (math.ceil(side / stride) * stride for side in sides)
    if (height, width) != sides:
        what = "image size %s is no multiple of the stride %d; using %s"
        logger.warning(what, size_text(sides), stride, size_text((height, width)))
    return height, width


def _ranges(runner: Runner) -> list[tuple[int | None, int | None]]:
    """Smallest and largest batch, channels, height and width, by shape or an engine's profile; None for any."""
    spec, nchw = image_input(runner), runner.input_spec.nchw
    low, high = runner.limits.get(spec.name, ((None,) * 4, (None,) * 4))
    return [(size or a, size or b) for size, a, b in zip(nchw(spec.shape), nchw(low), nchw(high), strict=True)]


def fixed_sizes(runner: Runner) -> tuple[int | None, ...]:
    """Batch, channels, height and width, None where several sizes go: an engine's profile may allow only one."""
    return tuple(low if low == high else None for low, high in _ranges(runner))


def batch_range(runner: Runner) -> tuple[int, int | None]:
    """Smallest and largest number of images that the network takes at a time; None for any."""
    smallest, largest = _ranges(runner)[0]
    return smallest or 1, largest


def image_input(runner: Runner) -> TensorSpec:
    """The network's only input; `InputError` if it has several, or one that is no batch of images."""
    spec = runner.inputs[0]
    shaped = len(runner.inputs) == 1 and len(spec.shape) == 4
    if not shaped or runner.input_spec.nchw(spec.shape)[1] not in (*COLOURS, None) or spec.dtype not in DTYPES:
        found = ", ".join(map(str, runner.inputs))
        raise InputError(f"the network takes {found}; expected {' or '.join(DTYPES)} [batch, 3 or 1, height, width]")
    return spec
