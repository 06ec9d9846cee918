"""Integration tests run inside a patched YOLOv9 checkout, in a pytest process of their own.

Upstream's `models` and `utils` packages share their names with the repository's folders, so a process sees either one.
scripts/test.sh sets the two variables; by hand:

    YOLOV9_CHECKOUT=build/yolov9 DEMO_DATA=build/digits/data.yaml pytest tests/integration
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# One thread, here and in the programs that tests start: sums depend on how many threads share them, and tests
# compare runs bit for bit. Set before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def _path_from(variable: str, meaning: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        raise pytest.UsageError(f"{variable} is not set; it names {meaning} (scripts/test.sh sets it)")
    path = Path(value).resolve()
    if not path.exists():
        raise pytest.UsageError(f"{variable} is {value}, which does not exist; it names {meaning}")
    return path


CHECKOUT = _path_from("YOLOV9_CHECKOUT", "a YOLOv9 checkout that patch_yolov9.sh has patched")
DEMO_DATA = _path_from("DEMO_DATA", "the data.yaml of the demo set (data/demo/make_digits.py makes it)")
if not (CHECKOUT / ".yolov9_overlay").is_dir():
    raise pytest.UsageError(f"{CHECKOUT} is not patched; run ./patch_yolov9.sh {CHECKOUT}")

sys.path[:] = [str(CHECKOUT), *(p for p in sys.path if Path(p or ".").resolve() not in (ROOT, CHECKOUT))]
os.chdir(CHECKOUT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The patched YOLOv9 checkout; also the working directory."""
    return CHECKOUT


@pytest.fixture(scope="session")
def demo_data() -> Path:
    """`data.yaml` of the generated demo set."""
    return DEMO_DATA


@pytest.fixture(scope="session")
def demo_weights(checkout: Path) -> Path:
    """The demo model's float checkpoint, as upstream's train.py wrote it."""
    return checkout / "data/demo/gelan-digits.pt"


@pytest.fixture(scope="session")
def upstream_yaml(checkout: Path) -> Callable[[str], Path]:
    """Path of an upstream YAML by name: gelan-c, segment/gelan-c-seg."""

    def find(name: str) -> Path:
        path = checkout / "models" / (f"{name}.yaml" if "/" in name else f"detect/{name}.yaml")
        assert path.is_file(), f"{path} is missing; make the checkout again (scripts/get_yolov9.sh)"
        return path

    return find
