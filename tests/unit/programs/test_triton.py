"""Served models and the two programs for Triton: what is found is what our own runner finds in the file."""

import shutil
import socket
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from boxes_graph import NAMES, write_boxes, write_engine
from documentation import commands
from google.protobuf import text_format
from triton_stand_in import serving
from tritonclient.grpc.model_config_pb2 import ModelConfig

from utils.core.errors import InputError, QatError
from utils.core.input_spec import InputSpec
from utils.evaluation.input_plan import InputPlan
from utils.jobs.model_repository import CONFIG, make
from utils.jobs.visualize import Artist
from utils.onnx_graph.output_formats import NmsSettings, end2end
from utils.runners.onnxrt import OnnxRuntimeRunner
from utils.serving import runner as client
from utils.serving.options import ServingOptions
from utils.serving.runner import TritonRunner

ROOT = Path(__file__).resolve().parents[3]
MAKE, ASK, BUILD = "scripts/make_triton.py", "scripts/triton_client.py", "scripts/build_engine.py"
NMS = NmsSettings("onnx", 100)
FORMS = {
    "raw": {}, "alone": {}, "static": {"batch": 3}, "nms": {"form": end2end(NMS)},
    "bytes": {"takes": InputSpec("uint8")}, "nhwc": {"takes": InputSpec("uint8", "nhwc")}, "masks": {"masks": True},
    "given": {"form": end2end(NMS, 0), "masks": True}, "framed": {"form": end2end(NMS, 28), "masks": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a file for each form, and the repository `models` with all of them."""
    folder = tmp_path_factory.mktemp("files")
    for name, more in FORMS.items():
        file = write_boxes(folder / f"{name}.onnx", **more)
        make(ServingOptions(file=file, output=folder / "models", no_nms=name in ("alone", "masks")))
    return folder


@pytest.fixture(scope="module")
def server(files: Path):
    with serving(files / "models") as running:
        yield running


@pytest.mark.parametrize("name", FORMS)
def test_detections_are_our_own_runners(name, files, server):
    rng = np.random.default_rng(1)
    with TritonRunner(name, server) as served, OnnxRuntimeRunner(files / f"{name}.onnx", threads=1) as runner:
        artist, expected = Artist(served, max_det=100), Artist(runner, max_det=100)
        for size in ((50, 80), (120, 60), (64, 96)):  # of other shapes than the network's
            image = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
            assert len(expected.detect(image)[0]) > 5
            assert torch.equal(artist.detect(image)[0], expected.detect(image)[0])
            assert (artist.draw(image)[0] == expected.draw(image)[0]).all()


def test_a_request_holds_several_images(server):
    with TritonRunner("raw", server) as served:
        assert served.limits == {"images": ((1, 3, 64, 96), (16, 3, 64, 96))}
        assert served.names == dict(enumerate(NAMES))
        outputs = served.infer({"images": torch.rand(5, 3, 64, 96)})
        with pytest.raises(QatError) as caught:  # the server's refusal
            served.infer({"images": torch.rand(17, 3, 64, 96)})
    assert caught.value.exit_code == 1
    assert {name: tuple(array.shape) for name, array in outputs.items()} == {
        "num_dets": (5, 1), "det_boxes": (5, 100, 4), "det_scores": (5, 100), "det_classes": (5, 100),
    }  # fmt: skip


@pytest.mark.parametrize("limits", [None, "[[1, 3, 32, 32], [8, 3, 640, 640]]"])
def test_a_model_of_dynamic_size_is_asked_within_its_profile(limits, files, tmp_path):
    """An engine's profile is in the parameters."""
    make(ServingOptions(file=files / "nms.onnx", output=tmp_path, name="m"))
    config = text_format.Parse((tmp_path / "m" / CONFIG).read_text("utf-8"), ModelConfig())
    config.input[0].dims[1:] = [-1, -1]
    del config.model_warmup[:]
    if limits:
        config.parameters["limits"].string_value = limits
    (tmp_path / "m" / CONFIG).write_text(str(config), "utf-8")
    with serving(tmp_path) as running, TritonRunner("m", running) as served:
        assert served.limits == {"images": ((1, 3, 32, 32), (16, 3, 640, 640)) if limits else
                                 ((1, 3, 1, 1), (16, 3, 8192, 8192))}  # fmt: skip
        assert InputPlan.of(served, 64, 1).imgsz == (64, 64)
        if limits:
            with pytest.raises(InputError, match="640"):
                InputPlan.of(served, 1280, 1)


def test_what_does_not_answer_as_triton_is_named(server):
    with pytest.raises(InputError, match="'gone' is not found"):
        TritonRunner("gone", server)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(InputError, match=address) as caught:
            TritonRunner("m", address)
    assert len(str(caught.value).splitlines()) == 1


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the page names."""
    monkeypatch.chdir(tmp_path)
    write_boxes(tmp_path / "yolov9-c-int8.onnx")
    write_boxes(tmp_path / "yolov9-c-int8-strong.onnx")
    write_boxes(tmp_path / "yolov9-c-seg-end2end.onnx", end2end(NMS), masks=True)
    write_boxes(tmp_path / "yolov9-c-end2end.onnx", end2end(NMS))
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
        monkeypatch.setattr(client, "ADDRESS", server)
        for name, *words in page:
            if name == ASK:
                words = [server if word == "localhost:8001" else word for word in words]
                code, out, err = start(name, *words)
                assert (code, err) == (0, []), (words, out, err)
    drawn = [cv2.imread(f"runs/triton/{name}/a.png") for name in ("exp", "default", "by-url")]
    assert (drawn[1] == drawn[2]).all()
    assert (drawn[0] != cv2.imread("images/a.png")).any()
