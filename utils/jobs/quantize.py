"""The quantize job: float evaluation → PTQ → PTQ evaluation → QAT epochs → the best, resumable after every step.

The best state is the one with the smallest loss on training images that are held out from QAT. AP on the validation
images is reported after every epoch, and chooses nothing: the best of several draws of it would be too good.

Each step ends with the state being saved (`run_state.py`), so that a run killed at any moment continues with the step
that was interrupted. `start` begins a run, `resume` continues one.

Several processes all take every step, and come to the same numbers; the main one writes.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.quantize.recipe import Recipe
from utils.core import distributed
from utils.core.errors import InputError
from utils.core.files import file_hash
from utils.core.run_folder import held, new_run
from utils.evaluation.fingerprint import check_unchanged
from utils.jobs.evaluate import without_tables
from utils.jobs.inputs import Inputs
from utils.jobs.more_epochs import with_epochs
from utils.jobs.options import QuantizeOptions, check_recipe, further_files, merged_recipe, resumed_options
from utils.jobs.quantize_session import Session
from utils.jobs.run_state import STOPPED, RunState, find_run
from utils.reports.schema import Report

__all__ = ["find_run", "resume", "start"]

logger = logging.getLogger(__name__)


def start(options: QuantizeOptions, command: str) -> Report:
    """Begin a run in a new folder and carry it to its end.

    Raises:
        InputError: something given cannot be used; nothing was written then.
    """
    recipe = merged_recipe(options)
    inputs = Inputs.load(options, recipe)
    dataset = inputs.fingerprint(further_files(options)).to_text()
    with new_run(options.project, options.name, options.exist_ok) as folder:
        report = Report(command=command, data=str(options.data))
        state = RunState(
            options.to_dict(), recipe.to_dict(), file_hash(options.weights),
            dataset=dataset, command=command, created=report.created,
        )  # fmt: skip
        state.save(folder)
        return _run(Session(folder, state, options, recipe, inputs, report))


def resume(folder: Path, given: Mapping[str, Any], command: str) -> Report:
    """Continue the run in `folder`; `given` are the options of this command line, which must agree with the run's.

    Raises:
        InputError: the run cannot be continued as asked, or another program is at it.
    """
    with held(folder):
        return _resume(folder, given, command)


def _resume(folder: Path, given: Mapping[str, Any], command: str) -> Report:
    state = distributed.from_main(lambda: RunState.load(folder))
    options = resumed_options(state.options, given, QuantizeOptions)
    recipe = Recipe.from_stored(state.recipe)
    check_recipe(options, given, recipe)
    recipe = with_epochs(state, folder, recipe, options.epochs)
    state.options, state.recipe = options.to_dict(), recipe.to_dict()
    inputs = Inputs.load(options, recipe)
    if file_hash(options.weights) != state.weights_hash:
        raise InputError(f"{options.weights} has changed since the run in {folder} was started; start a new run")
    dataset = inputs.fingerprint(further_files(options))
    check_unchanged(state.dataset, dataset, folder)
    state.dataset = state.dataset or dataset.to_text()
    report = _report(folder, state, command)
    if not state.finished:
        state.save(folder)  # what was asked for now holds also if this process is killed
    logger.info("resuming %s: %s", folder, state.summary())
    return _run(Session(folder, state, options, recipe, inputs, report))


def _report(folder: Path, state: RunState, command: str) -> Report:
    """The report as far as the run wrote it. One of an earlier run in the same folder (`--exist-ok`) is left behind."""
    path = folder / "report.json"
    report = Report.load(path) if path.is_file() else None
    if report is None or state.created not in ("", report.created):
        report = Report(command=state.command or command, data=str(state.options["data"]))
        report.created = state.created or report.created
    others = [note for note in report.notes if note not in state.notes]
    if state.stopped is None:  # it was, and goes on
        others = [note for note in others if not note.startswith(STOPPED)]
    report.notes = [*state.notes, *others]
    return report


def _run(session: Session) -> Report:
    try:
        with without_tables():
            return session.run()
    except KeyboardInterrupt:
        logger.info("\nstopped; continue with: python qat.py quantize --resume %s", shlex.quote(str(session.folder)))
        raise
