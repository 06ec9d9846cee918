"""What an evaluation writes, COCO's form and annotations."""

import json
import logging
import shutil
import sys
from dataclasses import replace

import pytest
import yaml
from known_images import SQUARE, KnowingModel, coco_json, write_set
from known_sets import CONFIG, NAMES, Known

from utils.core.errors import DataError, DependencyError
from utils.evaluation.coco import COCO_CATEGORIES
from utils.evaluation.data_yaml import load_data
from utils.evaluation.loop import evaluate
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
    samples = write_set(tmp_path, 6, SQUARE, stem="image_{}")
    evaluate(TorchRunner(KnowingModel(samples, NAMES, 64), "cpu"), load_data(tmp_path / "data.yaml"),
             replace(CONFIG, save_json=True), out_dir=tmp_path / "out", progress=False, name="m")  # fmt: skip
    results = json.loads((tmp_path / "out/m_predictions.json").read_text())
    assert {row["category_id"] for row in results} == {3, 6, 9}
    assert {row["image_id"] for row in results} == set(range(1, 7))
    best = max(results, key=lambda row: row["score"])
    answers = samples[best["image_id"] - 1].answers
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
    assert data.is_coco
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


@pytest.mark.parametrize("among", ["annotations", "files"])
def test_images_of_one_name_cannot_be_told_apart(tmp_path, among):
    known = Known(tmp_path, SQUARE, 4)
    if among == "files":
        (tmp_path / "images/val/elsewhere").mkdir()
        shutil.copy(known.samples[0].path, tmp_path / "images/val/elsewhere")
    else:
        file = tmp_path / "annotations/instances_val.json"
        content = json.loads(file.read_text())
        content["images"].append({**content["images"][0], "id": 99, "file_name": "elsewhere/000000000001.jpg"})
        file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="000000000001"):
        known.evaluate(replace(CONFIG, save_json=True), out_dir=tmp_path)


ANNOTATION = {"image_id": 1, "category_id": 3, "bbox": [0, 0, 5, 5]}
BAD_ANNOTATIONS = {
    "no JSON": "{",
    "no categories": {"categories": []},
    "another category": {"categories": [{"id": 1, "name": "wolf"}]},
    "other images": {"images": [{"id": 1, "file_name": "another.png"}]},
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
