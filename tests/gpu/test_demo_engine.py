"""The demo model's INT8 engines for each form of input, beside ONNX Runtime and PyTorch; graphs, layers, times."""

import json

import onnx
import pytest
import torch

from utils.core.errors import InputError
from utils.core.input_spec import FLOATS, InputSpec
from utils.evaluation.config import EvalConfig
from utils.evaluation.loop import evaluate
from utils.jobs import check_engine
from utils.jobs.open import open_runner
from utils.onnx_graph.passes.take_bytes import take_bytes
from utils.onnx_graph.view import metadata_of, set_metadata
from utils.runners.base import as_feed
from utils.trt import tensorrt_api, timing
from utils.trt.build import build
from utils.trt.build_options import BuildConfig
from utils.trt.engine_file import EngineNote
from utils.trt.layers import layers_of, report_lines, summarize
from utils.trt.runner import Execution, TensorRTRunner

FORMS = {"float": FLOATS, "uint8": InputSpec("uint8"), "uint8-nhwc": InputSpec("uint8", "nhwc")}
DEVICE = torch.device("cuda:0")


def build_config(demo_onnx, **changes):
    cache = demo_onnx.with_name("gpu-tests.timing.cache")
    return BuildConfig(batch=(1, 8, 32), timing_cache=cache, optimization_level=2, progress=False, **changes)


@pytest.fixture(scope="module")
def engines(demo_onnx, tmp_path_factory):
    """Form → engine and the ONNX file that it was built from; at a low optimization level, which is quicker."""
    folder, original, found = tmp_path_factory.mktemp("forms"), onnx.load(demo_onnx), {}
    config = build_config(demo_onnx)
    for name, form in FORMS.items():
        file = folder / f"{name}.onnx"
        onnx.save(set_metadata(take_bytes(original, form), {**metadata_of(original), **form.metadata()}), file)
        found[name] = (file.with_suffix(".engine"), file)
        build(file, found[name][0], config)
    return found


@pytest.fixture(scope="module")
def demo_engine(engines):
    return engines["float"][0]


@pytest.fixture(scope="module")
def engine_without_streams(engines, demo_onnx):
    """Of the same file, since TensorRT 8.6.0 measures no layers of an engine with auxiliary streams."""
    default, file = engines["float"]
    assert EngineNote.load(default).options["max_aux_streams"] == 2
    engine = default.with_name("without-streams.engine")
    build(file, engine, build_config(demo_onnx, max_aux_streams=0))
    return engine


@pytest.fixture(scope="module")
def expected(demo_onnx, demo_data):
    """The scores of ONNX Runtime."""
    with open_runner(demo_onnx, "cpu") as runner:
        return evaluate(runner, demo_data, EvalConfig(imgsz=320, workers=8), progress=False)


@pytest.fixture(scope="module")
def float_ap(engines, demo_data):
    """AP of the engine that takes floats."""
    with open_runner(engines["float"][0], "cuda:0") as runner:
        return evaluate(runner, demo_data, EvalConfig(imgsz=320, workers=8), progress=False).ap


@pytest.mark.parametrize(("form", "batch"), [("float", 1), ("float", 8), ("uint8", 8), ("uint8-nhwc", 8)])
def test_accuracy(engines, demo_data, demo_report, expected, float_ap, form, batch):
    report = json.loads(demo_report.read_text(encoding="utf-8"))
    pytorch = next(row for row in reversed(report["rows"]) if row["stage"] in ("PTQ", "QAT", "best (PTQ)"))
    config = EvalConfig(imgsz=320, workers=8, batch_size=batch)
    with open_runner(engines[form][0], "cuda:0") as runner:
        found = evaluate(runner, demo_data, config, progress=False)
    print(f"AP, {form}: engine {found.ap:.4f}, ONNX Runtime {expected.ap:.4f}, PyTorch {pytorch['ap']:.4f}")
    assert found.images == expected.images == 500
    assert found.ap == pytest.approx(expected.ap, abs=0.003)
    assert found.ap50 == pytest.approx(expected.ap50, abs=0.003)
    assert found.ap == pytest.approx(pytorch["ap"], abs=0.005)
    assert form == "float" or found.ap == pytest.approx(float_ap, abs=0.001)


@pytest.mark.parametrize("name", FORMS)
def test_results_are_onnx_runtimes(name, engines):
    """But for rounding, at every batch size; feeds in pageable, pinned and GPU memory, with and without a graph."""
    form, (engine, file) = FORMS[name], engines[name]
    with (
        open_runner(engine, "cuda:0") as runner,
        TensorRTRunner(engine, "cuda:0", graphs=False) as plain,
        open_runner(file, "cpu") as reference,
    ):
        assert (runner.input_spec, runner.inputs[0].dtype) == (form, reference.inputs[0].dtype)
        for batch in (8, 8, 1, 3, 32, 8):
            generator = torch.Generator().manual_seed(batch)
            pixels = torch.randint(0, 256, (batch, 3, 320, 320), dtype=torch.uint8, generator=generator)
            feed = as_feed(pixels, form, reference.inputs[0].dtype).contiguous()
            by_onnx = reference.infer({"images": feed})["output0"].clone()
            without_graph = plain.infer({"images": feed})["output0"].clone()
            for same in (feed, feed.pin_memory(), feed.cuda()):
                found = runner.infer({"images": same})["output0"]
                assert torch.equal(found, without_graph)
                difference = (found.float().cpu() - by_onnx).abs()
                assert difference[:, 4:].mean() < 0.005
                assert difference[:, :4].median() < 2
        with pytest.raises(InputError, match=r"takes images from \[1, .* to \[32, "):
            runner.infer({"images": feed.repeat(5, 1, 1, 1)})
        with pytest.raises(InputError, match="the model takes"):
            runner.infer({"images": feed.double()})


def test_the_comparison_of_a_new_engine_finds_nothing(demo_engine, demo_onnx, monkeypatch):
    monkeypatch.setattr(check_engine, "LIMIT", 0.5)  # rounding
    found = check_engine.check_engine(demo_engine, demo_onnx, DEVICE, 8)
    assert found.startswith("the engine beside ONNX Runtime, 8 images: ")


def test_layers_are_int8_and_their_times_add_up_and_copies_overlap_with_runs(engine_without_streams):
    execution = Execution(engine_without_streams, tensorrt_api.load_tensorrt(), DEVICE)
    execution.set_shapes({"images": (8, 3, 320, 320)})
    layers = layers_of(execution)
    found = summarize(layers)
    kernels = timing.TimingConfig(50, 0, 1, cuda_graph=True, transfers=False, iterations=300)
    median = timing.time_interleaved({"a": execution}, kernels)["a"].parts["compute"].median
    print("\n".join(report_lines(found, "demo model, batch 8", "int8")), f"\nas a CUDA graph: {median:.3f} ms")
    assert found.int8_layers > 0.7
    assert all(layer.ms is not None for layer in layers)
    assert 0.8 * median < found.total_ms < 6 * median  # measured one by one, layers wait for each other
    figures = timing.time_interleaved({"a": execution}, timing.TimingConfig(50, 0.6, 2, cuda_graph=True))["a"]
    parts = [figures.parts[name].median for name in ("h2d", "compute", "d2h")]
    print(figures, parts)
    assert min(parts) > 0
    assert parts[1] == pytest.approx(median, rel=0.3)
    assert figures.parts["latency"].median == pytest.approx(sum(parts), rel=0.3)
    assert figures.qps > 0.95 * 1000 / figures.parts["latency"].median
    execution.close()


@pytest.mark.parametrize("damage", ["truncated", "other"])
def test_engines_that_are_refused(demo_engine, tmp_path, damage):
    path = tmp_path / "a.engine"
    path.write_bytes(demo_engine.read_bytes()[:-5000] if damage == "truncated" else b"no engine")
    with pytest.raises(InputError, match=r"a\.engine"):
        open_runner(path, "cuda:0")
    note = json.loads(demo_engine.with_name(f"{demo_engine.name}.json").read_text())
    (tmp_path / "a.engine.json").write_text(json.dumps({**note, "api": "TensorRT 99.0"}))
    with pytest.raises(InputError, match=r"TensorRT 99\.0"):
        open_runner(path, "cuda:0")
