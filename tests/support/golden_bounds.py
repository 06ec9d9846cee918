"""Compare numbers and detections with golden ones, within what processors differ by.

The instruction set and the number of threads decide in which order floats are added, and so how their sums round. In a
float network that changes the last digits of a score. In an INT8 network a value that lies beside a border between two
integers changes by a whole step of its scale, and later layers enlarge that. A golden number has a bound that is a few
times the largest difference that was measured; the measured one is written beside it.

Every function returns a line for each difference, and an empty list where there is none.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations
from pathlib import Path


@dataclass(frozen=True)
class Bound:
    """How far a number may be from the golden one: `absolute`, plus `relative` times the golden one's magnitude."""

    absolute: float = 0.0
    relative: float = 0.0

    def allows(self, number: float, golden: float) -> bool:
        return abs(number - golden) <= self.absolute + self.relative * abs(golden)


def different_numbers(
    numbers: Mapping[str, float], golden: Mapping[str, float], bounds: Mapping[str, Bound]
) -> list[str]:
    """Compare each number with the golden one of its name; a name that only one side has is a difference."""
    lines = [f"{name}: only on one side" for name in sorted(set(numbers) ^ set(golden))]
    for name in sorted(set(numbers) & set(golden)):
        if not bounds[name].allows(numbers[name], golden[name]):
            lines.append(f"{name}: {numbers[name]:.7g}, golden {golden[name]:.7g}, {bounds[name]}")
    return lines


# Scores are written with five digits, boxes with three. Measured with two float networks on ten images each: boxes of
# one object have an IoU of at least 0.9999, scores differ by 0.00001, sizes of masks by one pixel. A box of 40 pixels
# that moves by half a pixel has an IoU of 0.975.
SAME_BOX = 0.98
SCORE = Bound(absolute=0.001)
MASK_SIZE = Bound(absolute=4, relative=0.01)
# In an INT8 network one value that rounds to another integer moves all boxes of its image by more than this.
UNCHANGED_BOX = 0.999


@dataclass(frozen=True)
class Detection:
    """A detection of a predictions file; the box is x, y, width and height in pixels."""

    image: int
    label: int
    score: float
    x: float
    y: float
    width: float
    height: float
    mask_size: float | None = None  # pixels

    def as_text(self) -> str:
        """Write the fields in one line, as golden files have them; without a mask there is no size at the end."""
        return " ".join(str(field) for field in astuple(self) if field is not None)

    @classmethod
    def of_text(cls, line: str) -> "Detection":
        """Read what `as_text` wrote."""
        image, label, *numbers = line.split()
        return cls(int(image), int(label), *map(float, numbers))


def detections_in(file: Path, lowest_score: float = 0.0) -> list[Detection]:
    """Read those of a predictions file whose score is above `lowest_score`, ordered by image and class."""
    from pycocotools import mask

    detections = []
    for entry in json.loads(file.read_text()):
        if entry["score"] > lowest_score:
            size = float(mask.decode(entry["segmentation"]).sum()) if "segmentation" in entry else None
            box = map(float, entry["bbox"])
            detections.append(Detection(entry["image_id"], entry["category_id"], entry["score"], *box, size))
    return sorted(detections, key=lambda detection: (detection.image, detection.label, detection.score))


def overlap(a: Detection, b: Detection) -> float:
    """Intersection over union of two boxes."""
    width = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
    height = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
    if width <= 0 or height <= 0:
        return 0.0
    return width * height / (a.width * a.height + b.width * b.height - width * height)


def overlapping_pairs(detections: Sequence[Detection], iou: float) -> int:
    """Count the pairs of boxes of one image and class that overlap by more than `iou`: it shows NMS's threshold."""
    groups: dict[tuple[int, int], list[Detection]] = {}
    for detection in detections:
        groups.setdefault((detection.image, detection.label), []).append(detection)
    return sum(overlap(*pair) > iou for group in groups.values() for pair in combinations(group, 2))


def different_detections(
    detections: Sequence[Detection], golden: Sequence[Detection], lowest_score: float
) -> list[str]:
    """Match detections by image, class and IoU, and compare the scores and mask sizes of those that match.

    Args:
        detections: of a run.
        golden: of the golden file.
        lowest_score: that both lists were cut at; a detection beside it may have no partner.
    """
    lines, alone = [], []
    others = list(detections)
    for detection in golden:
        partner = _partner(detection, others, SAME_BOX)
        if partner is None:
            alone.append(detection)
            continue
        others.remove(partner)
        if not SCORE.allows(partner.score, detection.score):
            lines.append(f"score: {partner}, golden {detection}")
        if not _same_mask_size(partner.mask_size, detection.mask_size):
            lines.append(f"mask: {partner}, golden {detection}")
    alone += others
    return lines + [f"only on one side: {one}" for one in alone if not SCORE.allows(one.score, lowest_score)]


def unchanged_share(detections: Sequence[Detection], golden: Sequence[Detection]) -> float:
    """Compute which share of the golden detections has a partner with an IoU of at least UNCHANGED_BOX."""
    partners = [_partner(detection, detections, UNCHANGED_BOX) for detection in golden]
    return sum(partner is not None for partner in partners) / len(golden)


def _partner(detection: Detection, others: Sequence[Detection], least_iou: float) -> Detection | None:
    """The one of the same image and class that overlaps most, if it overlaps by `least_iou`."""
    candidates = [other for other in others if (other.image, other.label) == (detection.image, detection.label)]
    best = max(candidates, key=lambda other: overlap(other, detection), default=None)
    if best is None or overlap(best, detection) < least_iou:
        return None
    return best


def _same_mask_size(size: float | None, golden: float | None) -> bool:
    if size is None or golden is None:
        return size is golden
    return MASK_SIZE.allows(size, golden)
