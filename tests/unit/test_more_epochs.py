"""What `--resume --epochs N` means, from the state of the run alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.quantize.recipe import Recipe
from models.quantize.schedule import Schedule
from utils.core.errors import InputError
from utils.core.score import Score
from utils.jobs.more_epochs import with_epochs
from utils.jobs.options import QuantizeOptions
from utils.jobs.run_state import STOPPED, Best, RunState

FOLDER = Path("runs/qat/exp")


def ended(done: int, *, epochs: int, patience: int = 0, best: int | None = None, **more: object) -> tuple:
    """A run that has ended after `done` epochs of `epochs`, and its recipe."""
    recipe = Recipe().replace(finetune_epochs=epochs, finetune_patience=patience)
    state = RunState(QuantizeOptions(weights="toy.pt").to_dict(), recipe.to_dict(), "00ff", finished=True)
    state.history = [{"epoch": epoch} for epoch in range(done)]
    state.best = Best(Score(0.5), best, "a.pt")
    for name, value in more.items():
        setattr(state, name, value)
    return state, recipe


def test_after_patience_training_goes_on_and_patience_counts_anew():
    state, recipe = ended(3, epochs=5, patience=2, best=0)
    state.check_patience(2)
    assert state.stopped == "epoch 2: no better state in 2 epochs (patience 2)"
    state.notes = [f"{STOPPED} {state.stopped}; the best state is restored", "another"]
    assert with_epochs(state, FOLDER, recipe, 9).finetune.epochs == 9
    assert (state.stopped, state.finished, state.waited, state.notes) == (None, False, 0, ["another"])
    for epoch, stops in ((3, False), (4, True)):
        state.history.append({"epoch": epoch})
        state.check_patience(2)
        assert bool(state.stopped) == stops
    assert state.stopped == "epoch 4: no better state in 2 epochs (patience 2)"


def test_fewer_epochs_than_before_that_are_more_than_were_trained_are_trained():
    state, recipe = ended(3, epochs=9, patience=2, best=0)
    state.check_patience(2)
    assert with_epochs(state, FOLDER, recipe, 4).finetune.epochs == 4
    assert not state.finished
    assert state.stopped is None


def test_patience_that_was_used_up_by_the_last_epoch_counts_anew_too():
    state, recipe = ended(4, epochs=4, patience=2, best=1)
    with_epochs(state, FOLDER, recipe, 6)
    assert state.waited == 0


def test_each_addition_begins_a_leg_of_the_schedule():
    state, recipe = ended(4, epochs=4)
    recipe = with_epochs(state, FOLDER, recipe, 10)
    assert state.legs == [0, 4]
    assert with_epochs(state, FOLDER, recipe, 10) is recipe, "a number that stands already adds nothing"
    recipe = with_epochs(state, FOLDER, recipe, 12)
    assert state.legs == [0, 4], "no epoch of the second leg was trained"
    state.history.append({"epoch": 4})
    with_epochs(state, FOLDER, recipe, 20)
    assert state.legs == [0, 4, 5]


def test_rates_of_past_epochs_are_not_rewritten():
    before = Schedule(1.0, 10, (0, 4))
    state, recipe = ended(4, epochs=4)
    recipe = with_epochs(state, FOLDER, recipe, 9)
    after = Schedule(1.0, 10, (*state.legs, recipe.finetune.epochs))
    assert [after.mean(epoch) for epoch in range(4)] == [before.mean(epoch) for epoch in range(4)]
    assert after.mean(4) > 10 * before.mean(3)


def test_patience_that_is_left_is_not_given_again():
    state, recipe = ended(3, epochs=3, patience=2, best=1)
    with_epochs(state, FOLDER, recipe, 6)
    assert not state.finished
    assert state.waited == 1


@pytest.mark.parametrize("epochs", [None, 5, 3, 2])
def test_where_no_epoch_is_left_the_run_stays_ended_and_says_why(epochs):
    state, recipe = ended(3, epochs=5, patience=2, best=0)
    state.check_patience(2)
    with_epochs(state, FOLDER, recipe, epochs)
    assert state.finished
    assert state.legs == [0]
    assert state.summary() == (
        "the run is finished. QAT stopped. epoch 2: no better state in 2 epochs (patience 2); a higher --epochs goes on"
    )


@pytest.mark.parametrize(
    "stopped", ["epoch 3: the supervision loss is nan", "epoch 2: AP fell to 0.1000, below 0.5 of 0.6000"]
)
def test_a_training_that_failed_is_not_continued(stopped):
    state, recipe = ended(3, epochs=5, best=0, stopped=stopped)
    with pytest.raises(InputError) as caught:
        with_epochs(state, FOLDER, recipe, 9)
    assert str(caught.value) == (
        f"--epochs 9: the training in {FOLDER} failed and does not go on ({stopped}); "
        "start a new run, such as one with a lower --lr"
    )
    assert with_epochs(state, FOLDER, recipe, None) is recipe  # it is shown, or brought to its end
    assert state.summary() == f"the run is finished. QAT stopped. {stopped}"


def test_a_run_without_training_is_not_given_epochs():
    state, recipe = ended(0, epochs=5)
    state.options["ptq_only"] = True
    with pytest.raises(InputError, match=r"--epochs 9: .* is --ptq-only and trains nothing; start a new run"):
        with_epochs(state, FOLDER, recipe, 9)
