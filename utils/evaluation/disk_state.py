"""The state of a dataset on disk: has something changed since a run was started, or a step has ended?"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from utils.core.errors import CheckpointError, DataError, InputError
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.image_files import find_images
from utils.evaluation.labels import label_file


class ImageState(NamedTuple):
    """An image file of a dataset as it is now.

    Attributes:
        name: its path below the dataset's folder.
        status: size in bytes, and time of the last change in nanoseconds.
        labels: hash of its label file; empty without one.
    """

    name: str
    status: tuple[int, int]
    labels: str


# What is compared of the images of a split, in words that users see and that saved states hold → field of `ImageState`
COMPARED = {"the images": "name", "sizes or times of images": "status", "labels": "labels"}


def dataset_hash(data: DataConfig, splits: Iterable[str], files: Mapping[str, str | None]) -> str:
    """Return the state of a dataset: a JSON mapping of each part that a run reads, in words, to its hash.

    Args:
        splits: names of the splits that the run reads; a split that the dataset does not have is left out.
        files: option → path of another file that the run reads; None for an option that was not given.

    Raises:
        DataError: a split holds no images, or a label file cannot be read.
        InputError: one of `files` cannot be read.
    """
    parts = {"the names of the classes": _hash(repr(sorted(data.names.items())))}
    for split in splits:
        if split not in data.splits:
            continue
        states = _image_states(data, split)
        for what, attribute in COMPARED.items():
            column = tuple(getattr(state, attribute) for state in states)
            parts[f"{what} of {split}"] = _hash(repr(column))
    for flag, path in files.items():
        if path:
            parts[f"the content of {flag}"] = _hash_of_file(flag, path)
    return json.dumps(parts)


def _image_states(data: DataConfig, split: str) -> list[ImageState]:
    """Return the state of each image of a split that exists; files are read by four threads, since disks take time."""
    from tqdm import tqdm

    images = find_images(data.paths(split))
    with ThreadPoolExecutor(4) as pool:
        states = pool.map(lambda image: _image_state(data, image), images)
        progress = tqdm(states, f"looking at {split}", len(images), delay=2, leave=False)
        return [state for state in progress if state is not None]


def _image_state(data: DataConfig, image: str) -> ImageState | None:
    """Return the state of an image; None if the file does not exist. `DataError` if its labels cannot be read."""
    if not os.path.exists(image):
        return None
    status = os.stat(image)
    name = image.removeprefix(f"{data.root}{os.sep}")
    label = label_file(image)
    labels = ""
    if os.path.lexists(label):
        try:
            labels = _hash(label.read_bytes())
        except OSError as error:
            raise DataError(f"cannot read {label}: {error.strerror}; expected the labels of {image}") from error
    return ImageState(name, (status.st_size, status.st_mtime_ns), labels)


def _hash_of_file(flag: str, path: str) -> str:
    """Return the hash of a file's content; `InputError` names the option `flag` if it cannot be read."""
    try:
        return _hash(Path(path).read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {flag} {path}: {error.strerror}") from error


def _hash(content: str | bytes) -> str:
    """Return the BLAKE2b hash of a content, 32 hexadecimal digits."""
    if isinstance(content, str):
        content = content.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def check_unchanged(saved: str, now: str, run: Path) -> None:
    """Compare what the run in `run` was started on with what it would read now, both as `dataset_hash` gives them.

    Raises:
        CheckpointError: `saved` is damaged.
        DataError: something has changed.
    """
    try:
        before: dict[str, str] = dict(json.loads(saved))
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the state of the run in {run} is damaged in 'dataset'; start a new run") from error
    after: dict[str, str] = json.loads(now)
    parts = dict.fromkeys([*before, *after])
    changed = [part for part in parts if before.get(part) != after.get(part)]
    if changed:
        raise DataError(
            f"the input of the run in {run} has changed since it was started: {', '.join(changed)}. Its results would "
            "not compare: restore what changed, or start a new run"
        )
