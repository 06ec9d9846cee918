"""An evaluation as a row of a report, marked where its AP does not compare with that of other rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.device import device_name
from utils.core.thresholds import AP_CONFIDENCE
from utils.evaluation.input_plan import has_nms, mask_frame
from utils.evaluation.loop import EvalConfig
from utils.evaluation.results import EvalResult
from utils.reports.machine import versions
from utils.reports.schema import SIZES, Row
from utils.runners.base import Runner

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def make_row(
    where: Runner | torch.device, config: EvalConfig, result: EvalResult | None, file: str | Path, stage: str,
    seconds: float,
) -> Row:  # fmt: skip
    """A report row; without a result its scores are unknown.

    Args:
        where: the runner that was evaluated, or the device of a network in PyTorch.
        file: what was evaluated, as the user would type it; it exists.
        seconds: wall time of the stage.
    """
    runner = where if isinstance(where, Runner) else None
    row = Row(
        stage=stage, file=str(file), ap=None, ap50=None, precision=None, recall=None, seconds=seconds,
        device=device_name(where.device if isinstance(where, Runner) else where), versions=versions(),
        size_bytes=Path(file).stat().st_size, ms_per_image=None, measured_on="not evaluated",
    )  # fmt: skip
    if result is None:
        return row
    marks = ap_with(config, result, runner)
    found: dict[str, Any] = {
        **{name: getattr(result, name) for name in ("ap", "ap50", "precision", "recall", "input_size")},
        "ms_per_image": result.ms["inference"],
        "measured_on": "; ".join(filter(None, (result.measured_on, marks))),
        "ap_with": marks,
    }
    if result.masks:
        found |= {f"mask_{name}": getattr(result.masks, name) for name in ("ap", "ap50", "precision", "recall")}
    if result.statistics:
        resampled, of_masks = result.statistics.resampled(), result.statistics.mask_resampled()
        found |= {"ap_resampled": resampled.to_text()} if resampled else {}
        found |= {"mask_ap_resampled": of_masks.to_text()} if of_masks else {}
    if result.coco:  # pycocotools says -1 where there are no objects of a size
        found["ap_by_size"] = {size: ap for size in SIZES if (ap := result.coco[f"ap_{size}"]) >= 0}
    return Row(**{**row.model_dump(), **found})


def ap_with(config: EvalConfig, result: EvalResult, runner: Runner | None = None) -> str:
    """What makes this AP differ from the usual one, such as '30 images, NMS in the file'; empty for nothing.

    `runner` is what ran the network, None for one in PyTorch.
    """
    usual = EvalConfig()
    side = mask_frame(runner) if runner is not None and result.masks is not None else None
    marks = {
        f"{result.images} images": config.limit is not None,
        f"split {config.split}": config.split != usual.split,
        f"confidence {config.conf_thres:g}": config.conf_thres != AP_CONFIDENCE,
        f"NMS IoU {config.nms_iou(result.task):g}": config.nms_iou(result.task) != result.task.nms_iou,
        f"at most {config.max_det} detections": config.max_det != usual.max_det,
        "NMS in the file": runner is not None and has_nms(runner),
        f"masks {side}×{side}": bool(side),
        "one class": config.single_cls,
        "upsampled masks": config.upsample_masks and result.masks is not None,
        result.mark: bool(result.mark),
    }
    return ", ".join(text for text, holds in marks.items() if holds)


def warn_of_a_cut_curve(config: EvalConfig) -> None:
    """Say so when the confidence threshold leaves out detections that AP counts."""
    if config.conf_thres > AP_CONFIDENCE:
        logger.warning(
            "AP is only comparable at --conf-thres %g; this is %g: the curve is cut off",
            AP_CONFIDENCE, config.conf_thres,
        )  # fmt: skip


def lost_by_qat(rows: Sequence[Row]) -> str:
    """A sentence where QAT's AP is below PTQ's by more than the standard error of the difference; empty elsewhere.

    The best state is chosen by the loss on training images, so that AP on validation images stays a fair score.
    """
    stages = {row.stage: row for row in rows}
    ptq, qat = stages.get("PTQ"), stages.get("QAT")
    less = qat.difference(ptq) if ptq and qat else None
    if ptq and less and less.error is not None and less.value < -less.error:
        return f"PTQ has the higher AP on these validation images (QAT {less} against it): {ptq.file}"
    return ""
