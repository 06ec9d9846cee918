"""What an evaluation found, and how it is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from utils.core.curves import Curves
from utils.core.score import AtThreshold, Resampled, Score
from utils.core.tasks import DETECT, DISPLAY_CONF, Task
from utils.core.text import aligned, plural
from utils.evaluation.batch import RaggedBatch
from utils.evaluation.metrics import Averages, EvalStatistics


@dataclass(frozen=True, kw_only=True)
class ClassResult(Averages):
    """One class: its scores, those of its masks if there are some, its labels, and how many images were evaluated."""

    id: int
    name: str
    images: int
    instances: int
    masks: Averages | None = None


def as_labels(detections: RaggedBatch) -> RaggedBatch:
    """Detections `[n, 6]` of confidence DISPLAY_CONF at least, as labels of each image: class and xyxy, `[m, 5]`."""
    confident = detections.flat[:, 4] >= DISPLAY_CONF
    counts = detections.owners()[confident].bincount(minlength=len(detections)).tolist()
    return RaggedBatch(detections.flat[confident][:, [5, 0, 1, 2, 3]], counts)


@dataclass(frozen=True)
class Reference:
    """What the float network detects, as labels that another network's detections are compared with (`as_labels`).

    Attributes:
        threshold: the float network's confidence of best F1.
        detections: of each image of this process by path, float `[m, 5]`.
    """

    threshold: float
    detections: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What an evaluation measures beside scores: the fields of `EvalResult` with these names."""

    task: Task
    input_size: str
    measured_on: str
    ms: dict[str, float]
    not_finite: int


@dataclass(frozen=True, kw_only=True)
class EvalResult(Averages):
    """What an evaluation found.

    Attributes:
        ap, ap50, precision, recall: fractions, means over the classes that have labels, as upstream's val.py has them.
        per_class, images, instances: those classes, images evaluated and labels on them.
        ms: milliseconds per image for `preprocess`, `inference`, `nms`, without the first batch if there are more; of
            several processes those of the main one.
        coco, mask_coco: pycocotools' statistics (see `coco.STATISTICS`), with `save_json` and annotations.
        seconds: wall time of all of it.
        left_out: images that could not be read, one line each.
        measured_on: what ran the network, where, at which input.
        not_finite: images for which the network gave NaN or infinity; such boxes are left out.
        statistics: what AP was computed from, image by image; of several processes the main one has it.
        masks: scores of masks; None for detection.
        input_size: of the images that went in, such as '640x640', or 'up to 640, rectangular'.
        threshold, f1: the confidence of best F1; its mean over classes at each of metrics.CONFIDENCES, `[1000]`.
        groups: how many groups of images are resampled; 0: each image by itself.
        limited: these are not all images of the split.
        at: what is found and missed at the reference's threshold, or at its own where there is none.
        agreement: AP with the reference's detections in place of labels, 1 for the reference itself; None without one.
        reference: this network's detections, if they were asked for.
        disagreements: of each image, by path, how many confident detections of this network or of the reference have
            no partner in the other; empty without a reference.
        curves: of precision, recall and F1, and a confusion matrix, with `EvalConfig.curves`.
        weights_bytes: of the weights as the network computes with them; None where that is not known.
    """

    per_class: tuple[ClassResult, ...]
    images: int
    instances: int
    ms: dict[str, float]
    left_out: tuple[str, ...]
    measured_on: str
    coco: dict[str, float] | None = None
    seconds: float = 0.0
    not_finite: int = 0
    statistics: EvalStatistics | None = field(default=None, repr=False, compare=False)
    masks: Averages | None = None
    mask_coco: dict[str, float] | None = None
    task: Task = DETECT
    input_size: str = ""
    threshold: float = 0.0
    f1: tuple[float, ...] = ()
    groups: int = 0
    limited: bool = False
    at: AtThreshold | None = None
    agreement: float | None = None
    agreement_resampled: Resampled | None = None
    reference: Reference | None = field(default=None, repr=False, compare=False)
    disagreements: Mapping[str, int] = field(default_factory=dict, repr=False)
    curves: Curves | None = field(default=None, repr=False)
    weights_bytes: int | None = None

    @property
    def score(self) -> Score:
        """AP of boxes and masks."""
        return Score(self.ap, self.masks.ap if self.masks else None)

    @property
    def mark(self) -> str:
        """What a table says beside AP where it is no AP of a network that computes; empty for nothing."""
        return f"NaN or infinity for {self.not_finite} of {plural(self.images, 'image')}" if self.not_finite else ""


def result_table(result: EvalResult, *, per_class: bool) -> list[str]:
    """The result as upstream's val.py prints it, and what it was measured on."""
    names: tuple[str, ...] = ("Images", "Instances", "P", "R", "mAP50", "mAP50-95")
    if result.masks:
        names = (*names[:2], "Box(P", "R", "mAP50", "mAP50-95)", "Mask(P", "R", "mAP50", "mAP50-95)")
    rows = []
    shown: list[EvalResult | ClassResult] = [result, *(result.per_class if per_class else ())]
    for row in shown:
        parts = (row, row.masks) if row.masks else (row,)
        scores = (f"{value:.3g}" for part in parts for value in (part.precision, part.recall, part.ap50, part.ap))
        rows.append((row.name if isinstance(row, ClassResult) else "all", str(row.images), str(row.instances), *scores))
    lines = aligned(("Class", *names), rows)
    boxes = ", boxes" if result.masks else ""
    lines.append(f"By pycocotools' definition{boxes}: mAP50 {result.ap50_coco:.3f}, mAP50-95 {result.ap_coco:.3f}")
    if result.mark:
        lines.append(f"The network gives {result.mark}")
    if result.left_out:
        lines.append(f"{plural(len(result.left_out), 'image')} left out, which cannot be used")
    speeds = ", ".join(f"{value:.1f} ms {part}" for part, value in result.ms.items())
    lines.append(f"Speed: {speeds} per image; {result.measured_on}")
    return lines
