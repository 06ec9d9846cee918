"""Report pages as a reader sees them: opened in headless Chromium, where there is one, in three widths."""

from __future__ import annotations

import html
import json
import shutil
import subprocess

import pytest
from PIL import Image
from report_examples import make_row

from utils.reports.page import write_html
from utils.reports.schema import Box, Epoch, Range, Report, Sample

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
LONG = "/a/rather/long/path/to/the/weights/of/a/run/qat_ep_1_ap_0.7872_mask_0.5345_gelan-digits-seg.pt"
WIDTHS = (400, 800, 1200)  # pixels
FRAMES = """<!doctype html><body><script>
const looks = [];
addEventListener("load", () => {
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement;
    for (const element of page.querySelectorAll("details")) element.open = true;
    looks.push({
      sideways: root.scrollWidth - root.clientWidth,
      cut: Math.max(0, ...[...page.querySelectorAll(".scroll")].map(one => one.scrollWidth - one.clientWidth)),
      images: [...page.images].map(one => [one.naturalWidth, one.naturalHeight, one.offsetWidth, one.offsetHeight]),
      fetched: frame.contentWindow.performance.getEntriesByType("resource").map(one => one.name)
        .filter(name => !name.startsWith("data:")),
    });
  }
  document.body.textContent = JSON.stringify(looks);
});
</script>"""


def look(page, folder):
    """How a page's HTML looks in a window of each width: pixels that it is too wide by, sizes of images, requests."""
    frames = (f'<iframe srcdoc="{html.escape(page)}" width="{width}" height="900"></iframe>' for width in WIDTHS)
    (folder / "frames.html").write_text(FRAMES + "".join(frames))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
               f"--user-data-dir={folder / 'home'}", "--dump-dom", (folder / "frames.html").as_uri()]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return json.loads(html.unescape(dom.partition("<body>")[2].partition("</body>")[0]))


@pytest.fixture(params=["detection", "segmentation"])
def page(request, tmp_path):
    """A page with all that a page can have: four stages, two charts, three images of three columns."""
    masks = request.param == "segmentation"
    more = {"mask_ap": 0.53, "mask_ap50": 0.8} if masks else {}
    report = Report(command="python qat.py quantize --weights " + LONG, data=LONG, hardware={"cpu": "a CPU"})
    report.rows = [
        make_row(stage, file=LONG, ap=0.79, size_bytes=231_456_789, ms_per_image=1234.5, **more,
                 measured_on="TensorRT 10.13.0, NVIDIA H200, batch 10, 320x320, strongly typed")
        for stage in ("float", "PTQ", "QAT", "TensorRT INT8")
    ]  # fmt: skip
    report.history = [Epoch(epoch=epoch, ap=0.78, ap50=0.9, **more, held_out=0.4) for epoch in range(3)]
    report.ranges = [
        Range(name=f"model.{number}.cv1.conv.{kind}_quantizer", kind=kind, amax=1.5, min=0.5)
        for number in range(40) for kind in ("activation", "weight")
    ]  # fmt: skip
    outline = ("20,20 60,20 60,60 20,60",) if masks else ()
    boxes = [Box(xyxy=(20, 20, 60, 60), name="a square", score=0.9, outline=outline),
             Box(xyxy=(5, 5, 30, 40), name="small", score=0.4)]  # fmt: skip
    for size in ((320, 320), (640, 200), (100, 300)):
        Image.new("RGB", size, (90, 120, 60)).save(path := tmp_path / f"{size[0]}.png")
        predictions = {"float": boxes, "QAT": boxes[:1]}
        report.samples.append(Sample(image=str(path), predictions=predictions, truth=boxes[1:]))
    report.notes = ["a note about " + LONG]
    return write_html(report, tmp_path / "report.html")


def test_a_page_is_shown_whole_and_asks_for_nothing(page, tmp_path):
    for width, seen in zip(WIDTHS, look(page.read_text(), tmp_path), strict=True):
        assert (seen["sideways"], seen["fetched"]) == (0, [])
        assert width < 1000 or seen["cut"] == 0
        assert len(seen["images"]) == 2 + 3
        assert all(min(sizes) > 50 for sizes in seen["images"]), seen["images"]


@pytest.mark.parametrize(
    ("markup", "wrong"),
    [
        ("<img src='http://127.0.0.1:9/a.png'>", "fetched"),
        ("<div style='width:1400px'>wide</div>", "sideways"),
        ("<img src='data:image/png;base64,AAAA'>", "images"),
    ],
)
def test_the_look_finds_what_is_wrong(tmp_path, markup, wrong):
    for seen in look(f"<!doctype html><title>x</title><body>{markup}</body>", tmp_path):
        found = {**seen, "images": [sizes for sizes in seen["images"] if min(sizes) == 0]}
        assert found[wrong]
