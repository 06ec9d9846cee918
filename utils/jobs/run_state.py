"""The files of a run of `qat.py quantize` or `sensitive`, and the state from which a killed run continues.

    {project}/{name}/report.json                          what was measured
    {project}/{name}/weights/last.pt                      `RunState`; rewritten after every finished step
    {project}/{name}/weights/ptq_ap_0.5297_{stem}.pt      calibrated
    {project}/{name}/weights/qat_ep_3_{stem}.pt           after epoch 3 (the first is 0); qat_ep_3_ap_0.5301_... with AP
    {project}/{name}/weights/qat_best_{stem}.pt           the best of them, by the loss on held-out training images
    {project}/{name}/state.pt                             `AnalysisState`, of `sensitive`

Of a segmentation network they are called ptq_ap_0.5201_mask_0.4213_{stem}.pt, and so on.

A checkpoint is written before the state that names it. After a kill between the two the step is done again. Randomness
is drawn anew for every epoch from the seed and the epoch's number, so that the state needs no generator and a resumed
run is the run that was never interrupted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from models.quantize.recipe import Recipe
from utils.cli import command_line
from utils.core import checkpoints
from utils.core.errors import CheckpointError, InputError
from utils.core.files import file_hash, save_torch
from utils.core.run_folder import held, new_run
from utils.core.score import Score
from utils.core.text import plural
from utils.evaluation.disk_state import check_unchanged, dataset_hash
from utils.jobs.inputs import Inputs
from utils.jobs.options import QuantizeOptions, SensitiveOptions
from utils.reports.schema import UNFINISHED, Report

logger = logging.getLogger(__name__)

State = TypeVar("State", bound="SavedState")
Options = TypeVar("Options", QuantizeOptions, SensitiveOptions)

STATE_VERSION = 6
START_AGAIN = "start a new run"
STOPPED = "QAT stopped."  # how the note about it begins


@dataclass
class SavedState:
    """State of a run; plain values and tensors only.

    Attributes:
        options, recipe: the options and the recipe, as `Options.model_dump` and `Recipe.to_dict` give them.
        weights_hash: SHA-256 of the FP32 checkpoint.
        dataset: hashes of everything else that the run reads, as `dataset_hash` gives them.
        command: the command line that started the run.
        rows: results, as `utils.reports.schema.Row` in plain form, by stage.
    """

    FILE: ClassVar[str]

    options: dict[str, Any]
    recipe: dict[str, Any]
    weights_hash: str
    dataset: str = ""
    command: str = ""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the state; a reader sees the old one or the new one."""
        marks = {"state_version": STATE_VERSION, "options_hash": self.options_hash()}
        save_torch({**marks, **vars(self)}, folder / self.FILE)

    @classmethod
    def load(cls: type[State], folder: Path) -> State:
        """Read a run folder's state.

        Raises:
            CheckpointError: it is gone, damaged or of another version, or a checkpoint that it needs is gone.
        """
        path = folder / cls.FILE
        content = checkpoints.read_torch_file(path, remedy=START_AGAIN)
        if not isinstance(content, dict) or content.pop("state_version", None) != STATE_VERSION:
            raise CheckpointError(
                f"{path} is not the state of a run, or another version wrote it, such as 1.0: continue the run with "
                f"that version, or {START_AGAIN} (its checkpoints load)"
            )
        options_hash = content.pop("options_hash", None)
        state = cls(**content)
        if options_hash != state.options_hash():
            raise CheckpointError(f"{path} is damaged: its options are not those of the run; {START_AGAIN}")
        return state

    def options_hash(self) -> str:
        """Return the SHA-256 of options and recipe."""
        text = json.dumps([self.options, self.recipe], default=str)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class RunState(SavedState):
    """State of a quantize run.

    Attributes:
        history: one entry per finished epoch.
        files: names of the checkpoints in the weights folder: PTQ's, then one for each epoch.
        best_epoch: the epoch whose state is the best so far; None for PTQ.
        trainer: the optimizer's state after the last epoch; None before the first.
        stopped: why training ended before its last epoch; None if it did not.
        finished: all steps are done; a run writes this last.
        created, notes, warnings: the report's; a killed process may not have written a report.
        disagreements: stage → image's path → detections of FP32 and INT8 without a partner in the other.
        curves: stage → the last `core.curves.Curves` that were measured, in plain form.
    """

    FILE: ClassVar[str] = "weights/last.pt"

    history: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    best_epoch: int | None = None
    trainer: dict[str, Any] | None = None
    stopped: str | None = None
    finished: bool = False
    created: str = field(default_factory=lambda: Report(command="").created)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    disagreements: dict[str, dict[str, int]] = field(default_factory=dict)
    curves: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> RunState:  # noqa: D102 - as its base
        state = super().load(folder)
        for name in state.needed_files:
            if not (folder / "weights" / name).is_file():
                raise CheckpointError(f"{folder}/weights/{name} is gone, and the run needs it; {START_AGAIN}")
        return state

    @property
    def needed_files(self) -> list[str]:
        """Names of the checkpoints that have to exist: those that a run continues from; PTQ's of a finished run."""
        if not self.files:
            return []
        if self.finished:
            return self.files[:1]
        return sorted({self.best_file, self.files[-1]})

    @property
    def best_file(self) -> str:
        """Name of the best state's checkpoint, once the network is calibrated."""
        if self.best_epoch is None:
            return self.files[0]
        return self.files[self.best_epoch + 1]

    def keep_as(self, stage: str, measured: str) -> None:
        """Take for a stage what was measured under another name."""
        if measured in self.disagreements:
            self.disagreements[stage] = self.disagreements[measured]
        if measured in self.curves:
            self.curves[stage] = self.curves[measured]

    def summary(self) -> str:
        """Return what is done, in words."""
        ended = f". {STOPPED} {self.stopped}" if self.stopped else ""
        if self.finished:
            return f"the run is finished{ended}"
        calibrated = "PTQ is done" if self.files else "calibration is not done yet"
        return f"{calibrated}, and {plural(len(self.history), 'epoch')} of QAT{ended}"


@dataclass
class AnalysisState(SavedState):
    """State of a sensitive run; `rows` has every network whose AP was measured.

    Attributes:
        amax: activation scale → amax, once calibrated.
        screened: unit → its results in screening, see `search.Passes.screen`.
    """

    FILE: ClassVar[str] = "state.pt"

    amax: dict[str, float] = field(default_factory=dict)
    screened: dict[str, dict[str, float]] = field(default_factory=dict)


@contextmanager
def open_run(options: Options, kind: type[State]) -> Iterator[tuple[Path, State, Inputs[Options]]]:
    """Begin a run in a new folder, or continue the one that `--resume` names, and keep other programs out of it.

    Gives the run's folder, its state and its inputs, which hold the options of a resumed run.

    Raises:
        InputError: something cannot be used, and nothing was written; or the run cannot be continued so, or is in use.
    """
    with ExitStack() as stack:
        if options.resume is None:
            folder, state, inputs = _begin(options, kind, stack)
        else:
            folder, state, inputs = _resume(options, kind, stack)
        try:
            yield folder, state, inputs
        except KeyboardInterrupt:
            command = "quantize" if isinstance(options, QuantizeOptions) else "sensitive"
            logger.info("\nstopped; continue with: python qat.py %s --resume %s", command, shlex.quote(str(folder)))
            raise


def _begin(options: Options, kind: type[State], stack: ExitStack) -> tuple[Path, State, Inputs[Options]]:
    """Load the inputs, then create a run folder, which other programs cannot use until `stack` is closed."""
    recipe = options.merged_recipe()
    inputs = Inputs.load(options, recipe)
    state = kind(
        options=inputs.options.model_dump(),
        recipe=recipe.to_dict(),
        weights_hash=file_hash(options.weights),
        dataset=hash_of_inputs(inputs),
        command=command_line(),
    )
    folder = stack.enter_context(new_run(options.project, options.name, options.exist_ok, options.WRITTEN))
    state.save(folder)
    return folder, state, inputs


def _resume(options: Options, kind: type[State], stack: ExitStack) -> tuple[Path, State, Inputs[Options]]:
    """Find a run folder, take it until `stack` is closed, and load its state and its inputs.

    Raises:
        InputError: there is no such run, or an option, the weights or the dataset have changed.
    """
    named_folder = Path(options.project, options.name) if options.given("name") else ""
    folder = find_run(options.resume or named_folder, options.project, kind.FILE)
    state = stack.enter_context(held(folder, kind.load, log=True))
    resumed = options.resumed(state.options)
    state.options = resumed.model_dump()
    inputs = Inputs.load(resumed, Recipe.from_stored(state.recipe))
    if file_hash(resumed.weights) != state.weights_hash:
        raise InputError(f"{resumed.weights} has changed since the run in {folder} began; {START_AGAIN}")
    check_unchanged(state.dataset, hash_of_inputs(inputs), folder)
    return folder, state, inputs


def hash_of_inputs(inputs: Inputs[Any]) -> str:
    """Return the hash of all that a run reads beside its weights; `InputError` if something cannot be read."""
    options = inputs.options
    files = {"--hyp": options.augmentation, "--profile": None}
    if isinstance(options, SensitiveOptions):
        files["--profile"] = options.profile
    return dataset_hash(inputs.data, ("train", "val"), files)


def checkpoint_name(step: str, stem: str, score: Score | None = None) -> str:
    """Return the file name of a checkpoint, with its score if AP is known; `step`: `ptq`, `qat_ep_0`, `qat_best`."""
    if score is None:
        return f"{step}_{stem}.pt"
    return f"{step}_{score.in_name}_{stem}.pt"


def find_run(where: str | Path, project: str | Path, state: str) -> Path:
    """Return the run folder that `--resume` means.

    Args:
        where: a run folder, a folder in it or a file; empty for the run last written to below `project`, of those that
            are not finished if there are any.
        state: the file of a run folder that holds the state.

    Raises:
        InputError: there is no such run.
    """
    if where:
        for candidate in (Path(where), *Path(where).parents[:2]):
            if (candidate / state).is_file():
                return candidate
        raise InputError(f"--resume {where}: there is no run; expected a folder with {state}")
    runs = [path for path in Path(project).glob("*") if (path / state).is_file()]
    if not runs:
        raise InputError(f"--resume: there is no run in {project}; give the run's folder, as in --resume {project}/exp")
    unfinished = [path for path in runs if _is_unfinished(path)]
    return max(unfinished or runs, key=lambda path: (path / state).stat().st_mtime_ns)


def _is_unfinished(run: Path) -> bool:
    """True if a run has no report, or its report says that the run is not finished."""
    report = run / "report.json"
    return not report.is_file() or UNFINISHED in report.read_text(encoding="utf-8", errors="replace")
