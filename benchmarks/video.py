#!/usr/bin/env python3
"""Images a second of `val_trt.py --source`: a video of 1280x720 pixels and a folder with its first frames.

    python benchmarks/video.py yolov9-c.engine --images images/val --checkout BEFORE AFTER --output runs/video/c.json
    python benchmarks/video.py a.onnx --images images/val --checkout build/yolov9 --output a.json -- --device cpu

The video is a window that moves over a mosaic of the dataset's images. Each program runs on all frames and on the first
few; the difference of the two times leaves out the start. Times are seconds by the clock, and CPU seconds of all cores.
Checkouts take turns, each with drawings, and with `--no-draw` if it has that option. Labels of all runs are compared
with those of the first; the exit code is 1 if they differ. Options after `--` go to val_trt.py. The JSON is written
after each round.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import cv2
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where benchmarks/ and utils/ lie

from benchmarks.steps import ENGINE_PYTHON, run_benchmark
from utils.core.errors import InputError, QatError
from utils.core.files import write_text
from utils.core.options import Count, Options, option
from utils.evaluation.image_files import find_images
from utils.reports.schema import hardware

logger = logging.getLogger("__main__")  # the user sees its lines, also if another program imports this file

WIDTH, HEIGHT = 1280, 720  # pixels of the video
CELL = 480, 360  # pixels of an image in the mosaic
COLUMNS, ROWS = 6, 5
FEW = 20  # frames of the short run
MODES = {"draw": ["--save-txt", "--save-conf"], "no-draw": ["--save-txt", "--save-conf", "--no-draw"]}


class VideoOptions(Options):
    """The measurement of a video."""

    network: str = option(..., "an .engine, .onnx or .pt", positional=True, metavar="FILE")
    images: str = option(..., "folder of images that the frames are made of", metavar="DIR")
    checkout: list[str] = option(..., "patched checkouts, such as before and after a change", metavar="DIR")
    output: str = option(..., "JSON of results; video, images and runs go into a folder of its name", metavar="FILE")
    frames: Count = option(900, "frames of the video", metavar="N")
    files: int = option(300, "frames to time as a folder of images, too; 0: no folder", ge=0, metavar="N")
    rounds: Count = option(2, "runs of each checkout, in turns", metavar="N")


@dataclass(frozen=True)
class Source:
    """A video or a folder of images; `whole` has `images` of them, `beginning` has the first `few`."""

    name: str
    whole: Path
    beginning: Path
    images: int
    few: int


@dataclass(frozen=True)
class Cost:
    """The time of a run: seconds by the clock, and of the CPU with all cores."""

    wall: float
    cpu: float


def mosaic(files: list[str]) -> np.ndarray:
    """Images side by side, uint8 BGR, each cut to the form of `CELL`."""
    cells = []
    for number in range(COLUMNS * ROWS):
        image = cv2.imread(files[number * len(files) // (COLUMNS * ROWS)])
        if image is None:
            raise InputError(f"{files[number]} cannot be decoded")
        ratio = max(CELL[0] / image.shape[1], CELL[1] / image.shape[0])
        size = math.ceil(image.shape[1] * ratio), math.ceil(image.shape[0] * ratio)
        cells.append(cv2.resize(image, size)[: CELL[1], : CELL[0]])
    rows = [np.hstack(cells[row * COLUMNS : (row + 1) * COLUMNS]) for row in range(ROWS)]
    canvas: np.ndarray = np.vstack(rows)
    return canvas


def window(canvas: np.ndarray, number: int) -> np.ndarray:
    """Frame `number`: a part of the mosaic, which moves by up to 30 pixels a frame."""
    free_x, free_y = canvas.shape[1] - WIDTH, canvas.shape[0] - HEIGHT
    x = round(free_x / 2 * (1 + math.sin(number / 31)))
    y = round(free_y / 2 * (1 + math.cos(number / 47)))
    frame: np.ndarray = np.ascontiguousarray(canvas[y : y + HEIGHT, x : x + WIDTH])
    return frame


def write_video(path: Path, canvas: np.ndarray, count: int) -> None:
    """Write the first `count` frames as MPEG-4."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 25.0, (WIDTH, HEIGHT))
    for number in range(count):
        writer.write(window(canvas, number))
    writer.release()


def write_folder(folder: Path, canvas: np.ndarray, count: int) -> None:
    """Write the first `count` frames as JPEG files."""
    folder.mkdir()
    for number in range(count):
        cv2.imwrite(str(folder / f"{number:05}.jpg"), window(canvas, number))


def make_sources(options: VideoOptions, folder: Path) -> list[Source]:
    """Write the video and the folder, whole and their beginning."""
    if options.frames <= FEW or 0 < options.files <= FEW:
        raise InputError(f"--frames {options.frames}, --files {options.files}: expected more than {FEW}, or --files 0")
    canvas = mosaic(find_images([options.images]))
    sources = [Source("video", folder / "video.mp4", folder / "few.mp4", options.frames, FEW)]
    write_video(sources[0].whole, canvas, options.frames)
    write_video(sources[0].beginning, canvas, FEW)
    if options.files:
        sources.append(Source("folder", folder / "frames", folder / "few", options.files, FEW))
        write_folder(sources[1].whole, canvas, options.files)
        write_folder(sources[1].beginning, canvas, FEW)
    return sources


def time_program(words: list[str], checkout: Path, log: Path) -> Cost:
    """Run val_trt.py; `QatError` if it fails."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with log.open("w", encoding="utf-8") as output:
        command = [ENGINE_PYTHON, "val_trt.py", *words]
        code = subprocess.run(command, cwd=checkout, stdout=output, stderr=output, check=False).returncode
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if code:
        raise QatError(f"val_trt.py ended with exit code {code}; see {log}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall, cpu)


def read_label_file(folder: Path) -> dict[str, str]:
    """The text of each label file."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}


def label_difference(text: str, other: str) -> float:
    """Largest difference between the numbers of two label files, line by line; infinite if lines or classes differ."""
    lines, others = text.splitlines(), other.splitlines()
    if len(lines) != len(others):
        return math.inf
    largest = 0.0
    for line, same in zip(lines, others, strict=True):
        values, expected = np.array(line.split(), float), np.array(same.split(), float)
        if len(values) != len(expected) or values[0] != expected[0]:
            return math.inf
        largest = max(largest, float(np.abs(values - expected).max()))
    return largest


def compare_labels(labels: dict[str, str], first: dict[str, str]) -> dict[str, Any]:
    """Count differing files, and the largest difference as a share of the image; None if numbers or classes differ."""
    names = {**labels, **first}
    differing = [name for name in names if labels.get(name) != first.get(name)]
    largest = max((label_difference(labels.get(name, ""), first.get(name, "")) for name in differing), default=0.0)
    return {"files": len(labels), "differing": len(differing), "largest": largest if math.isfinite(largest) else None}


def has_no_draw(checkout: Path) -> bool:
    """Tell whether the val_trt.py of a checkout takes `--no-draw`."""
    command = [ENGINE_PYTHON, "val_trt.py", "-h"]
    return "--no-draw" in subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout


class VideoStudy:
    """The measurement, and its JSON."""

    def __init__(self, options: VideoOptions, words: list[str]) -> None:
        """Check the checkouts and make the sources."""
        self.options, self.words = options, words
        self.checkouts = [Path(path).resolve() for path in options.checkout]
        for checkout in self.checkouts:
            if not (checkout / "val_trt.py").is_file():
                raise InputError(f"--checkout {checkout} has no val_trt.py; expected one that patch_yolov9.sh patched")
        if not Path(options.network).is_file():
            raise InputError(f"{options.network} does not exist; expected an .engine, .onnx or .pt")
        self.output = Path(options.output).resolve()
        self.folder = self.output.with_suffix("")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.sources = make_sources(options, self.folder)
        self.rows: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.first: dict[str, dict[str, str]] = {}  # labels of the first run of each source

    def run(self) -> None:
        """Measure all rounds, and save the results after each."""
        for _ in range(self.options.rounds):
            for source in self.sources:
                for checkout in self.checkouts:
                    for mode in MODES if has_no_draw(checkout) else ["draw"]:
                        self.measure(source, checkout, mode)
            self.save()

    def measure(self, source: Source, checkout: Path, mode: str) -> None:
        """One run on the whole source and one on its beginning."""
        few = self.val_trt(source.beginning, checkout, mode)
        whole = self.val_trt(source.whole, checkout, mode)
        images = source.images - source.few
        key = source.name, str(checkout), mode
        row = self.rows.setdefault(key, {"source": source.name, "checkout": str(checkout), "mode": mode, "runs": []})
        labels = read_label_file(self.folder / "run/labels")
        log = (self.folder / "log").read_text(encoding="utf-8").splitlines()
        compared = compare_labels(labels, self.first.setdefault(source.name, labels))
        wall, cpu = whole.wall - few.wall, whole.cpu - few.cpu
        speed_lines = [line for line in log if "images/s" in line or "an image" in line]
        run: dict[str, Any] = {"images_per_second": images / wall, "ms": 1000 * wall / images}
        run |= {"cpu_ms": 1000 * cpu / images, "labels": compared, "said": speed_lines}
        row["runs"].append(run)
        row["images_per_second"] = statistics.median(each["images_per_second"] for each in row["runs"])
        row["cpu_ms"] = statistics.median(each["cpu_ms"] for each in row["runs"])
        text = "%s, %s, %s: %.1f images/s, %.1f ms of CPU an image; %d label files, %d differ"
        differing = compared["differing"]
        logger.info(text, *key, run["images_per_second"], run["cpu_ms"], len(labels), differing)

    def val_trt(self, source: Path, checkout: Path, mode: str) -> Cost:
        """Run val_trt.py on a source, into a folder that is replaced."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        network = str(Path(self.options.network).resolve())
        place = ["--project", str(self.folder), "--name", "run"]
        words = [network, "--source", str(source), *MODES[mode], *place, *self.words]
        return time_program(words, checkout, self.folder / "log")

    def save(self) -> None:
        """Write the JSON."""
        content: dict[str, Any] = {"network": Path(self.options.network).name, "words": self.words}
        content["frame"] = [WIDTH, HEIGHT]
        content["images"] = {source.name: source.images - source.few for source in self.sources}
        content["machine"] = hardware() | {"cores": len(os.sched_getaffinity(0)), "opencv": cv2.__version__}
        content["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        content["rows"] = list(self.rows.values())
        write_text(self.output, json.dumps(content, indent=1) + "\n")


def run(options: VideoOptions, words: list[str]) -> int:
    """Measure; the exit code is 1 if labels differ between runs."""
    study = VideoStudy(options, words)
    study.run()
    logger.info("results: %s", study.output)
    runs = [each for row in study.rows.values() for each in row["runs"]]
    return int(any(each["labels"]["differing"] for each in runs))


if __name__ == "__main__":
    sys.exit(run_benchmark("video.py", VideoOptions, run, __doc__ or ""))
