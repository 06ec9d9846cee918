"""What an evaluation keeps of each image, and what follows from all of it: AP, and AP on resampled images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.core.errors import DataError
from utils.core.resampled import Resampled
from utils.core.score import Score
from utils.evaluation.bootstrap import Outcomes, resample
from utils.evaluation.metrics import ClassScores, match, score
from utils.evaluation.per_image import PerImage


@dataclass
class Statistics:
    """What is kept of each batch of a network's detections, on the runner's device until the end.

    Attributes:
        correct: of each batch, for each image bool `[n, 10]`, see `metrics.match`.
        detections: scores and classes, `[n, 2]`.
        labels: their classes, `[m]`.
        paths: of all images.
        correct_masks: as `correct`, by masks; None where there are none.
    """

    correct: list[PerImage] = field(default_factory=list)
    detections: list[PerImage] = field(default_factory=list)
    labels: list[PerImage] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"images": 0.0, "metrics": 0.0})
    correct_masks: list[PerImage] | None = None

    def add(
        self, found: Sequence[Tensor], labels: Sequence[Tensor], paths: Sequence[str],
        mask_overlaps: Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Take in a batch: for each image detections `[n, 6]` and labels `[m, 5]`, both in the image's pixels.

        `mask_overlaps` are IoU of their masks, `[m, n]`.
        """
        found, labels = PerImage.of(found), PerImage.of(labels)
        self.correct.append(match(found, labels))
        if mask_overlaps is not None:
            self.correct_masks = [*(self.correct_masks or ()), match(found, labels, mask_overlaps)]
        self.detections.append(PerImage(found.flat[:, 4:6].contiguous(), found.counts))
        self.labels.append(PerImage(labels.flat[:, 0].contiguous(), labels.counts))
        self.paths += paths

    def extend(self, part: Mapping[str, list[Any]]) -> None:
        """Take in what `to_plain` of another gave."""
        for name, rows in part.items():
            more = rows if name == "paths" or not rows else [PerImage.of(rows)]
            setattr(self, name, [*(getattr(self, name) or ()), *more])

    def to_plain(self) -> dict[str, list[Any]]:
        """Lists of tensors on the CPU and of paths, as torch.save takes them."""
        names = ["correct", "detections", "labels", *(["correct_masks"] if self.correct_masks is not None else ())]
        tensors = {name: _images(getattr(self, name)) for name in names}
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

    def _resampled(self, correct: Sequence[PerImage]) -> Resampled | None:
        counts = [[count for one in rows for count in one.counts] for rows in (correct, self.labels)]
        owners = [np.arange(len(self.paths)).repeat(count) for count in counts]
        hits, detections, labels = (_together(rows).cpu() for rows in (correct, self.detections, self.labels))
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

    def _scores(self, hits: Sequence[PerImage]) -> ClassScores:
        if not self.paths:
            raise DataError("no image could be decoded")
        correct, detections, labels = map(_together, (hits, self.detections, self.labels))
        if detections.is_cuda:  # which sorts in no time
            order = detections[:, 0].argsort(descending=True, stable=True)
            order = order[detections[order, 1].argsort(stable=True)]
            correct, detections = correct[order], detections[order]
        correct, confidence, classes, labels = (rows.cpu().numpy() for rows in (correct, *detections.unbind(1), labels))
        return score(correct, confidence, classes, labels)


def _together(batches: Iterable[PerImage]) -> Tensor:
    """The rows of all images of all batches, `[n, ...]`."""
    return torch.cat([batch.flat for batch in batches])


def _images(batches: Iterable[PerImage]) -> list[Tensor]:
    """The rows of each image in memory of their own on the CPU: a view would take its batch with it into a file."""
    return [rows.clone() for batch in batches for rows in PerImage(batch.flat.cpu(), batch.counts)]
