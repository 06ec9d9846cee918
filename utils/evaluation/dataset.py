"""Images and labels of a dataset, letterboxed, in batches, read ahead by worker processes.

Training images with augmentation come from upstream's own dataset, everything else from the one here.
"""

from __future__ import annotations

import logging
import math
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

from utils.core import distributed
from utils.core.cpu import cpu_cores
from utils.core.errors import DataError
from utils.core.text import plural
from utils.evaluation.batch import Item, collate, polygon_masks
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.image_files import decode
from utils.evaluation.labels import label_file
from utils.evaluation.letterbox import letterboxed_planes, rectangular_shapes
from utils.evaluation.split import SplitImages

logger = logging.getLogger(__name__)

UNDECODABLE = "Image Not Found"  # beginning of upstream's error when OpenCV reads nothing


class ImageDataset(Dataset[Item]):
    """A split's images, letterboxed to a shape that is chosen for each of them beforehand.

    Attributes:
        split: the images as they were read, sorted by path, and those that cannot be used.
        shapes: input (height, width) for each image.
    """

    def __init__(
        self,
        split: SplitImages,
        imgsz: int | tuple[int, int],
        *,
        stride: int = 32,
        rect: bool = False,
        single_cls: bool = False,
        masks: bool = False,
    ) -> None:
        """See `make_loader` for the arguments; `DataError` if masks are needed and there are boxes."""
        self.split = split
        self.images = split.images
        self.single_cls = single_cls
        self.masks = masks
        if masks:
            check_outlines(split)
        self.fit = (imgsz, imgsz) if isinstance(imgsz, int) else imgsz
        self.shapes = [self.fit] * len(self.images)
        if rect:
            self.shapes = rectangular_shapes([image.size for image in self.images], max(self.fit), stride)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Item:
        """The image, letterboxed, and its labels."""
        entry = self.images[index]
        shape = self.shapes[index]
        image = decode(entry.path)
        if image is None:
            return Item(None, entry.path)
        pixels, box = letterboxed_planes(image, self.fit, shape)
        labels = self._labels(entry.labels.rows, image.shape[1], image.shape[0])
        masks = polygon_masks(entry.labels.polygons, box, shape) if self.masks else None
        return Item(torch.from_numpy(pixels), entry.path, box, labels, masks)

    def _labels(self, rows: np.ndarray, width: int, height: int) -> Tensor:
        """Convert rows class, cx, cy, w, h, as fractions of an image of this size, to labels as in `Item`."""
        classes = rows[:, :1]
        if self.single_cls:
            classes = np.zeros_like(classes)
        center = rows[:, 1:3]
        half = rows[:, 3:] / 2
        corners = np.concatenate([center - half, center + half], 1).clip(0, 1)
        size = np.array([width, height, width, height], np.float32)
        return torch.from_numpy(np.concatenate([classes, corners * size], 1))


def check_outlines(split: SplitImages) -> None:
    """Raise `DataError` if an image of a split has a box as label, where masks are needed."""
    with_boxes = []
    for image in split.images:
        labels = image.labels
        if labels.boxes or len(labels.polygons) < len(labels.rows):
            with_boxes.append(image.path)
    if with_boxes:
        raise DataError(
            f"a segmentation model needs outlines, and {plural(len(with_boxes), 'image')} of '{split.name}' have "
            "boxes as labels; expected a class and a polygon x1 y1 x2 y2 x3 y3 ...; the first: "
            f"{label_file(with_boxes[0])}"
        )


class SeededImages(Dataset[Any]):
    """Items of an augmenting dataset that depend on a seed, the pass over them and their index, and on nothing else.

    Upstream's augmentation draws from the generators of `random` and NumPy. A worker process continues them from image
    to image, so that an augmented image would depend on the number of workers. Here they are seeded for each image.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.seed = 0  # of the pass

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        """The augmented image; an empty item if one of its source images cannot be decoded."""
        before = random.getstate()
        numpy_before = np.random.get_state()
        state = np.random.SeedSequence((self.seed, index)).generate_state(4)
        random.seed(int.from_bytes(state.tobytes(), "little"))
        np.random.seed(state)
        try:
            image, _, path, _ = self._dataset[index]
            return Item(image, path)
        except AssertionError as error:
            if not str(error).startswith(UNDECODABLE):
                raise
            return Item(None, "")
        finally:
            random.setstate(before)
            np.random.set_state(numpy_before)


class Batches(Sampler[list[int]]):
    """Batches of image indices; with `shared`, only this process's part of each batch in `batches`.

    `images` is the number of images in a pass, over all processes.
    """

    def __init__(
        self,
        batches: Any,
        batch_size: int,
        images: int,
        *,
        shared: bool,
    ) -> None:
        self.batches, self.batch_size, self.images = batches, batch_size, images
        self._world = distributed.world()
        self.shared = shared and self._world.size > 1

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            yield batch[self._world.share(len(batch))] if self.shared else batch

    def __len__(self) -> int:
        return len(self.batches)


def make_loader(
    data: DataConfig,
    split: str,
    *,
    imgsz: int | tuple[int, int],
    batch_size: int,
    stride: int = 32,
    rect: bool = False,
    workers: int = 8,
    single_cls: bool = False,
    shuffle: bool = False,
    first: int | None = None,
    seed: int = 0,
    augment: bool = False,
    hyp: Mapping[str, Any] | None = None,
    limit: int | None = None,
    keep: Callable[[str], bool] | None = None,
    masks: bool = False,
    progress: bool = False,
    share: bool = False,
) -> Loader:
    """A loader over a split; the same arguments give the same batches, for any number of `workers`.

    Args:
        imgsz: longer side, or (height, width), in pixels.
        rect: give each image the smallest input that holds it (multiples of `stride`).
        workers: at most so many processes read ahead; 0 reads in this one.
        shuffle: random order, fixed by `seed`; not together with `rect`, which groups images by shape.
        first: only so many images, the first of that order.
        augment: upstream's training augmentation with `hyp`, shuffled; needs a patched checkout and a square `imgsz`.
        limit: only so many images, evenly spread over the split.
        keep: only the images for whose path this holds, after `limit`.
        masks: also give masks of the labels, which must be polygons.
        share: each of several processes loads its part of every batch, see `Batches`; otherwise all of it.

    Raises:
        DataError: the split is not there, or no image of it can be used or passes `keep`; see also `DataConfig.read`.
    """
    part = data.read(split, limit, progress=progress and distributed.is_main())
    if keep:
        part = replace(part, images=[image for image in part.images if keep(image.path)])
    if not part.images:
        raise DataError(f"no image of '{part.name}' is left to use")
    dataset: SeededImages | ImageDataset
    if augment:
        assert isinstance(imgsz, int)
        dataset = _augmented(part, imgsz, batch_size, stride, single_cls, hyp)
        pixels = imgsz**2
    else:
        dataset = ImageDataset(part, imgsz, stride=stride, rect=rect, single_cls=single_cls, masks=masks)
        pixels = max(map(math.prod, dataset.shapes))
    generator = torch.Generator().manual_seed(seed)
    images = min(first or len(dataset), len(dataset))
    batches: Any
    if isinstance(dataset, SeededImages) or shuffle:
        order = RandomSampler(dataset, num_samples=images, generator=generator)
        batches = BatchSampler(order, batch_size, drop_last=False)
    else:
        batches = _batches_by_shape(dataset.shapes, batch_size)
    readers = 1 if share else distributed.world().size  # processes that each read whole batches
    batch_bytes = min(batch_size, len(dataset)) * 3 * pixels * readers
    processes = loading_processes(min(workers, cpu_cores(), len(batches)), batch_bytes)
    loader = Loader(
        dataset,
        batch_sampler=Batches(batches, batch_size, images, shared=share),
        num_workers=processes,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # for the workers' seeds, which nothing uses
        persistent_workers=shuffle and not augment and processes > 0,  # its workers would keep the first pass's seed
    )
    loader.order = generator
    return loader


def _augmented(
    part: SplitImages,
    imgsz: int,
    batch_size: int,
    stride: int,
    single_cls: bool,
    hyp: Mapping[str, Any] | None,
) -> SeededImages:
    """The images of a split with upstream's training augmentation."""
    from utils import upstream

    images = {image.path: (image.labels.rows, image.size, image.labels.polygons) for image in part.images}
    dataset = upstream.make_dataset(
        images,
        imgsz,
        batch_size,
        stride=stride,
        single_cls=single_cls,
        augment=True,
        hyp=hyp,
    )
    return SeededImages(dataset)


def _batches_by_shape(shapes: Sequence[tuple[int, int]], batch_size: int) -> list[list[int]]:
    """Indices of images in batches of one shape each."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, shape in enumerate(shapes):
        groups.setdefault(shape, []).append(index)
    batches = []
    for group in groups.values():
        batches += [group[start : start + batch_size] for start in range(0, len(group), batch_size)]
    return batches


class Loader(DataLoader[Any]):
    """A loader whose passes depend on the state of `order` alone; augmented images have a new seed in each."""

    order: torch.Generator

    def __iter__(self) -> Any:
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.order))
        if isinstance(self.dataset, SeededImages):
            self.dataset.seed = seed
        return super().__iter__()


def loading_processes(workers: int, batch: int) -> int:
    """Number of processes, at most `workers`, that shared memory has room for; with too little torch waits for ever.

    Each process reads two batches ahead, and two more batches are in use. `batch` is the bytes of a batch, summed over
    all processes that load at the same time with a loader of their own.
    """
    if not workers or not os.path.isdir("/dev/shm"):  # a system without the folder has no such limit
        return workers
    free = shutil.disk_usage("/dev/shm").free
    batches = int(0.8 * free) // max(batch, 1)  # other programs need some of the memory, too
    fitting = max(min(workers, (batches - 2) // 2), 0)
    if fitting < workers:
        text = "/dev/shm has %.0f MB free: %d of %d processes read images; give the container more (--shm-size=8g)"
        logger.warning(text, free / 1e6, fitting, workers)
    return fitting


def _start_worker(_: int) -> None:
    """Initialise a loader worker: one thread, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cv2.setNumThreads(0)


def whole_batch(images: Tensor) -> tuple[int, Tensor]:
    """Return the number of images of a batch over all processes, and this process's images `[B, 3, H, W]`.

    A process without images returns an empty tensor, with the height and width of the others' images.
    """
    parts = distributed.gather((len(images), *images.shape[2:]))
    if not len(images):
        height = max(part[1] for part in parts)
        width = max(part[2] for part in parts)
        images = images.new_zeros((0, 3, height, width))
    return sum(part[0] for part in parts), images
