"""What a program imports before its first work: nothing that takes long and is not needed for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW = {"seaborn", "pandas", "requests", "matplotlib.pyplot", "scipy", "torch._dynamo", "sympy", "sklearn"}
START = """
import sys
import torch
from utils import upstream
from utils.jobs import {job}
from models.quantize import placement
from models.quantize.recipe import Recipe
for weights in ("gelan-digits.pt", "gelan-digits-seg.pt"):
    upstream.load_float(f"data/demo/{weights}")
model = upstream.fuse(upstream.build_model("data/demo/gelan-digits.yaml"))
placement.apply(model, placement.plan(model, Recipe()))
with torch.no_grad():
    model(torch.rand(1, 3, 64, 64))
{more}
print(" ".join(name for name, module in sys.modules.items() if type(module).__name__ != "LateModule"))
"""


def imported(job: str, more: str = "") -> set[str]:
    command = [sys.executable, "-c", START.replace("{job}", job).replace("{more}", more)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return set(done.stdout.split())


@pytest.mark.parametrize("job", ["evaluate", "export"])
def test_a_quantized_network_runs_without_them(job):
    found = imported(job)
    assert {"torch", "torchvision", "models.yolo"} <= found
    assert not found & SLOW


def test_upstream_gets_them_when_it_uses_them():
    assert {"matplotlib.pyplot", "pandas", "seaborn"} <= imported(
        "evaluate", "from utils import plots; plots.sn.histplot; plots.plt.figure; plots.pd.DataFrame"
    )
