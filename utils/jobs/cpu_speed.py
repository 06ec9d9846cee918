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
from utils.trt.build_options import BuildConfig
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
    network = random_network(CHECKOUT / "models/detect" / f"{name}.yaml")
    on_cpu = benchmark.OnCpu(threads, "CPU")
    with TemporaryDirectory() as folder:
        float_file = Path(folder, f"{name}-fp32.onnx")
        int8_file = Path(folder, f"{name}-int8.onnx")
        write_pair(network, imgsz, float_file, int8_file)
        entries = [Entry(float_file, baseline=True), Entry(int8_file)]
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
    """Write a network as an FP32 file and, calibrated on one image of noise, as a weakly typed INT8 file."""
    model = upstream.call_fused(upstream.fuse(network))
    quantized = copy.deepcopy(model)
    placement.apply(quantized, placement.plan(quantized, Recipe()))
    statistics = calibration.collect(quantized, [torch.rand(1, 3, CALIBRATION_SIZE, CALIBRATION_SIZE)])
    calibration.set_ranges(quantized, statistics.amax("max"))
    _write(model, imgsz, float_file, is_int8=False)
    _write(quantized, imgsz, int8_file, is_int8=True)


def _write(model: nn.Module, imgsz: int, file: Path, *, is_int8: bool) -> None:
    config = ExportConfig(imgsz=(imgsz, imgsz), typing="weak").resolved(is_int8)
    onnx.save(run_passes(trace(model, config), config), file)
