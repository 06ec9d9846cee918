"""Every network of upstream's through the verifier and through a current NVIDIA parser and builder, without a GPU.

TensorRT-RTX builds for an Ada (SM89) and a Blackwell (SM120) GPU here. What it warns of is shown in pytest's summary.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from models.quantize import placement
from models.quantize.calibration import calibrate
from models.quantize.recipe import Calibration, Recipe
from utils import upstream
from utils.onnx_graph.export import ExportConfig, export_onnx
from utils.trt import tensorrt_api
from utils.trt.build_config import BuildConfig
from utils.trt.builder import BuildResult, build
from utils.trt.engine_file import EngineNote

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from random_networks import convolutions_in, random_network

NETWORKS = ["gelan-t", "gelan-s", "gelan-m", "gelan-c", "gelan-e", "gelan"]  # yolov9-* become these when deployed
SIDE = 64
TARGETS = ("SM89", "SM120")
# RTX computes with FP32 scales and says once for each convolution that it turns FP16 ones into them, which loses
# nothing. Only opset 23 allows FP32 scales beside FP16 tensors, and ONNX Runtime does not run such files.
KNOWN = (
    "(foreignNode) Converting conv activation scales to fp32",
    "(foreignNode) Converting conv weight scales to fp32",
)


def placed(config: Path) -> nn.Module:
    """A network with random weights, placed and calibrated."""
    model = upstream.fuse(random_network(config))
    placement.apply(model, placement.plan(model, Recipe()))
    image = torch.rand(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    calibrate(model, [image], Calibration(method="max", batches=1), progress=False)
    return model


@pytest.fixture(scope="module", params=NETWORKS)
def network(request: pytest.FixtureRequest, upstream_yaml) -> nn.Module:
    return placed(upstream_yaml(request.param))


def built(file: Path, targets: tuple[str, ...] = TARGETS, **changes) -> BuildResult:
    rtx = tensorrt_api.load("tensorrt_rtx_bindings")
    return build(file, file.with_suffix(".engine"), BuildConfig(targets=targets, progress=False, **changes), rtx)


def check_warnings(note: EngineNote) -> None:
    """Nothing but what is known; all of it is shown."""
    kinds = {text: note.warnings.count(text) for text in note.warnings}
    for text, count in kinds.items():
        warnings.warn(f"{note.api}: {text} ({count} times)", UserWarning, stacklevel=1)
    assert all(text.strip(" .").startswith(KNOWN) for text in kinds)


@pytest.mark.parametrize("dynamic", ["none", "batch"])
def test_strongly_typed_file_holds_its_properties_and_builds(network, dynamic, tmp_path, monkeypatch):
    monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: None)
    config = ExportConfig((SIDE, SIDE), 1, dynamic=dynamic, typing="strong", simplify=dynamic == "none")
    exported = export_onnx(network, config, tmp_path / "network.onnx", {"stride": "32"})
    assert exported.report.ok, exported.report.findings
    assert exported.report.checked["types"] == exported.report.counts["convolutions"] + 1  # and DFL's
    note = built(exported.path, **({"batch": (1, 4, 8)} if dynamic == "batch" else {})).note
    assert (note.precision, note.typing, note.gpu) == ("int8", "strong", "SM89 SM120")
    check_warnings(note)


@pytest.mark.parametrize("name", ["demo", "segment/gelan-c-dseg"])
def test_prototypes_are_a_second_output_of_what_builds(name, checkout, upstream_yaml, tmp_path, monkeypatch):
    """The plain form of segmentation networks; for one GPU, since each build of the larger one takes seconds."""
    monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: None)
    model = placed(checkout / "data/demo/gelan-digits-seg.yaml" if name == "demo" else upstream_yaml(name))
    config = ExportConfig((SIDE, SIDE), 1, dynamic="batch", typing="strong")
    exported = export_onnx(model, config, tmp_path / "network.onnx", {"stride": "32", "task": "segment"})
    assert exported.report.ok, exported.report.findings
    assert exported.report.counts["float_convolutions"] == 0
    nc = model.model[-1].nc
    assert exported.outputs == {"output0": ("batch", 4 + nc + 32, 84), "output1": ("batch", 32, 16, 16)}
    note = built(exported.path, TARGETS[:1], batch=(1, 4, 8)).note
    assert (note.precision, note.typing, note.metadata["task"]) == ("int8", "strong", "segment")
    check_warnings(note)


def test_weakly_typed_file_holds_its_properties(network, tmp_path):
    result = export_onnx(network, ExportConfig((SIDE, SIDE), 1, typing="weak"), tmp_path / "network.onnx", {})
    assert result.report.ok, result.report.findings
    assert result.report.counts["float_convolutions"] == 0
    assert convolutions_in(result.path) == set(network.quantization_plan.convolutions)
