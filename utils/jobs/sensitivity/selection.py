"""Arithmetic of sensitivity analysis: rank correlation, costs, and the greedy choice of what stays in float."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.core.errors import InputError

NOISE = 0.05  # a unit that gains a smaller share of what was lost is not chosen
SMALLEST_COST = 1e-3  # a unit with fewer multiply-adds is not chosen for being free


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation, equal values sharing their mean rank; None if there is nothing to rank.

    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 20.0, 15.0])
    0.5
    """
    if len(a) < 2 or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    from scipy.stats import spearmanr

    return round(float(spearmanr(a, b).statistic), 12)


@dataclass(frozen=True)
class Candidate:
    """A unit that may stay in float: AP gained when it alone does, and its share of the network's cost (0..1).

    Several together cost what `choose`'s `cost_of` says: units that overlap cost less than their sum.
    """

    name: str
    gain: float
    cost: float


@dataclass(frozen=True)
class Selection:
    """What stays in float, the AP with that, its cost, and why the search ended there."""

    names: tuple[str, ...]
    ap: float
    cost: float
    why: str


def choose(
    candidates: Sequence[Candidate],
    evaluate: Callable[[tuple[str, ...]], float | None],
    cost_of: Callable[[tuple[str, ...]], float],
    *,
    reference: float,
    start: float,
    target_drop: float,
    budget: float,
) -> Selection:
    """Add units greedily by AP gained per cost until the loss is small enough, then leave out what was not needed.

    Args:
        evaluate: AP with these units in float; None if there is no time left to find out.
        cost_of: their share of the network's cost, 0..1.
        reference, start: AP of the float network, and of the one that is all INT8.
        target_drop: AP that may be lost.
        budget: share of the network's cost that may run in float.
    """
    chosen: list[Candidate] = []
    ap, goal = start, reference - target_drop
    order = sorted(
        (one for one in candidates if one.gain > max(NOISE * (reference - start), 0)),
        key=lambda one: one.gain / max(one.cost, SMALLEST_COST),
        reverse=True,
    )
    why = "no further unit gains AP"
    for one in order:
        if ap >= goal:
            break
        names = (*(each.name for each in chosen), one.name)
        if cost_of(names) > budget:
            why = "what is left would exceed the budget of float time"
            continue
        found = start + one.gain if not chosen else evaluate(names)
        if found is None:
            why = "the time budget is used up"
            break
        if found > ap:
            chosen.append(one)
            ap = found
    if ap >= goal:
        why = f"the AP loss is within {target_drop:g}"
        chosen, ap = _without_needless(chosen, ap, goal, evaluate, start)
    names = tuple(one.name for one in chosen)
    return Selection(names, ap, cost_of(names), why)


def _without_needless(
    chosen: list[Candidate], ap: float, goal: float, evaluate: Callable[[tuple[str, ...]], float | None], start: float
) -> tuple[list[Candidate], float]:
    """The chosen units without those that the goal is reached without, and the AP then."""
    for one in sorted(chosen, key=lambda each: each.gain):
        rest = [each for each in chosen if each is not one]
        if rest:
            found = start + rest[0].gain if len(rest) == 1 else evaluate(tuple(each.name for each in rest))
            if found is not None and found >= goal:
                chosen, ap = rest, found
    return chosen, ap


def mac_shares(convolutions: Mapping[str, Sequence[str]], macs: Mapping[str, int]) -> dict[str, float]:
    """Unit → its convolutions' share of all multiply-adds, 0..1."""
    total = sum(macs.values()) or 1
    return {name: sum(macs.get(path, 0) for path in paths) / total for name, paths in convolutions.items()}


def read_profile(path: str | Path) -> list[tuple[str, float]]:
    """Layer names and milliseconds of an engine: a JSON list of `{"name", "ms"}`, or an object with it as `layers`.

    Raises:
        InputError: it cannot be read, or is something else.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), strict=False)
    except OSError as error:
        raise InputError(f"--profile {path}: {error.strerror}; expected a JSON of layer times") from error
    except ValueError as error:
        raise InputError(f"--profile {path} is not valid JSON: {error}") from error
    rows: Any = content.get("layers") if isinstance(content, dict) else content
    try:
        found = [(str(row["name"]), float(row["ms"])) for row in rows if row["ms"] is not None]
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(f'--profile {path}: expected a list of {{"name": ..., "ms": ...}}') from error
    if not found or sum(ms for _, ms in found) <= 0:
        raise InputError(f"--profile {path} holds no layer time")
    return found


def time_shares(units: Mapping[str, Sequence[str]], profile: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Unit → its share of an engine's time, 0..1.

    A kernel counts for the modules that its name mentions, such as `model.4.cv1` in `/model.4/cv1/conv/Conv`: in equal
    parts if TensorRT fused several, however often it names each. What mentions none, such as a conversion of formats,
    counts only in the total.

    Args:
        units: unit → paths of the modules that it stands for.
    """
    total = sum(ms for _, ms in profile)
    shares = dict.fromkeys(units, 0.0)
    for name, ms in profile:
        mentioned = {_module_path(match) for match in re.findall(r"model\.\d+[\w./]*", name)}
        for unit, paths in units.items():
            hits = sum(any(f"{one}.".startswith(f"{path}.") for path in paths) for one in mentioned)
            if hits:
                shares[unit] += ms / total * hits / len(mentioned)
    return shares


def _module_path(scope: str) -> str:
    """A node or weight → the module that a recipe names: `model.3/cv2/cv2.0/m/m.0/conv/Conv` → `model.3.cv2.0.m.0`.

    Convolution, activation, weight and quantizers of one such module are one mention.
    """
    parts: list[str] = []
    for part in scope.strip("/").split("/"):
        if parts and part.startswith(f"{parts[-1]}."):  # an element of a list is called after the list
            parts.pop()
        parts.append(part)
    names = ".".join(parts).split(".")
    inside = [name in ("conv", "act", "weight", "bias") or name[:1].isupper() for name in names]
    return ".".join(names[: inside.index(True)] if True in inside else names)
