"""A whole network's loss and gradients by the fused kernels, interpreted, against torch's operators."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from random_networks import TINY, random_network, save_float, save_quantized

# Outputs, gradients of weights and of scales of one step, by torch's operators and by the interpreted kernels.
WHOLE_NETWORK = '''
import sys
from unittest import mock
import numpy as np
import torch
from models.quantize import checkpoint, fused_cuda
from models.quantize.finetune import LearnedRanges
student = checkpoint.load_quantized(sys.argv[1]).model
student.requires_grad_(True).model[-1].training = True
ranges = LearnedRanges(student)
def silu(self, x):
    """To the last bit what the interpreter computes: a value that is rounded to the next step changes all behind it."""
    ours, raw = torch.nn.functional.silu(x), x.detach().numpy()
    return ours + (torch.from_numpy(raw * (np.float32(1) / (np.float32(1) + np.exp(-raw)))) - ours.detach())
torch.nn.SiLU.forward = silu
images = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
assert fused_cuda.usable(images)
calls, original = [], fused_cuda.fused_fake_quantize
def counted(*given, silu=False):
    calls.extend([1] * silu)
    return original(*given, silu=silu)
fused_cuda.fused_fake_quantize = counted
found = []
for fused in (False, True):
    student.zero_grad(set_to_none=True)
    ranges.log_amax.grad = None
    with mock.patch.object(fused_cuda, "usable", fused_cuda.usable if fused else lambda x: False):
        ranges.put_in()
        maps = student(images)
        sum((one * torch.linspace(-1, 1, one.numel()).reshape(one.shape)).sum() for one in maps).backward()
    weights = [p.grad.flatten() for p in student.parameters() if p.grad is not None]
    found.append([torch.cat([one.flatten() for one in maps]), torch.cat(weights), ranges.log_amax.grad])
    print(len(calls), "calls")
for one, other in zip(*found):
    print("difference", float((one - other).norm() / one.norm()))
'''


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for CUDA")
def test_a_whole_network_with_the_kernels_gets_the_same_gradients(checkout, tmp_path):
    weights = save_quantized(tmp_path / "int8.pt", save_float(tmp_path / "tiny.pt", random_network(TINY)))
    command = [sys.executable, "-c", WHOLE_NETWORK, str(weights)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-2000:]
    calls = [int(number) for number in re.findall(r"(\d+) calls", result.stdout)]
    assert calls[0] == 0
    assert calls[1] > 20
    differences = [float(number) for number in re.findall(r"difference ([\d.e-]+)", result.stdout)]
    assert len(differences) == 3
    assert max(differences) < 1e-3, differences
