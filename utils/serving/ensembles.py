"""Do the steps of an ensemble fit together? The rules of `model_config_utils.cc` and `ensemble_utils.cc` in Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from utils.core.errors import InputError


def check_ensemble(where: str, config: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]) -> None:
    """Check an ensemble against the other models of its repository.

    Args:
        where: its file, for messages.
        models: configurations by name.

    Raises:
        InputError: a step is not there, or names and types do not meet.
    """
    steps = config.get("ensemble_scheduling", {}).get("step", [])
    if not steps:
        raise InputError(f"{where}: an ensemble needs ensemble_scheduling with its steps")
    for step in steps:
        _check_step(where, config, step, models)
    _check_flow(where, config, steps)
    _check_types(where, config, steps, models)


def _check_step(
    where: str, config: Mapping[str, Any], step: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]
) -> None:
    name = step.get("model_name", "")
    if name not in models:
        raise InputError(
            f"{where}: a step runs {name!r:.60}, which is not in the repository; there is {', '.join(models)}"
        )
    model = models[name]
    for side in ("input", "output"):
        mapped, own = step.get(f"{side}_map", {}), [one["name"] for one in model[side]]
        if not mapped:
            raise InputError(f"{where}: the step of {name} has no {side}_map")
        unknown = [key for key in mapped if key not in own]
        if unknown:
            raise InputError(f"{where}: {name} has no {side} {unknown[0]!r:.60}; it has {', '.join(own)}")
    missing = [
        one["name"] for one in model["input"] if one["name"] not in step["input_map"] and not one.get("optional")
    ]
    if missing:
        raise InputError(f"{where}: input {missing[0]} of {name} is given by nothing")
    most, its = config.get("max_batch_size", 0), model.get("max_batch_size", 0)
    if its and its < most:
        raise InputError(f"{where}: max_batch_size is {most}, and {name} takes up to {its}")


def _check_flow(where: str, config: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> None:
    """Every tensor is written once, by something that comes before it, and read."""
    inputs, outputs = ({one["name"] for one in config[side]} for side in ("input", "output"))
    written, read = list(inputs), set(outputs)
    for step in steps:
        written += step["output_map"].values()
        read |= set(step["input_map"].values())
    twice = sorted({name for name in written if written.count(name) > 1})
    if twice:
        raise InputError(f"{where}: tensor {twice[0]!r:.60} is written twice")
    unread, unwritten = sorted(set(written) - read), sorted(read - set(written))
    if unwritten:
        raise InputError(f"{where}: tensor {unwritten[0]!r:.60} is written by no step")
    if unread:
        raise InputError(f"{where}: tensor {unread[0]!r:.60} is read by no step")
    ready, left = set(inputs), list(steps)
    while left:
        next_steps = [step for step in left if set(step["input_map"].values()) <= ready]
        if not next_steps:
            raise InputError(
                f"{where}: the steps wait for each other: {', '.join(step['model_name'] for step in left)}"
            )
        for step in next_steps:
            ready |= set(step["output_map"].values())
            left.remove(step)


def _check_types(
    where: str, config: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], models: Mapping[str, Mapping[str, Any]]
) -> None:
    """Of every tensor, all that write and read it agree about type and shape."""
    own = config.get("max_batch_size", 0) > 0
    seen = {one["name"]: (one, own, "the ensemble") for side in ("input", "output") for one in config[side]}
    for step in steps:
        model = models[step["model_name"]]
        batched = model.get("max_batch_size", 0) > 0
        for side in ("output", "input"):
            tensors = {one["name"]: one for one in model[side]}
            for key, name in step[f"{side}_map"].items():
                there, its, whose = seen.setdefault(name, (tensors[key], batched, step["model_name"]))
                _agree(
                    f"{where}: tensor {name!r:.60}", (there, its, whose), (tensors[key], batched, step["model_name"])
                )


def _agree(what: str, one: tuple[Mapping[str, Any], bool, str], other: tuple[Mapping[str, Any], bool, str]) -> None:
    (a, a_batched, a_name), (b, b_batched, b_name) = one, other
    if a["data_type"] != b["data_type"]:
        raise InputError(f"{what} is {a['data_type']} in {a_name} and {b['data_type']} in {b_name}")
    whole = [([-1] if batched else []) + list(tensor["dims"]) for tensor, batched in ((a, a_batched), (b, b_batched))]
    if not (_same(a["dims"], b["dims"]) or _same(*whole)):
        raise InputError(f"{what} is {whole[0]} in {a_name} and {whole[1]} in {b_name}")


def _same(a: Sequence[int], b: Sequence[int]) -> bool:
    return len(a) == len(b) and all(x == y or -1 in (x, y) for x, y in zip(a, b, strict=True))
