"""What tests on a GPU need: the demo model's files, as scripts/test_gpu.sh makes them, and an engine of it."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest


@functools.cache
def why_not() -> str:
    """Why nothing that needs an engine can run here, or ''."""
    import torch

    from utils.trt import tensorrt_api

    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    if tensorrt_api.installed_module() is None:
        return "TensorRT is not installed (install_dependencies.sh --tensorrt)"
    return ""


def mark(items: list[pytest.Item], folder: Path) -> None:
    """Mark the tests of a folder as `gpu`, and say why they are skipped if they are.

    A module of tests that needs less, or more, has a `why_not` of its own.
    """
    for item in (item for item in items if folder in item.path.parents):
        item.add_marker(pytest.mark.gpu)
        reason = getattr(item.module, "why_not", why_not)()
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def demo(variable: str) -> Path:
    """A file of the demo model, as scripts/test_gpu.sh names it in the environment."""
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set: scripts/test_gpu.sh makes the demo model's files and sets it")
    return Path(value).resolve()


@pytest.fixture(scope="session")
def demo_onnx() -> Path:
    """The quantized demo model for 320×320 and any batch."""
    return demo("DEMO_ONNX")


@pytest.fixture(scope="session")
def demo_engine(demo_onnx, tmp_path_factory) -> Path:
    """Its engine for batches of 1 to 32, built at a low optimization level, which takes a fraction of the time."""
    from utils.trt.build import build
    from utils.trt.preflight import BuildConfig

    cache = demo_onnx.with_name("gpu-tests.timing.cache")
    config = BuildConfig(batch=(1, 8, 32), timing_cache=cache, optimization_level=2, progress=False)
    engine = tmp_path_factory.mktemp("engine") / "demo.engine"
    build(demo_onnx, engine, config)
    return engine


@pytest.fixture(scope="session")
def demo_data():
    """The demo set."""
    from utils.evaluation.data_yaml import load_data

    return load_data(demo("DEMO_DATA"))
