"""Contexts of a benchmark, copies during runs, and a network that computes ahead, on a GPU."""

import pytest
import torch

from utils.evaluation.loop import EvalConfig, evaluate
from utils.jobs.open import open_runner
from utils.trt import tensorrt_api, timing
from utils.trt.runner import Execution
from utils.trt.timing import TimingConfig

DEVICE = torch.device("cuda:0")
QUICK = TimingConfig(50, 0.6, 2, cuda_graph=True)


def test_contexts_give_what_one_gives(demo_engine):
    """Two contexts, each on a stream of its own, at the same time."""
    one = Execution(demo_engine, tensorrt_api.load_tensorrt(), DEVICE)
    one.set_shapes({"images": (8, 3, 320, 320)})
    both = [one, one.sibling()]
    feeds = [torch.rand(8, 3, 320, 320, generator=torch.Generator().manual_seed(seed)).cuda() for seed in (1, 2)]
    alone = []
    for feed in feeds:
        one.buffers["images"].copy_(feed)
        torch.cuda.synchronize()
        one.run()
        one.stream.synchronize()
        alone.append(one.buffers["output0"].clone())
    for execution, feed in zip(both, feeds, strict=True):
        execution.buffers["images"].copy_(feed)
    graphs = [execution.graph() for execution in both]
    torch.cuda.synchronize()
    for _ in range(20):
        for execution, graph in zip(both, graphs, strict=True):
            with torch.cuda.stream(execution.stream):
                graph.replay()
    torch.cuda.synchronize()
    for execution, expected in zip(both, alone, strict=True):
        assert torch.equal(execution.buffers["output0"], expected)
    assert not torch.equal(alone[0], alone[1])
    for execution in reversed(both):
        execution.close()


def test_throughput_of_two_contexts_and_of_copies_during_runs(demo_engine):
    one = Execution(demo_engine, tensorrt_api.load_tensorrt(), DEVICE)
    one.set_shapes({"images": (8, 3, 320, 320)})
    other = one.sibling()
    found = timing.time_interleaved({"one": [one], "two": [one, other]}, QUICK)
    print({name: (figures.qps, figures.parts["latency"].median) for name, figures in found.items()})
    assert found["two"].qps > 0.95 * found["one"].qps
    for figures in found.values():
        parts = {name: figures.parts[name].median for name in ("h2d", "compute", "d2h")}
        assert min(parts.values()) > 0
        assert figures.parts["latency"].median == pytest.approx(sum(parts.values()), rel=0.3)
    assert found["one"].qps > 0.95 * 1000 / found["one"].parts["latency"].median  # copies overlap with runs
    for execution in (other, one):
        execution.close()


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
