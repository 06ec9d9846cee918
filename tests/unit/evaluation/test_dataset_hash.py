"""A dataset_hash of a dataset says what changed since, in words, and nothing else is a change."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from utils.core.errors import CheckpointError, DataError, InputError
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import check_unchanged, dataset_hash

IMAGES = {"train": 3, "val": 4}


@pytest.fixture
def dataset(tmp_path) -> Path:
    """A dataset of files that nobody decodes; some have labels."""
    for split, count in IMAGES.items():
        for number in range(count):
            for kind, suffix, content in (("images", ".png", b"pixels"), ("labels", ".txt", b"0 0.5 0.5 0.1 0.1\n")):
                path = tmp_path / kind / split / f"{number}{suffix}"
                path.parent.mkdir(parents=True, exist_ok=True)
                if kind == "images" or number:
                    path.write_bytes(content)
    content = {"path": str(tmp_path), **{split: f"images/{split}" for split in IMAGES}, "names": ["cat", "dog"]}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "hyp.yaml").write_text("degrees: 0.0\n")
    return tmp_path


def look(dataset: Path) -> str:
    files = {"--hyp": str(dataset / "hyp.yaml"), "--profile": None}
    return dataset_hash(load_data(dataset / "data.yaml"), ("train", "val"), files)


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def as_old(path: Path, content: bytes) -> None:
    """Change a file's content, but neither its size nor its time."""
    status = path.stat()
    assert len(content) == status.st_size
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "removed": (lambda root: (root / "images/val/2.png").unlink(), "the images of val"),
    "added": (lambda root: (root / "images/train/new.jpg").touch(), "the images of train"),
    "renamed": (lambda root: (root / "images/val/2.png").rename(root / "images/val/7.png"), "the images of val"),
    "size": (lambda root: (root / "images/train/1.png").write_bytes(b"other"), "sizes or times of images of train"),
    "time": (lambda root: os.utime(root / "images/train/1.png", (1, 1)), "sizes or times of images of train"),
    "labels of the same size and time": (
        lambda root: as_old(root / "labels/val/1.txt", b"1 0.5 0.5 0.1 0.1\n"), "labels of val",
    ),
    "labels gone": (lambda root: shutil.rmtree(root / "labels/val"), "labels of val"),
    "labels for one that had none": (lambda root: (root / "labels/train/0.txt").touch(), "labels of train"),
    "classes": (lambda root: edit(root / "data.yaml", "cat", "cow"), "the names of the classes"),
    "a split": (lambda root: edit(root / "data.yaml", "images/train", "images/val"), "the images of train"),
    "augmentation": (lambda root: edit(root / "hyp.yaml", "0.0", "0.1"), "the content of --hyp"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named(change, dataset):
    before = look(dataset)
    apply, expected = CHANGES[change]
    apply(dataset)
    with pytest.raises(DataError) as refused:
        check_unchanged(before, look(dataset), Path("runs/qat/exp"))
    text = str(refused.value)
    assert text.startswith("what the run in runs/qat/exp was started on has changed: ")
    assert expected in text
    assert "start a new run" in text
    assert "\n" not in text


def test_an_image_that_a_list_names_and_that_is_gone_was_removed(dataset):
    names = sorted(map(str, (dataset / "images/val").iterdir()))
    (dataset / "val.txt").write_text("\n".join(names))
    edit(dataset / "data.yaml", "images/val", "val.txt")
    before = look(dataset)
    Path(names[0]).unlink()
    with pytest.raises(DataError, match="the images of val"):
        check_unchanged(before, look(dataset), Path("run"))


def test_nothing_changed(dataset):
    (dataset / os.fsdecode(b"images/val/\xff.png")).touch()
    before = look(dataset)
    os.utime(dataset / "labels/val/1.txt", (1, 1))  # the content counts
    (dataset / "labels/val/nobody's.txt").write_text("no labels of any image")
    check_unchanged(before, look(dataset), Path("run"))


def test_a_moved_dataset_is_the_same(dataset, tmp_path_factory):
    place = tmp_path_factory.mktemp("moved") / "set"
    shutil.copytree(dataset, place)  # keeps times
    edit(place / "data.yaml", str(dataset), str(place))
    assert look(place) == look(dataset)


@pytest.mark.parametrize("text", ["", "eJyrrgUAAXUA+Q==", "[1]", "3", "[" * 100_000])
def test_a_damaged_fingerprint_is_named(text, dataset):
    with pytest.raises(CheckpointError, match="the run in run is damaged in 'dataset'"):
        check_unchanged(text, look(dataset), Path("run"))


def test_what_cannot_be_read_is_named(dataset):
    (dataset / "labels/val/1.txt").unlink()
    (dataset / "labels/val/1.txt").mkdir()
    with pytest.raises(DataError, match=r"labels/val/1\.txt"):
        look(dataset)
    with pytest.raises(InputError, match=r"--hyp nowhere\.yaml"):
        dataset_hash(load_data(dataset / "data.yaml"), (), {"--hyp": "nowhere.yaml"})
