"""What tests let one process and several do, to compare the results (`together.py`)."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from known_images import KnowingModel
from known_masks import KnowingMasks
from small_networks import Network, chain, segmenter
from torch import Tensor, nn

from models.quantize import calibration, placement
from models.quantize.finetune import Finetuner, held_out_loss
from models.quantize.recipe import Calibration, Finetune, Recipe
from utils.core import distributed
from utils.core.errors import InputError
from utils.evaluation.config import EvalConfig
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import make_loader
from utils.evaluation.loop import evaluate
from utils.jobs.inputs import image_batches
from utils.runners.pytorch import TorchRunner

CPU = torch.device("cpu")
CLASSES, BINS = 2, 4
FORMS: dict[str, dict[str, Any]] = {
    "task": {}, "ranges only": {"train": "ranges"}, "masks": {"network": segmenter},
}  # fmt: skip
NAMES = ("cat", "dog", "owl")


class RawHead(nn.Module):
    """One level: raw maps while it trains, otherwise predictions too."""

    def __init__(self) -> None:
        super().__init__()
        self.nc, self.conv = CLASSES, nn.Conv2d(8, 4 * BINS + CLASSES, 1)
        self.unused = nn.Parameter(torch.ones(3))  # networks may hold what takes no part

    def forward(self, x: Tensor) -> Any:
        raw = self.conv(x)
        return [raw] if self.training else (raw.flatten(2), [raw])


def toy() -> Network:
    """`chain` with a head, a detector of a few channels."""
    return Network([*((layer.f, layer) for layer in chain().model[:6]), (-1, RawHead())]).eval()


def parts(sizes: list[int]) -> list[Tensor]:
    """This process's parts of batches of random images, of so many each; later ones are brighter: ranges grow."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.rand(size, 3, 16, 16, generator=generator) for size in sizes]
    batches = [batch * (at + 1) / len(sizes) for at, batch in enumerate(batches)]
    return [batch[distributed.world().share(len(batch))] for batch in batches]


def calibrated(sizes: list[int], network: Callable[[], Network] = toy) -> tuple[Network, Any]:
    """The toy with quantizers, and the statistics that it was calibrated with."""
    model = network()
    placement.apply(model, placement.plan(model, Recipe()))
    return model, calibration.calibrate(model, parts(sizes), Calibration(method="percentile"))


def trained(sizes: list[int], changes: dict[str, Any]) -> dict[str, Any]:
    """The gradients of a first step, the parameters after one pass, the losses.

    Args:
        changes: of QAT's settings; `network`: of the function that makes the network.
    """
    settings = dict(changes)
    network = settings.pop("network", toy)
    student, _ = calibrated([3, 3], network)
    tuner = Finetuner(student, copy.deepcopy(network()), Finetune(grad_clip=1e6, **settings), device=CPU)
    steps: list[list[Tensor]] = []
    tuner.optimizer.register_step_pre_hook(
        lambda *_: steps.append([torch.zeros(()) if p.grad is None else p.grad.clone() for p in tuner._parameters])
    )
    batches = parts(sizes)
    found = tuner.run_epoch(batches, lambda _: 1e-3)
    held_out = held_out_loss(student, tuner.teacher, batches, CPU).value
    parameters = [p.detach().clone() for p in tuner._parameters]
    return {"gradients": steps[0], "parameters": parameters, "loss": found.loss, "steps": found.iterations,
            "held_out": held_out}  # fmt: skip


def everything(sizes: list[int]) -> dict[str, Any]:
    """Counts and ranges of a calibration, and trainings, so that processes are started once."""
    _, statistics = calibrated(sizes)
    amax = {text: statistics.amax(text) for text in ("max", "percentile", "mse")}
    counts = {name: one.counts for name, one in statistics.histograms.items()}
    trainings = {name: trained(sizes, changes) for name, changes in FORMS.items()}
    return {"ranges": {"counts": counts, "amax": amax}, **trainings}


def evaluated(folder: Path, samples: list[Any], cases: list[dict[str, Any]], out: Path) -> list[dict[str, Any]]:
    """Evaluations of the network that knows its images, each with its predictions as JSON."""
    model = KnowingMasks(samples, NAMES, 64) if hasattr(samples[0], "outlines") else KnowingModel(samples, NAMES, 64)
    data, found = load_data(folder / "data.yaml"), []
    for place, case in enumerate(cases):
        config = EvalConfig(imgsz=64, workers=0, save_json=True, **case)
        with TorchRunner(model, CPU) as runner:
            reference = evaluate(runner, data, config, out_dir=out, progress=False, as_reference=True).reference
            result = evaluate(runner, data, config, out_dir=out / str(place), progress=False, reference=reference)
        clocks = {"ms", "seconds", "statistics", "measured_on"}
        numbers = {name: value for name, value in vars(result).items() if name not in clocks}
        paths = list(result.statistics.images) if result.statistics else None
        found.append({"numbers": numbers, "paths": paths, "measured_on": result.measured_on})
    return found


def loaded(folder: Path, batch_size: int, workers: int) -> list[list[int]]:
    """Of two passes over a shuffled loader, the images of each batch as sums of their pixels."""
    options = {"imgsz": 64, "batch_size": batch_size, "shuffle": True, "seed": 5, "workers": workers, "share": True}
    loader = make_loader(load_data(folder / "data.yaml"), "train", **options)
    return [[int(image.sum()) for image in batch] for _ in range(2) for batch in image_batches(loader)]


def of_images(folder: Path, samples, cases, out: Path, outlined: tuple[Path, list[Any]]) -> dict[str, Any]:
    """All that is done with images, so that processes are started once; `outlined` is a set for masks."""
    return {
        "evaluated": evaluated(folder, samples, cases, out),
        "masks": evaluated(*outlined, [{"batch_size": 2}], out / "masks"),
        "loaded": [loaded(folder, 4, workers) for workers in (0, 1)],
        "collectives": collectives(),
    }


def collectives() -> dict[str, Any]:
    """What the functions of `distributed` give."""
    world = distributed.world()

    def refuse() -> None:
        raise InputError(f"only {world.rank} can see it")

    try:
        distributed.from_main(refuse)
        refused = ""
    except InputError as error:
        refused = str(error)
    return {
        "world": (world.rank, world.size, world.local_rank), "main": distributed.is_main(), "refused": refused,
        "sum": distributed.all_sum(torch.tensor([world.rank, 1.0])).tolist(),
        "gathered": distributed.gather((world.rank, 2**53)),
        "from_main": distributed.from_main(lambda: {"rank": world.rank}),
    }  # fmt: skip
