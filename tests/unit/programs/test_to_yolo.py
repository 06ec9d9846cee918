"""scripts/to_yolo.py: what people's VOC and COCO annotations look like, as a dataset that our reader takes."""

import json
from pathlib import Path

import numpy as np
import pytest
from fork_server import ForkServer
from PIL import Image

from utils.evaluation.data_yaml import load_data

PROGRAM = Path(__file__).resolve().parents[3] / "scripts/to_yolo.py"
VOC = """<annotation><folder>x</folder><filename>{}</filename><path>C:\\Users\\me\\{}</path>
<size><width>{}</width><height>{}</height><depth>3</depth></size>{}</annotation>"""
OBJECT = """<object><name>{}</name><difficult>{}</difficult><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax>
<ymax>{}</ymax></bndbox></object>"""
OBJECTS = [("dog", 0, 20, 10, 60, 90), ("cat", 0, -5, 0, 50, 120), ("cat", 1, 0, 0, 9, 9)]
XML = {  # file → the image that it names, width and height, objects
    "plain.xml": ("plain.jpg", 200, 100, OBJECTS),
    "cam_7.XML": ("of another name (1).png", 0, 0, [("cat", 0, 0, 0, 100, 50), ("cat", 0, 300, 0, 400, 50)]),
    "empty.xml": ("EMPTY.jpg", 200, 100, []),
    "lost.xml": ("lost.jpg", 200, 100, [("owl", 0, 0, 0, 9, 9)]),
}
JSON = {
    "categories": [{"id": key, "name": name} for key, name in ((18, "dog"), (17, "cat"), (19, "cat"), (3, "car"))],
    "images": [
        {"id": 5, "file_name": "train\\plain.jpg", "width": 200, "height": 100}, {"id": 6, "file_name": "empty.png"}
    ],
    "annotations": [
        {"image_id": 5, "category_id": 18, "bbox": [20, 10, 40, 80]},
        {"image_id": 5, "category_id": 17, "bbox": [0, 0, 9, 9], "iscrowd": 1},
        {"image_id": 6, "category_id": 3, "bbox": [0, 0, 100, 50], "iscrowd": 0},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def convert():
    """Runs the program in a process of its own."""
    with ForkServer(PROGRAM.parents[1], "import utils.core.options, utils.evaluation.images") as server:
        yield lambda *words: server.run([PROGRAM, *words], PROGRAM.parents[1], 60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images and a folder for annotations."""
    for name in ("images", "xml"):
        (tmp_path / name).mkdir()
    for name in ("plain.jpg", "of another name (1).JPG", "empty.png"):
        Image.new("RGB", (200, 100)).save(tmp_path / "images" / name)
    return tmp_path


def write_voc(folder: Path) -> None:
    for file, (name, width, height, objects) in XML.items():
        text = VOC.format(name, name, width, height, "".join(OBJECT.format(*one) for one in objects))
        (folder / "xml" / file).write_text(text)


def converted(convert, folder: Path, source: str, share: str) -> tuple[dict, dict[str, np.ndarray], str]:
    """Classes, the labels of each image, and what was said."""
    done = convert(folder / source, "--images", folder / "images", "--output", folder / "out", "--val", share)
    assert (done.returncode, done.stderr) == (0, "")
    labels = {path.stem: np.loadtxt(path.open(), ndmin=2) for path in (folder / "out/labels").rglob("*.txt")}
    return load_data(folder / "out/data.yaml").names, labels, done.stdout


@pytest.mark.filterwarnings("ignore:loadtxt")
def test_voc(convert, folder):
    write_voc(folder)
    names, labels, said = converted(convert, folder, "xml", "0.34")
    assert list(names.values()) == ["cat", "dog"]
    assert sorted(labels) == ["empty", "of another name (1)", "plain"]
    np.testing.assert_allclose(labels["plain"], [[1, 0.2, 0.5, 0.2, 0.8], [0, 0.125, 0.5, 0.25, 1]])
    np.testing.assert_allclose(labels["of another name (1)"], [[0, 0.25, 0.25, 0.5, 0.5]])  # of the image's own size
    assert labels["empty"].size == 0
    for words in ("images: 3 (validation: 1)", "annotations without an image left out: 1", "crowds left out: 1",
                  "boxes of no size left out: 1", "boxes clipped: 1", "objects: 3"):  # fmt: skip
        assert words in said
    images = {path.stem: path.parent.name for path in (folder / "out/images").rglob("*.*")}
    assert images == {path.stem: path.parent.name for path in (folder / "out/labels").rglob("*.txt")}
    assert sorted(images.values()) == ["train", "train", "val"]


def test_coco(convert, folder):
    (folder / "a.json").write_text(json.dumps(JSON))
    names, labels, said = converted(convert, folder, "a.json", "0")
    assert list(names.values()) == ["car", "cat", "dog"]
    np.testing.assert_allclose(labels["plain"], [[2, 0.2, 0.5, 0.2, 0.8]])
    np.testing.assert_allclose(labels["empty"], [[0, 0.25, 0.25, 0.5, 0.5]])
    assert "crowds left out: 1" in said
    assert "images without an annotation left out: 1" in said
    assert "outlines" not in said


def test_outlines_of_coco_are_counted_and_an_unknown_category_is_named(convert, folder):
    outlined = json.loads(json.dumps(JSON))
    outlined["annotations"][0]["segmentation"] = [[1, 1, 5, 1, 5, 5]]
    (folder / "outlined.json").write_text(json.dumps(outlined))
    assert "outlines left out (labels are boxes): 1" in converted(convert, folder, "outlined.json", "0")[2]
    outlined["annotations"][0].update(id=17, category_id=99)
    (folder / "unknown.json").write_text(json.dumps(outlined))
    done = convert(folder / "unknown.json", "--images", folder / "images", "--output", folder / "other")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "annotation 17 is of category 99, which 'categories' lacks" in done.stderr


@pytest.mark.parametrize(
    ("file", "content", "part"),
    [
        ("xml/a.xml", "<annotation><object>", "a.xml"),
        ("xml/b.xml", VOC.format("plain.jpg", "", 9, 9, ""), "plain.jpg twice"),
        ("xml/b.xml", VOC.format("nowhere.jpg", "", 9, 9, ""), "--images"),
        ("images/plain.png", "", "several images of one name"),
        ("a.json", "{}", "a.json"),
        ("images/of another name (1).JPG", "half", "remove it, or give its width and height"),
        ("xml/c.txt", "", "nowhere does not exist"),
        ("a.json", '{"categories": [{"id": 1}]}', "a.json"),
        ("a.json", json.dumps({**JSON, "annotations": [{"image_id": 5, "category_id": 4, "bbox": []}]}), "a.json"),
    ],
)
def test_what_is_wrong_is_one_line(file, content, part, convert, folder):
    if part != "--images":
        write_voc(folder)
    (folder / file).write_text(content)
    source = {"a.json": "a.json", "xml/c.txt": "nowhere"}.get(file, "xml")
    done = convert(folder / source, "--images", folder / "images", "--output", folder / "out")
    assert (done.returncode, done.stderr.count("\n"), (folder / "out").exists()) == (2, 1, False)
    assert part in done.stderr
    assert convert(folder / source, "--images", folder, "--output", folder / "xml").returncode == 2
