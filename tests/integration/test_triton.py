"""Files that export_qat.py writes, served: what a client gets is what our own runner finds in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from forms import FLAGS, LOW, SIDE, Program, lively
from random_networks import random_network, save_float, tiny_with
from triton_stand_in import serving

import export_qat
from utils.jobs.model_repository import make
from utils.jobs.visualize import Artist
from utils.runners.onnxrt import OnnxRuntimeRunner
from utils.serving.options import ServingOptions
from utils.serving.runner import TritonRunner


@pytest.mark.parametrize(("head", "channels"), [("DDetect", 3), ("DDetect", 1), ("DSegment", 3)])
def test_exported_files_are_served_as_they_are_run_here(head: str, channels: int, tmp_path: Path, program: Program):
    weights = save_float(tmp_path / "tiny.pt", lively(random_network({**tiny_with(head), "ch": channels})))
    words = ["--weights", weights, "--output", tmp_path / "net.onnx", "--imgsz", SIDE, 96, "--dynamic", "batch",
             "--nms", "onnx"]  # fmt: skip
    has_masks = head == "DSegment"  # NMS behind raw predictions is for detectors
    masks = ["--mask-resolution", 0] * has_masks
    code, _, err = program(
        export_qat.main, *words, *FLAGS, *masks, "--include", "onnx", "onnx_end2end", "--check", 0, "--input", "uint8"
    )
    assert (code, err) == (0, [])
    models, nms = tmp_path / "models", {"conf_thres": LOW, "iou_thres": 0.6, "max_det": 40}
    here = {"no_nms": True} if has_masks else nms
    make(ServingOptions(file=tmp_path / "net.onnx", output=models, name="raw", **here))
    make(ServingOptions(file=tmp_path / "net-end2end.onnx", output=models, name="nms"))
    image = np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8)
    drawn = {}
    with serving(models) as server:
        for name, file in (("raw", "net.onnx"), ("nms", "net-end2end.onnx")):
            with (
                TritonRunner(name, server) as asked,
                OnnxRuntimeRunner(tmp_path / file, threads=1) as runner,
            ):
                assert (asked.inputs[0].dtype, asked.input_spec.channels) == ("uint8", channels)
                assert asked.task is runner.task
                found, expected = (Artist(one, **nms).detect(image)[0] for one in (asked, runner))
                assert torch.equal(found, expected)
                assert len(found) > 3
                drawn[name] = Artist(asked, **nms).draw(image)[0]
    assert (drawn["raw"] != drawn["nms"]).mean() < (0.1 if has_masks else 1e-2)  # cropped on another grid
