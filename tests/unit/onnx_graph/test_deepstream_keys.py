"""Every key of the configurations for DeepStream is one that its plugins read, with a value that they take."""

import itertools
import re
import shlex

import nvinfer_keys
import pytest
from documentation import FENCE, ROOT, SPAN
from google.protobuf import text_format

from utils.onnx_graph import deepstream
from utils.onnx_graph.output_formats import NmsSettings

PAGE = (ROOT / "docs/deepstream.md").read_text(encoding="utf-8")
TYPINGS, EITHER = ("", "weak", "strong"), (False, True)
FORMS = [*itertools.product(TYPINGS, EITHER, (None, NmsSettings("onnx", 50)), ("", "net"))]


def configs(typing="weak", dynamic=True, nms=None, model="", engine="", masks=None, **more) -> list[str]:
    return deepstream.configs(
        "some/net.onnx", (64, 96), 3, 5, typing=typing, dynamic=dynamic, nms=nms, model=model,
        engine=engine or "net.engine" * bool(typing), masks=nms is not None if masks is None else masks, **more,
    )  # fmt: skip


def config(*words, **options) -> str:
    return configs(*words, **options)[0]


@pytest.mark.parametrize(("typing", "dynamic", "nms", "model"), FORMS)
def test_deepstream_reads_and_takes_all_of_it(typing, dynamic, nms, model):
    text, *server = configs(typing, dynamic, nms, model)
    assert len(list(map(nvinfer_keys.read_server, server))) == bool(model and dynamic)
    assert nvinfer_keys.complaints(text) == []
    assert set(nvinfer_keys.entries(text)) == {"property", "class-attrs-all"}


@pytest.mark.parametrize("typing", ["", "weak", "strong"])
def test_values_are_those_of_the_network(typing):
    boxes = nvinfer_keys.entries(config(typing))["property"]
    masks, attributes = nvinfer_keys.entries(config(typing, nms=NmsSettings("efficient", 50, 0.6, 0.3))).values()
    for one in (boxes, masks):
        assert {
            "infer-dims": "3;64;96", "batch-size": "3", "num-detected-classes": "5", "labelfile-path": "labels.txt",
            "network-mode": "1" if typing else "2", "net-scale-factor": str(1 / 255), "model-color-format": "0",
        }.items() <= one.items()  # fmt: skip
        assert (one.get("onnx-file"), one.get("int8-calib-file")) == (None if typing else "net.onnx", None)
    assert (boxes["network-type"], boxes["parse-bbox-func-name"]) == ("0", "NvDsInferParseYolo")
    assert (masks["network-type"], masks["cluster-mode"], masks["segmentation-threshold"]) == ("3", "4", "0.5")
    assert masks["parse-bbox-instance-mask-func-name"] == "NvDsInferParseYoloSeg"
    assert (attributes["topk"], attributes["pre-cluster-threshold"]) == ("50", "0.3")
    for kind, words in (("onnx", "NMS (ONNX"), ("none", "Top-k, no NMS")):
        assert f"#   {words}" in config(typing, nms=NmsSettings(kind))


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


@pytest.mark.parametrize("masks", EITHER)
def test_a_file_with_nms_inside_has_the_parsers_of_nvdsinfer_yolo(masks):
    text, server = configs(nms=NmsSettings("onnx", 50, 0.6, 0.3), masks=masks, model="net")
    values, attributes = nvinfer_keys.entries(text).values()
    key, function = ("bbox-instance-mask", "NvDsInferYoloMask") if masks else ("bbox", "NvDsInferYoloNMS")
    assert values[f"parse-{key}-func-name"] == function
    assert (values["network-type"], values["cluster-mode"]) == ("3" if masks else "0", "4")
    assert attributes == {"pre-cluster-threshold": "0.3", "topk": "50"}
    found = nvinfer_keys.read_server(server)
    assert float(found["scale_factor"]) == pytest.approx(1 / 255)
    assert {
        "model_name": '"net"', "max_batch_size": "3", "num_detected_classes": "5", "threshold": "0.3",
        "custom_parse_bbox_func": '"NvDsInferYoloNMS"', "path": f'"{values["custom-lib-path"]}"',
        "labelfile_path": f'"{values["labelfile-path"]}"', "tensor_name": '"images"', "symmetric_padding": "1",
    }.items() <= found.items()  # fmt: skip
    for old, new in (("symmetric_padding", "symmetric-padding"), ("_LINEAR", "_NCHW"), ("threshold:", "threshold: a")):
        with pytest.raises(text_format.ParseError):
            nvinfer_keys.read_server(server.replace(old, new))


@pytest.mark.parametrize(("channels", "number", "word"), [(3, "0", "RGB"), (1, "2", "GRAY")])
def test_a_network_that_takes_grey_images_gets_them(channels, number, word):
    text, server = configs(channels=channels, nms=NmsSettings("onnx"), masks=False, model="net")
    values = nvinfer_keys.entries(text)["property"]
    assert (values["model-color-format"], values["infer-dims"]) == (number, f"{channels};64;96")
    assert f"as in training, {word}, scaled" in text
    assert f"--optShapes=images:8x{channels}x64x96" in text
    assert nvinfer_keys.read_server(server)["network_format"] == f"IMAGE_FORMAT_{word}"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("batch-size=3", "batchsize=3", "[property] batchsize is unknown"),
        ("network-type=0", "network-type=3", "has no parser for masks"),
        ("maintain-aspect-ratio=1", "maintain-aspect-ratio=0", "symmetric-padding means nothing"),
    ],
)
def test_the_checker_finds(old, new, complaint):
    text = config()
    assert old in text
    assert any(complaint in one for one in nvinfer_keys.complaints(text.replace(old, new)))


def test_keys_that_the_page_names_are_there():
    spans = SPAN.findall(FENCE.sub("", PAGE))
    named = {key for span in spans for key in re.findall(r"^([a-z0-9]+(?:-[a-z0-9]+)+)(?:=.*)?$", span)}
    known = {*nvinfer_keys.PROPERTY, *nvinfer_keys.CLASS_ATTRS}
    assert named <= known | {"display-mask", "plugin-type"}  # two of deepstream-app
    assert {"onnx-file", "model-engine-file", "int8-calib-file", "strongly-typed"} <= named
    assert {deepstream.CONFIG, deepstream.SERVER} <= {*SPAN.findall(PAGE)}
