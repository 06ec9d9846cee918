"""The demo model's INT8 engine: its accuracy against ONNX Runtime and PyTorch, shapes, graphs, layers, times."""

import json

import numpy as np
import pytest
import torch
from gpu_demo import demo

from utils.core.errors import InputError
from utils.evaluation.loop import EvalConfig, evaluate
from utils.jobs import check_engine
from utils.jobs.open import open_runner
from utils.trt import tensorrt_api, timing
from utils.trt.layers import layers_of, report_lines, summarize
from utils.trt.runner import Execution, TensorRTRunner

CONFIG = EvalConfig(imgsz=320, workers=8)


@pytest.fixture(scope="module")
def by_onnx_runtime(demo_onnx, demo_data):
    with open_runner(demo_onnx, "cpu") as runner:
        return evaluate(runner, demo_data, CONFIG, progress=False)


@pytest.mark.parametrize("batch", [1, 8])
def test_accuracy(demo_engine, demo_data, by_onnx_runtime, batch):
    report = json.loads(demo("DEMO_REPORT").read_text())
    pytorch = next(row for row in reversed(report["rows"]) if row["stage"] in ("PTQ", "QAT", "best (PTQ)"))
    config = EvalConfig(imgsz=320, workers=8, batch_size=batch)
    with open_runner(demo_engine, "cuda:0") as runner:
        found = evaluate(runner, demo_data, config, progress=False)
    ort = by_onnx_runtime
    print(f"AP, batch {batch}: engine {found.ap:.4f}, ONNX Runtime {ort.ap:.4f}, PyTorch {pytorch['ap']:.4f}")
    assert found.images == ort.images == 500
    assert found.ap == pytest.approx(ort.ap, abs=0.003)
    assert found.ap50 == pytest.approx(ort.ap50, abs=0.003)
    assert found.ap == pytest.approx(pytorch["ap"], abs=0.005)


def images(batch):
    return torch.rand(batch, 3, 320, 320, generator=torch.Generator().manual_seed(batch))


def test_every_batch_of_the_profile(demo_engine, demo_onnx):
    """Scores and boxes are those of ONNX Runtime, but for rounding of INT8 and FP16."""
    with open_runner(demo_engine, "cuda:0") as runner, open_runner(demo_onnx, "cpu") as reference:
        for batch in (1, 3, 8, 1, 32, 7):
            found = runner.infer({"images": images(batch)})["output0"].float().cpu().numpy()
            expected = reference.infer({"images": images(batch)})["output0"].numpy()
            assert found.shape == expected.shape
            assert np.abs(found[:, 4:] - expected[:, 4:]).mean() < 0.005
            assert np.median(np.abs(found[:, :4] - expected[:, :4])) < 2
        with pytest.raises(InputError, match=r"takes images from \[1, 3, 320, 320\] to \[32, 3, 320, 320\]"):
            runner.infer({"images": torch.zeros(33, 3, 320, 320)})


def test_the_comparison_of_a_new_engine_finds_nothing(demo_engine, demo_onnx, monkeypatch):
    monkeypatch.setattr(check_engine, "LIMIT", 0.5)  # rounding
    found = check_engine.check_engine(demo_engine, demo_onnx, torch.device("cuda:0"), 8)
    assert found.startswith("the engine beside ONNX Runtime, 8 images: ")


def test_graphs_pinned_feeds_and_feeds_on_the_gpu_give_the_same(demo_engine):
    with TensorRTRunner(demo_engine, "cuda:0", graphs=False) as plain, TensorRTRunner(demo_engine, "cuda:0") as graphs:
        for feed in (images(8), images(8) * 0.5, images(8) * 0.25, images(3), images(8)):
            expected = plain.infer({"images": feed})["output0"].clone()
            for same in (feed, feed.pin_memory(), feed.cuda()):
                assert torch.equal(graphs.infer({"images": same})["output0"], expected)


def test_layers_are_int8_and_their_times_add_up(demo_engine):
    api, device = tensorrt_api.load_tensorrt(), torch.device("cuda:0")
    execution = Execution(demo_engine, api, device)
    execution.set_shapes({"images": (8, 3, 320, 320)})
    layers = layers_of(execution)
    found = summarize(layers)
    kernels = timing.TimingConfig(50, 0, 1, cuda_graph=True, transfers=False, iterations=300)
    median = timing.time_interleaved({"a": execution}, kernels)["a"].parts["compute"].median
    print("\n".join(report_lines(found, "demo model, batch 8", "int8")), f"\nas a CUDA graph: {median:.3f} ms")
    assert found.int8_layers > 0.7
    assert all(layer.ms is not None for layer in layers)
    assert 0.8 * median < found.total_ms < 6 * median  # measured one by one, layers wait for each other
    figures = timing.time_interleaved({"a": execution}, timing.TimingConfig(50, 0.5, 1, cuda_graph=True))["a"]
    assert figures.parts["compute"].median == pytest.approx(median, rel=0.3)
    assert figures.parts["latency"].median > figures.parts["compute"].median
    execution.close()


@pytest.mark.parametrize("damage", ["truncated", "other"])
def test_engines_that_are_refused(demo_engine, tmp_path, damage):
    path = tmp_path / "a.engine"
    path.write_bytes(demo_engine.read_bytes()[:-5000] if damage == "truncated" else b"no engine")
    with pytest.raises(InputError, match=r"a\.engine"):
        open_runner(path, "cuda:0")
    note = json.loads(demo_engine.with_name("demo.engine.json").read_text())
    (tmp_path / "a.engine.json").write_text(json.dumps({**note, "api": "TensorRT 99.0"}))
    with pytest.raises(InputError, match=r"TensorRT 99\.0"):
        open_runner(path, "cuda:0")
