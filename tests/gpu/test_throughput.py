"""Copies during runs, on a GPU."""

import pytest
import torch

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
