"""`qat.py quantize --resume --epochs N`: another number of epochs for a run that is there already."""

from __future__ import annotations

from pathlib import Path

from models.quantize.recipe import Recipe
from utils.core.errors import InputError
from utils.jobs.run_state import RunState


def with_epochs(state: RunState, folder: Path, recipe: Recipe, epochs: int | None) -> Recipe:
    """The run's recipe with `epochs`; the state is made ready for those that are left to train.

    Training goes on from the last epoch, also where patience had ended it. The learning rate's schedule begins anew
    there, and patience that was used up counts anew: otherwise it would end every continuation after one epoch.

    Args:
        epochs: what `--epochs` says; None and the run's own number change nothing.

    Raises:
        InputError: epochs are left, and the run trains none: it is PTQ only, or its training failed.
    """
    done, settings = len(state.history), recipe.finetune
    if epochs is None or epochs == settings.epochs:
        return recipe
    if epochs > done:
        if state.options["ptq_only"]:
            raise InputError(
                f"--epochs {epochs}: the run in {folder} is --ptq-only and trains nothing; start a new run"
            )
        if state.stopped and not state.out_of_patience:
            raise InputError(
                f"--epochs {epochs}: the training in {folder} failed and does not go on ({state.stopped}); "
                "start a new run, such as one with a lower --lr"
            )
        if settings.patience and state.waited >= settings.patience:
            state.patience_since = done - 1
        state.legs = [*(leg for leg in state.legs if leg < done), done]
        state.go_on()
    return recipe.replace(finetune_epochs=epochs)
