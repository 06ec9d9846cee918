"""scripts/to_yolo.py: what people's VOC and COCO annotations look like, as a dataset that our reader takes."""

import copy
import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from utils.evaluation.data_yaml import load_data
from utils.evaluation.labels import read_labels

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
        {"id": 5, "file_name": "train\\plain.jpg", "width": 200, "height": 100}, {"id": 6, "file_name": "empty.png"},
        {"id": 7, "file_name": "of another name (1).JPG", "width": 200, "height": 100},
    ],
    "annotations": [
        {"id": 1, "image_id": 5, "category_id": 18, "bbox": [20, 10, 40, 80]},
        {"id": 2, "image_id": 5, "category_id": 17, "bbox": [0, 0, 9, 9], "iscrowd": 1},
        {"id": 3, "image_id": 6, "category_id": 3, "bbox": [0, 0, 100, 50], "iscrowd": 0},
    ],
}  # fmt: skip
DOG, CAR = [2, 0.2, 0.5, 0.2, 0.8], [0, 0.25, 0.25, 0.5, 0.5]  # the labels of the first and the third annotation


@pytest.fixture
def convert(start):
    """Runs the program in this process: exit code, lines on standard output and standard error."""
    return lambda *words: start("scripts/to_yolo.py", *words)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images and a folder for annotations."""
    for name in ("images", "xml"):
        (tmp_path / name).mkdir()
    for name in ("plain.jpg", "of another name (1).JPG", "empty.png"):
        Image.new("RGB", (200, 100)).save(tmp_path / "images" / name)
    return tmp_path


def write_voc(folder: Path, files=XML) -> None:
    for file, (name, width, height, objects) in files.items():
        text = VOC.format(name, name, width, height, "".join(OBJECT.format(*one) for one in objects))
        (folder / "xml" / file).write_text(text)


def changed(**parts) -> dict:
    """The COCO file, with changes to the first annotation, or with other lists."""
    content = copy.deepcopy(JSON)
    for part, value in parts.items():
        if part in content:
            content[part] = value
        else:
            content["annotations"][0][part] = value
    return content


def result_of(convert, folder: Path, source, *words) -> tuple[dict, dict[str, np.ndarray], list[str]]:
    """Classes, the labels of each image, and the lines that were printed."""
    if isinstance(source, dict):
        (folder / "a.json").write_text(json.dumps(source))
        source = "a.json"
    code, out, err = convert(
        folder / source, "--images", folder / "images", "--output", folder / "out", "--val", "0", *words
    )
    assert (code, err) == (0, [])
    labels = {path.stem: np.array(list(map(str.split, path.open())), float) for path in folder.glob("out/labels/*/*")}
    assert {path.stem for path in folder.glob("out/images/*/*")} == set(labels)
    return load_data(folder / "out/data.yaml").names, labels, out


def refused(convert, folder: Path, source, *words) -> str:
    """The line of an error with exit code 2; nothing is left behind."""
    if isinstance(source, dict):
        (folder / "a.json").write_text(json.dumps(source))
        source = "a.json"
    before = sorted(folder.iterdir())
    code, _, err = convert(folder / source, "--images", folder / "images", "--output", folder / "out", *words)
    assert (code, len(err)) == (2, 1)
    assert sorted(folder.iterdir()) == before
    return err[0]


def test_voc(convert, folder):
    write_voc(folder)
    assert "1 of 4" in refused(convert, folder, "xml")
    names, labels, lines = result_of(convert, folder, "xml", "--force", "--val", "0.34")
    assert list(names.values()) == ["cat", "dog"]
    assert sorted(labels) == ["empty", "of another name (1)", "plain"]
    np.testing.assert_allclose(labels["plain"], [[1, 0.2, 0.5, 0.2, 0.8], [0, 0.125, 0.5, 0.25, 1]])
    np.testing.assert_allclose(labels["of another name (1)"], [[0, 0.25, 0.25, 0.5, 0.5]])  # of the image's own size
    assert labels["empty"].size == 0
    assert lines[-2] == "images: 3 (validation: 1), objects: 3, classes: 2"
    for reason in ("annotations without an image: 1", "difficult objects: 1", "boxes without an area in the image: 1"):
        assert reason in lines[-1]
    assert "boxes clipped: 1" in lines[-3]
    images = {path.stem: path.parent.name for path in (folder / "out/images").rglob("*.*")}
    assert images == {path.stem: path.parent.name for path in (folder / "out/labels").rglob("*.txt")}
    assert sorted(images.values()) == ["train", "train", "val"]


def test_coco(convert, folder):
    names, labels, lines = result_of(convert, folder, JSON)
    assert list(names.values()) == ["car", "cat", "dog"]
    np.testing.assert_allclose(labels["plain"], [DOG])
    np.testing.assert_allclose(labels["empty"], [CAR])
    assert lines[-2:] == [
        "images: 3 (validation: 0), objects: 2, classes: 3", "left out: crowds: 1 (first: annotation 2)"
    ]  # fmt: skip


# what finds no partner


def test_ids_that_differ_in_their_type_alone_are_one(convert, folder):
    content = changed(image_id="5", category_id="018")
    content["categories"][0]["id"] = 18.0
    content["images"][1]["id"] = "6"
    _, labels, lines = result_of(convert, folder, content)
    np.testing.assert_allclose(labels["plain"], [DOG])
    np.testing.assert_allclose(labels["empty"], [CAR])
    assert "objects: 2" in lines[-2]


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"image_id": 99}, "annotation 1 of image 99"),
        ({"image_id": "plain"}, "annotation 1 of image 'plain'"),
        ({"category_id": 99}, "annotation 1 of category 99"),
        ({"images": [*JSON["images"], {"id": 8, "file_name": "gone.jpg"}]}, "gone"),
        ({"images": JSON["images"][:2]}, "of another name (1).JPG"),
    ],
)
def test_what_finds_no_partner_is_refused_above_5_percent_and_counted_below(convert, folder, change, first):
    content = changed(**change)
    error = refused(convert, folder, content)
    assert first in error
    assert "--force" in error
    lines = result_of(convert, folder, content, "--force")[2]
    assert first in lines[-1]
    shutil.rmtree(folder / "out")
    many = [{"id": 100 + n, "file_name": f"{n}.png"} for n in range(20)]
    for image in many:
        shutil.copy(folder / "images/empty.png", folder / "images" / image["file_name"])
    content["images"] = content["images"] + many
    more = [{**JSON["annotations"][2], "id": n, "image_id": 100 + n} for n in range(20)]
    content["annotations"] = content["annotations"] + more
    lines = result_of(convert, folder, content)[2]
    assert first in lines[-1]
    used = 1 if {"image_id", "category_id"} & change.keys() else 2
    assert f"objects: {20 + used}," in lines[-2]


def test_ids_that_are_there_twice_are_refused(convert, folder):
    images = [*JSON["images"][:2], {**JSON["images"][2], "id": "5"}]
    assert "5" in refused(convert, folder, changed(images=images))
    assert "17" in refused(convert, folder, changed(categories=[*JSON["categories"], {"id": 17, "name": "owl"}]))


def test_a_name_that_macos_wrote_meets_the_same_name(convert, folder):
    (folder / "images/plain.jpg").rename(folder / "images/cafe\u0301.jpg")
    images = [{**JSON["images"][0], "file_name": "caf\u00e9.jpg"}, *JSON["images"][1:]]
    labels = result_of(convert, folder, changed(images=images))[1]
    np.testing.assert_allclose(labels["cafe\u0301"], [DOG])


def test_annotations_of_no_object_say_so(convert, folder):
    lines = result_of(convert, folder, changed(annotations=[]))[2]
    assert lines[-2:] == ["images: 3 (validation: 0), objects: 0, classes: 3", "left out: nothing"]
    write_voc(folder, {"plain.xml": ("plain.jpg", 200, 100, [])})
    assert "no class" in refused(convert, folder, "xml", "--force", "--output", folder / "other")


# sizes that are said twice


@pytest.mark.parametrize(
    ("stated", "scale", "reason"),
    [
        ((200, 100), 1, None),
        ((0, 0), 1, None),
        ((None, "?"), 1, None),
        ((400, 200), 2, "another resolution"),
        ((61, 31), 0.305, "another resolution"),  # 61 x 30.5, rounded
        ((201, 100), 1.0025, "another resolution"),
    ],
)
def test_a_size_of_the_same_shape_is_that_of_a_copy(convert, folder, stated, scale, reason):
    images = [{**JSON["images"][0], "width": stated[0], "height": stated[1]}, *JSON["images"][1:]]
    box = [value * scale for value in JSON["annotations"][0]["bbox"]]
    _, labels, lines = result_of(convert, folder, changed(images=images, bbox=box))
    np.testing.assert_allclose(labels["plain"], [DOG], atol=0.02)
    assert (reason or "") in lines[-3]
    assert (reason is None) == ("changed" not in "".join(lines))


@pytest.mark.parametrize("stated", [(100, 100), (1000, 400), (205, 100), (200, 110), (1, 1), (12, 5)])
def test_a_size_of_another_shape_is_refused(convert, folder, stated):
    images = [{**JSON["images"][0], "width": stated[0], "height": stated[1]}, *JSON["images"][1:]]
    error = refused(convert, folder, changed(images=images))
    assert "plain.jpg" in error
    assert f"{stated[0]}x{stated[1]}" in error
    write_voc(folder, {"plain.xml": ("plain.jpg", *stated, OBJECTS)})
    assert "plain.xml" in refused(convert, folder, "xml", "--force")


def test_a_turned_photograph_whose_size_is_exchanged(convert, folder):
    """As Label Studio's export: the box is that of the upright image, as OpenCV shows it, the size is not."""
    shown = np.zeros((300, 200, 3), np.uint8)
    shown[220:280, 20:80] = 255
    photograph = Image.fromarray(shown).transpose(Image.Transpose.ROTATE_90)  # pixels lie turned in the file
    exif = photograph.getexif()
    exif[0x0112] = 6
    photograph.save(folder / "images/plain.jpg", exif=exif, quality=95)
    images = [{**JSON["images"][0], "width": 300, "height": 200}, *JSON["images"][1:]]
    _, labels, lines = result_of(convert, folder, changed(images=images, bbox=[20, 220, 60, 60]))
    copied = cv2.imread(str(folder / "out/images/train/plain.jpg"))
    rows, columns = np.nonzero(copied[..., 0] > 127)
    low = np.array([columns.min() / 200, rows.min() / 300])
    high = np.array([(columns.max() + 1) / 200, (rows.max() + 1) / 300])
    np.testing.assert_allclose(labels["plain"], [[2, *(low + high) / 2, *high - low]], atol=0.01)
    assert any("plain.jpg" in line and "exchanged" in line for line in lines)
    assert "objects: 2" in lines[-2]
    shutil.rmtree(folder / "out")
    assert "annotation 1" in refused(convert, folder, changed(images=images, bbox=[220, 20, 60, 60]))  # not upright


# boxes


def test_corners_in_any_order(convert, folder):
    _, labels, lines = result_of(convert, folder, changed(bbox=[60, 90, -40, -80]))
    np.testing.assert_allclose(labels["plain"], [DOG])
    assert "corners put in order: 1 (first: annotation 1)" in lines[-3]
    shutil.rmtree(folder / "out")
    write_voc(folder, {"plain.xml": ("plain.jpg", 200, 100, [("dog", 0, 60, 10, 20, 90), ("dog", 0, 20, 90, 60, 10)])})
    _, labels, lines = result_of(convert, folder, "xml", "--force")
    np.testing.assert_allclose(labels["plain"], [[0, *DOG[1:]]] * 2)
    assert "corners put in order: 2" in lines[-3]


def test_fractions_are_recognised(convert, folder):
    fractions = changed()
    for annotation in fractions["annotations"]:
        annotation["bbox"] = [value / side for value, side in zip(annotation["bbox"], (200, 100) * 2, strict=True)]
    _, labels, lines = result_of(convert, folder, fractions)
    np.testing.assert_allclose(labels["plain"], [DOG])
    np.testing.assert_allclose(labels["empty"], [CAR])
    assert "fractions" in lines[-3]
    shutil.rmtree(folder / "out")
    objects = [("dog", 0, 0.1, 0.1, 0.3, 0.9), ("dog", 0, 0, 0, 1, 1)]
    write_voc(folder, {"plain.xml": ("plain.jpg", 200, 100, objects)})
    _, labels, lines = result_of(convert, folder, "xml", "--force")
    np.testing.assert_allclose(labels["plain"], [[0, *DOG[1:]], [0, 0.5, 0.5, 1, 1]])
    assert "fractions" in lines[-3]


def test_fractions_among_pixels_are_never_taken_for_pixels(convert, folder):
    mixed = changed(bbox=[0.1, 0.1, 0.2, 0.8])
    assert "annotation 1" in refused(convert, folder, mixed)
    mixed["annotations"] += [{**JSON["annotations"][2], "id": number} for number in range(10, 40)]
    _, labels, lines = result_of(convert, folder, mixed)
    assert labels["plain"].size == 0
    assert "boxes in 0..1 among boxes in pixels: 1 (first: annotation 1)" in lines[-1]


BROKEN = {
    "no box": {"bbox": None},
    "an empty box": {"bbox": []},
    "three numbers": {"bbox": [1, 2, 3]},
    "a text": {"bbox": [1, 2, "wide", 4]},
    "not a number": {"bbox": [1, 2, float("nan"), 4]},
    "infinite": {"bbox": [1, 2, float("inf"), 4]},
    "a mapping": {"bbox": {"x": 1}},
    "no image": {"image_id": None},
    "no category": {"category_id": None},
    "an id that is a list": {"category_id": [1]},
    "a crowd that is a word": {"iscrowd": "no"},
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_one_broken_annotation_is_named_and_left_out(convert, folder, change):
    for content in (changed(**change), changed(**change)):
        for key in change if content["annotations"][0].get(next(iter(change))) is None else ():
            del content["annotations"][0][key]  # a missing key is as null
        _, labels, lines = result_of(convert, folder, content)
        assert labels["plain"].size == 0
        np.testing.assert_allclose(labels["empty"], [CAR])
        assert any(line.startswith("warning") and "annotation 1" in line for line in lines)
        assert "broken annotations: 1 (first: annotation 1" in lines[-1]
        shutil.rmtree(folder / "out")


def test_an_annotation_that_is_not_a_mapping_and_an_image_without_a_name(convert, folder):
    content = changed()
    content["annotations"] += [None, 7]
    content["images"].append({"id": 9})
    lines = result_of(convert, folder, content)[2]
    assert "broken annotations: 3" in lines[-1]


@pytest.mark.parametrize(
    ("old", "new"),
    [("<xmin>20</xmin>", ""), ("<xmin>20", "<xmin>a"), ("<name>dog", "<name> "), ("<ymax>90", "<ymax>nan")],
)
def test_one_broken_object_of_voc_is_named_and_left_out(convert, folder, old, new):
    write_voc(folder, {"plain.xml": XML["plain.xml"]})
    file = folder / "xml/plain.xml"
    file.write_text(file.read_text().replace(old, new, 1))
    _, labels, lines = result_of(convert, folder, "xml", "--force")
    assert len(labels["plain"]) == 1
    assert f"broken annotations: 1 (first: {file}, object 1" in lines[-1]


@pytest.mark.parametrize("content", [b"", b"<annotation><object>", b"\x89PNG", "<annotation>\u72d7".encode("gbk")])
def test_a_broken_file_of_voc_is_named_and_its_image_left_out(convert, folder, content):
    write_voc(folder, {name: file for name, file in XML.items() if name != "lost.xml"})
    (folder / "xml/empty.xml").write_bytes(content)
    _, labels, lines = result_of(convert, folder, "xml")
    assert sorted(labels) == ["of another name (1)", "plain"]
    assert f"broken annotation files: 1 (first: {folder}/xml/empty.xml" in lines[-1]


def test_a_damaged_image_is_named_and_left_out(convert, folder):
    write_voc(folder, {name: file for name, file in XML.items() if name != "lost.xml"})
    (folder / "images/empty.png").write_text("half")
    assert "empty.png" in refused(convert, folder, "xml")
    _, labels, lines = result_of(convert, folder, "xml", "--force")
    assert "empty" not in labels
    assert "images that cannot be used: 1" in lines[-1]


# encodings, hidden files


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_a_coco_file_in_other_encodings(convert, folder, encoding):
    (folder / "a.json").write_bytes(json.dumps(JSON).encode(encoding))
    np.testing.assert_allclose(result_of(convert, folder, "a.json")[1]["plain"], [DOG])


def test_a_coco_file_that_is_not_unicode_is_one_line(convert, folder):
    names = [{**category, "name": "\u72d7"} for category in JSON["categories"]]
    text = json.dumps(changed(categories=names), ensure_ascii=False)
    (folder / "a.json").write_bytes(text.encode("gbk"))
    assert "UTF-8" in refused(convert, folder, "a.json")


@pytest.mark.parametrize(
    ("encoding", "declared", "name"),
    [
        ("gb2312", "GB2312", "\u72d7"), ("gb18030", "gbk", "\u9f98"), ("big5", "Big5", "\u72d7"),
        ("cp1251", "windows-1251", "\u0441\u043e\u0431\u0430\u043a\u0430"), ("latin-1", "ISO-8859-1", "ch\u00e4t"),
        ("shift_jis", "Shift_JIS", "\u72ac"), ("utf-8", "GB2312", "\u72d7"), ("utf-8-sig", "utf-8", "\u72d7"),
        ("utf-8", "", "\u72d7"), ("utf-16", "utf-16", "\u72d7"), ("utf-8-sig", "GB2312", "\u72d7"),
    ],
)  # fmt: skip
def test_the_encoding_that_a_file_of_voc_declares(convert, folder, encoding, declared, name):
    text = VOC.format("plain.jpg", "plain.jpg", 200, 100, OBJECT.format(name, 0, 20, 10, 60, 90))
    start = f'<?xml version="1.0" encoding="{declared}"?>\n' if declared else ""
    (folder / "xml/plain.xml").write_bytes((start + text).encode(encoding))
    names, labels, _ = result_of(convert, folder, "xml", "--force")
    assert names == {0: name}
    np.testing.assert_allclose(labels["plain"], [[0, *DOG[1:]]])


def test_hidden_files_are_skipped(convert, folder):
    write_voc(folder, {name: file for name, file in XML.items() if name != "lost.xml"})
    for name in ("xml/._plain.xml", "xml/__MACOSX/._plain.xml", "xml/.idea/plain.xml", "images/._plain.jpg"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\0\5\x16\7")
    lines = result_of(convert, folder, "xml")[2]
    assert lines[-2].startswith("images: 3 (")
    assert "broken" not in lines[-1]


# categories


def test_unused_supercategories_are_left_out(convert, folder):
    """As Roboflow exports: category 0 has the project's name. A class that nothing shows stays."""
    categories = [{**category, "supercategory": "pets"} for category in JSON["categories"]]
    roboflow = [{"id": 0, "name": "pets", "supercategory": "none"}, *categories]
    names, labels, lines = result_of(convert, folder, changed(categories=roboflow))
    assert list(names.values()) == ["car", "cat", "dog"]
    np.testing.assert_allclose(labels["plain"], [DOG])
    assert "unused supercategories: 1 (first: 'pets')" in lines[-1]
    shutil.rmtree(folder / "out")
    names, labels, lines = result_of(convert, folder, changed(categories=roboflow, category_id=0))
    assert list(names.values()) == ["pets", "car", "cat", "dog"]
    np.testing.assert_allclose(labels["plain"], [[0, *DOG[1:]]])
    shutil.rmtree(folder / "out")
    own = [{"id": 1, "name": "person", "supercategory": "person"}, *JSON["categories"]]
    assert list(result_of(convert, folder, changed(categories=own))[0].values()) == ["person", "car", "cat", "dog"]


# outlines


def drawn(ring: np.ndarray, width: int, height: int, scale: int = 4) -> np.ndarray:
    """A polygon, in fractions, as a mask `[height * scale, width * scale]`."""
    points = np.round(ring.reshape(-1, 2) * (width * scale, height * scale) - 0.5).astype(np.int32)
    return cv2.fillPoly(np.zeros((height * scale, width * scale), np.uint8), [points], 1)


def overlap(first: np.ndarray, second: np.ndarray) -> float:
    return (first & second).sum() / (first | second).sum()


L_SHAPE = [20, 10, 60, 10, 60, 30, 40, 30, 40, 90, 20, 90]


def test_polygons_are_written_and_boxes_alone_on_demand(convert, folder):
    outlined = changed(segmentation=[L_SHAPE])
    _, labels, lines = result_of(convert, folder, outlined)
    np.testing.assert_allclose(labels["plain"], [[2, *(np.array(L_SHAPE) / ([200, 100] * 6))]])
    np.testing.assert_allclose(labels["empty"], [[0, 0, 0, 0.5, 0, 0.5, 0.5, 0, 0.5]])  # a rectangle for a box
    assert "without an outline, written as rectangles: 1" in lines[-3]
    read = read_labels(next(folder.glob("out/labels/*/plain.txt")), 3)
    np.testing.assert_allclose(read.rows, [DOG], atol=1e-6)
    shutil.rmtree(folder / "out")
    np.testing.assert_allclose(result_of(convert, folder, outlined, "--boxes")[1]["plain"], [DOG])


def voc_with(folder: Path, polygon: str) -> None:
    """Write an XML file whose only object, the dog, has a polygon."""
    write_voc(folder, {"plain.xml": ("plain.jpg", 200, 100, OBJECTS[:1])})
    file = folder / "xml/plain.xml"
    file.write_text(file.read_text().replace("</bndbox></object>", f"</bndbox>{polygon}</object>", 1))


def voc_polygon(values, first: int = 1) -> str:
    """VOC's element of x1 y1 x2 y2 ..., the last point first."""
    numbers = [f"{axis}{first + point}" for point in range(len(values) // 2) for axis in "xy"]
    pairs = [f"<{name}>{value}</{name}>" for name, value in zip(numbers, values, strict=True)]
    return f"<polygon>{''.join(reversed(pairs))}</polygon>"


@pytest.mark.parametrize("first", [0, 1])
def test_a_polygon_of_voc_is_written_and_its_box_on_demand(convert, folder, first):
    voc_with(folder, voc_polygon(L_SHAPE, first))
    labels = result_of(convert, folder, "xml", "--force")[1]
    np.testing.assert_allclose(labels["plain"], [[0, *(np.array(L_SHAPE) / ([200, 100] * 6))]])
    shutil.rmtree(folder / "out")
    labels = result_of(convert, folder, "xml", "--force", "--boxes")[1]
    np.testing.assert_allclose(labels["plain"], [[0, *DOG[1:]]])


def test_several_polygons_of_voc_are_parts_of_one_object(convert, folder):
    parts = [[20, 10, 35, 10, 35, 40, 20, 40], [45, 60, 60, 60, 60, 90, 45, 90]]
    voc_with(folder, "".join(map(voc_polygon, parts)))
    labels = result_of(convert, folder, "xml", "--force")[1]["plain"]
    assert cv2.contourArea((labels[0, 1:].reshape(-1, 2) * (200, 100)).astype(np.float32)) == pytest.approx(900, abs=1)


@pytest.mark.parametrize(
    "polygon",
    [voc_polygon([20, 10, 60, 90]), voc_polygon(["a", 10, 60, 10, 60, 90]), voc_polygon(["nan", 10, 60, 10, 60, 90]),
     voc_polygon([20, 10, 60, 10, 60, 90]).replace("<y1>10</y1>", ""), "<polygon><pt>1</pt></polygon>",
     "<polygon><x1>1</x1><x1>2</x1></polygon>", "<polygon><x1/></polygon>", voc_polygon([120, 10, 160, 10, 160, 90])],
    ids=lambda text: text[9:40],
)  # fmt: skip
def test_a_polygon_of_voc_that_is_broken_or_elsewhere_is_named_and_leaves_the_box(convert, folder, polygon):
    voc_with(folder, polygon)
    _, labels, lines = result_of(convert, folder, "xml", "--force")
    np.testing.assert_allclose(labels["plain"], [[0, *DOG[1:]]])
    assert "outlines that" in lines[-3]
    assert f"{folder / 'xml/plain.xml'}, object 1" in lines[-3]


def test_an_empty_polygon_of_voc_is_none(convert, folder):
    voc_with(folder, "<polygon/>")
    assert "outlines" not in "".join(result_of(convert, folder, "xml", "--force")[2])


def test_an_outline_of_several_parts_covers_what_pycocotools_says(convert, folder):
    from pycocotools import mask as coco_masks

    parts = [[20, 10, 35, 10, 35, 40, 20, 40], [45, 60, 60, 60, 60, 90, 45, 90], [40, 10, 60, 10, 50, 25]]
    labels = result_of(convert, folder, changed(segmentation=parts))[1]["plain"]
    large = [[value * 4 for value in part] for part in parts]
    expected = coco_masks.decode(coco_masks.merge(coco_masks.frPyObjects(large, 400, 800)))
    assert overlap(drawn(labels[0, 1:], 200, 100), expected) > 0.95
    assert abs(int(drawn(labels[0, 1:], 200, 100).sum()) - int(expected.sum())) < 0.05 * expected.sum()


@pytest.mark.parametrize("compressed", [False, True])
def test_a_mask_in_run_lengths_becomes_its_edge(convert, folder, compressed):
    from pycocotools import mask as coco_masks

    mask = cv2.ellipse(np.zeros((100, 200), np.uint8), (40, 50), (20, 40), 0, 0, 360, 1, -1)
    mask[50:90, 100:104] = 1  # a second part
    encoded = coco_masks.encode(np.asfortranarray(mask))
    if compressed:
        segmentation = {"size": [100, 200], "counts": encoded["counts"].decode()}
    else:
        pixels = mask.ravel(order="F")
        counts = np.diff([0, *np.flatnonzero(np.diff(pixels)) + 1, len(pixels)])
        segmentation = {"size": [100, 200], "counts": counts.tolist()}
    box = coco_masks.toBbox(encoded).tolist()
    labels = result_of(convert, folder, changed(segmentation=segmentation, bbox=box))[1]["plain"]
    expected = mask.repeat(4, 0).repeat(4, 1)
    assert overlap(drawn(labels[0, 1:], 200, 100), expected) > 0.97
    points = labels[0, 1:].reshape(-1, 2) * (200, 100)
    np.testing.assert_allclose([*points.min(0), *np.ptp(points, 0)], box, atol=0.5)
    assert len(points) < 150  # not one for each pixel of the edge


def test_an_outline_is_clipped_as_a_polygon(convert, folder):
    """A triangle with a corner far outside; the expected area is that of the trapezium inside."""
    triangle, box = [-100, 50, 100, 0, 100, 100], [-100, 0, 200, 100]
    labels, lines = result_of(convert, folder, changed(segmentation=[triangle], bbox=box))[1:]
    points = labels["plain"][0, 1:].reshape(-1, 2)
    assert (points.min(), points.max()) >= (0, 0.5)
    area = cv2.contourArea((points * (200, 100)).astype(np.float32))
    assert area == pytest.approx(100 * (50 + 100) / 2, abs=0.1)
    assert "boxes clipped: 1" in lines[-3]


@pytest.mark.parametrize(
    "segmentation",
    [[[1, 2, 3]], [[1, 2, 3, 4]], [["a"] * 6], "text", {"counts": [1]}, {"size": [9, 9], "counts": "?"}, [[None] * 6],
     [[0.1, 0.1, 0.3, 0.1, 0.3, 0.9]], [[120, 10, 160, 10, 160, 90]]],
    ids=str,
)  # fmt: skip
def test_an_outline_that_is_broken_or_elsewhere_leaves_the_box(convert, folder, segmentation):
    _, labels, lines = result_of(convert, folder, changed(segmentation=segmentation))
    np.testing.assert_allclose(labels["plain"], [DOG])
    assert "outlines that" in lines[-3]
    assert "annotation 1" in lines[-3]


@pytest.mark.parametrize("nothing", [[], None, {}])
def test_an_empty_outline_is_none(convert, folder, nothing):
    _, labels, lines = result_of(convert, folder, changed(segmentation=nothing))
    np.testing.assert_allclose(labels["plain"], [DOG])
    assert "outlines" not in "".join(lines)


def test_labels_are_a_perfect_detector_for_pycocotools(convert, folder, tmp_path):
    """Random boxes of both orders, in two resolutions, partly with outlines; crowds are what is left out."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    rng = np.random.default_rng(3)
    images = [{**image, "width": width, "height": width // 2}
              for image, width in zip(JSON["images"], (200, 400, 100), strict=True)]  # fmt: skip
    annotations, plain = [], []
    for number in range(1, 25):
        image = images[number % 3]
        side = np.array([image["width"], image["height"]])
        (left, top), (width, height) = rng.uniform(0, 0.5, 2) * side, rng.uniform(0.2, 0.5, 2) * side
        right, bottom = left + width, top + height
        entry = {"id": number, "image_id": image["id"], "category_id": int(rng.choice([3, 17, 18])), "iscrowd": 0}
        entry["segmentation"] = [[left, top, right, top, right, bottom, left, bottom]] if number % 2 else []
        box = [left, top, width, height]
        plain.append({**entry, "bbox": box, "area": width * height})
        annotations.append({**entry, "bbox": [right, bottom, -width, -height] if number % 5 else box})
    names, labels, lines = result_of(convert, folder, changed(images=images, annotations=annotations))
    assert "objects: 24" in lines[-2]
    (tmp_path / "plain.json").write_text(json.dumps(changed(images=images, annotations=plain)))
    truth = COCO(str(tmp_path / "plain.json"))
    by_name = {category["name"]: category["id"] for category in reversed(JSON["categories"])}
    by_name["cat"] = 17
    detections = []
    for image in images:
        stem = Path(image["file_name"].replace("\\", "/")).stem
        for label, *points in labels[stem]:
            xy = np.array(points).reshape(-1, 2) * (image["width"], image["height"])
            box = [*xy.min(0), *np.ptp(xy, 0)]
            category = by_name[names[int(label)]]
            detections.append({"image_id": image["id"], "category_id": category, "bbox": box, "score": 1.0})
    evaluator = COCOeval(truth, truth.loadRes(detections), "bbox")
    evaluator.params.iouThrs = np.array([0.99])
    evaluator.evaluate()
    evaluator.accumulate()
    precision = evaluator.eval["precision"][0, :, :, 0, -1]
    assert precision[precision > -1].min() == 1


# what cannot be converted


@pytest.mark.parametrize(
    ("file", "content", "part"),
    [
        ("xml/b.xml", VOC.format("plain.jpg", "", 200, 100, ""), "plain.jpg twice"),
        ("xml/b.xml", VOC.format("nowhere.jpg", "", 9, 9, ""), "--images"),
        ("images/plain.png", "", "several images of one name"),
        ("a.json", "{}", "a.json"),
        ("a.json", "[]", "a.json"),
        ("a.json", "{", "a.json"),
        ("a.json", '{"images": [], "annotations": {}, "categories": []}', "annotations"),
        ("xml/c.txt", "", "nowhere does not exist"),
    ],
)
def test_what_is_wrong_is_one_line(file, content, part, convert, folder):
    if part != "--images":
        write_voc(folder)
    (folder / file).write_text(content)
    source = {"a.json": "a.json", "xml/c.txt": "nowhere"}.get(file, "xml")
    assert part in refused(convert, folder, source)
    assert convert(folder / source, "--images", folder, "--output", folder / "xml")[0] == 2


def test_a_folder_that_cannot_be_written_is_one_line(convert, folder):
    (folder / "file").write_text("")
    write_voc(folder, {name: file for name, file in XML.items() if name != "lost.xml"})
    assert "file" in refused(convert, folder, "xml", "--output", folder / "file/out")
