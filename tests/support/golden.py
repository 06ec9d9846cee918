"""What is pinned in tests/golden: `UPDATE_GOLDEN=1 pytest ...` writes it anew, to be read in the diff."""

import json
import os
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def golden(file: str, name: str, value: Any) -> Any:
    """Give what tests/golden/FILE holds under a name; UPDATE_GOLDEN=1 writes `value` there first."""
    path = GOLDEN / file
    if os.environ.get("UPDATE_GOLDEN"):
        content = json.loads(path.read_text()) if path.is_file() else {}
        content[name] = value
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    return read_golden(file, name)


def read_golden(file: str, name: str) -> Any:
    """Give what tests/golden/FILE holds under a name."""
    return json.loads((GOLDEN / file).read_text())[name]


def check_golden(name: str, text: str) -> None:
    """Compare with tests/golden/NAME, line by line."""
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(text + "\n", encoding="utf-8")
    assert text.splitlines() == (GOLDEN / name).read_text(encoding="utf-8").splitlines()
