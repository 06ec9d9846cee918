"""The files of a quantize run: names, and the state from which a killed run continues.

    {project}/{name}/report.json                          what was measured
    {project}/{name}/weights/last.pt                      the state below; rewritten after every finished step
    {project}/{name}/weights/ptq_ap_0.5297_{stem}.pt      calibrated
    {project}/{name}/weights/qat_ep_3_{stem}.pt           after epoch 3 (the first is 0); qat_ep_3_ap_0.5301_... with AP
    {project}/{name}/weights/qat_best_{stem}.pt           the best of them, by the loss on held-out training images

Of a segmentation network they are called ptq_ap_0.5201_mask_0.4213_{stem}.pt, and so on.

A checkpoint is written before the state that names it. After a kill between the two the step is done again. Randomness
is drawn anew for every epoch from the seed and the epoch's number, so that the state needs no generator and a resumed
run is the run that was never interrupted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from models.quantize.recipe import Recipe
from utils.cli import command_line
from utils.core.errors import CheckpointError, InputError
from utils.core.files import file_hash, save_torch
from utils.core.run_folder import held, new_run
from utils.core.score import Score
from utils.core.text import plural
from utils.evaluation.dataset import check_unchanged
from utils.jobs.inputs import Inputs
from utils.jobs.options import QuantizeOptions, SensitiveOptions
from utils.reports.schema import UNFINISHED, Report

if TYPE_CHECKING:
    from utils.jobs.sensitivity.report import AnalysisState

logger = logging.getLogger(__name__)

State = TypeVar("State", bound="RunState | AnalysisState")
Options = TypeVar("Options", QuantizeOptions, SensitiveOptions)

STATE_FILE = "last.pt"
STATE_VERSION = 3
START_AGAIN = "start a new run"
STOPPED = "QAT stopped."  # how the note about it begins


@dataclass
class Best:
    """The best state so far.

    Attributes:
        score: on the validation images; None while it was not evaluated.
        epoch: None for PTQ.
        file: name of its checkpoint; empty before calibration.
        held_out: its loss on the training images that QAT is not trained on; None while it was not measured.
    """

    score: Score | None = None
    epoch: int | None = None
    file: str = ""
    held_out: float | None = None


@dataclass
class RunState:
    """Where a run stands. Plain values and tensors only.

    Attributes:
        options, recipe: what was asked for, as `QuantizeOptions.to_dict` and `Recipe.to_dict` give it.
        weights_hash: SHA-256 of the float checkpoint.
        rows: finished results, as `utils.reports.schema.Row` in plain form, by stage.
        history: one entry per finished epoch.
        files: names of the checkpoints in the weights folder that belong to this run.
        checkpoint: the file that holds the student as of now; None before calibration.
        trainer: the optimizer's state after the last epoch; None before the first.
        stopped: why training ended before its last epoch, if it did.
        finished: nothing is left to do; the last thing that a run writes.
        dataset: what the run reads, as `utils.evaluation.dataset` says it.
        command, created, notes: the report's, of which a killed process may not have written any.
    """

    FILE: ClassVar[str] = f"weights/{STATE_FILE}"

    options: dict[str, Any]
    recipe: dict[str, Any]
    weights_hash: str
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    checkpoint: str | None = None
    best: Best = field(default_factory=Best)
    trainer: dict[str, Any] | None = None
    stopped: str | None = None
    finished: bool = False
    dataset: str = ""
    command: str = ""
    created: str = field(default_factory=lambda: Report(command="").created)
    notes: list[str] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write the state; a reader sees the old one or the new one."""
        best = {**vars(self.best), "score": self.best.score and self.best.score.to_dict()}
        save_torch(marked({**vars(self), "best": best}, STATE_VERSION), folder / self.FILE)

    @classmethod
    def load(cls, folder: Path) -> RunState:
        """Read a run folder's state.

        Raises:
            CheckpointError: the state is gone or damaged, or a checkpoint that it needs is gone.
        """
        from utils.core import checkpoints

        path = folder / cls.FILE
        content = unmarked(checkpoints.read_torch_file(path, remedy=START_AGAIN), STATE_VERSION, path)
        best = content.pop("best")
        state = cls(**content, best=Best(**{**best, "score": Score.from_dict(best["score"] or {})}))
        for name in (state.checkpoint, state.best.file):
            if name and not (folder / "weights" / name).is_file():
                raise CheckpointError(f"{folder}/weights/{name} is gone, and the run continues from it; {START_AGAIN}")
        return state

    def summary(self) -> str:
        """What is done, in words."""
        ended = f". {STOPPED} {self.stopped}" if self.stopped else ""
        if self.finished:
            return f"the run is finished{ended}"
        calibrated = "PTQ is done" if self.checkpoint else "calibration is not done yet"
        return f"{calibrated}, and {plural(len(self.history), 'epoch')} of QAT{ended}"

    def offer(self, candidate: Best) -> bool:
        """Keep `candidate` if it is better than the best so far, and say whether it is. Equal is not better."""
        known = self.best.held_out
        better = known is None or (candidate.held_out is not None and candidate.held_out < known)
        if better:
            self.best = candidate
        return better


@contextmanager
def open_run(options: Options, kind: type[State]) -> Iterator[tuple[Path, State, Inputs[Options]]]:
    """Begin a run in a new folder, or continue the one that `--resume` names, and keep other programs out of it.

    Gives the run's folder, where the run stands, and what it works on: the options of a resumed run are in `inputs`.

    Raises:
        InputError: something given cannot be used, for which nothing was written; the run cannot be continued as asked;
            or another program is at it.
    """
    command = "quantize" if isinstance(options, QuantizeOptions) else "sensitive"
    if options.resume is None:
        recipe = options.merged_recipe()
        inputs = Inputs.load(options, recipe)
        values, weights = inputs.options.model_dump(), file_hash(options.weights)
        state = kind(values, recipe.to_dict(), weights, dataset=inputs.dataset_hash(), command=command_line())
        with new_run(options.project, options.name, options.exist_ok, options.WRITTEN) as folder:
            state.save(folder)
            with _resumable(folder, command):
                yield folder, state, inputs
        return
    named = Path(options.project, options.name) if options.given("name") else ""
    folder = find_run(options.resume or named, options.project, kind.FILE)
    if named and folder.name != options.name:
        raise InputError(f"--resume {folder} and --name {options.name} are two runs; leave --name out")
    with held(folder, kind.load) as state:
        resumed = options.resumed(state.options)
        recipe = Recipe.from_stored(state.recipe)
        state.options = resumed.model_dump()
        inputs = Inputs.load(resumed, recipe)
        if file_hash(resumed.weights) != state.weights_hash:
            raise InputError(f"{resumed.weights} has changed since the run in {folder} was started; start a new run")
        check_unchanged(state.dataset, inputs.dataset_hash(), folder)
        with _resumable(folder, command):
            yield folder, state, inputs


@contextmanager
def _resumable(folder: Path, command: str) -> Iterator[None]:
    """When Ctrl-C stops what is done within, say how to continue; `command` is that of qat.py."""
    try:
        yield
    except KeyboardInterrupt:
        logger.info("\nstopped; continue with: python qat.py %s --resume %s", command, shlex.quote(str(folder)))
        raise


def marked(content: Mapping[str, Any], version: int) -> dict[str, Any]:
    """A state as it is written: with the version of its form, and a hash of its options and recipe."""
    return {"state_version": version, "options_hash": _options_hash(content), **content}


def unmarked(content: Any, version: int, path: Path) -> dict[str, Any]:
    """The inverse of `marked`. Whatever else a state of this version holds, a program of this version has written.

    Raises:
        CheckpointError: `content` is no state of this version, or its options are not those that it was written with.
    """
    if not isinstance(content, dict) or content.get("state_version") != version:
        raise CheckpointError(
            f"{path} is no state of a run that this version began, such as one of version 1.0; go on with the version "
            "that began it, or start a new run (its checkpoints load)"
        )
    content = dict(content)
    del content["state_version"]
    if content.pop("options_hash", None) != _options_hash(content):
        raise CheckpointError(f"{path} is damaged: its options are not those of the run; {START_AGAIN}")
    return content


def _options_hash(content: Mapping[str, Any]) -> str:
    text = json.dumps([content.get("options"), content.get("recipe")], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def checkpoint_name(step: str, stem: str, score: Score | None = None) -> str:
    """File name of a checkpoint; `step` is `ptq`, `qat_ep_0`, ... or `qat_best`; the score is there if AP is known.

    Of upstream's best.pt the best state is qat_best.pt, not qat_best_best.pt.
    """
    if step == "qat_best" and re.match(r"best(?![a-z0-9])", stem, re.IGNORECASE):
        return f"{step}{stem[4:]}.pt"
    return f"{step}_{stem}.pt" if score is None else f"{step}_{score.in_name}_{stem}.pt"


def find_run(where: str | Path, project: str | Path, state: str = f"weights/{STATE_FILE}") -> Path:
    """The run folder that `--resume` means.

    Args:
        where: a run folder, a folder in it or a file; empty for the run last written to below `project`, of those that
            are not finished if there are any.
        project: where runs lie.
        state: the file of a run that holds its state.

    Raises:
        InputError: no run is there.
    """
    if where:
        for candidate in (Path(where), *Path(where).parents[:2]):
            if (candidate / state).is_file():
                return candidate
        raise InputError(f"--resume {where}: no run there; expected a folder with {state}")
    runs = [path for path in Path(project).glob("*") if (path / state).is_file()]
    if not runs:
        raise InputError(f"--resume: no run in {project}; give the run's folder, as in --resume {project}/exp")
    unfinished = [path for path in runs if not _finished(path / "report.json")]
    return max(unfinished or runs, key=lambda path: (path / state).stat().st_mtime_ns)


def _finished(report: Path) -> bool:
    return report.is_file() and UNFINISHED not in report.read_text(encoding="utf-8", errors="replace")
