"""Files that are none, or not what their names say: one line, and nothing waits for a pipe or reads a device."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest
from known_images import write_set

from utils import cli
from utils.core.errors import DataError, InputError
from utils.core.input_files import LARGEST_YAML, check_file, check_files, read_json, read_yaml
from utils.evaluation.coco_annotations import read_annotations
from utils.evaluation.data_yaml import load_data

pytestmark = pytest.mark.timeout(60)
EXPECTED = "expected a file"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is not a regular file; expected a file"),
        (os.mkdir, "is a folder; expected a file"),
        (lambda path: os.symlink("/dev/zero", path), "is not a regular file; expected a file"),
        (lambda path: os.symlink("nowhere", path), "is a link to a file that does not exist; expected a file"),
        (lambda path: os.symlink(path, path), "cannot be read (Too many levels of symbolic links); expected a file"),
        (lambda path: None, "does not exist; expected a file"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("read", [check_file, read_yaml, read_json])
def test_what_is_no_regular_file_is_not_opened(tmp_path, make, message, read):
    path = tmp_path / "x"
    make(path)
    with pytest.raises(InputError) as caught:
        read(path, EXPECTED)
    assert str(caught.value) == f"{path} {message}"


def test_a_name_that_is_too_long_or_no_name(tmp_path):
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(InputError, match="expected a file"):
            check_file(tmp_path / name, EXPECTED)


def test_options_that_were_not_given_are_not_looked_at(tmp_path):
    (tmp_path / "w.pt").touch()
    check_files(weights=tmp_path / "w.pt", recipe=None, hyp="")
    with pytest.raises(InputError, match=r"--recipe .*none\.yaml does not exist; expected a recipe's YAML"):
        check_files(weights=tmp_path / "w.pt", recipe=tmp_path / "none.yaml")


HOSTILE_YAML = ["[" * 1000, "a: !!int ''", "a: !!bool maybe", "a: 2001-13-45", "a: !!timestamp x", "a: &b [*c]",
                "{[1]: 2}", "!!python/object/apply:os.system [true]", "a: \x00", "? ? ?"]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE_YAML)
def test_yaml_that_breaks_its_parser_is_one_line(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    for read in (partial(read_yaml, expected=EXPECTED, error=DataError), load_data):
        with pytest.raises(DataError) as caught:
            read(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3", "{x: {a: 1, a: 1}}", "? [1]\n: 2\n? [1]\n: 2"])
def test_a_key_that_stands_twice_is_refused(tmp_path, text):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(InputError, match=r"x\.yaml is not valid YAML: line \d: the key .* stands twice"):
        read_yaml(tmp_path / "x.yaml", EXPECTED)


def test_yaml_is_read_as_ever(tmp_path):
    text = (
        f"a: &a [1:30, 0x1f, 1e-3, 1.5e+3]\nb: *a\nc: '{'1:' * 99}'\ndownload: |\n  import x\n  a << b: 1\n"
        "d: &d {k: 1, l: 2}\ne: {<<: *d, k: 3}\n"
    )
    (tmp_path / "x.yaml").write_text(text)
    numbers = [90, 31, "1e-3", 1500.0]
    expected = {"a": numbers, "b": numbers, "c": "1:" * 99, "download": "import x\na << b: 1\n"}
    expected |= {"d": {"k": 1, "l": 2}, "e": {"k": 3, "l": 2}}
    assert read_yaml(tmp_path / "x.yaml", EXPECTED) == expected


def test_a_yaml_that_is_too_large_is_not_parsed(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"#" * (LARGEST_YAML + 1))
    with pytest.raises(DataError, match=r"has 2\.0 MiB, which is more than such a file can have"):
        load_data(tmp_path / "x.yaml")


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
WRONG_TYPES = {
    "path: 3\ntrain: images/val\nnames: [a]": "'path:' is 3; expected the folder",
    "path: [a]\ntrain: images/val\nnames: [a]": r"'path:' is \['a'\]",
    'path: "a\\0b"\ntrain: images/val\nnames: [a]': "'path:' is 'a",
    'val: "a\\0b"\nnames: [a]': "'val:' is 'a",
    "names: {a: b}\ntrain: images/val": "the keys of 'names:' must be 0 to 0",
    "names: [a, [b, c]]\ntrain: images/val": r"class 1 is named \['b', 'c'\]; expected a text",
    "names: [a, null]\ntrain: images/val": "class 1 is named None; expected a text",
    "names: [a]\nnc: two\ntrain: images/val": "says nc: 'two' and gives 1 names",
    "names: [a]\nnc: true\ntrain: images/val": "says nc: True and gives 1 names",
    "names: [a]\ntrain: [[images/val]]": r"'train:' is \[\['images/val'\]\]",
    "names: [a]\ntrain: 5": "'train:' is 5",
    f"{BOMB}names: [a]\ntrain: *i": "'train:' is ",
    f"{BOMB}names: *i\ntrain: images/val": "class 0 is named ",
    f"names: [a]\nval: {'x' * 5000}": "val images",
    f"path: {'x' * 5000}\nnames: [a]\nval: images/val": None,
}


@pytest.mark.parametrize("text", WRONG_TYPES, ids=lambda text: " ".join(text[-40:].split()))
def test_a_data_yaml_of_wrong_types(tmp_path, monkeypatch, text):
    write_set(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(DataError, match=WRONG_TYPES[text]) as caught:
        load_data(tmp_path / "x.yaml")
    assert "\n" not in str(caught.value)


def test_names_may_be_numbers(tmp_path):
    write_set(tmp_path, 1)
    (tmp_path / "x.yaml").write_text(f"path: {tmp_path}\nnames: [0, 1.5]\nval: images/val")
    assert load_data(tmp_path / "x.yaml").names == {0: "0", 1: "1.5"}


IMAGE, CATEGORY = {"id": 1, "file_name": "a.png"}, {"id": 1, "name": "cat"}
ANNOTATION = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 5, 5]}
WRONG_ANNOTATIONS = [
    ([], r"it holds \[\]; expected an object"),
    ({"images": {}, "categories": [], "annotations": []}, "its 'images' is {}; expected a list"),
    ({"images": [1]}, "entry 0 of 'images' is 1; expected an object"),
    ({"images": [{"id": 1}]}, "entry 0 of 'images' has the file_name None; expected a text"),
    ({"images": [{"id": [1], "file_name": "a"}]}, r"entry 0 of 'images' has the id \[1\]; expected a number"),
    ({"categories": [{"id": 1, "name": []}]}, r"entry 0 of 'categories' has the name \[\]; expected a text"),
    ({"categories": [{"name": "cat"}]}, "entry 0 of 'categories' has the id None"),
    ({"annotations": None}, "its 'annotations' is None; expected a list"),
    ({"annotations": [{**ANNOTATION, "bbox": [1, 2, 3]}]}, r"has the bbox \[1, 2, 3\]"),
    ({"annotations": [{**ANNOTATION, "bbox": [1, 2, 3, float("nan")]}]}, r"has the bbox \[1, 2, 3, nan\]"),
    ({"annotations": [{**ANNOTATION, "bbox": [1, 2, 3, "4"]}]}, "has the bbox"),
    ({"annotations": [ANNOTATION, {**ANNOTATION, "image_id": {}}]}, "entry 1 of 'annotations' has the image_id {}"),
    ({"annotations": [{**ANNOTATION, "category_id": None}]}, "has the category_id None"),
    ({"annotations": [{**ANNOTATION, "area": "big"}]}, "has the area 'big'"),
    ({"annotations": [{**ANNOTATION, "iscrowd": "no"}]}, "has the iscrowd 'no'"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_ANNOTATIONS)
def test_annotations_of_wrong_structure(tmp_path, change, message):
    whole = {"images": [IMAGE], "categories": [CATEGORY], "annotations": [ANNOTATION]}
    file = tmp_path / "x.json"
    file.write_text(json.dumps({**whole, **change} if isinstance(change, dict) else change))
    with pytest.raises(DataError, match=message) as caught:
        read_annotations(file)
    assert "\n" not in str(caught.value)
    file.write_text(json.dumps(whole))
    assert read_annotations(file)["annotations"][0]["area"] == 25


def test_annotations_nested_without_end_and_a_folder_in_their_place(tmp_path):
    (tmp_path / "x.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"nested too deeply|no COCO annotation"):
        read_annotations(tmp_path / "x.json")
    write_set(tmp_path, 1)
    annotations = tmp_path / "annotations/instances_val.json"
    annotations.unlink()
    annotations.mkdir()
    data = load_data(tmp_path / "data.yaml")
    with pytest.raises(DataError, match="is a folder; expected COCO's annotations"):
        read_annotations(data.annotations)


@pytest.mark.parametrize("kind", [PermissionError, IsADirectoryError, FileNotFoundError])
def test_a_path_that_cannot_be_opened_is_bad_input(capsys, kind):
    import argparse

    def handler(_args):
        raise kind(13, "cannot be had", "some/file")

    assert cli.run_program(argparse.ArgumentParser("p"), handler, []) == 2
    assert capsys.readouterr().err == "error: some/file: cannot be had\n"
