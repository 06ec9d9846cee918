"""What an evaluation writes, COCO's form and annotations; sources that cannot be drawn, or have one name."""

import json
import logging
import shutil
import sys
from dataclasses import replace

import pytest
import yaml
from known_images import SQUARE, KnowingModel, coco_json, damaged_png, export_answers, write_set
from known_sets import CONFIG, Known

import val_trt
from utils.core.errors import DataError, DependencyError, InputError
from utils.evaluation.coco import COCO_CATEGORIES, TextWriter
from utils.evaluation.data_yaml import load_data
from utils.evaluation.loop import evaluate
from utils.jobs.sources import target_names
from utils.runners.pytorch import TorchRunner


def test_text_files(mixed, tmp_path):
    config = replace(CONFIG, save_txt=True, save_conf=True, conf_thres=0.25)
    for _ in range(2):  # a second run replaces the files instead of appending to them
        mixed.evaluate(config, out_dir=tmp_path)
    files = sorted((tmp_path / "labels").iterdir())
    assert 20 < len(files) <= 40
    sample = next(s for s in mixed.samples if (s.answers[:, 5] > 0.25).sum() == 1)
    label, x1, y1, x2, y2, score = next(row for row in sample.answers.tolist() if row[5] > 0.25)
    width, height = sample.size
    x1, x2, y1, y2 = max(x1, 0), min(x2, width), max(y1, 0), min(y2, height)
    expected = [label, (x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height, score]
    found = (tmp_path / "labels" / f"{sample.path.stem}.txt").read_text().split()
    assert [float(word) for word in found] == pytest.approx(expected, abs=0.01)
    mixed.evaluate(replace(config, save_conf=False), out_dir=tmp_path)
    assert len((tmp_path / "labels" / f"{sample.path.stem}.txt").read_text().split()) == 5


def test_json_uses_the_ids_of_the_annotations(tmp_path):
    """Images called by name have other ids, and the categories of `known_images` are 3, 6, 9."""
    known = Known(tmp_path, SQUARE, 6, stem="image_{}")
    known.evaluate(replace(CONFIG, save_json=True), out_dir=tmp_path / "out", name="m")
    results = json.loads((tmp_path / "out/m_predictions.json").read_text())
    assert {row["category_id"] for row in results} == {3, 6, 9}
    assert {row["image_id"] for row in results} == set(range(1, 7))
    best = max(results, key=lambda row: row["score"])
    answers = known.samples[best["image_id"] - 1].answers
    label, x1, y1, x2, y2, score = answers[answers[:, 5].argmax()]
    assert (best["category_id"], best["score"]) == (3 * (label + 1), pytest.approx(score, abs=1e-5))
    assert best["bbox"] == pytest.approx([x1, y1, x2 - x1, y2 - y1], abs=1.5)  # clipped to the image


def test_coco_form(tmp_path):
    """80 classes, val2017.txt, numbered images, annotations with 91 ids."""
    names = [f"class {index}" for index in range(80)]
    samples = write_set(tmp_path, 24, ((64, 64), (64, 48)), names, split="val2017")
    (tmp_path / "val2017.txt").write_text("".join(f"./images/val2017/{sample.path.name}\n" for sample in samples))
    annotations = json.dumps(coco_json(samples, names, COCO_CATEGORIES))
    (tmp_path / "annotations/instances_val2017.json").write_text(annotations)
    content = {"path": str(tmp_path), "train": "train2017.txt", "val": "val2017.txt", "names": dict(enumerate(names))}
    (tmp_path / "coco.yaml").write_text(yaml.safe_dump(content))
    data = load_data(tmp_path / "coco.yaml")
    assert (data.is_coco, set(data.splits)) == (True, {"val"})  # the lists that were not downloaded are not offered
    result = evaluate(TorchRunner(KnowingModel(samples, names, 64), "cpu"), data, replace(CONFIG, save_json=True),
                      out_dir=tmp_path / "out", progress=False)  # fmt: skip
    results = json.loads((tmp_path / "out/model_predictions.json").read_text())
    assert {row["category_id"] for row in results} <= set(COCO_CATEGORIES)
    assert max(row["category_id"] for row in results) > 80
    assert {row["image_id"] for row in results} == set(range(1, 25))
    assert result.ap50 == pytest.approx(result.coco["ap50"], abs=0.02)  # a label or two per class: coarse curves
    assert result.coco["ap50"] > 0.5
    assert len(COCO_CATEGORIES) == 80
    assert COCO_CATEGORIES[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13]  # there is no 12
    assert COCO_CATEGORIES[-3:] == [88, 89, 90]


def test_json_without_detections_without_annotations_and_without_pycocotools(tmp_path, monkeypatch, caplog):
    known, config = Known(tmp_path, SQUARE, 4), replace(CONFIG, save_json=True)
    assert set(known.evaluate(replace(config, conf_thres=1.0), out_dir=tmp_path).coco.values()) == {0.0}
    (tmp_path / "annotations/instances_val.json").unlink()
    with caplog.at_level(logging.INFO):
        assert known.evaluate(config, out_dir=tmp_path).coco is None
    assert "no annotations for this split" in caplog.text
    assert {row["category_id"] for row in json.loads((tmp_path / "model_predictions.json").read_text())} <= {0, 1, 2}
    monkeypatch.setitem(sys.modules, "pycocotools.coco", None)
    with pytest.raises(DependencyError, match="pip install pycocotools"):
        known.evaluate(config, out_dir=tmp_path)


def test_images_of_one_name_cannot_be_told_apart(tmp_path):
    known = Known(tmp_path, SQUARE, 4)
    (tmp_path / "images/val/elsewhere").mkdir()
    shutil.copy(known.samples[0].path, tmp_path / "images/val/elsewhere")
    with pytest.raises(DataError, match="000000000001"):
        known.evaluate(replace(CONFIG, save_json=True), out_dir=tmp_path)


ANNOTATION = {"image_id": 1, "category_id": 3, "bbox": [0, 0, 5, 5]}
BAD_ANNOTATIONS = {
    "no JSON": "{",
    "no categories": {"categories": []},
    "another category": {"categories": [{"id": 1, "name": "wolf"}]},
    "other images": {"images": [{"id": 1, "file_name": "another.png"}]},
    "two images of one name": {"images": [{"id": n, "file_name": f"{n}/{n % 4 + 1:012}.png"} for n in range(5)]},
    "images without names": {"images": [{"id": 1}]},
    "a box of three numbers": {"annotations": [{**ANNOTATION, "bbox": [1, 2, 3], "area": 1}]},
    "no box": {"annotations": [{"image_id": 1, "category_id": 3}]},
}


@pytest.mark.parametrize("kind", BAD_ANNOTATIONS)
def test_bad_annotations_are_one_line_before_the_evaluation(tmp_path, kind):
    known = Known(tmp_path, SQUARE, 4)
    change = BAD_ANNOTATIONS[kind]
    file = tmp_path / "annotations/instances_val.json"
    whole = {**json.loads(file.read_text()), **change} if isinstance(change, dict) else change
    file.write_text(whole if isinstance(whole, str) else json.dumps(whole))
    with pytest.raises(DataError) as caught:
        known.evaluate(replace(CONFIG, save_json=True), out_dir=tmp_path)
    assert str(file) in str(caught.value)
    assert not (tmp_path / "model_predictions.json").exists()


# sources


def test_files_whose_drawings_have_one_name():
    names = target_names(["in/a.jpg", "in/a.JPG", "in/a.png", "in/A.png", "in/a.mpo", "in/a-2.png"])
    assert len({name.casefold() for name in names}) == 6
    assert names[0] == "a.jpg"


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.mp4", b"none"), ("a.avi", b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom\0\0\0\x08mdat"), ("a.png", b""),
     ("a.png", damaged_png())],
)  # fmt: skip
def test_a_source_that_cannot_be_decoded_leaves_nothing(square, tmp_path, capfd, name, content):
    network = export_answers(square.model, tmp_path / "a.onnx", 1, 64)

    def draw(*sources):
        words = ["--engine-file", network, "--project", tmp_path / "made/runs", "--device", "cpu", "--source", *sources]
        return val_trt.main([str(word) for word in words]), capfd.readouterr().err

    (tmp_path / name).write_bytes(content)
    assert draw(tmp_path / name) == (2, f"error: {tmp_path / name} cannot be decoded\n")
    code, err = draw(tmp_path / name, shutil.copy(tmp_path / name, tmp_path / f"b{name}"))
    said = f"cannot read any of 2 sources; the first: {tmp_path / name} cannot be decoded\n"
    assert (code, err.split("error: ")[1]) == (2, said)
    assert not list((tmp_path / "made/runs").iterdir())


def test_texts_of_images_of_one_stem_go_to_files_of_their_own_and_never_over_labels(tmp_path):
    paths = [str(tmp_path / name) for name in ("x/a.jpg", "y/a.jpg", "y/A.png")]
    writer = TextWriter(tmp_path / "labels", False, paths)
    for path in paths:
        writer.add(path, [[0.0, 0, 10, 10, 0.5, 1]], (100, 100))
    assert sorted(path.name for path in (tmp_path / "labels").iterdir()) == ["A-3.txt", "a-2.txt", "a.txt"]
    for image in ("images/a.jpg", "labels/a.jpg"):
        with pytest.raises(InputError, match="would be overwritten"):
            TextWriter(tmp_path / "labels", False, [str(tmp_path / image)])
