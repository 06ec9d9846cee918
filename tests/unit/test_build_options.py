"""Options of builds: declared once, the same in every program that builds engines."""

import sys
from pathlib import Path

import pytest
from parsing import parsed

from utils.trt.preflight import BuildConfig

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from benchmark_trt import BenchmarkOptions
from build_engine import EngineOptions


@pytest.mark.parametrize("kind", [EngineOptions, BenchmarkOptions])
def test_every_program_that_builds_takes_them(kind):
    words = ["--tactic-sources-off", "CUBLAS", "CUDNN", "--optimization-level", "4", "--max-aux-streams", "0"]
    words += ["--tune", "2.5", "--tiling-level", "full", "--max-tactics", "9", "--version-compatible"]
    words += ["--hardware-compatible", "same-cc", "--strip-weights"]
    expected = BuildConfig(tactic_sources_off=["CUBLAS", "CUDNN"], optimization_level=4, max_aux_streams=0, tune=2.5,
                           tiling_level="full", max_tactics=9, version_compatible=True, hardware_compatible="same-cc",
                           strip_weights=True, progress=False)  # fmt: skip
    assert parsed(kind, "a.onnx", *words).build_config(progress=False) == expected
    assert parsed(kind, "a.onnx").build_config() == BuildConfig()
