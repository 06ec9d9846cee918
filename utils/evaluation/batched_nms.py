"""Non-maximum suppression of a whole batch at once, for a GPU, for which the CPU then waits a few times only.

It keeps exactly what greedy suppression keeps. A box goes if a better box that stays overlaps it; starting from "all
stay" and applying that again and again, the first n boxes are right after n steps at most, and usually all are after a
few: the longest chain of boxes that decide about each other is short. So a fixed number of steps is taken, and whether
anything still changed is asked once, together with the numbers of boxes that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from utils.core.device import sent
from utils.evaluation.per_image import PerImage

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 24  # pairs of boxes whose overlaps are computed together: some hundred MB
KEPT = 1 << 26  # pairs in tables that are there at the same time, a byte each; an image with more has none
SAVED = 1 << 23  # pairs that take a GPU as long as the CPU takes to start the work on one more table
STEPS = 8  # between two looks at whether anything still changes


def suppress_batch(
    rows: Tensor, image: Tensor, images: int, iou_thres: float, max_det: int, shift: float, *,
    limit: int, first: int, one: Callable[[Tensor], Tensor],
) -> PerImage:  # fmt: skip
    """Detections of each image, best first.

    Args:
        rows: `[n, 6]` xyxy, score, class, of all images together; further columns are kept. No score is negative.
        image: int64 `[n]`, the image that each row belongs to, ascending.
        images: how many there are.
        shift: pixels between the boxes of two classes, 0 for suppression across classes.
        limit: candidates of an image that take part at all, the best ones.
        first: candidates that take part at first; images where fewer than `max_det` remain of them are done again
            with four times as many.
        one: says which of an image's sorted candidates stay, int64 `[m]`; it is asked when they are too many for a
            table of `KEPT` pairs.
    """
    order = _best_first(rows[:, 4], image)
    rows, image = rows[order], image[order]
    stays, kept = _staying(rows, image, images, iou_thres, max_det, shift, limit=limit, first=first, one=one)
    return PerImage(rows[stays], kept)


def _staying(
    rows: Tensor, image: Tensor, images: int, iou_thres: float, max_det: int, shift: float, *,
    limit: int, first: int, one: Callable[[Tensor], Tensor],
) -> tuple[Tensor, list[int]]:  # fmt: skip
    """Which rows stay, bool `[n]`, and how many of each image.

    Args:
        rows: as those of `suppress_batch`, which says what the others are; of each image best first.
    """
    counts = image.new_zeros(images).scatter_add_(0, image, torch.ones_like(image))
    starts, sizes = counts.cumsum(0) - counts, counts.clamp(max=limit).tolist()
    widths = [width if width**2 <= KEPT else 0 for width in (min(first, size) for size in sizes)]
    groups = _alike(widths)
    members = sent(torch.tensor([index for group in groups for index in group]), rows.device)
    blocks = [
        (some, width)
        for group, index in zip(groups, members.split([len(group) for group in groups]), strict=True)
        for width in [widths[group[0]]]
        for some in index.split(max(BLOCK // (width * width), 1))
    ]
    stays = rows.new_zeros(len(rows) + 1, dtype=torch.bool)  # the last is of places without a candidate
    number = []
    for part in _parts(blocks):
        tables = [_Table.of(rows, starts[some], counts[some], width, iou_thres, shift) for some, width in part]
        number += _settled(tables, stays, max_det)
        del tables  # before the next are made
    kept = [0] * images
    for index, count in zip((index for group in groups for index in group), number, strict=True):
        kept[index] = count
    stays = stays[:-1]
    again = [index for index, count in enumerate(kept) if sizes[index] > widths[index] and count < max_det]
    if not again:
        return stays, kept
    if (4 * first) ** 2 > KEPT:
        for index in again:
            theirs = (image == index).nonzero()[: sizes[index], 0]
            best = one(rows[theirs])
            stays.index_fill_(0, theirs, False).index_fill_(0, theirs[best], True)
            kept[index] = len(best)
        return stays, kept
    place = torch.full((images,), -1)
    place[again] = torch.arange(len(again))
    owner = sent(place, rows.device)[image]
    theirs = (owner >= 0).nonzero()[:, 0]
    results, numbers = _staying(
        rows[theirs], owner[theirs], len(again), iou_thres, max_det, shift, limit=limit, first=4 * first, one=one
    )
    for index, count in zip(again, numbers, strict=True):
        kept[index] = count
    return stays.index_copy_(0, theirs, results), kept


def _best_first(scores: Tensor, image: Tensor) -> Tensor:
    """The order by image, then best score first, then as they are: int64 `[n]`.

    The bits of a float32 that is not negative, read as an integer, have the order of its value.
    """
    return (image * 2**32 - scores.contiguous().view(torch.int32)).argsort(stable=True)


def _alike(sizes: Sequence[int]) -> list[list[int]]:
    """Images with candidates in groups, the most candidates first: a table is as wide as the group's first needs it.

    A group ends where a table of its own for the rest saves the most pairs, if these are enough.
    """
    groups: list[list[int]] = []
    rest = sorted((i for i, size in enumerate(sizes) if size), key=lambda i: -sizes[i])
    while rest:
        widest = sizes[rest[0]] ** 2
        saved = [(len(rest) - place) * (widest - sizes[i] ** 2) for place, i in enumerate(rest)]
        end = saved.index(max(saved)) if max(saved) > SAVED else len(rest)
        groups.append(rest[:end])
        rest = rest[end:]
    return groups


class _Table:
    """Candidates of some images, best first, and which of them overlap.

    Attributes:
        place: int64 `[B, n]`, the row of each candidate, or the number of all rows where there is none.
        keep: bool `[B, n]`, which candidates stay as far as is known.
        changed: bool, whether the last step changed anything.
    """

    def __init__(self, place: Tensor, valid: Tensor, over: Tensor) -> None:
        self.place, self.keep = place, valid
        self._valid, self._over = valid, over
        self.step()

    @classmethod
    def of(cls, rows: Tensor, starts: Tensor, counts: Tensor, width: int, iou_thres: float, shift: float) -> _Table:
        """Of images whose candidates begin at `starts` and are `counts`, int64 `[B]`; the first `width` take part."""
        column = torch.arange(width, device=rows.device)
        valid = column < counts[:, None]
        place = starts[:, None] + column
        table = rows[place.clamp(max=len(rows) - 1)]  # [B, width, 6 or more]
        over = _overlap(table[..., :4] + table[..., 5:6] * shift, iou_thres)
        over = over.triu_(1).logical_and_(valid[:, :, None])  # [B, better, worse]
        return cls(place.masked_fill_(~valid, len(rows)), valid, over)

    def step(self) -> None:
        """Take some steps."""
        before = keep = self.keep
        for _ in range(STEPS):
            before, keep = keep, self._valid > (self._over & keep[:, :, None]).any(1)
        self.keep, self.changed = keep, (keep != before).any()


def _overlap(boxes: Tensor, iou_thres: float) -> Tensor:
    """Which boxes `[B, n, 4]` overlap by more, bool `[B, n, n]`."""
    low = torch.maximum(boxes[:, :, None, :2], boxes[:, None, :, :2])
    high = torch.minimum(boxes[:, :, None, 2:], boxes[:, None, :, 2:])
    side = high.sub_(low).clamp_(min=0)
    shared = side[..., 0] * side[..., 1]  # prod(-1) would be a reduction
    area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
    union = (area[:, :, None] + area[:, None, :]).sub_(shared)
    return shared.div_(union) > iou_thres


def _parts(blocks: Sequence[tuple[Tensor, int]]) -> list[list[tuple[Tensor, int]]]:
    """The images of each table and its width, in lists of no more than `KEPT` pairs, and of one table at least."""
    parts: list[list[tuple[Tensor, int]]] = []
    room = 0
    for images, width in blocks:
        pairs = len(images) * width**2
        if not parts or pairs > room:
            parts.append([])
            room = KEPT
        parts[-1].append((images, width))
        room -= pairs
    return parts


def _settled(tables: Sequence[_Table], stays: Tensor, max_det: int) -> list[int]:
    """Mark the rows that stay in bool `[n + 1]`, and count them for each image, one table after the other."""
    while True:
        keeps = [table.keep & (table.keep.cumsum(1) <= max_det) for table in tables]
        numbers = torch.cat([keep.sum(1) for keep in keeps] + [table.changed.view(1) for table in tables]).tolist()
        changed = numbers[len(numbers) - len(tables) :]
        if not any(changed):
            break
        for table in (table for table, moved in zip(tables, changed, strict=True) if moved):
            table.step()
    for table, keep in zip(tables, keeps, strict=True):
        stays.scatter_(0, table.place.flatten(), keep.flatten())
    return numbers[: len(numbers) - len(tables)]
