"""Non-maximum suppression of a whole batch at once, for a GPU: no step there waits for a single picture.

It keeps exactly what greedy suppression keeps. A box goes if a better box that stays overlaps it; starting from "all
stay" and applying that again and again, the first n boxes are right after n steps at most, and usually all are after a
few: the longest chain of boxes that decide about each other is short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 24  # pairs of boxes that are looked at together: some hundred MB
STEPS = 8  # between two looks at whether anything still changes


def suppress_batch(
    rows: Tensor, picture: Tensor, pictures: int, iou_thres: float, max_det: int, shift: float, *,
    limit: int, first: int, one: Callable[[Tensor], Tensor],
) -> list[Tensor]:  # fmt: skip
    """Detections of each picture, best first.

    Args:
        rows: `[n, 6]` xyxy, score, class, of all pictures.
        picture: int64 `[n]`, which picture each row is of, ascending.
        pictures: how many there are.
        shift: pixels between the boxes of two classes, 0 for suppression across classes.
        limit: candidates of a picture that take part at all, the best ones.
        first: candidates that take part at first; pictures where fewer than `max_det` remain of them are done again
            with four times as many.
        one: suppresses a picture's sorted candidates by itself, when they are too many for a table of pairs.
    """
    order = rows[:, 4].argsort(descending=True, stable=True)
    order = order[picture[order].argsort(stable=True)]
    rows, picture = rows[order], picture[order]
    counts = picture.bincount(minlength=pictures)
    rank = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[picture]
    sizes = counts.clamp(max=limit).tolist()
    width = min(first, max(sizes, default=0))
    inside = rank < width
    table = rows.new_zeros((pictures, width, 6))
    table[picture[inside], rank[inside]] = rows[inside]
    valid = torch.arange(width, device=rows.device) < counts[:, None]
    each = max(BLOCK // max(width * width, 1), 1)
    keep = torch.cat(
        [
            _stays(boxes[..., :4] + boxes[..., 5:] * shift, mask, iou_thres)
            for boxes, mask in zip(table.split(each), valid.split(each), strict=True)
        ]
    )
    keep &= keep.cumsum(1) <= max_det
    kept = keep.sum(1).tolist()
    found = list(table[keep].split(kept))
    again = [i for i, (size, count) in enumerate(zip(sizes, kept, strict=True)) if size > width and count < max_det]
    if not again:
        return found
    if (4 * first) ** 2 > BLOCK * 4:
        results = [one(rows[picture == index][: sizes[index]]) for index in again]
    else:
        place = torch.full((pictures,), -1, device=rows.device)
        place[again] = torch.arange(len(again), device=rows.device)
        theirs = place[picture] >= 0
        results = suppress_batch(
            rows[theirs], place[picture[theirs]], len(again), iou_thres, max_det, shift,
            limit=limit, first=4 * first, one=one,
        )  # fmt: skip
    for index, result in zip(again, results, strict=True):
        found[index] = result
    return found


def _stays(boxes: Tensor, valid: Tensor, iou_thres: float) -> Tensor:
    """Which boxes stay, bool `[B, n]`; `boxes` `[B, n, 4]`, best first, `valid` `[B, n]`."""
    low = torch.maximum(boxes[:, :, None, :2], boxes[:, None, :, :2])
    high = torch.minimum(boxes[:, :, None, 2:], boxes[:, None, :, 2:])
    shared = (high - low).clamp_(min=0).prod(-1)
    area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
    over = shared / (area[:, :, None] + area[:, None, :] - shared) > iou_thres
    over = over.triu_(1).logical_and_(valid[:, :, None])  # [B, better, worse]
    keep = valid
    while True:
        before = keep
        for _ in range(STEPS):
            keep = valid & ~(over & keep[:, :, None]).any(1)
        if torch.equal(keep, before):
            return keep
