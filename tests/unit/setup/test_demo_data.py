"""The demo set: the same for the same seed, true boxes, nothing shared between the splits, no half-written folder."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from pycocotools import mask as masks

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "data" / "demo"
TRAIN, VAL = 6, 4


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEMO / "make_digits.py"), str(folder), "--train", str(TRAIN), "--val", str(VAL)]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """The set for detectors, and that with masks."""
    folders = tmp_path_factory.mktemp("demo") / "digits", tmp_path_factory.mktemp("demo") / "digits-segments"
    for folder, *options in ((folders[0], "--workers", "1"), (folders[1], "--segments", "--workers", "2")):
        done = run(folder, *options)
        assert done.returncode == 0, done.stderr
    return folders


@pytest.mark.parametrize(("split", "count"), [("train", TRAIN), ("val", VAL)])
def test_images_labels_and_annotations(sets, split, count):
    coco = json.loads((sets[0] / "annotations" / f"instances_{split}.json").read_text())
    assert [item["id"] for item in coco["categories"]] == list(range(10))
    assert [item["id"] for item in coco["annotations"]] == list(range(1, len(coco["annotations"]) + 1))
    files = {path.name for path in (sets[0] / "images" / split).iterdir()}
    assert {item["file_name"] for item in coco["images"]} == files
    assert len(files) == len([*(sets[0] / "labels" / split).iterdir()]) == count
    assert len({path.stem for path in sets[0].glob("images/*/*")}) == TRAIN + VAL
    for image in coco["images"]:
        assert int(Path(image["file_name"]).stem) == image["id"]
        assert cv2.imread(str(sets[0] / "images" / split / image["file_name"])).shape == (320, 320, 3)
        labels = (sets[0] / "labels" / split / image["file_name"]).with_suffix(".txt")
        rows = np.loadtxt(labels, ndmin=2) * [1, 320, 320, 320, 320]  # class, x, y, w, h in pixels
        assert 3 <= len(rows) <= 12
        assert 12 <= rows[:, 3:].max(axis=1).min() <= rows[:, 3:].max() <= 96
        assert (rows[:, 1:3] - rows[:, 3:] / 2).min() >= 0
        assert (rows[:, 1:3] + rows[:, 3:] / 2).max() <= 320
        found = [item for item in coco["annotations"] if item["image_id"] == image["id"]]
        boxes = np.array([item["bbox"] for item in found])
        assert [item["category_id"] for item in found] == rows[:, 0].tolist()
        np.testing.assert_allclose(boxes[:, :2] + boxes[:, 2:] / 2, rows[:, 1:3], atol=1e-4)
        np.testing.assert_allclose(boxes[:, 2:], rows[:, 3:], atol=1e-4)
        assert [item["area"] for item in found] == boxes[:, 2:].prod(axis=1).tolist()


def test_same_seed_same_bytes_whatever_the_workers(sets, tmp_path):
    assert run(tmp_path / "digits", "--workers", "2").returncode == 0
    first, second = ({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}
                     for folder in (sets[0], tmp_path / "digits"))  # fmt: skip
    assert first.pop(Path("data.yaml")) != second.pop(Path("data.yaml"))  # they name their folders
    assert first == second


@pytest.mark.parametrize("split", ["train", "val"])
def test_annotations_hold_the_ink_of_each_polygon(sets, split):
    """Read by pycocotools and filled by OpenCV; classes and boxes are those of the set for detectors."""
    name = f"annotations/instances_{split}.json"
    detection, coco = (json.loads((folder / name).read_text()) for folder in sets)
    assert coco["images"] == detection["images"]
    assert len(coco["annotations"]) == len(detection["annotations"])
    lines = [
        (int(path.stem), line.split())
        for path in sorted((sets[1] / "labels" / split).iterdir())
        for line in path.read_text().splitlines()
    ]
    same = 0
    for found, plain, (image, words) in zip(coco["annotations"], detection["annotations"], lines, strict=True):
        ink = masks.decode(masks.frPyObjects(found["segmentation"], 320, 320)).astype(bool)
        assert found | {"segmentation": 0, "area": 0} == plain | {"segmentation": 0, "area": 0}
        assert found["bbox"] == list(cv2.boundingRect(ink.astype(np.uint8)))
        assert found["area"] == ink.sum()
        assert (found["image_id"], found["category_id"]) == (image, int(words[0]))
        corners = np.array(words[1:], np.float32).reshape(-1, 2) * np.float32(320)  # as upstream's loader draws them
        same += (cv2.fillPoly(np.zeros((320, 320), np.uint8), [corners.astype(np.int32)], 1) == ink).all()
    assert same >= 0.95 * len(lines)


@pytest.mark.parametrize("what", ["the same", "foreign", "--seed 3", "--segments", "incomplete"])
def test_a_folder_is_used_again_or_refused_if_it_is_not_this_set(sets, tmp_path, what):
    folder = shutil.copytree(sets[0], tmp_path / "digits")
    (folder / "labels" / "train.cache").write_bytes(b"upstream's cache")
    if what == "foreign":
        (folder / "demo_set.json").unlink()
    elif what == "incomplete":
        next((folder / "images" / "val").iterdir()).unlink()
    elif what == "the same":
        (folder / "data.yaml").write_text((sets[0] / "data.yaml").read_text().replace(str(sets[0]), str(folder)))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*.*")}
    done = run(folder, *(what.split() if what[0] == "-" else ()))
    if what == "the same":
        assert (done.returncode, "already" in done.stdout) == (0, True), done.stderr
    else:
        assert (done.returncode, done.stderr.startswith("error: "), done.stderr.count("\n")) == (2, True, 1)
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before}


def test_splits_share_no_digit_and_no_photograph_and_digits_are_scikit_learns(monkeypatch):
    from sklearn.datasets import load_digits

    monkeypatch.setattr(sys, "path", [str(DEMO), str(ROOT), *sys.path])
    import digit_images

    train, val = digit_images.read_sources("train"), digit_images.read_sources("val")
    assert len(train.scans) + len(val.scans) == 1797
    assert {scan.tobytes() for scan in train.scans}.isdisjoint(scan.tobytes() for scan in val.scans)
    assert set(train.labels) == set(val.labels) == set(range(10))
    assert set(digit_images.PHOTOGRAPHS["train"]).isdisjoint(digit_images.PHOTOGRAPHS["val"])
    scans, labels = digit_images.read_scans()
    np.testing.assert_array_equal(scans * 16, load_digits().images)
    np.testing.assert_array_equal(labels, load_digits().target)
