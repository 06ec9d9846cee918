"""The result of an evaluation, and its table."""

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
    """Scores of one class and of its masks, with its number of labels and the number of images evaluated."""

    id: int
    name: str
    images: int
    instances: int
    masks: Averages | None = None


def as_labels(detections: RaggedBatch) -> RaggedBatch:
    """Detections `[n, 6]` with a confidence of at least DISPLAY_CONF, as labels: class and xyxy, `[m, 5]`."""
    is_confident = detections.flat[:, 4] >= DISPLAY_CONF
    owners = detections.owners()[is_confident]
    counts = owners.bincount(minlength=len(detections)).tolist()
    labels = detections.flat[is_confident][:, [5, 0, 1, 2, 3]]
    return RaggedBatch(labels, counts)


@dataclass(frozen=True)
class Reference:
    """Detections of the FP32 model as labels (`as_labels`); other models' detections are compared with them.

    Attributes:
        threshold: the FP32 model's confidence of best F1.
        detections: for each image of this process, by path, float `[m, 5]`.
    """

    threshold: float
    detections: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measurements of an evaluation beside scores: the fields of `EvalResult` with these names."""

    task: Task
    input_size: str
    measured_on: str
    ms: dict[str, float]
    not_finite: int


@dataclass(frozen=True, kw_only=True)
class EvalResult(Averages):
    """Scores and measurements of one network on one split.

    Attributes:
        ap, ap50, precision, recall: fractions, means over the classes that have labels, as upstream's val.py has them.
        per_class, images, instances: those classes, images evaluated and labels on them.
        ms: milliseconds per image for `preprocess`, `inference`, `nms`, without the first batch if there are more; in
            several processes those of the main one.
        coco, mask_coco: pycocotools' statistics (see `coco.STATISTICS`), with `save_json` and annotations.
        seconds: wall time of all of it.
        left_out: images that could not be read, one line each.
        measured_on: runtime, device and input of the network, in words.
        not_finite: images for which the network gave NaN or infinity; such boxes are left out.
        statistics: detections against labels, image by image; only the main one of several processes has them.
        masks: scores of masks; None for detection.
        input_size: of the images that went in, such as '640x640', or 'up to 640, rectangular'.
        threshold, f1: the confidence of best F1; its mean over classes at each of metrics.CONFIDENCES, `[1000]`.
        groups: number of groups of images that are resampled; 0: each image by itself.
        limited: these are not all images of the split.
        at: precision, recall and counts at the reference's threshold, or at its own where there is none.
        agreement: AP with the reference's detections in place of labels, 1 for the reference itself; None without one.
        reference: this network's detections, if they were asked for.
        disagreements: path of each image → number of confident detections of this network or of the reference that
            have no partner in the other; empty without a reference.
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
        """Warning for tables if the network gave NaN or infinity, else ''."""
        if not self.not_finite:
            return ""
        return f"NaN or infinity for {self.not_finite} of {plural(self.images, 'image')}"


def result_table(result: EvalResult, *, per_class: bool) -> list[str]:
    """The result as upstream's val.py prints it, and what it was measured on."""
    titles = ["Class", "Images", "Instances"]
    if result.masks:
        titles += ["Box(P", "R", "mAP50", "mAP50-95)", "Mask(P", "R", "mAP50", "mAP50-95)"]
    else:
        titles += ["P", "R", "mAP50", "mAP50-95"]
    rows = [_table_row("all", result)]
    if per_class:
        rows += [_table_row(one_class.name, one_class) for one_class in result.per_class]
    lines = aligned(titles, rows)
    boxes = ", boxes" if result.masks else ""
    lines.append(f"By pycocotools' definition{boxes}: mAP50 {result.ap50_coco:.3f}, mAP50-95 {result.ap_coco:.3f}")
    if result.mark:
        lines.append(f"The model gives {result.mark}")
    if result.left_out:
        lines.append(f"{plural(len(result.left_out), 'image')} left out, which cannot be used")
    speeds = ", ".join(f"{value:.1f} ms {part}" for part, value in result.ms.items())
    lines.append(f"Speed: {speeds} per image; {result.measured_on}")
    return lines


def _table_row(name: str, scores: EvalResult | ClassResult) -> list[str]:
    """A row of the table: counts, then precision, recall, AP50 and AP of boxes and of masks."""
    row = [name, str(scores.images), str(scores.instances)]
    for part in (scores, scores.masks):
        if part is not None:
            row += [f"{value:.3g}" for value in (part.precision, part.recall, part.ap50, part.ap)]
    return row
