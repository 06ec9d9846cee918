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
from utils.core.text import plural
from utils.evaluation.input_plan import batch_range, fixed_sizes, has_nms, image_input, output_names
from utils.jobs.compare_outputs import check_images, pixels
from utils.onnx_graph.output_formats import plain
from utils.runners.base import Runner, as_feed
from utils.runners.onnxrt import OnnxRuntimeRunner
from utils.trt.engine_file import EngineNote
from utils.trt.runner import TensorRTRunner

# Of the difference between two images, mean over anchors. In ONNX Runtime weakly and strongly typed files of the demo's
# networks are 0.11 to 0.32 apart, INT8 and float 0.20 to 0.43, FP16 and FP32 0.002, and the results of another image 1.
LIMIT = 0.75
PLAIN = plain().name  # form of a file with raw predictions
MEMORY = 8 << 30  # bytes that are left, where the system does not say it
BYTES_PER_PIXEL = 1000  # of an image in ONNX Runtime, with a margin: gelan-c takes 350
# Mean differences between two images that say something: pixels of boxes, which those of untrained networks have not
# (0.001), and scores, which there are not where nothing is found (1e-8).
SILENT = {"boxes": 0.5, "scores": 1e-5}
SILENT_MASKS = {"coefficients": 1e-3, "prototypes": 1e-3}


@dataclass(frozen=True)
class EngineCheck:
    """How far an engine's results are from ONNX Runtime's.

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
            f"the engine beside ONNX Runtime, {plural(self.images, 'image')}: "
            f"boxes differ by up to {self.box:.2g} px on "
            f"average, and from image to image by {self.apart:.2g} px"
        )

    @property
    def problem(self) -> str:
        """What is wrong, in words; empty if nothing is."""
        if not self.wrong:
            return ""
        images = f"for {self.wrong} of {plural(self.images, 'image')} its results are not those of ONNX Runtime"
        if math.isinf(self.share):
            return f"{images}: {self.part} of image {self.image + 1} are not all numbers"
        return (
            f"{images}: {self.part} of image {self.image + 1} differ {self.share:.2g} times as much as those of two "
            f"images, where {LIMIT} times at most was expected"
        )


def check_engine(engine: Path, onnx: Path, device: torch.device, count: int) -> EngineCheck:
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
    with TensorRTRunner(engine, device, graphs=False) as runner:
        if has_nms(runner) or runner.metadata.get("form", PLAIN) != PLAIN:
            return EngineCheck(skipped="only raw predictions are, and this file's form is another")
        try:
            _, _, height, width = fixed_sizes(runner)
            if height is None or width is None:  # dynamic: the size that the engine was optimized for
                optimal: list[int] = EngineNote.load(engine).profile[image_input(runner).name][1]
                _, _, height, width = runner.input_spec.nchw(optimal)
            size, (smallest, most) = (height or 0, width or 0), batch_range(runner)
            batch = max(smallest, min(count, most or count, _room(size)))
            if batch > _room(size):
                return EngineCheck(skipped=f"a batch of {plural(batch, 'image')} would take more memory than there is")
            images = pixels(check_images(batch * math.ceil(count / batch), size, None))
            predicted = _predicted(runner, images, batch)
        except InputError as error:  # it is no detector
            return EngineCheck(skipped=str(error))
    try:
        with OnnxRuntimeRunner(onnx, "cpu") as reference:
            expected = _predicted(reference, images, batch)
    except QatError as error:
        return EngineCheck(skipped=f"it does not run the file: {error}")
    return compare_predictions(predicted, expected)


def compare_predictions(predicted: Prediction, expected: Prediction) -> EngineCheck:
    """Compare the engine's predictions with ONNX Runtime's for the same images, two at least."""
    silent = SILENT if expected.prototypes is None else SILENT | SILENT_MASKS
    differences, apart = {}, {}  # of each part for each image: from ONNX Runtime, and from the image before
    for part in silent:
        reference: Tensor = getattr(expected, part)
        differences[part] = _means(getattr(predicted, part) - reference)
        apart[part] = _means(reference - reference.roll(1, 0))
    if not all(math.isfinite(mean) for means in apart.values() for mean in means):
        return EngineCheck(skipped="its own results are not all numbers")
    least = min(apart["boxes"])
    if least < silent["boxes"]:
        return EngineCheck(
            skipped=f"boxes of different images are {least:.2g} px apart, as those of an untrained network"
        )
    images = range(len(expected.raw))
    shares = []  # of each image the largest, and its part; infinite where a result is no number
    for image in images:
        parts = []
        for part, least_difference in silent.items():
            difference, between_images = differences[part][image], apart[part][image]
            share = difference / between_images if between_images >= least_difference else 0.0
            parts.append((share if math.isfinite(difference) else math.inf, part))
        shares.append(max(parts))
    share, part = max(shares)
    box = max((mean for mean in differences["boxes"] if math.isfinite(mean)), default=math.nan)
    wrong = sum(image_share > LIMIT for image_share, _ in shares)
    return EngineCheck(len(images), box, least, share, part, shares.index((share, part)), wrong)


def _means(difference: Tensor) -> list[float]:
    """Mean magnitude for each image."""
    means: list[float] = difference.abs().flatten(1).mean(1).tolist()
    return means


def _predicted(runner: Runner, images: Tensor, batch: int) -> Prediction:
    """The predictions for images as bytes, on the CPU."""
    spec, form, names = image_input(runner), runner.input_spec, output_names(runner)
    batches = []
    for part in images.split(batch):
        results = runner.infer({spec.name: as_feed(part, form, spec.dtype).contiguous()})  # its buffers are reused
        batches.append({name: results[output].cpu().float().clone() for name, output in names.items()})
    return Prediction.of({name: torch.cat([results[name] for results in batches]) for name in names}, runner.task)


def _room(size: tuple[int, int]) -> int:
    """Images of this size, one at least, for which half of the memory that is left is enough in ONNX Runtime."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    left = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), MEMORY)
    return max(1, left // 2 // (BYTES_PER_PIXEL * math.prod(size)))
