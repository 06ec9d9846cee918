"""Reading data.yaml: names, splits, where the set lies."""

import pytest
import yaml
from known_images import write_set

from utils.core.errors import DataError
from utils.evaluation.data_yaml import load_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("set")
    write_set(path, 2)
    return path


def write_yaml(file, **content):
    file.write_text(yaml.safe_dump(content))
    return file


def test_data_yaml(folder, tmp_path):
    data = load_data(folder / "data.yaml")
    assert (data.names, data.nc, data.is_coco) == ({0: "cat", 1: "dog", 2: "owl"}, 3, False)
    assert data.splits["val"] == (str(folder / "images/val"),)
    assert data.annotations_of("val") == folder / "annotations/instances_val.json"
    assert data.annotations_of("test") is None
    content = yaml.safe_load((folder / "data.yaml").read_text()) | {"path": str(folder)}
    data = load_data(write_yaml(tmp_path / "data.yaml", **content | {"train": ["images/val", "images/train2017"]}))
    with pytest.raises(DataError, match=f"train images 'images/train2017' not found in {folder}; correct 'path:' or"):
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


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("names: [0, 1.5, yes]\nnc: 3", ["0", "1.5", "True"]),
        ("names: {1: b, 0: a}\nnc: 2.0", ["a", "b"]),
        ("names: [a]\npath:\ntrain:\ntest: ''", ["a"]),  # empty entries are none
        ("names: [a]\nnc: 1\nroboflow: {version: 1}\ndownload: |\n  import os\nminival: x", ["a"]),
    ],
)
def test_the_forms_that_users_have(folder, tmp_path, text, names):
    file = tmp_path / "data.yaml"
    file.write_text(f"{text}\nval: {folder}/images/val\n")
    data = load_data(file)
    assert list(data.names.items()) == list(enumerate(names))
    assert list(data.splits) == ["val"]


BAD_YAML = {  # content → what the message names beside the file
    None: "",
    "names: [a": "",
    "val: .": "names",
    "val: .\nnames: []": "names",
    "val: .\nnames: {a: b}": "names",
    "val: .\nnames: [a, null]": "names",
    "val: .\nnc: 3\nnames: [a, b]": "nc",
    "val: .\nnc: true\nnames: [a]": "nc",
    "test: .\nnames: [a]": "val",
    "val: nowhere\nnames: [a]": "val",
    "val: 3\nnames: [a]": "val",
    "val: .\npath: 3\nnames: [a]": "path",
}


@pytest.mark.parametrize("content", BAD_YAML, ids=lambda content: str(content)[-40:].replace("\n", " "))
def test_a_bad_yaml_says_what_is_wrong(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "data.yaml"
    if content:
        file.write_text(content)
    with pytest.raises(DataError) as caught:
        load_data(file)
    assert str(caught.value).startswith(str(file))
    assert BAD_YAML[content] in str(caught.value).removeprefix(str(file))
