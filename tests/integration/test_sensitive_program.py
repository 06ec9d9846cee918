"""`qat.py sensitive` and `qat.py calibrate` as a user calls them: what they find, and that the recipe mends it."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from qat_runs import SMALL_RUN, half_of_layers, quantize, report_of, write_small_set
from scipy.stats import spearmanr

import export_qat
import qat
import val_trt
from models.quantize import checkpoint
from models.quantize.partial_forward import Layerwise
from models.quantize.recipe import Recipe
from utils import upstream
from utils.core.score import Resampled
from utils.jobs import calibrate
from utils.jobs.sensitivity import search, units
from utils.jobs.sensitivity.report import AnalysisState

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

    def test_the_recipe_survives_to_onnx(self, mended, requantized, data, tmp_path):
        units = summary_of(mended)["recipe"]["units"]
        found = {row["stage"]: row["ap"] for row in report_of(requantized)["rows"]}
        weights = next((requantized / "weights").glob("ptq_ap_*.pt"))
        loaded = checkpoint.load_quantized(weights)
        convolutions = loaded.model.quantization_plan.convolutions
        assert {path for path, state in convolutions.items() if state != "int8"} == {
            path for path in convolutions if path.startswith(tuple(f"{unit}." for unit in units))
        }
        file = weights.with_name(f"{weights.stem}-int8.onnx")
        common = ["--data", str(data), "--device", "cpu"]
        export = ["--weights", str(weights), "--include", "onnx", "--imgsz", SIDE, "--batch-size", "10", *common,
                  "--typing", "weak"]  # fmt: skip
        assert export_qat.main(export) == 0
        assert export_qat.main(["--verify", str(file)]) == 0
        producers = {output: node for node in onnx.load(file).graph.node for output in node.output}
        for node in (node for node in producers.values() if node.op_type == "Conv" and "dfl" not in node.name):
            weight = producers.get(node.input[1])
            inside = node.name.startswith(tuple(f"/{unit}/" for unit in units))
            assert (weight is not None and weight.op_type == "DequantizeLinear") != inside, node.name
        command = ["--engine-file", str(file), "--project", str(tmp_path), "--name", "onnx", *common]
        assert val_trt.main(command) == 0
        row = json.loads((tmp_path / "onnx/report.json").read_text())["rows"][0]
        assert row["ap"] == pytest.approx(found["PTQ"], abs=0.005)

    def test_single_quantizers_point_to_the_scale(self, planted, few, half, tmp_path):
        words = (*TINY, "--num-image", "2", "--granularity", "quantizer", "--target-drop", "1", *half)
        assert sensitive(planted, few, tmp_path, *words) == 0
        rows = summary_of(tmp_path / "exp")["rows"]
        assert max(rows, key=lambda row: row["score"])["unit"] == PLANTED
        assert {f"{PLANTED}.conv.weight", f"{READER}.weight", "model.0", "images"} <= {row["unit"] for row in rows}


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
            calls = counted(patch, Layerwise, "run")
            assert sensitive(demo_weights, few, project, *self.words, *half) == 0
        return project / "exp", len(calls)

    def test_a_killed_run_finds_the_same(self, whole, few, half, demo_weights, tmp_path, monkeypatch):
        run, total = whole
        with monkeypatch.context() as patch:
            # of about 80 runs of the network: 3 batches of 2 + 16 while screening, then AP of the 4 units and more
            counted(patch, Layerwise, "run", 58)
            with pytest.raises(Killed):
                sensitive(demo_weights, few, tmp_path, *self.words, *half)
        again = counted(monkeypatch, Layerwise, "run")
        assert qat.main(["sensitive", "--resume", str(tmp_path / "exp")]) == 0
        assert len(again) < total - 10  # what was screened is not screened again
        ours, theirs = summary_of(tmp_path / "exp"), summary_of(run)
        for key in ("rows", "ap", "rank_correlation", "recipe"):
            assert ours[key] == theirs[key], key

    def test_a_finished_run_runs_nothing_again(self, whole, monkeypatch, capsys):
        run, _ = whole
        before = (run / "recipe.yaml").read_text()
        calls = counted(monkeypatch, Layerwise, "run")
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


@pytest.mark.usefixtures("blank_plots")
class TestBudget:
    def test_no_time_gives_what_is_known_and_can_go_on(self, few, half, demo_weights, tmp_path, capsys):
        assert sensitive(demo_weights, few, tmp_path, *TINY, *half, "--budget", "0.0001") == 0
        assert "--budget ended" in capsys.readouterr().out
        cut = summary_of(tmp_path / "exp")
        assert all(row["ap"] is None for row in cut["rows"])
        assert cut["ap"]["float"] is not None
        assert qat.main(["sensitive", "--resume", str(tmp_path / "exp"), "--budget", "100"]) == 0
        whole = summary_of(tmp_path / "exp")
        assert not whole["notes"]
        assert all(row["score"] is not None for row in whole["rows"])

    def test_what_a_budget_left_out_is_screened_and_confirmed_later(
        self, few, half, demo_weights, tmp_path, monkeypatch
    ):
        words = (*TINY, *HARSH, *half, "--float-budget", "0.4")
        monkeypatch.setattr(search, "IMAGES_A_UNIT", 2)  # each of the three batches is for a third of the units
        with monkeypatch.context() as patch:
            asked: list[float] = []
            over = lambda _, share=1.0: share < 1 and (asked.append(share) or len(asked) > 1)  # noqa: E731
            patch.setattr(search.Clock, "over", over)
            patch.setattr(units.Units, "shared", lambda _: [])  # a recipe of single units, which is not the best
            assert sensitive(demo_weights, few, tmp_path, *words, "--name", "cut") == 0
        cut = summary_of(tmp_path / "cut")
        assert "--budget ended screening early" in cut["notes"][0]
        assert sensitive(demo_weights, few, tmp_path, *words, "--name", "whole") == 0
        assert qat.main(["sensitive", "--resume", str(tmp_path / "cut")]) == 0
        ours, theirs = summary_of(tmp_path / "cut"), summary_of(tmp_path / "whole")
        assert ours["recipe"]["float"] != cut["recipe"]["float"]  # so that AP of the recipe is another one, too
        for key in ("rows", "ap", "rank_correlation", "recipe", "notes"):
            assert ours[key] == theirs[key], key


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
