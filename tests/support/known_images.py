"""A dataset whose images say by their colour which they are, and a 'network' that knows what to answer.

Its answers are the labels with errors: shifted boxes, wrong classes, doubles, misses, false alarms. AP is then neither
0 nor 1, and everything around the network (letterbox, NMS, matching, AP) can be compared with upstream's val.py and
with pycocotools without any training.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor, nn

SQUARE = ((64, 64),)
MIXED = ((64, 64), (64, 48), (48, 64), (90, 40), (33, 70), (120, 100), (51, 37), (64, 43))  # (width, height)


@dataclass(frozen=True)
class Sample:
    """One image: `size` (width, height); `labels` `[n, 5]` class, xyxy in pixels; `answers` `[n, 6]` with a score."""

    path: Path
    size: tuple[int, int]
    labels: np.ndarray
    answers: np.ndarray


def colour(index: int) -> tuple[int, int, int]:
    """A colour (BGR) for each number below 4096, none of them the grey of letterboxing."""
    return tuple((index >> shift & 15) * 16 + 5 for shift in (0, 4, 8))


def write_set(
    folder, count=40, sizes=MIXED, names=("cat", "dog", "owl"), seed=0, stem="{:012d}", split="val", splits=("val",)
):
    """Write images, labels, COCO annotations and data.yaml; category ids are 3, 6, 9, ..., not class ids.

    The images lie in the folder `split`, and data.yaml names them as each of `splits`.
    """
    rng = np.random.default_rng(seed)
    for kind in ("images", "labels"):
        (folder / kind / split).mkdir(parents=True)
    samples = []
    for index in range(count):
        width, height = sizes[index % len(sizes)]
        labels = _labels(rng, width, height, len(names))
        path = folder / "images" / split / f"{stem.format(index + 1)}.png"
        cv2.imwrite(str(path), np.full((height, width, 3), colour(index), np.uint8))
        lines = []
        for label, x1, y1, x2, y2 in labels:
            box = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
            lines.append(f"{int(label)} " + " ".join(f"{value:.7f}" for value in box) + "\n")
        (folder / "labels" / split / f"{path.stem}.txt").write_text("".join(lines))
        samples.append(Sample(path, (width, height), labels, _answers(rng, labels, width, height, len(names))))
    (folder / "annotations").mkdir(exist_ok=True)
    (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(coco_json(samples, names)))
    (folder / "data.yaml").write_text(
        json.dumps({"path": str(folder), **dict.fromkeys(splits, f"images/{split}"), "names": list(names)})
    )
    return samples


def damaged_png() -> bytes:
    """An image that begins and ends as it should, so that only decoding can tell."""
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    whole = cv2.imencode(".png", noise)[1].tobytes()
    return whole[:6000] + whole[-12:]


def coco_json(samples: Sequence[Sample], names: Sequence[str], categories: Sequence[int] | None = None) -> dict:
    """The samples as COCO annotations."""
    categories = categories or [3 * (index + 1) for index in range(len(names))]
    annotations = [
        {"id": 0, "image_id": number, "category_id": categories[int(label)], "iscrowd": 0,
         "bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)}
        for number, sample in enumerate(samples, 1) for label, x1, y1, x2, y2 in sample.labels.tolist()
    ]  # fmt: skip
    for number, annotation in enumerate(annotations):
        annotation["id"] = number
    images = [
        {"id": number, "file_name": sample.path.name, "width": sample.size[0], "height": sample.size[1]}
        for number, sample in enumerate(samples, 1)
    ]
    return {"images": images, "annotations": annotations,
            "categories": [{"id": i, "name": n} for i, n in zip(categories, names, strict=True)]}  # fmt: skip


def _labels(rng: np.random.Generator, width: int, height: int, nc: int) -> np.ndarray:
    rows = []
    for _ in range(int(rng.integers(0, 7))):
        w, h = rng.uniform(0.15, 0.5) * width, rng.uniform(0.15, 0.5) * height
        x, y = rng.uniform(0, width - w), rng.uniform(0, height - h)
        rows.append((rng.integers(nc), x, y, x + w, y + h))
    return np.array(rows, dtype=np.float64).reshape(-1, 5)


def _answers(rng: np.random.Generator, labels: np.ndarray, width: int, height: int, nc: int) -> np.ndarray:
    rows = []
    for label, x1, y1, x2, y2 in labels:
        for _ in range(int(rng.choice([1, 2], p=[0.8, 0.2]))):  # hits and doubles
            box = np.array([x1, y1, x2, y2]) + rng.normal(0, 0.05, 4) * min(x2 - x1, y2 - y1)
            guess = rng.integers(nc) if rng.random() < 0.1 else label
            missed = rng.random() < 0.15
            rows.append((guess, *box, rng.uniform(0.002, 0.02) if missed else rng.uniform(0.05, 0.99)))
    # False alarms, most of them in a long tail of low scores as real detectors have it. Without the tail upstream's AP
    # lies far above pycocotools', because it interpolates from the last recall down to zero precision at recall 1.
    for highest in [0.02] * 60 + [0.5] * int(rng.poisson(1.0)):
        x1, y1 = rng.uniform(0, 0.6) * width, rng.uniform(0, 0.6) * height
        rows.append((rng.integers(nc), x1, y1, x1 + 0.3 * width, y1 + 0.3 * height, rng.uniform(0.002, highest)))
    return np.array(rows, dtype=np.float64).reshape(-1, 6)


def numbers(result):
    """AP, AP50, precision and recall of an evaluation."""
    return result.ap, result.ap50, result.precision, result.recall


class KnowingModel(nn.Module):
    """`[B, 3, H, W]` of images of `samples` → `[B, 4 + nc, anchors]`, as a detector gives it.

    It must be told `imgsz`, the longer side that images are resized to.
    """

    def __init__(self, samples: Sequence[Sample], names: Sequence[str], imgsz: int) -> None:
        super().__init__()
        self.samples = list(samples)
        self.names = dict(enumerate(names))
        self.imgsz = imgsz
        self.stride = torch.tensor([32.0])
        self.weight = nn.Parameter(torch.zeros(1))  # tells val.py the device
        self.anchors = max(len(sample.answers) for sample in samples) + 1

    def forward(self, images: Tensor, augment: bool = False) -> Tensor:
        return torch.stack([self._answer(image) for image in images])

    def index(self, image: Tensor) -> int:
        """Which sample this is, by the colour in the middle."""
        red, green, blue = (image[:, image.shape[1] // 2, image.shape[2] // 2].float() * 255).round().long().tolist()
        return (blue - 5) // 16 + (green - 5) // 16 * 16 + (red - 5) // 16 * 256

    def _answer(self, image: Tensor) -> Tensor:
        sample = self.samples[self.index(image)]
        scale, offset = self.placed(sample, image.shape[1:])
        boxes = sample.answers[:, 1:5] * np.tile(scale, 2) + np.tile(offset, 2)
        columns = torch.arange(len(boxes))
        out = torch.zeros(4 + len(self.names), self.anchors)
        out[:2, columns] = torch.from_numpy((boxes[:, :2] + boxes[:, 2:]) / 2).float().T
        out[2:4, columns] = torch.from_numpy(boxes[:, 2:] - boxes[:, :2]).float().T
        out[4 + torch.from_numpy(sample.answers[:, 0]).long(), columns] = torch.from_numpy(sample.answers[:, 5]).float()
        return out.to(image)

    def placed(self, sample: Sample, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Where the image lies in an input of this height and width: scale and offset of x, y."""
        size = np.array(sample.size)
        new = (size * (self.imgsz / size.max())).astype(int)
        return new / size, np.ceil((np.array([shape[1], shape[0]]) - new) / 2 - 0.6)

    def squares(self) -> Tensor:
        """Images of all samples, as large as the input, in the colours that they are known by."""
        images = torch.empty(len(self.samples), 3, self.imgsz, self.imgsz)
        for number in range(len(self.samples)):
            images[number] = torch.tensor(colour(number)[::-1]).view(3, 1, 1) / 255
        return images


def indices(images: Tensor) -> Tensor:
    """Which samples these are, `[B]`, by operators that can be exported."""
    middle = images[:, :, images.shape[2] // 2, images.shape[3] // 2].float()
    if images.shape[1] == 1:  # the first sixteen colours differ in blue, which is 0.114 of their grey
        return torch.round((middle[:, 0] * 255 - 5) / (16 * 0.114)).long().clamp(min=0)
    red, green, blue = torch.floor_divide(torch.round(middle * 255) - 5, 16).unbind(1)
    return (red * 256 + green * 16 + blue).long().clamp(min=0)


class AnswerTable(nn.Module):
    """The answers of a knowing network to square images as constants, which can be exported to ONNX."""

    def __init__(self, model: KnowingModel) -> None:
        super().__init__()
        answers = model(model.squares())
        self.side, self.masks = model.imgsz, isinstance(answers, tuple)
        self.register_buffer("table", answers[0] if self.masks else answers)
        self.register_buffer("prototypes", answers[1][2] if self.masks else None)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        index = indices(images)
        answers = self.table[index]
        boxes = answers[:, :4] * (images.shape[3] / self.side)
        answers = torch.cat([boxes, answers[:, 4:]], 1).to(images.dtype)
        return (answers, self.prototypes[index]) if self.masks else answers


def export_answers(model, path, batch=None, size=None, half=False, names=None, channels=3, task="detect"):
    """Write the answers as an ONNX file; `batch` and `size` are fixed where they are given."""
    table, side = AnswerTable(model), size or model.imgsz
    outputs = ["output0", "output1"] if table.masks else ["output0"]
    images = torch.full((batch or 2, channels, side, side), 5 / 255, dtype=torch.float16 if half else torch.float32)
    axes = {name: {0: "batch"} for name in ("images", *outputs)} if batch is None else {"images": {}}
    axes["images"] = axes["images"] | ({2: "height", 3: "width"} if size is None else {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(
            table, (images,), str(path), input_names=["images"], output_names=outputs, opset_version=17,
            dynamic_axes=axes, dynamo=False,
        )  # fmt: skip
    import onnx

    file = onnx.load(path)  # what ours say of themselves
    about = {"names": json.dumps(names or model.names), "stride": "32", **({"task": task} if task else {})}
    onnx.helper.set_model_props(file, about)
    onnx.save(file, path)
    return path
