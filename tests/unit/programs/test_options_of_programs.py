"""Numbers on the command line of every program: what is out of bounds is one line and exit code 2, before any work."""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import export_qat
import export_yoloV9
import qat
import reparameterization
import val_trt
from utils.cli import run_program
from utils.core.arguments import folder_name_argument
from utils.core.bounds import BOUNDS, bounded
from utils.core.errors import InputError
from utils.evaluation.loop import EvalConfig
from utils.jobs.options import RECIPE_OPTIONS, CalibrateOptions, EvalOptions, QuantizeOptions, SensitiveOptions

ROOT = Path(__file__).resolve().parents[3]


def script(name: str) -> ModuleType:
    path = ROOT / name
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"program_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(path.parent))
    return module


PARSERS = {
    "qat.py": qat.build_parser,
    "export_qat.py": export_qat.build_parser,
    "export_yoloV9.py": export_yoloV9.build_parser,
    "val_trt.py": val_trt.make_parser,
    "reparameterization.py": reparameterization.build_parser,
    **{
        name: script(name).make_parser
        for name in ("scripts/benchmark_trt.py", "scripts/build_engine.py",
                     "scripts/make_report.py", "scripts/inspect_engine.py",
                     "scripts/make_triton.py", "scripts/triton_client.py")
    },
    "data/demo/make_digits.py": script("data/demo/make_digits.py")._parser,
}  # fmt: skip
CHECKED_LATER = {"--opset", "--topk-all"}  # what suits depends on other options
CHECKED_LATER |= {"--" + name.replace("_", "-") for name in RECIPE_OPTIONS}  # by the recipe's models: test_recipe.py


def leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [child for action in nested for child in action.choices.values()] or [parser]


def numbers() -> list[tuple[str, str, argparse.Action]]:
    """Program, command and action of every option of every program that takes a number."""
    found = []
    for program, build in PARSERS.items():
        for leaf in leaves(build()):
            command = leaf.prog.split()[-1] if " " in leaf.prog else ""
            found += [(program, command, action) for action in leaf._actions if callable(action.type)
                      and action.type not in (Path, str, folder_name_argument) and action.option_strings]  # fmt: skip
    return found


CASES = [(program, command, action.option_strings[0]) for program, command, action in numbers()]
BAD = ("1e999", "nan", "-1", "-1e400", str(2**70), "9" * 5000, "", "text", "½", "0x10", "True", "1.5.2")


def test_every_number_of_every_program_has_bounds():
    """An option that takes any integer is an oversight."""
    loose = {action.option_strings[0] for _, _, action in numbers() if action.type in (int, float)}
    assert loose <= CHECKED_LATER
    assert len(CASES) > 60


@pytest.mark.parametrize(("program", "command", "flag"), [case for case in CASES if case[2] not in CHECKED_LATER])
def test_what_is_no_number_within_bounds_is_refused(program, command, flag, capsys):
    for text in BAD:
        words = ([command] if command else []) + [f"{flag}={text}"]
        with pytest.raises(SystemExit) as stopped:
            run_program(PARSERS[program](), lambda _: pytest.fail("the program went on"), words)
        out, err = capsys.readouterr()
        assert (stopped.value.code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert flag in err
        assert len(err) < 400


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", str(2**70)], "--seed: '1180591620717411303424' is not an integer from 0 to 2,147,483,647"),
        (["--seed=-1"], "--seed: '-1' is not an integer from 0 to 2,147,483,647"),
        (["--imgsz", "1000000"], "'1000000' is not an integer from 1 to 8,192"),
    ],
)
def test_the_line_says_what_is_expected(words, message, capsys):
    with pytest.raises(SystemExit):
        qat.main(["quantize", "--weights", "a.pt", *words])
    assert message in capsys.readouterr().err


def test_the_bounds_themselves_are_taken():
    for name, bounds in BOUNDS.items():
        for text in (f"{bounds.least:.12g}", f"{bounds.most:.12g}"):
            ends = {"least": [bounds.least], "most": [bounds.most], "both": [bounds.least, bounds.most], "": []}
            excluded = float(text) in ends[bounds.open_]
            if excluded:
                with pytest.raises(argparse.ArgumentTypeError):
                    bounded(name)(text)
            else:
                assert bounded(name)(text) == float(text)


@pytest.mark.parametrize("kind", [QuantizeOptions, CalibrateOptions, SensitiveOptions, EvalOptions, EvalConfig])
def test_options_refuse_what_a_parser_would(kind):
    """A resumed run's options come from a file."""
    whole = kind()
    tried = 0
    for name, bounds in BOUNDS.items():
        if not hasattr(whole, name) or name in RECIPE_OPTIONS:
            continue
        for value in ("text", True, [], float("nan"), bounds.most * 2 + 1, -1 if bounds.least >= 0 else None, 10**5000):
            with pytest.raises(
                InputError, match=f"--{name.replace('_', '-')} is .*; expected {re.escape(str(bounds))}"
            ):
                replace(whole, **{name: value})
            tried += 1
    assert tried > 20


@pytest.mark.parametrize(
    ("name", "value"),
    [("weights", 1), ("data", None), ("hyp", []), ("exist_ok", "no"), ("quantizer", {}), ("name", b"x")],
)
def test_texts_and_switches_have_their_type(name, value):
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')} is "):
        QuantizeOptions(**{name: value})


def test_a_program_ends_with_2_and_one_line():
    done = subprocess.run(
        [sys.executable, "qat.py", "quantize", "--weights", "a.pt", "--imgsz", "1000000"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
