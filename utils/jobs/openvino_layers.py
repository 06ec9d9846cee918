"""The layers of an ONNX file in OpenVINO, by precision and time: `scripts/inspect_engine.py --runtime openvino`."""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from utils.core.options import height_width
from utils.jobs.benchmark import random_feed
from utils.jobs.open import open_openvino
from utils.runners.openvino import OpenVinoRunner
from utils.trt.layers import Layer, report_layers

logger = logging.getLogger(__name__)

RUNS = 20  # timed, after as many to warm up; the median is reported
# The end of OpenVINO's name of a kernel, such as jit_avx2_1x1_I8, is the type that it computes from.
TYPES = {"i8": "INT8", "u8": "INT8", "f16": "FP16", "bf16": "BF16", "f32": "FP32"}
FORM_ONLY = {"Reorder": "copy", "Convert": "cast", "FakeQuantize": "quantize"}  # layers that compute nothing new


def run(file: Path, device: str, precision: str | None, batch: int) -> None:
    """Print the layers and write `FILE.layers.json`.

    Args:
        device: OpenVINO's, such as CPU.
        precision: of layers that are not INT8; FP32 if None.
        batch: number of images, for a file of dynamic batch.
    """
    runner = open_openvino(file, device, precision, profile=True)
    with runner:
        own_batch, *sides = runner.inputs[0].shape
        has_size = None not in sides or runner.imgsz is not None
        feed = random_feed(runner, own_batch or batch, None if has_size else height_width(None))
        times = _times(runner, feed)
        layers = [_layer(entry, times[entry.node_name]) for entry in runner.layer_times() if _was_executed(entry)]
        (images,) = feed.values()
        shape = "x".join(map(str, images.shape))
        title = f"{file.name}: {shape}, {runner.description}"
    report_layers(layers, title, file, precision="int8" if "INT8" in title else "")


def _times(runner: OpenVinoRunner, feed: dict[str, Tensor]) -> dict[str, float]:
    """Median time of each layer in ms, by its name."""
    for _ in range(RUNS + 1):  # to warm up
        runner.infer(feed)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(RUNS):
        runner.infer(feed)
        for entry in runner.layer_times():
            times[entry.node_name].append(entry.real_time.total_seconds() * 1000)
    return {name: median(values) for name, values in times.items()}


def _was_executed(entry: Any) -> bool:
    """Return whether a layer was executed by itself, and not merged into another one."""
    return str(entry.status).endswith("EXECUTED")


def _layer(entry: Any, ms: float) -> Layer:
    ending = entry.exec_type.rsplit("_", 1)[-1].lower()
    kind = FORM_ONLY.get(entry.node_type, "compute")
    precision = TYPES.get(ending, "other") if kind == "compute" else ""
    return Layer(entry.node_name, entry.node_type, kind, precision, tactic=entry.exec_type, ms=ms)
