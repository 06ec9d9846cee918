"""Exported files beside the torch networks that they come from, and what export_qat.py says."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from qdq_graph import results

import export_qat
from utils.jobs.open import Network
from utils.onnx_graph.export import ExportResult, export_forms
from utils.onnx_graph.export_config import ExportConfig
from utils.onnx_graph.output_formats import plain

SIDE = 64


def random_images(batch: int = 2, height: int = SIDE, width: int = SIDE) -> torch.Tensor:
    return torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(5))


def export_onnx(model, config: ExportConfig, path: Path, properties: Mapping[str, str]) -> ExportResult:
    """One file of the plain form."""
    (result,) = export_forms(model, config, {path: plain()}, properties)
    return result


def run(path: Path, images: torch.Tensor, optimize: bool = False) -> np.ndarray:
    return results(onnx.load(path), check=False, optimize=optimize, images=images.numpy())["output0"]


def predict(network: Network, images: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return network.model(images)[0].numpy()


def assert_close(found: np.ndarray, expected: np.ndarray, pixels: float, score: float) -> None:
    """Boxes within `pixels`, scores within `score`."""
    assert found.shape == expected.shape
    difference = np.abs(found - expected)
    assert difference[:, :4].max() <= pixels
    assert difference[:, 4:].max() <= score


def program(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, list[str], list[str]]:
    """Exit code, lines on standard output, lines on standard error."""
    code = export_qat.main([str(word) for word in words])
    streams = capsys.readouterr()
    return code, streams.out.splitlines(), streams.err.splitlines()
