"""Unit tests see the library as it lies in the repository, without a YOLOv9 checkout."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# Coverage looks at tests' own processes only: a program takes a quarter of a second longer to start where measured.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in [name for name in os.environ if name.startswith("COVERAGE_PROCESS")]:
        del os.environ[name]
