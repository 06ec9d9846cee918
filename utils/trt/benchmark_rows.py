"""Rows of a benchmark: one network at one batch size in one runtime, and its speed against others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from utils.trt import layer_report
from utils.trt.timing import Figures

TENSORRT, PYTORCH, COMPILED, ONNX_RUNTIME = "TensorRT", "PyTorch", "torch.compile", "ONNX Runtime"
PARTS = ("latency", "compute", "enqueue", "h2d", "d2h")


@dataclass(frozen=True)
class Row:
    """One network at one batch size.

    Attributes:
        nms: whether NMS is inside.
        masks: whether it gives masks, or what they are made of.
        gain: speed against the baseline of the same kind at the same batch, minus 1; None without one.
        error: why there are no figures.
        notes: what the engine's layers say about its speed.
        runtime: what runs it: one of the names above.
        contexts: execution contexts that run side by side, each on its own batches.
        speedup: speed as a multiple of that of PyTorch in FP32, eager, at the same batch; None without it.
    """

    model: str
    batch: int
    baseline: bool
    precision: str = ""
    nms: bool = False
    figures: Figures | None = None
    gain: float | None = None
    error: str = ""
    notes: tuple[str, ...] = field(default=(), repr=False)
    masks: bool = False
    runtime: str = TENSORRT
    contexts: int = 1
    speedup: float | None = None

    @property
    def images_per_second(self) -> float | None:
        """Images per second, of all contexts; None where nothing was measured."""
        return None if self.figures is None else self.figures.qps * self.batch

    @property
    def title(self) -> str:
        """The row in words, such as 'yolov9-c-int8, batch 8, 2 contexts'."""
        runtime = "" if self.runtime == TENSORRT else f", {self.runtime} {self.precision}"
        return f"{self.model}{runtime}, batch {self.batch}" + (f", {self.contexts} contexts" * (self.contexts > 1))

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON holds it: its fields, images per second, and the figures by name."""
        known = {name: value for name, value in asdict(replace(self, figures=None)).items() if name != "figures"}
        figures = None if self.figures is None else self.figures.to_dict()
        return {**known, "images_per_second": self.images_per_second, "figures": figures}

    def to_line(self) -> dict[str, Any]:
        """The row as CSV holds it: plain values, of which those that were not measured are empty; times in ms."""
        parts = self.figures.parts if self.figures else {}
        values = {"model": self.model, "runtime": self.runtime, "precision": self.precision, "nms": self.nms,
                  "masks": self.masks, "baseline": self.baseline, "batch": self.batch,
                  "contexts": self.contexts}  # fmt: skip
        values |= {f"{name}_median_ms": parts[name].median if name in parts else None for name in PARTS}
        values |= {"latency_p99_ms": parts["latency"].p99 if parts else None}
        return {**values, "qps": self.figures.qps if self.figures else None,
                "images_per_second": self.images_per_second, "against_baseline": self.gain,
                "against_pytorch": self.speedup, "error": self.error}  # fmt: skip


def compared(rows: Sequence[Row]) -> list[Row]:
    """Rows of one batch size, with their speed against the baseline of their kind and against PyTorch."""
    return [_against_pytorch(_against_baseline(row, rows), rows) for row in rows]


def _against_baseline(row: Row, rows: Sequence[Row]) -> Row:
    kind = (row.nms, row.masks, row.contexts)
    same = [one for one in rows if one.baseline and one.figures and (one.nms, one.masks, one.contexts) == kind]
    if row.baseline or row.figures is None or not same or same[0].figures is None or _is_pytorch(row):
        return row
    base = same[0].figures
    notes = row.notes
    if row.runtime == TENSORRT and (row.precision, same[0].precision) == ("INT8", "FP16") and row.contexts == 1:
        ours, theirs = (one.parts["compute"].median for one in (row.figures, base))
        sentence = layer_report.not_faster(row.title, ours, theirs)
        notes = (*notes, *([sentence] if sentence else []))
    return replace(row, gain=row.figures.qps / base.qps - 1, notes=notes)


def _against_pytorch(row: Row, rows: Sequence[Row]) -> Row:
    """With its speed against the eager FP32 network: its own file's, or the first of them with masks, or without."""
    bases = [one for one in rows if one.runtime == PYTORCH and one.precision == "FP32" and one.figures]
    base = next((one for one in bases if one.masks == row.masks and (one.model == row.model or not _is_pytorch(row))),
                None)  # fmt: skip
    if base is None or base.figures is None or row.figures is None:
        return row
    return replace(row, speedup=row.figures.qps / base.figures.qps)


def _is_pytorch(row: Row) -> bool:
    return row.runtime in (PYTORCH, COMPILED)


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Of each model in each runtime and precision the row with the most images per second."""
    best: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = (row.model, row.runtime, row.precision)
        if row.figures and (key not in best or (row.images_per_second or 0) > (best[key].images_per_second or 0)):
            best[key] = row
    return list(best.values())
