"""trtexec, by a stand-in program: no wheel brings the real one. Its help lists what versions 8.6, 10 and 11 take."""

from __future__ import annotations

import dataclasses
import time

import onnx
import pytest
import torch
from one_conv import METADATA, with_product, write_onnx
from onnx import TensorProto
from tensorrt_stand_in import GPU, stand_in
from trtexec_summary import SUMMARY

from utils.core.errors import DependencyError, InputError, QatError
from utils.core.input_form import InputForm
from utils.onnx_graph.cleanup import set_metadata
from utils.onnx_graph.input_forms import attach_input
from utils.trt import trtexec
from utils.trt.build_config import BuildConfig
from utils.trt.engine_file import EngineNote

HELP = {
    "8.6": "TensorRT v8601\n  --fp16  Enable fp16\n  --int8  Enable int8\n  --skipInference  Exit after the engine\n"
    "  --maxAuxStreams=N  Set maximum number of auxiliary streams\n"
    "  --inputIOFormats=spec  Type and format of each of the input tensors",
    "8.4": "TensorRT v8401\n  --fp16  Enable fp16\n  --int8  Enable int8\n  --buildOnly  Exit after the engine",
    "10": "TensorRT v101300\n  --fp16  Enable\n  --int8  Enable\n  --stronglyTyped  Create a\n  --skipInference  Exit",
    "11": "TensorRT v110000\n  --skipInference  Exit after the engine",
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a trtexec of a version on the PATH; it writes what it was asked for to `asked`, one line a call."""
    stand_in(monkeypatch)

    def put(version, fails=""):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / "trtexec"
        (folder / "help").write_text(HELP[version])
        (folder / "summary").write_text(SUMMARY)
        program.write_text(
            f'#!/bin/sh\n[ "$1" = --help ] && cat {folder}/help && exit\necho "$@" >> {folder}/asked\n{fails}\n'
            'for word; do case $word in --saveEngine=*) echo plan > "${word#*=}" ;; esac; done\n'
            f"cat {folder}/summary\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")
        return trtexec.find(), lambda: (folder / "asked").read_text().splitlines()[-1].split()

    return put


def test_there_is_none(monkeypatch):
    monkeypatch.setattr(trtexec, "which", lambda name: None)
    monkeypatch.setattr(trtexec, "PLACES", ())
    with pytest.raises(DependencyError, match="trtexec is not on the PATH; the TensorRT wheel does not bring it"):
        trtexec.find()


@pytest.mark.parametrize(
    ("version", "name", "weak", "strong"),
    [("8.6", "8.6.1", True, False), ("10", "10.13.0", True, True), ("11", "11.0.0", False, True)],
)
def test_what_a_version_can_do(install, version, name, weak, strong):
    program, _ = install(version)
    assert program.name == f"TensorRT {name}"
    assert (program.weakly_typed, program.strongly_typed) == (weak, strong)
    assert program.max_opset == (None if strong else 17)


@pytest.mark.parametrize(
    ("version", "quantized", "half", "flags", "without"),
    [
        ("8.6", True, False, {"--fp16", "--int8", "--skipInference"}, {"--stronglyTyped"}),
        ("8.4", False, False, {"--fp16", "--buildOnly"}, {"--int8", "--skipInference"}),
        ("10", True, False, {"--fp16", "--int8"}, {"--stronglyTyped"}),
        ("10", True, True, {"--stronglyTyped"}, {"--fp16", "--int8"}),
        ("11", True, True, {"--skipInference"}, {"--fp16", "--int8", "--stronglyTyped"}),
    ],
)
def test_flags_of_the_version(install, tmp_path, version, quantized, half, flags, without):
    program, asked = install(version)
    dtype = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    file = write_onnx(tmp_path / "a.onnx", quantized=quantized, dtype=dtype, opset=19 if half else 17)
    config = BuildConfig(batch=(1, 4, 8), workspace=2 << 30, timing_cache=str(tmp_path / "t"), optimization_level=2,
                         tactic_sources_off=("cudnn",), timing_iterations=4)  # fmt: skip
    note = trtexec.build(file, tmp_path / "a.engine", config, program)
    words = set(asked())
    assert flags <= words
    assert not without & words
    assert {f"--onnx={file}", "--minShapes=images:1x3x64x96", "--optShapes=images:4x3x64x96",
            "--maxShapes=images:8x3x64x96", "--memPoolSize=workspace:2048", f"--timingCacheFile={tmp_path / 't'}",
            "--builderOptimizationLevel=2", "--tacticSources=-CUDNN", "--avgTiming=4",
            "--profilingVerbosity=detailed"} <= words  # fmt: skip
    assert (tmp_path / "a.engine").read_text() == "plan\n"
    assert note == EngineNote.load(tmp_path / "a.engine")
    assert (note.api, note.gpu, note.metadata) == (program.name, GPU.name, METADATA)
    assert note.precision == ("int8" if quantized else "fp16")


def test_timing_cache_is_on_by_default(install, tmp_path):
    program, asked = install("8.6")
    trtexec.build(write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96)), tmp_path / "a.engine", BuildConfig(), program)
    assert f"--timingCacheFile={tmp_path / 'Fake-GPU-TensorRT-8.6.1.timing.cache'}" in asked()


def test_tactic_sources_of_the_environment(install, tmp_path, monkeypatch):
    monkeypatch.setenv("TRT_TACTIC_SOURCES_OFF", "CUBLAS,cudnn")
    program, asked = install("8.6")
    trtexec.build(write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96)), tmp_path / "a.engine", BuildConfig(), program)
    assert "--tacticSources=-CUBLAS,-CUDNN" in asked()


def test_auxiliary_streams(install, tmp_path):
    file = write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96))
    program, asked = install("8.6")
    assert trtexec.build(file, tmp_path / "a.engine", BuildConfig(max_aux_streams=0), program).options == {
        "max_aux_streams": 0
    }
    assert "--maxAuxStreams=0" in asked()
    trtexec.build(file, tmp_path / "a.engine", BuildConfig(), program)
    assert not any("Streams" in word for word in asked())
    old, asked = install("8.4")
    before = asked()
    with pytest.raises(InputError, match=r"TensorRT 8.4.1 has no --maxAuxStreams; leave out --max-aux-streams"):
        trtexec.build(file, tmp_path / "a.engine", BuildConfig(max_aux_streams=2), old)
    assert asked() == before


def test_the_gpu_that_was_chosen(install, tmp_path, monkeypatch):
    """torch's current one; trtexec's own choice is the first."""
    program, asked = install("8.6")
    program.run(["--loadEngine=a.engine"])
    assert asked() == ["--loadEngine=a.engine"]  # no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    program.run(["--loadEngine=a.engine"])
    assert asked() == ["--loadEngine=a.engine", "--device=1"]
    trtexec.build(write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96)), tmp_path / "a.engine", BuildConfig(), program)
    assert asked()[-1] == "--device=1"


def test_a_product_of_bytes_in_front_of_a_quantizer(install, tmp_path):
    file = write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96), quantized=True)
    form = InputForm("uint8", "nhwc")
    onnx.save(set_metadata(attach_input(onnx.load(file), form), form.metadata()), file)
    note = trtexec.build(file, tmp_path / "a.engine", BuildConfig(), install("8.6")[0])
    assert note.metadata.items() >= form.metadata().items()
    onnx.save(with_product(onnx.load(file)), file)
    with pytest.raises(InputError, match=r"multiplies them by 1/255 .* engines of TensorRT 8\.6\.1 leave that"):
        trtexec.build(file, tmp_path / "a.engine", BuildConfig(), install("8.6")[0])
    trtexec.build(file, tmp_path / "a.engine", BuildConfig(), install("10")[0])


def test_refusals_come_before_it_is_called(install, tmp_path):
    program, asked = install("11")
    file = write_onnx(tmp_path / "a.onnx", quantized=True)
    with pytest.raises(InputError, match=r"is in FP32, and TensorRT 11.0.0 builds what the file says"):
        trtexec.build(file, tmp_path / "a.engine", BuildConfig(), program)
    with pytest.raises(FileNotFoundError):
        asked()


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (
            'echo "[11/21/2026-06:00:00] [E] Error[4]: [network.cpp::validate::3036] Error Code 4: too bad"; exit 1',
            r"trtexec failed: .*too bad",
        ),
        ("kill -SEGV $$", "trtexec failed: it gives no reason, exit code -11"),
    ],
)
def test_its_failure_is_one_line_and_leaves_no_file(install, tmp_path, fails, message):
    program, _ = install("8.6", fails)
    file = write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96))
    with pytest.raises(QatError, match=message):
        trtexec.build(file, tmp_path / "a.engine", dataclasses.replace(BuildConfig(), progress=False), program)
    assert not list(tmp_path.glob("*engine*"))


def test_it_is_ended_at_the_limit(install, tmp_path):
    program, _ = install("8.6", "exec sleep 60")
    file, began = write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96)), time.monotonic()
    with pytest.raises(QatError, match=r"trtexec did not end within 0.01 minutes"):
        trtexec.build(file, tmp_path / "a.engine", BuildConfig(build_limit=0.01), program)
    assert time.monotonic() - began < 20
    assert not list(tmp_path.glob("*engine*"))


def test_its_figures():
    speed, figures = trtexec.parse_times(SUMMARY)
    assert speed == 220.105
    assert set(figures) == {"latency", "enqueue", "compute"}
    assert dataclasses.asdict(figures["latency"]) == {
        "min": 4.51, "max": 5.25, "mean": 4.6, "median": 4.55, "p90": 4.7, "p95": 4.8, "p99": 5.1, "count": 0,
    }  # fmt: skip
    assert figures["compute"].median == 4.45
    with pytest.raises(QatError, match="printed no throughput"):
        trtexec.parse_times("nothing")
