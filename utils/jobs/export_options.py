"""Options that the export programs share: the form of a file's input, and NMS in a file.

Torch is not imported here, so that `-h` answers at once.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from utils.core.options import DeviceOptions, Fraction, Options, option
from utils.core.tasks import DISPLAY_CONF, DISPLAY_IOU

NMS_GROUP = "NMS in the file"


class InputOptions(DeviceOptions):
    """In which form a file takes images."""

    input: Literal["float", "uint8"] = option(
        "float",
        "what the file takes. float: FP32 in 0..1 (default); uint8: the bytes of images, which the graph scales",
    )


class NmsOptions(Options):
    """NMS in a file; an option that is None has the default of `NmsSettings`."""

    nms: Literal["efficient", "onnx", "none"] | None = option(
        None,
        "efficient: TensorRT's plugin (default); onnx: the standard operator; none: top-k without suppression",
        group=NMS_GROUP,
    )
    topk_all: Annotated[int, Field(ge=1, le=3840)] | None = option(
        None,
        "detections per image (default: 100), at most 3840, as TensorRT's TopK",
        group=NMS_GROUP,
        metavar="N",
    )
    iou_thres: Fraction | None = option(
        None,
        f"IoU above which the box with the lower score is dropped (default: {DISPLAY_IOU})",
        group=NMS_GROUP,
        metavar="P",
    )
    conf_thres: Fraction | None = option(
        None, f"confidence threshold (default: {DISPLAY_CONF})", group=NMS_GROUP, metavar="P"
    )

    def nms_settings(self) -> dict[str, Any]:
        """The options that were given, as fields of `NmsSettings`.

        Raises:
            InputError: `--iou-thres` was given with `--nms none`.
        """
        if self.nms == "none":
            self.reject_unused(["iou_thres"], "with --nms none, which suppresses no boxes")
        settings = {
            "kind": self.nms,
            "topk": self.topk_all,
            "iou_thres": self.iou_thres,
            "conf_thres": self.conf_thres,
        }
        return {name: value for name, value in settings.items() if value is not None}
