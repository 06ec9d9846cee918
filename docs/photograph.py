#!/usr/bin/env python3
"""Photograph the first screen of a run's report.html by headless Chromium, its parts numbered: docs/report.jpg.

    python docs/photograph.py runs/quickstart/report.html

It needs a program called chromium or google-chrome, and Pillow.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # where utils/ lies

from PIL import Image

from utils import cli
from utils.core.errors import DependencyError, InputError
from utils.core.options import Options, option

BROWSERS = ("chromium", "google-chrome", "chromium-browser")
PARTS = (
    '<p class="verdict"',
    '<div class="cards"',
    '<img class="fit"',
    '<div class="next"',
    "<figure",
)  # in this order
STYLE = """<style>
body { position: relative; padding-left: 44px }
.part { position: absolute; left: 8px; width: 26px; height: 26px; border-radius: 13px; background: #b26a00;
        color: white; font-weight: 600; line-height: 26px; text-align: center }
</style>"""


class PhotographOptions(Options):
    """What is photographed, and how large."""

    page: Path = option(..., "the page of a run", positional=True)
    output: Path = option(Path("docs/report.jpg"), "the picture to write, in the clone")
    width: int = option(1000, "of the window, in pixels", ge=320, le=4000)
    height: int = option(1330, "of the window, in pixels", ge=320, le=4000)
    quality: int = option(72, "of the JPEG", ge=1, le=95)


def numbered(page: str) -> str:
    """Return a page with a number beside the first of each of PARTS that it has; paths are relative to the clone."""
    page, numbers = page.replace(f"{ROOT}/", ""), 0
    for part in PARTS:
        if part in page:
            numbers += 1
            page = page.replace(part, f'<span class="part">{numbers}</span>{part}', 1)
    return re.sub("</head>", f"{STYLE}</head>", page, count=1)


def photograph(page: Path, width: int, height: int) -> Image.Image:
    """Return the upper part of a page as an image of this size; `DependencyError` without a browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise DependencyError(f"no browser takes the photograph; install one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as folder:
        copy, shot = Path(folder, "page.html"), Path(folder, "shot.png")
        copy.write_text(numbered(page.read_text(encoding="utf-8")), encoding="utf-8")
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--window-size={width},{height}",
        ]
        subprocess.run([browser, *options, f"--screenshot={shot}", copy.as_uri()], check=True, capture_output=True)
        return Image.open(io.BytesIO(shot.read_bytes())).convert("RGB")


def run(options: PhotographOptions) -> None:
    """Write the picture."""
    if not options.page.is_file():
        raise InputError(f"{options.page} does not exist; give the report.html of a run")
    image = photograph(options.page, options.width, options.height)
    image.save(options.output, quality=options.quality, optimize=True)
    print(options.output)


if __name__ == "__main__":
    sys.exit(cli.run_program("photograph.py", (PhotographOptions, run), about=__doc__))
