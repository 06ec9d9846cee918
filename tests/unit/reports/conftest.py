"""Reports that tests of schema, tables, charts and pages share."""

import numpy as np
import pytest
from PIL import Image
from report_examples import example_row, resampled

from utils.reports import figures
from utils.reports.schema import Box, Epoch, Report, Sample


@pytest.fixture
def compared() -> Report:
    """Rows with and without resampled AP, of the float row's images and of others."""
    return Report(command="x", rows=[
        example_row(ap_resampled=resampled(0.74, 0.75, 0.73)),
        example_row("PTQ", ap=0.7361, ap_resampled=resampled(0.73, 0.75, 0.73)),
        example_row("QAT", ap=0.7420, ap_resampled=resampled(0.74, 0.76, 0.72)),
        example_row("ONNX", ap=0.7, ap_resampled=resampled(0.7, 0.7, 0.7, images="b" * 32)),
        example_row("old", ap=0.7500),
        example_row("TensorRT INT8", ap=0.7, ap_with="30 images", ap_resampled=resampled(0.7, 0.7)),
    ])  # fmt: skip


@pytest.fixture
def segmented() -> Report:
    """A float network and its INT8 form with masks; and a detector beside them."""
    masks = {"mask_ap": 0.4412, "mask_ap50": 0.7, "mask_precision": 0.8, "mask_recall": 0.6}
    report = Report(command="x", rows=[
        example_row(ap_resampled=resampled(0.74, 0.75, 0.73), mask_ap_resampled=resampled(0.44, 0.45, 0.43), **masks),
        example_row("PTQ", ap=0.7361, ap_resampled=resampled(0.73, 0.75, 0.73),
                 mask_ap_resampled=resampled(0.43, 0.45, 0.41), **masks | {"mask_ap": 0.43}),
        example_row("detector"),
    ])  # fmt: skip
    report.history = [Epoch(epoch=0, ap=0.73, ap50=0.9, mask_ap=0.43, mask_ap50=0.69, held_out=1.0)]
    return report


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "image.png"
    pixels = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path, pixels


@pytest.fixture
def report(image) -> Report:
    both = Box(xyxy=(5, 5, 25, 30), name="seven", score=0.9)
    only = Box(xyxy=(40, 20, 70, 55), name="one", score=0.6)
    truth = [both.model_copy(update={"score": None})]
    return Report(
        command="python qat.py quantize --weights float.pt", title="A report", hardware={"cpu": "a CPU"},
        notes=["a note"], rows=[example_row(), example_row("PTQ", ap=0.7361, measured_on="somewhere else")],
        history=[Epoch(epoch=1, ap=0.7365, ap50=0.94, loss=0.5, lr=1e-6, seconds=3.5),
                 Epoch(epoch=2, ap=0.7399, ap50=0.95, loss=0.25, lr=1e-5, seconds=3.25, chosen=True)],
        ranges=[{"name": "model.0.conv.weight", "kind": "weight", "amax": 0.75, "min": 0.125, "channels": 16}],
        samples=[Sample(image=str(image[0]), predictions={"float": [both, only], "INT8": [both]}, truth=truth)],
    )  # fmt: skip


@pytest.fixture
def unrendered(monkeypatch):
    """Charts are made, and not rendered, which takes 0.2 s each: for tests of a page's words."""
    monkeypatch.setattr(figures, "render", lambda *_, **__: b"not rendered")
