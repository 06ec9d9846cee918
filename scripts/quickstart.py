#!/usr/bin/env python3
"""Take a trained model to an evaluated INT8 file and a report; scripts/quickstart.sh sets everything up and starts it.

    python scripts/quickstart.py --checkout . --demo data/demo --data data.yaml --output runs/quickstart --weights my.pt

A second call with the same options continues where the first one stopped.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

from functools import partial

from utils.cli import run_program
from utils.jobs.pipeline import quickstart

main = partial(run_program, "quickstart.py", (quickstart.QuickstartOptions, quickstart.run), about=__doc__)

if __name__ == "__main__":
    sys.exit(main())
