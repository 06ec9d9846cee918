"""`known_images` with outlines: labels are polygons, and the 'network' knows masks too, with errors.

Its prototypes are the masks of its first answers, one each; the coefficients of the others are drawn at random.
"""

import json
import math
from dataclasses import dataclass
from functools import cache

import cv2
import numpy as np
import torch
from known_images import MIXED, KnowingModel, Sample, coco_json, export_answers, write_set
from torch import Tensor, nn

PROTOTYPES = 32  # upstream's val.py assumes so many
STRIDE = 4


@dataclass(frozen=True)
class OutlinedSample(Sample):
    """A sample and the outline of each label, float64 `[points, 2]` x, y in pixels of the image."""

    outlines: tuple[np.ndarray, ...] = ()


def write_outlined_set(folder, count=40, sizes=MIXED, names=("cat", "dog", "owl"), seed=0, splits=("val",)):
    """A set as `write_set` makes it, with polygons in label files and annotations."""
    rng = np.random.default_rng(seed + 1)
    samples = []
    for sample in write_set(folder, count, sizes, names, seed, splits=splits):
        outlines = tuple(_outline(rng, box) for box in sample.labels[:, 1:])
        lines = []
        for label, points in zip(sample.labels[:, 0], outlines, strict=True):
            fractions = (points / sample.size).clip(0, 1).flatten()
            lines.append(f"{int(label)} " + " ".join(f"{value:.6f}" for value in fractions) + "\n")
        (folder / "labels/val" / f"{sample.path.stem}.txt").write_text("".join(lines))
        samples.append(OutlinedSample(**{**vars(sample), "outlines": outlines}))
    content = coco_json(samples, names)
    outlines = [points for sample in samples for points in sample.outlines]
    for annotation, points in zip(content["annotations"], outlines, strict=True):
        annotation["segmentation"] = [points.flatten().tolist()]
        annotation["area"] = float(cv2.contourArea(points.astype(np.float32)))
    (folder / "annotations/instances_val.json").write_text(json.dumps(content))
    return samples


def _outline(rng: np.random.Generator, box: np.ndarray) -> np.ndarray:
    """A star-shaped polygon that touches all sides of a box."""
    angles = np.sort(rng.uniform(0, 2 * math.pi, int(rng.integers(6, 13))))
    points = np.stack([np.cos(angles), np.sin(angles)], 1) * rng.uniform(0.5, 1, (len(angles), 1))
    points = (points - points.min(0)) / (points.max(0) - points.min(0))
    return box[:2] + points * (box[2:] - box[:2])


class KnowingMasks(KnowingModel):
    """`[B, 3, H, W]` → `([B, 4 + nc + 32, anchors], (maps, coefficients, prototypes [B, 32, H / 4, W / 4]))`."""

    def __init__(self, samples, names, imgsz):
        super().__init__(samples, names, imgsz)
        self.model = nn.Sequential(nn.Identity())
        self.model[0].nc, self.model[0].nm = len(names), PROTOTYPES  # what val.py, and ours, ask a segment head for

    def forward(self, images: Tensor, augment: bool = False) -> tuple[Tensor, tuple[list[Tensor], Tensor, Tensor]]:
        raw = super().forward(images)
        known = [self._draw(self.index(image), *image.shape[1:]) for image in images]
        coefficients, prototypes = (torch.stack(parts).to(images) for parts in zip(*known, strict=True))
        return torch.cat([raw, coefficients], 1), ([], coefficients, prototypes)

    def index(self, image: Tensor) -> int:
        """Which sample this is; an image without a colour, as it is asked about its prototypes with, counts as one."""
        return max(super().index(image), 0)

    @cache  # noqa: B019
    def _draw(self, index: int, *shape: int) -> tuple[Tensor, Tensor]:
        """Coefficients and prototypes of a sample in an input of this height and width."""
        sample = self.samples[index]
        rng = np.random.default_rng(index)
        coefficients = torch.from_numpy(rng.normal(0, 0.3, (PROTOTYPES, self.anchors))).float()
        coefficients[:, :PROTOTYPES] = torch.eye(PROTOTYPES, self.anchors)[:, :PROTOTYPES]
        prototypes = np.full((PROTOTYPES, shape[0] // STRIDE, shape[1] // STRIDE), -4.0)
        scale, offset = self.placed(sample, shape)
        for place, answer in enumerate(sample.answers[:PROTOTYPES]):
            points = _fitted(rng, sample, answer) * scale + offset
            filled = cv2.fillPoly(np.zeros(shape, np.uint8), [points.astype(np.int32)], 1).astype(np.float64)
            blocks = cv2.resize(filled, prototypes.shape[:0:-1], interpolation=cv2.INTER_AREA)  # means, exactly
            prototypes[place] = blocks * 8 - 4 + rng.normal(0, 1, blocks.shape)
        return coefficients, torch.from_numpy(prototypes).float()


def _fitted(rng: np.random.Generator, sample: OutlinedSample, answer: np.ndarray) -> np.ndarray:
    """The outline of the label that lies nearest, in the answer's box; without labels a new one."""
    box = answer[1:5]
    if not len(sample.labels):
        return _outline(rng, box)
    nearest = np.abs(sample.labels[:, 1:] - box).sum(1).argmin()
    low, high = sample.labels[nearest, 1:3], sample.labels[nearest, 3:]
    return box[:2] + (sample.outlines[nearest] - low) / (high - low) * (box[2:] - box[:2])


def masks_by_torch(model: KnowingMasks, image: np.ndarray, rows: list) -> list[np.ndarray]:
    """Masks bool `[H, W]` of `(x1, y1, x2, y2, score)` in a BGR image of the input's size, enlarged by torch."""
    raw, (_, coefficients, prototypes) = model(torch.from_numpy(image[..., ::-1].transpose(2, 0, 1).copy())[None] / 255)
    (height, width), masks = image.shape[:2], []
    y, x = np.mgrid[:height, :width]
    for x1, y1, x2, y2, score in rows:
        anchor = (raw[0, 4:7].max(0).values - score).abs().argmin()
        sums = torch.einsum("k,khw->hw", coefficients[0, :, anchor], prototypes[0]).sigmoid()
        wide = torch.nn.functional.interpolate(sums[None, None], (height, width), mode="bilinear")[0, 0]
        masks.append((wide.numpy() > 0.5) & (x >= x1) & (x < x2) & (y >= y1) & (y < y2))
    return masks


def export_masks(model, path, batch=None, task="segment"):
    """Write the answers as an ONNX file, as a segmentation network's; `batch` is fixed where it is given."""
    return export_answers(model, path, batch, model.imgsz, task=task)
