"""What a run read, so that it is not continued on something else: images by name, size and time, labels by content.

state.dataset = dataset_hash(data, ("train", "val"), {"--hyp": options.hyp})
check_unchanged(state.dataset, dataset_hash(...), run)   # raises DataError, which says what changed
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from utils.core.errors import CheckpointError, DataError, InputError
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.images import find_images, label_file

CHUNK = 256  # images that a thread reads at a time


def dataset_hash(data: DataConfig, splits: Iterable[str], files: Mapping[str, str | None] | None = None) -> str:
    """The dataset as it is now: a JSON mapping of what a run reads, in words, to its hash.

    Args:
        splits: those that are used; one that the dataset does not have is left out.
        files: option → path of a further file that the run reads, None where the option was not given.

    Raises:
        DataError: a split holds no images, or a label cannot be read.
        InputError: a further file cannot be read.
    """
    parts = {"the names of the classes": _hash(repr(sorted(data.names.items())))}
    for split in splits:
        if split in data.splits:
            parts |= _of_split(data, split)
    for flag, path in (files or {}).items():
        try:
            parts |= {f"the content of {flag}": _hash(Path(path).read_bytes())} if path else {}
        except OSError as error:
            raise InputError(f"cannot read {flag} {path}: {error.strerror}") from error
    return json.dumps(parts)


def check_unchanged(saved: str, now: str, run: Path) -> None:
    """Refuse to continue the run in `run` on something else than it was started on.

    Args:
        saved: the dataset_hash in the run's state.

    Raises:
        CheckpointError: `saved` is no dataset_hash.
        DataError: something changed; the message says what.
    """
    try:
        before, after = dict(json.loads(saved)), json.loads(now)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"the state of the run in {run} is damaged in 'dataset', or from another version; start a new run"
        ) from error
    if changed := [part for part in dict.fromkeys([*before, *after]) if before.get(part) != after.get(part)]:
        raise DataError(
            f"what the run in {run} was started on has changed: {', '.join(changed)}. Its results would not compare: "
            "restore what changed, or start a new run"
        )


def _of_split(data: DataConfig, split: str) -> dict[str, str]:
    """Hashes of a split's images and labels; images that cannot be found are left out.

    Several threads read, since disks are waited for.
    """
    files = sorted(set(find_images(data.paths(split))))
    root = f"{data.root}{os.sep}"
    chunks = [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)]
    with ThreadPoolExecutor(4) as pool:
        read = pool.map(lambda chunk: [_look(file) for file in chunk], chunks)
        looks = list(
            itertools.chain.from_iterable(tqdm(read, f"looking at {split}", len(chunks), delay=2, leave=False))
        )
    known = [(file.removeprefix(root), *look) for file, look in zip(files, looks, strict=True) if look is not None]
    names, states, labels = zip(*known, strict=True) if known else ((), (), ())
    return {
        f"the images of {split}": _hash(repr(names)),
        f"sizes or times of images of {split}": _hash(repr(states)),
        f"labels of {split}": _hash(repr(labels)),
    }


def _look(file: str) -> tuple[tuple[int, int], str] | None:
    """Size and time of an image and the hash of its labels, empty for no label file; None when there is no image."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    label = label_file(file)
    try:
        return (status.st_size, status.st_mtime_ns), _hash(label.read_bytes())
    except FileNotFoundError:
        return (status.st_size, status.st_mtime_ns), ""
    except OSError as error:
        raise DataError(f"cannot read {label}: {error.strerror}; expected the labels of {file}") from error


def _hash(content: str | bytes) -> str:
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return hashlib.blake2b(data, digest_size=16).hexdigest()
