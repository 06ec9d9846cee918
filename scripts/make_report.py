#!/usr/bin/env python3
"""Put the results of one or several runs on one page: report.html, its data as JSON, and plots.

    python scripts/make_report.py runs/qat/exp
    python scripts/make_report.py --environment model.onnx
    python scripts/make_report.py runs/qat/exp runs/val_trt/exp --output runs/report \\
        --compare gelan-c.pt qat_best_gelan-c.onnx --data data/coco.yaml

A run is a folder with a report.json, as qat.py and val_trt.py leave it, or that file. No run's report.json is written
over: in a run's folder the page's data goes to report-merged.json, elsewhere to report.json. With --compare both
networks run on a few validation images, and the page shows their detections side by side.

With --environment nothing is written: versions, GPU and driver are printed, and what each .onnx, .engine or .pt that is
given says of itself, for a bug report.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

from functools import partial

from utils.cli import run_program
from utils.core.text import printable
from utils.jobs import environment, report


def make_report(options: report.ReportOptions) -> None:
    """Make the report, or print what a bug report needs."""
    if options.environment:
        options.reject_others(["environment", "runs"], "with --environment, which makes no report")
        print(printable(environment.environment_text(options.runs)))
    else:
        report.run(options)


main = partial(run_program, "make_report.py", (report.ReportOptions, make_report), about=__doc__)

if __name__ == "__main__":
    sys.exit(main())
