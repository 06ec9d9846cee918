"""The epochs of a quantize run: their images, their learning rates, and what is measured on held-out images."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.quantize.finetune import Finetuner, highest_rate, learning_rate, seed_everything
from models.quantize.recipe import Finetune
from utils.core import distributed
from utils.jobs.inputs import Inputs, image_batches
from utils.jobs.options import QuantizeOptions

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedEpoch:
    """What an epoch did: its mean loss, its mean learning rate, and the loss on the held-out images after it."""

    loss: float
    rate: float
    held_out: float


class Training:
    """A student, its teacher, and the training images.

    Args:
        state: of the optimizer, as `state_dict` gave it after an epoch; None before the first.
    """

    def __init__(
        self, student: nn.Module, teacher: nn.Module, inputs: Inputs, options: QuantizeOptions, settings: Finetune,
        state: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._seed = settings, options.seed
        self._tuner = Finetuner(student, teacher, settings, device=inputs.device)
        if state:
            self._tuner.load_state_dict(state)
        self._images = inputs.training_loader(options)
        self._held_out = inputs.held_out_loader(options)
        self._kind = "held out from QAT" if inputs.held_out else "too few to hold some of them out from QAT"
        self._steps = steps = min(settings.iters, len(self._images))
        self._highest = highest_rate(settings.lr, settings.epochs * steps)
        images = len(self._images.dataset)
        self._images_per_step = min(options.batch_size, images / steps)  # an epoch's last batch may be smaller
        short = "" if steps == settings.iters else f"; an epoch is one pass over {images} images, and no longer"
        logger.info(
            "QAT: %d epochs x %d steps = %d steps of %d images, learning rate up to %.2g%s",
            settings.epochs, steps, settings.epochs * steps, min(options.batch_size, images),
            self._highest, short,
        )  # fmt: skip

    def start(self) -> float:
        """The loss of the state that training begins with, on the held-out images."""
        loss = self._measure()
        logger.info("PTQ: loss %.4g on %d training images, %s", loss, len(self._held_out.dataset), self._kind)
        return loss

    def epoch(self, number: int) -> TrainedEpoch:
        """Train an epoch on images whose order and augmentation depend on nothing but the seed and the epoch.

        Raises:
            DivergedError: the loss is not finite.
        """
        from tqdm import tqdm

        seed = self._seed + 1 + number
        seed_everything(seed)
        self._images.generator.manual_seed(seed)
        batches = itertools.islice(image_batches(self._images), self._settings.iters)
        total, before = self._settings.epochs * self._steps, number * self._steps
        rates = [learning_rate(before + step, total, self._highest) for step in range(self._steps)]
        name, quiet = f"QAT epoch {number}/{self._settings.epochs - 1}", not distributed.is_main()
        with tqdm(batches, name, self._steps, disable=quiet) as bar:
            trained = self._tuner.run_epoch(
                bar, rates.__getitem__, lambda loss: bar.set_postfix(loss=f"{loss:.4g}", refresh=False)
            )
        speed = trained.iterations / trained.seconds
        logger.info(
            "epoch %d: %d steps in %.1f s: %.2f steps/s, %.1f images/s",
            number, trained.iterations, trained.seconds, speed, speed * self._images_per_step,
        )  # fmt: skip
        return TrainedEpoch(trained.loss, sum(rates) / self._steps, self._measure())

    def state_dict(self) -> dict[str, Any]:
        """What a killed run needs to train the next epoch, beside the network."""
        return self._tuner.state_dict()

    def _measure(self) -> float:
        return self._tuner.held_out_loss(image_batches(self._held_out))
