"""The files of a sensitivity run, and the state from which a killed run continues.

{project}/{name}/state.json                          the state below; rewritten after every batch of screening
{project}/{name}/parts/{stage}-{batch}.pt            detections of a stage that measures AP, gone when it is done
{project}/{name}/summary-sensitive-analysis.json     the result; with sensitivity.png and recipe.yaml
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from utils.core import distributed
from utils.core.errors import CheckpointError, InputError
from utils.core.files import atomic_path
from utils.core.resampled import Resampled
from utils.jobs.run_state import START_AGAIN, marked, unmarked

STATE_FILE = "state.json"
VERSION = 2


@dataclass
class AnalysisState:
    """Where a run stands; plain values only.

    Attributes:
        options, recipe, weights_hash: what was asked for, as in `run_state.RunState`.
        amax: activation scale → amax, once calibrated.
        screened: stage → batch → unit → sums over images: their number, `proxy.weight`, and the distances of the INT8
            network, of that with the unit in float, and of the float network with the unit in INT8.
        ap: stage → network → AP of all images; stage `recipe` has recipes by what they leave in float.
        ap_resampled: stage → network → that AP on resampled images, as `Resampled.to_text` gives it.
        seconds: stage → wall time spent on it so far.
        finished: the result is written; the last thing that a run writes.
        dataset: what the run reads, as `utils.evaluation.fingerprint` says it.
        command: the command line that started the run.
    """

    options: dict[str, Any]
    recipe: dict[str, Any]
    weights_hash: str
    amax: dict[str, float] = field(default_factory=dict)
    screened: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    ap: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    finished: bool = False
    dataset: str = ""
    command: str = ""
    ap_resampled: dict[str, dict[str, str]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the state, in the main process; a reader sees the old one or the new one."""
        if not distributed.is_main():
            return
        with atomic_path(folder / STATE_FILE) as temporary:
            temporary.write_text(json.dumps(marked(asdict(self), VERSION)), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> AnalysisState:
        """Read the state of the run in `folder`.

        Raises:
            CheckpointError: it is damaged, or of another version.
        """
        path = folder / STATE_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged ({type(error).__name__}); {START_AGAIN}") from error
        return cls(**unmarked(content, VERSION, path))

    def resampled(self, stage: str) -> dict[str, Resampled]:
        """Network → its AP on resampled images, where that is known."""
        return {name: Resampled.from_text(text) for name, text in self.ap_resampled.get(stage, {}).items()}

    def keep_resampled(self, stage: str, name: str, found: Resampled | None) -> None:
        """Remember AP of a network on resampled images."""
        if found is not None:
            self.ap_resampled.setdefault(stage, {})[name] = found.to_text()

    def add_seconds(self, stage: str, seconds: float) -> None:
        """Count time that was spent on a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds


def find_analysis(where: str | Path, project: str | Path) -> Path:
    """The run folder that `qat.py sensitive --resume` means.

    Args:
        where: a run folder or a file in it; empty for the run last written to below `project`.

    Raises:
        InputError: no run is there.
    """
    if where:
        for candidate in (Path(where), Path(where).parent):
            if (candidate / STATE_FILE).is_file():
                return candidate
        raise InputError(f"--resume {where}: no sensitivity run there; expected a folder with {STATE_FILE}")
    states = list(Path(project).glob(f"*/{STATE_FILE}"))
    if not states:
        raise InputError(f"--resume: no run in {project}; give the run's folder, as in --resume {project}/exp")
    return max(states, key=lambda path: path.stat().st_mtime_ns).parent
