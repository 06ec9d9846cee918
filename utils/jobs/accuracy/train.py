"""Train one network with upstream's train_dual.py, and convert it to the network that is deployed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import yaml

from utils import upstream, upstream_import
from utils.core.errors import CheckpointError
from utils.core.files import atomic_path
from utils.core.input_files import read_yaml
from utils.evaluation.data_yaml import load_data
from utils.evaluation.find_images import find_images
from utils.jobs.accuracy.networks import Network
from utils.jobs.accuracy.steps import CHECKOUT, Steps

logger = logging.getLogger(__name__)

HYPERPARAMETERS = "data/demo/hyp.digits-640.yaml"
FINISHED = -1  # what upstream writes for the epoch, when it takes the optimizer out of a checkpoint
VALIDATED = 64  # images, for upstream's own evaluation, which nothing depends on
UPSTREAM = ("scripts/run_upstream.py", "--fast")


@dataclass(frozen=True)
class TrainOptions:
    """How networks are trained; None where the network's own row says it.

    Attributes:
        data: dataset's YAML.
        imgsz: pixels.
        epochs: passes over the training images.
        batch_size: of all GPUs together.
        lr0: highest learning rate.
        workers: processes that read images, of each GPU.
        gpus: how many are trained on; 0 for the CPU.
    """

    data: Path
    imgsz: int
    epochs: int | None
    batch_size: int | None
    lr0: float | None
    workers: int
    gpus: int


def train(network: Network, options: TrainOptions, steps: Steps) -> Path:
    """Train where the network is not trained yet, going on where a training was interrupted, and convert it.

    Returns:
        The float checkpoint of the deployed network, in half precision.

    Raises:
        StepError: a program failed.
    """
    if steps.weights.exists():
        logger.info("%s: %s is there", network.name, steps.weights.name)
        return steps.weights
    trained, weights = steps.folder / "trained.pt", steps.folder / "train" / "weights"
    last, best = weights / "last.pt", weights / "best.pt"  # without validation between epochs, the same
    if not trained.exists():
        epoch = _epoch(last, best)
        if epoch != FINISHED:
            start = ["--resume", last] if epoch is not None else _fresh(network, options, steps.folder)
            steps.call("train", [*_launcher(options.gpus), "train_dual.py", *start])
        last.replace(trained)
        best.unlink(missing_ok=True)
    convert(trained, steps)
    return steps.weights


def convert(weights: Path, steps: Steps) -> None:
    """Write the deployed network of a training checkpoint as `float.pt`.

    Raises:
        StepError: the program failed.
    """
    command: list[str | Path] = [
        "reparameterization.py", "--weights", weights, "--save", steps.weights, "--device", "cpu",
    ]  # fmt: skip
    steps.run("convert", steps.weights, command)


def _epoch(last: Path, best: Path) -> int | None:
    """The last epoch in a checkpoint of upstream's, `FINISHED`, or None where there is none.

    A process that is killed while it writes one leaves a damaged file, and a whole one of the epoch before.
    """
    upstream_import.ensure()
    for path in (last, best):
        if not path.exists():
            continue
        try:
            epoch = int(upstream.read_checkpoint(path)["epoch"])
        except CheckpointError:
            logger.warning("%s is damaged", path)
            continue
        if path != last:
            path.replace(last)
        return epoch
    return None


def _launcher(gpus: int) -> list[str]:
    if gpus <= 1:
        return [*UPSTREAM]
    return ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus), *UPSTREAM]


def _fresh(network: Network, options: TrainOptions, folder: Path) -> list[str | Path]:
    epochs = options.epochs or max(1, round(network.images / _training_images(options.data)))
    batch = options.batch_size or network.batch_size
    device = ["--device", "cpu"] if options.gpus == 0 else []  # upstream would give CUDA_VISIBLE_DEVICES another value
    return [
        "--data", _data(options.data, folder), "--cfg", network.description, "--weights", "",
        "--hyp", _hyperparameters(options.lr0 or network.lr0, folder), "--imgsz", str(options.imgsz),
        "--batch-size", str(batch), "--epochs", str(epochs),
        "--optimizer", "AdamW", "--cos-lr", "--cache", "ram", "--workers", str(options.workers), *device,
        "--noval", "--noplots", "--project", folder, "--name", "train", "--exist-ok",
    ]  # fmt: skip


def _data(data: Path, folder: Path) -> Path:
    """The dataset with few validation images: upstream evaluates twice after the last epoch, and so do later steps."""
    dataset = load_data(data)
    images, path = folder / "val.txt", folder / "data.yaml"
    few = "".join(f"{file}\n" for file in find_images(dataset.paths("val"))[:VALIDATED])
    content = {"train": [str(one) for one in dataset.paths("train")], "val": str(images), "names": dict(dataset.names)}
    for file, text in ((images, few), (path, yaml.safe_dump(content))):
        with atomic_path(file) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return path


def _training_images(data: Path) -> int:
    return len(find_images(load_data(data).paths("train")))


def _hyperparameters(lr0: float, folder: Path) -> Path:
    """Upstream's file of hyperparameters, with this learning rate."""
    values = read_yaml(CHECKOUT / HYPERPARAMETERS, "a file of this repository")
    path = folder / "hyp.yaml"
    with atomic_path(path) as temporary:
        temporary.write_text(yaml.safe_dump(values | {"lr0": lr0, "warmup_bias_lr": lr0}), encoding="utf-8")
    return path
