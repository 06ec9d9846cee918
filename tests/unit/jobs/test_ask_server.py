"""What a served model finds is what our own runner finds in the file; for every form of file."""

import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from boxes_graph import NAMES, write_boxes
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
from utils.serving.options import ServingOptions
from utils.serving.runner import TritonRunner

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
