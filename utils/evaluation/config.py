"""Settings of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from utils.core.tasks import AP_CONFIDENCE, Task


@dataclass(frozen=True)
class EvalConfig:
    """Settings of an evaluation.

    Attributes:
        imgsz: longer side of the input, or (height, width), in pixels; None: the network's own, or 640.
        batch_size: images at a time, unless the network has a static batch.
        conf_thres, iou_thres, max_det: see `nms.non_max_suppression`; without `iou_thres` it is the task's.
        workers: processes that read images ahead.
        rect: smallest input that holds an image instead of a square; only for networks of dynamic size.
        single_cls: all classes count as one.
        save_txt, save_conf, save_json: write detections, see `coco.py`; save_json also runs pycocotools.
        verbose: log a row for each class.
        limit: only so many images, evenly spread.
        groups: images that are resampled together, see `bootstrap.group_images`; None: each by itself.
        unlabelled: the labels are the detections of the reference, or of the network itself where there is none.
        curves: also find the curves of precision, recall and F1, and a confusion matrix.
    """

    imgsz: int | tuple[int, int] | None = None
    batch_size: int = 32
    conf_thres: float = AP_CONFIDENCE
    iou_thres: float | None = None
    max_det: int = 300
    workers: int = 8
    rect: bool = False
    single_cls: bool = False
    split: str = "val"
    save_txt: bool = False
    save_conf: bool = False
    save_json: bool = False
    verbose: bool = False
    limit: int | None = None
    groups: str | None = None
    unlabelled: bool = False
    curves: bool = False

    def nms_iou(self, task: Task) -> float:
        """IoU of NMS for a network of this task."""
        return task.nms_iou if self.iou_thres is None else self.iou_thres
