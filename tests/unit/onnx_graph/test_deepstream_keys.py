"""Every key of the configurations for DeepStream is one that its plugins read, with a value that they take."""

from __future__ import annotations

import itertools
import re
import shlex

import nvinfer_keys
import pytest
from documentation import FENCE, ROOT, SPAN

from utils.onnx_graph import deepstream
from utils.onnx_graph.output_formats import NmsSettings

PAGE = (ROOT / "docs/deepstream.md").read_text(encoding="utf-8")
FORMS = list(
    itertools.product(("", "weak", "strong"), (False, True), (None, NmsSettings("onnx", 50)), (False, True))
)  # typing, dynamic, masks, bytes


def config(typing="weak", dynamic=True, nms=None, takes_bytes=False, engine="") -> str:
    return deepstream.infer_config(
        "some/net.onnx", (64, 96), 3, 5, typing=typing, dynamic=dynamic, nms=nms, takes_bytes=takes_bytes,
        engine=engine or "net.engine" * bool(typing),
    )  # fmt: skip


@pytest.mark.parametrize(("typing", "dynamic", "nms", "takes_bytes"), FORMS)
def test_nvinfer_reads_and_takes_all_of_it(typing, dynamic, nms, takes_bytes):
    text = config(typing, dynamic, nms, takes_bytes)
    assert nvinfer_keys.complaints(text) == []
    assert len(nvinfer_keys.entries(text)["property"]) >= 18
    assert set(nvinfer_keys.entries(text)) == {"property", "class-attrs-all"}


@pytest.mark.parametrize("typing", ["", "weak", "strong"])
def test_values_are_those_of_the_network(typing):
    boxes = nvinfer_keys.entries(config(typing))["property"]
    masks, attributes = nvinfer_keys.entries(config(typing, nms=NmsSettings("efficient", 50, 0.6, 0.3))).values()
    for one in (boxes, masks):
        assert (one["infer-dims"], one["batch-size"]) == ("3;64;96", "3")
        assert one.get("onnx-file") == (None if typing else "net.onnx")
        assert (one["num-detected-classes"], one["network-mode"]) == ("5", "1" if typing else "2")
    assert (masks["network-type"], masks["cluster-mode"], masks["segmentation-threshold"]) == ("3", "4", "0.5")
    assert masks["parse-bbox-instance-mask-func-name"] == "NvDsInferParseYoloSeg"
    assert (attributes["topk"], attributes["pre-cluster-threshold"]) == ("50", "0.3")


@pytest.mark.parametrize(
    ("typing", "flags"), [("", ["--fp16"]), ("weak", ["--int8", "--fp16"]), ("strong", ["--stronglyTyped"])]
)
def test_the_command_builds_the_engine_that_the_configuration_names(typing, flags):
    """A static file has its own shapes."""
    for dynamic in (True, False):
        text = config(typing, dynamic, engine="engines/my own.engine")
        assert nvinfer_keys.complaints(text) == []
        values = nvinfer_keys.entries(text)["property"]
        assert (values["model-engine-file"], "onnx-file" in values) == ("engines/my own.engine", False)
        (command,) = re.findall(r"^#   (trtexec .*)$", text, re.MULTILINE)
        first, *middle, last = shlex.split(command)[1:]
        assert (first, last) == ("--onnx=net.onnx", "--saveEngine=engines/my own.engine")
        shapes = [f"--{end}Shapes=images:{batch}x3x64x96" for end, batch in (("min", 1), ("opt", 8), ("max", 16))]
        assert middle == [*flags, *shapes * dynamic]


@pytest.mark.parametrize(
    ("settings", "words"), [(NmsSettings("onnx"), "#   NMS (ONNX"), (NmsSettings("none"), "#   Top-k, no NMS")]
)
def test_a_file_without_nms_is_not_said_to_have_it(settings, words):
    assert words in config(nms=settings)


@pytest.mark.parametrize("nms", [None, NmsSettings("onnx", 50)], ids=["boxes", "masks"])
def test_what_stands_in_front_of_a_file_for_bytes_has_all_that_it_needs(nms):
    listed = dict(re.findall(r"^#   ([\w-]+)=(\S+)$", config(nms=nms, takes_bytes=True), re.MULTILINE))
    assert listed.pop("pixel-normalization-factor") == "1"  # of another group, which has the library's own keys
    assert nvinfer_keys.complaints_about_preprocessing(listed) == []
    assert (listed["tensor-data-type"], listed["network-input-shape"]) == ("1", "3;3;64;96")
    assert (listed["processing-height"], listed["processing-width"]) == ("64", "96")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("batch-size=3", "batchsize=3", "[property] batchsize is unknown"),
        ("batch-size=3", "batch-size=0", "batch-size does not take '0'"),
        ("infer-dims=3;64;96", "input-dims=3;64;96;0", "input-dims is deprecated"),
        ("network-type=0", "network-type=3", "has no parser for masks"),
        ("maintain-aspect-ratio=1", "maintain-aspect-ratio=0", "symmetric-padding means nothing"),
        ("custom-lib-path=", "#custom-lib-path=", "functions are named, and no custom-lib-path"),
        ("[class-attrs-all]", "[class-attrs-5]", "[class-attrs-5] is for a class that is not there"),
        ("[property]", "[properties]", "there is no group [property]"),
    ],
)
def test_the_checker_finds(old, new, complaint):
    text = config()
    assert old in text
    assert any(complaint in one for one in nvinfer_keys.complaints(text.replace(old, new)))


def test_keys_that_the_page_names_are_there():
    spans = SPAN.findall(FENCE.sub("", PAGE))
    named = {key for span in spans for key in re.findall(r"^([a-z0-9]+(?:-[a-z0-9]+)+)(?:=.*)?$", span)}
    known = {
        *nvinfer_keys.PROPERTY,
        *nvinfer_keys.CLASS_ATTRS,
        *nvinfer_keys.PREPROCESS,
        "display-mask",  # of deepstream-app
    }
    assert named <= known
    assert {"onnx-file", "model-engine-file", "int8-calib-file", "strongly-typed"} <= named
    assert deepstream.CONFIG in PAGE
