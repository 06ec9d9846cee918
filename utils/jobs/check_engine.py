"""Does an engine compute what the file says that it was built from? TensorRT beside ONNX Runtime, on a few images.

TensorRT has built engines without an error that found next to nothing (docs/tensorrt.md has what was met). An engine
rounds otherwise than ONNX Runtime, in every layer, so its predictions are never equal. But they have to be those of the
image: what sets an engine apart is compared with what sets two images apart.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from utils.core.errors import InputError, QatError
from utils.core.tasks import Prediction
from utils.core.text import plural
from utils.evaluation.detector import Detector
from utils.evaluation.input_plan import InputPlan, batch_range
from utils.jobs.compare_outputs import check_images
from utils.jobs.compare_tensors import pixels
from utils.runners.base import Runner
from utils.runners.onnxrt import OnnxRuntimeRunner
from utils.trt.runner import TensorRTRunner

# Of the difference between two images, mean over anchors. In ONNX Runtime weakly and strongly typed files of the demo's
# networks are 0.11 to 0.32 apart, INT8 and float 0.20 to 0.43, FP16 and FP32 0.002, and the results of another image 1.
LIMIT = 0.75
# Least mean differences between two images that say something: pixels of boxes, which those of untrained networks have
# not (0.001), scores, which there are not where nothing is found (1e-8), and what masks are made of.
LEAST = {"boxes": 0.5, "scores": 1e-5, "coefficients": 1e-3, "prototypes": 1e-3}
MOST_PIXELS = 32 * 640 * 640  # of a static batch: gelan-c takes 4.6 GB for it in ONNX Runtime


def check_engine(engine: Path, onnx: Path, device: torch.device, count: int) -> str:
    """Run an engine and its ONNX file on `count` soft coloured patches, two at least; a sentence with the differences.

    What cannot be compared is not held against the engine, and the sentence says why.

    Raises:
        InputError: the engine cannot be loaded.
        QatError: it does not run, or its results are not those of the ONNX file.
    """
    with TensorRTRunner(engine, device, graphs=False) as runner:
        if runner.form.has_nms:
            return "not compared with ONNX Runtime: only raw predictions are, and NMS is in this file"
        try:
            height, width = InputPlan.of(runner, None, batch_range(runner)[0]).imgsz
            if batch_range(runner)[0] * height * width > MOST_PIXELS:
                return "not compared with ONNX Runtime, where a batch of this engine would take too much memory"
            images = pixels(check_images(max(count, 2), (height, width), None))
            predicted = _predicted(runner, images)
        except InputError as error:  # it is no detector, or takes no image of the size that its file names
            return f"not compared with ONNX Runtime: {error}"
    try:
        with OnnxRuntimeRunner(onnx, "cpu") as reference:
            expected = _predicted(reference, images)
    except QatError as error:
        return f"not compared with ONNX Runtime, which does not run the file: {error}"
    sentence, problem = engine_differences(predicted, expected)
    if problem:
        raise QatError(
            f"{engine} does not compute what {onnx} computes: {problem}; see what AP val_trt.py finds before you use "
            "it, or build with another --optimization-level, or from a file exported with --no-int8-rewrites (--check "
            "0 leaves this comparison out)"
        )
    return sentence


def _predicted(runner: Runner, images: Tensor) -> Prediction:
    """The predictions for images as bytes, on the CPU."""
    raw = Detector(runner, None).raw(images)
    return Prediction.of({name: one.cpu().float() for name, one in raw.items()}, runner.task)


def engine_differences(predicted: Prediction, expected: Prediction) -> tuple[str, str]:
    """What an engine's predictions and ONNX Runtime's for the same images differ by; and what is wrong, or ''."""
    shares, sentence = {}, ""
    for part, least in LEAST.items():
        reference: Tensor | None = getattr(expected, part)
        if reference is None or not reference.numel():
            continue  # no masks
        apart = _means(reference - reference.roll(1, 0))
        if not apart.isfinite().all():
            return "not compared with ONNX Runtime, whose own results are not all numbers", ""
        difference = _means(getattr(predicted, part) - reference)
        shares[part] = (difference / apart.clamp(min=least) * (apart >= least)).nan_to_num(nan=math.inf)
        if part == "boxes":
            if apart.min() < least:
                close = f"boxes of different images are {apart.min():.2g} px apart, as those of an untrained network"
                return f"not compared with ONNX Runtime: {close}", ""
            sentence = (
                f"the engine beside ONNX Runtime, {plural(len(reference), 'image')}: boxes differ by up to "
                f"{difference.max():.2g} px on average, and from image to image by {apart.min():.2g} px"
            )
    part, share = max(shares.items(), key=lambda item: float(item[1].max()))
    wrong = int((torch.stack([*shares.values()]).amax(0) > LIMIT).sum())
    problem = (
        f"for {wrong} of {plural(len(share), 'image')} its results are not those of ONNX Runtime: {part} differ up to "
        f"{share.max():.2g} times as much as those of two images, where {LIMIT} times at most was expected"
    )
    return sentence, problem if wrong else ""


def _means(difference: Tensor) -> Tensor:
    """Mean magnitude for each image, `[B]`."""
    return difference.abs().flatten(1).mean(1)
