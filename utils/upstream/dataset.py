"""Upstream's dataset, which augments training images; what it holds is read elsewhere."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.errors import DataError
from utils.upstream.checkout import import_upstream

if TYPE_CHECKING:
    import numpy as np
    import torch


def make_dataset(
    images: Mapping[str, tuple[np.ndarray, tuple[int, int], Sequence[np.ndarray]]],
    imgsz: int,
    batch_size: int,
    *,
    stride: int,
    single_cls: bool = False,
    augment: bool = False,
    hyp: Mapping[str, Any] | None = None,
) -> torch.utils.data.Dataset[Any]:
    """Upstream's `LoadImagesAndLabels` of images whose labels are known: it reads no labels, label caches and arrays.

    An item is (image uint8 `[3, H, W]` RGB, labels float `[n, 6]` of 0, class, normalised xywh, path, shapes).
    `dataset.collate_fn` makes batches of them.

    Args:
        images: path → labels float32 `[n, 5]` of class, normalised xywh; (width, height); and the labels' polygons, or
            nothing where they are boxes. Mosaics draw from all of them.

    Raises:
        DataError: no image has labels, and augmentation needs some.
    """
    import_upstream()
    from utils.dataloaders import LoadImagesAndLabels

    if augment and not any(len(labels) for labels, _, _ in images.values()):
        raise DataError(f"no image beside {next(iter(images))} has labels, and --hyp needs some; leave it out")

    class KnownImages(LoadImagesAndLabels):
        def cache_labels(self, *_: Any, **__: Any) -> dict[str, Any]:  # upstream's name; it reads all labels here
            known = {
                path: [labels.copy(), size, list(polygons)]  # upstream writes into them
                for path, (labels, size, polygons) in images.items()
            }
            return {**known, "hash": "", "results": (len(known), 0, 0, 0, len(known)), "msgs": [], "version": 0}

    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "list.txt"  # upstream looks for images, too, and for a label cache beside the list
        listed.write_text("image.jpg\n")
        dataset = KnownImages(
            str(listed), imgsz, batch_size, augment=augment, hyp=dict(hyp) if hyp else None, single_cls=single_cls,
            stride=stride,
        )  # fmt: skip
    # Upstream takes an array NAME.npy beside an image instead of it; below a file there is none.
    dataset.npy_files = [Path(file) / "array" for file in dataset.im_files]
    return dataset
