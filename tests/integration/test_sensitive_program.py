"""`qat.py sensitive` and `qat.py calibrate` as a user calls them: what they find, and that the recipe mends it."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from qat_runs import SMALL_RUN, counted, half_of_layers, killed, quantize, report_of, write_small_set
from scipy.stats import spearmanr

import qat
from models.quantize import checkpoint
from models.quantize.recipe import Recipe
from utils import upstream
from utils.core.score import Resampled
from utils.jobs import calibrate
from utils.jobs.run_state import AnalysisState
from utils.jobs.sensitivity import search
from utils.jobs.sensitivity.units import Switches
from utils.reports.schema import Row

SUMMARY = "summary-sensitive-analysis.json"
SIDE = "160"
DEMO_SIZE = ("--imgsz", SIDE, "--batch-size", "10", "--workers", "0", "--device", "cpu", "--calib-images", "40")
TINY = SMALL_RUN[:-2]  # without --iters
HARSH = ("--calib-method", "percentile", "--percentile", "99")  # layers differ by more than AP's noise


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, demo_data: Path) -> Path:
    return write_small_set(tmp_path_factory.mktemp("set"), demo_data, train=40, val=40, spread=True)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory, demo_data: Path) -> Path:
    return write_small_set(tmp_path_factory.mktemp("few"), demo_data, train=4, val=6)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The option of a recipe that leaves half of the layers to look at."""
    return half_of_layers(tmp_path_factory.mktemp("half"))


def sensitive(weights: Path, data: Path, project: Path, *words: str) -> int:
    return qat.main(["sensitive", "--weights", str(weights), "--data", str(data), "--project", str(project), *words])


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / SUMMARY).read_text())


def test_a_run_that_measures_ap_with_every_layer_in_float(demo_data, demo_weights, tmp_path):
    words = (*DEMO_SIZE, "--imgsz", "192", *HARSH, "--num-image", "60", "--metric", "ap", "--target-drop", "1")
    assert sensitive(demo_weights, demo_data, tmp_path, *words) == 0
    run, summary = tmp_path / "exp", summary_of(tmp_path / "exp")
    rows = summary["rows"]
    assert len(rows) == 16  # of 22 layers, those that compute something
    assert spearmanr([row["score"] for row in rows], [row["ap"] for row in rows])[0] >= 0.8
    scored = sorted(rows, key=lambda row: row["score"], reverse=True)
    assert {row["unit"] for row in rows[:2]} <= {row["unit"] for row in scored[: search.CONFIRMED[0]]}
    assert summary["ap"]["float"] - summary["ap"]["INT8"] > 0.1
    assert [row["ap"] for row in rows] == sorted((row["ap"] for row in rows), reverse=True)
    costs = {row["unit"]: row["cost"] for row in rows}
    assert sum(costs.values()) == pytest.approx(1)
    assert costs["model.21"] == pytest.approx(148.4 / 406, rel=0.01)
    names = {SUMMARY, "sensitivity.png", "recipe.yaml", "report.json", "report.html", "run.log", "state.pt"}
    assert {path.name for path in run.iterdir()} - {".lock"} == names
    assert (run / "sensitivity.png").stat().st_size > 10_000
    recipe = Recipe.from_file(run / "recipe.yaml")
    assert (recipe.float, recipe.calibration.percentile) == (tuple(summary["recipe"]["float"]), 99)


def test_ap_with_a_layer_in_float_is_what_quantize_gets(few, demo_weights, tmp_path):
    words = ("--num-image", "6", "--metric", "ap", "--target-drop", "1", "--name", "ranked")
    assert sensitive(demo_weights, few, tmp_path, *TINY, *words) == 0
    summary = summary_of(tmp_path / "ranked")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("float: [model.21]\n")
    assert quantize(demo_weights, few, tmp_path, "--ptq-only", "--recipe", str(recipe)) == 0
    found = {row["stage"]: row["ap"] for row in report_of(tmp_path / "exp")["rows"]}
    row = next(row for row in summary["rows"] if row["unit"] == "model.21")
    assert row["ap"] == pytest.approx(found["PTQ"], abs=1e-9)
    assert summary["ap"]["float"] == pytest.approx(found["float"], abs=1e-9)
    assert row["gain"] == pytest.approx(row["ap"] - summary["ap"]["INT8"])


# The class branch of the head at stride 8; a channel whose activation is large wherever it matters, so that SiLU is
# nearly linear there: silu(1000 x) is 1000 silu(x) to 0.15 % of what the next convolution reads.
PLANTED, READER, CHANNEL = "model.21.cv3.0.1", "model.21.cv3.0.2", 37


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, demo_weights: Path) -> Path:
    """The demo model with one channel 1000 times as large, and the weights that read it 1000 times smaller."""
    model = copy.deepcopy(upstream.load_float(demo_weights).model)
    with torch.no_grad():
        norm = model.get_submodule(PLANTED).bn
        norm.weight[CHANNEL] *= 1000
        norm.bias[CHANNEL] *= 1000
        model.get_submodule(READER).weight[:, CHANNEL] /= 1000
    path = tmp_path_factory.mktemp("planted") / "planted.pt"
    torch.save({"epoch": -1, "model": model, "ema": None}, path)
    return path


def test_a_planted_problem_is_found_and_the_recipe_mends_it(planted, data, demo_weights, tmp_path, capsys):
    assert sensitive(planted, data, tmp_path, *DEMO_SIZE, "--num-image", "30", "--name", "mended") == 0
    summary = summary_of(tmp_path / "mended")
    command = ["quantize", "--ptq-only", "--recipe", str(tmp_path / "mended/recipe.yaml"), "--weights", str(planted)]
    common = ["--data", str(data), "--project", str(tmp_path), *DEMO_SIZE]
    assert qat.main([*command, *common]) == 0
    found = {row["stage"]: row["ap"] for row in report_of(tmp_path / "exp")["rows"]}
    assert qat.main(["eval", "--weights", str(demo_weights), *common[:-2]]) == 0
    following = f"next: python qat.py quantize --weights {demo_weights} --data {data} --imgsz {SIDE}"
    assert capsys.readouterr().out.splitlines()[-1] == following
    assert found["float"] == pytest.approx(report_of(tmp_path / "exp2")["rows"][0]["ap"], abs=0.002)
    assert summary["ap"]["INT8"] < 0.5 * summary["ap"]["float"]
    assert summary["rows"][0]["unit"] == "model.21"
    assert max(summary["rows"], key=lambda row: row["score"])["unit"] == "model.21"
    assert "model.21" in summary["recipe"]["units"]
    assert found["PTQ"] > found["float"] - 0.005


@pytest.mark.usefixtures("blank_plots")
class TestResume:
    words = (*TINY, *HARSH, "--float-budget", "0.1")

    @pytest.fixture(scope="class")
    def whole(self, tmp_path_factory, few, half, demo_weights):
        """A run that was never interrupted, and how many times it ran the network."""
        project = tmp_path_factory.mktemp("whole")
        with pytest.MonkeyPatch.context() as patch:
            calls = counted(patch, Switches, "network_in")
            assert sensitive(demo_weights, few, project, *self.words, *half) == 0
        return project / "exp", len(calls)

    def test_a_killed_run_finds_the_same(self, whole, few, half, demo_weights, tmp_path, monkeypatch):
        run, total = whole
        # AP of two networks, 3 batches of 2 + 8 while screening, then AP of the 4 units and more
        killed(lambda: sensitive(demo_weights, few, tmp_path, *self.words, *half), Switches, "network_in", 35)
        again = counted(monkeypatch, Switches, "network_in")
        assert qat.main(["sensitive", "--resume", str(tmp_path / "exp")]) == 0
        assert len(again) < total - 10  # what was screened is not screened again
        ours, theirs = summary_of(tmp_path / "exp"), summary_of(run)
        for key in ("rows", "ap", "recipe"):
            assert ours[key] == theirs[key], key

    def test_a_finished_run_runs_nothing_again(self, whole, monkeypatch, capsys):
        run, _ = whole
        before = (run / "recipe.yaml").read_text()
        calls = counted(monkeypatch, Switches, "network_in")
        assert qat.main(["sensitive", "--resume", "--project", str(run.parent)]) == 0
        assert calls == []
        assert (run / "recipe.yaml").read_text() == before
        out = capsys.readouterr().out
        assert "the run is finished" in out
        assert "Top0: Using fp16" in out

    @pytest.mark.parametrize("gain", [0.0, 0.1])
    def test_a_recipe_is_recommended_where_it_gains_measurably(self, gain, whole, half, tmp_path):
        run = shutil.copytree(whole[0], tmp_path / "exp")
        state, given = AnalysisState.load(run), Recipe.from_file(half[1]).float
        (name,) = (name for name in state.rows if name.startswith("recipe"))
        int8 = Row(**state.rows["INT8"])
        shifted = Resampled.of(int8.ap_resampled.images, (ap + gain for ap in int8.ap_resampled.ap))
        state.rows[name] |= {"ap": int8.ap + gain, "ap_resampled": shifted.to_text()}
        state.save(run)
        assert qat.main(["sensitive", "--resume", str(run)]) == 0
        summary, kept = summary_of(run), Recipe.from_file(run / "recipe.yaml").float
        assert bool(summary["recipe"]["units"]) == (kept != given) == bool(gain)
        assert (summary["ap"]["recipe"] is None, "gains +0.0000" in "".join(summary["notes"])) == (not gain, not gain)


class TestCalibrate:
    @pytest.fixture(scope="class")
    def swept(self, tmp_path_factory, few, half, demo_weights):
        project = tmp_path_factory.mktemp("swept")
        words = ["calibrate", "--weights", str(demo_weights), "--data", str(few), "--project", str(project), *TINY]
        assert qat.main([*words, *half]) == 0
        return project / "exp"

    def test_every_method_has_the_ap_that_quantize_gets(self, swept, few, half, demo_weights, tmp_path):
        found = json.loads((swept / "calibration.json").read_text())
        assert list(found["methods"]) == list(calibrate.METHODS)
        assert found["images"] == 6 < found["options"]["num_image"]  # all that there are
        for name, words in {"mse": ("mse",), "percentile 99.9": ("percentile", "--percentile", "99.9")}.items():
            words = ("--calib-method", *words, "--ptq-only", "--no-eval-origin", "--name", name, *half)
            assert quantize(demo_weights, few, tmp_path, *words) == 0
            assert report_of(tmp_path / name)["rows"][0]["ap"] == pytest.approx(found["methods"][name], abs=1e-9)
        recipe = Recipe.from_file(swept / "recipe.yaml")
        assert found["chosen_ap"] == found["methods"][found["name"]]
        assert found["name"] == found["auto"], "six images show no other method to agree measurably more"
        assert recipe.calibration.method == found["chosen"]["method"]
        assert recipe.float == Recipe.from_file(half[1]).float, "of the recipe that was given, all else is kept"
        page, (first, *rows) = (swept / "report.html").read_text(), report_of(swept)["rows"]
        assert first["stage"] == "float"
        assert {row["stage"].removeprefix("chosen: ") for row in rows} == set(calibrate.METHODS)
        assert rows[-1]["stage"] == f"chosen: {found['name']}"
        assert all(f"{row['ap']:.4f}" in page for row in rows)

    def test_its_recipe_is_kept_in_that_of_sensitive(self, swept, few, demo_weights, tmp_path):
        recipe = swept / "recipe.yaml"
        words = (*TINY, "--num-image", "2", "--target-drop", "1", "--recipe", str(recipe))
        assert sensitive(demo_weights, few, tmp_path, *words) == 0
        assert Recipe.from_file(tmp_path / "exp/recipe.yaml") == Recipe.from_file(recipe)
        (sentence,) = (note for note in report_of(tmp_path / "exp")["notes"] if note.startswith("The recipe keeps "))
        assert ": INT8 with --recipe loses at most " in sentence

    def test_the_default_auto_compares_losses_on_training_images(self, demo_data, demo_weights, tmp_path):
        """The losses are those that QAT begins with where each method is named."""
        few = write_small_set(tmp_path / "set", demo_data, train=200, val=6)
        words = ("--no-eval-origin", "--no-eval-ptq", "--epochs", "1", "--name")
        losses = {}
        for name in calibrate.CANDIDATES:
            method, *percentile = name.split()
            named = ("--calib-method", method, *(("--percentile", *percentile) if percentile else ()))
            assert quantize(demo_weights, few, tmp_path, *words, name, *named) == 0
            terms = torch.load(tmp_path / name / "weights/last.pt", weights_only=True)["trainer"]["ptq"]
            losses[name] = float(terms[:, 0].sum() / terms[:, 1].sum())
        assert len(set(losses.values())) == 3
        assert quantize(demo_weights, few, tmp_path, "--ptq-only", "--unlabelled") == 0
        (note,) = (note for note in report_of(tmp_path / "exp")["notes"] if "calibration auto" in note)
        assert [f"{name} {loss:.4g}" in note for name, loss in losses.items()] == [True] * 3
        assert note.count(" ± ") == 2
        best = note.partition("calibration auto: ")[2].partition(",")[0]
        assert best == "percentile 99.999" or losses[best] == min(losses.values())
        stored = checkpoint.load_quantized(next((tmp_path / "exp/weights").glob("ptq_*"))).recipe.calibration
        assert stored == Recipe().replace(**calibrate.METHODS[best], calibration_images=4).calibration
        words = (*TINY, "--num-image", "2", "--target-drop", "1")
        assert sensitive(demo_weights, few, tmp_path, *words, "--name", "sensitive") == 0
        resumed = Recipe.from_stored(AnalysisState.load(tmp_path / "sensitive").recipe)
        assert Recipe.from_file(tmp_path / "sensitive/recipe.yaml").calibration == resumed.calibration == stored
