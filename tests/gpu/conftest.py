"""GPU tests see the library as it lies in the repository; scripts/test_gpu.sh runs them with the demo model."""

import functools
import os
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))


@functools.cache
def why_not() -> str:
    """Why nothing that needs an engine can run here, or ''."""
    from utils.trt import tensorrt_api

    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    if tensorrt_api.installed_module() is None:
        return "TensorRT is not installed (install_dependencies.sh --tensorrt)"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark these tests as `gpu`, and skip them where `why_not` of their module, or of this file, says why."""
    for item in (item for item in items if HERE in item.path.parents):
        item.add_marker(pytest.mark.gpu)
        if reason := getattr(item.module, "why_not", why_not)():
            item.add_marker(pytest.mark.skip(reason=reason))


def demo(variable: str) -> Path:
    """A file of the demo model, as scripts/test_gpu.sh names it in the environment."""
    if not (value := os.environ.get(variable)):
        pytest.skip(f"{variable} is not set: scripts/test_gpu.sh makes the demo model's files and sets it")
    return Path(value).resolve()


@pytest.fixture(scope="session")
def demo_report() -> Path:
    return demo("DEMO_REPORT")


@pytest.fixture(scope="session")
def demo_onnx() -> Path:
    """The quantized demo model for 320×320 and any batch."""
    return demo("DEMO_ONNX")


@pytest.fixture(scope="session")
def demo_data():
    from utils.evaluation.data_yaml import load_data

    return load_data(demo("DEMO_DATA"))
