"""The sections of docs/claims.py about rates and numbers of steps of QAT."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from docs.measured import (
    FAILS_IN_FP32,
    FOLDER,
    LAST_CONVOLUTIONS,
    ON_A_CPU,
    PHOTOGRAPHS,
    QAT_STEPS,
    TEN_DETECTORS,
    USUAL_STEPS,
    Result,
    by_training,
    default_qat,
    difference_of_runs,
    load,
    mean,
    over_trainings,
    select,
    with_error,
)
from utils.core.text import markdown_table

SETTINGS = (
    *("PTQ", "QAT, 450 steps at 1e-5", USUAL_STEPS, "QAT, 450 steps at 1e-4", "QAT, 450 steps at 3e-4"),
    *("QAT, 2000 steps at 1e-5", "QAT, 2000 steps at 3e-5", "QAT, 2000 steps at 1e-4"),
)
SMALL_DIFFERENCE = 0.003  # of agreement
PATIENCE = 200  # steps of QAT without a better loss, after which a rule could end it


def rates_section(results: list[Result]) -> list[str]:
    """List agreement by rate and number of steps of QAT, and every difference to the default."""
    titles = ["model, set", *(short_setting(state) for state in SETTINGS)]
    lines: list[list[str]] = []
    differences: list[tuple[float, str]] = []
    of_ap: list[float] = []
    for training in by_training(results):
        if training[0].file == FAILS_IN_FP32:
            continue
        compared = list(compared_settings(training))
        differences += compared
        if not training[0].has_masks:
            of_ap += compared_ap(training)
        if compared and select(training, USUAL_STEPS) and training[0].file != QAT_STEPS:
            name = training[0].name + ("" if training[0].file == PHOTOGRAPHS else f" ({training[0].file})")
            lines.append([name, *(agreement_cell(training, state) for state in SETTINGS)])
    small = sum(1 for difference, _ in differences if abs(difference) <= SMALL_DIFFERENCE)
    heading = f"{len(differences)} differences of agreement to the default, {small} of them at most {SMALL_DIFFERENCE}:"
    listed = [f"- {text}" for _, text in sorted(differences, reverse=True)]
    sentences = [*steps_on_litter(results), *boxes_of_segmentation(results)]
    sentences.append(f"{len(of_ap)} differences of a detector's AP to the default: {over_trainings(of_ap)}.")
    return [*markdown_table(titles, lines, titles), "", heading, *listed, "", *sentences]


def short_setting(state: str) -> str:
    """Return a setting of QAT as a title of a table has it."""
    return state.removeprefix("QAT, ").replace(" steps at ", ", ").replace("2000", "2,000")


def agreement_cell(training: Sequence[Result], state: str) -> str:
    """Return the mean over seeds and in brackets the standard deviation of a seed, and whether a CPU computed it."""
    runs, machine = select(training, state), ""
    if not runs:
        runs, machine = select(training, state + ON_A_CPU), ", CPU"
    if not runs:
        return "–"
    agreements = [run.agreement for run in runs]
    spread = f"{statistics.stdev(agreements):.4f}" if len(agreements) > 1 else "one seed"
    return f"{mean(agreements):.4f} ({spread}{machine})"


def compared_settings(training: Sequence[Result]) -> Iterator[tuple[float, str]]:
    """Yield the difference of agreement to the default of every other setting of QAT, and a line that says it.

    Behind ± is the standard error over seeds, where both have several; errors over images were not kept.
    """
    for setting in other_settings(training):
        runs, base = select(training, setting), default_qat(training)
        sides = [[run.agreement for run in side] for side in (runs, base)]
        difference = mean(sides[0]) - mean(sides[1])
        text = f"{runs[0].name} ({runs[0].file}), {setting.removeprefix('QAT, ')}: {difference:+.4f}"
        if min(map(len, sides)) > 1:
            error = math.sqrt(sum(statistics.variance(side) / len(side) for side in sides))
            text += f" ± {error:.4f} over seeds"
        yield difference, text


def compared_ap(training: Sequence[Result]) -> Iterator[float]:
    """Yield the difference of AP to the default of every other setting of QAT, as means over seeds."""
    for setting in other_settings(training):
        means = [mean(run.value for run in runs) for runs in (select(training, setting), default_qat(training))]
        yield means[0] - means[1]


def other_settings(training: Sequence[Result]) -> list[str]:
    """Return the settings of QAT but for the default, those on a CPU too."""
    settings = dict.fromkeys(result.state for result in training if result.state.startswith("QAT, "))
    return [setting for setting in settings if setting != default_qat(training)[0].state]


def steps_on_litter(results: list[Result]) -> Iterator[str]:
    """Yield a sentence about numbers of steps on the four models on litter of qat-steps-h200.json."""
    four = [result for result in results if result.file == QAT_STEPS and result.images == "litter"]
    agreements = []
    for state in ("PTQ", USUAL_STEPS, f"{USUAL_STEPS} in 5 epochs", "QAT, 1620 steps at 3e-5"):
        means = [mean(run.agreement for run in runs) for runs in by_training(select(four, state))]
        agreements.append(f"{state} {mean(means):.3f}")
    yield f"Four models on litter ({QAT_STEPS}), mean agreement: {'; '.join(agreements)}."


def boxes_of_segmentation(results: list[Result]) -> Iterator[str]:
    """Yield a sentence for each segmentation model: box AP minus FP32's by rate and steps, and numbers of seeds."""
    for training in by_training(result for result in results if result.has_masks):
        states = []
        for state in SETTINGS:
            if runs := select(training, state):
                states.append(f"{short_setting(state)} {mean(run.value for run in runs):+.4f} ({len(runs)})")
        yield f"{training[0].name}, box AP minus FP32's: {'; '.join(states)}."


def long_section(results: list[Result]) -> list[str]:
    """Compare more steps of QAT, and its box term times 3, with the default: seed 57, paired over images."""
    titles = ["model, set", "QAT", "AP − FP32", "AP − the default's", "agreement", "agreement − the default's"]
    lines: list[list[str]] = []
    sentences = []
    ten = [result for result in results if result.file == TEN_DETECTORS and result.seed == 57]
    for training in by_training(ten):
        long = [run for run in training if run.state.startswith("QAT") and LAST_CONVOLUTIONS not in run.state]
        if len(long) < 3:
            continue
        base = default_qat(training)[0]
        for run in [base, *(run for run in long if run is not base)]:
            cells = [run.state.removeprefix("QAT").lstrip(", "), with_error(run.value, run.error)]
            differences = [with_error(*difference_of_runs([(run, base)], score)) for score in ("ap", "agreement")]
            if run is base:
                differences = ["–", "–"]
            lines.append([run.name, *cells, differences[0], f"{run.agreement:.4f}", differences[1]])
        steps, weighted = (run for run in long if run is not base)
        differences = [with_error(*difference_of_runs([(weighted, steps)], score)) for score in ("ap", "agreement")]
        sentences.append(
            f"{base.name}, box term times 3 minus times 1: AP {differences[0]}, agreement {differences[1]}."
        )
        for run in (steps, weighted):
            losses = run.row["held_out_loss"]
            best = f"{losses.index(min(losses)) + 1} of {len(losses)} epochs"
            sentences.append(f"{base.name}, {run.state}: lowest loss on held-out images after {best}.")
    return [*markdown_table(titles, lines, titles[:2]), "", *sentences]


def stop_section(_: list[Result]) -> list[str]:
    """Tell when QAT would end by a rule: no loss on held-out images that is one standard error better in 200 steps."""
    titles = ["model, set", "box term", "QAT ends after", "lowest loss until then", "lowest loss of all", "after"]
    lines = []
    for run in load(FOLDER / "qat-stop-h200.json")["runs"]:
        losses, steps = run["held_out_loss"], run["steps_an_epoch"]
        end = epochs_until_stop(losses, run["error"], PATIENCE // steps)
        best = losses.index(min(losses)) + 1
        cells = [f"{end * steps} steps", f"{min(losses[:end]):.4f}", f"{min(losses):.4f}", f"{best * steps} steps"]
        lines.append([run["network"], f"× {run['box_term']}", *cells])
    return markdown_table(titles, lines, titles[:2])


def epochs_until_stop(losses: Sequence[float], errors: Sequence[float], patience: int) -> int:
    """Return after how many epochs the loss was no better by one standard error for `patience` epochs, or all."""
    reference, last = math.inf, 0
    for epoch, (loss, error) in enumerate(zip(losses, errors, strict=True), 1):
        if loss < reference - error:
            reference, last = loss, epoch
        elif epoch - last >= patience:
            return epoch
    return len(losses)
