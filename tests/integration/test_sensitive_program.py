"""`qat.py sensitive` and `qat.py calibrate` as a user calls them: what they find, and that the recipe mends it."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from qat_runs import SMALL_RUN, half_of_layers, quantize, report_of, write_small_set
from scipy.stats import spearmanr

import qat
from models.quantize import checkpoint
from models.quantize.recipe import Recipe
from utils import upstream
from utils.core.score import Resampled
from utils.jobs import calibrate
from utils.jobs.sensitivity import search
from utils.jobs.sensitivity.report import AnalysisState
from utils.jobs.sensitivity.units import Switches

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


def ptq(weights: Path, data: Path, project: Path, *words: str) -> dict[str, float]:
    """AP of the float network and of PTQ, by `qat.py quantize`."""
    command = ["quantize", "--weights", str(weights), "--data", str(data), "--project", str(project), "--ptq-only"]
    assert qat.main([*command, *DEMO_SIZE, *words]) == 0
    return {row["stage"]: row["ap"] for row in report_of(project / "exp")["rows"]}


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory, demo_data: Path, demo_weights: Path) -> Path:
    """A run that measures AP with every layer in float, and looks for no recipe."""
    project = tmp_path_factory.mktemp("ranked")
    words = (*DEMO_SIZE, "--imgsz", "192", *HARSH, "--num-image", "60", "--metric", "ap", "--target-drop", "1")
    assert sensitive(demo_weights, demo_data, project, *words) == 0
    return project / "exp"


class TestRanking:
    def test_the_proxy_ranks_layers_as_ap_does(self, ranked):
        summary = summary_of(ranked)
        rows = summary["rows"]
        assert len(rows) == 16  # of 22 layers, those that compute something
        found = spearmanr([row["score"] for row in rows], [row["ap"] for row in rows])[0]
        assert found >= 0.8
        assert summary["rank_correlation"] == {"spearman": pytest.approx(found), "units": 16}
        assert summary["ap"]["float"] - summary["ap"]["INT8"] > 0.1

    def test_ap_with_a_layer_in_float_is_what_quantize_gets(self, few, demo_weights, tmp_path):
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

    def test_rows_are_sorted_and_costs_are_shares(self, ranked):
        rows = summary_of(ranked)["rows"]
        assert [row["ap"] for row in rows] == sorted((row["ap"] for row in rows), reverse=True)
        assert sum(row["cost"]["macs"] for row in rows) == pytest.approx(1, abs=1e-3)  # but for DFL's
        assert next(row for row in rows if row["unit"] == "model.21")["cost"]["macs"] == pytest.approx(
            148.4 / 406, rel=0.01
        )

    def test_the_files_lie_in_the_run_folder(self, ranked):
        assert {path.name for path in ranked.iterdir()} - {".lock"} == {
            SUMMARY, "sensitivity.png", "recipe.yaml", "report.json", "report.html", "state.json",
        }  # fmt: skip
        assert (ranked / "sensitivity.png").stat().st_size > 10_000
        recipe, summary = Recipe.from_file(ranked / "recipe.yaml"), summary_of(ranked)
        assert recipe.float == tuple(summary["recipe"]["float"])
        assert recipe.calibration.percentile == 99

    def test_the_top_three_are_among_what_is_confirmed(self, ranked):
        rows = summary_of(ranked)["rows"]
        scored = sorted(rows, key=lambda row: row["score"], reverse=True)
        assert {row["unit"] for row in rows[:3]} <= {row["unit"] for row in scored[: search.CONFIRMED[0]]}


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


@pytest.fixture(scope="module")
def mended(tmp_path_factory: pytest.TempPathFactory, planted: Path, data: Path) -> Path:
    """The run that looks for the problem."""
    project = tmp_path_factory.mktemp("mended")
    assert sensitive(planted, data, project, *DEMO_SIZE, "--num-image", "30") == 0
    return project / "exp"


@pytest.fixture(scope="module")
def requantized(tmp_path_factory: pytest.TempPathFactory, mended: Path, planted: Path, data: Path) -> Path:
    """What `qat.py quantize` makes of the recipe."""
    project = tmp_path_factory.mktemp("requantized")
    ptq(planted, data, project, "--recipe", str(mended / "recipe.yaml"))
    return project / "exp"


class TestAPlantedProblem:
    def test_it_is_found_and_the_recipe_mends_it(self, mended, requantized, data, demo_weights, tmp_path, capsys):
        summary = summary_of(mended)
        found = {row["stage"]: row["ap"] for row in report_of(requantized)["rows"]}
        words = ["eval", "--weights", str(demo_weights), "--data", str(data), "--project", str(tmp_path)]
        assert qat.main([*words, *DEMO_SIZE[:-2]]) == 0
        following = f"next: python qat.py quantize --weights {demo_weights} --data {data} --imgsz {SIDE}"
        assert capsys.readouterr().out.splitlines()[-1] == following
        assert found["float"] == pytest.approx(report_of(tmp_path / "exp")["rows"][0]["ap"], abs=0.002)
        assert summary["ap"]["INT8"] < 0.5 * summary["ap"]["float"]
        assert summary["rows"][0]["unit"] == "model.21"
        assert max(summary["rows"], key=lambda row: row["score"] or 0)["unit"] == "model.21"
        assert "model.21" in summary["recipe"]["units"]
        assert found["PTQ"] > found["float"] - 0.005


class Killed(BaseException):
    """Ends the program as abruptly as this process allows."""


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, last: int | None = None) -> list[int]:
    """Count calls of `owner.name`, and die at the `last`."""
    original: Callable = getattr(owner, name)
    calls: list[int] = []

    def call(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == last:
            raise Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


@pytest.mark.usefixtures("blank_plots")
class TestResume:
    words = (*TINY, *HARSH, "--float-budget", "0.1")

    @pytest.fixture(scope="class")
    def whole(
        self, tmp_path_factory: pytest.TempPathFactory, few: Path, half: tuple[str, str], demo_weights: Path
    ) -> tuple[Path, int]:
        """A run that was never interrupted, and how many times it ran the network."""
        project = tmp_path_factory.mktemp("whole")
        with pytest.MonkeyPatch.context() as patch:
            calls = counted(patch, Switches, "predict")
            assert sensitive(demo_weights, few, project, *self.words, *half) == 0
        return project / "exp", len(calls)

    def test_a_killed_run_finds_the_same(self, whole, few, half, demo_weights, tmp_path, monkeypatch):
        run, total = whole
        with monkeypatch.context() as patch:
            # 3 batches of 2 + 8 runs of the network while screening, then AP of the 4 units and more
            counted(patch, Switches, "predict", 40)
            with pytest.raises(Killed):
                sensitive(demo_weights, few, tmp_path, *self.words, *half)
        again = counted(monkeypatch, Switches, "predict")
        assert qat.main(["sensitive", "--resume", str(tmp_path / "exp")]) == 0
        assert len(again) < total - 10  # what was screened is not screened again
        ours, theirs = summary_of(tmp_path / "exp"), summary_of(run)
        for key in ("rows", "ap", "rank_correlation", "recipe"):
            assert ours[key] == theirs[key], key

    def test_a_finished_run_runs_nothing_again(self, whole, monkeypatch, capsys):
        run, _ = whole
        before = (run / "recipe.yaml").read_text()
        calls = counted(monkeypatch, Switches, "predict")
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
        (name,), int8 = state.ap["recipe"], state.resampled("units")["INT8"]
        shifted = Resampled.of(int8.images, (ap + gain for ap in int8.ap))
        state.keep_ap("recipe", {name: state.ap["units"]["INT8"] + gain}, {name: shifted})
        state.save(run)
        assert qat.main(["sensitive", "--resume", str(run)]) == 0
        summary, kept = summary_of(run), Recipe.from_file(run / "recipe.yaml").float
        assert bool(summary["recipe"]["units"]) == (kept != given) == bool(gain)
        assert (summary["ap"]["recipe"] is None, "gain +0.0000" in "".join(summary["notes"])) == (not gain, not gain)

    def test_another_run_is_refused(self, whole, capsys):
        assert qat.main(["sensitive", "--resume", str(whole[0]), "--granularity", "module"]) == 2
        assert "--granularity is module here and layer" in capsys.readouterr().err


class TestCalibrate:
    @pytest.fixture(scope="class")
    def swept(
        self, tmp_path_factory: pytest.TempPathFactory, few: Path, half: tuple[str, str], demo_weights: Path
    ) -> Path:
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
        assert found["chosen_ap"] == max(found["chosen_ap"], *found["methods"].values())
        assert recipe.calibration.method == found["chosen"]["method"]
        assert recipe.float == Recipe.from_file(half[1]).float, "of the recipe that was given, all else is kept"

    def test_it_ends_in_a_table_and_a_page(self, swept):
        rows = report_of(swept)["rows"]
        assert [row["stage"] for row in rows[:1]] == ["float"]
        assert {row["stage"] for row in rows[1:]} == set(calibrate.METHODS)
        assert [row["ap"] for row in rows[1:]] == sorted(row["ap"] for row in rows[1:]), "the best last"
        page = (swept / "report.html").read_text()
        assert all(f"{row['ap']:.4f}" in page for row in rows)

    def test_its_recipe_is_kept_in_that_of_sensitive(self, swept, few, demo_weights, tmp_path):
        recipe = swept / "recipe.yaml"
        words = (*TINY, "--num-image", "2", "--target-drop", "1", "--recipe", str(recipe))
        assert sensitive(demo_weights, few, tmp_path, *words) == 0
        assert Recipe.from_file(tmp_path / "exp/recipe.yaml") == Recipe.from_file(recipe)
        (sentence,) = (note for note in report_of(tmp_path / "exp")["notes"] if note.startswith("The recipe keeps "))
        assert ": INT8 with --recipe loses no AP" in sentence

    def test_method_auto_takes_the_smallest_loss_on_training_images(self, few, demo_weights, tmp_path):
        """The losses are those that QAT begins with where each method is named."""
        words = ("--no-eval-origin", "--no-eval-ptq", "--epochs", "1", "--name")
        losses = {}
        for name in calibrate.CANDIDATES:
            method, *percentile = name.split()
            named = ("--calib-method", method, *(("--percentile", *percentile) if percentile else ()))
            assert quantize(demo_weights, few, tmp_path, *words, name, *named) == 0
            terms = torch.load(tmp_path / name / "weights/last.pt", weights_only=True)["trainer"]["ptq"]
            losses[name] = float(terms[:, 0].sum() / terms[:, 1].sum())
        assert len(set(losses.values())) == 3
        assert quantize(demo_weights, few, tmp_path, "--ptq-only", "--calib-method", "auto", "--unlabelled") == 0
        (note,) = (note for note in report_of(tmp_path / "exp")["notes"] if "calibration auto" in note)
        assert [f"{name} {loss:.4g}" in note for name, loss in losses.items()] == [True] * 3
        assert note.count(" ± ") == 2
        best = min(losses, key=losses.__getitem__)
        stored = checkpoint.load_quantized(next((tmp_path / "exp/weights").glob("ptq_*"))).recipe.calibration
        assert f"chose {best}," in note
        assert stored == Recipe().replace(**calibrate.METHODS[best], calibration_images=4).calibration
