"""The evaluation loop on a GPU, in PyTorch, gives the numbers that it gives on the CPU."""

import pytest
import torch
from known_images import MIXED
from known_sets import Known

from utils.runners.pytorch import TorchRunner


def why_not() -> str:
    """Why these tests cannot run here, or ''."""
    return "" if torch.cuda.is_available() else "torch sees no NVIDIA GPU"


@pytest.mark.parametrize("masks", [False, True])
def test_ap_and_agreement_are_those_of_the_cpu(tmp_path, masks):
    known = Known(tmp_path, MIXED, masks=masks)
    with TorchRunner(known.model, "cpu") as runner:
        on_cpu = known.evaluate(runner=runner, as_reference=True)
    with TorchRunner(known.model, "cuda:0") as runner:
        on_gpu = known.evaluate(runner=runner, reference=on_cpu.reference)
    assert 0.1 < on_cpu.ap < 0.999
    assert on_gpu.ap == pytest.approx(on_cpu.ap, abs=1e-4)
    assert on_gpu.agreement == pytest.approx(1, abs=1e-3)
    assert on_gpu.instances == on_cpu.instances
