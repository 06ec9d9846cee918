"""Contract tests see the library as it lies in the repository, without a YOLOv9 checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
