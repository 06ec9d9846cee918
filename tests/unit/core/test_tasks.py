"""What a file says of its images and outputs: its task, which rows are what, and the form in which it takes images."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from utils.core.errors import InputError
from utils.core.input_spec import FLOATS, InputSpec, channels_of
from utils.core.tasks import DETECT, SEGMENT, Prediction, predicted, task_of_head, task_of_outputs, trained

RAW, PROTOTYPES = torch.rand(2, 4 + 3 + 5, 7), torch.rand(2, 5, 6, 8)
MAPS = [torch.rand(2, 9, 4, 4), torch.rand(2, 9, 2, 2)]


@pytest.mark.parametrize(
    ("metadata", "outputs", "task"),
    [
        ({"task": "segment"}, {"output0": 3, "output1": 4}, SEGMENT),
        ({"task": "detect"}, {"output0": 3, "output1": 4}, DETECT),  # the file says it
        ({}, {"output0": 3}, DETECT),
        ({}, {"output0": 3, "output1": 4}, SEGMENT),  # as upstream's export.py writes it
        ({"task": "?"}, {"a": 3, "b": 4}, SEGMENT),
        ({}, {"output1": 4, "output0": 3}, SEGMENT),  # engines list outputs in an order of their own
        ({}, {"output0": 3, "a": 4, "b": 4, "c": 4}, DETECT),  # feature maps beside the prediction
        ({}, {"num_dets": 2, "det_boxes": 3, "det_scores": 2, "det_classes": 2}, DETECT),
        ({}, {"num_dets": 2, "det_boxes": 3, "det_scores": 2, "det_classes": 2, "det_masks": 3}, SEGMENT),
    ],
)
def test_the_task_of_a_file(metadata, outputs, task):
    assert task_of_outputs(metadata, outputs) is task


@pytest.mark.parametrize("result", [(RAW, (MAPS, RAW[:, 7:], PROTOTYPES)), (RAW, PROTOTYPES)])
def test_what_a_segmentation_network_returns(result):
    prediction = Prediction(*predicted(result))
    assert (prediction.task, prediction.nc, prediction.nm) == (SEGMENT, 3, 5)
    assert prediction.prototypes is PROTOTYPES
    parts = (prediction.boxes, prediction.scores, prediction.coefficients)
    for part, rows in zip(parts, (RAW[:, :4], RAW[:, 4:7], RAW[:, 7:]), strict=True):
        assert torch.equal(part, rows)


@pytest.mark.parametrize("result", [(RAW, MAPS), [RAW], RAW])
def test_what_a_detector_returns(result):
    prediction = Prediction(*predicted(result))
    assert (prediction.task, prediction.nc, prediction.nm, prediction.prototypes) == (DETECT, 8, 0, None)
    assert torch.equal(prediction.scores, RAW[:, 4:])
    assert prediction.coefficients.shape == (2, 0, 7)
    assert predicted(([RAW, RAW + 1], [MAPS, MAPS]))[0] is RAW  # with an auxiliary branch


def test_the_task_of_heads_and_what_they_return_while_training():
    assert [task_of_head(SimpleNamespace(nc=3, **more)) for more in ({}, {"nm": 32})] == [DETECT, SEGMENT]
    assert trained(MAPS) == (MAPS, ())
    assert trained(tuple(MAPS)) == (tuple(MAPS), ())
    assert trained((MAPS, RAW, PROTOTYPES)) == (MAPS, (RAW, PROTOTYPES))


def test_outputs_of_other_dimensions():
    with pytest.raises(InputError, match=r"output1 is \[2, 5\]"):
        Prediction.of({"output0": RAW, "output1": torch.rand(2, 5)}, SEGMENT)
    with pytest.raises(InputError, match=r"output0 is \[2, 12\]"):
        Prediction.of({"output0": RAW[..., 0]}, DETECT)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [(FLOATS, "float32"), (FLOATS, "float16"), (InputSpec("uint8"), "uint8"), (InputSpec("uint8", "nhwc", 1), "uint8")],
)
def test_a_file_says_its_form(form, dtype):
    shape = (1, form.channels, 64, 96)
    assert InputSpec.of_file(form.metadata(), dtype, form.own(shape)) == form
    assert form.nchw(form.own(shape)) == shape
    assert form.own(shape)[-1] == (form.channels if form.layout == "nhwc" else 96)
    assert form.metadata()["channels"] == str(form.channels)


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("float32", (None, 3, None, None), FLOATS),
        ("uint8", (1, 3, 64, 96), InputSpec("uint8")),
        ("uint8", (None, None, None, 3), InputSpec("uint8", "nhwc")),
        ("uint8", (None, 3, 64, 3), InputSpec("uint8")),
        ("float16", (None, 1, None, None), InputSpec(channels=1)),
        ("uint8", (1, 64, 96, 1), InputSpec("uint8", "nhwc", 1)),
        ("int64", (1, 10), FLOATS),  # no images: refused where images are wanted
    ],
)
def test_files_of_others_are_what_their_type_and_shape_are(dtype, shape, expected):
    assert InputSpec.of_file({}, dtype, shape) == expected


@pytest.mark.parametrize(
    "entries", [{"input_form": "int8", "input_scale": "0.0079"}, {}]
)  # with metadata, and of others
def test_files_that_take_int8(entries):
    with pytest.raises(InputError, match=r"INT8 images; .* export it with --input uint8"):
        InputSpec.of_file(entries, "int8")


def test_channels_are_those_of_the_first_convolution():
    networks = [nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(channels, 8, 1), nn.Conv2d(8, 3, 1)) for channels in (1, 3, 4)]
    assert [channels_of(network) for network in networks[:2]] == [1, 3]
    with pytest.raises(InputError, match="4 channels"):
        channels_of(networks[2])
