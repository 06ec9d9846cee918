"""Non-maximum suppression of a whole batch at once, for a GPU: no step there waits for a single image.

It keeps exactly what greedy suppression keeps. A box goes if a better box that stays overlaps it; starting from "all
stay" and applying that again and again, the first n boxes are right after n steps at most, and usually all are after a
few: the longest chain of boxes that decide about each other is short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 24  # pairs of boxes that are looked at together: some hundred MB
STEPS = 8  # between two looks at whether anything still changes


def suppress_batch(
    rows: Tensor, image: Tensor, images: int, iou_thres: float, max_det: int, shift: float, *,
    limit: int, first: int, one: Callable[[Tensor], Tensor],
) -> list[Tensor]:  # fmt: skip
    """Detections of each image, best first.

    Args:
        rows: `[n, 6]` xyxy, score, class, of all images together; further columns are kept.
        image: int64 `[n]`, the image that each row belongs to, ascending.
        images: how many there are.
        shift: pixels between the boxes of two classes, 0 for suppression across classes.
        limit: candidates of an image that take part at all, the best ones.
        first: candidates that take part at first; images where fewer than `max_det` remain of them are done again
            with four times as many.
        one: suppresses an image's sorted candidates by itself, when they are too many for a table of pairs.
    """
    order = rows[:, 4].argsort(descending=True, stable=True)
    order = order[image[order].argsort(stable=True)]
    rows, image = rows[order], image[order]
    counts = image.bincount(minlength=images)
    starts, sizes = counts.cumsum(0) - counts, counts.clamp(max=limit).tolist()
    found = [rows[:0]] * images
    again = []
    widths = [min(first, size) for size in sizes]
    for group in _alike(widths):
        width = widths[group[0]]
        index = torch.tensor(group, device=rows.device)
        column = torch.arange(width, device=rows.device)
        valid = column < counts[index, None]
        table = rows[(starts[index, None] + column).clamp_(max=len(rows) - 1)]  # [images, width, 6 or more]
        each = max(BLOCK // (width * width), 1)
        keep = torch.cat(
            [
                _stays(boxes[..., :4] + boxes[..., 5:6] * shift, mask, iou_thres)
                for boxes, mask in zip(table.split(each), valid.split(each), strict=True)
            ]
        )
        keep &= keep.cumsum(1) <= max_det
        kept = keep.sum(1).tolist()
        for number, rest, count in zip(group, table[keep].split(kept), kept, strict=True):
            found[number] = rest
            if sizes[number] > width and count < max_det:
                again.append(number)
    again.sort()
    if not again:
        return found
    if (4 * first) ** 2 > BLOCK * 4:
        results = [one(rows[image == index][: sizes[index]]) for index in again]
    else:
        place = torch.full((images,), -1, device=rows.device)
        place[again] = torch.arange(len(again), device=rows.device)
        theirs = place[image] >= 0
        results = suppress_batch(
            rows[theirs], place[image[theirs]], len(again), iou_thres, max_det, shift,
            limit=limit, first=4 * first, one=one,
        )  # fmt: skip
    for index, result in zip(again, results, strict=True):
        found[index] = result
    return found


def _alike(sizes: Sequence[int]) -> list[list[int]]:
    """Images with candidates in groups, the most candidates first: a table is as wide as the group's first needs it.

    The others of a group have more than half as many, so that at most three quarters of a table of pairs are in vain.
    """
    groups: list[list[int]] = []
    for index in sorted((i for i, size in enumerate(sizes) if size), key=lambda i: -sizes[i]):
        if groups and 2 * sizes[index] > sizes[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _stays(boxes: Tensor, valid: Tensor, iou_thres: float) -> Tensor:
    """Which boxes stay, bool `[B, n]`; `boxes` `[B, n, 4]`, best first, `valid` `[B, n]`."""
    low = torch.maximum(boxes[:, :, None, :2], boxes[:, None, :, :2])
    high = torch.minimum(boxes[:, :, None, 2:], boxes[:, None, :, 2:])
    side = (high - low).clamp_(min=0)
    shared = side[..., 0] * side[..., 1]  # prod(-1) would be a reduction
    area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
    over = shared / (area[:, :, None] + area[:, None, :] - shared) > iou_thres
    over = over.triu_(1).logical_and_(valid[:, :, None])  # [B, better, worse]
    keep = valid
    while True:
        before = keep
        for _ in range(STEPS):
            keep = valid > (over & keep[:, :, None]).any(1)
        if torch.equal(keep, before):
            return keep
