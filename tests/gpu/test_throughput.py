"""Copies during runs, and a network that computes ahead, on a GPU."""

import pytest
import torch

from utils.evaluation.loop import EvalConfig, evaluate
from utils.jobs.open import open_runner
from utils.trt import tensorrt_api, timing
from utils.trt.runner import Execution
from utils.trt.timing import TimingConfig

DEVICE = torch.device("cuda:0")
QUICK = TimingConfig(50, 0.6, 2, cuda_graph=True)


def test_copies_overlap_with_runs(demo_engine):
    one = Execution(demo_engine, tensorrt_api.load_tensorrt(), DEVICE)
    one.set_shapes({"images": (8, 3, 320, 320)})
    figures = timing.time_interleaved({"one": one}, QUICK)["one"]
    parts = {name: figures.parts[name].median for name in ("h2d", "compute", "d2h")}
    print(figures, parts)
    assert min(parts.values()) > 0
    assert figures.parts["latency"].median == pytest.approx(sum(parts.values()), rel=0.3)
    assert figures.qps > 0.95 * 1000 / figures.parts["latency"].median
    one.close()


@pytest.mark.parametrize("batch", [8, 32])
def test_a_network_that_computes_ahead_finds_the_same(demo_engine, demo_data, batch):
    found = []
    for overlap in (False, True):
        config = EvalConfig(imgsz=320, workers=8, batch_size=batch, overlap=overlap)
        with open_runner(demo_engine, "cuda:0") as runner:
            found.append(evaluate(runner, demo_data, config, progress=False))
    plain, ahead = found
    print([(f"{one.seconds:.2f} s", f"inference {one.ms['inference']:.3f} ms an image") for one in found])
    assert ahead.ap == pytest.approx(plain.ap, abs=1e-6)
    assert ahead.images == plain.images == 500
    assert all(value > 0 for value in ahead.ms.values())
