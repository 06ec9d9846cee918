"""The comparison of masks, on results that are right and on results that were changed."""

import numpy as np
import onnx
import pytest
import torch
import torchvision
from mask_graph import CLASSES, HEIGHT, WIDTH, prediction, raw_graph

from utils.core.tasks import DETECT, SEGMENT, Prediction
from utils.evaluation.masks import Masks
from utils.evaluation.nms import non_max_suppression
from utils.jobs.compare_outputs import different_masks, observed, same_detections, table_and_masks
from utils.onnx_graph import output_formats
from utils.onnx_graph.output_formats import NmsSettings

SIDE = 12


def framed(found: Prediction, rows: torch.Tensor) -> torch.Tensor:
    """Masks of the first image's rows in their boxes: the prototypes are pooled, then summed."""
    maps = torchvision.ops.roi_align(found.prototypes[:1], [rows[:, :4]], SIDE, 0.25, 1, aligned=True)
    return torch.einsum("kn,nkhw->nhw", found.coefficients[0][:, rows[:, 6].long()], maps).sigmoid()


def on_grid(found: Prediction, rows: torch.Tensor) -> torch.Tensor:
    sums = torch.einsum("kn,khw->nhw", found.coefficients[0][:, rows[:, 6].long()], found.prototypes[0])
    ones = torch.ones(1, len(sums), *found.prototypes.shape[2:]), (torch.ones(len(sums), len(sums)),)
    inside = Masks(*ones, (rows[:, :4],), (HEIGHT, WIDTH)).pixels(0, torch.arange(len(rows)))
    return sums.sigmoid() * inside


@pytest.mark.parametrize(("make", "is_framed"), [(framed, True), (on_grid, False)])
def test_masks_that_were_changed_are_counted(make, is_framed):
    found = prediction()
    rows = non_max_suppression(found, 0.3, 0.6)[0]
    masks, boxes = make(found, rows), rows[:, :6]
    large = (rows[:, 2:4] - rows[:, :2]).amin(1) > 8

    def wrong(masks: torch.Tensor, boxes: torch.Tensor = boxes) -> int:
        return different_masks(masks, boxes, rows, found, 0, WIDTH, framed=is_framed)

    assert wrong(masks) == 0
    assert wrong(masks.flip(0)) > len(rows) // 2
    changed = masks.clone()
    changed[2:5] += 0.01
    assert wrong(changed) == 3
    changed[7, 0, 0] = float("nan")
    assert wrong(changed) == 4
    assert wrong(masks.flip(2)) >= int(large.sum()) // 2
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    assert wrong(masks[order], boxes[order]) == 0
    assert wrong(changed, boxes + 5) == 0  # boxes that are no one's are counted elsewhere
    other = Prediction(found.raw, found.prototypes * 1.1)
    assert different_masks(masks, boxes, rows, other, 0, WIDTH, framed=is_framed) > len(rows) // 2


def test_of_detections_in_one_place_any_will_do():
    """Two anchors with one box, score and class: the file may have either of their masks."""
    found = prediction()
    found.raw[0, 4 + 2, 1] = 0.99
    found.raw[0, :9, 2] = found.raw[0, :9, 1]
    twins = non_max_suppression(found, 0.985, 1.0)[0]
    twins = twins[(twins[:, 5] == 2) & (twins[:, 6] <= 2)]
    assert twins[:, 6].tolist() == [1, 2]
    masks = framed(found, twins)
    assert (masks[0] - masks[1]).abs().max() > 0.1
    for order in ([0, 1], [1, 0], [0, 0]):
        assert different_masks(masks[order], twins[:, :6], twins, found, 0, WIDTH, framed=True) == 0
    assert different_masks(masks.flip(1), twins[:, :6], twins, found, 0, WIDTH, framed=True) == 2


def test_detections_are_equal_by_box_score_and_class():
    one = torch.tensor([[0.0, 0, 9, 9, 0.5, 1]])
    others = one.repeat(4, 1)
    others[1, 2] += 0.1
    others[2, 4] += 0.001
    others[3, 5] = 2
    assert same_detections(one, others).tolist() == [[True, False, False, False]]


@pytest.mark.parametrize("form", ["box", "grid", "deepstream"])
def test_what_stands_behind_the_plugin_runs_on_the_loops_detections(form):
    settings = NmsSettings("efficient", 60, 0.6, 0.3)
    made = {
        "box": output_formats.end2end(settings, SIDE), "grid": output_formats.end2end(settings, 0),
        "deepstream": output_formats.deepstream(settings),
    }[form]  # fmt: skip
    found = prediction()
    rows = non_max_suppression(found, 0.3, 0.6, max_det=60)
    graph = made.attach(raw_graph())
    for name, value in (("raw", found.raw), ("maps", found.prototypes)):
        graph.graph.initializer.append(onnx.numpy_helper.from_array(value.numpy(), name))
    results = observed(graph, SEGMENT, CLASSES)(np.zeros((3, 3, HEIGHT, WIDTH), np.float32))
    table, masks = table_and_masks(results, found.prototypes.shape[2:])
    assert masks is not None
    assert masks.shape[2:] == {"box": (SIDE, SIDE), "grid": (16, 24), "deepstream": (16, 24)}[form]
    for image, one in enumerate(rows):
        assert torch.equal(table[image, : len(one)], one[:, :6])
        assert not table[image, len(one) :].any()
        shown = masks[image, : len(one)]
        assert different_masks(shown, one[:, :6], one, found, image, WIDTH, framed=form != "grid") == 0
    assert different_masks(masks[0, : len(rows[0])].flip(0), rows[0][:, :6], rows[0], found, 0, WIDTH,
                           framed=form != "grid") > 20  # fmt: skip


def test_a_detector_has_no_masks():
    number, boxes, scores, classes = DETECT.detections
    results = {number: torch.tensor([[1]]), boxes: torch.rand(1, 3, 4), scores: torch.rand(1, 3),
               classes: torch.ones(1, 3)}  # fmt: skip
    table, masks = table_and_masks(results, ())
    assert masks is None
    assert table[0, 0].tolist() == [*results[boxes][0, 0].tolist(), results[scores][0, 0].item(), 1.0]
    assert not table[0, 1:].any()
