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
from collections.abc import Callable, Iterator, Mapping
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
from utils.evaluation.images import SplitImages, decode, label_file
from utils.evaluation.letterbox import letterboxed_planes, rectangular_shapes

logger = logging.getLogger(__name__)

UNDECODABLE = "Image Not Found"  # how upstream begins to say that OpenCV has read nothing


class ImageDataset(Dataset[Item]):
    """A split's images, letterboxed to a shape that is chosen for each of them beforehand.

    Attributes:
        split: the images as they were read, sorted by path, and those that cannot be used.
        shapes: input (height, width) for each image.
    """

    def __init__(
        self, split: SplitImages, imgsz: int | tuple[int, int], *, stride: int = 32, rect: bool = False,
        single_cls: bool = False, masks: bool = False,
    ) -> None:  # fmt: skip
        """See `make_loader` for the arguments; `DataError` if masks are asked for and there are boxes."""
        self.split, self.images, self.single_cls, self.masks = split, split.images, single_cls, masks
        labels = [(image.path, image.labels) for image in self.images]
        boxes = [path for path, of_image in labels if len(of_image.polygons) < len(of_image.rows) or of_image.boxes]
        if masks and boxes:
            raise DataError(
                f"a network for segmentation needs outlines, and {plural(len(boxes), 'image')} of '{split.name}' have "
                "boxes as labels; expected a class and a polygon x1 y1 x2 y2 x3 y3 ...; the first: "
                f"{label_file(boxes[0])}"
            )
        self.fit = (imgsz, imgsz) if isinstance(imgsz, int) else imgsz
        self.shapes = [self.fit] * len(self.images)
        if rect:
            self.shapes = rectangular_shapes([image.size for image in self.images], max(self.fit), stride)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Item:
        """The image, letterboxed, and its labels."""
        entry, shape = self.images[index], self.shapes[index]
        image = decode(entry.path)
        if image is None:
            return Item(None, entry.path)
        pixels, box = letterboxed_planes(image, self.fit, shape)
        rows, size = entry.labels.rows, np.array([image.shape[1], image.shape[0]] * 2, np.float32)
        half = rows[:, 3:] / 2
        boxes = np.concatenate([rows[:, 1:3] - half, rows[:, 1:3] + half], 1).clip(0, 1) * size
        labels = torch.from_numpy(np.concatenate([rows[:, :1] * (not self.single_cls), boxes], 1))
        masks = polygon_masks(entry.labels.polygons, box, shape) if self.masks else None
        return Item(torch.from_numpy(pixels), entry.path, box, labels, masks)


class SeededImages(Dataset[Any]):
    """Items of an augmenting dataset that depend on a seed, the pass over them and their index, and on nothing else.

    Upstream's augmentation draws from the generators of `random` and NumPy. Those of a worker process go on from image
    to image, so that what an image becomes would depend on the number of workers. Here they are seeded for each image.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.seed = 0  # of the pass

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        """The dataset's image; none where one that it is made of cannot be decoded."""
        before = random.getstate(), np.random.get_state()
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
            random.setstate(before[0])
            np.random.set_state(before[1])


class Batches(Sampler[list[int]]):
    """Batches of the indices of images; `shared` ones are this process's part of each of the whole `batches`.

    `images` is their number in a pass.
    """

    def __init__(self, batches: Any, batch_size: int, images: int, *, shared: bool) -> None:
        self.batches, self.batch_size, self.images = batches, batch_size, images
        self._world = distributed.world()
        self.shared = shared and self._world.size > 1

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            yield batch[self._world.share(len(batch))] if self.shared else batch

    def __len__(self) -> int:
        return len(self.batches)


def make_loader(
    data: DataConfig, split: str, *, imgsz: int | tuple[int, int], batch_size: int, stride: int = 32,
    rect: bool = False, workers: int = 8, single_cls: bool = False, shuffle: bool = False, first: int | None = None,
    seed: int = 0, augment: bool = False, hyp: Mapping[str, Any] | None = None, limit: int | None = None,
    keep: Callable[[str], bool] | None = None, masks: bool = False, progress: bool = False, share: bool = False,
) -> Loader:  # fmt: skip
    """A loader over a split; the same arguments give the same batches, whatever `workers` is.

    Args:
        imgsz: longer side, or (height, width), in pixels.
        rect: give each image the smallest input that holds it (multiples of `stride`).
        workers: at most so many processes read ahead; 0 reads in this one.
        shuffle: random order, fixed by `seed`; not together with `rect`, which groups images by shape.
        first: only so many images, the first of that order.
        augment: upstream's training augmentation with `hyp`, shuffled; needs a patched checkout and a square `imgsz`.
        limit: only so many images, evenly spread over the split.
        keep: only the images for whose path this holds, of those that `limit` leaves.
        masks: also give masks of the labels, which must be polygons.
        share: of several processes, each loads its part of every batch, see `Batches`; otherwise all of it.

    Raises:
        DataError: the split is not there, or none of its images can be used or is kept; see also `DataConfig.read`.
    """
    dataset: SeededImages | ImageDataset
    part = data.read(split, limit, progress=progress and distributed.is_main())
    if keep:
        part = replace(part, images=[image for image in part.images if keep(image.path)])
    if not part.images:
        raise DataError(f"not one of the images of '{part.name}' takes part here")
    if augment:
        from utils import upstream

        assert isinstance(imgsz, int)
        images = {image.path: (image.labels.rows, image.size, image.labels.polygons) for image in part.images}
        dataset, pixels = SeededImages(upstream.make_dataset(
            images, imgsz, batch_size, stride=stride, single_cls=single_cls, augment=True, hyp=hyp
        )), imgsz**2  # fmt: skip
    else:
        dataset = ImageDataset(part, imgsz, stride=stride, rect=rect, single_cls=single_cls, masks=masks)
        pixels = max(map(math.prod, dataset.shapes))
    generator = torch.Generator().manual_seed(seed)
    number = min(first or len(dataset), len(dataset))
    batches: Any
    if isinstance(dataset, SeededImages) or shuffle:
        order = RandomSampler(dataset, num_samples=number, generator=generator)
        batches = BatchSampler(order, batch_size, drop_last=False)
    else:
        of_shape: dict[tuple[int, int], list[int]] = {}
        for index, shape in enumerate(dataset.shapes):
            of_shape.setdefault(shape, []).append(index)
        groups = of_shape.values()
        batches = [group[i : i + batch_size] for group in groups for i in range(0, len(group), batch_size)]
    programs = 1 if share else distributed.world().size  # that read whole batches, and not parts of the same
    batch_bytes = min(batch_size, len(dataset)) * 3 * pixels * programs
    loader = Loader(
        dataset,
        batch_sampler=Batches(batches, batch_size, number, shared=share),
        num_workers=(processes := loading_processes(min(workers, cpu_cores(), len(batches)), batch_bytes)),
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # for the workers' seeds, which nothing uses
        persistent_workers=shuffle and not augment and processes > 0,  # a worker keeps its first pass's seed
    )
    loader.order = generator
    return loader


class Loader(DataLoader[Any]):
    """A loader whose passes depend on the state of `order` alone; augmented images have a new seed in each."""

    order: torch.Generator

    def __iter__(self) -> Any:
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.order))
        if isinstance(self.dataset, SeededImages):
            self.dataset.seed = seed
        return super().__iter__()


def loading_processes(workers: int, batch: int) -> int:
    """As many of these processes as shared memory has room for; with too little of it torch waits for ever.

    Each reads two batches ahead, of `batch` bytes in all programs that load at the same time; two more are in use.
    """
    if not workers or not os.path.isdir("/dev/shm"):  # a system without the folder has no such limit
        return workers
    free = shutil.disk_usage("/dev/shm").free
    fitting = max(min(workers, (int(0.8 * free) // max(batch, 1) - 2) // 2), 0)  # others need some of it, too
    if fitting < workers:
        text = "/dev/shm has %.0f MB free: %d of %d processes read images; give the container more (--shm-size=8g)"
        logger.warning(text, free / 1e6, fitting, workers)
    return fitting


def _start_worker(_: int) -> None:
    """Initialise a loader worker: one thread, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cv2.setNumThreads(0)


def whole_batch(images: Tensor) -> tuple[int, Tensor]:
    """How many images all parts of a batch hold, and this process's `[B, 3, H, W]`, of their shape even if empty."""
    parts = distributed.gather((len(images), *images.shape[2:]))
    if not len(images):
        height, width = (max(part[side] for part in parts) for side in (1, 2))
        images = images.new_zeros((0, 3, height, width))
    return sum(part[0] for part in parts), images
