"""What a server's model finds is what our own runner finds in the file; over HTTP and gRPC, for every form of file."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from boxes_graph import NAMES, write_boxes
from triton_stand_in import serving

from utils.core.errors import InputError
from utils.core.input_form import InputForm
from utils.jobs import ask_server
from utils.jobs.ask_server import Asked
from utils.jobs.model_repository import make
from utils.jobs.visualize import Artist
from utils.onnx_graph.output_formats import NmsSettings, end2end
from utils.runners.onnxrt import OnnxRuntimeRunner
from utils.serving.config import Wishes
from utils.serving.runner import TritonRunner

NMS = NmsSettings("onnx", 100)
FORMS = {
    "raw": {}, "alone": {}, "static": {"batch": 3}, "nms": {"form": end2end(NMS)},
    "bytes": {"takes": InputForm("uint8")}, "nhwc": {"takes": InputForm("uint8", "nhwc")},
    "masks": {"masks": True},
    "given": {"form": end2end(NMS, 0), "masks": True}, "framed": {"form": end2end(NMS, 28), "masks": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a file for each form, and the repository `models` with all of them."""
    folder = tmp_path_factory.mktemp("files")
    for name, more in FORMS.items():
        file = write_boxes(folder / f"{name}.onnx", **more)
        make(file, folder / "models", Wishes(name, nms=name != "alone", warmup=name == "raw", max_batch=None))
    return folder


@pytest.fixture(scope="module")
def server(files: Path):
    with serving(files / "models") as found:
        yield found


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images of other shapes than the network's."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(1)
    for number, size in enumerate(((50, 80), (120, 60), (64, 96))):
        cv2.imwrite(str(folder / f"{number}.png"), rng.integers(0, 256, (*size, 3), dtype=np.uint8))
    return folder


@pytest.mark.parametrize("way", ["http", "grpc"])
@pytest.mark.parametrize("name", FORMS)
def test_detections_are_our_own_runners(name, way, files, server, pictures):
    own = "given" if name == "masks" else name  # behind raw predictions masks are as on the grid of a file with NMS
    with (
        TritonRunner(name, way, getattr(server, way)) as asked,
        OnnxRuntimeRunner(files / f"{own}.onnx", threads=1) as runner,
    ):
        theirs, ours = Artist(asked, max_det=100), Artist(runner, max_det=100)
        for file in sorted(pictures.iterdir()):
            image = cv2.imread(str(file))
            found, expected = theirs.find(image), ours.find(image)
            assert len(expected) > 5
            assert torch.equal(found, expected) or name == "masks"
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            drawn, count = theirs.draw(image)
            same, number = ours.draw(image)
            assert count == number
            assert (drawn != same).mean() < (1e-3 if name == "masks" else 1e-9)
    assert server.server.asked[-1][:2] == (way, name)


def test_requests_say_how_many_images_they_hold(server, files):
    with TritonRunner("raw", "http", server.http) as asked:
        assert asked.limits == {"images": ((1, 3, 64, 96), (16, 3, 64, 96))}
        assert asked.names == dict(enumerate(NAMES))
        result = asked.infer({"images": torch.rand(5, 3, 64, 96)})
    assert {name: tuple(array.shape) for name, array in result.items()} == {
        "num_dets": (5, 1), "det_boxes": (5, 100, 4), "det_scores": (5, 100), "det_classes": (5, 100),
    }  # fmt: skip
    assert server.server.asked[-1] == ("http", "raw", {"images": [5, 3, 64, 96]})


def test_drawings_and_figures(server, pictures, tmp_path, caplog):
    asked = Asked("nms", "http", server.http, project=str(tmp_path))
    with caplog.at_level("INFO"):
        written = ask_server.draw(asked, sorted(pictures.iterdir()))
        loads = ask_server.time_requests(asked, 0.1, [1, 2], 4, [pictures / "0.png"])
    assert [path.name for path in written] == ["0.png", "1.png", "2.png"]
    assert all((cv2.imread(str(path)) != cv2.imread(str(pictures / path.name))).any() for path in written)
    assert [(load.concurrency, load.images) for load in loads] == [(1, 4), (2, 4)]
    assert all(load.latencies and load.throughput > 0 for load in loads)
    text = "\n".join(caplog.messages)
    assert f"nms: Triton at {server.http}, http, onnxruntime_onnx" in text
    assert "images float32 [4, 3, 64, 96], 294,912 bytes" in text
    assert "clients  images a request  requests  mean ms  p50 ms" in text


def test_what_is_measured_is_sent_as_the_model_takes_it(server, pictures):
    for name, dtype in (("nhwc", "uint8"), ("raw", "float32")):
        ask_server.time_requests(Asked(name, "grpc", server.grpc), 0.02, [1], 2)
        shape = [2, 64, 96, 3] if name == "nhwc" else [2, 3, 64, 96]
        assert server.server.asked[-1] == ("grpc", name, {"images": shape}), dtype


@pytest.mark.parametrize(
    ("name", "batch", "message"),
    [
        ("gone", 1, "Request for unknown model: 'gone' is not found"),
        ("raw", 17, "--batch-size is 17, and raw takes 16 images in a request"),
        ("static", 1, "--batch-size is 1, and static takes 3 images in a request"),
        (
            "raw_nms",
            1,
            r"the network takes output0 float32 \[any, 7, 96\]; expected one input \[batch, 3, height, width\]",
        ),
    ],
)
@pytest.mark.parametrize("way", ["http", "grpc"])
def test_what_cannot_be_asked_is_refused(name, batch, message, way, server):
    with pytest.raises(InputError, match=message):
        ask_server.time_requests(Asked(name, way, getattr(server, way)), 0.1, [1], batch)


def test_a_model_of_dynamic_size_is_asked_at_one(tmp_path):
    """Sizes that an engine's profile allows are in the parameters."""
    from utils.serving.protocol import ServedModel
    from utils.serving.runner import TritonRunner as Runner
    from utils.serving.served_file import Tensor

    class Fake(Runner):
        def __init__(self, parameters: dict[str, str]) -> None:
            self._model = ServedModel("m", (), (), 4, parameters)
            self.inputs = (Tensor("images", "float32", (None, 3, None, None)),)

    model = ServedModel("m", Fake({}).inputs, (), 4, {"limits": "[[1, 3, 32, 32], [8, 3, 640, 640]]"})
    fake = Fake({})
    fake._model = model
    assert fake._limits() == {"images": ((1, 3, 32, 32), (4, 3, 640, 640))}
    for text in ("", "no", "[]", "[[1, 3], [2, 3]]", '[["a"], [1]]'):
        fake._model = ServedModel("m", Fake({}).inputs, (), 4, {"limits": text})
        assert fake._limits() == {"images": ((1, 3, 1, 1), (4, 3, 8192, 8192))}
