"""The output forms against references of their own, on made-up predictions: the evaluation loop's NMS, and parsers."""

import itertools
import re
import shlex

import mask_graph
import numpy as np
import nvinfer_keys
import onnx
import pytest
import torch
from deepstream_parser import masked_objects_in, objects_in, parse_as_deepstream, parse_masks_as_deepstream
from documentation import FENCE, ROOT, SPAN
from google.protobuf import text_format
from mask_graph import FIXED, HEIGHT, WIDTH, pooled, prediction
from onnx import TensorProto, helper
from qdq_graph import results

from utils.core.tasks import DETECT, Prediction
from utils.evaluation.masks import Masks
from utils.evaluation.nms import non_max_suppression
from utils.onnx_graph import deepstream, output_formats
from utils.onnx_graph.output_formats import NmsSettings
from utils.onnx_graph.view import drop_unused, metadata_of

CLASSES, ANCHORS = 5, 90


def raw_graph(batch: int | str = 2, anchors: int | str = ANCHORS, opset: int = 17, classes: int = CLASSES):
    """A network whose predictions are its input."""
    shape = (batch, 4 + classes, anchors)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("images", "output0")]
    graph = helper.make_graph([helper.make_node("Identity", ["images"], ["output0"])], "raw", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def predictions(batch: int = 2, anchors: int = ANCHORS, classes: int = CLASSES, seed: int = 0) -> torch.Tensor:
    """Boxes that overlap a lot, and scores on a coarse grid, so that many are equal, as an INT8 network's are."""
    random = torch.Generator().manual_seed(seed)
    boxes = torch.rand(batch, 4, anchors, generator=random) * torch.tensor([60, 60, 40, 40]).view(1, 4, 1) + 8
    scores = torch.randint(0, 21, (batch, classes, anchors), generator=random) / 20
    return torch.cat([boxes, scores], 1)


def run(model: onnx.ModelProto, images: torch.Tensor) -> dict[str, np.ndarray]:
    """The outputs; their shapes are those that the graph says."""
    found = results(model, images=images.numpy())
    for value in model.graph.output:
        known = [dim.dim_value or None for dim in value.type.tensor_type.shape.dim]
        sides = zip(known, found[value.name].shape, strict=bool(known))
        assert all(side in (None, real) for side, real in sides)
    return found


def rows(found: dict[str, np.ndarray], image: int) -> np.ndarray:
    """Detections of an image as the loop gives them: x1, y1, x2, y2, score, class."""
    count = found["num_dets"][image, 0]
    parts = found["det_boxes"][image], found["det_scores"][image, :, None], found["det_classes"][image, :, None]
    table = np.concatenate(parts, 1)
    assert not table[count:].any()  # zeros behind the last detection
    return table[:count]


SETTINGS = {
    "defaults": NmsSettings("onnx"),
    "as in evaluation": NmsSettings("onnx", 300, 0.7, 0.001),
    "few": NmsSettings("onnx", 3),
    "agnostic": NmsSettings("onnx", agnostic=True),
    "agnostic, all": NmsSettings("onnx", 300, 0.6, 0.0, agnostic=True),
    "nothing": NmsSettings("onnx", conf_thres=1.0),
    "none": NmsSettings("none", 50),
    "none, all": NmsSettings("none", 600, conf_thres=0.0),
    "none, agnostic": NmsSettings("none", agnostic=True),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("names", [(2, ANCHORS), ("batch", "anchors")], ids=["static", "dynamic"])
def test_detections_are_those_of_the_evaluation_loop(settings, names):
    """Also in their order, where scores are equal. Without suppression, the loop suppresses nothing (overlap > 1)."""
    model = output_formats.end2end(settings).attach(raw_graph(*names))
    for batch, anchors in [(2, ANCHORS), (1, 4), (3, 50)] if "batch" in names else [(2, ANCHORS)]:
        raw = given = predictions(batch, anchors)
        given[2:, 4:] = 0  # an image without detections
        overlap = 1.0 if settings.kind == "none" else settings.iou_thres
        if settings.kind == "none" and settings.agnostic:
            best, label = raw[:, 4:].max(1, keepdim=True)
            raw = torch.cat([raw[:, :4], torch.zeros_like(raw[:, 4:]).scatter(1, label, best)], 1)
        expected = non_max_suppression(
            Prediction(raw), settings.conf_thres, overlap,
            max_det=settings.topk, agnostic=settings.agnostic and overlap < 1,
        )  # fmt: skip
        found = run(model, given)
        assert found["det_boxes"].shape == (batch, settings.topk, 4)
        assert {name: value.dtype for name, value in found.items()} == {
            "num_dets": np.int32, "det_boxes": np.float32, "det_scores": np.float32, "det_classes": np.int32,
        }  # fmt: skip
        for image, wanted in enumerate(expected):
            np.testing.assert_allclose(rows(found, image), wanted.numpy(), atol=1e-4)
            assert anchors < ANCHORS or (len(wanted) > 2) == (settings.conf_thres < 1)


@pytest.mark.parametrize("batch", [2, "batch"])
def test_plugin_gets_what_its_description_asks_for(batch):
    """Its inputs are computed and compared; the plugin itself runs in TensorRT only."""
    settings = NmsSettings("efficient", 42, 0.5, 0.3, agnostic=True)
    model = output_formats.end2end(settings).attach(raw_graph(batch))
    onnx.checker.check_model(model, full_check=True)
    assert [(o.name, o.type.tensor_type.elem_type) for o in model.graph.output] == [
        ("num_dets", TensorProto.INT32), ("det_boxes", TensorProto.FLOAT),
        ("det_scores", TensorProto.FLOAT), ("det_classes", TensorProto.INT32),
    ]  # fmt: skip
    node = model.graph.node[-1]
    assert (node.op_type, list(node.output)) == ("EfficientNMS_TRT", [o.name for o in model.graph.output])
    attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    assert attributes.pop("iou_threshold") == pytest.approx(0.5)
    assert attributes.pop("score_threshold") == pytest.approx(0.3)
    assert attributes == {
        "plugin_version": b"1", "background_class": -1, "score_activation": 0, "box_coding": 0,
        "class_agnostic": 1, "max_output_boxes": 42,
    }  # fmt: skip
    inputs = list(node.input)
    del model.graph.node[-1], model.graph.output[:]
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in inputs)
    raw = predictions()
    boxes, scores = results(model, check=False, images=raw.numpy()).values()
    middle, size = raw[:, :2].mT.numpy(), raw[:, 2:4].mT.numpy()
    np.testing.assert_allclose(boxes, np.concatenate([middle - size / 2, middle + size / 2], 2), atol=1e-5)
    np.testing.assert_array_equal(scores, raw[:, 4:].mT.numpy())


@pytest.mark.parametrize("names", [(2, ANCHORS), ("batch", ANCHORS), ("batch", "anchors")])
def test_deepstream_parser_finds_the_boxes(names):
    model = output_formats.deepstream().attach(raw_graph(*names))
    assert [value.name for value in model.graph.output] == ["output"]
    raw = predictions()
    found = run(model, raw)["output"]
    assert (found.shape, found.dtype) == ((2, ANCHORS, 6), np.float32)
    thresholds = [float(np.float32(value)) for value in (0.25, 0.9, 0.25, 0.5, 0.25)]
    for image in range(2):
        objects = parse_as_deepstream(found[image], 64, 64, thresholds)
        expected = objects_in(raw[image].numpy(), 64, 64, thresholds)
        assert 10 < len(expected) == len(objects) < ANCHORS
        np.testing.assert_allclose(objects, expected, atol=1e-4)


# masks, against torchvision's ROIAlign and the masks of the evaluation loop

ALL = NmsSettings("onnx", 60, 0.6, 0.3)


def run_masks(model: onnx.ModelProto, found: Prediction, **more: np.ndarray) -> dict[str, np.ndarray]:
    batch, _, height, width = found.prototypes.shape
    images = np.zeros((batch, 3, height * 4, width * 4), np.float32)
    return results(model, images=images, raw=found.raw.numpy(), maps=found.prototypes.numpy(), **more)


def detections(found: Prediction, settings: NmsSettings) -> list[torch.Tensor]:
    overlap = 1.0 if settings.kind == "none" else settings.iou_thres
    return non_max_suppression(found, settings.conf_thres, overlap, max_det=settings.topk)


@pytest.mark.parametrize("side", [160, 56, 5])
@pytest.mark.parametrize("kind", ["onnx", "none"])
@pytest.mark.parametrize("dynamic", [(), ("batch",), tuple(FIXED)], ids=["static", "batch", "all"])
def test_masks_in_boxes_are_those_of_roi_align(side, kind, dynamic):
    settings = NmsSettings(kind, 60, 0.6, 0.3)
    model = output_formats.end2end(settings, side).attach(mask_graph.raw_graph(dynamic=dynamic))
    shape = [dim.dim_param or dim.dim_value for dim in model.graph.output[-1].type.tensor_type.shape.dim]
    assert (model.graph.output[-1].name, shape) == ("det_masks", ["batch" if dynamic else 3, 60, side * side])
    raw = prediction(1, 2, 96, 64) if "height" in dynamic else prediction()
    found = run_masks(model, raw)
    counts = []
    for image, rows in enumerate(detections(raw, settings)):
        count = found["num_dets"][image, 0]
        counts.append(count)
        assert count == len(rows)
        np.testing.assert_allclose(found["det_boxes"][image, :count], rows[:, :4], atol=1e-4)
        masks = found["det_masks"][image].reshape(-1, side, side)
        np.testing.assert_allclose(masks[:count], pooled(raw, image, rows, side), atol=2e-5)
        assert not masks[count:].any()
    assert min(counts[0], *counts[2:], 61) > 30
    assert counts[1] == 0


@pytest.mark.parametrize("dynamic", [(), tuple(FIXED)], ids=["static", "all"])
def test_masks_on_the_grid_are_the_loops(dynamic):
    model = output_formats.end2end(ALL, 0).attach(mask_graph.raw_graph(dynamic=dynamic))
    raw = prediction()
    found = run_masks(model, raw)
    assert found["det_masks"].shape == (3, 60, HEIGHT // 4, WIDTH // 4)
    rows = detections(raw, ALL)
    masks = Masks.of(raw, rows, (HEIGHT, WIDTH))
    for image, one in enumerate(rows):
        inside = masks.pixels(image, torch.arange(len(one))).numpy()
        np.testing.assert_array_equal(found["det_masks"][image, : len(one)] > 0.5, inside)
        assert not found["det_masks"][image, len(one) :].any()
        sums = np.einsum("kn,khw->nhw", raw.coefficients[image][:, one[:, 6].long()], raw.prototypes[image])
        shares = found["det_masks"][image, : len(one)]
        np.testing.assert_allclose(shares, np.where(shares > 0, 1 / (1 + np.exp(-sums)), 0), atol=2e-6)


@pytest.mark.parametrize("opset", [13, 17, 18, 20])
def test_operators_are_standard_ones_of_every_opset(opset):
    agnostic = NmsSettings("onnx", agnostic=True)
    forms = [output_formats.end2end(agnostic), output_formats.end2end(NmsSettings("none")), output_formats.deepstream()]
    for form in forms:
        model = form.attach(raw_graph(opset=opset))
        assert model.opset_import[0].version == opset
        run(model, predictions())
    for form in (output_formats.end2end(ALL), output_formats.end2end(ALL, 0), output_formats.deepstream(ALL)):
        for dynamic in ((), ("batch",)):
            model = form.attach(mask_graph.raw_graph(opset, dynamic))
            assert {node.domain for node in model.graph.node} == {""}
            run_masks(model, prediction())


# masks behind the plugin


def without_plugin(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph behind TensorRT's plugin: what that returns are inputs."""
    plugin = next(node for node in model.graph.node if node.op_type == "EfficientNMS_TRT")
    values = [value for value in model.graph.output if value.name in plugin.output]
    model.graph.input.extend(values)
    model.graph.node.remove(plugin)
    for value in values:
        if len(model.graph.output) > 1:
            model.graph.output.remove(value)
    drop_unused(model)
    return model


@pytest.mark.parametrize("side", [32, 0])
def test_masks_behind_a_plugin_that_rounds_boxes_to_fp16(side):
    """The anchor is found again; the mask is cut out by the box as it was returned."""
    settings = NmsSettings("efficient", 60, 0.6, 0.3)
    model = output_formats.end2end(settings, side).attach(mask_graph.raw_graph(dynamic=tuple(FIXED)))
    assert [value.name for value in model.graph.output] == [*DETECT.detections, "det_masks"]
    raw = prediction(2)
    raw.raw[:, :2] += 600  # where FP16 has steps of half a pixel; the prototypes lie there too
    raw = Prediction(raw.raw, torch.nn.functional.pad(raw.prototypes, (150, 0, 150, 0)))
    expected = detections(raw, settings)
    given = {
        "num_dets": np.array([[len(rows)] for rows in expected], np.int32),
        "det_boxes": np.full((3, 60, 4), 7, np.float32),  # behind the last detection anything may lie
        "det_scores": np.zeros((3, 60), np.float32), "det_classes": np.zeros((3, 60), np.int32),
    }  # fmt: skip
    for image, rows in enumerate(expected):
        rows[:, :4] = rows[:, :4].half().float()
        given["det_boxes"][image, : len(rows)] = rows[:, :4]
    found = run_masks(without_plugin(model), raw, **given)["det_masks"]
    for image, rows in enumerate(expected):
        if side:
            masks = pooled(raw, image, rows, side).flatten(1)
        else:
            size = tuple(4 * cells for cells in raw.prototypes.shape[2:])
            masks = Masks.of(raw, expected, size).pixels(image, torch.arange(len(rows)))
        one = found[image, : len(rows)]
        np.testing.assert_allclose(one if side else one > 0.5, masks, atol=2e-5)
        assert not found[image, len(rows) :].any()


# masks for DeepStream


@pytest.mark.parametrize("dynamic", [(), ("batch",)], ids=["static", "batch"])
def test_deepstream_parser_finds_boxes_and_masks(dynamic):
    model = output_formats.deepstream(ALL).attach(mask_graph.raw_graph(dynamic=dynamic))
    grid = (HEIGHT // 4, WIDTH // 4)
    raw = prediction()
    found = run_masks(model, raw)
    assert list(found) == ["output"]
    assert found["output"].shape == (3, 60, 6 + grid[0] * grid[1])
    assert metadata_of(model)["nms"].startswith('{"kind": "onnx", "topk": 60, ')
    thresholds = [0.3, 0.9, 0.3, 0.5, 0.3]
    for image, rows in enumerate(detections(raw, ALL)):
        objects = parse_masks_as_deepstream(found["output"][image], WIDTH, HEIGHT, thresholds)
        masks = pooled(raw, image, rows, grid)
        expected = masked_objects_in(rows[:, :6].numpy(), masks.numpy(), WIDTH, HEIGHT, thresholds)
        assert len(objects) == len(expected)
        assert (len(objects) > 15) == (image != 1)
        for (box, mask), (other, wanted) in zip(objects, expected, strict=True):
            np.testing.assert_allclose(box, other, atol=1e-4)
            np.testing.assert_allclose(mask, wanted, atol=2e-5)


# every key of the configurations for DeepStream is one that its plugins read, with a value that they take

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
    assert ("# fixed in the ONNX file" in text) is not dynamic


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


def test_the_checker_finds():
    for old, new, complaint in (
        ("batch-size=3", "batchsize=3", "[property] batchsize is unknown"),
        ("network-type=0", "network-type=3", "has no parser for masks"),
        ("maintain-aspect-ratio=1", "maintain-aspect-ratio=0", "symmetric-padding means nothing"),
    ):
        assert complaint in "".join(nvinfer_keys.complaints(config().replace(old, new)))


def test_keys_that_the_page_names_are_there():
    page = (ROOT / "docs/deepstream.md").read_text(encoding="utf-8")
    spans = SPAN.findall(FENCE.sub("", page))
    named = {key for span in spans for key in re.findall(r"^([a-z0-9]+(?:-[a-z0-9]+)+)(?:=.*)?$", span)}
    known = {*nvinfer_keys.PROPERTY, *nvinfer_keys.CLASS_ATTRS}
    assert named <= known | {"display-mask", "plugin-type"}  # two of deepstream-app
    assert {"onnx-file", "model-engine-file", "int8-calib-file", "strongly-typed"} <= named
    assert {deepstream.CONFIG, deepstream.SERVER} <= {*SPAN.findall(page)}
