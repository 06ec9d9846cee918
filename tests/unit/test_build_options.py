"""Options of builds: declared once, read once, the same in every program that builds engines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from utils.trt.build_config import BuildConfig

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import benchmark_trt
import build_engine


@pytest.mark.parametrize("program", [build_engine, benchmark_trt], ids=lambda one: one.__name__)
def test_every_program_that_builds_takes_them(program):
    words = ["--tactic-sources-off", "CUBLAS", "CUDNN", "--optimization-level", "4", "--timing-iterations", "7"]
    words += ["--max-aux-streams", "0", "--tune", "2.5", "--build-limit", "3"]
    args = program.make_parser().parse_args(["a.onnx", *words])
    expected = BuildConfig(tactic_sources_off=("CUBLAS", "CUDNN"), optimization_level=4, timing_iterations=7,
                           max_aux_streams=0, tune=2.5, build_limit=3, shares=2)  # fmt: skip
    assert BuildConfig.given(args, shares=2) == expected
    assert BuildConfig.given(program.make_parser().parse_args(["a.onnx"])) == BuildConfig()


@pytest.mark.parametrize(
    "words",
    [
        ("--optimization-level", "6"),
        ("--timing-iterations", "0"),
        ("--max-aux-streams", "-1"),
        ("--tune", "0"),
        ("--build-limit", "0"),
    ],
)
def test_numbers_have_bounds(words, capsys):
    with pytest.raises(SystemExit):
        benchmark_trt.make_parser().parse_args(["a.onnx", *words])
    assert words[0] in capsys.readouterr().err
