"""Upstream on a current stack, run_upstream.py, and model descriptions, of which listed texts and numbers are taken."""

import importlib
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from utils.core.errors import InputError
from utils.upstream import checkout
from utils.upstream.description import check_description

ROOT = Path(__file__).resolve().parents[3]
WITHOUT = """
from unittest import mock
from utils.upstream import checkout
with mock.patch("importlib.util.find_spec", return_value=None):
    checkout.install()
import IPython, matplotlib, numpy, pkg_resources
from IPython.display import display
display(1)
assert numpy.trapz([0.0, 1.0, 1.0], [0.0, 1.0, 3.0]) == 2.5
assert IPython.get_ipython() is None
assert pkg_resources.parse_version("1.10") > pkg_resources.parse_version("1.9")
pkg_resources.require("no-such-thing")
matplotlib.use("agg")
import matplotlib.pyplot
matplotlib.pyplot.plot([1, 2])
matplotlib.pyplot.savefig({file!r})
"""


def test_upstream_and_matplotlib_work_beside_the_stand_ins(tmp_path):
    code = [sys.executable, "-c", WITHOUT.format(file=str(tmp_path / "plot.png"))]
    result = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-800:]
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_fast_is_channels_last_without_deterministic_algorithms(monkeypatch):
    seeds = []
    general, yolo = types.ModuleType("utils.general"), types.ModuleType("models.yolo")
    general.init_seeds = lambda seed=0, deterministic=False: seeds.append((seed, deterministic))
    yolo.DetectionModel = type("Network", (torch.nn.Module,), {"forward": lambda self, x, augment=False: (x, augment)})
    for module in (general, yolo):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        package, _, name = module.__name__.partition(".")
        monkeypatch.setattr(importlib.import_module(package), name, module, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    checkout.prefer_speed()
    general.init_seeds(3, deterministic=True)
    assert (seeds, torch.backends.cudnn.benchmark) == ([(3, False)], True)
    image = torch.rand(1, 3, 8, 8)
    x, augment = yolo.DetectionModel()(image, augment=True)
    assert augment
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x, image)


@pytest.mark.parametrize("words", [[], [""], ["--fast", ""]])
def test_no_program_is_one_line(words):
    command = [sys.executable, str(ROOT / "scripts/run_upstream.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: name a program of the checkout")


GOOD: dict[str, Any] = {
    "nc": 80,
    "depth_multiple": 1.0,
    "width_multiple": 1,
    "anchors": [[10, 13, 16, 30], [30, 61, 62, 45]],
    "activation": "nn.ReLU()",
    "backbone": [[-1, 1, "Conv", [64, 3, 2]], [0, 1, "CBLinear", [[64, 8]]]],
    "head": [[-1, 1, "nn.Upsample", ["None", 2, "nearest"]], [[-1, 1], 1, "DDetect", ["nc"]]],
}
CODE = "__import__('os').system('touch mark')"


def layer(*row: Any) -> dict[str, Any]:
    return {"backbone": [list(row)]}


REFUSED: list[tuple[dict[str, Any], str]] = [  # changes of the good one, what the message names
    *[({key: CODE}, key) for key in (*GOOD, "ch", "sem_nc", "inplace")],
    *[({"nc": value}, "nc") for value in (b"bytes", 10**30, float("nan"), {"a": 1}, print)],
    *[({"activation": text}, "activation") for text in (
        "nn.ReLU", "nn.ReLU()()", "nn.ReLU();exit()", f"nn.ReLU({CODE})", 1)],
    *[(layer(-1, 1, name, []), "layer 0") for name in (
        "os.system", "print", "conv", "nn.Module", "torch.load", "AutoShape", "Conv.forward", "Conv ", "Conv\n", CODE,
        "", b"Conv", ["Conv"])],
    *[(layer(-1, 1, "Concat", [text]), "layer 0") for text in (
        "os", "nn", "self", "d", "exit()", "nc ", "NC", "nearest\n", "__file__", [64, [3, [CODE]]], print)],
    (layer(CODE, 1, "Conv", []), "layer 0"), (layer(-1, CODE, "Conv", []), "layer 0"),
    (layer(-1, 1, "Conv"), "layer 0"),
    # `!!binary` becomes bytes, `!!python/...` is not known to the safe loader
    (yaml.safe_load(yaml.safe_dump(GOOD).replace("Conv", "!!binary b3Muc3lzdGVt", 1)), "b'os.system'"),
]  # fmt: skip


def test_the_good_one_passes_and_only_what_upstream_reads_is_kept():
    assert check_description(GOOD) == GOOD
    extra = {"ch": 3, "inplace": True, "sem_nc": 93}
    assert check_description({**GOOD, **extra, "yaml_file": "x", "scale": b"x", 5: print}) == {**GOOD, **extra}


@pytest.mark.parametrize(("changes", "named"), REFUSED)
def test_what_upstream_would_evaluate_is_refused_unless_it_is_listed(changes, named):
    with pytest.raises(InputError) as caught:
        check_description({**GOOD, **changes})
    assert named in str(caught.value)
    assert str(caught.value).isprintable()


def test_label_caches_are_neither_read_nor_written_and_numpy_is_whole(tmp_path):
    """Some parts of NumPy, such as `random`, are imported when they are asked for."""
    on_demand = {"random": object()}
    numpy = types.ModuleType("numpy")
    vars(numpy).update(ndarray=np.ndarray, load=np.load, save=np.save, __getattr__=on_demand.__getitem__)
    module = types.ModuleType("dataloaders")
    module.np = numpy
    checkout.without_label_caches(module)
    assert module.np.random is on_demand["random"]
    module.np.save(tmp_path / "a.npy", np.ones(2))
    assert module.np.load(tmp_path / "a.npy").tolist() == [1, 1]
    with pytest.raises(ValueError, match="pickles"):
        module.np.load(tmp_path / "a.npy", allow_pickle=True)
    with pytest.raises(ValueError, match="switched off"):
        module.np.save(tmp_path / "a.cache", {"labels": []})
