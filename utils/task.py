"""What differs between the tasks of a network; nothing else branches on the task."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """Attributes:
    name: as in `--task` and in an ONNX file's metadata.
    prediction: name of the network's output with boxes and class scores, `[B, 4 + nc, anchors]`.
    iou_type: what pycocotools compares.
    """

    name: str
    prediction: str
    iou_type: str


DETECT = Task(name="detect", prediction="output0", iou_type="bbox")
