"""The options of scripts/make_triton.py and scripts/triton_client.py; tritonclient is not imported here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from utils.core.errors import InputError
from utils.core.options import (
    IMAGE_SIZE_FLAGS,
    BatchSize,
    Fraction,
    ImageSize,
    InputSize,
    Options,
    RunFolderOptions,
    image_size,
    option,
    project_option,
    size_option,
)
from utils.core.tasks import DISPLAY_CONF, DISPLAY_IOU

SERVED, NMS = "how it is served", "NMS behind raw predictions"
Detections = Annotated[int, Field(ge=1, le=30_000)]


class ServingOptions(Options):
    """What is served, and how; None where the file decides."""

    file: Path | None = option(None, ".onnx, .engine or .plan", positional=True, nargs="?", metavar="FILE")
    check: Path | None = option(None, "check a model repository instead of writing one", metavar="FOLDER")
    output: Path = option(
        Path("model_repository"), "the model repository; models are added to one that is there", metavar="FOLDER"
    )
    name: str | None = option(None, "of the model, by which clients ask for it (default: the file's)")
    platform: Literal["onnxruntime_onnx", "tensorrt_plan"] | None = option(
        None, "what runs an ONNX file: ONNX Runtime (default), or TensorRT, with an engine that is built later"
    )
    batch_size: list[BatchSize] | None = option(
        None, "of an engine that is built later, or has no note: its profile, one or min opt max (default: 1 8 16)",
        metavar="N",
    )  # fmt: skip
    imgsz: list[ImageSize | tuple[ImageSize, ImageSize]] | None = option(
        None, "the same of its image size, or height and width, as 384 640 or 384x640 (default: the file's own)",
        *IMAGE_SIZE_FLAGS, metavar="PX", type=image_size,
    )  # fmt: skip
    onnx: Path | None = option(None, "what an engine without a note was built from", metavar="FILE")
    max_batch_size: BatchSize | None = option(
        None, "images that the server puts together (default: what the engine takes; of an ONNX file 16)",
        group=SERVED, metavar="N",
    )  # fmt: skip
    instances: Annotated[int, Field(ge=1, le=64)] = option(1, "of the network on each GPU", group=SERVED, metavar="N")
    queue_delay: Annotated[int, Field(ge=0, le=60_000_000)] = option(
        0, "microseconds that a request waits for others to share a batch", group=SERVED, metavar="US"
    )
    no_nms: bool = option(False, "serve raw predictions", group=NMS)
    conf_thres: Fraction | None = option(
        None, f"confidence threshold (default: {DISPLAY_CONF})", group=NMS, metavar="P"
    )
    iou_thres: Fraction | None = option(None, f"overlap (default: {DISPLAY_IOU})", group=NMS, metavar="P")
    max_det: Detections | None = option(None, "detections an image (default: 100)", group=NMS, metavar="N")
    class_agnostic: bool = option(False, "boxes suppress each other across classes", group=NMS)

    @property
    def model_name(self) -> str:
        """`name`, or the file's stem without characters that a URL cannot hold.

        Raises:
            InputError: the name cannot be a folder and a part of a URL.
        """
        if self.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise InputError(f"--name is {self.name!r:.60}; expected letters, digits, '.', '_' and '-'")
        stem = self.file.stem if self.file else ""
        return self.name or re.sub(r"[^A-Za-z0-9._-]", "_", stem).lstrip("._-") or "model"


class TritonClientOptions(RunFolderOptions):
    """Draw what a model on NVIDIA Triton Inference Server finds."""

    model: str = option(..., "its name on the server", positional=True, metavar="MODEL")
    source: str | None = option(None, "draw detections on this image, video or folder (required)", metavar="PATH")
    protocol: Literal["http", "grpc"] = option("http", "how the server is asked")
    url: str = option("", "default: localhost:8000; of grpc localhost:8001", metavar="HOST:PORT")
    imgsz: InputSize | None = size_option("the model's")
    conf_thres: Fraction = option(DISPLAY_CONF, "least score that is drawn", metavar="P")
    iou_thres: Fraction = option(DISPLAY_IOU, "of NMS here, behind raw predictions", metavar="P")
    max_det: Detections = option(300, "detections per image", metavar="N")
    project: str = project_option("runs/triton")
