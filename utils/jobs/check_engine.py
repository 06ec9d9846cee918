"""Comparison of an engine with the ONNX file that it was built from: TensorRT beside ONNX Runtime, on a few images.

TensorRT has built engines without an error that found next to nothing (docs/tensorrt.md has what was met). An engine
rounds otherwise than ONNX Runtime, in every layer, so its predictions are never equal. But they have to be those of the
image: the difference between engine and file is compared with the difference between two images.
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

# As a fraction of the difference between two images, a mean over anchors. In ONNX Runtime weakly and strongly typed
# files of the demo's networks are 0.11 to 0.32 apart, INT8 and FP32 0.20 to 0.43, FP16 and FP32 0.002, other images 1.
LIMIT = 0.75
# Least mean differences between two images that allow a comparison: boxes in pixels (those of untrained networks are
# 0.001 apart), scores (1e-8 apart where nothing is found), and what masks are made of.
LEAST = {"boxes": 0.5, "scores": 1e-5, "coefficients": 1e-3, "prototypes": 1e-3}
MOST_PIXELS = 32 * 640 * 640  # of a static batch: gelan-c takes 4.6 GB for it in ONNX Runtime


def check_engine(engine: Path, onnx: Path, device: torch.device, count: int) -> str:
    """Compare an engine with its ONNX file on `count` soft coloured patches, at least 2.

    Returns:
        A sentence with the differences, or with the reason why the two cannot be compared.

    Raises:
        InputError: the engine cannot be loaded.
        QatError: it does not run, or its results are not those of the ONNX file.
    """
    try:
        images, predicted = _run_engine(engine, device, max(count, 2))
        expected = _run_reference(onnx, images)
    except _NotComparable as error:
        return str(error)
    sentence, problem = engine_differences(predicted, expected)
    if problem:
        raise QatError(
            f"{engine} does not compute what {onnx} computes: {problem}; check its AP by val_trt.py before you use it, "
            "or build with another --optimization-level, or from a file exported with --no-int8-rewrites (--check 0 "
            "leaves this comparison out)"
        )
    return sentence


class _NotComparable(Exception):
    """Engine and file cannot be compared; the message says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not compared with ONNX Runtime{reason}")


def _run_engine(engine: Path, device: torch.device, count: int) -> tuple[Tensor, Prediction]:
    """Run an engine on patches; returns these, uint8 `[count, 3, H, W]`, and its predictions."""
    with TensorRTRunner(engine, device, graphs=False) as runner:
        if runner.form.has_nms:
            raise _NotComparable(": only raw predictions are, and NMS is in this file")
        try:
            batch_size, _ = batch_range(runner)
            height, width = InputPlan.of(runner, None, batch_size).imgsz
            if batch_size * height * width > MOST_PIXELS:
                raise _NotComparable(", where a batch of this engine would take too much memory")
            images = pixels(check_images(count, (height, width), None))
            return images, _predicted(runner, images)
        except InputError as error:  # it is not a detector, or takes no image of the size that its file names
            raise _NotComparable(f": {error}") from error


def _run_reference(onnx: Path, images: Tensor) -> Prediction:
    """Run the ONNX file on the same images in ONNX Runtime, on the CPU."""
    try:
        with OnnxRuntimeRunner(onnx, "cpu") as runner:
            return _predicted(runner, images)
    except QatError as error:
        raise _NotComparable(f", which does not run the file: {error}") from error


def _predicted(runner: Runner, images: Tensor) -> Prediction:
    """Return the predictions for images as bytes, on the CPU."""
    raw = Detector(runner, None).raw(images)
    return Prediction.of({name: tensor.cpu().float() for name, tensor in raw.items()}, runner.task)


def engine_differences(predicted: Prediction, expected: Prediction) -> tuple[str, str]:
    """Compare an engine's predictions with ONNX Runtime's for the same images.

    Returns:
        A sentence on the differences, or on why there are none to compare; and what is wrong, or ''.
    """
    try:
        fractions = _fractions(predicted, expected)
    except _NotComparable as error:
        return str(error), ""
    boxes = _means(predicted.boxes - expected.boxes)
    apart = _between_images(expected.boxes).min()
    sentence = (
        f"the engine beside ONNX Runtime, {plural(len(boxes), 'image')}: boxes differ by up to {boxes.max():.2g} px on "
        f"average, and from image to image by {apart:.2g} px"
    )
    part, fraction = max(fractions.items(), key=lambda item: float(item[1].max()))
    wrong = int((torch.stack([*fractions.values()]).amax(0) > LIMIT).sum())
    if not wrong:
        return sentence, ""
    return sentence, (
        f"for {wrong} of {plural(len(boxes), 'image')} its results are not those of ONNX Runtime: {part} differ up to "
        f"{fraction.max():.2g} times as much as those of two images, where {LIMIT} times at most was expected"
    )


def _fractions(predicted: Prediction, expected: Prediction) -> dict[str, Tensor]:
    """Mean difference of each image, `[B]`, as a fraction of that between two images, by part of the prediction.

    It is 0 where two images differ by less than `LEAST`, and infinity for results that are not finite.
    """
    fractions: dict[str, Tensor] = {}
    for part, least in LEAST.items():
        reference: Tensor | None = getattr(expected, part)
        if reference is None or not reference.numel():
            continue  # a detector has no masks
        apart = _between_images(reference)
        if not apart.isfinite().all():
            raise _NotComparable(", whose own results are not all numbers")
        if part == "boxes" and apart.min() < least:
            close = f"boxes of different images are {apart.min():.2g} px apart, as those of an untrained network"
            raise _NotComparable(f": {close}")
        fraction = _means(getattr(predicted, part) - reference) / apart.clamp(min=least)
        fraction = fraction.nan_to_num(nan=math.inf)
        fractions[part] = torch.where((apart < least) & fraction.isfinite(), 0.0, fraction)
    return fractions


def _between_images(values: Tensor) -> Tensor:
    """Mean difference between each image and another one, `[B]`."""
    return _means(values - values.roll(1, 0))


def _means(difference: Tensor) -> Tensor:
    """Mean magnitude for each image, `[B]`."""
    return difference.abs().flatten(1).mean(1)
