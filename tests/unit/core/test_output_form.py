"""What a file gives, by its metadata and outputs: NMS and its thresholds, and masks and their size."""

import json
from dataclasses import replace

import pytest
from boxes_graph import write_boxes

from utils.core.output_form import DEEPSTREAM, END_TO_END, PLAIN, OutputForm
from utils.core.tasks import DETECT, SEGMENT
from utils.onnx_graph import output_formats
from utils.onnx_graph.output_formats import NmsSettings
from utils.runners.onnxrt import OnnxRuntimeRunner
from utils.serving.config import ONNX, ServedFile
from utils.trt.onnx_file import OnnxFile

RAW = {"output0": (None, 7, None)}
DETECTED = {"num_dets": (2, 1), "det_boxes": (2, 10, 4), "det_scores": (2, 10), "det_classes": (2, 10)}
SETTINGS = {"kind": "onnx", "topk": 10, "iou_thres": 0.6, "conf_thres": 0.25, "agnostic": False}
BOTH = {"conf_thres": 0.25, "iou_thres": 0.6}
BOXES = OutputForm(END_TO_END, DETECT, has_nms=True, nms_kind="onnx", thresholds=BOTH)  # with SETTINGS
FRAMES = replace(BOXES, task=SEGMENT, masks="frames")


def nms(**changes):
    return {"nms": json.dumps({**SETTINGS, **changes})}


@pytest.mark.parametrize(
    ("metadata", "outputs", "expected"),
    [
        ({}, RAW, OutputForm(PLAIN, DETECT)),
        ({"form": "plain"}, RAW, OutputForm(PLAIN, DETECT)),
        ({"form": "of another program", **nms()}, {"boxes": (1, 7, 9)}, OutputForm(PLAIN, DETECT)),
        ({}, {**RAW, "output1": (None, 32, 8, 8)}, OutputForm(PLAIN, SEGMENT, masks="prototypes")),
        ({"task": "segment"}, RAW, OutputForm(PLAIN, SEGMENT, masks="prototypes")),  # what lacks them is refused later
        (nms(), DETECTED, BOXES),
        ({"form": "plain"}, DETECTED, OutputForm(END_TO_END, DETECT, True)),
        (nms(), {**DETECTED, "det_masks": (2, 10, 144)}, replace(FRAMES, mask_side=12)),
        (nms(), {**DETECTED, "det_masks": (2, 10, None)}, FRAMES),
        (nms(), {**DETECTED, "det_masks": (2, 10, 16, 24)}, replace(FRAMES, masks="grid")),
        ({"task": "segment"}, DETECTED, OutputForm(END_TO_END, SEGMENT, True)),
        ({"form": "end-to-end"}, RAW, OutputForm(PLAIN, DETECT)),  # cut off before NMS
        ({"form": "deepstream"}, {"output": (1, 9, 6)}, OutputForm(DEEPSTREAM, DETECT)),
        ({"form": "deepstream", "task": "segment", **nms()}, {"output": (1, 9, 390)}, replace(FRAMES, name=DEEPSTREAM)),
        ({}, {"output": (1, 9, 6)}, OutputForm(PLAIN, DETECT)),
    ],
)
def test_forms(metadata, outputs, expected):
    assert OutputForm.of(metadata, outputs) == expected


@pytest.mark.parametrize(
    ("entry", "kind", "thresholds", "name"),
    [
        (json.dumps(SETTINGS), "onnx", BOTH, "NMS"),
        (json.dumps({**SETTINGS, "kind": "none"}), "none", {"conf_thres": 0.25}, "top-k without NMS"),
        ('{"conf_thres": 0.001}', "", {"conf_thres": 0.001}, "NMS"),
        ('{"kind": "efficient", "conf_thres": 1, "iou_thres": "much"}', "efficient", {"conf_thres": 1.0}, "NMS"),
        ("True", "", {}, "NMS"),
        ("[1]", "", {}, "NMS"),
        ("", "", {}, "NMS"),
        ("[" * 100_000, "", {}, "NMS"),
    ],
)
def test_settings_of_nms(entry, kind, thresholds, name):
    form = OutputForm.of({"nms": entry}, DETECTED)
    assert (form.has_nms, form.nms_kind, form.thresholds, form.nms_name) == (True, kind, thresholds, name)


@pytest.mark.parametrize(
    ("format_", "masks", "expected"),
    [
        (output_formats.plain(), False, OutputForm(PLAIN, DETECT)),
        (output_formats.plain(), True, OutputForm(PLAIN, SEGMENT, masks="prototypes")),
        (output_formats.end2end(NmsSettings("onnx", 5, 0.6)), False, BOXES),
        (output_formats.end2end(NmsSettings("onnx", 5, 0.6), 8), True, replace(FRAMES, mask_side=8)),
        (output_formats.end2end(NmsSettings("onnx", 5, 0.6), 0), True, replace(FRAMES, masks="grid")),
        (output_formats.deepstream(), False, OutputForm(DEEPSTREAM, DETECT)),
        (output_formats.deepstream(NmsSettings("onnx", 5, 0.6)), True, replace(FRAMES, name=DEEPSTREAM)),
    ],
)
def test_whatever_reads_a_file_that_is_written_here_finds_its_form(tmp_path, format_, masks, expected):
    path = write_boxes(tmp_path / "a.onnx", format_, masks=masks)
    file = OnnxFile.read(path)
    assert file.form == expected
    assert ServedFile(path, ONNX, file.inputs, file.outputs, file.metadata).form == expected
    with OnnxRuntimeRunner(path) as runner:
        assert (runner.form, runner.task) == (expected, expected.task)
    assert format_.name == expected.name
