"""A step of QAT as a CUDA graph computes what it computes without one."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from small_networks import detector

from models.quantize import calibration, placement
from models.quantize.finetune import Finetuner
from models.quantize.recipe import Calibration, Finetune, Recipe
from models.quantize.step_graph import WARM_UP, StepGraph


def why_not() -> str:
    """Why these tests cannot run here, or ''."""
    return "" if torch.cuda.is_available() else "torch sees no NVIDIA GPU"


def batches(count: int, size: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.rand(size, 3, 32, 32, generator=generator) for _ in range(count)]


def trained(graph: bool, **settings: object) -> tuple[Finetuner, list[float]]:
    """A tuner after two epochs, of which one holds a smaller batch, and the mean losses."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    teacher = detector().to(device)
    student = copy.deepcopy(teacher)
    placement.apply(student, placement.plan(student, Recipe()))
    student.to(device)
    calibration.calibrate(student, [one.to(device) for one in batches(2)], Calibration(method="max"))
    tuner = Finetuner(student, teacher, Finetune(**settings), device=device, graph=graph)
    epochs = [[*batches(6), batches(1, size=3)[0], *batches(3)], batches(5)]
    return tuner, [tuner.run_epoch(epoch, lambda _: 1e-4).loss for epoch in epochs]


@pytest.mark.parametrize("settings", [{}, {"train": "ranges"}])
def test_losses_weights_and_ranges_are_the_same(settings):
    (ours, losses), (theirs, expected) = trained(True, **settings), trained(False, **settings)
    assert losses == pytest.approx(expected, rel=1e-3)  # backward kernels may add in another order
    for one, other in zip(*([*t.student.parameters(), *t.ranges.parameters()] for t in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)


def test_the_graph_is_used_and_a_failure_to_record_is_none_of_training(monkeypatch, caplog):
    replays = []
    original = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(1), original(graph))[1])
    trained(True)
    assert len(replays) == 14 - WARM_UP  # of 15 batches one has another size

    def looks_at_a_value(images):
        value = images.mean()
        float(value)  # which recording does not allow
        return value

    step = StepGraph(looks_at_a_value, [])
    images = torch.ones(2, device="cuda")
    assert [float(step(images)) for _ in range(WARM_UP + 2)] == [1.0] * (WARM_UP + 2)
    assert "without a CUDA graph" in caplog.text


def test_another_thread_may_pin_memory_while_a_step_is_recorded(caplog):
    """As a loader's does: a whole run once ended there."""
    over = threading.Event()

    def pin():
        while not over.is_set():
            for size in range(1 << 20, 1 << 24, 4096):  # of another size each time, so that the driver is asked
                torch.empty(size).pin_memory()
                if over.is_set():
                    return

    with ThreadPoolExecutor() as pool:
        pinning = pool.submit(pin)
        try:
            trained(True)
        finally:
            over.set()
        pinning.result()
    assert "without a CUDA graph" not in caplog.text
