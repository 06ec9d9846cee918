"""What runs of sensitive say, from known results: summaries, lines on the terminal, chart, report."""

import shlex
from types import SimpleNamespace

import pytest
from report_examples import example_row, resampled

from utils.jobs.advice import advise
from utils.jobs.run_state import AnalysisState
from utils.jobs.sensitivity import run as report
from utils.jobs.sensitivity.search import Selection
from utils.reports.schema import Report

# AP of each network; three AP on resampled images, the spread of whose differences is plain to see
ROWS = {
    name: example_row(name, file="my weights.pt", ap=ap, ap_resampled=resampled(*replicates), input_size="320x320")
    for name, (ap, *replicates) in {
        "float": (0.7, 0.70, 0.71, 0.69),
        "INT8": (0.6, 0.60, 0.61, 0.59),
        "model.0": (0.62, 0.62, 0.66, 0.58),
        "model.1": (0.69, 0.69, 0.71, 0.67),
        "recipe": (0.688, 0.68, 0.70, 0.66),
    }.items()
}


KINDS = {"model.1": "RepNCSPELAN4 /8"}


def summarized(chosen=("model.1",), recipe=ROWS["recipe"], patterns=("model.1",)) -> dict:
    """Two units with an AP, and two that were only screened."""
    screened = {f"model.{i}": {"images": 25, "score": score} for i, score in enumerate((0.1, 0.3, 0.05, 0.01))}
    state = AnalysisState({"num_image": 25}, {}, "", command="python qat.py sensitive", screened=screened)
    state.rows = {name: row.model_dump() for name, row in ROWS.items()}
    search = SimpleNamespace(units=screened, notes=["a note"], cost=lambda names: 0.2)
    return report.summarize_search(state, search, Selection(chosen, 0.69, 0.3, "no more"), patterns, recipe, KINDS)


def test_rows_best_first_and_numbers_as_they_follow():
    content = summarized(("model.1", "model.0"))
    assert [row["unit"] for row in content["rows"]] == ["model.1", "model.0", "model.2", "model.3"]
    numbers = {"score": 0.3, "images": 25, "ap": 0.69, "gain": 0.09, "gain_error": 0.01, "cost": 0.2}
    assert {name: content["rows"][0][name] for name in numbers} == pytest.approx(numbers)
    assert (content["rows"][2]["ap"], content["rows"][2]["gain"]) == (None, None)
    lines = report.lines(content, [ROWS[name] for name in ("float", "INT8", "recipe")])
    assert lines[0].endswith("INT8: ap = 0.60000 (-0.1000 ± 0.0000)")
    assert lines[1].endswith("model.1, ap = 0.69000 (+0.0900 ± 0.0100), 20.0% of MACs")
    assert lines[3].endswith("model.2, not confirmed, score 0.0500, 20.0% of MACs")
    assert "AP is 0.68800 (+0.0880 ± 0.0100 against INT8)" in "\n".join(lines)
    assert "note: a note" in lines
    assert lines[-1].endswith("no measurable AP: model.0."), "0.02 ± 0.03"


def test_a_report_has_the_rows_all_layers_of_the_recipe_and_a_command_that_runs_as_printed(tmp_path):
    layers = [f"model.{i}" for i in range(12)]  # more than the top ten
    options = SimpleNamespace(data="d.yaml", target_drop=None)
    inputs = SimpleNamespace(options=options, data=SimpleNamespace(counts=list), doubts=[])
    rows = [ROWS[name] for name in ("float", "INT8", "recipe")]
    found = report.to_report(summarized(patterns=layers), rows, inputs, tmp_path / "a run")
    found.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == found
    recipe = str(tmp_path / "a run/recipe.yaml")
    assert [(row.stage, row.ap) for row in found.rows] == [("float", 0.7), ("INT8", 0.6), ("recipe", 0.688)]
    assert [row.file for row in found.rows] == ["my weights.pt", "my weights.pt", recipe]
    (sentence,) = [note for note in found.notes if note.startswith("The recipe keeps")]
    assert ", ".join(layers) in sentence
    words = shlex.split(advise(found).command)
    assert words[:3] == ["python", "qat.py", "quantize"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given == {"--weights": "my weights.pt", "--data": "d.yaml", "--imgsz": "320", "--recipe": recipe}


def test_the_chart_shows_what_was_measured():
    left, right = report.chart(summarized()).axes
    assert [bar.get_width() for bar in left.patches][::-1] == pytest.approx([0.3, 0.1, 0.05, 0.01])
    nothing = float("nan")
    widths = [bar.get_width() for bar in right.patches][::-1]
    assert widths == pytest.approx([0.09, 0.02, nothing, nothing], nan_ok=True)
    assert right.collections  # bars of error
    labels = [label.get_text() for label in left.get_yticklabels()][::-1]
    assert labels[:2] == ["model.1 RepNCSPELAN4 /8 (in the recipe)", "model.0"]
    assert [text.get_text().strip() for text in right.texts] == ["not measured"] * 2
