"""INT8 beside FP32 in OpenVINO on this machine, on one of upstream's networks with random weights.

The speed of a network does not depend on its weights, so no training and no dataset are needed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import torch
from torch import nn

from models.quantize import calibration, placement
from models.quantize.recipe import Recipe
from utils import upstream
from utils.core.errors import InputError
from utils.jobs import benchmark
from utils.onnx_graph.export import trace
from utils.onnx_graph.export_config import ExportConfig
from utils.onnx_graph.passes import run_passes
from utils.trt.benchmark import BenchmarkRow, Entry, verdicts
from utils.trt.preflight import BuildConfig
from utils.trt.timing import TimingConfig
from utils.upstream.checkout import CHECKOUT

logger = logging.getLogger(__name__)

TIMING = TimingConfig(duration=2, rounds=4)
STRIDE = 32  # of all of upstream's networks, in pixels
CALIBRATION_SIZE = 64  # pixels: ranges do not change the speed


def run(name: str, imgsz: int, threads: int | None = None) -> list[BenchmarkRow]:
    """Time a network, such as gelan-s, on images of `imgsz` pixels a side, and log a sentence on its INT8.

    Returns:
        A row for each precision, for one image at a time.

    Raises:
        InputError: the network does not take images of this size.
    """
    if imgsz % STRIDE:
        raise InputError(f"--imgsz {imgsz} is not a multiple of {STRIDE}, the stride of {name}")
    with TemporaryDirectory() as folder:
        files = {kind: Path(folder, f"{name}-{kind}.onnx") for kind in ("fp32", "int8")}
        write_pair(random_network(CHECKOUT / "models/detect" / f"{name}.yaml"), imgsz, files["fp32"], files["int8"])
        entries = [Entry(files["fp32"], baseline=True), Entry(files["int8"])]
        on_cpu = benchmark.OnCpu(threads, "CPU")
        job = benchmark.Benchmark(entries, None, TIMING, BuildConfig(), torch.device("cpu"), on_cpu=on_cpu)
        rows = job.measure(1)
    for sentence in verdicts(rows):
        logger.info("%s with random weights, %d pixels, %s. %s", name, imgsz, on_cpu.hardware(), sentence)
    return rows


def random_network(config: Path | Mapping[str, Any], nc: int | None = None, seed: int = 0) -> nn.Module:
    """Build upstream's network of a description with random weights, not fused.

    Its batch norms look as if they had seen data, so that activations keep their magnitude.
    """
    torch.manual_seed(seed)
    model: Any = upstream.build_model(config, nc)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    model.names = {index: f"class {index}" for index in range(model.model[-1].nc)}
    return model


def write_pair(network: nn.Module, imgsz: int, float_file: Path, int8_file: Path) -> None:
    """Write a network as FP32 and, calibrated on one image of noise, as weakly typed INT8 file."""
    model = upstream.call_fused(upstream.fuse(network))
    quantized = copy.deepcopy(model)
    placement.apply(quantized, placement.plan(quantized, Recipe()))
    statistics = calibration.collect(quantized, [torch.rand(1, 3, CALIBRATION_SIZE, CALIBRATION_SIZE)])
    calibration.set_ranges(quantized, statistics.amax("max"))
    for file, one, is_int8 in ((float_file, model, False), (int8_file, quantized, True)):
        config = ExportConfig(imgsz=(imgsz, imgsz), typing="weak").resolved(is_int8)
        onnx.save(run_passes(trace(one, config), config), file)
