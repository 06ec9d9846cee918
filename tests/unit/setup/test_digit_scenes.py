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
    assert 8 <= longer.min() < 16
    assert 150 < longer.max() <= 300
    assert 20 < max(len(image.labels) for image in drawn) <= 40
    of_class = np.bincount(np.concatenate([image.labels for image in drawn]), minlength=10)
    assert of_class[[1, 5]].min() > 3 * of_class[[4, 8]].max()  # the two most frequent, the two rarest
    assert {35 <= image.quality <= 95 for image in drawn} == {True}
    assert len({image.quality for image in drawn}) > 10


def test_the_set_on_disk(digits_on_path, tmp_path: Path) -> None:
    from make_digits import make

    folder = tmp_path / "digits"
    assert make(folder, 0, 3, 2, workers=1, size=640)
    for image in json.loads((folder / "annotations" / "instances_val.json").read_text())["images"]:
        assert cv2.imread(str(folder / "images" / "val" / image["file_name"])).shape == (640, 640, 3)
    assert not make(folder, 0, 3, 2, workers=1, size=640)
    from utils.core.errors import InputError

    with pytest.raises(InputError, match="another demo set"):
        make(folder, 0, 3, 2, workers=1)
