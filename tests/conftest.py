"""What tests share lies in tests/support; its modules are imported by their names."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent / "support"))
