"""The comparison: each network's steps, one network after the other, and the page."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from utils import upstream
from utils.core.errors import InputError
from utils.core.files import copy_file, file_hash
from utils.core.run_folder import held
from utils.evaluation.data_yaml import load_data
from utils.evaluation.find_images import find_images
from utils.jobs.accuracy import measure, page, results
from utils.jobs.accuracy.measure import MeasureOptions
from utils.jobs.accuracy.networks import NETWORKS, Network
from utils.jobs.accuracy.results import Results
from utils.jobs.accuracy.steps import NOTES, StepError, Steps
from utils.jobs.accuracy.train import TrainOptions, convert, train
from utils.jobs.made_from import dataset_digest, keep_to
from utils.upstream_heads import TRAINING_HEADS

logger = logging.getLogger(__name__)

STEPS: dict[str, Callable[[Steps, MeasureOptions], None]] = {
    "float": measure.evaluate_float,
    "quantize": measure.quantize,
    "export": measure.export,
    "time": measure.measure_times,
    "evaluate": measure.evaluate,
}


@dataclass(frozen=True)
class Source:
    """Where a network comes from.

    Attributes:
        name: of its folder and in tables.
        network: how it is trained; None for weights that are there.
        weights: a float checkpoint, with or without auxiliary branch; None for one that is trained.
    """

    name: str
    network: Network | None = None
    weights: Path | None = None


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


def run(
    sources: Sequence[Source], wanted: Sequence[str], training: TrainOptions, options: MeasureOptions, output: Path,
    gpus: Sequence[str], engine_python: str,
) -> list[Path]:  # fmt: skip
    """Run the steps whose results are not in `output`, and write the page; a network that fails does not stop others.

    Args:
        wanted: 'train', and names of `STEPS`; others are ignored.
        engine_python: the interpreter that has TensorRT.

    Returns:
        The files of the page.

    Raises:
        InputError: `output` holds results of other weights or another dataset.
        StepError: a program failed; the page is written nevertheless.
    """
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    keep_to(output, {"--data": dataset_digest(load_data(options.data)), "--imgsz": options.imgsz})
    for source in sources:
        keep_to(output / source.name, {"--weights": file_hash(source.weights) if source.weights else "trained here"})
    failures = []
    for source in sources:
        folder = output / source.name
        steps = Steps(folder, source.name, environment, engine_python)
        with held(folder):
            try:
                _run_network(source, wanted, training, options, steps)
            except StepError as error:
                logger.error("%s", error)
                failures.append(source.name)
    networks = found(output)
    written = page.write(networks, output, _about(options, networks))
    logger.info("%s", " ".join(map(str, written)))
    if failures:
        raise StepError(f"not all steps of {', '.join(failures)} succeeded, see above; the page has the others")
    return written


def found(output: Path) -> list[Results]:
    """What lies in a folder: also networks of other runs, the smaller ones first.

    Raises:
        InputError: a report is damaged.
    """
    folders = [path.parent for path in output.glob(f"*/{NOTES}")]
    order = list(NETWORKS)
    folders.sort(key=lambda path: (order.index(path.name) if path.name in order else len(order), path.name))
    return [results.load(Steps(folder, folder.name)) for folder in folders]


def _run_network(
    source: Source, wanted: Sequence[str], training: TrainOptions, options: MeasureOptions, steps: Steps
) -> None:
    if "train" in wanted:
        if source.network is not None:
            train(source.network, training, steps)
        elif source.weights is not None:
            take(source.weights, steps)
    for name, step in STEPS.items():
        if name in wanted:
            if not steps.weights.exists():
                raise StepError(f"{source.name} is not trained yet: {steps.weights} is missing")
            step(steps, options)


def take(weights: Path, steps: Steps) -> None:
    """Put a float checkpoint into the network's folder, converted where it has an auxiliary branch.

    Raises:
        CheckpointError: it is no float checkpoint of a detector.
    """
    if steps.weights.exists():
        return
    network = upstream.load_float(weights, auxiliary=True)
    if type(network.model.model[-1]).__name__ in TRAINING_HEADS:
        convert(weights, steps)
    else:
        copy_file(weights, steps.weights)


def _about(options: MeasureOptions, networks: Sequence[Results]) -> dict[str, str]:
    """What was measured on, for the page's head; engines may be those of another machine."""
    data = load_data(options.data)
    images = len(find_images(data.paths("val")))
    found = {"data": f"{data.file.name}: {images:,} validation images, {data.nc} classes",
             "size": f"{options.imgsz}x{options.imgsz} pixels"}  # fmt: skip
    built = any(stage in network.rows for network in networks for stage in results.ENGINES)
    return found | ({"engines": f"no engines: {options.no_engines}"} if options.no_engines and not built else {})
