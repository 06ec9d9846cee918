#!/usr/bin/env python3
"""Run one of upstream's own programs, unedited, on a current stack.

    python scripts/run_upstream.py train.py --data coco.yaml --cfg models/detect/gelan-c.yaml --weights '' ...
    python scripts/run_upstream.py val.py --weights gelan-c.pt --data coco.yaml

Several GPUs: python -m torch.distributed.run --nproc_per_node 2 scripts/run_upstream.py train_dual.py --device 0,1 ...

With --fast before the program's name, maps are in channels-last layout, upstream's training does not ask torch for
deterministic algorithms, and cuDNN measures which of its algorithms is fastest.

Upstream's programs stop on torch >= 2.6 (their checkpoints), NumPy >= 2.4 (np.trapz) and setuptools >= 82
(pkg_resources); utils/upstream/checkout.py supplies what is gone. Checkpoints are loaded without running code of
theirs, and label caches are neither read nor written (SECURITY.md).
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import contextlib
import importlib
import logging
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAST = "--fast"


def main() -> int:
    words = sys.argv[1:]
    fast = words[:1] == [FAST]
    program, options = (words[fast:] or [""])[0], words[fast + 1 :]
    if program in ("-h", "--help"):
        print(__doc__)
        return 0
    script = ROOT / program
    if not script.is_file():
        problem = f"{script} does not exist; " if program else ""
        print(f"error: {problem}name a program of the checkout, such as train.py (-h says more)", file=sys.stderr)
        return 2
    import utils.cli  # noqa: F401  # it says what to do where no environment is active
    from utils.core.cpu import prepare_threads
    from utils.core.errors import InputError
    from utils.jobs.open import need

    try:
        need("torch")
        prepare_threads()
        from utils import upstream
        from utils.upstream import checkout, deferred

        deferred.import_all()
        checkout.finish_plots()
        checkout.import_upstream()
        logging.getLogger("yolov5").setLevel(logging.INFO)
        checkout.load_safely_by_default(upstream.read_checkpoint)
        if fast:
            checkout.prefer_speed()
        if script.parent.name == "panoptic":
            with contextlib.suppress(ImportError):  # the program says what is missing
                checkout.without_label_caches(importlib.import_module("utils.panoptic.dataloaders"))
        sys.argv = [str(script), *options]
        runpy.run_path(str(script), run_name="__main__")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (InputError, FileNotFoundError) as error:  # a checkpoint or a description that was refused; a wrong path
        print(f"error: {error}", file=sys.stderr)
        return InputError.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
