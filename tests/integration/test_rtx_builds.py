"""Every network of upstream's through the verifier and through a current NVIDIA parser and builder, without a GPU.

TensorRT-RTX builds for an Ada (SM89) and a Blackwell (SM120) GPU here.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from exported_files import export_onnx
from random_networks import TINY, narrow, random_network, tiny_with
from torch import nn

from models.quantize import placement
from models.quantize.calibration import calibrate
from models.quantize.recipe import Calibration, Recipe
from utils import upstream
from utils.core.errors import QatError
from utils.onnx_graph import output_formats
from utils.onnx_graph.export import ExportResult, export_forms
from utils.onnx_graph.export_config import ExportConfig
from utils.onnx_graph.output_formats import NmsSettings
from utils.trt import tensorrt_api
from utils.trt.build import build
from utils.trt.build_options import BuildConfig
from utils.trt.engine_file import EngineNote

SIDE = 64
# yolov9-* become these when deployed; each is built in one way, since exporting and building take ten seconds. Other
# large ones are built with a quarter of their channels; with another activation, few layers of each kind.
NETWORKS = {
    "gelan-t": ("none", "SM89"), "gelan-s": ("batch", "SM120"), "gelan-m": ("none", "SM120"),
    "gelan-c": ("batch", "SM120"), "gelan-e, narrow": ("batch", "SM89"), "gelan, narrow": ("none", "SM120"),
    "tiny, ReLU": ("none", "SM89"),
}  # fmt: skip
# RTX computes with FP32 scales and says once for each convolution that it turns FP16 ones into them, which loses
# nothing. Only opset 23 allows FP32 scales beside FP16 tensors, and ONNX Runtime does not run such files.
KNOWN = (
    "(foreignNode) Converting conv activation scales to fp32",
    "(foreignNode) Converting conv weight scales to fp32",
)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: None)


def placed(config: Path | dict[str, Any]) -> nn.Module:
    """A network with random weights, placed and calibrated."""
    model = upstream.fuse(random_network(config))
    placement.apply(model, placement.plan(model, Recipe()))
    image = torch.rand(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    calibrate(model, [image], Calibration(method="max"))
    return model


def built(file: Path, target: str, **changes) -> EngineNote:
    rtx = tensorrt_api.load_tensorrt("tensorrt_rtx_bindings")
    config = BuildConfig(**{"targets": (target,), "progress": False, **changes})
    return build(file, file.with_suffix(".engine"), config, rtx)


def check(exported: ExportResult, target: str, **changes) -> EngineNote:
    """The file holds its properties and is built; TensorRT warns of nothing but what is known."""
    assert exported.report.ok, exported.report.findings
    note = built(exported.path, target, **changes)
    assert (note.precision, note.typing, note.gpu) == ("int8", "strong", target)
    assert [text for text in note.warnings if not text.strip(" .").startswith(KNOWN)] == []
    return note


@pytest.mark.parametrize("name", NETWORKS)
def test_strongly_typed_files_hold_their_properties_and_build(name, upstream_yaml, tmp_path):
    (kind, _, change), (dynamic, target) = name.partition(", "), NETWORKS[name]
    yaml = {**TINY, "activation": f"nn.{change}()"} if kind == "tiny" else upstream_yaml(kind)
    config = ExportConfig((SIDE, SIDE), 1, dynamic=dynamic, typing="strong", simplify=dynamic == "none")
    network = placed(narrow(yaml) if change == "narrow" else yaml)
    exported = export_onnx(network, config, tmp_path / "network.onnx", {"stride": "32"})
    assert exported.report.checked["types"] == exported.report.counts["convolutions"] + 1  # and DFL's
    check(exported, target, **({"batch": (1, 4, 8)} if dynamic == "batch" else {}))


def test_forms_build_that_hold_nothing_which_rtx_lacks(tmp_path):
    forms = {"deepstream": output_formats.deepstream()}
    forms |= {kind: output_formats.end2end(NmsSettings(kind)) for kind in ("none", "efficient", "onnx")}
    files = {tmp_path / f"{name}.onnx": form for name, form in forms.items()}
    export_forms(placed(TINY), ExportConfig((SIDE, SIDE), typing="strong"), files, {})
    for name in ("none", "deepstream"):
        assert built(tmp_path / f"{name}.onnx", "SM89").precision == "int8"
    for name, words in (("efficient", "no plugins here; export without NMS"), ("onnx", "NonMaxSuppression")):
        with pytest.raises(QatError, match=words):
            built(tmp_path / f"{name}.onnx", "SM89")


def test_masks_build(tmp_path):
    """A small network with masks, quantized, in each form whose operators RTX has, for any batch."""
    settings = NmsSettings("none", 100)
    forms = [output_formats.plain(), output_formats.end2end(settings, 160),  # in boxes, and on the grid
             output_formats.end2end(settings, 0), output_formats.deepstream(settings)]  # fmt: skip
    files = {tmp_path / f"{number}.onnx": form for number, form in enumerate(forms)}
    config = ExportConfig((SIDE, SIDE), 1, dynamic="batch", typing="strong")
    for exported in export_forms(placed(tiny_with("DSegment")), config, files, {"stride": "32", "task": "segment"}):
        assert exported.report.counts["float_convolutions"] == 0
        assert check(exported, "SM89", batch=(1, 4, 8)).metadata["task"] == "segment"
