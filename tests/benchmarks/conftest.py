"""Benchmarks see the library as it lies in the repository; scripts/test_gpu.sh runs them with the demo model."""

from __future__ import annotations

import sys
from pathlib import Path

import gpu_demo
import pytest
from gpu_demo import demo_data, demo_engine, demo_onnx

__all__ = ["demo_data", "demo_engine", "demo_onnx"]

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_demo.mark(items, HERE)
