"""Does an engine compute what the file says that it was built from? TensorRT beside ONNX Runtime, on a few images.

TensorRT has built engines without an error that found next to nothing (docs/tensorrt.md has what was met). An engine
rounds otherwise than ONNX Runtime, in every layer, so its predictions are never equal. But they have to be those of the
image: what sets an engine apart is compared with what sets two images apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from utils.core.errors import InputError, QatError
from utils.core.tasks import Prediction
from utils.evaluation.input_plan import batch_range, fixed_sizes, has_nms, image_input, output_names
from utils.jobs.export import check_images
from utils.runners.base import Runner
from utils.runners.feeds import as_feed
from utils.runners.onnxrt import OnnxRuntimeRunner
from utils.trt.engine_file import EngineNote
from utils.trt.runner import TensorRTRunner

# Of the difference between two images, mean over anchors. In ONNX Runtime weakly and strongly typed files of the demo's
# networks are 0.11 to 0.32 apart, INT8 and float 0.20 to 0.43, FP16 and FP32 0.002, and the results of another image 1.
LIMIT = 0.75
MEMORY = 8 << 30  # bytes that are left, where the system does not say it
BYTES_PER_PIXEL = 1000  # of an image in ONNX Runtime, with a margin: gelan-c takes 350
PLAIN = "plain"  # form of a file with raw predictions
# What is compared → the difference between two images that says something. Boxes of untrained networks differ by 0.001
# pixels, and scores where nothing is found by 1e-8.
PARTS = {"boxes": 0.5, "scores": 1e-5, "coefficients": 1e-3, "prototypes": 1e-3}


@dataclass(frozen=True)
class EngineCheck:
    """What a comparison found.

    Attributes:
        images: how many.
        box: mean difference of boxes between engine and ONNX Runtime, pixels; of the image where it is largest.
        apart: mean difference of boxes between two images, pixels; of the images where it is smallest.
        share: difference between engine and ONNX Runtime by that between two images; the largest of any image and part.
        part: boxes, scores, or what masks are made of: where `share` is found.
        image: the same, from 0.
        wrong: images that have a share beyond the limit.
        skipped: why nothing can be said; empty otherwise.
    """

    images: int = 0
    box: float = 0.0
    apart: float = 0.0
    share: float = 0.0
    part: str = ""
    image: int = 0
    wrong: int = 0
    skipped: str = ""

    def __str__(self) -> str:
        if self.skipped:
            return f"not compared with ONNX Runtime: {self.skipped}"
        return (
            f"the engine beside ONNX Runtime, {self.images} images: boxes differ by up to {self.box:.2g} px on "
            f"average, and from image to image by {self.apart:.2g} px"
        )

    @property
    def problem(self) -> str:
        """What is wrong, in words; empty if nothing is."""
        if not self.wrong:
            return ""
        images = f"for {self.wrong} of {self.images} images its results are not those of ONNX Runtime"
        if math.isinf(self.share):
            return f"{images}: {self.part} of image {self.image + 1} are not all numbers"
        return (
            f"{images}: {self.part} of image {self.image + 1} differ {self.share:.2g} times as much as those of two "
            f"images, where {LIMIT} times at most was expected"
        )


def check(engine: Path, onnx: Path, device: torch.device, count: int) -> EngineCheck:
    """Run an engine and its ONNX file on soft coloured patches; what cannot be compared is not held against it.

    Args:
        onnx: what it was built from.
        device: the GPU.
        count: images, in one batch where the engine takes so many and memory has room for them in ONNX Runtime; a batch
            that is static is filled with further ones.

    Raises:
        InputError: the engine cannot be loaded.
        QatError: it does not run.
    """
    count = max(count, 2)
    with TensorRTRunner(engine, device, graphs=False) as built:
        form = built.metadata.get("form", PLAIN)
        if has_nms(built) or form != PLAIN:
            return EngineCheck(skipped="only raw predictions are, and this file's form is another")
        try:
            size, (smallest, most) = _size(built, engine), batch_range(built)
            batch = max(smallest, min(count, most or count, _room(size)))
            if batch > _room(size):
                return EngineCheck(skipped=f"a batch of {batch} images would take more memory than there is")
            pixels = check_images(batch * math.ceil(count / batch), size, None).mul_(255).round_().byte()
            mine = _predicted(built, pixels, batch)
        except InputError as error:  # it is no detector
            return EngineCheck(skipped=str(error))
    try:
        with OnnxRuntimeRunner(onnx, "cpu") as reference:
            theirs = _predicted(reference, pixels, batch)
    except QatError as error:
        return EngineCheck(skipped=f"it does not run the file: {error}")
    return compare(mine, theirs)


def compare(mine: Sequence[Prediction], theirs: Sequence[Prediction]) -> EngineCheck:
    """Predictions of the engine and of ONNX Runtime for the same images, two at least; each of one image."""
    names = list(PARTS) if theirs[0].prototypes is not None else list(PARTS)[:2]
    parts = {name: _differences(mine, theirs, name) for name in names}
    if not all(math.isfinite(apart) for _, others in parts.values() for apart in others):
        return EngineCheck(skipped="its own results are not all numbers")
    between, apart = parts["boxes"]
    if min(apart) < PARTS["boxes"]:
        return EngineCheck(
            skipped=f"boxes of different images are {min(apart):.2g} px apart, as those of an untrained network"
        )
    shares = [
        max((_share(parts[name][0][image], parts[name][1][image], PARTS[name]), name) for name in names)
        for image in range(len(mine))
    ]
    share, part = max(shares)
    wrong = sum(one > LIMIT for one, _ in shares)
    box = max((value for value in between if math.isfinite(value)), default=math.nan)
    return EngineCheck(len(mine), box, min(apart), share, part, shares.index((share, part)), wrong)


def _differences(
    mine: Sequence[Prediction], theirs: Sequence[Prediction], part: str
) -> tuple[list[float], list[float]]:
    """Mean differences between the two, and between an image and the one before; of each image."""
    found: list[Tensor] = [getattr(one, part) for one in mine]
    expected: list[Tensor] = [getattr(one, part) for one in theirs]
    between = [float((a - b).abs().mean()) for a, b in zip(found, expected, strict=True)]
    return between, [float((one - expected[index - 1]).abs().mean()) for index, one in enumerate(expected)]


def _share(between: float, apart: float, least: float) -> float:
    """Infinite where a result is no number; 0 where two images differ by less than `least`."""
    if not math.isfinite(between):
        return math.inf
    return between / apart if apart >= least else 0.0


def _predicted(runner: Runner, pixels: Tensor, batch: int) -> list[Prediction]:
    """The prediction of each image, on the CPU."""
    spec, form, names = image_input(runner), runner.input_form, output_names(runner)
    found = []
    for part in pixels.split(batch):
        results = runner.infer({spec.name: as_feed(part, form, spec.dtype).contiguous()})
        named = {name: results[given].cpu().float().clone() for name, given in names.items()}  # runners overwrite them
        whole = Prediction.of(named, runner.task)
        maps = whole.prototypes
        found += [
            Prediction(one[None], whole.layout, None if maps is None else maps[index : index + 1])
            for index, one in enumerate(whole.raw)
        ]
    return found


def _size(runner: Runner, engine: Path) -> tuple[int, int]:
    """Height and width: the only ones, or those that the engine was optimised for."""
    _, _, height, width = fixed_sizes(runner)
    if height is not None and width is not None:
        return height, width
    best: list[int] = EngineNote.load(engine).profile[image_input(runner).name][1]
    _, _, height, width = runner.input_form.nchw(best)
    return height or 0, width or 0


def _room(size: tuple[int, int]) -> int:
    """Images of this size, one at least, for which half of the memory that is left is enough in ONNX Runtime."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    left = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), MEMORY)
    return max(1, left // 2 // (BYTES_PER_PIXEL * math.prod(size)))
