"""The two programs for Triton: every command of docs/triton.md against the stand-in, and bad input in one line."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from boxes_graph import write_boxes
from documentation import commands
from engine_notes import write_engine
from triton_stand_in import serving

import export_qat
from utils.onnx_graph.output_formats import NmsSettings, end2end
from utils.serving import runner

ROOT = Path(__file__).resolve().parents[3]
MAKE, ASK, BUILD = "scripts/make_triton.py", "scripts/triton_client.py", "scripts/build_engine.py"
Program = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Program:
    """Runs one of the programs here; exit code and lines on standard output and standard error."""

    def run(name: str, *words: object) -> tuple[int, list[str], list[str]]:
        spec = importlib.util.spec_from_file_location(f"program_{Path(name).stem}", ROOT / name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        capsys.readouterr()
        try:
            code = module.run([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the page names."""
    monkeypatch.chdir(tmp_path)
    write_boxes(tmp_path / "yolov9-c-int8.onnx")
    write_boxes(tmp_path / "yolov9-c-seg.onnx", masks=True)
    write_boxes(tmp_path / "yolov9-c-end2end.onnx", end2end(NmsSettings("onnx")))
    write_engine(tmp_path / "yolov9-c-int8.engine", tmp_path / "yolov9-c-int8.onnx")
    (tmp_path / "images").mkdir()
    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / "images/a.png"), image)
    return tmp_path


def test_every_command_of_the_page_runs(here, program, monkeypatch):
    """Writers first, as on the page, then clients. Engines are served from their ONNX file."""
    page = [words[1:] for words in commands((ROOT / "docs/triton.md").read_text("utf-8"))]
    assert {name for name, *_ in page} == {MAKE, ASK, BUILD}
    for name, *words in page:
        if name == MAKE:
            code, out, err = program(name, *words)
            assert (code, err) == (0, []), (words, out, err)
    (built,) = [words for words in page if words[0] == BUILD]
    assert out[-1].endswith(" ".join(built))  # what the last writer says of the engine that is built later
    for path in Path("model_repository").rglob("config.pbtxt"):
        if "tensorrt_plan" in (text := path.read_text("utf-8")):
            text = text.replace("tensorrt_plan", "onnxruntime_onnx").replace("KIND_GPU", "KIND_CPU")
            path.write_text(text, "utf-8")
            shutil.copy("yolov9-c-int8.onnx", path.parent / "1/model.onnx")
    with serving(Path("model_repository")) as server:
        monkeypatch.setattr(runner, "ADDRESSES", {"http": server.http, "grpc": server.grpc})
        for name, *words in page:
            if name == ASK:
                words = [server.grpc if word == "localhost:8001" else word for word in words]
                code, out, err = program(name, *words)
                assert (code, err) == (0, []), (words, out, err)
    drawn = [cv2.imread(f"runs/triton/{name}/a.png") for name in ("exp", "by-http", "by-grpc")]
    assert (drawn[1] == drawn[2]).all()
    assert (drawn[0] != cv2.imread("images/a.png")).any()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((MAKE,), "--check"),
        ((MAKE, "a.onnx", "--check", "b"), "--check"),
        ((MAKE, "gone.onnx"), "gone.onnx"),
        ((MAKE, "--check", "gone"), "gone"),
        ((MAKE, "yolov9-c-int8.onnx", "--name", "a/b"), "--name"),
        ((MAKE, "yolov9-c-end2end.onnx", "--class-agnostic"), "--class-agnostic"),
        ((MAKE, "yolov9-c-int8.onnx", "--platform", "tensorrt"), "--platform"),
        ((MAKE, "yolov9-c-int8.engine", "--max-batch-size", "32"), "--max-batch-size"),
        ((ASK, "m"), "--source"),
        ((ASK, "m", "--source", "gone.png"), "gone.png"),
        ((ASK, "m", "--source", "images", "--url", "http://a"), "--url"),
        ((ASK, "m", "--source", "images", "--url", "127.0.0.1:9"), "127.0.0.1:9"),
        ((ASK, "m", "--source", "images", "--protocol", "grpc", "--url", "127.0.0.1:9"), "127.0.0.1:9"),
        ((ASK, "m", "--measure", "10", "--concurrency", "4"), "--measure was removed in 2.0: use perf_analyzer"),
    ],
)
def test_bad_input_is_one_line(words, named, here, program):
    before = sorted(here.iterdir())
    code, out, err = program(*words)
    assert (code, len(err), out) == (2, 1, [])
    assert err[0].startswith("error: ")
    assert named in err[0]
    assert sorted(here.iterdir()) == before


def test_who_looks_for_it_in_the_export_is_led_here(here, capsys):
    assert export_qat.main(["--weights", "a.pt", "--include", "onnx", "triton"]) == 2
    assert MAKE in capsys.readouterr().err


def test_a_drawing_does_not_replace_its_source(here, program):
    shutil.copytree("images", "runs/triton/mine")
    code, _, err = program(ASK, "m", "--source", "runs/triton/mine", "--name", "mine", "--exist-ok")
    assert (code, len(err)) == (2, 1)
    assert "--name" in err[0]
