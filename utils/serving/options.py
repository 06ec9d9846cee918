"""The options of scripts/make_triton.py; tritonclient is not imported here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from utils.core.options import IMAGE_SIZE_FLAGS, BatchSize, Fraction, ImageSize, Options, image_size, option
from utils.core.tasks import DISPLAY_CONF, DISPLAY_IOU

SERVED, NMS = "how it is served", "NMS behind raw predictions"
ModelName = Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # a folder, and a part of a URL


class ServingOptions(Options):
    """Options of a model repository; None means that the file decides."""

    file: Path | None = option(None, ".onnx, .engine or .plan", positional=True, nargs="?", metavar="FILE")
    check: Path | None = option(None, "check a model repository instead of writing one", metavar="FOLDER")
    output: Path = option(
        Path("model_repository"), "the model repository; models are added to one that is there", metavar="FOLDER"
    )
    name: ModelName | None = option(None, "of the model, by which clients ask for it (default: the file's)")
    platform: Literal["onnxruntime_onnx", "tensorrt_plan"] | None = option(
        None, "what runs an ONNX file: ONNX Runtime (default), or TensorRT, with an engine that is built later"
    )
    batch_size: list[BatchSize] | None = option(
        None, "of an engine that is built later: its profile, one or min opt max (default: 1 8 16)", metavar="N"
    )
    imgsz: list[ImageSize | tuple[ImageSize, ImageSize]] | None = option(
        None,
        "the same of its image size, or height and width, as 384 640 or 384x640 (default: the file's own)",
        *IMAGE_SIZE_FLAGS,
        metavar="PX",
        type=image_size,
    )
    max_batch_size: BatchSize | None = option(
        None,
        "images that the server puts together (default: what the engine takes; of an ONNX file 16)",
        group=SERVED,
        metavar="N",
    )
    instances: Annotated[int, Field(ge=1, le=64)] = option(1, "of the network on each GPU", group=SERVED, metavar="N")
    queue_delay: Annotated[int, Field(ge=0, le=60_000_000)] = option(
        0, "microseconds that a request waits for others to share a batch", group=SERVED, metavar="US"
    )
    no_nms: bool = option(False, "serve raw predictions", group=NMS)
    conf_thres: Fraction | None = option(
        None, f"confidence threshold (default: {DISPLAY_CONF})", group=NMS, metavar="P"
    )
    iou_thres: Fraction | None = option(None, f"overlap (default: {DISPLAY_IOU})", group=NMS, metavar="P")
    max_det: Annotated[int, Field(ge=1, le=30_000)] | None = option(
        None, "detections an image (default: 100)", group=NMS, metavar="N"
    )
    class_agnostic: bool = option(False, "boxes suppress each other across classes", group=NMS)

    @property
    def model_name(self) -> str:
        """`name`, or the file's stem without characters that a URL cannot hold."""
        stem = self.file.stem if self.file else ""
        return self.name or re.sub(r"[^A-Za-z0-9._-]", "_", stem).lstrip("._-") or "model"
