"""Upstream's reader of datasets, which augments training images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from utils.core.errors import DataError
from utils.upstream.checkout import import_upstream, quiet

if TYPE_CHECKING:
    import torch


def make_dataset(
    paths: Sequence[str] | str,
    imgsz: int,
    batch_size: int,
    *,
    stride: int,
    single_cls: bool = False,
    augment: bool = False,
    hyp: Mapping[str, Any] | None = None,
    keep: Callable[[str], bool] | None = None,
) -> torch.utils.data.Dataset[Any]:
    """Upstream's `LoadImagesAndLabels`, of images and labels only: no label cache and no array beside an image is read.

    An item is (image uint8 `[3, H, W]` RGB, labels float `[n, 6]` of 0, class, normalised xywh, path, shapes).
    `dataset.collate_fn` makes batches of them.

    Args:
        keep: only the images for whose path this holds take part, also as parts of others' mosaics.

    Raises:
        DataError: no image, or no readable one, lies at `paths`.
    """
    import_upstream()
    from utils.dataloaders import LoadImagesAndLabels

    try:
        with quiet(), _images_stay_unchanged():
            dataset = LoadImagesAndLabels(
                list(paths) if not isinstance(paths, str) else paths,
                imgsz,
                batch_size,
                augment=augment,
                hyp=dict(hyp) if hyp else None,
                single_cls=single_cls,
                stride=stride,
            )
    except Exception as error:  # upstream raises a bare Exception, with its help URL on further lines
        if "can not start training" in str(error):
            where = paths if isinstance(paths, str) else ", ".join(paths)
            raise DataError(f"no image of {where} has labels, and --hyp needs some; leave it out") from error
        raise DataError(str(error).split("\n")[0]) from error
    if keep is not None:
        kept = [index for index, file in enumerate(dataset.im_files) if keep(file)]
        for name in ("im_files", "label_files", "labels", "segments"):  # mosaics draw from all that the dataset holds
            entries = getattr(dataset, name)
            setattr(dataset, name, [entries[index] for index in kept])
        dataset.shapes, dataset.batch = dataset.shapes[kept], dataset.batch[: len(kept)]
        dataset.n, dataset.indices = len(kept), range(len(kept))
        dataset.ims, dataset.im_hw0, dataset.im_hw = ([None] * len(kept) for _ in range(3))
    # Upstream takes an array NAME.npy beside an image instead of it; below a file there is none.
    dataset.npy_files = [Path(file) / "array" for file in dataset.im_files]
    return dataset


@contextmanager
def _images_stay_unchanged() -> Iterator[None]:
    """Within it upstream's reader does not rewrite JPEGs that have bytes behind their end, as those of phones do."""
    from utils import dataloaders

    unsaved = SimpleNamespace(save=lambda *_, **__: None)
    before = dataloaders.ImageOps
    dataloaders.ImageOps = SimpleNamespace(exif_transpose=lambda image: unsaved)
    try:
        yield
    finally:
        dataloaders.ImageOps = before
