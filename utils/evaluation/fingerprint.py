"""What a run read, so that it is not continued on something else: images by name, size and time, labels by content.

fingerprint = Fingerprint.of(data, ("train", "val"), {"--hyp": options.hyp})
state.dataset = fingerprint.to_text()     # some 20 bytes an image
check_unchanged(state.dataset, Fingerprint.of(...), run)   # raises DataError, which says what changed
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from utils.core.errors import CheckpointError, DataError, InputError
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.images import find_images, label_file

DIGEST = 4  # bytes; a change goes unseen once in 4e9
CHUNK = 256  # images that a thread reads at a time

Marks = dict[str, tuple[str, str]]  # image → digest of its size and time; digest of its label's content


@dataclass(frozen=True)
class Fingerprint:
    """What a run reads, as it was at one moment.

    Attributes:
        classes: names of the classes.
        splits: split → image, relative to the dataset's root → its marks. Images that cannot be found are left out.
        files: option → path and digest of a further file that the run reads.
    """

    classes: list[str]
    splits: dict[str, Marks]
    files: dict[str, tuple[str, str]]

    @classmethod
    def of(cls, data: DataConfig, splits: Iterable[str], files: Mapping[str, str | None] | None = None) -> Fingerprint:
        """Look at the dataset as it is now.

        Args:
            splits: those that are used; one that the dataset does not have is left out.
            files: option → path of a further file, None where the option was not given.

        Raises:
            DataError: a split holds no images, or a label cannot be read.
            InputError: a further file cannot be read.
        """
        found = {split: _marks(data, split) for split in splits if split in data.splits}
        further = {flag: (str(path), _digest(_read(path, flag))) for flag, path in (files or {}).items() if path}
        return cls([data.names[key] for key in sorted(data.names)], found, further)

    def to_text(self) -> str:
        """Write the fingerprint as ASCII text, small enough to be written with every step of a run."""
        content = json.dumps(asdict(self), separators=(",", ":"))
        return base64.b64encode(zlib.compress(content.encode("utf-8", "surrogatepass"))).decode("ascii")

    @classmethod
    def from_text(cls, text: str) -> Fingerprint:
        """The inverse of `to_text`.

        Raises:
            ValueError: the text is none.
        """
        try:
            content = json.loads(zlib.decompress(base64.b64decode(text)).decode("utf-8", "surrogatepass"))
            splits = {
                split: {name: (image, label) for name, (image, label) in marks.items()}
                for split, marks in content["splits"].items()
            }
            files = {flag: (path, digest) for flag, (path, digest) in content["files"].items()}
            return cls([str(name) for name in content["classes"]], splits, files)
        except (ValueError, zlib.error, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError("it is no fingerprint of a dataset") from error

    def changes(self, now: Fingerprint) -> list[str]:
        """What is different `now`, each as a phrase such as '2 images were removed from val, such as images/7.png'."""
        found = [] if self.classes == now.classes else ["the names of the classes changed"]
        for split in sorted({*self.splits, *now.splits}):
            found += _split_changes(split, self.splits.get(split, {}), now.splits.get(split, {}))
        for flag in sorted({*self.files, *now.files}):
            before, after = self.files.get(flag), now.files.get(flag)
            if before is None or after is None or before[1] != after[1]:
                found.append(f"the content of {flag} {(after or before or ('',))[0]} changed")
        return found


def check_unchanged(saved: str, now: Fingerprint, run: Path) -> None:
    """Refuse to continue the run in `run` on something else than it was started on.

    Args:
        saved: the fingerprint in the run's state.

    Raises:
        CheckpointError: `saved` is no fingerprint.
        DataError: something changed; the message says what.
    """
    try:
        changes = Fingerprint.from_text(saved).changes(now)
    except ValueError as error:
        raise CheckpointError(
            f"the state of the run in {run} is damaged in 'dataset', or from another version; start a new run"
        ) from error
    if changes:
        raise DataError(
            f"what the run in {run} was started on has changed: {'; '.join(changes)}. Its results would not compare: "
            "restore what changed, or start a new run"
        )


def _split_changes(split: str, before: Marks, now: Marks) -> Iterator[str]:
    common = sorted(before.keys() & now.keys())
    changes = [
        (sorted(before.keys() - now.keys()), "was", "were", f"removed from {split}"),
        (sorted(now.keys() - before.keys()), "was", "were", f"added to {split}"),
        (
            [name for name in common if before[name][0] != now[name][0]],
            "has",
            "have",
            f"another size or time in {split}",
        ),
        ([name for name in common if before[name][1] != now[name][1]], "has", "have", f"other labels in {split}"),
    ]
    for names, one, several, what in changes:
        if len(names) == 1:
            yield f"1 image {one} {what}, {names[0]}"
        elif names:
            yield f"{len(names)} images {several} {what}, such as {names[0]}"


def _marks(data: DataConfig, split: str) -> Marks:
    """Marks of a split's images, sorted by name; read by several threads, since disks are waited for."""
    from tqdm import tqdm

    files = sorted(set(find_images(data.paths(split))))
    root = f"{data.root}{os.sep}"
    chunks = [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)]
    with ThreadPoolExecutor(4) as pool:
        bar = tqdm(pool.map(_marks_of, chunks), f"looking at {split}", len(chunks), delay=2, leave=False)
        marks = itertools.chain.from_iterable(bar)
        return {file.removeprefix(root): mark for file, mark in zip(files, marks, strict=True) if mark is not None}


def _marks_of(files: list[str]) -> list[tuple[str, str] | None]:
    return [_mark(file) for file in files]


def _mark(file: str) -> tuple[str, str] | None:
    """The marks of an image, an empty one for no label; None when there is no image."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    image, label = _digest(f"{status.st_size} {status.st_mtime_ns}".encode()), label_file(file)
    try:
        return image, _digest(label.read_bytes())
    except FileNotFoundError:
        return image, ""
    except OSError as error:
        raise DataError(f"cannot read {label}: {error.strerror}; expected the labels of {file}") from error


def _read(path: str | Path, flag: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {flag} {path}: {error.strerror}") from error


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=DIGEST).hexdigest()
