"""Forms of input in TensorRT, on stand-ins: bytes, INT8 values, and channels side by side in the engine's memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from known_images import SQUARE, KnowingModel, write_set
from one_conv import METADATA, reference, with_product, write_onnx
from tensorrt_stand_in import stand_in

from utils.core.errors import InputError
from utils.core.input_form import FLOATS, InputForm
from utils.evaluation.dataset import load_data
from utils.evaluation.detector import Detector
from utils.evaluation.input_plan import InputPlan
from utils.onnx_graph.cleanup import set_metadata
from utils.onnx_graph.input_forms import attach_input
from utils.runners.base import TensorSpec
from utils.runners.feeds import as_feed
from utils.runners.onnxrt import OnnxRuntimeRunner
from utils.runners.pytorch import TorchRunner
from utils.trt import benchmark, onnx_summary, timing
from utils.trt.build_config import BuildConfig
from utils.trt.builder import build
from utils.trt.context import Execution
from utils.trt.decision import profile_shapes
from utils.trt.engine_file import EngineNote, note_path
from utils.trt.runner import TensorRTRunner

CPU = torch.device("cpu")
QUIET = BuildConfig(progress=False)
BYTES, LAST, INTEGERS = InputForm("uint8"), InputForm("uint8", "nhwc"), InputForm("int8")
EACH = [
    (FLOATS, "linear"),
    (BYTES, "linear"),
    (LAST, "linear"),
    *((INTEGERS, one) for one in ("linear", "chw4", "chw32")),
]


def file_of(folder, form, shape=(2, 3, 4, 8), name="a"):
    """A file of one quantized convolution that takes images in this form, and the form with its scale."""
    path = write_onnx(folder / f"{name}.onnx", shape, quantized=True)
    graph, taken = attach_input(onnx.load(path), form)
    onnx.save(set_metadata(graph, {**METADATA, **taken.metadata()}), path)
    return path, taken


def pixels(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def expected(images):
    levels = np.clip(np.rint(images.numpy().astype(np.float32) / np.float32(255) / np.float32(0.01)), -128, 127)
    return reference(levels * np.float32(0.01))


@pytest.mark.parametrize(("form", "side"), EACH)
def test_every_form_computes_the_same(tmp_path, monkeypatch, form, side):
    """The stand-in looks for channels where TensorRT's documentation has them, and for zeros behind those of images."""
    api = stand_in(monkeypatch, "10.7.0")
    path, taken = file_of(tmp_path, form)
    note = build(path, tmp_path / "a.engine", replace(QUIET, input_format=side)).note
    assert note.options == ({} if side == "linear" else {"input_format": side})
    assert note.metadata["input_form"] == form.kind
    images = pixels(2, 3, 4, 8)
    with TensorRTRunner(tmp_path / "a.engine", "cpu", api=api) as runner:
        assert (runner.input_form, runner.inputs[0].shape) == (taken, taken.own((2, 3, 4, 8)))
        where = side if side != "linear" else taken.layout
        assert runner.description.endswith(f"INT8, {form.kind} input, {where}" if form is not FLOATS else "INT8")
        for feed in (images, images // 2, images):  # without a graph, captured, replayed
            found = runner.infer({"images": as_feed(feed, taken, runner.inputs[0].dtype).contiguous()})["output0"]
            np.testing.assert_allclose(found, expected(feed), atol=1e-5)


@pytest.mark.parametrize("side", ["linear", "chw4", "chw32"])
def test_dynamic_shapes(tmp_path, monkeypatch, side):
    """Memory is used again for other shapes: what fills up is 0 there too, which the stand-in looks at."""
    api = stand_in(monkeypatch, "10.7.0")
    path, taken = file_of(tmp_path, INTEGERS, ("batch", 3, "height", "width"))
    sizes = replace(QUIET, batch=(1, 2, 4), height=(32, 32, 64), width=(32, 32, 64), input_format=side)
    build(path, tmp_path / "a.engine", sizes)
    with TensorRTRunner(tmp_path / "a.engine", "cpu", api=api) as runner:
        for shape in ((4, 3, 64, 64), (1, 3, 32, 64), (3, 3, 64, 32), (4, 3, 64, 64)):
            images = pixels(*shape)
            found = runner.infer({"images": as_feed(images, taken, "int8")})["output0"]
            np.testing.assert_allclose(found, expected(images), atol=1e-5)


@pytest.mark.parametrize(("side", "channels"), [("chw4", 4), ("chw32", 32)])
def test_channels_side_by_side(tmp_path, monkeypatch, side, channels):
    api = stand_in(monkeypatch, "10.7.0")
    path, _ = file_of(tmp_path, INTEGERS)
    execution = Execution(build(path, tmp_path / "a.engine", replace(QUIET, input_format=side)).path, api, CPU)
    assert execution.input_format == side
    buffer = execution.buffers["images"]
    assert (tuple(buffer.shape), buffer.stride()) == ((2, 3, 4, 8), (4 * 8 * channels, 1, 8 * channels, channels))
    buffer.copy_(torch.arange(1, 193, dtype=torch.uint8).view(2, 3, 4, 8).view(torch.int8))
    memory = execution._storage["images"].view(2, 1, 4, 8, channels)
    assert memory[1, 0, 2, 5].tolist() == [buffer[1, channel, 2, 5] for channel in range(3)] + [0] * (channels - 3)
    execution.run()
    execution.close()


def test_bytes_last_in_a_profile(tmp_path):
    path, _ = file_of(tmp_path, LAST, ("batch", 3, "height", "width"))
    file = onnx_summary.read(path)
    assert (file.input_form, file.image) == (LAST, ("images", (None, 3, None, None)))
    shapes = profile_shapes(file, replace(QUIET, batch=(1, 4, 8), height=(64, 64, 96), width=(32, 64, 128)))
    assert shapes == {"images": ((1, 64, 32, 3), (4, 64, 64, 3), (8, 96, 128, 3))}


@pytest.mark.parametrize("form", [FLOATS, BYTES, LAST])
def test_packed_formats_are_for_integers(tmp_path, monkeypatch, form):
    api = stand_in(monkeypatch, "10.7.0")
    path, _ = file_of(tmp_path, form)
    with pytest.raises(
        InputError, match=r"--input-format chw32 is for files that take INT8 images, and .*a\.onnx takes"
    ):
        build(path, tmp_path / "a.engine", replace(QUIET, input_format="chw32"))
    assert api.module.calls == []
    assert not (tmp_path / "a.engine").exists()


@pytest.mark.parametrize("version", ["8.6.0", "10.7.0"])
@pytest.mark.parametrize("form", [BYTES, LAST])
def test_a_product_of_bytes_in_front_of_a_quantizer(tmp_path, monkeypatch, form, version):
    """As files of 1.0.0 have it, which TensorRT 8.6.0 computes without the factor."""
    stand_in(monkeypatch, version)
    path, _ = file_of(tmp_path, form)
    build(path, tmp_path / "a.engine", QUIET)
    path.write_bytes(with_product(onnx.load(path)).SerializeToString())
    if version == "10.7.0":
        build(path, tmp_path / "b.engine", QUIET)
        return
    with pytest.raises(
        InputError, match=r"multiplies them by 1/255 .* engines of TensorRT 8\.6\.0 leave that"
    ) as caught:
        build(path, tmp_path / "b.engine", QUIET)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "b.engine").exists()


@pytest.mark.parametrize("form", [BYTES, LAST])
def test_a_product_of_bytes_that_no_quantizer_reads(tmp_path, monkeypatch, form):
    """Float files: the engine that 8.6.0 made of one has the AP of floats."""
    path = write_onnx(tmp_path / "a.onnx", (2, 3, 4, 8))
    graph, taken = attach_input(onnx.load(path), form)
    assert "Mul" in {node.op_type for node in graph.graph.node}
    onnx.save(set_metadata(graph, {**METADATA, **taken.metadata()}), path)
    build(path, tmp_path / "a.engine", QUIET, api=stand_in(monkeypatch))


def test_a_version_that_lacks_a_format(tmp_path, monkeypatch):
    api = stand_in(monkeypatch, "10.7.0")
    monkeypatch.setattr(api.module, "TensorFormat", SimpleNamespace(LINEAR=0, CHW4=3))
    path, _ = file_of(tmp_path, INTEGERS)
    with pytest.raises(InputError, match=r"TensorRT 10\.7\.0 has no input format chw32; it has linear, chw4$"):
        build(path, tmp_path / "a.engine", replace(QUIET, input_format="chw32"))
    with pytest.raises(InputError, match="input format 'chw8' is none of linear, chw4, chw32"):
        build(path, tmp_path / "a.engine", replace(QUIET, input_format="chw8"))


@pytest.mark.parametrize(("name", "kind"), [("images", "HWC8"), ("images", "CHW2"), ("output0", "CHW32")])
def test_engines_in_formats_that_are_not_ours(tmp_path, monkeypatch, name, kind):
    """Such as trtexec's --inputIOFormats and --outputIOFormats make."""
    api = stand_in(monkeypatch, "10.7.0")
    path, _ = file_of(tmp_path, INTEGERS)
    engine = build(path, tmp_path / "a.engine", QUIET).path
    head, _, model = engine.read_bytes().partition(b"\n")
    engine.write_bytes(
        head.replace(b'{"images": "LINEAR"}', b'{"%s": "%s"}' % (name.encode(), kind.encode())) + b"\n" + model
    )
    with pytest.raises(InputError, match=rf"a\.engine has {name} in format {kind}, which is not supported"):
        Execution(engine, api, CPU)


@pytest.mark.parametrize(
    ("form", "dtype", "message"),
    [
        (
            FLOATS,
            torch.uint8,
            r"images is uint8 \[2, 3, 4, 8\]; the network takes images float32 .*: FP32 or FP16 in 0..1",
        ),
        (BYTES, torch.float32, r"images is float32 .*; the network takes images uint8 .*: the bytes of RGB images"),
        (LAST, torch.uint8, r"images is uint8 \[2, 3, 4, 8\]; the network takes images uint8 \[2, 4, 8, 3\]"),
        (INTEGERS, torch.uint8, r"takes images int8 .*: INT8 values, round\(pixel / 255 / 0.01\)"),
        (INTEGERS, torch.float32, r"images is float32 .*; the network takes images int8"),
    ],
)
@pytest.mark.parametrize("where", ["ONNX Runtime", "TensorRT"])
def test_other_arrays_get_one_line(tmp_path, monkeypatch, form, dtype, message, where):
    api = stand_in(monkeypatch, "10.7.0")
    path, _ = file_of(tmp_path, form)
    if where == "TensorRT":
        runner = TensorRTRunner(build(path, tmp_path / "a.engine", QUIET).path, "cpu", api=api)
    else:
        runner = OnnxRuntimeRunner(path, threads=1)
    with runner, pytest.raises(InputError, match=message) as caught:
        runner.infer({"images": pixels(2, 3, 4, 8).to(dtype)})
    assert "\n" not in str(caught.value)


def test_integers_of_an_unknown_scale(tmp_path, monkeypatch):
    """An engine without its note runs, but nothing can make what it takes of images."""
    api = stand_in(monkeypatch, "10.7.0")
    path, _ = file_of(tmp_path, INTEGERS)
    engine = build(path, tmp_path / "a.engine", QUIET).path
    note_path(engine).unlink()
    assert EngineNote.load(engine) == EngineNote()
    with TensorRTRunner(engine, "cpu", api=api) as runner:
        with pytest.raises(InputError, match="nothing says its scale") as caught:
            Detector(runner, None)
        assert "\n" not in str(caught.value)


class Knowing(TorchRunner):
    """A network that knows its images, behind each form of input."""

    def __init__(self, model, form):
        super().__init__(model, "cpu")
        self.form, self.metadata = form, {**self.metadata, **form.metadata()}
        self.inputs = (TensorSpec("images", form.own((None, 3, None, None)), form.kind),)

    def _infer(self, feeds):
        images = feeds["images"]
        if self.form.kind == "int8":  # at this scale every second pixel value has an integer of its own
            return super()._infer({"images": images.float() * self.form.scale})
        images = images.permute(0, 3, 1, 2) if self.form.layout == "nhwc" else images
        return super()._infer({"images": images.float() / 255})


@pytest.mark.parametrize("form", [BYTES, LAST])
def test_the_loop_gives_each_form_what_it_takes(tmp_path, form):
    from utils.evaluation.loop import EvalConfig, evaluate

    model = KnowingModel(write_set(tmp_path, 12, SQUARE), ("cat", "dog", "owl"), 64)
    data, config = load_data(tmp_path / "data.yaml"), EvalConfig(imgsz=64, batch_size=5, workers=0)
    floats = evaluate(TorchRunner(model, "cpu"), data, config, progress=False)
    found = evaluate(Knowing(model, form), data, config, progress=False)
    assert 0.3 < found.ap == floats.ap
    runner = Knowing(model, form)
    runner.limits = {"images": (form.own((1, 3, 64, 96)), form.own((8, 3, 64, 96)))}
    assert InputPlan.of(runner, None, 16) == InputPlan((64, 96), 8)


def test_entries_of_a_benchmark(tmp_path, monkeypatch):
    api = stand_in(monkeypatch, "10.7.0")
    integers, _ = file_of(tmp_path, INTEGERS, name="int8")
    floats, _ = file_of(tmp_path, FLOATS, name="floats")
    last, _ = file_of(tmp_path, LAST, name="bytes")
    wanted = ("linear", "chw32", "chw4", "chw32")
    entries = benchmark.in_formats([benchmark.Entry(one) for one in (floats, integers, last)], wanted)
    assert [entry.name for entry in entries] == ["floats", "int8", "int8-chw32", "int8-chw4", "bytes"]
    engines = benchmark.prepare(entries, 2, None, QUIET, api)
    assert [path.name for path in engines.values()] == [f"{entry.name}-b2.engine" for entry in entries]
    quick = timing.TimingConfig(1, 0.01, 1, iterations=2)
    with benchmark.Opening(api, CPU) as opening:
        rows = benchmark.measure(benchmark.open_engines(engines, 2, None, (1,), opening), quick)
    assert [(row.model, row.error) for row in rows] == [(entry.name, "") for entry in entries]
    assert all(row.figures is not None for row in rows)
    with pytest.raises(
        InputError, match="--input-format chw4 is for ONNX files that take INT8 images, and none of these"
    ):
        benchmark.in_formats([benchmark.Entry(floats)], ("chw4",))
    assert benchmark.in_formats([benchmark.Entry(floats)], ("linear",)) == [benchmark.Entry(floats)]


def test_timed_inputs_are_no_constants(tmp_path, monkeypatch):
    """A GPU computes zeros with less power, and so at a higher clock."""
    api = stand_in(monkeypatch, "10.7.0")
    for form, side in EACH:
        path, _ = file_of(tmp_path, form)
        execution = Execution(build(path, tmp_path / "a.engine", replace(QUIET, input_format=side)).path, api, CPU)
        sent = timing._Lane(execution, timing.TimingConfig()).memory["images"]
        assert len(sent.unique()) > 50
        assert torch.equal(execution.buffers["images"], sent)
        execution.close()
