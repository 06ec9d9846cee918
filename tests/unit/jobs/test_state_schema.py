"""Files that runs wrote, with one field changed: refused in one line that names the field."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from report_examples import make_row

from models.quantize.recipe import Recipe
from utils.core.errors import CheckpointError, InputError
from utils.core.file_schema import check, listing, number, record
from utils.core.resampled import Resampled
from utils.core.score import Score
from utils.jobs import run_state, state_schema
from utils.jobs.inputs import AUGMENTATION, read_hyp
from utils.jobs.options import QuantizeOptions, SensitiveOptions
from utils.jobs.run_state import Best, RunState
from utils.jobs.sensitivity.state import AnalysisState
from utils.reports.schema import Row

DELETED = object()
ROW = make_row("PTQ", file="a.pt", ap=0.5).to_dict()
MOMENTS = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}


def changed(content: Any, path: str, value: Any) -> Any:
    """A copy with the field at `path` (parts joined by '/') replaced or deleted."""
    content = copy.deepcopy(content)
    *way, last = path.split("/")
    place = content
    for part in way:
        place = place[int(part) if isinstance(place, list) else part]
    key = int(last) if isinstance(place, list) else last
    if value is DELETED:
        del place[key]
    else:
        place[key] = value
    return content


def one_line(error: BaseException, path: Path, *texts: str) -> None:
    message = str(error)
    assert "\n" not in message
    assert message.startswith(f"{path} is damaged or from another version: "), message
    assert len(message) < 700
    for text in texts:
        assert text in message


# --- last.pt ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A run after two epochs, and the content of its last.pt."""
    state = RunState(QuantizeOptions(weights="toy.pt").to_dict(), Recipe().to_dict(), "00ff")
    state.rows = {stage: {**ROW, "stage": stage} for stage in ("float", "PTQ", "QAT")}
    state.history = [
        {"epoch": epoch, "ap": 0.5, "ap50": 0.6, "loss": 0.1, "held_out": 0.2, "lr": 1e-6, "seconds": 1.0}
        for epoch in range(2)
    ]
    state.files, state.checkpoint, state.best = ["a.pt", "b.pt"], "b.pt", Best(Score(0.5), 0, "a.pt", 0.2)
    state.trainer = {
        "optimizer": {"state": {0: MOMENTS}, "param_groups": [{"lr": 0.0}]},
        "scaler": {},
        "log_amax": None,
    }
    state.save(tmp_path)
    for name in state.files:
        (run_state.weights_folder(tmp_path) / name).write_bytes(b"x")
    path = run_state.weights_folder(tmp_path) / run_state.STATE_FILE
    return tmp_path, torch.load(path, weights_only=True)


RUN_CHANGES = [
    ("run_state", 2, "run_state is 2, expected 1"),
    ("run_state", DELETED, "run_state is missing"),
    ("options", 3, "options is 3, expected a mapping"),
    ("options/batch_size", "ten", "--batch-size is 'ten'; expected an integer from 1 to 4,096"),
    ("options/seed", 2**70, "--seed is 1180591620717411303424"),
    ("options/weights", DELETED, "options.weights is missing"),
    ("options/weights", None, "--weights is None; expected a text"),
    ("recipe", [1], "recipe is [1], expected a mapping"),
    ("recipe/head", "none", "recipe: head is 'none'"),
    ("recipe/surprise", 1, "recipe: the recipe has no key 'surprise'"),
    ("weights_hash", 7, "weights_hash is 7, expected a SHA-256"),
    ("rows", [], "rows is [], expected a mapping"),
    ("rows/PTQ", DELETED, "rows.PTQ is missing"),
    ("rows/PTQ/ap", "high", "rows.PTQ: ap is 'high'"),
    ("rows/PTQ/ap", 7.0, "rows.PTQ: ap is 7.0"),
    ("rows/PTQ/ap_resampled", "0.5", "rows.PTQ: ap_resampled is"),
    ("rows/QAT/file", DELETED, "rows.QAT: the key file is missing"),
    ("rows/other", ROW, "a key of rows is 'other'"),
    ("history/0", 5, "history[0] is 5"),
    ("history/1/epoch", 5, "history[1].epoch is 5, expected 1"),
    ("history/1/ap", math.nan, "history[1].ap is nan, expected a finite number from 0 to 1"),
    ("history/1/seconds", DELETED, "history[1].seconds is missing"),
    ("history/1/loss", torch.ones(2, 3), "history[1].loss is Tensor float32 [2, 3]"),
    ("files", "a.pt", "files is 'a.pt', expected a list"),
    ("files/0", "../../etc.pt", "files[0] is '../../etc.pt', expected the name of a checkpoint"),
    ("checkpoint", "../b.pt", "checkpoint is '../b.pt'"),
    ("checkpoint", "c.pt", "checkpoint is 'c.pt', expected one of files"),
    ("checkpoint", None, "checkpoint is None"),
    ("best", None, "best is None, expected the best checkpoint so far"),
    ("best/epoch", 2, "best.epoch is 2, expected one of the 2 epochs"),
    ("best/ap", True, "best.ap is True"),
    ("best/file", 0, "best.file is 0"),
    ("trainer", 1, "trainer is 1"),
    ("trainer/optimizer", {}, "trainer.optimizer.state is missing"),
    ("trainer/optimizer/param_groups", [], "trainer.optimizer.param_groups is []"),
    ("trainer/scaler", {"scale": 1.0}, "trainer.scaler.growth_factor is missing"),
    ("stopped", 5, "stopped is 5, expected a text"),
    ("patience_since", "0", "patience_since is '0', expected"),
    ("legs", [], "legs is []"),
    ("legs", [1], "legs is [1], expected 0 and later epochs, in their order, none above 2"),
    ("legs", [0, 2, 1], "legs is [0, 2, 1], expected 0 and later"),
    ("legs", [0, 1, 1], "legs is [0, 1, 1], expected 0 and later"),
    ("legs", [0, 3], "legs is [0, 3], expected 0 and later"),
    ("best/held_out", math.inf, "best.held_out is inf"),
    ("history/1/held_out", -1.0, "history[1].held_out is -1.0"),
    ("trainer/extra", 1, "trainer.extra is 1, expected no such field"),
    ("finished", "yes", "finished is 'yes', expected true or false"),
    ("surprise", 1, "surprise is 1, expected no such field"),
]


@pytest.mark.parametrize(("path", "value", "message"), RUN_CHANGES)
def test_a_changed_state_of_a_quantize_run_names_the_field(run, path, value, message):
    folder, content = run
    file = run_state.weights_folder(folder) / run_state.STATE_FILE
    RunState.load(folder)
    before = sorted(file.parent.iterdir())
    torch.save(changed(content, path, value), file)
    with pytest.raises(CheckpointError) as caught:
        RunState.load(folder)
    one_line(caught.value, file, message, "; start a new run")
    assert sorted(file.parent.iterdir()) == before


def test_a_state_of_an_earlier_version_has_no_losses_on_held_out_images_and_no_legs(run):
    folder, content = run
    del content["legs"], content["patience_since"], content["best"]["held_out"], content["trainer"]["log_amax"]
    for entry in content["history"]:
        del entry["held_out"]
    torch.save(content, run_state.weights_folder(folder) / run_state.STATE_FILE)
    state = RunState.load(folder)
    assert (state.legs, state.best.held_out) == ([0], None)


def test_a_state_of_an_earlier_version_has_no_resampled_ap_and_no_engines(run, tmp_path):
    folder, content = run
    for row in content["rows"].values():
        del row["ap_resampled"]
    torch.save(content, run_state.weights_folder(folder) / run_state.STATE_FILE)
    assert Row(**RunState.load(folder).rows["PTQ"]).resampled() is None
    older = changed(changed(ANALYSIS, "ap_resampled", DELETED), "engines", DELETED)
    (tmp_path / "state.json").write_text(json.dumps(older))
    assert AnalysisState.load(tmp_path).resampled("units") == {}
    (tmp_path / "state.json").write_text(json.dumps(ANALYSIS))
    assert AnalysisState.load(tmp_path).resampled("units")["INT8"].ap == (0.5, 0.25)


@pytest.mark.parametrize("content", [None, [], 5, "text", {}, torch.ones(2)])
def test_another_file_in_the_place_of_the_state(run, content):
    folder, _ = run
    file = run_state.weights_folder(folder) / run_state.STATE_FILE
    torch.save(content, file)
    with pytest.raises(CheckpointError) as caught:
        RunState.load(folder)
    one_line(caught.value, file)


def test_a_flipped_bit_in_the_state_is_found(run):
    folder, _ = run
    file = run_state.weights_folder(folder) / run_state.STATE_FILE
    whole = bytearray(file.read_bytes())
    whole[whole.index(b"exp_avg") + 1] ^= 2
    file.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"data.pkl does not have its checksum; start a new run"):
        RunState.load(folder)


# --- state.json and parts ---------------------------------------------------------------------------------------------


RESAMPLED = Resampled.of("a" * 32, [0.5, 0.25]).to_text()
ANALYSIS = {
    "analysis_state": 1,
    "options": SensitiveOptions(weights="toy.pt").to_dict(),
    "recipe": Recipe().to_dict(),
    "weights_hash": "00ff",
    "amax": {"model.0": 1.5},
    "screened": {"units": {"0": {"model.0": [10, 1.0, 0.5, 0.2, 0.3]}}},
    "ap": {"units": {"float": 0.5, "INT8": 0.4}},
    "ap_resampled": {"units": {"float": RESAMPLED, "INT8": RESAMPLED}},
    "seconds": {"calibration": 1.0},
    "finished": False,
    "engines": {
        "measured_on": "TensorRT 8.6.0",
        "times": {"FP16": {"ms": [4.0, 4.1], "int8": [2.0, 2.1], "again": [2.0, 2.0], "seconds": 20.0}},
    },
}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("analysis_state", 2, "analysis_state is 2, expected 1"),
        ("options/budget", "long", "--budget is 'long'"),
        ("options/metric", 5, "--metric is 5; expected a text"),
        ("amax/model.0", 0, "amax.model.0 is 0, expected a finite number above 0"),
        ("amax/model.0", math.nan, "amax.model.0 is nan"),
        ("amax/model.0", math.inf, "amax.model.0 is inf"),
        ("amax/model.0", -1.0, "amax.model.0 is -1.0"),
        ("screened/units/0/model.0", [1, 2], "screened.units.0.model.0 is [1, 2], expected 5 items"),
        ("screened/units/x", {}, "a key of screened.units is 'x'"),
        ("ap/units/float", None, "ap.units.float is None"),
        ("ap/units/INT8", DELETED, "ap.units.INT8 is missing"),
        ("ap_resampled/units/float", 0.5, "ap_resampled.units.float is 0.5, expected a text"),
        ("ap_resampled/units/float", "a" * 32 + " 0.5000000 2.0000000", "ap_resampled.units.float holds no hash"),
        ("ap_resampled", [], "ap_resampled is [], expected a mapping"),
        ("seconds/calibration", 10**400, "seconds.calibration is a number of more than 40 digits"),
        ("finished", 0, "finished is 0"),
        ("engines/measured_on", 3, "engines.measured_on is 3, expected a text"),
        ("engines/times/FP16/ms", [], "engines.times.FP16.ms is [], expected"),
        ("engines/times/FP16/ms/0", 0, "engines.times.FP16.ms[0] is 0, expected a finite number above 0"),
        ("engines/times/FP16/again", [2.0], "engines.times.FP16.again is [2.0], expected 2 items"),
        ("engines/times/FP16/int8", DELETED, "engines.times.FP16.int8 is missing"),
        ("engines/times", DELETED, "engines.times is missing"),
        ("engines/more", 1, "engines.more is 1, expected no such field"),
        ("recipe/calibration", {"batches": "x"}, "recipe: "),
        ("other", 1, "other is 1, expected no such field"),
    ],
)
def test_a_changed_state_of_a_sensitivity_run_names_the_field(tmp_path, path, value, message):
    file = tmp_path / "state.json"
    file.write_text(json.dumps(ANALYSIS))
    assert AnalysisState.load(tmp_path).amax == {"model.0": 1.5}
    file.write_text(json.dumps(changed(ANALYSIS, path, value)))
    with pytest.raises(CheckpointError) as caught:
        AnalysisState.load(tmp_path)
    one_line(caught.value, file, message, "; start a new run")


@pytest.mark.parametrize("text", ["", "[" * 100_000, "\x00", '"\\ud800"', "null", "[1]", '{"analysis_state": NaN}'])
def test_what_is_no_state_of_a_sensitivity_run(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        AnalysisState.load(tmp_path)
    one_line(caught.value, tmp_path / "state.json")


PART = {
    "float": {
        "correct": [torch.zeros(2, 10, dtype=torch.bool)],
        "detections": [torch.zeros(2, 2)],
        "labels": [torch.zeros(1)],
        "paths": ["a.jpg"],
    }
}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("float", 1, "float is 1"),
        ("float/correct/0", torch.zeros(2, 10), "float.correct[0] is Tensor float32 [2, 10]"),
        ("float/correct/0", torch.zeros(3, 10, dtype=torch.bool), "expected 2 rows"),
        ("float/detections/0", torch.zeros(2, 3), "float.detections[0] is Tensor float32 [2, 3]"),
        ("float/labels", [], "float.labels is []"),
        ("float/paths", DELETED, "float.paths is missing"),
    ],
)
def test_a_changed_part_of_a_sensitivity_run_names_the_field(tmp_path, path, value, message):
    file = tmp_path / "a.pt"
    state_schema.check_part(PART, file)
    with pytest.raises(CheckpointError) as caught:
        state_schema.check_part(changed(PART, path, value), file)
    one_line(caught.value, file, message, "; delete it")


# --- --hyp ------------------------------------------------------------------------------------------------------------

GOOD = dict.fromkeys(AUGMENTATION, 0.0)


@pytest.mark.parametrize(
    "value", ["'half'", "[1]", "{a: 1}", "true", "null", ".nan", ".inf", "-1", "1000", "2020-01-01"]
)
@pytest.mark.parametrize("name", ["mosaic", "degrees", "perspective"])
def test_hyp_holds_numbers_within_bounds(tmp_path, name, value):
    path = tmp_path / "hyp.yaml"
    path.write_text("\n".join(f"{key}: {0.0 if key != name else value}" for key in GOOD) + "\nlr0: text\n")
    with pytest.raises(InputError) as caught:
        read_hyp(path)
    message = str(caught.value)
    assert message.startswith(f"--hyp {path}: {name} is ")
    assert "expected a finite number from 0 to" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text", ["- 1", "5", "", "mosaic: 1", "a: 2020-13-99", "[" * 1000, "\x00", "? [a]\n: b", "&a [*a]"]
)
def test_hyp_that_is_none(tmp_path, text):
    (tmp_path / "hyp.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        read_hyp(tmp_path / "hyp.yaml")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800


def test_hyp_gives_what_the_augmentation_reads(tmp_path):
    path = tmp_path / "hyp.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in GOOD.items()) + "\nlr0: 0.01\n")
    assert read_hyp(path) == GOOD


# --- the checker ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [10**5000, "x" * 100_000, [[[[[[1]]]]]] * 1000, {"a": {"b": {"c": "d" * 1000}}}, "a\nb", b"\x00" * 999],
    ids=["digits", "letters", "lists", "mappings", "lines", "bytes"],
)
def test_values_are_shown_on_one_short_line(value):
    with pytest.raises(CheckpointError) as caught:
        check({"scores": [value]}, record({"scores": listing(number(0, 1))}), "a.json", "run it again")
    message = str(caught.value)
    assert "scores[0] is " in message
    assert "\n" not in message
    assert len(message) < 400


def test_a_file_that_fits_passes():
    rule: Callable[..., None] = record({"scores": listing(number(0, 1))})
    check({"scores": [0, 0.5, 1]}, rule, "a.json", "run it again")
