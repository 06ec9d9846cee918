"""trtexec, by a stand-in program: no wheel brings the real one. Its help lists what versions 8.6, 10 and 11 take."""

import pytest
import torch
from one_conv import METADATA, write_onnx
from onnx import TensorProto
from tensorrt_stand_in import GPU, stand_in

from utils.core.errors import InputError, QatError
from utils.trt import trtexec
from utils.trt.engine_file import EngineNote
from utils.trt.preflight import BuildConfig

OF_8_6 = (
    "  --avgTiming=M\n  --builderOptimizationLevel\n  --skipInference  Exit after the engine\n  --maxAuxStreams=N\n"
    "  --versionCompatible, --vc  Mark\n  --excludeLeanRuntime  When\n"
    '  --hardwareCompatibilityLevel=mode  mode ::= "none" | "ampere+"\n'
)
OF_10_13 = f'{OF_8_6} | "sameComputeCapability"\n --stripWeights\n --tilingOptimizationLevel=N\n --maxTactics=N\n'
HELP = {
    "8.6": f"TensorRT v8601\n  --fp16  Enable fp16\n  --int8  Enable int8\n{OF_8_6}",
    "8.4": "TensorRT v8401\n  --fp16  Enable fp16\n  --int8  Enable int8\n  --avgTiming=M\n  --buildOnly  Exit after",
    "10": f"TensorRT v101300\n  --fp16  Enable\n  --int8  Enable\n  --stronglyTyped  Create a\n{OF_10_13}",
    "11": f"TensorRT v110000\n{OF_10_13}",
}


@pytest.fixture
def file(tmp_path):
    return write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96))


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a trtexec of a version on the PATH; it writes what it was asked for to `asked`, one line a call."""
    stand_in(monkeypatch)

    def put(version, fails=""):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / "trtexec"
        (folder / "help").write_text(HELP[version])
        program.write_text(
            f'#!/bin/sh\n[ "$1" = --help ] && cat {folder}/help && exit\necho "$@" >> {folder}/asked\n{fails}\n'
            'for word; do case $word in --saveEngine=*) echo plan > "${word#*=}" ;; esac; done\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")
        return trtexec.find_trtexec(), lambda: (folder / "asked").read_text().splitlines()[-1].split()

    return put


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
    config = BuildConfig(batch=(1, 4, 8), workspace=2 << 30, timing_cache=str(tmp_path / "t"),
                         tactic_sources_off=["cudnn"], timing_iterations=4)  # fmt: skip
    note = trtexec.build_with_trtexec(file, tmp_path / "a.engine", config, program)
    words = set(asked())
    assert flags <= words
    assert not without & words
    assert {f"--onnx={file}", "--minShapes=images:1x3x64x96", "--optShapes=images:4x3x64x96",
            "--maxShapes=images:8x3x64x96", "--memPoolSize=workspace:2048", f"--timingCacheFile={tmp_path / 't'}",
            "--tacticSources=-CUDNN", "--avgTiming=4",
            "--profilingVerbosity=detailed"} <= words  # fmt: skip
    assert (tmp_path / "a.engine").read_text() == "plan\n"
    assert note == EngineNote.load(tmp_path / "a.engine")
    assert (note.api, note.gpu, note.metadata) == (program.name, GPU.name, METADATA)
    assert note.precision == ("int8" if quantized else "fp16")


@pytest.mark.parametrize(
    ("option", "flags", "since"),
    [
        ({"optimization_level": 2}, ["--builderOptimizationLevel=2"], "8.6"),
        ({"version_compatible": True}, ["--versionCompatible", "--excludeLeanRuntime"], "8.6"),
        ({"hardware_compatible": "ampere+"}, ["--hardwareCompatibilityLevel=ampere+"], "8.6"),
        ({"hardware_compatible": "same-cc"}, ["--hardwareCompatibilityLevel=sameComputeCapability"], "10"),
        ({"strip_weights": True}, ["--stripWeights"], "10"),
        ({"tiling_level": "full"}, ["--tilingOptimizationLevel=3"], "10"),
        ({"max_tactics": 9}, ["--maxTactics=9"], "10"),
    ],
    ids=str,
)
def test_an_option_becomes_a_flag_where_its_help_lists_it(install, file, tmp_path, option, flags, since):
    config, (name,) = BuildConfig(**option, allow_fp32=True), option
    for version in HELP:
        program, asked = install(version)
        if list(map(int, version.split("."))) >= list(map(int, since.split("."))):
            note = trtexec.build_with_trtexec(file, tmp_path / "a.engine", config, program)
            assert set(flags) <= set(asked())
            assert note.options == option
        else:
            with pytest.raises(InputError, match=f"--{name.replace('_', '-')}"):
                trtexec.build_with_trtexec(file, tmp_path / "b.engine", config, program)
    assert not (tmp_path / "b.engine").exists()


def test_defaults_of_a_build(install, file, tmp_path, monkeypatch):
    """The timing cache, tactic sources of the environment, torch's current GPU (trtexec's own is the first)."""
    monkeypatch.setenv("TRT_TACTIC_SOURCES_OFF", "CUBLAS,cudnn")
    program, asked = install("8.6")
    trtexec.build_with_trtexec(file, tmp_path / "a.engine", BuildConfig(), program)
    cache = f"--timingCacheFile={tmp_path / 'Fake-GPU-TensorRT-8.6.1.timing.cache'}"
    assert {cache, "--tacticSources=-CUBLAS,-CUDNN"} <= set(asked())
    assert not any("Streams" in word or "--device" in word for word in asked())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    trtexec.build_with_trtexec(file, tmp_path / "a.engine", BuildConfig(max_aux_streams=0), program)
    assert {"--maxAuxStreams=0", "--device=1"} <= set(asked())


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (
            'echo "[11/21/2026-06:00:00] [E] Error[4]: [network.cpp::validate::3036] Error Code 4: too bad"; exit 1',
            r"too bad",
        ),
        ("kill -SEGV $$", "exit code -11"),
    ],
)
def test_its_failure_is_one_line_and_leaves_no_file(install, file, tmp_path, fails, message):
    program, _ = install("8.6", fails)
    with pytest.raises(QatError, match=message):
        trtexec.build_with_trtexec(file, tmp_path / "a.engine", BuildConfig(), program)
    assert not list(tmp_path.glob("*engine*"))
