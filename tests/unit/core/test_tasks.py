"""Which outputs belong to which task, and which rows of a prediction are what."""

from types import SimpleNamespace

import pytest
import torch

from utils.core.errors import InputError
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


def test_the_task_of_a_head():
    assert task_of_head(SimpleNamespace(nc=3)) is DETECT
    assert task_of_head(SimpleNamespace(nc=3, nm=32)) is SEGMENT


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


def test_what_heads_return_while_training():
    assert trained(MAPS) == (MAPS, ())
    assert trained(tuple(MAPS)) == (tuple(MAPS), ())
    assert trained((MAPS, RAW, PROTOTYPES)) == (MAPS, (RAW, PROTOTYPES))


def test_outputs_of_other_dimensions():
    with pytest.raises(InputError, match=r"output1 is \[2, 5\]"):
        Prediction.of({"output0": RAW, "output1": torch.rand(2, 5)}, SEGMENT)
    with pytest.raises(InputError, match=r"output0 is \[2, 12\]"):
        Prediction.of({"output0": RAW[..., 0]}, DETECT)
