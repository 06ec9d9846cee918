"""What differs between the tasks of a network; nothing else branches on the task."""

from __future__ import annotations

from dataclasses import dataclass

IMAGES = "images"  # name of the network's input, `[B, 3, H, W]`


@dataclass(frozen=True)
class Task:
    """One task, such as detection: the names of its outputs and what is compared.

    Attributes:
        name: as in `--task` and in an ONNX file's metadata.
        prediction: name of the network's output with boxes and class scores, `[B, 4 + nc, anchors]`.
        detections: names of the outputs of a file with NMS inside: how many, `[B, 1]`; corners in pixels of the input,
            `[B, K, 4]`; scores and classes, `[B, K]`.
        iou_type: what pycocotools compares.
    """

    name: str
    prediction: str
    detections: tuple[str, ...]
    iou_type: str


DETECT = Task(
    name="detect",
    prediction="output0",
    detections=("num_dets", "det_boxes", "det_scores", "det_classes"),
    iou_type="bbox",
)
