"""Reading data.yaml: names, splits, where the set lies, COCO's form."""

from __future__ import annotations

import pytest
import yaml
from known_images import write_set

from utils.core.errors import DataError
from utils.evaluation.dataset import load_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("set")
    write_set(path, 20)
    return path


def write_yaml(file, **content):
    file.write_text(yaml.safe_dump(content))
    return file


def test_data_yaml(folder):
    data = load_data(folder / "data.yaml")
    assert data.names == {0: "cat", 1: "dog", 2: "owl"}
    assert data.nc == 3
    assert data.splits["val"] == (str(folder / "images/val"),)
    assert data.annotations == folder / "annotations/instances_val.json"
    assert data.annotations_of("test") is None
    assert not data.is_coco
    with pytest.raises(DataError, match=r"has no 'test:' entry; it has train, val"):
        data.paths("test")


def test_a_split_that_lies_nowhere_is_not_said_to_be_left_out_of_the_yaml(folder, tmp_path):
    content = yaml.safe_load((folder / "data.yaml").read_text()) | {"path": str(folder)}
    data = load_data(write_yaml(tmp_path / "data.yaml", **content | {"train": ["images/val", "images/train2017"]}))
    message = f"train images 'images/train2017' not found in {folder}; correct 'path:' or 'train:'"
    with pytest.raises(DataError, match=message):
        data.paths("train")
    with pytest.raises(DataError, match=r"has no 'test:' entry; it has val"):
        data.paths("test")


@pytest.mark.parametrize("root", [None, ".", "..", "elsewhere"])
def test_root_is_found_beside_the_yaml_or_in_the_working_folder(tmp_path, monkeypatch, root):
    """Upstream counts a relative `path:` from the checkout, which here is tried first, then these two."""
    base = {"..": tmp_path, "elsewhere": tmp_path / "work" / "elsewhere"}.get(root, tmp_path / "yamls")
    for each in (tmp_path / "yamls", base / "images" / "a", tmp_path / "work"):
        each.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path / "work")
    content = {"path": root} if root else {}
    file = write_yaml(tmp_path / "yamls" / "d.yaml", train="../images/a", val=["images/a"], names=["x"], **content)
    assert load_data(file).splits == {split: (str(base / "images/a"),) for split in ("train", "val")}


def test_coco_form(tmp_path):
    (tmp_path / "val2017.txt").write_text("./images/val2017/000000000139.jpg\n")
    names = {index: f"n{index}" for index in range(80)}
    data = load_data(write_yaml(tmp_path / "coco.yaml", path=str(tmp_path), train="train2017.txt", val="val2017.txt",
                                test="test-dev2017.txt", names=names))  # fmt: skip
    assert data.is_coco
    assert set(data.splits) == {"val"}  # the lists that were not downloaded are not offered
    assert data.annotations is None
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/instances_val2017.json").write_text("{}")
    assert data.annotations == tmp_path / "annotations/instances_val2017.json"


BAD_YAML = {
    "missing": (None, "does not exist; --data takes a dataset's YAML"),
    "not YAML": ("names: [a", "is not valid YAML"),
    "a list": ("- a\n- b\n", "is no dataset's YAML"),
    "no names": ("val: .\n", "has no class names"),
    "gap in names": ("val: .\nnames: {0: a, 2: b}\n", "must be 0 to 1, found \\[0, 2\\]"),
    "nc": ("val: .\nnc: 3\nnames: [a, b]\n", "says nc: 3 and gives 2 names"),
    "no split": ("test: .\nnames: [a]\n", "neither 'train:' nor 'val:'"),
    "no folder": ("val: nowhere\nnames: [a]\n", "val images 'nowhere' not found in"),
    "number": ("val: 3\nnames: [a]\n", "'val:' is 3; expected a folder"),
}


@pytest.mark.parametrize("name", BAD_YAML)
def test_a_bad_yaml_says_what_is_wrong(tmp_path, name):
    content, message = BAD_YAML[name]
    if content:
        (tmp_path / "data.yaml").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        load_data(tmp_path / "data.yaml")
    assert "\n" not in str(caught.value)
