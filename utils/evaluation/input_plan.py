"""What a network wants to be given, and what it gives: sizes, batches, and which of its outputs is what."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from utils.core.errors import InputError
from utils.core.input_spec import COLOURS
from utils.core.tasks import DETECTIONS

if TYPE_CHECKING:
    from utils.runners.base import Runner, TensorSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InputPlan:
    """The input that a network will be given.

    Attributes:
        imgsz: (height, width) in pixels.
        batch_size: images that the network is given at a time.
        loaded: images in a batch of the loader, a multiple of `batch_size`: NMS and matching on a GPU take hardly
            longer for many images than for few.
    """

    imgsz: tuple[int, int]
    batch_size: int
    loaded: int

    @classmethod
    def of(
        cls, runner: Runner, imgsz: int | tuple[int, int] | None, batch_size: int, *, rect: bool = False
    ) -> InputPlan:
        """What fits both the network and the wishes.

        A network of static size decides; for one of dynamic size, `imgsz` decides, rounded up to the stride.

        Args:
            imgsz: longer side, or (height, width), in pixels; None for the network's own.

        Raises:
            InputError: the network takes no images, or has another static size than was asked for.
        """
        batch, _, height, width = fixed_sizes(runner)
        wanted_batch, (_, largest) = batch_size, batch_range(runner)
        if batch is not None and batch != batch_size:
            logger.info("the network has a static batch of %d, which is used instead of %d", batch, batch_size)
            batch_size = batch
        elif largest is not None and batch_size > largest:
            logger.info("the engine takes up to %d images at a time; using that instead of %d", largest, batch_size)
            batch_size = largest
        if height is None and width is None:
            known = runner.imgsz
            sides = imgsz or known or 640
            height, width = (sides, sides) if isinstance(sides, int) else sides
            size = (math.ceil(height / runner.stride) * runner.stride, math.ceil(width / runner.stride) * runner.stride)
            text = f"{size[0]}" if isinstance(imgsz, int) else f"{size[0]}x{size[1]}"
            if size != (height, width):
                logger.warning("image size %s is no multiple of the stride %d; using %s", sides, runner.stride, text)
            if imgsz and known and max(known) != max(height, width):
                logger.warning("the input is %s, and the network is for images of %s", text, max(known))
            if not takes_size(runner, *size):
                low, high = _limits(runner)
                raise InputError(
                    f"--imgsz {text} was asked for, and the engine takes {low[2]}x{low[3]} to {high[2]}x{high[3]}; "
                    "build one for that size"
                )
        else:
            size, spec = (height or width or 0, width or height or 0), image_input(runner)
            if imgsz not in (None, size, *size):
                text = str(imgsz) if isinstance(imgsz, int) else "{}x{}".format(*imgsz)
                raise InputError(f"--imgsz {text} was asked for, and the network takes {spec}; export it for that size")
            if rect:
                raise InputError(f"rectangular inference needs a network of dynamic size; this one takes {spec}")
        several = 1 if runner.task.prototypes else max(wanted_batch // batch_size, 1)  # masks take memory
        return cls(size, batch_size, several * batch_size)

    def size(self, rect: bool) -> str:
        """The size of the input in words, such as '640x640'."""
        return f"up to {max(self.imgsz)}, rectangular" if rect else f"{self.imgsz[0]}x{self.imgsz[1]}"


def _limits(runner: Runner) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Smallest and largest batch, channels, height and width of an engine; nothing for a file without limits."""
    low, high = runner.limits.get(image_input(runner).name, ((), ()))
    return (runner.input_spec.nchw(low), runner.input_spec.nchw(high)) if low else ((), ())


def fixed_sizes(runner: Runner) -> tuple[int | None, ...]:
    """Batch, channels, height and width, None where several sizes go: an engine's profile may allow only one."""
    low, high = _limits(runner)
    shape = runner.input_spec.nchw(image_input(runner).shape)
    if not low:
        return shape
    return tuple(a if size is None and a == b else size for size, a, b in zip(shape, low, high, strict=True))


def takes_size(runner: Runner, height: int, width: int) -> bool:
    """Whether a network of dynamic size takes images of so many pixels, multiples of its stride."""
    low, high = _limits(runner)
    return not low or (low[2] <= height <= high[2] and low[3] <= width <= high[3])


def batch_range(runner: Runner) -> tuple[int, int | None]:
    """Smallest and largest number of images that the network takes at a time; None for any."""
    low, high = _limits(runner)
    fixed = image_input(runner).shape[0]
    return (low[0], high[0]) if low else (fixed or 1, fixed)


def image_input(runner: Runner) -> TensorSpec:
    """The network's only input.

    Raises:
        InputError: it has several, or one that is no batch of images.
    """
    spec = runner.inputs[0]
    if len(runner.inputs) != 1 or len(spec.shape) != 4 or runner.input_spec.nchw(spec.shape)[1] not in (*COLOURS, None):
        found = ", ".join(map(str, runner.inputs))
        raise InputError(f"the network takes {found}; expected one input [batch, 3 or 1, height, width]")
    if spec.dtype not in ("float32", "float16", "uint8"):
        raise InputError(f"the network takes {spec}; expected float32, float16 or uint8")
    return spec


def has_nms(runner: Runner) -> bool:
    """Whether the network gives detections, NMS being inside it, and not raw predictions."""
    return set(DETECTIONS) <= {spec.name for spec in runner.outputs}


def nms_words(runner: Runner) -> str:
    """What stands in a network that gives detections: 'NMS', or 'top-k without NMS' (`--nms none`)."""
    return "top-k without NMS" if list(nms_thresholds(runner)) == ["conf_thres"] else "NMS"


def gives_masks(runner: Runner) -> bool:
    """Whether a network with NMS inside gives masks too."""
    return runner.task.masks in {spec.name for spec in runner.outputs}


def mask_frame(runner: Runner) -> int | None:
    """Rows and columns of the masks that a network gives in its boxes' frames; None if it gives none."""
    for spec in runner.outputs:
        if spec.name == runner.task.masks and len(spec.shape) == 3 and spec.shape[2]:
            return math.isqrt(spec.shape[2])
    return None


def nms_thresholds(runner: Runner) -> dict[str, float]:
    """`conf_thres` and `iou_thres` of NMS inside the network, as far as its file says them and they are used there."""
    try:
        content = json.loads(runner.metadata.get("nms", ""))
    except (ValueError, RecursionError):
        return {}
    entries = content if isinstance(content, dict) else {}
    names = ("conf_thres",) if entries.get("kind") == "none" else ("conf_thres", "iou_thres")
    found = {name: entries.get(name) for name in names}
    return {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}


def compares_masks(runner: Runner) -> bool:
    """Whether the masks of a network are compared with the labels'; they are not if it has NMS inside and no masks."""
    return bool(runner.task.prototypes) and (gives_masks(runner) or not has_nms(runner))


def output_names(runner: Runner) -> dict[str, str]:
    """The task's names of the outputs → the runner's: the same, or else the first of as many dimensions.

    Raises:
        InputError: a network for segmentation has no prototypes.
    """
    task, given = runner.task, [spec.name for spec in runner.outputs]
    flat = next((spec.name for spec in runner.outputs if len(spec.shape) == 3), given[0])
    found = {task.prediction: task.prediction if task.prediction in given else flat}
    if task.prototypes:
        maps = [spec.name for spec in runner.outputs if len(spec.shape) == 4]
        if not maps:
            outputs = ", ".join(map(str, runner.outputs))
            raise InputError(
                f"a network for segmentation gives {task.prototypes} [batch, masks, height, width] too; this one gives "
                f"{outputs}"
            )
        found[task.prototypes] = task.prototypes if task.prototypes in maps else maps[0]
    return found
