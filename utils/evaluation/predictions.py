"""Writing detections to files, in upstream's formats: one text file per image, and COCO's JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.files import atomic_path
from utils.core.output_paths import distinct_names, refuse_overwrite
from utils.evaluation.find_images import label_file

if TYPE_CHECKING:
    from torch import Tensor

ELSEWHERE = "choose another --name or --project"


class TextWriter:
    """`folder/{image's stem}.txt`: lines of `class cx cy w h [score]`, as fractions of the image.

    An image without detections gets no file. Of several images with one stem the later ones get a number.
    """

    def __init__(self, folder: Path, with_scores: bool, paths: Sequence[str] = ()) -> None:
        """Write into `folder`; `paths` are the images that will come.

        Raises:
            InputError: a file would be written over the labels of one of them.
        """
        self._folder = folder
        self._with_scores = with_scores
        names = distinct_names(f"{Path(path).stem}.txt" for path in paths)
        self._names = dict(zip(paths, names, strict=True))
        refuse_overwrite((folder / name for name in names), map(label_file, paths), ELSEWHERE)
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, path: str, found: Tensor, size: tuple[int, int]) -> None:
        """Write one image's detections `[n, 6]` (xyxy in pixels, score, class); `size` is its (height, width)."""
        height, width = size
        lines = []
        for x1, y1, x2, y2, score, label in found.tolist():
            values = [label, (x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height]
            lines.append(" ".join(f"{value:g}" for value in values + [score] * self._with_scores) + "\n")
        if lines:
            with atomic_path(self._folder / self._names.get(path, f"{Path(path).stem}.txt")) as temporary:
                temporary.write_text("".join(lines), encoding="utf-8")


class JsonWriter:
    """COCO's list of results: `image_id`, `category_id`, `bbox` (left, top, width, height in pixels), `score`.

    Those of a segmentation network have a `segmentation`, too, as run lengths.
    """

    def __init__(self, image_id: Callable[[str], int | str], category_ids: list[int]) -> None:
        self.results: list[dict[str, Any]] = []
        self._image_id = image_id
        self._category_ids = category_ids

    def add(self, path: str, found: Tensor, masks: Sequence[dict[str, Any]] | None = None) -> None:
        """Remember one image's detections `[n, 6]`: xyxy in pixels, score, class; and run lengths of their masks."""
        image_id = self._image_id(path)
        for index, (x1, y1, x2, y2, score, label) in enumerate(found.tolist()):
            bbox = [round(value, 3) for value in (x1, y1, x2 - x1, y2 - y1)]
            category = self._category_ids[int(label)]
            entry = {"image_id": image_id, "category_id": category, "bbox": bbox, "score": round(score, 5)}
            self.results.append(entry if masks is None else {**entry, "segmentation": masks[index]})

    def save(self, path: Path) -> None:
        """Write all results; `path` appears only when it is complete."""
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(self.results), encoding="utf-8")
