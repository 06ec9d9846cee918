"""Non-maximum suppression against torchvision's own per-class one."""

import pytest
import torch
from torchvision.ops import batched_nms, box_convert

from utils.core.tasks import Prediction
from utils.evaluation import nms
from utils.evaluation.nms import packed_detections


def predictions(batch=2, classes=4, anchors=400, seed=0):
    """Crowded random boxes, so that suppression matters; `[B, 4 + classes, anchors]`."""
    generator = torch.Generator().manual_seed(seed)
    middle = torch.rand(batch, 2, anchors, generator=generator) * 200 + 60
    size = torch.rand(batch, 2, anchors, generator=generator) * 60 + 40
    scores = torch.rand(batch, classes, anchors, generator=generator) ** 3
    return torch.cat([middle, size, scores], 1)


def non_max_suppression(raw, *words, **options):
    """Of a detector's prediction."""
    return nms.non_max_suppression(Prediction(raw), *words, **options)


def suppress_together(prediction, conf, *words):
    """What a GPU runs for a batch."""
    return nms.suppress_together(prediction, nms.candidates(prediction, conf), *words)


def reference(one, conf, iou):
    """One image: every (box, class) above the threshold, suppressed within its class by torchvision."""
    boxes = box_convert(one[:4].T, "cxcywh", "xyxy")
    scores = one[4:].T
    anchor, kind = (scores > conf).nonzero().unbind(1)
    keep = batched_nms(boxes[anchor], scores[anchor, kind], kind, iou)
    return torch.cat([boxes[anchor], scores[anchor, kind, None], kind[:, None].float()], 1)[keep]


@pytest.mark.parametrize("classes", [1, 4])
@pytest.mark.parametrize(("conf", "iou"), [(0.001, 0.7), (0.25, 0.45)])
def test_agrees_with_torchvision(conf, iou, classes):
    raw = predictions(classes=classes)
    found = non_max_suppression(raw, conf, iou, max_det=10_000)
    for one, rows in zip(raw, found, strict=True):
        expected = reference(one, conf, iou)
        assert 20 < len(expected) < 0.9 * (one[4:] > conf).sum()  # something is kept, and something is suppressed
        torch.testing.assert_close(rows, expected, atol=2e-3, rtol=0)  # the class offset costs digits


def test_agnostic_suppresses_across_classes():
    raw = predictions(batch=1, classes=3)
    expected = reference(torch.cat([raw[0, :4], raw[0, 4:].amax(0, keepdim=True)]), 0.1, 0.5)
    found = non_max_suppression(raw, 0.1, 0.5, max_det=10_000, agnostic=True)[0]
    torch.testing.assert_close(found[:, :5], expected[:, :5])


@pytest.mark.parametrize("iou", [0.7, 0.05])  # at 0.05 few remain, so that more candidates have to take part
@pytest.mark.parametrize("max_det", [1, 17, 60])
def test_best_score_first_and_at_most_max_det(iou, max_det):
    full = non_max_suppression(predictions(), 0.001, iou, max_det=10_000)
    limited = non_max_suppression(predictions(), 0.001, iou, max_det=max_det)
    for rows, best in zip(limited, full, strict=True):
        assert rows[:, 4].diff().le(0).all()
        torch.testing.assert_close(rows, best[:max_det], atol=0, rtol=0)
    assert len(full[0]) > 60 if iou == 0.7 else len(full[0]) < 60


def test_only_the_best_candidates_take_part(monkeypatch):
    raw = predictions(batch=1)
    monkeypatch.setattr(nms, "MAX_CANDIDATES", 50)
    limited = non_max_suppression(raw, 0.001, 1.0, max_det=10_000)[0]
    best = raw[0, 4:].flatten().sort(descending=True).values[:50]
    torch.testing.assert_close(limited[:, 4], best)


def test_nothing_found():
    mixed = predictions(batch=2)
    mixed[0, 4:] = 0
    assert [len(rows) > 0 for rows in non_max_suppression(mixed, 0.25, 0.45)] == [False, True]
    assert non_max_suppression(torch.zeros(1, 6, 0), 0.25, 0.45)[0].shape == (0, 6)


def test_half_precision_is_computed_in_float32():
    """In float16 a class offset of 7680 × 9 would be infinite and the boxes of all high classes would coincide."""
    raw = predictions(classes=20).half()
    found = non_max_suppression(raw, 0.3, 0.5, max_det=10_000)
    expected = non_max_suppression(raw.float(), 0.3, 0.5, max_det=10_000)
    for rows, wanted in zip(found, expected, strict=True):
        assert rows.dtype == torch.float32
        torch.testing.assert_close(rows, wanted)
    assert {int(kind) for kind in found.flat[:, 5]} == set(range(20))


def test_boxes_that_are_not_finite_are_left_out():
    raw = predictions(batch=1)
    clean = non_max_suppression(raw[..., 2:], 0.1, 0.5)[0]
    raw[0, 0, 0], raw[0, 2, 1] = float("nan"), float("inf")
    found = non_max_suppression(raw, 0.1, 0.5)[0]
    assert found.isfinite().all()
    torch.testing.assert_close(found, clean)
    raw[0, 4:, 2] = float("nan")
    assert non_max_suppression(raw, 0.1, 0.5)[0].isfinite().all()


def test_equal_scores_keep_the_order_of_the_anchors():
    raw = torch.zeros(1, 5, 50)
    raw[0, 0] = torch.arange(50) * 100.0
    raw[0, 2:4] = 10
    raw[0, 4] = 0.5
    centres = non_max_suppression(raw, 0.1, 0.5)[0][:, [0, 2]].mean(1)
    assert centres.tolist() == [100.0 * i for i in range(50)]


@pytest.mark.parametrize("agnostic", [True, False])
@pytest.mark.parametrize(
    ("conf", "iou", "max_det"), [(0.001, 0.7, 300), (0.25, 0.45, 20), (0.001, 0.05, 50), (0.001, 0.01, 6)]
)
def test_all_images_at_once_give_the_same(conf, iou, max_det, agnostic):
    """What a GPU runs: among equal scores too, and where more than the first candidates have to take part."""
    raw = predictions(batch=5, anchors=150)
    raw[1, 4:] = (raw[1, 4:] * 8).round() / 8  # ties
    raw[2, 4:] = 0  # nothing found
    raw[3, 0, :20] = torch.nan
    raw[4, 4, :40] = torch.nan  # the other classes of these anchors count
    expected = non_max_suppression(raw, conf, iou, max_det=max_det, agnostic=agnostic)
    found = suppress_together(Prediction(raw), conf, iou, max_det, agnostic)
    assert [len(one) for one in found] == [len(one) for one in expected]
    for one, same in zip(found, expected, strict=True):
        assert torch.equal(one, same)
    assert any(len(one) > 5 for one in found)


@pytest.mark.parametrize("pairs", [1, 50_000, nms.PAIRS])
@pytest.mark.parametrize("max_det", [2, 20, 300])
def test_images_with_few_and_with_many_candidates_in_small_blocks(monkeypatch, pairs, max_det):
    """They are looked at in groups; from 4 * max_det on candidates wait until they are needed."""
    raw = predictions(batch=9, anchors=200)
    monkeypatch.setattr(nms, "PAIRS", pairs)
    for image, kept in enumerate((200, 0, 1, 90, 3, 200, 30, 12, 60)):
        raw[image, 4:, kept:] = 0
    for iou in (0.9, 0.4, 0.02):
        expected = non_max_suppression(raw, 0.001, iou, max_det=max_det)
        found = suppress_together(Prediction(raw), 0.001, iou, max_det, False)
        assert all(map(torch.equal, found, expected))
        assert [len(one) > 0 for one in found] == [True, False, *[True] * 7]
    assert [one.shape for one in suppress_together(Prediction(raw), 1.0, 0.5, 100, False)] == [(0, 6)] * 9


def test_a_long_chain_of_boxes_that_decide_about_each_other():
    """Each box overlaps only its neighbours: every second one stays, whatever the number of steps between looks."""
    raw = torch.zeros(1, 5, 101)
    raw[0, 0] = torch.arange(101) * 4.0
    raw[0, 1], raw[0, 2:4] = 50, 10
    raw[0, 4] = torch.linspace(0.9, 0.1, 101)
    found = suppress_together(Prediction(raw), 0.05, 0.3, 300, False)[0]
    assert found[:, 0].tolist() == [8.0 * index - 5 for index in range(51)]


def test_packed_detections_are_rows_and_what_lies_behind_them_is_zero():
    boxes, scores = torch.rand(2, 5, 4), torch.rand(2, 5, dtype=torch.float16)
    classes = torch.randint(0, 9, (2, 5), dtype=torch.int32)
    counts = torch.tensor([[2], [0]], dtype=torch.int32)
    outputs = {"num_dets": counts, "det_boxes": boxes, "det_scores": scores, "det_classes": classes}
    table = packed_detections(outputs)
    assert (table.shape, table.dtype) == ((2, 5, 6), torch.float32)
    for row in range(2):
        assert table[0, row].tolist() == [*boxes[0, row].tolist(), float(scores[0, row]), float(classes[0, row])]
    assert not table[0, 2:].any()
    assert not table[1].any()
