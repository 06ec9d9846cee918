"""Masks in annotation files: what pycocotools can read passes, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from utils.core.errors import DataError
from utils.evaluation import coco_segmentations
from utils.evaluation.coco_annotations import read_annotations
from utils.evaluation.coco_segmentations import outline_length, wrong_segmentation

SIZE = (20, 30)


def masks() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [
        np.zeros(SIZE, np.uint8),
        np.ones(SIZE, np.uint8),
        *((generator.random(SIZE) < share).astype(np.uint8) for share in (0.01, 0.5, 0.99)),
        np.pad(np.ones((10, 11), np.uint8), ((3, 7), (9, 10))),
    ]


@pytest.mark.parametrize("mask", masks())
def test_what_pycocotools_writes_passes(mask):
    compressed = coco_mask.encode(np.asfortranarray(mask))
    text = compressed["counts"].decode()
    assert wrong_segmentation({"size": list(SIZE), "counts": text}, SIZE) == ""
    changes = np.flatnonzero(np.diff(mask.T.ravel(), prepend=0))
    counts = np.diff(changes, prepend=0, append=mask.size).tolist()
    assert coco_mask.frPyObjects({"size": list(SIZE), "counts": counts}, *SIZE)["counts"] == compressed["counts"]
    assert wrong_segmentation({"size": list(SIZE), "counts": counts}, SIZE) == ""
    # another size of the same file would be compared with it as no overlap
    assert "has run lengths of the size" in wrong_segmentation({"size": [30, 20], "counts": text}, SIZE)
    for cut in range(len(text)):  # pycocotools reads beyond the end of some of these
        assert wrong_segmentation({"size": list(SIZE), "counts": text[:cut]}, SIZE)


def test_large_masks_pass():
    mask = np.zeros((3000, 4000), np.uint8)
    mask[100:2900, 200:3900:7] = 1
    text = coco_mask.encode(np.asfortranarray(mask))["counts"].decode()
    assert wrong_segmentation({"size": [3000, 4000], "counts": text}, (3000, 4000)) == ""


def test_polygons_pass_also_those_that_leave_the_image_a_little():
    assert wrong_segmentation([[0, 0, 30.5, -0.5, 12, 20.01]], SIZE) == ""
    assert wrong_segmentation([[0, 0, 30, 0, 12, 20], [1, 1, 2, 2, 3, 1.5]], SIZE) == ""


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([[1e30, 1e30, 5, 5, 1e30, 0]], "far outside its image of 30x20 pixels"),
        ([[0, 0, 61, 0, 5, 5]], "far outside"),
        ([[0, 0, 5, -21, 5, 5]], "far outside"),
        ([[10**400, 0, 5, 5, 1, 0]], "expected polygons"),
        ([[float("nan"), 0, 5, 5, 1, 0]], "expected polygons"),
        ([[0, 0, 5, 5]], "expected polygons"),
        ([], "expected polygons"),
        (None, "expected polygons"),
        ({"size": [20, 30]}, "has the run lengths None"),
        ({"size": [20, 10**30], "counts": [600]}, "of the size"),
        ({"size": [20, 30], "counts": [None]}, "has the run lengths"),
        ({"size": [20, 30], "counts": [-5, 605]}, "has the run lengths"),
        ({"size": [20, 30], "counts": [[600]]}, "has the run lengths"),
        ({"size": [20, 30], "counts": [True, 599]}, "has the run lengths"),
        ({"size": [20, 30], "counts": [2**40]}, "of 1099511627776 pixels; its image has 600"),
        ({"size": [20, 30], "counts": "\u00ff0"}, "has the run lengths"),
        ({"size": [20, 30], "counts": "o" * 9}, "has the run lengths"),
    ],
)
def test_what_pycocotools_must_not_see(found, said):
    assert said in wrong_segmentation(found, SIZE)


def write_annotations(file: Path, side: int, *segmentations: object) -> Path:
    content = {
        "images": [{"id": 1, "file_name": "1.jpg", "height": side, "width": side}],
        "categories": [{"id": 1, "name": "a"}],
        "annotations": [
            {"image_id": 1, "category_id": 1, "bbox": [0, 0, 5, 5], "segmentation": one} for one in segmentations
        ],
    }
    file.write_text(json.dumps(content))
    return file


def zigzag(side: int, edges: int) -> list[int]:
    """A polygon with so many edges from one side of an image to the other."""
    return [value for edge in range(edges) for value in (side * (edge % 2), 0)]


def test_outlines_that_take_pycocotools_gigabytes_are_refused(tmp_path):
    file = write_annotations(tmp_path / "a.json", 32_768, [zigzag(32_768, 60)])
    assert outline_length(read_annotations(file, masks=True)["annotations"][0]["segmentation"]) == 60 * 32_768
    file = write_annotations(file, 32_768, [zigzag(32_768, 40), zigzag(32_768, 24)])
    with pytest.raises(DataError, match="entry 0 of 'annotations' has polygons of 2,097,152 pixels' length; expected"):
        read_annotations(file, masks=True)
    assert read_annotations(file)  # for boxes nobody looks at them


def test_outlines_of_a_file_have_a_bound_together(tmp_path, monkeypatch):
    monkeypatch.setattr(coco_segmentations, "LONGEST_OUTLINES", 100)
    square = [[0, 0, 10, 0, 10, 10, 0, 10]]
    assert read_annotations(write_annotations(tmp_path / "a.json", 20, square, square), masks=True)
    runs = {"size": [20, 20], "counts": [400]}
    with pytest.raises(DataError, match="entry 3 of 'annotations' brings the length of all polygons to more than"):
        read_annotations(write_annotations(tmp_path / "a.json", 20, square, runs, square, square), masks=True)


def test_images_of_more_pixels_than_can_be_read_are_refused(tmp_path):
    with pytest.raises(DataError, match="entry 0 of 'images' has 65535 x 65535 pixels; expected 1,073,741,824 at most"):
        read_annotations(write_annotations(tmp_path / "a.json", 65_535), masks=True)


@pytest.mark.parametrize("key", ["height", "width"])
@pytest.mark.parametrize("value", [None, "320", 0, -1, 1.5, True, 10**6])
def test_images_need_a_size_where_masks_are_compared(tmp_path: Path, key: str, value: object):
    content = {
        "images": [{"id": 1, "file_name": "1.jpg", "height": 20, "width": 30, key: value}],
        "categories": [{"id": 1, "name": "a"}],
        "annotations": [
            {"image_id": 1, "category_id": 1, "bbox": [0, 0, 5, 5], "segmentation": [[0, 0, 5, 0, 5, 5]]},
            {"image_id": 2, "category_id": 1, "bbox": [0, 0, 5, 5]},
        ],
    }
    file = tmp_path / "a.json"
    file.write_text(json.dumps(content))
    assert read_annotations(file)["images"]
    with pytest.raises(DataError, match=rf"entry 0 of 'images' has the {key}"):
        read_annotations(file, masks=True)
    content["images"] = [{"id": 1, "file_name": "1.jpg", "height": 20, "width": 30}]
    file.write_text(json.dumps(content))
    assert len(read_annotations(file, masks=True)["annotations"]) == 2  # the second is of an image that is not listed
    content["annotations"][0]["segmentation"] = [[1e9, 0, 5, 0, 5, 5]]
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="entry 0 of 'annotations' has a polygon that is far outside"):
        read_annotations(file, masks=True)
