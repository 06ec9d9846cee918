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
    """What is kept of each batch of a network's detections, on the runner's device until the end."""

    correct: list[Tensor] = field(default_factory=list)
    detections: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"images": 0.0, "metrics": 0.0})

    def add(self, found: Sequence[Tensor], labels: Sequence[Tensor], paths: Sequence[str]) -> None:
        """Take in a batch: for each image detections `[n, 6]` and labels `[m, 5]`, both in the image's pixels."""
        self.correct += match(found, labels)
        self.detections += [one[:, 4:] for one in found]
        self.labels += [one[:, 0] for one in labels]
        self.paths += paths

    def extend(self, part: Mapping[str, list[Any]]) -> None:
        """Take in what `to_plain` of another gave."""
        for name, rows in part.items():
            getattr(self, name).extend(rows)

    def to_plain(self) -> dict[str, list[Any]]:
        """Lists of tensors on the CPU and of paths, as torch.save takes them."""
        tensors = {name: [one.cpu() for one in getattr(self, name)] for name in ("correct", "detections", "labels")}
        return {**tensors, "paths": list(self.paths)}

    def resampled(self) -> Resampled | None:
        """AP on resamplings of the images, see `bootstrap.resample`; it takes seconds for 5,000 images."""
        lengths = [torch.tensor([len(one) for one in rows], dtype=torch.long) for rows in (self.correct, self.labels)]
        owners = [torch.arange(len(self.paths)).repeat_interleave(length).numpy() for length in lengths]
        correct, detections, labels = (torch.cat(rows).cpu() for rows in (self.correct, self.detections, self.labels))
        confidence, classes = detections.unbind(1)
        return resample(
            Outcomes(
                self.paths, owners[0], correct.numpy(), confidence.numpy(), classes.numpy(), owners[1], labels.numpy()
            )
        )

    def score(self) -> Score:
        """AP, the mean over classes.

        Raises:
            DataError: there was no image.
        """
        return Score(self.scores().mean()[3])

    def scores(self) -> ClassScores:
        """AP, precision and recall of each class.

        Raises:
            DataError: there was no image.
        """
        if not self.paths:
            raise DataError("no image could be decoded")
        correct, detections, labels = map(torch.cat, (self.correct, self.detections, self.labels))
        order = detections[:, 0].argsort(descending=True, stable=True)  # a GPU does in no time what `score` would
        correct, confidence, classes, labels = (
            rows.cpu().numpy() for rows in (correct[order], *detections[order].unbind(1), labels)
        )
        return score(correct, confidence, classes, labels)
