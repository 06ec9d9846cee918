"""Masks as polygons: filled again they are the mask; and what a report may hold of them."""

from __future__ import annotations

import json

import cv2
import numpy as np
import pytest

from utils.core.errors import InputError
from utils.reports.outlines import POINTS, POLYGONS, outline_of, points_of
from utils.reports.schema import Box, Report, Sample


def blobs(seed, size=(60, 80)):
    """Smooth shapes with holes, and with islands in them."""
    noise = np.random.default_rng(seed).normal(0, 1, size).astype(np.float32)
    return cv2.GaussianBlur(noise, (0, 0), 4) > 0.02


def refilled(outline, size):
    return cv2.fillPoly(np.zeros(size, np.uint8), [points_of(one) for one in outline], 1).astype(bool)


@pytest.mark.parametrize("seed", range(8))
def test_filled_again_they_are_the_mask(seed):
    mask = blobs(seed)
    outline = outline_of(mask)
    assert len(outline) > 1
    assert sum(len(points_of(one)) for one in outline) <= POINTS
    np.testing.assert_array_equal(refilled(outline, mask.shape), mask)


def test_a_ring_has_a_hole_by_the_even_odd_rule():
    mask = np.zeros((20, 20), bool)
    mask[2:18, 2:18] = True
    mask[6:14, 6:14] = False
    outer, hole = map(points_of, outline_of(mask, left=100, top=1000))
    assert outer.min(0).tolist() == [102, 1002]
    assert outer.max(0).tolist() == [117, 1017]
    assert hole.min(0).tolist() == [105, 1005]  # the mask's own pixels around it
    assert hole.max(0).tolist() == [114, 1014]
    assert refilled(outline_of(mask), mask.shape).sum() == mask.sum()


def test_a_large_or_torn_mask_keeps_to_the_limits():
    torn = np.random.default_rng(0).random((200, 200)) < 0.5
    outline = outline_of(torn)
    assert len(outline) == POLYGONS
    assert sum(len(points_of(one)) for one in outline) <= POINTS
    wavy = np.zeros((2000, 2000), bool)
    angles = np.linspace(0, 2 * np.pi, 4000)
    radius = 700 + 30 * np.sin(60 * angles)
    star = np.stack([1000 + radius * np.cos(angles), 1000 + radius * np.sin(angles)], 1).astype(np.int32)
    wavy = cv2.fillPoly(wavy.astype(np.uint8), [star], 1).astype(bool)
    outline = outline_of(wavy)
    assert sum(len(points_of(one)) for one in outline) <= POINTS
    again = refilled(outline, wavy.shape)
    assert (again & wavy).sum() / (again | wavy).sum() > 0.97


def test_nothing_has_no_outline_and_a_pixel_has_one():
    assert outline_of(np.zeros((5, 5), bool)) == outline_of(np.zeros((0, 3), bool)) == ()
    lone = np.zeros((5, 5), bool)
    lone[3, 1] = True
    assert outline_of(lone) == ("1,3",)


def report_with(outline):
    box = Box((1, 1, 9, 9), "a", 0.5, ("1,1 8,1 8,8",))
    content = Report("x", samples=[Sample("a.png", {"float": [box]}, [Box((1, 1, 9, 9), "a")])]).to_dict()
    content["samples"][0]["predictions"]["float"][0]["outline"] = outline
    return content


def test_what_is_saved_is_loaded_and_only_masks_have_the_field(tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(report_with(["1,1 8,1 8,8", "3,3"])))
    report = Report.load(tmp_path / "r.json")
    assert report.samples[0].predictions["float"][0].outline == ("1,1 8,1 8,8", "3,3")
    report.save(tmp_path / "s.json")
    assert Report.load(tmp_path / "s.json") == report
    stored = json.loads((tmp_path / "s.json").read_text())["samples"][0]
    assert list(stored["truth"][0]) == ["xyxy", "name", "score"]
    assert list(stored["predictions"]["float"][0]) == ["xyxy", "name", "score", "outline"]
    assert list(stored) == ["image", "predictions", "truth", "confidence"]


@pytest.mark.parametrize(
    ("outline", "says"),
    [
        ("1,1 2,2", r"outline is '1,1 2,2', expected a list"),
        ([], "outline is .*, expected a list of 1 items or more"),
        (None, "outline is None, expected a list"),
        ([5], r"outline\[0\] is 5, expected a polygon such as"),
        ([[1, 2]], r"outline\[0\] is \[1, 2\], expected a polygon such as"),
        (["1,1 2"], r"outline\[0\] is '1,1 2', expected a polygon such as"),
        (["-1,1"], "expected a polygon such as"),
        (["1.5,1"], "expected a polygon such as"),
        (["1e3,1"], "expected a polygon such as"),
        (["1,1 "], "expected a polygon such as"),
        (["1,1\n2,2"], "expected a polygon such as"),
        (["\u0661,1"], "expected a polygon such as"),
        (["<svg>"], "expected a polygon such as"),
        (["1,12345678"], "expected a polygon such as"),
        (["1,9999999"], "names pixel 9999999, expected at most 1048575"),
        (["1,1"] * (POLYGONS + 1), "expected at most 50 items"),
        ([" ".join(["1,1"] * (POINTS + 1))], "has 501 points, expected at most 500"),
        ([" ".join(["1,1"] * 260)] * 2, "has 520 points, expected at most 500"),
        (["9" * 1_000_000], "expected a polygon such as"),
    ],
)
def test_other_outlines_are_refused_in_one_short_line(tmp_path, outline, says):
    (tmp_path / "r.json").write_text(json.dumps(report_with(outline)))
    with pytest.raises(InputError, match=says) as caught:
        Report.load(tmp_path / "r.json")
    assert "samples[0].predictions.float[0].outline" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(tmp_path))
