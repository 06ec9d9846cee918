"""What is pinned in tests/golden: `UPDATE_GOLDEN=1 pytest ...` writes it anew, to be read in the diff."""

import json
import os
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def golden(file: str, name: str, found: Any) -> Any:
    """What tests/golden/FILE, a mapping as JSON, holds under a name."""
    path = GOLDEN / file
    known = json.loads(path.read_text()) if path.is_file() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        known[name] = found
        path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return known[name]


def check_golden(name: str, text: str) -> None:
    """Compare with tests/golden/NAME, line by line."""
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(text + "\n", encoding="utf-8")
    assert text.splitlines() == (GOLDEN / name).read_text(encoding="utf-8").splitlines()
