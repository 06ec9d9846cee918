"""The demo set of 640x640: what is seen of a digit decides on its box and on its label; sizes, counts and classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

cv2 = pytest.importorskip("cv2")
np = pytest.importorskip("numpy")
pytest.importorskip("sklearn")
pytest.importorskip("skimage")


@pytest.fixture(scope="module")
def drawn(digits_on_path):
    import digit_images
    import digit_scenes

    sources = digit_images.read_sources("val")
    return [digit_scenes.draw_scene(np.random.default_rng([3, number]), sources) for number in range(30)]


def test_sizes_counts_and_classes(drawn) -> None:
    boxes = np.concatenate([image.boxes for image in drawn])
    longer = (boxes[:, 2:] - boxes[:, :2]).max(axis=1)
    assert boxes.min() >= 0
    assert boxes.max() <= 640
    assert longer.min() >= 8
    assert longer.max() <= 300
    assert (longer < 16).any()
    assert (longer > 150).any()
    counts = [len(image.labels) for image in drawn]
    assert max(counts) <= 40
    assert max(counts) > 20
    of_class = np.bincount(np.concatenate([image.labels for image in drawn]), minlength=10)
    assert of_class[[1, 5]].min() > 3 * of_class[[4, 8]].max()  # the two most frequent, the two rarest
    assert {35 <= image.quality <= 95 for image in drawn} == {True}
    assert len({image.quality for image in drawn}) > 10


def test_the_set_on_disk(digits_on_path, tmp_path: Path) -> None:
    from make_digits import make

    folder = tmp_path / "digits"
    assert make(folder, 0, 3, 2, workers=1, size=640)
    coco = json.loads((folder / "annotations" / "instances_val.json").read_text())
    assert [(item["width"], item["height"]) for item in coco["images"]] == [(640, 640)] * 2
    for image in coco["images"]:
        assert cv2.imread(str(folder / "images" / "val" / image["file_name"])).shape == (640, 640, 3)
        rows = np.loadtxt((folder / "labels" / "val" / image["file_name"]).with_suffix(".txt"), ndmin=2)
        boxes = np.array([item["bbox"] for item in coco["annotations"] if item["image_id"] == image["id"]])
        np.testing.assert_allclose(rows[:, 1:3] * 640, boxes[:, :2] + boxes[:, 2:] / 2, atol=1e-3)
        np.testing.assert_allclose(rows[:, 3:] * 640, boxes[:, 2:], atol=1e-3)
    assert not make(folder, 0, 3, 2, workers=1, size=640)
    from utils.core.errors import InputError

    with pytest.raises(InputError, match="another demo set"):
        make(folder, 0, 3, 2, workers=1)
