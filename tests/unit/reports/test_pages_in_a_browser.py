"""Report pages as a reader sees them: opened in headless Chromium, where there is one, in two widths."""

from __future__ import annotations

import io

import browser
import numpy as np
import pytest
from PIL import Image
from report_examples import make_row

from utils.reports.detections import outline_of
from utils.reports.page import write_html
from utils.reports.schema import Box, Epoch, Range, Report, Sample

pytestmark = pytest.mark.skipif(browser.find() is None, reason="no Chromium is installed")
LONG = "/a/rather/long/path/to/the/weights/of/a/run/qat_ep_1_ap_0.7872_mask_0.5345_gelan-digits-seg.pt"


def drawn(path, size, masks):
    """An image with two objects and where they are."""
    width, height = size
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    y, x = np.mgrid[:height, :width]
    disc = (x - width / 3) ** 2 + (y - height / 2) ** 2
    ring = (disc < (height / 3) ** 2) & (disc > (height / 6) ** 2)
    place = (width / 3 - height / 3, height / 6, width / 3 + height / 3, height * 5 / 6)
    return [Box(xyxy=place, name="a ring", score=0.9, outline=outline_of(ring) if masks else ()),
            Box(xyxy=(5, 5, 30, 40), name="small", score=0.4)]  # fmt: skip


@pytest.fixture(scope="module")
def chromium():
    with browser.Browser(browser.find()) as program:
        yield program


@pytest.fixture(scope="module", params=["detection", "segmentation"])
def page(request, tmp_path_factory):
    """A page with all that a page can have: four stages, two charts, three images of three columns."""
    folder = tmp_path_factory.mktemp(request.param)
    masks = request.param == "segmentation"
    more = {"mask_ap": 0.53, "mask_ap50": 0.8} if masks else {}
    report = Report(command="python qat.py quantize --weights " + LONG, data=LONG, hardware={"cpu": "a CPU"})
    report.rows = [
        make_row(stage, file=LONG, ap=ap, size_bytes=231_456_789, ms_per_image=1234.5, **more,
                 measured_on="TensorRT 10.13.0, NVIDIA H200, batch 10, 320x320, strongly typed")
        for stage, ap in {"float": 0.79, "PTQ": 0.78, "QAT": 0.785, "TensorRT INT8": 0.784}.items()
    ]  # fmt: skip
    report.history = [Epoch(epoch=epoch, ap=0.78, ap50=0.9, **more, held_out=0.4) for epoch in range(3)]
    report.ranges = [
        Range(name=f"model.{number}.cv1.conv.{kind}_quantizer", kind=kind, amax=1.5, min=0.5)
        for number in range(40) for kind in ("activation", "weight")
    ]  # fmt: skip
    for size in ((320, 320), (640, 200), (100, 300)):
        path = folder / f"{size[0]}.png"
        boxes = drawn(path, size, masks)
        predictions = {"float": boxes, "QAT": boxes[:1]}
        report.samples.append(Sample(image=str(path), predictions=predictions, truth=boxes[1:]))
    report.notes = ["a note about " + LONG]
    return write_html(report, folder / "report.html")


@pytest.mark.parametrize("width", [400, 800, 1200])
def test_a_page_is_shown_whole_and_asks_for_nothing(chromium, page, width):
    seen = chromium.open(page, width)
    assert (seen.complaints, seen.requests) == ([], [])
    assert seen.sideways <= 0
    assert width < 1000 or seen.cut == 0
    assert len(seen.images) == 2 + 3
    assert all(min(one[:4]) > 50 for one in seen.images), seen.images
    shot = Image.open(io.BytesIO(seen.png))
    assert shot.size[0] == width
    assert shot.size[1] > 1000


SPOILED = {
    "console": ("<script>console.error('oh')</script>", "complaints"),
    "exception": ("<script>nothing()</script>", "complaints"),
    "request": ("<img src='http://127.0.0.1:9/a.png'>", "requests"),
    "style": ("<link rel='stylesheet' href='gone.css'>", "requests"),
    "wide": ("<div style='width:1400px'>wide</div>", "sideways"),
    "broken": ("<img src='data:image/png;base64,AAAA'>", "images"),
    "hidden": ("<img style='display:none' src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>", "images"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_the_look_finds_what_is_wrong(chromium, tmp_path, kind):
    markup, where = SPOILED[kind]
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><title>x</title><body>{markup}</body>")
    seen = chromium.open(path, 1300)
    wrong = {
        "complaints": bool(seen.complaints), "requests": bool(seen.requests), "sideways": seen.sideways > 0,
        "images": any(min(one[:4]) == 0 for one in seen.images),
    }  # fmt: skip
    assert wrong[where]
    assert kind not in ("console", "exception", "wide") or list(wrong.values()).count(True) == 1
