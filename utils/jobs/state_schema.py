"""What the state files of runs hold: `last.pt` of `qat.py quantize`, `state.json` and parts of `qat.py sensitive`.

Each is checked whole before a run continues from it, its values and how they go together, so that a damaged file is
one line that names the field, and not an error in the middle of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from models.quantize.recipe import Recipe
from utils.core.errors import InputError
from utils.core.file_schema import (
    MISSING,
    Mismatch,
    Rule,
    boolean,
    check,
    choice,
    integer,
    listing,
    mapping,
    maybe,
    number,
    record,
    text,
)
from utils.core.resampled import Resampled
from utils.core.strict_model import validate
from utils.jobs.options import QuantizeOptions, SensitiveOptions
from utils.reports.schema import Row

START_AGAIN = "start a new run"
FILE = text(r"[^/\\\0.][^/\\\0]*\.pt", "the name of a checkpoint")
FRACTION = number(0, 1)
COUNT = integer(0, 1 << 40)


def check_run(content: Any, path: Path, version: int, names: set[str]) -> None:
    """Check what `last.pt` holds; `names` are the fields of `RunState`.

    Raises:
        CheckpointError: naming the first field that does not fit.
    """
    best = record({"ap": maybe(FRACTION), "mask_ap": FRACTION, "epoch": maybe(COUNT), "file": FILE,
                   "held_out": maybe(number(0))}, ("mask_ap", "held_out"))  # fmt: skip
    history = record({"epoch": COUNT, "ap": FRACTION, "ap50": FRACTION, "mask_ap": FRACTION, "mask_ap50": FRACTION,
                      "loss": number(0), "lr": number(0), "held_out": number(0), "seconds": number(0)},
                     ("mask_ap", "mask_ap50", "held_out"))  # fmt: skip
    trainer = record({"optimizer": record({"state": mapping(COUNT, _entries), "param_groups": listing(_entries, 1, 3)}),
                      "scaler": _scaler, "log_amax": _anything}, ("log_amax",))  # fmt: skip
    rules = {
        "run_state": integer(version, version),
        "options": _made_by("options", QuantizeOptions),
        "recipe": _recipe,
        "weights_hash": text(r"[0-9a-f]+", "a SHA-256"),
        "rows": mapping(choice("float", "PTQ", "QAT"), _row),
        "history": listing(history),
        "files": listing(FILE),
        "checkpoint": maybe(FILE),
        "best": maybe(best),
        "trainer": maybe(trainer),
        "stopped": maybe(text()),
        "finished": boolean,
        "patience_since": integer(-1, 1 << 40),  # states of earlier versions have none, and no legs
        "legs": listing(COUNT, 1),
    }

    def rule(value: Any, field: str) -> None:
        record(rules, optional=("patience_since", "legs"), also=names)(value, field)
        _run_is_consistent(value)

    check(content, rule, path, START_AGAIN)


def _row(value: Any, field: str) -> None:
    try:
        validate(Row, value, field, InputError)
    except InputError as error:
        raise Mismatch.said(str(error)) from None


def _run_is_consistent(state: Mapping[str, Any]) -> None:
    """A checkpoint comes with a best one and PTQ's row, and epochs follow each other."""
    best, rows, history = state["best"], state["rows"], state["history"]
    for index, entry in enumerate(history):
        integer(index, index)(entry["epoch"], f"history[{index}].epoch")
    legs = state.get("legs", [0])
    if legs[0] or sorted({*legs}) != legs or legs[-1] > len(history):
        raise Mismatch("legs", legs, f"0 and later epochs, in their order, none above {len(history)}")
    if best is None and (state["checkpoint"] or history or state["finished"]):
        raise Mismatch("best", best, "the best checkpoint so far")
    if best is None:
        return
    if state["checkpoint"] is None:
        raise Mismatch("checkpoint", None, "the name of a checkpoint")
    needed = {"PTQ": True, "QAT": best["epoch"] is not None}
    for stage, holds in needed.items():
        if holds and stage not in rows:
            raise Mismatch(f"rows.{stage}", MISSING, "this field")
    if best["epoch"] is not None and best["epoch"] >= len(history):
        raise Mismatch("best.epoch", best["epoch"], f"one of the {len(history)} epochs of the history")
    for field, name in (("checkpoint", state["checkpoint"]), ("best.file", best["file"])):
        if name not in state["files"]:
            raise Mismatch(field, name, "one of files")


ROUNDING = 1e-3  # sums of distances: IoU of equal boxes may be a little above 1


def check_analysis(content: Any, path: Path, version: int, names: set[str]) -> None:
    """Check what `state.json` holds; `names` are the fields of `AnalysisState`.

    Raises:
        CheckpointError: naming the first field that does not fit.
    """
    sums = listing(number(-ROUNDING), 5, 5)
    rules = {
        "analysis_state": integer(version, version),
        "options": _made_by("options", SensitiveOptions),
        "recipe": _recipe,
        "weights_hash": text(r"[0-9a-f]+", "a SHA-256"),
        "amax": mapping(text(), number(0, above=True)),
        "screened": mapping(text(), mapping(text(r"\d+", "the number of a batch"), mapping(text(), sums))),
        "ap": mapping(text(), mapping(text(), FRACTION)),
        "ap_resampled": mapping(text(), mapping(text(), _resampled)),
        "seconds": mapping(text(), number(0)),
        "finished": boolean,
        "engines": _engines,
    }

    def rule(value: Any, field: str) -> None:
        record(rules, optional=("ap_resampled", "engines"), also=names)(value, field)
        if units := value["ap"].get("units"):  # all else is compared with these two
            record({"float": FRACTION, "INT8": FRACTION}, others=True)(units, "ap.units")

    check(content, rule, path, START_AGAIN)


def _engines(value: Any, field: str) -> None:
    """Times of engines, and of those that took turns with them: as many rounds of each."""
    rounds = listing(number(0, above=True), 1)
    times = record({"ms": rounds, "int8": rounds, "again": rounds, "seconds": number(0)})
    mapping(text(), _anything)(value, field)
    if value:
        rules = {"measured_on": text(), "no_control": text(), "times": mapping(text(), times)}
        record(rules, optional=("no_control",))(value, field)
    for name, one in value.get("times", {}).items():
        for key in ("int8", "again"):
            listing(_anything, len(one["ms"]), len(one["ms"]))(one[key], f"{field}.times.{name}.{key}")


def check_part(content: Any, path: Path) -> None:
    """Check what a sensitivity run keeps of a batch: for each network what `Statistics.to_plain` gives.

    Raises:
        CheckpointError: naming the first field that does not fit.
    """
    import torch

    def rows(columns: int | None, dtype: torch.dtype) -> Rule:
        def rule(value: Any, field: str) -> None:
            shape = list(value.shape) if isinstance(value, torch.Tensor) else []
            if (
                len(shape) != (1 if columns is None else 2)
                or value.dtype != dtype
                or shape[1:] != [columns][: len(shape) - 1]
            ):
                raise Mismatch(field, value, f"a tensor of {columns or 1} columns")

        return rule

    statistics = {"correct": rows(10, torch.bool), "correct_masks": rows(10, torch.bool),
                  "detections": rows(2, torch.float32), "labels": rows(None, torch.float32),
                  "paths": text()}  # fmt: skip

    def network(value: Any, field: str) -> None:
        record({name: listing(rule) for name, rule in statistics.items()}, ("correct_masks",))(value, field)
        for name in value:
            listing(_anything, len(value["paths"]), len(value["paths"]))(value[name], f"{field}.{name}")
        for name in {"correct", "correct_masks"} & value.keys():
            for index, (correct, detections) in enumerate(zip(value[name], value["detections"], strict=True)):
                if len(correct) != len(detections):
                    raise Mismatch(f"{field}.{name}[{index}]", correct, f"{len(detections)} rows")

    def networks(value: Any, field: str) -> None:
        mapping(text(), network)(value, field)
        if len({"correct_masks" in one for one in value.values()}) > 1:
            raise Mismatch.said(f"{field} holds masks of some networks only")

    check(content, networks, path, "delete it, and what it holds is measured again")


def _resampled(value: Any, field: str) -> None:
    """AP on resampled images."""
    text()(value, field)
    try:
        Resampled.from_text(value)
    except ValueError as error:
        raise Mismatch.said(f"{field} holds {error}") from None


def _anything(_value: Any, _field: str) -> None:
    pass


def _entries(value: Any, field: str) -> None:
    mapping(text(), _anything)(value, field)


def _scaler(value: Any, field: str) -> None:
    """Of torch's GradScaler: nothing on a CPU."""
    if value != {}:
        entries = {"scale": number(0, above=True), "growth_factor": number(1), "backoff_factor": number(0, 1),
                   "growth_interval": COUNT, "_growth_tracker": COUNT}  # fmt: skip
        record(entries)(value, field)


def _made_by(name: str, kind: Callable[..., Any]) -> Rule:
    """Fields from which `kind`, a dataclass that checks itself, can be made."""

    def rule(value: Any, field: str) -> None:
        known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
        record(dict.fromkeys(known, _anything), others=True)(value, field)
        try:
            kind(**{key: one for key, one in value.items() if key in known})
        except InputError as error:
            raise Mismatch.said(f"{name}: {error}") from error

    return rule


def _recipe(value: Any, field: str) -> None:
    mapping(text(), _anything)(value, field)
    try:
        Recipe.from_dict(value)
    except Exception as error:  # a recipe of the wrong types can fail anywhere
        raise Mismatch.said(f"{field}: {error}") from error
