"""Rows and reports for tests of them."""

from utils.core.score import Resampled
from utils.reports.schema import Row

NASTY = '<script>alert("x")</script>'


def example_row(stage: str = "float", **changes) -> Row:
    numbers = {"ap": 0.7412, "ap50": 0.9521, "precision": 0.9432, "recall": 0.9018, "seconds": 12.25,
               "size_bytes": 2_812_345, "weights_bytes": 1_812_345, "ms_per_image": 18.21}  # fmt: skip
    words = {"file": f"runs/{stage}.pt", "device": "CPU", "measured_on": "PyTorch 2.11.0, CPU, 2 threads, batch 10"}
    return Row(**{"stage": stage, **words, **numbers, **changes})


def resampled(*ap: float, images: str = "a" * 32, units: int | None = None) -> Resampled:
    return Resampled.of(images, ap, units)
