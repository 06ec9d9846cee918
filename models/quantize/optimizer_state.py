"""What QAT keeps of its optimizer, loss scaler and ranges for a run to go on, and whether what was kept fits a network.

Such a state comes from a file, so that nothing in it is taken as it is. The weights are the checkpoint's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from utils.core.errors import CheckpointError
from utils.core.shown import shown


def kept(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, log_amax: Tensor | None) -> dict[str, Any]:
    """Optimizer, loss scaler, and the ranges before they are snapped."""
    return {
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "log_amax": None if log_amax is None else log_amax.detach().cpu().clone(),
    }


def put_back(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, log_amax: Tensor | None
) -> None:
    """Take back what `kept` gave; nothing changes where it does not fit.

    Raises:
        CheckpointError: the state belongs to another network, or is damaged.
    """
    problem = _difference(optimizer, state["optimizer"]) or _difference_of_ranges(log_amax, state.get("log_amax"))
    if problem:
        raise CheckpointError(f"the optimizer's state does not fit the network: {problem}; start a new run")
    saved = {**state["optimizer"], "param_groups": [dict(group) for group in state["optimizer"]["param_groups"]]}
    for group in saved["param_groups"]:  # a run may go on on another device
        group["fused"] = scaler.is_enabled()
    optimizer.load_state_dict(saved)
    if state["scaler"] and scaler.is_enabled():  # empty where the run was on a CPU
        scaler.load_state_dict(state["scaler"])
    if log_amax is not None:
        log_amax.data.copy_(state["log_amax"])


def _difference(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str:
    """What a saved optimizer's state has that Adam over these parameters has not; empty for nothing."""
    ours, theirs = optimizer.state_dict()["param_groups"], state["param_groups"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(ours) != len(theirs):
        return f"it has {len(theirs)} groups of parameters, expected {len(ours)}"
    for one, other in zip(ours, theirs, strict=True):
        for name in sorted({*one, *other} - {"lr", "fused"}):
            if shown(other.get(name)) != shown(one.get(name)) or other.get(name) != one.get(name):
                return f"{name} is {shown(other.get(name))}, expected {shown(one.get(name))}"
    for index, entry in state["state"].items():
        if index not in range(len(parameters)):
            return f"parameter {index} is none of {len(parameters)}"
        shape = parameters[index].shape
        for name, wanted in (("exp_avg", shape), ("exp_avg_sq", shape), ("step", torch.Size())):
            value = entry.get(name)
            if not isinstance(value, Tensor) or value.shape != wanted or not bool(value.isfinite().all()):
                return f"{name} of parameter {index} is {shown(value)}, expected finite values {list(wanted)}"
            if name != "exp_avg" and bool((value < 0).any()):
                return f"{name} of parameter {index} holds a negative value"
    return ""


def _difference_of_ranges(ours: Tensor | None, saved: Any) -> str:
    if ours is None or saved is None:
        fits = ours is saved
    else:
        fits = isinstance(saved, Tensor) and saved.shape == ours.shape and bool(saved.isfinite().all())
    if fits:
        return ""
    return f"log_amax is {shown(saved)}, expected {'nothing' if ours is None else f'finite values {[*ours.shape]}'}"
