"""What a user can choose for val_trt.py: frozen. Torch is not imported here, so that `-h` answers at once."""

from __future__ import annotations

from dataclasses import dataclass

TASKS = ("val", "test", "train", "speed", "study")


@dataclass(frozen=True)
class FileOptions:
    """Options of val_trt.py; None where the file or the task decides.

    Attributes:
        engine_file: an ONNX file, an engine, or a float checkpoint.
        source: what to draw detections on instead of evaluating.
        imgsz: longer sides of the input, pixels; several for a study.
        task: a split; `speed`: times at everyday thresholds; `study`: AP and times over image sizes.
        batch_size ... overlap: see `evaluation.loop.EvalConfig`.
    """

    engine_file: str
    data: str = "data/coco.yaml"
    source: str | None = None
    imgsz: list[int] | None = None
    batch_size: int = 32
    conf_thres: float | None = None
    iou_thres: float | None = None
    max_det: int = 300
    task: str = "val"
    workers: int = 8
    rect: bool = False
    single_cls: bool = False
    verbose: bool = False
    save_txt: bool = False
    save_conf: bool = False
    save_json: bool = False
    limit: int | None = None
    upsample_masks: bool = False
    overlap: bool = False
    device: str = ""
    project: str = "runs/val_trt"
    name: str = "exp"
    exist_ok: bool = False
