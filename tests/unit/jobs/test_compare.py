"""Results of two networks: what differs, on results that were changed, and against plain loops over pixels."""

import math
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from mask_graph import CLASSES, HEIGHT, WIDTH, pooled, prediction, raw_graph
from torchvision.ops import box_convert, box_iou

from utils.core.tasks import DETECT, SEGMENT, Prediction
from utils.evaluation.masks import Masks
from utils.evaluation.nms import non_max_suppression
from utils.jobs import compare_tensors
from utils.jobs.compare_outputs import different_masks, observed, same_detections, table_and_masks
from utils.jobs.compare_tensors import BEST, COEFFICIENTS, PIXELS, PROTOTYPES, STEPPED, compare_predictions, together
from utils.jobs.sensitivity.search import distance, weight
from utils.onnx_graph import output_formats
from utils.onnx_graph.output_formats import NmsSettings

SIDE = 12


def on_grid(found: Prediction, rows: torch.Tensor) -> torch.Tensor:
    sums = torch.einsum("kn,khw->nhw", found.coefficients[0][:, rows[:, 6].long()], found.prototypes[0])
    ones = torch.ones(1, len(sums), *found.prototypes.shape[2:]), (torch.ones(len(sums), len(sums)),)
    inside = Masks(*ones, (rows[:, :4],), (HEIGHT, WIDTH)).pixels(0, torch.arange(len(rows)))
    return sums.sigmoid() * inside


@pytest.mark.parametrize(
    ("make", "is_framed"), [(lambda found, rows: pooled(found, 0, rows, SIDE), True), (on_grid, False)]
)
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
    masks = pooled(found, 0, twins, SIDE)
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


# what an export may differ by

SIZE = (48, 64)  # height, width of the input: a grid of 12x16


def predicted(anchors=30):
    random = torch.Generator().manual_seed(0)
    centres = torch.rand(2, 2, anchors, generator=random) * torch.tensor([64.0, 48.0])[:, None]
    sides = torch.rand(2, 2, anchors, generator=random) * 30 + 4
    scores = torch.rand(2, 3, anchors, generator=random) ** 3
    coefficients = torch.randn(2, 5, anchors, generator=random)
    raw = torch.cat([centres, sides, scores, coefficients], 1)
    return Prediction(raw, torch.randn(2, 5, 12, 16, generator=random))


SCORES, MASKS = slice(4, 7), slice(7, 12)  # rows of its predictions


def noisy(one, rows, amount):
    """With other values in these rows, or with other prototypes; and what was added."""
    values = one.prototypes if rows is None else one.raw[:, rows]
    noise = amount(values.shape, generator=torch.Generator().manual_seed(9)) * 0.3
    if rows is None:
        return replace(one, prototypes=values + noise), noise
    raw = one.raw.clone()
    raw[:, rows] += noise
    return replace(one, raw=raw), noise


def sums_inside(one, box, image, anchor):
    """A mask's sums on the pixels of the prototypes' grid that lie in a box, pixel by pixel."""
    x, y, width, height = box.tolist()
    return np.array([
        float(one.coefficients[image, :, anchor] @ one.prototypes[image, :, row, column])
        for row in range(12) for column in range(16)
        if x - width / 2 <= 4 * column < x + width / 2 and y - height / 2 <= 4 * row < y + height / 2
    ])  # fmt: skip


def pixels_apart(given, expected, anchors):
    """The share of grid pixels in the boxes where the signs of two sums differ."""
    apart = []
    for image, chosen in enumerate(anchors.tolist()):
        for anchor in chosen:
            box = expected.boxes[image, :, anchor]
            ours, theirs = (sums_inside(one, box, image, anchor) > 0 for one in (given, expected))
            apart.extend(ours != theirs)
    return np.mean(apart)


def test_equal_ones():
    one = predicted()
    assert compare_predictions(one, one, SIZE) == dict.fromkeys(("box", "score", COEFFICIENTS, PROTOTYPES, PIXELS), 0.0)
    detector = Prediction(torch.rand(1, 7, 20))
    assert compare_predictions(detector, detector, SIZE) == {"box": 0.0, "score": 0.0}


@pytest.mark.parametrize("rows", [MASKS, None])
def test_a_share_of_the_largest_and_of_the_pixels(rows, monkeypatch):
    """Of the anchors with the highest scores."""
    monkeypatch.setattr(compare_tensors, "BEST", 11)
    one = predicted()
    other, noise = noisy(one, rows, torch.randn)
    anchors = one.scores.numpy().max(1).argsort(1)[:, :-12:-1].copy()
    found = compare_predictions(other, one, SIZE)
    if rows == MASKS:
        of_anchors = [torch.stack([v[i][:, anchors[i]] for i in range(2)]) for v in (noise, one.coefficients)]
        expected = (float(of_anchors[0].abs().max() / of_anchors[1].abs().max()), 0.0)
    else:
        expected = (0.0, float(noise.abs().max() / one.prototypes.abs().max()))
    assert (found[COEFFICIENTS], found[PROTOTYPES]) == pytest.approx(expected, rel=1e-5)
    assert found[PIXELS] == pytest.approx(pixels_apart(other, one, anchors), rel=1e-6)
    assert found[PIXELS] > 0.01


def test_both_are_cropped_to_the_same_boxes_and_opposite_masks_differ_everywhere():
    one = predicted(BEST)
    smaller = compare_predictions(replace(one, raw=torch.cat([one.boxes * 0.5, one.raw[:, 4:]], 1)), one, SIZE)
    assert (smaller["box"], smaller[PIXELS]) == (one.boxes.max() / 2, 0)
    assert compare_predictions(replace(one, prototypes=-one.prototypes), one, SIZE)[PIXELS] == 1


def test_nan_stays_nan_and_zeros_are_no_division():
    one = predicted()
    spoiled = one.prototypes.clone()
    spoiled[1, 2, 3, 4] = math.nan
    found = compare_predictions(replace(one, prototypes=spoiled), one, SIZE)
    assert math.isnan(found[PROTOTYPES])
    assert math.isnan(together([{PROTOTYPES: 0.0}, found])[PROTOTYPES])
    dark = replace(one, prototypes=torch.zeros_like(one.prototypes))
    assert compare_predictions(dark, dark, SIZE)[PROTOTYPES] == 0


def test_shares_of_parts_are_averaged():
    parts = [{"box": 0.1, PIXELS: 0.2, STEPPED: 0.0}, {"box": 0.4, PIXELS: 0.4, STEPPED: 0.2}]
    assert together(parts) == {"box": 0.4, PIXELS: pytest.approx(0.3), STEPPED: 0.1}
    assert together([]) == {}


# the distance by which layers are ranked


def box_distance(reference, other):
    """What boxes and scores differ by, where a score is above 0.001."""
    total = 0.0
    for image in range(len(reference.raw)):
        boxes = [box_convert(one.boxes[image].T, "cxcywh", "xyxy") for one in (reference, other)]
        overlaps = box_iou(*boxes).diagonal().numpy()
        ours, theirs = (one.scores[image].numpy() for one in (reference, other))
        for anchor in range(ours.shape[1]):
            scores = [max(pair) for pair in zip(ours[:, anchor], theirs[:, anchor], strict=True)]
            scores = [score if score > 0.001 else 0.0 for score in scores]
            total += max(scores) ** 3 * (1 - overlaps[anchor])
            total += 0.1 * sum(np.square(scores) * np.abs(ours[:, anchor] - theirs[:, anchor]))
    return total


def mask_distance(reference, other):
    """What the masks of the hundred best anchors of an image differ by inside the float network's boxes."""
    total = 0.0
    for image in range(len(reference.raw)):
        scores = np.maximum(reference.scores[image].numpy(), other.scores[image].numpy()).max(0)
        for anchor in np.argsort(-scores)[:100]:
            box = reference.boxes[image, :, anchor]
            masks = [1 / (1 + np.exp(-sums_inside(one, box, image, anchor))) for one in (reference, other)]
            low, high = np.minimum(*masks).sum(), np.maximum(*masks).sum()
            total += scores[anchor] ** 3 * (1 - (low + 1e-6) / (high + 1e-6))
    return total


@pytest.mark.parametrize("rows", [slice(0, 2), SCORES, MASKS, None])
def test_it_is_that_of_boxes_and_scores_and_what_masks_add(rows):
    """Of other boxes, scores, coefficients or prototypes."""
    reference = predicted(150)
    other, _ = noisy(reference, rows, torch.randn if rows is None else torch.rand)
    both = [Prediction(torch.cat([one.boxes, one.scores], 1)) for one in (reference, other)]
    expected = box_distance(*both)
    assert float(distance(*both, SIZE)) == pytest.approx(expected, rel=1e-4, abs=1e-3)
    expected += mask_distance(reference, other)
    assert float(distance(reference, other, SIZE)) == pytest.approx(expected, rel=1e-4)
    assert expected > 0.1


def test_its_scale_is_that_of_no_box_in_its_place():
    raw = predicted(150).raw[:, :7]
    plain, away = Prediction(raw), Prediction(torch.cat([raw[:, :4] + 1000, raw[:, 4:]], 1))
    assert float(distance(plain, away, SIZE) / weight(plain)) == pytest.approx(1, abs=0.01)
