"""What the results in a folder were made from: the same again is taken, anything else is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from utils.core.errors import InputError
from utils.evaluation.data_yaml import load_data
from utils.jobs.made_from import FILE, dataset_digest, keep_to


def test_the_same_is_kept_to_and_what_differs_is_named(tmp_path):
    folder = tmp_path / "out"
    options = {"--weights": "12ab", "--imgsz": 320}
    for _ in range(2):
        keep_to(folder, options)
    with pytest.raises(InputError, match="made with other --imgsz, and"):
        keep_to(folder, {**options, "--imgsz": 640})
    with pytest.raises(InputError, match="made with other --weights and --imgsz, and"):
        keep_to(folder, {"--weights": "0", "--imgsz": 640})
    assert yaml.safe_load((folder / FILE).read_text()) == options


@pytest.mark.parametrize("content", ["", "text", "- a list", "{"])
def test_a_damaged_file_is_one_line(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(InputError):
        keep_to(tmp_path, {"--imgsz": 320})


@pytest.fixture
def dataset(tmp_path) -> Path:
    for split, number in (("train", 3), ("val", 2)):
        (tmp_path / "set" / split).mkdir(parents=True)
        for image in range(number):
            (tmp_path / "set" / split / f"{image}.jpg").write_bytes(bytes(image + 1))
    (tmp_path / "set" / "data.yaml").write_text("train: train\nval: val\nnames: [eight, nine]\n")
    return tmp_path / "set"


def digest(folder: Path) -> str:
    return dataset_digest(load_data(folder / "data.yaml"))


def test_a_copied_dataset_is_the_same(dataset, tmp_path):
    shutil.copytree(dataset, tmp_path / "copy")
    assert digest(tmp_path / "copy") == digest(dataset)


@pytest.mark.parametrize("change", ["names", "removed", "another size", "another split"])
def test_another_dataset_is_another(dataset, change):
    before = digest(dataset)
    if change == "names":
        (dataset / "data.yaml").write_text("train: train\nval: val\nnames: [eight, ten]\n")
    elif change == "removed":
        (dataset / "train" / "2.jpg").unlink()
    elif change == "another size":
        (dataset / "val" / "1.jpg").write_bytes(b"larger than it was")
    else:
        (dataset / "data.yaml").write_text("train: val\nval: train\nnames: [eight, nine]\n")
    assert digest(dataset) != before
