"""Forms of input in TensorRT, on stand-ins: floats, and bytes in either layout."""

import numpy as np
import onnx
import pytest
import torch
from one_conv import METADATA, reference, write_onnx
from tensorrt_stand_in import stand_in

from utils.core.errors import InputError
from utils.core.input_spec import FLOATS, InputSpec
from utils.onnx_graph.passes.take_bytes import take_bytes
from utils.onnx_graph.view import set_metadata
from utils.runners.base import as_feed
from utils.trt.build import build
from utils.trt.preflight import BuildConfig, OnnxFile, profile_shapes
from utils.trt.runner import Execution, TensorRTRunner

CPU = torch.device("cpu")
QUIET = BuildConfig(progress=False)
BYTES, LAST = InputSpec("uint8"), InputSpec("uint8", "nhwc")
EACH = (FLOATS, BYTES, LAST)


def file_of(folder, form, shape=(2, 3, 4, 8), *, quantized=True):
    """A file of one convolution that takes images in this form."""
    path = write_onnx(folder / "a.onnx", shape, quantized=quantized)
    onnx.save(set_metadata(take_bytes(onnx.load(path), form), {**METADATA, **form.metadata()}), path)
    return path


def pixels(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def expected(images):
    levels = np.clip(np.rint(images.numpy().astype(np.float32) / np.float32(255) / np.float32(0.01)), -128, 127)
    return reference(levels * np.float32(0.01))


@pytest.mark.parametrize("form", EACH)
def test_every_form_computes_the_same(tmp_path, monkeypatch, form):
    api = stand_in(monkeypatch, "10.7.0")
    note = build(file_of(tmp_path, form), tmp_path / "a.engine", QUIET)
    assert note.metadata["input_form"] == form.kind
    images = pixels(2, 3, 4, 8)
    with TensorRTRunner(tmp_path / "a.engine", "cpu", api=api) as runner:
        assert (runner.input_spec, runner.inputs[0].shape) == (form, form.own((2, 3, 4, 8)))
        assert runner.description.endswith(f"INT8, {form.kind} input, {form.layout}" if form != FLOATS else "INT8")
        for feed in (images, images // 2, images):  # without a graph, captured, replayed
            found = runner.infer({"images": as_feed(feed, form, runner.inputs[0].dtype).contiguous()})["output0"]
            np.testing.assert_allclose(found, expected(feed), atol=1e-5)


def test_bytes_last_in_a_profile(tmp_path):
    file = OnnxFile.read(file_of(tmp_path, LAST, ("batch", 3, "height", "width")))
    assert (file.input_spec, file.image) == (LAST, ("images", (None, 3, None, None)))
    shapes = profile_shapes(file, BuildConfig(batch=(1, 4, 8), height=(64, 64, 96), width=(32, 64, 128)))
    assert shapes == {"images": ((1, 64, 32, 3), (4, 64, 64, 3), (8, 96, 128, 3))}


@pytest.mark.parametrize(("name", "kind"), [("images", "HWC8"), ("images", "CHW32"), ("output0", "CHW32")])
def test_engines_in_formats_that_are_not_ours(tmp_path, monkeypatch, name, kind):
    """Such as trtexec's --inputIOFormats make, and --input-format of 1.0."""
    api = stand_in(monkeypatch, "10.7.0")
    path = file_of(tmp_path, BYTES)
    engine = tmp_path / "a.engine"
    build(path, engine, QUIET)
    head, _, model = engine.read_bytes().partition(b"\n")
    engine.write_bytes(
        head.replace(b'{"images": "LINEAR"}', b'{"%s": "%s"}' % (name.encode(), kind.encode())) + b"\n" + model
    )
    with pytest.raises(InputError, match=rf"a\.engine has {name} in format {kind}, which is not supported"):
        Execution(engine, api, CPU)
