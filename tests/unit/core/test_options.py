"""What people write, on command lines and in files: what is taken, and messages that name key and value."""

import argparse
from math import nan
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from pydantic import Field

from utils.core.errors import InputError, RecipeError
from utils.core.options import ImageSize, Options, add_options, option
from utils.core.strict_model import StrictModel, validate
from utils.core.text import plural, short_repr


class Run(Options):
    files: list[str] = option([], "ONNX files", positional=True, nargs="*", metavar="FILE")
    weights: str = option("", "checkpoint (.pt)", metavar="FILE")
    imgsz: ImageSize = option(640, "input size", "--imgsz", "--img", metavar="PX", group="the run: images and rates")
    sizes: list[ImageSize] | None = option(None, "several sizes")
    lr: float | None = option(None, "rate (default: 3e-5)", gt=0, lt=1)
    rect: bool = option(False, "smallest input")
    compile: bool | None = option(None, "rows of torch.compile")
    resume: str | None = option(None, "a run", nargs="?", const="")
    task: Literal["val", "test"] = option("val", "a split")


def parsed(words: str) -> Run:
    parser = argparse.ArgumentParser("program")
    add_options(parser, Run)
    return Run.parsed(parser.parse_args(words.split()))


def test_what_is_left_out_has_its_default_and_is_not_given():
    assert parsed("") == Run()
    assert parsed("").model_fields_set <= {"files"}


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [("a b", "files", ["a", "b"]), ("--weights a.pt", "weights", "a.pt"), ("--img 32", "imgsz", 32),
     ("--sizes 1 8192", "sizes", [1, 8192]), ("--lr 1e-5", "lr", 1e-5), ("--rect", "rect", True),
     ("--no-compile", "compile", False), ("--resume", "resume", ""), ("--resume runs/a", "resume", "runs/a"),
     ("--task test", "task", "test")],
)  # fmt: skip
def test_what_is_given_has_its_type(words, name, value):
    options = parsed(words)
    assert getattr(options, name) == value
    assert name in options.model_fields_set


@pytest.mark.parametrize(
    ("words", "named"),
    [("--imgsz 0", ["--imgsz is 0", "1"]), ("--imgsz 2.5", ["--imgsz", "'2.5'", "int"]), ("--sizes 5 x", ["'x'"]),
     ("--lr nan", ["--lr is nan"]), ("--lr 1", ["--lr is 1", "less than 1"]), ("--task train", ["--task", "val"])],
)  # fmt: skip
def test_what_does_not_fit_names_option_value_and_bounds(words, named, capsys):
    with pytest.raises((SystemExit, InputError)) as caught:
        parsed(words)
    error = capsys.readouterr().err or str(caught.value)
    assert all(part in error for part in named)


def test_saved_options_are_checked_as_those_of_the_command_line():
    assert Run.of({"imgsz": 32}).imgsz == 32
    for values in ({"imgsz": 0}, {"imgsz": "32"}, {"rect": 1}, {"other": 1}):
        with pytest.raises(InputError, match=next(iter(values))):
            Run.of(values)


def test_options_that_can_do_nothing_are_refused():
    options = parsed("--imgsz 640 --rect")
    options.reject_unused(["lr"], "here")
    with pytest.raises(InputError, match="--imgsz does nothing with --resume"):
        options.reject_unused(["imgsz"], "with --resume")
    with pytest.raises(InputError, match="--rect does nothing"):
        options.reject_others(["imgsz", "files"], "with --verify")
    assert options.given("rect", "lr", "imgsz") == ["--rect", "--imgsz"]


class Section(StrictModel):
    batches: int = Field(25, ge=1)
    rate: float | str = 0.5


class Whole(StrictModel):
    calibration: Section = Section()
    several: list[Section] = Field(default_factory=list)
    float: list[str] = Field(default_factory=list)  # also the name of a union's branch


def test_values_are_kept_and_missing_keys_have_their_defaults():
    made = validate(Whole, {"calibration": {"rate": 2}}, "file")
    assert made.calibration == Section(batches=25, rate=2.0)
    assert validate(Whole, made.to_dict(), "file") == made


@pytest.mark.parametrize(
    ("content", "named"),
    [({"calibration": {"batchs": 3}}, "calibration.batchs; did you mean batches"),
     ({"several": [{}, {"batchs": 3}]}, "several[1].batchs; did you mean batches"),
     ({"zzz": 3}, "zzz; the keys are calibration, several, float"),
     ({"calibration": {"batches": 0}}, "calibration.batches is 0; expected greater than or equal to 1"),
     ({"calibration": {"batches": True}}, "calibration.batches is True; expected a valid integer"),
     ({"calibration": {"rate": nan}}, "calibration.rate is nan; expected "),
     ({"calibration": None}, "calibration is empty; expected a mapping with the keys batches, rate"),
     ({"calibration": {"rate": []}}, "calibration.rate is []; expected a valid number"),
     ({"float": "a"}, "float is 'a'"), ({"float": [1]}, "float[0] is 1"), ([1], "the content is [1]")],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(content, named):
    with pytest.raises(RecipeError) as caught:
        validate(Whole, content, "recipe.yaml", RecipeError)
    assert str(caught.value).startswith("recipe.yaml: ")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


CYCLE: list = [1]
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "None"), (-1.5, "-1.5"), ("two\nlines", r"'two\nlines'"), (Path("a b"), f"{Path('a b')!r}"),
     (list(range(9)), "[0, 1, 2, 3, ...]"), ([[[[1]]]], "[[[...]]]"),
     (torch.zeros(2, 3, dtype=torch.float16), "Tensor float16 [2, 3]"), (np.zeros((2,)), "ndarray float64 [2]")],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_in_a_few_words(value, text):
    assert short_repr(value) == text


@pytest.mark.parametrize("value", [["x" * 10**6] * 10**4, {"x" * 10**5: CYCLE}], ids=range(2))
def test_a_large_value_stays_short(value):
    assert len(short_repr(value)) < 450


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(1, "image", "1 image"), (0, "image", "0 images"), (2, "batch", "2 batches"), (3, "class", "3 classes"),
     (2, "epoch", "2 epochs"), (2, "copy", "2 copies"), (2, "day", "2 days"), (1, "box", "1 box")],
)  # fmt: skip
def test_counts_and_their_nouns(count, noun, text):
    assert plural(count, noun) == text
