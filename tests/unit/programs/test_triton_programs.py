"""The two programs for Triton: every command of docs/triton.md against the stand-in, and bad input in one line."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import pytest
from boxes_graph import write_boxes
from documentation import commands
from engine_notes import write_engine
from triton_stand_in import serving

import export_qat
from utils.onnx_graph.output_formats import NmsSettings, end2end
from utils.serving import protocol

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/triton.md"
ELSEWHERE = {"scripts/build_engine.py"}  # needs a GPU; the page says so
Program = Callable[..., tuple[int, list[str], list[str]]]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"program_{Path(name).stem}", ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Program:
    """Runs one of the programs here; exit code and lines on standard output and standard error."""

    def run(name: str, *words: object) -> tuple[int, list[str], list[str]]:
        capsys.readouterr()
        try:
            code = script(name).run([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the page names."""
    monkeypatch.chdir(tmp_path)
    files_of_the_page(tmp_path)
    return tmp_path


def files_of_the_page(folder: Path) -> None:
    write_boxes(folder / "yolov9-c-int8.onnx")
    write_boxes(folder / "yolov9-c-seg.onnx", masks=True)
    write_boxes(folder / "yolov9-c-end2end.onnx", end2end(NmsSettings("onnx")))
    write_engine(folder / "yolov9-c-int8.engine", folder / "yolov9-c-int8.onnx")
    (folder / "images").mkdir()
    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    cv2.imwrite(str(folder / "images/a.png"), image)


@pytest.fixture
def page_commands() -> list[tuple[str, list[str]]]:
    """Program and arguments of every command of the page, in its order."""
    found = [words for words in commands(PAGE.read_text("utf-8")) if words[0] == "python"]
    assert len(found) == len(commands(PAGE.read_text("utf-8")))
    return [(words[1], words[2:]) for words in found]


@contextmanager
def default_server(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in at the addresses that clients ask where they are not given one."""
    with serving(repository) as server:
        monkeypatch.setattr(protocol, "WAYS", {"http": server.http, "grpc": server.grpc})
        yield


def test_every_command_of_the_page_runs(here, page_commands, program, monkeypatch):
    """Writers first, as the page does; a server that has all models; then the clients.

    Engines are served from their ONNX file, since nothing here runs them.
    """
    asked = [(name, words) for name, words in page_commands if name == "scripts/triton_client.py"]
    others = [(name, words) for name, words in page_commands if name not in ("scripts/triton_client.py", *ELSEWHERE)]
    assert len(asked) == 5
    assert {name for name, _ in others} == {"scripts/make_triton.py"}
    assert {name for name, _ in page_commands} - {name for name, _ in asked + others} == ELSEWHERE
    for name, words in others:
        code, out, err = program(name, *words)
        assert (code, err) == (0, []), (words, out, err)
    (built,) = [words for name, words in page_commands if name in ELSEWHERE]
    command = f"python scripts/build_engine.py {' '.join(built)}"
    assert out[-1] == f"the engine is still to be built: {command}"
    served = here / "served"
    shutil.copytree("model_repository", served)
    for path in served.rglob("config.pbtxt"):
        if "tensorrt_plan" in path.read_text("utf-8"):
            text = path.read_text("utf-8").replace("tensorrt_plan", "onnxruntime_onnx").replace("KIND_GPU", "KIND_CPU")
            path.write_text(text, "utf-8")
            shutil.copy(here / "yolov9-c-int8.onnx", path.parent / "1/model.onnx")
    with default_server(served, monkeypatch):
        for name, words in asked:
            words = [
                "0.05" if before == "--measure" else word for before, word in zip(["", *words], words, strict=False)
            ]
            words = [protocol.WAYS["grpc"] if word == "localhost:8001" else word for word in words]
            code, out, err = program(name, *words)
            assert (code, err) == (0, []), (words, out, err)
            assert ("--measure" in words) == any(line.startswith("clients ") for line in out)
    drawn = {path.relative_to(here).as_posix() for path in (here / "runs/triton").rglob("*.png")}
    assert drawn == {f"runs/triton/{name}/a.png" for name in ("exp", "exp2", "by-http", "by-grpc")}
    first, second = (cv2.imread(str(here / f"runs/triton/{name}/a.png")) for name in ("by-http", "by-grpc"))
    assert (first == second).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give an ONNX file or an engine to serve, or --check a model repository"),
        (("a.onnx", "--check", "b"), "give an ONNX file or an engine to serve, or --check a model repository"),
        (("gone.onnx",), "gone.onnx does not exist; expected an ONNX file or a TensorRT engine"),
        (("--check", "gone"), "gone does not exist; expected a model repository"),
        (("--check", "images"), "images holds no models"),
        (("yolov9-c-int8.onnx", "--name", "a/b"), "--name 'a/b' is no name of a model"),
        (("yolov9-c-int8.onnx", "--no-nms", "--conf-thres", "0.5"), "--conf-thres is of NMS behind raw predictions"),
        (("yolov9-c-end2end.onnx", "--class-agnostic"), "--class-agnostic is of NMS behind raw predictions"),
        (("yolov9-c-int8.onnx", "--batch-size", "1", "2"), "--batch-size takes one number, or three: min opt max"),
        (("yolov9-c-int8.onnx", "--platform", "tensorrt"), "argument --platform: invalid choice: 'tensorrt'"),
        (("yolov9-c-int8.engine", "--max-batch-size", "32"), "--max-batch-size is 32, and yolov9-c-int8.engine"),
    ],
)  # fmt: skip
def test_a_repository_that_cannot_be_is_one_line(words, message, here, program):
    before = sorted(here.iterdir())
    code, out, err = program("scripts/make_triton.py", *words)
    assert (code, len(err), out) == (2, 1, [])
    assert err[0].startswith("error: ")
    assert message in err[0]
    assert sorted(here.iterdir()) == before


def test_who_looks_for_it_in_the_export_is_led_here(here, capsys):
    assert export_qat.main(["--weights", "a.pt", "--include", "onnx", "triton"]) == 2
    assert "--include triton is a step of its own: scripts/make_triton.py FILE" in capsys.readouterr().err


def test_a_broken_repository_is_one_line(here, program):
    assert program("scripts/make_triton.py", "yolov9-c-end2end.onnx", "--name", "m")[0] == 0
    (here / "model_repository/m/labels.txt").unlink()
    code, out, err = program("scripts/make_triton.py", "--check", "model_repository")
    assert (code, out, len(err)) == (2, [], 1)
    assert re.search(
        r"^error: model_repository/m/labels.txt does not exist; output det_classes takes its labels", err[0]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("m",), "give --source to draw detections, --measure SECONDS to time requests, or both"),
        (("m", "--source", "gone.png"), "--source gone.png does not exist"),
        (("m", "--measure", "1", "--url", "http://a"), "--url 'http://a' is no address; expected HOST:PORT"),
        (("m", "--measure", "1", "--concurrency", "0"), "'0' is not an integer from 1 to 1,024"),
        (("m", "--measure", "1", "--url", "127.0.0.1:9"), "no server answers at 127.0.0.1:9"),
        (("m", "--source", "images", "--protocol", "grpc", "--url", "127.0.0.1:9"), "no server answers at 127.0.0.1:9"),
    ],
)
def test_a_client_that_cannot_ask_is_one_line(words, message, here, program):
    code, out, err = program("scripts/triton_client.py", *words)
    assert (code, len(err), out) == (2, 1, [])
    assert message in err[0]
    assert not (here / "runs").exists()


def test_a_drawing_does_not_replace_its_source(here, program):
    shutil.copytree("images", "runs/triton/mine")
    words = ("m", "--source", "runs/triton/mine", "--name", "mine", "--exist-ok")
    code, _, err = program("scripts/triton_client.py", *words)
    assert (code, len(err)) == (2, 1)
    assert "choose another --name or --project" in err[0]
