"""Fixtures around `fake_tensorrt`: the library sees that module and a GPU that computes on the CPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fake_cuda
import fake_tensorrt
import pytest
import torch
from one_conv import write_onnx

from utils.trt import tensorrt_api
from utils.trt.tensorrt_api import Api, Gpu

CPU = torch.device("cpu")
GPU = Gpu("Fake GPU", "SM89", 8 << 30)


def stand_in(monkeypatch: pytest.MonkeyPatch, version: str = "8.6.0") -> Api:
    """Put a fake TensorRT of that version and a fake GPU in place, and return the module's Api."""
    from utils.trt import runner, timing

    api = Api(fake_tensorrt.make(version))
    monkeypatch.setattr(tensorrt_api, "load_tensorrt", lambda name=None: api)
    monkeypatch.setattr(tensorrt_api, "installed_module", lambda names=None: "tensorrt")
    monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: GPU)
    for module in (runner, timing):
        monkeypatch.setattr(module, "cuda", fake_cuda)
    return api


def build_engine(folder: Path, shape: Sequence[int | str] = (2, 3, 4, 8), file: Any = None, **changes: Any) -> Path:
    """An engine of the network in `one_conv`, of a shape and with options of `write_onnx`, beside its file `a.onnx`."""
    from utils.trt.build import build
    from utils.trt.build_options import BuildConfig

    folder.mkdir(exist_ok=True)
    write_onnx(folder / "a.onnx", shape, **file or {})
    build(folder / "a.onnx", folder / "a.engine", BuildConfig(progress=False, **changes))
    return folder / "a.engine"
