"""The summary, the lines on the terminal and the chart of a sensitivity run, from known results."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from utils.core.score import Resampled
from utils.jobs.sensitivity import report as report
from utils.jobs.sensitivity.search import Screened, Selection
from utils.reports.schema import Report
from utils.reports.tables import verdict

KEY = "a" * 32
RESAMPLED = {  # of each, three AP: the spread of their differences is plain to see
    "float": Resampled.of(KEY, (0.70, 0.71, 0.69)),
    "INT8": Resampled.of(KEY, (0.60, 0.61, 0.59)),
    "model.0": Resampled.of(KEY, (0.62, 0.66, 0.58)),
    "model.1": Resampled.of(KEY, (0.69, 0.71, 0.67)),
    "model.2": Resampled.of(KEY[::-1] + "b", (0.63, 0.64, 0.62)),  # of other images
}


@pytest.fixture
def summary() -> dict:
    return make_summary()


def make_summary(chosen=("model.1",), recipe_ap=0.688, resampled=None, recipe_resampled=None, **ap) -> dict:
    """Three units with an AP, one that was only screened, one that was not even that."""
    search = SimpleNamespace(
        screened={
            "model.0": Screened(25, 0.5, 0.4),
            "model.1": Screened(25, 0.5, 0.2),
            "model.2": Screened(25, 0.5, 0.45),
            "model.3": Screened(25, 0.5, 0.49),
        },
        costs={f"model.{i}": {"macs": 0.2, "engine_time": 0.3 if i == 1 else None} for i in range(5)},
        ap={"float": 0.7, "INT8": 0.6, "model.0": 0.62, "model.1": 0.69, "model.2": 0.63} | ap,
        resampled=resampled or {},
    )
    state = report.AnalysisState({"num_image": 25}, {}, "", command="python qat.py sensitive")
    selection = Selection(chosen, 0.69, 0.3, "no further unit gains AP")
    return report.summarize_search(state, search, selection, ["model.1"], recipe_ap, recipe_resampled, ["a note"])


def test_rows_best_first_and_numbers_as_they_follow(summary):
    assert [row["unit"] for row in summary["rows"]] == ["model.1", "model.2", "model.0", "model.3", "model.4"]
    first = summary["rows"][0]
    assert (first["score"], first["ap"], first["images"]) == (pytest.approx(0.3), 0.69, 25)
    assert first["gain"] == pytest.approx(0.09)
    assert summary["rows"][4]["score"] is None
    assert summary["rank_correlation"] == {"spearman": 0.5, "units": 3}


def test_equal_gains_are_no_ranking():
    summary = make_summary(**{"model.0": 0.6, "model.1": 0.6, "model.2": 0.6})
    assert summary["rank_correlation"] == {"spearman": None, "units": 3}


def test_standard_errors_stand_where_the_images_are_the_same(tmp_path):
    content = make_summary(resampled=RESAMPLED, recipe_resampled=Resampled.of(KEY, (0.68, 0.70, 0.66)))
    assert [row["gain_error"] for row in content["rows"]] == [
        pytest.approx(0.01),
        None,
        pytest.approx(0.03),
        None,
        None,
    ]
    errors = {"INT8 to float": 0, "recipe to float": pytest.approx(0.01), "recipe to INT8": pytest.approx(0.01)}
    assert content["ap_difference_error"] == errors
    lines = report.lines(content)
    assert lines[0].endswith("INT8: ap = 0.60000 (-0.1000 ± 0.0000)")
    assert "ap = 0.69000 (+0.0900 ± 0.0100)" in lines[1]
    assert "ap = 0.63000 (+0.0300)," in lines[2]
    assert "AP is 0.68800 (+0.0880 ± 0.0100 against INT8)" in "\n".join(lines)
    assert report.chart(content).axes[1].collections  # bars of error


def test_a_unit_that_gains_less_than_two_standard_errors_is_named():
    lines = report.lines(make_summary(("model.1", "model.0"), resampled=RESAMPLED))
    assert any(line.endswith("no measurable AP: model.0.") for line in lines)


def test_a_report_has_the_rows_all_layers_of_the_recipe_and_a_command_that_runs_as_printed(tmp_path):
    layers = [f"model.{i}" for i in range(12)]  # more than the top ten
    content = make_summary(resampled=RESAMPLED, recipe_resampled=RESAMPLED["model.1"])
    content["recipe"]["float"] = layers
    options = SimpleNamespace(weights="my weights.pt", data="d.yaml", unlabelled=False, num_image=7)
    parts = {
        7: SimpleNamespace(name="val (7 of 9 images)", images=[0] * 7),
        25: SimpleNamespace(name="val", images=[0]),
    }
    data = SimpleNamespace(counts=list, read=lambda _, limit: parts[limit])
    inputs = SimpleNamespace(options=options, device=torch.device("cpu"), imgsz=320, data=data)
    found = report.to_report(content, inputs, tmp_path / "a run")
    found.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == found
    assert [(row.stage, row.ap) for row in found.rows] == [("float", 0.7), ("INT8", 0.6), ("recipe", 0.688)]
    assert {row.ap_with for row in found.rows} == {"7 images"}
    (sentence,) = [note for note in found.notes if note.startswith("The recipe keeps")]
    assert ", ".join(layers) in sentence
    words = shlex.split(verdict(found)[1])
    assert words[:3] == ["python", "qat.py", "quantize"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given == {"--weights": "my weights.pt", "--data": "d.yaml", "--imgsz": "320",
                       "--recipe": str(tmp_path / "a run/recipe.yaml")}  # fmt: skip
    content["ap"]["recipe"] = None  # where no layer is kept in float, INT8 is what the recipe gives
    inputs.options.num_image = 25  # and of all images AP is the usual one
    nothing = report.to_report(content, inputs, tmp_path / "a run")
    assert {row.ap_with for row in nothing.rows} == {""}
    assert [Path(row.file).name for row in nothing.rows] == ["my weights.pt", "recipe.yaml"]


def test_files(summary, tmp_path):
    report.save_summary(summary, tmp_path)
    assert json.loads((tmp_path / report.SUMMARY_FILE).read_text()) == json.loads(json.dumps(summary))
    assert (tmp_path / report.CHART_FILE).read_bytes().startswith(b"\x89PNG")


def test_the_chart_shows_what_was_measured(summary):
    left, right = report.chart(summary).axes
    assert [bar.get_width() for bar in left.patches][::-1] == pytest.approx([0.3, 0.05, 0.1, 0.01, 0])
    assert [bar.get_width() for bar in right.patches][::-1] == pytest.approx([0.09, 0.03, 0.02])
    labels = [label.get_text() for label in left.get_yticklabels()][::-1]
    assert labels[:2] == ["model.1 (in the recipe)", "model.2"]
