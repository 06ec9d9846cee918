"""Options declared once: what the parser takes and refuses, and what the options class keeps."""

import argparse
from typing import Literal

import pytest

from utils.core.errors import InputError
from utils.core.options import ImageSize, Options, add_options, option


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
