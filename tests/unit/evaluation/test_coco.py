"""pycocotools beside the label files: annotations as people have them, and those that belong to other labels."""

import json
import logging
from dataclasses import replace

import pytest
from known_images import SQUARE, export_answers
from known_sets import CONFIG, Known

import val_trt
from utils.core.errors import DataError
from utils.jobs import evaluate as evaluate_job

SAVING = replace(CONFIG, save_json=True)


@pytest.fixture
def known(tmp_path):
    return Known(tmp_path, SQUARE, 24)


def edit(known, change) -> None:
    """Change the content of the annotations by a function."""
    file = known.folder / "annotations/instances_val.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def evaluated(known, name="out"):
    """Pycocotools' statistics."""
    return known.evaluate(SAVING, out_dir=known.folder / name).coco


def refused(known) -> str:
    """The error, which comes before the evaluation."""
    with pytest.raises(DataError) as caught:
        known.evaluate(SAVING, out_dir=known.folder / "out")
    assert not (known.folder / "out").exists()
    assert "instances_val.json" in str(caught.value)
    return str(caught.value)


def texts(content, *places):
    for part, key in places:
        for entry in content[part]:
            entry[key] = str(entry[key])


def turned(content):
    for entry in content["annotations"]:
        left, top, width, height = entry["bbox"]
        entry["bbox"] = [left + width, top + height, -width, -height]


def without(*keys):
    def change(content):
        for entry in content["annotations"]:
            for key in keys:
                del entry[key]

    return change


def nothing_in(**values):
    def change(content):
        for entry in content["annotations"]:
            entry.update(values)

    return change


def reordered(content):
    content["images"].reverse()
    content["categories"].reverse()


SAME = {
    "image ids of annotations as text": lambda content: texts(content, ("annotations", "image_id")),
    "ids of images as text": lambda content: texts(content, ("images", "id")),
    "ids of categories as text": lambda content: texts(content, ("categories", "id")),
    "categories of annotations as text": lambda content: texts(content, ("annotations", "category_id")),
    "one id of an image as text": lambda content: content["images"][2].update(id="3"),
    "ids that are names": lambda content: [
        entry.update({key: f"image {entry[key]:04}"}) for part, key in (("images", "id"), ("annotations", "image_id"))
        for entry in content[part]
    ],
    "no area": without("area"),
    "area null": nothing_in(area=None),
    "crowd null": nothing_in(iscrowd=None),
    "no ids": without("id"),
    "equal ids": nothing_in(id=7),
    "corners in another order": turned,
    "numbers as text": lambda content: [
        entry.update(bbox=[str(value) for value in entry["bbox"]], area=str(entry["area"]))
        for entry in content["annotations"]
    ],
    "another order": reordered,
}  # fmt: skip


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_annotations_that_are_written_in_other_ways_give_the_same(known, change):
    expected = evaluated(known, "before")
    assert 0.3 < expected["ap"] < 1
    edit(known, change)
    assert evaluated(known) == pytest.approx(expected, abs=1e-9)
    results = json.loads((known.folder / "out/model_predictions.json").read_text())
    content = json.loads((known.folder / "annotations/instances_val.json").read_text())
    assert {entry["image_id"] for entry in results} <= {image["id"] for image in content["images"]}
    assert {entry["category_id"] for entry in results} <= {category["id"] for category in content["categories"]}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_annotations_in_another_encoding(known, encoding):
    expected = evaluated(known, "before")
    file = known.folder / "annotations/instances_val.json"
    file.write_bytes(file.read_text().encode(encoding))
    assert evaluated(known) == pytest.approx(expected)


def fractions(content):
    for entry in content["annotations"]:
        entry["bbox"] = [value / 64 for value in entry["bbox"]]


def corners(content):
    for entry in content["annotations"]:
        left, top, width, height = entry["bbox"]
        entry["bbox"] = [left, top, left + width, top + height]


def doubled(content):
    for entry in content["annotations"]:
        entry["bbox"] = [value * 2 for value in entry["bbox"]]


def classes_exchanged(content):
    first, second, third = content["categories"]
    first["name"], second["name"], third["name"] = second["name"], third["name"], first["name"]


def images_exchanged(content):
    names = [image["file_name"] for image in content["images"]]
    for image, name in zip(content["images"], names[1:] + names[:1], strict=True):
        image["file_name"] = name


OTHER = {
    "no annotations": (lambda content: content.update(annotations=[]), "0 annotations"),
    "half of them": (lambda content: content.update(annotations=content["annotations"][::2]), "labels"),
    "one class is gone": (
        lambda content: content.update(annotations=[a for a in content["annotations"] if a["category_id"] != 3]), "cat"
    ),
    "another class, too": (lambda content: (
        content["categories"].append({"id": 99, "name": "wolf"}),
        content["annotations"].extend({**a, "category_id": 99} for a in content["annotations"][::4]),
    ), "wolf"),
    "all are crowds": (nothing_in(iscrowd=1), "0 annotations"),
    "fractions": (fractions, "fractions"),
    "corners": (corners, "other places"),
    "another resolution": (doubled, "other places"),
    "classes exchanged": (classes_exchanged, "cat"),
    "images exchanged": (images_exchanged, "other places"),
    "of no image": (nothing_in(image_id=999), "999"),
    "of no category": (nothing_in(category_id=999), "999"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "part"), OTHER.values(), ids=OTHER)
def test_annotations_of_other_objects_than_the_labels_are_refused(known, change, part):
    edit(known, change)
    assert part in refused(known)


BROKEN = {
    "an area that is a word": {"area": "large"},
    "an area that is not a number": {"area": float("nan")},
    "a box with a word": {"bbox": [1, 2, 3, "x"]},
    "a box of nothing": {"bbox": None},
    "a crowd that is a word": {"iscrowd": "no"},
    "an image null": {"image_id": None},
    "a category null": {"category_id": None},
}


@pytest.mark.parametrize("values", BROKEN.values(), ids=BROKEN)
def test_one_broken_annotation_is_named_before_the_evaluation(known, values):
    edit(known, lambda content: content["annotations"][5].update(id=55, **values))
    assert "annotation 55" in refused(known)


def test_a_small_difference_is_a_warning_with_numbers(known, caplog):
    edit(known, lambda content: content["annotations"].pop())
    with caplog.at_level(logging.WARNING):
        assert evaluated(known)["ap"] > 0.3
    assert "1 of" in caplog.text
    assert "labels" in caplog.text


def test_equal_annotations_are_no_warning_and_unknown_sizes_no_number(known, caplog):
    """All objects of these sets are small, so that pycocotools has -1.000 for the others."""
    with caplog.at_level(logging.INFO):
        assert evaluated(known)["ap_large"] == -1
    assert "have no partner" not in caplog.text
    assert "-1.0" not in caplog.text
    assert "area= large" in caplog.text


def test_images_without_objects_give_no_number(known, caplog):
    for file in (known.folder / "labels/val").iterdir():
        file.write_text("")
    edit(known, lambda content: content.update(annotations=[]))
    with caplog.at_level(logging.INFO):
        assert evaluated(known) is None
    assert "-1.0" not in caplog.text
    assert (known.folder / "out/model_predictions.json").stat().st_size > 2


def test_images_without_label_files_are_not_compared(known):
    expected = evaluated(known, "before")
    for file in sorted((known.folder / "labels/val").iterdir())[:12]:
        file.unlink()
    assert evaluated(known) == pytest.approx(expected)
    for file in (known.folder / "labels/val").iterdir():
        file.unlink()
    assert evaluated(known, "third") == pytest.approx(expected)


def test_a_part_of_the_images_is_compared_with_its_own_annotations(known):
    config = replace(SAVING, limit=6)
    assert known.evaluate(config, out_dir=known.folder / "out").coco["ap"] > 0.3


def test_one_class_is_compared_without_classes(known):
    edit(known, classes_exchanged)
    result = known.evaluate(replace(SAVING, single_cls=True), out_dir=known.folder / "out")
    assert result.coco["ap"] > 0.3


def test_masks_of_another_resolution_are_refused_before_the_evaluation(tmp_path):
    known = Known(tmp_path, SQUARE, 6, masks=True)
    edit(known, lambda content: [image.update(width=128, height=128) for image in content["images"]])
    assert "128x128" in refused(known)


def test_annotations_are_checked_before_the_fp32_model_is_evaluated(known, tmp_path, monkeypatch, capsys):
    evaluations = []
    monkeypatch.setattr(evaluate_job, "evaluate", lambda *_, **__: evaluations.append(1))
    files = [export_answers(known.model, tmp_path / f"{name}.onnx", 1, 64) for name in ("int8", "float")]
    edit(known, classes_exchanged)
    words = ["--engine-file", files[0], "--reference", files[1], "--data", known.folder / "data.yaml", "--save-json"]
    words += ["--project", tmp_path / "runs", "--device", "cpu", "--imgsz", 64]
    assert val_trt.main([str(word) for word in words]) == 2
    assert evaluations == []
    assert "instances_val.json" in capsys.readouterr().err
