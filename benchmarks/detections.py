#!/usr/bin/env python3
"""Write what networks detect on the images of a split, so that thresholds can be studied without the networks.

    cd YOLOV9
    python REPOSITORY/benchmarks/detections.py float=float.pt PTQ=ptq.pt QAT=qat.pt --data DATA --output SET.npz

YOLOV9 is a patched checkout, whose models/ and utils/ are used. Each network is NAME=FILE: a .pt, an ONNX file or an
engine. Detections are those that AP is computed from: confidence 0.001 or more, at most 300 an image, NMS at IoU 0.7.
benchmarks/thresholds.py reads the file; `Dump` says what is in it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

# the checkout, whose models/ is upstream's and ours; the repository has all that reading a file needs
sys.path[:0] = [os.getcwd(), str(Path(__file__).resolve().parents[1])]

import numpy as np

from utils.cli import run_program
from utils.core.errors import InputError
from utils.core.files import atomic_path, refuse_overwrite
from utils.core.options import BatchSize, DeviceOptions, InputSize, Workers, option, size_option

CLASSES = "class_names"  # the arrays of the file that belong to no network
IMAGES = ("images", "sizes", "label_image", "label_class", "label_boxes")
OF_NETWORK = ("image", "score", "class", "boxes", "correct")


class DumpOptions(DeviceOptions):
    """What is detected, and where it is written."""

    networks: list[str] = option(..., "networks, each with a name", positional=True, metavar="NAME=FILE")
    data: str = option(..., "dataset's YAML", metavar="FILE")
    output: Path = option(..., "the file to write", metavar="FILE.npz")
    split: Literal["val", "train", "test"] = option("val", "images that are looked at")
    imgsz: InputSize | None = size_option("the network's own")
    batch_size: BatchSize = option(10, "images a batch", metavar="N")
    workers: Workers = option(8, "processes that read images", metavar="N")


@dataclass(frozen=True)
class Detections:
    """What a network detects in `n` boxes, the images one after the other, in each the best score first.

    Attributes:
        image: index of the image, int32 `[n]`.
        score, classes: float32 and int16 `[n]`.
        boxes: xyxy as fractions of the image's width and height, float16 `[n, 4]`.
        correct: whether the box finds an object, at IoU 0.50, 0.55, ... 0.95, bool `[n, 10]`.
    """

    image: np.ndarray
    score: np.ndarray
    classes: np.ndarray
    boxes: np.ndarray
    correct: np.ndarray


@dataclass(frozen=True)
class Dump:
    """The content of a file: images and their objects, and the detections of each network.

    Attributes:
        class_names: by number.
        images: names of `n` images.
        sizes: their heights and widths in pixels, int32 `[n, 2]`.
        label_image, label_class: of `m` objects the image's index and the class, int32 and int16 `[m]`.
        label_boxes: their boxes, xyxy as fractions of the image, float32 `[m, 4]`.
        networks: detections by the network's name.
    """

    class_names: list[str]
    images: list[str]
    sizes: np.ndarray
    label_image: np.ndarray
    label_class: np.ndarray
    label_boxes: np.ndarray
    networks: Mapping[str, Detections]


def read_dump(path: str | Path) -> Dump:
    """Read a file that this program wrote; `InputError` if it is another file."""
    try:
        with np.load(path, allow_pickle=False) as content:
            arrays = dict(content)
        names = dict.fromkeys(key.rpartition("/")[0] for key in arrays if "/" in key)
        networks = {name: Detections(*(arrays[f"{name}/{part}"] for part in OF_NETWORK)) for name in names}
        class_names = json.loads(str(arrays[CLASSES]))
        of_images = {name: arrays[name] for name in IMAGES}
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise InputError(f"{path}: {error}; expected a file of benchmarks/detections.py") from error
    return Dump(class_names=class_names, networks=networks, **{**of_images, "images": of_images["images"].tolist()})


def write_dump(path: Path, dump: Dump) -> None:
    """Write a file that `read_dump` understands, whole or not at all."""
    arrays = {CLASSES: np.array(json.dumps(dump.class_names))}
    arrays |= {name: np.asarray(getattr(dump, name)) for name in IMAGES}
    for name, detections in dump.networks.items():
        parts = (getattr(detections, "classes" if part == "class" else part) for part in OF_NETWORK)
        arrays |= {f"{name}/{part}": array for part, array in zip(OF_NETWORK, parts, strict=True)}
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays)


def named_files(words: Iterable[str]) -> dict[str, Path]:
    """Split `NAME=FILE`; `InputError` for another form, a name that is there twice, or a file that is not there."""
    files: dict[str, Path] = {}
    for word in words:
        name, equals, file = word.partition("=")
        if not (name and equals and file) or "/" in name:
            raise InputError(f"{word} is not NAME=FILE")
        if name in files:
            raise InputError(f"two networks have the name {name}")
        if not Path(file).is_file():
            raise InputError(f"{word}: {file} does not exist; expected a .pt, an ONNX file or an engine")
        files[name] = Path(file)
    return files


class Collector:
    """Takes in batches of one network; the first network's batches also tell what the images and their objects are."""

    def __init__(self) -> None:
        self._parts: dict[str, list[np.ndarray]] = defaultdict(list)
        self.images: list[str] = []

    def add(self, batch: Any, detections: Any) -> None:
        """Take in a batch of the loader, and the detections in it (`detector.BatchDetections`)."""
        from utils.evaluation.metrics import match

        rows, labels = detections.rows.to("cpu"), batch.labels
        correct, _ = match(rows, labels)
        sizes = np.array([box.original for box in batch.letterboxes], np.int32)
        first = len(self.images)
        self.images += [Path(path).name for path in batch.paths]
        owners, label_owners = rows.owners().numpy(), labels.owners().numpy()
        flat, truth = rows.flat.numpy(), labels.flat.numpy()
        pixels = np.tile(sizes[:, ::-1], 2).astype(np.float32)  # width, height, width, height
        inside = np.arange(correct.shape[1]) < np.array(rows.counts)[:, None]  # without padding
        parts = {
            "sizes": sizes,
            "label_image": (label_owners + first).astype(np.int32),
            "label_class": truth[:, 0].astype(np.int16),
            "label_boxes": truth[:, 1:] / pixels[label_owners],
            "image": (owners + first).astype(np.int32),
            "score": flat[:, 4].copy(),
            "class": flat[:, 5].astype(np.int16),
            "boxes": (flat[:, :4] / pixels[owners]).astype(np.float16),
            "correct": correct.numpy()[inside],
        }
        for name, array in parts.items():
            self._parts[name].append(array)

    def detections(self) -> Detections:
        """What the network detected in all images."""
        return Detections(*(np.concatenate(self._parts[part]) for part in OF_NETWORK))

    def dump(self, class_names: list[str], networks: Mapping[str, Detections]) -> Dump:
        """The images and their objects, with the detections of all networks."""
        of_images = {name: np.concatenate(self._parts[name]) for name in IMAGES[1:]}
        return Dump(class_names=class_names, images=self.images, networks=networks, **of_images)


def detect(options: DumpOptions) -> Dump:
    """Run the networks on the split, one after the other."""
    import torch

    from models.quantize.modules import rounded_weights
    from utils.core.device import select_device
    from utils.core.tasks import AP_CONFIDENCE
    from utils.evaluation.data_yaml import load_data
    from utils.evaluation.dataset import make_loader
    from utils.evaluation.detector import Detector
    from utils.evaluation.input_plan import InputPlan
    from utils.jobs.open import open_runner
    from utils.runners.pytorch import TorchRunner

    files, data, device = named_files(options.networks), load_data(options.data), select_device(options.device)
    networks: dict[str, Detections] = {}
    collector = Collector()
    for name, file in files.items():
        collector = Collector()
        with ExitStack() as stack:
            runner = stack.enter_context(open_runner(file, device))
            if isinstance(runner, TorchRunner):
                stack.enter_context(rounded_weights(runner.model))
            plan = InputPlan.of(runner, options.imgsz, options.batch_size)
            detector = Detector(runner, data, conf_thres=AP_CONFIDENCE, iou_thres=runner.task.nms_iou)
            loader = make_loader(data, options.split, imgsz=plan.imgsz, batch_size=plan.loaded, stride=runner.stride,
                                 workers=options.workers)  # fmt: skip
            stack.enter_context(torch.inference_mode())
            for batch in filter(len, loader):
                collector.add(batch, detector(batch))
        networks[name] = collector.detections()
        print(f"{name}: {len(networks[name].score)} detections in {len(collector.images)} images", flush=True)
    return collector.dump([*data.names.values()], networks)


def run(options: DumpOptions) -> int:
    """Detect, and write."""
    refuse_overwrite([options.output], [*named_files(options.networks).values(), options.data])
    write_dump(options.output, detect(options))
    print(f"{options.output}: {options.output.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(run_program("detections.py", (DumpOptions, run), about=__doc__))
