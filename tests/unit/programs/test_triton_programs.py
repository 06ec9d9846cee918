"""The two programs for Triton: every command of docs/triton.md against the stand-in, as written there."""

import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from boxes_graph import write_boxes, write_engine
from documentation import commands
from triton_stand_in import serving

from utils.onnx_graph.output_formats import NmsSettings, end2end
from utils.serving import runner

ROOT = Path(__file__).resolve().parents[3]
MAKE, ASK, BUILD = "scripts/make_triton.py", "scripts/triton_client.py", "scripts/build_engine.py"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the page names."""
    monkeypatch.chdir(tmp_path)
    write_boxes(tmp_path / "yolov9-c-int8.onnx")
    write_boxes(tmp_path / "yolov9-c-seg-end2end.onnx", end2end(NmsSettings("onnx")), masks=True)
    write_boxes(tmp_path / "yolov9-c-end2end.onnx", end2end(NmsSettings("onnx")))
    write_engine(tmp_path / "yolov9-c-int8.engine", tmp_path / "yolov9-c-int8.onnx")
    (tmp_path / "images").mkdir()
    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / "images/a.png"), image)
    return tmp_path


def test_every_command_of_the_page_runs(here, start, monkeypatch):
    """Writers first, as on the page, then clients. Engines are served from their ONNX file."""
    page = [words[1:] for words in commands((ROOT / "docs/triton.md").read_text("utf-8"))]
    assert {name for name, *_ in page} == {MAKE, ASK, BUILD}
    for name, *words in page:
        if name == MAKE:
            code, out, err = start(name, *words)
            assert (code, err) == (0, []), (words, out, err)
    (built,) = [words for words in page if words[0] == BUILD]
    assert out[-1].endswith(" ".join(built))  # what the last writer says of the engine that is built later
    for path in Path("model_repository").rglob("config.pbtxt"):
        if "tensorrt_plan" in (text := path.read_text("utf-8")):
            text = text.replace("tensorrt_plan", "onnxruntime_onnx").replace("KIND_GPU", "KIND_CPU")
            path.write_text(text, "utf-8")
            shutil.copy("yolov9-c-int8.onnx", path.parent / "1/model.onnx")
    with serving(Path("model_repository")) as server:
        monkeypatch.setattr(runner, "ADDRESS", server)
        for name, *words in page:
            if name == ASK:
                words = [server if word == "localhost:8001" else word for word in words]
                code, out, err = start(name, *words)
                assert (code, err) == (0, []), (words, out, err)
    drawn = [cv2.imread(f"runs/triton/{name}/a.png") for name in ("exp", "default", "by-url")]
    assert (drawn[1] == drawn[2]).all()
    assert (drawn[0] != cv2.imread("images/a.png")).any()
