"""Programs, run in this process."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def start(capsys, monkeypatch):
    """Runs a program of the repository; returns its exit code, and its lines on standard output and standard error."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(program: str, *words: object) -> tuple[int, list[str], list[str]]:
        spec = importlib.util.spec_from_file_location(f"program_{Path(program).stem}", ROOT / program)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # where pydantic looks for the types of annotations
        spec.loader.exec_module(module)
        capsys.readouterr()
        try:
            code = (module.run if hasattr(module, "run") else module.main)([str(word) for word in words])
        except SystemExit as end:  # of argparse
            code = end.code
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return run
