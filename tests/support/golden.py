"""Files of expected text: `UPDATE_GOLDEN=1 pytest ...` writes them anew, to be read in the diff."""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def check_golden(name: str, text: str) -> None:
    """Compare with tests/golden/NAME, line by line."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    expected = path.read_text(encoding="utf-8").splitlines()
    assert text.splitlines() == expected, f"{name} has changed; UPDATE_GOLDEN=1 writes it anew"
