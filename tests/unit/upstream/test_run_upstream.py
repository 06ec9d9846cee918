"""scripts/run_upstream.py: options that upstream's parsers call otherwise."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "scripts" / "run_upstream.py"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("run_upstream_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("words", [["--local-rank=3"], ["--local-rank", "3"], ["--local_rank", "3"]])
def test_the_rank_reaches_a_parser_of_upstreams_kind(program, words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--name")
    given = [program._known(word) for word in [*words, "--name", "a--local-rank=1"]]
    assert parser.parse_args(given) == argparse.Namespace(local_rank=3, name="a--local-rank=1")
