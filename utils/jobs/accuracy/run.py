"""The comparison: each network's steps, one network after the other."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from utils.core.errors import InputError
from utils.core.run_folder import held
from utils.jobs.accuracy.networks import Network
from utils.jobs.accuracy.steps import Steps
from utils.jobs.accuracy.train import TrainOptions, train

logger = logging.getLogger(__name__)


def devices(text: str) -> list[str]:
    """The GPUs that `--device` names, as `CUDA_VISIBLE_DEVICES` names them; empty for the CPU.

    Upstream's programs write `--device` into `CUDA_VISIBLE_DEVICES`, and ours count from what is visible. Programs are
    started with that variable and without that option, so that one number means one GPU for both.

    Args:
        text: '' for all that are visible, 'cpu', or numbers with commas between them.

    Raises:
        InputError: there is no such GPU.
    """
    if text.strip().lower() == "cpu":
        return []
    count = torch.cuda.device_count()
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = visible[:count] or [str(number) for number in range(count)]
    if not text.strip():
        return names
    numbers = text.replace("cuda:", "").split(",")
    if not all(number.strip().isdecimal() and int(number) < len(names) for number in numbers):
        raise InputError(f"--device {text}: torch sees {count} CUDA devices; give numbers below that, or cpu")
    return [names[int(number)] for number in dict.fromkeys(numbers)]


def run(networks: Sequence[Network], options: TrainOptions, output: Path, gpus: Sequence[str]) -> None:
    """Run the steps of each network whose results are not in `output`.

    Raises:
        StepError: a program failed.
    """
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    for network in networks:
        folder = output / network.name
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder):
            train(network, options, Steps(folder, network.name, environment))
