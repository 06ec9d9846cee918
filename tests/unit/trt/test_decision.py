"""What is decided before a build: shapes of profiles, and what is refused. Typing is seen in test_builder.py too."""

from __future__ import annotations

import dataclasses

import pytest
from one_conv import write_onnx
from tensorrt_stand_in import stand_in

from utils.core.errors import InputError
from utils.trt import onnx_summary, tensorrt_api
from utils.trt.build_config import BuildConfig
from utils.trt.decision import choose_typing, decide, profile_shapes

QUIET = BuildConfig(progress=False)


def test_half_scales_without_strong_typing(tmp_path, monkeypatch):
    """Such a file has opset 19; one with a lower opset would be refused for its scales."""
    api = stand_in(monkeypatch)
    file = write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96))
    described = dataclasses.replace(onnx_summary.read(file), half=True, half_scales=True, quantized=True)
    with pytest.raises(InputError, match="its scales are FP16"):
        choose_typing(described, api, QUIET)


def test_a_precision_that_is_not_the_files_own(tmp_path, monkeypatch):
    """A build in the types of the file cannot follow it."""
    api = stand_in(monkeypatch, "11.1.0")
    half = dataclasses.replace(onnx_summary.read(write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96))), half=True)
    gpu = tensorrt_api.gpu()
    with pytest.raises(InputError, match=r"--precision fp32 does nothing: .* in its own types, FP16; leave it out"):
        decide(half, api, gpu, dataclasses.replace(QUIET, precision="fp32"))
    assert decide(half, api, gpu, dataclasses.replace(QUIET, precision="fp16")).precision == "fp16"


@pytest.mark.parametrize(
    ("version", "about", "advice"),
    [
        ("8.6.0", {"opset": 30}, "export it with --opset 17"),
        ("8.6.0", {"half": True, "half_scales": True, "quantized": True}, "export it with --opset 17"),
        (
            "11.0.0",
            {"quantized": True},
            "would be slow; export it with --opset 19, or give build_engine.py --allow-fp32",
        ),
        ("11.0.0", {}, "would be slow; give build_engine.py --allow-fp32"),
    ],
)
def test_advice_for_a_file_of_deepstreams_is_of_its_own_exporter(tmp_path, monkeypatch, version, about, advice):
    """Which has no --typing."""
    api = stand_in(monkeypatch, version)
    file = onnx_summary.read(write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96), metadata={"form": "deepstream"}))
    with pytest.raises(InputError) as caught:
        choose_typing(dataclasses.replace(file, **about), api, QUIET)
    assert str(caught.value).endswith(advice)
    assert "--typing" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "changes", "expected"),
    [
        ((2, 3, 64, 96), {}, {}),
        (("b", 3, 64, 96), {}, {"images": ((1, 3, 64, 96), (8, 3, 64, 96), (16, 3, 64, 96))}),
        (("b", 3, 64, 96), {"batch": (1, 4, 8)}, {"images": ((1, 3, 64, 96), (4, 3, 64, 96), (8, 3, 64, 96))}),
        (("b", 3, "h", "w"), {"batch": (1, 2, 4)}, {"images": ((1, 3, 64, 96), (2, 3, 64, 96), (4, 3, 64, 96))}),
        (("b", 3, "h", "w"), {"height": (32, 64, 128), "width": (32, 96, 160)},
         {"images": ((1, 3, 32, 32), (8, 3, 64, 96), (16, 3, 128, 160))}),
    ],
)  # fmt: skip
def test_profile(tmp_path, shape, changes, expected):
    file = onnx_summary.read(write_onnx(tmp_path / "a.onnx", shape))
    assert profile_shapes(file, dataclasses.replace(QUIET, **changes)) == expected


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        (
            (2, 3, 64, 96),
            {"batch": (1, 2, 4)},
            "static batch of 2, and 1/2/4 was asked for; give --batch-size 2, export it for that batch, or",
        ),
        (
            ("b", 3, 64, 96),
            {"height": (32, 32, 32)},
            "static height of 64, and 32/32/32 was asked for; build it with build_engine.py without --imgsz, export",
        ),
        (("b", 3, "h", "w"), {"height": (60, 64, 64)}, "height 60/64/64: all must be multiples of 32"),
    ],
)
def test_shapes_that_do_not_fit_the_file(tmp_path, shape, changes, message):
    file = onnx_summary.read(write_onnx(tmp_path / "a.onnx", shape))
    with pytest.raises(InputError, match=message):
        profile_shapes(file, dataclasses.replace(QUIET, **changes))
