"""Does an engine compute what the file says that it was built from? TensorRT beside ONNX Runtime, on a few images.

TensorRT has built engines without an error that found next to nothing (docs/tensorrt.md has what was met). An engine
rounds otherwise than ONNX Runtime, in every layer, so its predictions are never equal. But they have to be those of the
image: what sets an engine apart is compared with what sets two images apart.
"""

from __future__ import annotations

import math
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
LARGEST = 16 * 640 * 640  # pixels of a batch: ONNX Runtime keeps some hundred megabytes for each image
PLAIN = "plain"  # form of a file with raw predictions
SILENT = 0.5  # pixels: boxes of images that differ by less say nothing, as those of random weights (0.001)


@dataclass(frozen=True)
class EngineCheck:
    """What a comparison found.

    Attributes:
        images: how many.
        box: mean difference of boxes between engine and ONNX Runtime, pixels; of the image where it is largest.
        apart: mean difference of boxes between two images, pixels; of the images where it is smallest.
        share: difference between engine and ONNX Runtime by that between two images, of boxes or scores; the largest.
        image: where that is, from 0.
        wrong: images for which `share` is beyond the limit.
        skipped: why nothing can be said; empty otherwise.
    """

    images: int = 0
    box: float = 0.0
    apart: float = 0.0
    share: float = 0.0
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
        return (
            f"for {self.wrong} of {self.images} images its results are not those of ONNX Runtime: of image "
            f"{self.image + 1} they differ {self.share:.2g} times as much as those of two images; {LIMIT} times at "
            "most was expected"
        )


def check(engine: Path, onnx: Path, device: torch.device, count: int) -> EngineCheck:
    """Run an engine and its ONNX file on soft coloured patches; what ONNX Runtime does not run is not compared.

    Args:
        onnx: what it was built from.
        device: the GPU.
        count: images, in one batch where the engine takes so many; a batch that is static is filled with further ones.

    Raises:
        InputError: the engine cannot be loaded.
        QatError: it does not run.
    """
    with TensorRTRunner(engine, device, graphs=False) as built:
        form = built.metadata.get("form", PLAIN)
        if has_nms(built) or form != PLAIN:
            return EngineCheck(skipped="only raw predictions are, and this file's form is another")
        try:
            size, (smallest, most) = _size(built, engine), batch_range(built)
        except InputError as error:  # it takes no images
            return EngineCheck(skipped=str(error))
        batch = max(smallest, min(max(count, 2), most or count))
        if batch * math.prod(size) > LARGEST:
            return EngineCheck(skipped=f"a batch of {batch} images would take it much memory; val_trt.py shows the AP")
        total = batch * math.ceil(max(count, 2) / batch)
        pixels = check_images(total, size, None).mul_(255).round_().byte()
        mine = _predicted(built, pixels, batch)
    try:
        with OnnxRuntimeRunner(onnx, "cpu") as reference:
            theirs = _predicted(reference, pixels, batch)
    except QatError as error:
        return EngineCheck(skipped=f"it does not run the file: {error}")
    return compare(mine, theirs)


def compare(mine: list[Prediction], theirs: list[Prediction]) -> EngineCheck:
    """Predictions of the engine and of ONNX Runtime for the same images, two at least; of one image each."""
    box, apart = _differences(mine, theirs, "boxes")
    if min(apart) < SILENT:
        return EngineCheck(
            skipped=f"boxes of different images are {min(apart):.2g} px apart, as those of an untrained network"
        )
    parts = ["boxes", "scores"] + ["prototypes"] * (theirs[0].prototypes is not None)
    by_part = [[_share(*pair) for pair in zip(*_differences(mine, theirs, part), strict=True)] for part in parts]
    shares = [max(image) for image in zip(*by_part, strict=True)]
    worst = shares.index(max(shares))
    wrong = sum(share > LIMIT for share in shares)
    return EngineCheck(len(shares), max(box), min(apart), shares[worst], worst, wrong)


def _differences(mine: list[Prediction], theirs: list[Prediction], part: str) -> tuple[list[float], list[float]]:
    """Mean differences between the two, and between an image and the one before; of each image."""
    found: list[Tensor] = [getattr(one, part).double() for one in mine]
    expected: list[Tensor] = [getattr(one, part).double() for one in theirs]
    between = [float((a - b).abs().mean()) for a, b in zip(found, expected, strict=True)]
    return between, [float((one - expected[index - 1]).abs().mean()) for index, one in enumerate(expected)]


def _share(between: float, apart: float) -> float:
    """Infinite for NaN: an engine's results are numbers."""
    if not apart:
        return math.inf if between else 0.0
    return math.inf if math.isnan(between) else between / apart


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
