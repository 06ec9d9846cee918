"""What tests share lies in tests/support; its modules are imported by their names."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent / "support"))

# A shell starts background jobs with SIGINT ignored, and programs inherit that: tests could send no Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
