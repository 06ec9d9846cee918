"""What an evaluation keeps of each image, and what follows from all of it: AP, and AP on resampled images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from utils.core.errors import DataError
from utils.core.resampled import Resampled
from utils.core.score import Score
from utils.evaluation.bootstrap import Outcomes, resample
from utils.evaluation.metrics import ClassScores, match, score


@dataclass
class Statistics:
    """What is kept of each batch of a network's detections, on the runner's device until the end.

    Attributes:
        correct: of each image bool `[n, 10]`, see `metrics.match`.
        detections: scores and classes, `[n, 2]`.
        labels: their classes, `[m]`.
        correct_masks: as `correct`, by masks; None where there are none.
    """

    correct: list[Tensor] = field(default_factory=list)
    detections: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"images": 0.0, "metrics": 0.0})
    correct_masks: list[Tensor] | None = None

    def add(
        self, found: Sequence[Tensor], labels: Sequence[Tensor], paths: Sequence[str],
        mask_overlaps: Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Take in a batch: for each image detections `[n, 6]` and labels `[m, 5]`, both in the image's pixels.

        `mask_overlaps` are IoU of their masks, `[m, n]`.
        """
        self.correct += match(found, labels)
        if mask_overlaps is not None:
            self.correct_masks = [*(self.correct_masks or ()), *match(found, labels, mask_overlaps)]
        self.detections += _columns(found, slice(4, 6))
        self.labels += _columns(labels, 0)
        self.paths += paths

    def extend(self, part: Mapping[str, list[Any]]) -> None:
        """Take in what `to_plain` of another gave."""
        for name, rows in part.items():
            setattr(self, name, [*(getattr(self, name) or ()), *rows])

    def to_plain(self) -> dict[str, list[Any]]:
        """Lists of tensors on the CPU and of paths, as torch.save takes them."""
        names = ["correct", "detections", "labels", *(["correct_masks"] if self.correct_masks is not None else ())]
        tensors = {name: [one.cpu() for one in getattr(self, name)] for name in names}
        return {**tensors, "paths": list(self.paths)}

    def resampled(self) -> Resampled | None:
        """AP on resamplings of the images, see `bootstrap.resample`; it takes seconds for 5,000 images."""
        return self._resampled(self.correct)

    def mask_resampled(self) -> Resampled | None:
        """The same of masks; None where there are none."""
        return None if self.correct_masks is None else self._resampled(self.correct_masks)

    def score_resampled(self) -> Resampled | None:
        """The same of `Score.decides`."""
        boxes, masks = self.resampled(), self.mask_resampled()
        if boxes is None or masks is None:
            return boxes
        return Resampled.of(boxes.images, ((a + b) / 2 for a, b in zip(boxes.ap, masks.ap, strict=True)))

    def _resampled(self, correct: Sequence[Tensor]) -> Resampled | None:
        lengths = [torch.tensor([len(one) for one in rows], dtype=torch.long) for rows in (correct, self.labels)]
        owners = [torch.arange(len(self.paths)).repeat_interleave(length).numpy() for length in lengths]
        hits, detections, labels = (torch.cat(list(rows)).cpu() for rows in (correct, self.detections, self.labels))
        confidence, classes = detections.unbind(1)
        return resample(
            Outcomes(
                self.paths, owners[0], hits.numpy(), confidence.numpy(), classes.numpy(), owners[1], labels.numpy()
            )
        )

    def score(self) -> Score:
        """AP, the mean over classes.

        Raises:
            DataError: there was no image.
        """
        masks = self.mask_scores()
        return Score(self.scores().mean()[3], masks.mean()[3] if masks else None)

    def scores(self) -> ClassScores:
        """AP, precision and recall of each class.

        Raises:
            DataError: there was no image.
        """
        return self._scores(self.correct)

    def mask_scores(self) -> ClassScores | None:
        """The same of masks; None where there are none."""
        return None if self.correct_masks is None else self._scores(self.correct_masks)

    def _scores(self, hits: list[Tensor]) -> ClassScores:
        if not self.paths:
            raise DataError("no image could be decoded")
        correct, detections, labels = map(torch.cat, (hits, self.detections, self.labels))
        if detections.is_cuda:  # which sorts in no time
            order = detections[:, 0].argsort(descending=True, stable=True)
            order = order[detections[order, 1].argsort(stable=True)]
            correct, detections = correct[order], detections[order]
        correct, confidence, classes, labels = (rows.cpu().numpy() for rows in (correct, *detections.unbind(1), labels))
        return score(correct, confidence, classes, labels)


def _columns(rows: Sequence[Tensor], which: int | slice) -> list[Tensor]:
    """Some columns of each image's rows, which lie one behind the other: so a GPU joins thousands of them at once."""
    return list(torch.cat(list(rows))[:, which].contiguous().split([len(one) for one in rows]))
