"""The state of a quantize run: written whole, read back equal, found again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from report_examples import make_row

from utils.core.errors import CheckpointError, InputError
from utils.core.score import Score
from utils.jobs import run_state
from utils.jobs.options import QuantizeOptions
from utils.jobs.run_state import Best, RunState
from utils.jobs.sensitivity.report import AnalysisState
from utils.reports.schema import UNFINISHED, Report


@pytest.fixture
def state() -> RunState:
    options = QuantizeOptions(weights="weights/toy.pt").model_dump()
    return RunState(options, {"finetune": {"lr": {0: 1e-6}}, "float": []}, "00ff")


def row(stage: str, ap: float | None = 0.5) -> dict:
    """A row of results, as a run keeps it."""
    return make_row(stage, file="a.pt", ap=ap).model_dump()


def write(path: Path, age: float = 0.0) -> Path:
    path.write_bytes(b"x")
    seconds = path.stat().st_mtime - age
    os.utime(path, (seconds, seconds))
    return path


def test_a_state_comes_back_equal(tmp_path, state):
    weights = tmp_path / "weights"
    state.rows |= {"PTQ": row("PTQ"), "QAT": {**row("QAT"), "mask_ap": 0.4, "mask_ap50": 0.6, "mask_precision": 0.5,
                                               "mask_recall": 0.5, "mask_ap_resampled": ""}}  # fmt: skip
    state.history.append({"epoch": 0, "ap": 0.5, "ap50": 0.6, "loss": 0.1, "held_out": 0.2, "lr": 1e-6, "seconds": 1.0})
    state.files, state.checkpoint, state.best = ["a.pt"], "a.pt", Best(Score(0.5, 0.4), 0, "a.pt", 0.2)
    optimizer = {"state": {0: {"exp_avg": torch.arange(3.0)}}, "param_groups": [{"lr": 0.0}]}
    state.trainer = {"optimizer": optimizer, "scaler": {}, "log_amax": torch.ones(2)}
    state.save(tmp_path)
    write(weights / "a.pt")
    loaded = RunState.load(tmp_path)
    assert torch.equal(loaded.trainer["log_amax"], torch.ones(2))
    assert torch.equal(loaded.trainer["optimizer"]["state"][0]["exp_avg"], torch.arange(3.0))
    loaded.trainer = state.trainer
    assert loaded == state


@pytest.mark.parametrize("content", [b"", b"not a pickle", None])
def test_a_damaged_state_is_named(tmp_path, state, content):
    state.save(tmp_path)
    path = tmp_path / "weights" / run_state.STATE_FILE
    path.write_bytes(path.read_bytes()[:200] if content is None else content)
    with pytest.raises(CheckpointError, match=r"damaged|truncated.*; start a new run"):
        RunState.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"state_version": 1}, {"state_version": "2"}, {"options_hash": "00"}, {"options": {"seed": 1}}, {"recipe": {}}],
    ids=str,
)
def test_what_this_version_did_not_write_is_no_state(tmp_path, state, change):
    state.save(tmp_path)
    path = tmp_path / "weights" / run_state.STATE_FILE
    content = torch.load(path, weights_only=True)
    AnalysisState(state.options, state.recipe, "00ff").save(tmp_path)
    analysis = json.loads((tmp_path / "state.json").read_text())
    assert AnalysisState.load(tmp_path).options == state.options
    (tmp_path / "state.json").write_text(json.dumps({**analysis, **change}))
    for other in ({**content, **change}, {"model": 1}, [1], None):
        torch.save(other, path)
        with pytest.raises(CheckpointError, match=r"last\.pt .*start a new run"):
            RunState.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"state\.json .*start a new run"):
        AnalysisState.load(tmp_path)


def test_a_checkpoint_that_is_gone_is_named(tmp_path, state):
    state.files, state.checkpoint, state.best = ["ptq_toy.pt"], "ptq_toy.pt", Best(Score(0.5), None, "ptq_toy.pt")
    state.rows["PTQ"] = row("PTQ")
    state.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"ptq_toy\.pt is gone"):
        RunState.load(tmp_path)


def test_the_best_is_replaced_only_by_a_better_one(state):
    assert state.offer(Best(None, None, "ptq"))
    assert state.offer(Best(Score(0.3), 0, "first", 2.0)), "nothing is known of what was there"
    assert not state.offer(Best(Score(0.4), 1, "equal", 2.0))
    assert not state.offer(Best(Score(0.5), 2, "worse", 2.1))
    assert not state.offer(Best(Score(0.5), 2, "unknown"))
    assert state.offer(Best(Score(0.2), 3, "better", 1.9)), "AP chooses nothing"
    assert state.best == Best(Score(0.2), 3, "better", 1.9)


def test_file_names_carry_the_score():
    assert run_state.checkpoint_name("ptq", "yolov9-c", Score(0.52968)) == "ptq_ap_0.5297_yolov9-c.pt"
    segmentation = run_state.checkpoint_name("ptq", "yolov9-c-dseg", Score(0.5201, 0.42131))
    assert segmentation == "ptq_ap_0.5201_mask_0.4213_yolov9-c-dseg.pt"
    assert run_state.checkpoint_name("ptq", "yolov9-c", None) == "ptq_yolov9-c.pt"
    assert run_state.checkpoint_name("qat_ep_3", "yolov9-c", Score(0.5)) == "qat_ep_3_ap_0.5000_yolov9-c.pt"
    assert run_state.checkpoint_name("qat_ep_3", "seg", Score(0.5, 0.4)) == "qat_ep_3_ap_0.5000_mask_0.4000_seg.pt"
    stems = ("yolov9-c", "best", "best-converted", "BEST_2", "bestie")
    names = [run_state.checkpoint_name("qat_best", stem) for stem in stems]
    assert names == [f"qat_best{end}.pt" for end in ("_yolov9-c", "", "-converted", "_2", "_bestie")]


def test_runs_are_found_by_folder_file_or_time(tmp_path, state):
    for name, age in (("exp", 50), ("exp2", 5), ("exp3", 500)):
        state.save(tmp_path / name)
        path = tmp_path / name / "weights" / run_state.STATE_FILE
        seconds = path.stat().st_mtime - age
        os.utime(path, (seconds, seconds))
    assert run_state.find_run("", tmp_path) == tmp_path / "exp2"
    for name, note in (("exp2", "done"), ("exp", "done"), ("exp3", f"{UNFINISHED}; continue with: ...")):
        Report(command="", notes=[note]).save(tmp_path / name / "report.json")
    assert run_state.find_run("", tmp_path) == tmp_path / "exp3"  # the only one with something left to do
    for where in (tmp_path / "exp", tmp_path / "exp/weights", tmp_path / "exp/weights/last.pt"):
        assert run_state.find_run(where, "elsewhere") == tmp_path / "exp"
    with pytest.raises(InputError, match="no run in"):
        run_state.find_run("", tmp_path / "nothing")
    with pytest.raises(InputError, match="no run there"):
        run_state.find_run(tmp_path, tmp_path)
