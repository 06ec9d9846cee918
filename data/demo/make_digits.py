#!/usr/bin/env python3
"""Write the demo set: handwritten digits on photographs, in upstream YOLOv9's layout and in COCO's.

    python data/demo/make_digits.py datasets/digits
    python data/demo/make_digits.py --segments datasets/digits-segments
    python data/demo/make_digits.py --size 640 --train 6000 --val 3000 datasets/digits-640

    datasets/digits/
        data.yaml                           for --data
        images/{train,val}/000001.jpg       320x320; validation images are numbered from 500001
        labels/{train,val}/000001.txt       class, middle x, middle y, width, height as fractions
        annotations/instances_{train,val}.json
        demo_set.json                       what it was made with

--segments draws the same images; its labels are polygons around the ink (class, x1, y1, x2, y2, ... as fractions), and
its annotations have the ink's run lengths. Boxes of polygons go through the middle of pixels, so that they are a pixel
narrower than those of the set for detectors.

--size 640 draws other, harder images for networks of real size: digit_scenes.py says how they differ.

Nothing is downloaded. A second run finds the set and leaves it alone. digit_images.py draws the images, and
digit_outlines.py draws the line around the ink.
"""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import json
import logging
import multiprocessing
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from utils.cli import run_program
from utils.core.cpu import cpu_cores
from utils.core.errors import InputError
from utils.core.options import Field, Options, Workers, option

if TYPE_CHECKING:
    from digit_images import ImageFile, Sources

logger = logging.getLogger(__name__)

VERSION = 1  # raise it when the same arguments draw other images
SPLITS = ("train", "val")
FIRST_ID = {"train": 1, "val": 500_001}
Images = Annotated[int, Field(ge=1, le=499_999)]  # of a split: validation images are numbered from 500001
SIZES = (320, 640)  # pixels, width and height


class Row(NamedTuple):
    """A digit: its label, x1, y1, x2, y2 in pixels, and for segmentation the run lengths of its ink."""

    label: int
    box: tuple[int, int, int, int]
    ink: dict[str, list[int]] | None = None


class _Job(NamedTuple):
    """What a worker process was started with."""

    folder: Path
    seed: int
    segments: bool
    size: int
    sources: dict[str, Sources]


_jobs: list[_Job] = []  # at most one: set once in each worker process


def _start_worker(job: _Job) -> None:
    import cv2

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent answers it
    cv2.setNumThreads(1)
    _jobs[:] = [job]


def _write_image(task: tuple[str, int]) -> list[Row]:
    """Draw and write image number ``index`` of a split with its labels; return the labels."""
    import cv2
    import numpy as np
    from digit_images import draw_image
    from digit_scenes import draw_scene

    split, index = task
    folder, seed, segments, size, sources = _jobs[0]
    key = [seed, SPLITS.index(split), index]
    if size == SIZES[0]:
        image = draw_image(np.random.default_rng(key), sources[split], keep_ink=segments)
    else:
        image = draw_scene(np.random.default_rng([*key, size]), sources[split])
    stem = f"{FIRST_ID[split] + index:06d}"
    _, data = cv2.imencode(".jpg", image.image, [cv2.IMWRITE_JPEG_QUALITY, image.quality])
    (folder / "images" / split / f"{stem}.jpg").write_bytes(data.tobytes())
    rows, lines = _polygons(image) if segments else _boxes(image)
    (folder / "labels" / split / f"{stem}.txt").write_text("".join(lines), encoding="utf-8")
    return rows


def _boxes(image: ImageFile) -> tuple[list[Row], list[str]]:
    """The rows of an image, and its lines of a label file: class, middle x, middle y, width, height."""
    size = image.image.shape[0]
    rows = [Row(int(label), tuple(map(int, box))) for label, box in zip(image.labels, image.boxes, strict=True)]
    lines = [
        f"{label} {(x1 + x2) / 2 / size:.7f} {(y1 + y2) / 2 / size:.7f} {(x2 - x1) / size:.7f} {(y2 - y1) / size:.7f}\n"
        for label, (x1, y1, x2, y2), _ in rows
    ]
    return rows, lines


def _polygons(image: ImageFile) -> tuple[list[Row], list[str]]:
    """The rows of an image with the ink, and its lines of a label file: class, then x and y of each corner.

    Corners are the middles of pixels: readers cut fractions off, and rounding must not bring another pixel.
    """
    from digit_images import IMAGE_SIZE
    from digit_outlines import polygon, run_lengths

    rows, lines = [], []
    for (label, box, _), ink in zip(_boxes(image)[0], image.ink, strict=True):
        rows.append(Row(label, box, run_lengths(ink)))
        corners = (polygon(ink) + 0.5) / IMAGE_SIZE
        lines.append(f"{label} {' '.join(f'{value:.6f}' for value in corners.ravel())}\n")
    return rows, lines


def _draw_all(tasks: list[tuple[str, int]], job: _Job, workers: int) -> Iterator[list[Row]]:
    """Yield the labels of every image in the order of the tasks."""
    if workers <= 1:
        _jobs[:] = [job]
        yield from map(_write_image, tasks)
        return
    # spawn, not fork: OpenCV's threads do not survive a fork
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (job,)) as pool:
        try:
            rows = pool.map(_write_image, tasks, chunksize=16)
            yield from rows
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _coco(split: str, drawn: list[list[Row]], size: int) -> dict[str, object]:
    """COCO's instances for one split; image ids are the numbers in the file names, annotation ids start at 1."""
    images, annotations = [], []
    for number, rows in enumerate(drawn, FIRST_ID[split]):
        images.append({"id": number, "file_name": f"{number:06d}.jpg", "width": size, "height": size})
        for label, (x1, y1, x2, y2), ink in rows:
            box = [x1, y1, x2 - x1, y2 - y1]
            annotation = {"id": len(annotations) + 1, "image_id": number, "category_id": label, "bbox": box,
                          "area": box[2] * box[3], "iscrowd": 0}  # fmt: skip
            if ink is not None:
                annotation.update(segmentation=ink, area=sum(ink["counts"][1::2]))
            annotations.append(annotation)
    categories = [{"id": label, "name": str(label), "supercategory": "digit"} for label in range(10)]
    return {"info": {"description": "demo set of handwritten digits"}, "licenses": [], "images": images,
            "annotations": annotations, "categories": categories}  # fmt: skip


def _data_yaml(folder: Path) -> str:
    names = "".join(f"  {label}: '{label}'\n" for label in range(10))
    return (f"# demo set of handwritten digits, written by data/demo/make_digits.py\n"
            f"path: {json.dumps(str(folder))}\ntrain: images/train\nval: images/val\n\nnames:\n{names}")  # fmt: skip


def _is_there(folder: Path, settings: dict[str, object]) -> bool:
    """True when ``folder`` holds this very set, False when it is free; InputError when it holds anything else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        found = json.loads((folder / "demo_set.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{folder} exists and is no demo set; choose another folder, or remove it") from None
    if found != settings:
        raise InputError(f"{folder} holds another demo set, made with {json.dumps(found)} instead of "
                         f"{json.dumps(settings)}; choose another folder, or remove it")  # fmt: skip
    for split in SPLITS:
        for kind in ("images", "labels"):
            count = sum(item.stem.isdigit() for item in (folder / kind / split).glob("*"))
            if count != settings[split]:
                raise InputError(f"{folder / kind / split} holds {count} files instead of {settings[split]}; remove "
                                 f"{folder} and run this again")  # fmt: skip
    return True


def make(
    folder: Path, seed: int, train: int, val: int, workers: int, segments: bool = False, size: int = SIZES[0]
) -> bool:
    """Write the demo set into ``folder``, with polygons for ``segments``; return False when it was there already.

    Raises:
        InputError: ``folder`` holds something else, or the sources are not installed.
    """
    from digit_images import read_sources
    from tqdm import tqdm

    folder = folder.resolve()
    counts = {"train": train, "val": val}
    kind = "digits-segments" if segments else "digits"
    settings: dict[str, object] = {"kind": kind, "version": VERSION, "seed": seed, **counts}
    if size != SIZES[0]:
        settings["size"] = size
    if _is_there(folder, settings):
        if (folder / "data.yaml").read_text(encoding="utf-8") != _data_yaml(folder):  # the folder was moved
            (folder / "data.yaml").write_text(_data_yaml(folder), encoding="utf-8")
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}-{os.urandom(4).hex()}")
    try:
        temporary.mkdir()
        for split in SPLITS:
            for kind in ("images", "labels"):
                (temporary / kind / split).mkdir(parents=True)
        (temporary / "annotations").mkdir()
        tasks = [(split, index) for split in SPLITS for index in range(counts[split])]
        job = _Job(temporary, seed, segments, size, {split: read_sources(split) for split in SPLITS})
        drawn = list(tqdm(_draw_all(tasks, job, workers), "drawing digits", len(tasks), unit="image"))
        for split, images in (("train", drawn[:train]), ("val", drawn[train:])):
            (temporary / "annotations" / f"instances_{split}.json").write_text(
                json.dumps(_coco(split, images, size)), encoding="utf-8"
            )
        (temporary / "data.yaml").write_text(_data_yaml(folder), encoding="utf-8")
        (temporary / "demo_set.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


class DemoOptions(Options):
    """Write the demo set of handwritten digits; nothing is downloaded."""

    out_dir: Path = option(..., "folder to create", positional=True, metavar="OUT_DIR")
    segments: bool = option(False, "polygons as labels, for segmentation networks")
    size: Literal["320", "640"] = option("320", "pixels; 640 draws a harder set")
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = option(0, "the same seed gives the same set")
    train: Images = option(1000, "training images")
    val: Images = option(500, "validation images")
    workers: Workers = option(min(cpu_cores(), 8), "processes (default: one per core)")


def _run(options: DemoOptions) -> None:
    size = int(options.size)
    if options.segments and size != SIZES[0]:
        raise InputError(f"--segments goes with --size {SIZES[0]} only; leave one of the two out")
    new = make(options.out_dir, options.seed, options.train, options.val, options.workers, options.segments, size)
    wrote = f"wrote {options.train} training and {options.val} validation images"
    logger.info("%s: %s", wrote if new else "the demo set is there already", options.out_dir / "data.yaml")


if __name__ == "__main__":
    sys.exit(run_program("make_digits.py", (DemoOptions, _run), about=__doc__))
