"""Fixtures of the tests that run inside a patched YOLOv9 checkout, in a pytest process of their own.

Upstream's `models` and `utils` packages share their names with the repository's folders, so a process sees either one.
scripts/test.sh sets two variables: the patched checkout, and the data.yaml of the demo set; by hand:

    YOLOV9_CHECKOUT=build/yolov9 DEMO_DATA=build/digits/data.yaml pytest tests/golden tests/integration
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork_server import ForkServer

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT, DEMO_DATA = (Path(os.environ.get(name, "/nowhere")).resolve() for name in ("YOLOV9_CHECKOUT", "DEMO_DATA"))
if not ((CHECKOUT / ".yolov9_overlay").is_dir() and DEMO_DATA.is_file()):
    raise pytest.UsageError("YOLOV9_CHECKOUT names no patched checkout, or DEMO_DATA no demo set; use scripts/test.sh")

sys.path[:] = [str(CHECKOUT), *(p for p in sys.path if Path(p or ".").resolve() not in (ROOT, CHECKOUT))]
os.chdir(CHECKOUT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {ROOT / "tests/integration", ROOT / "tests/golden"} & set(item.path.parents):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The patched YOLOv9 checkout; also the working directory."""
    return CHECKOUT


@pytest.fixture(scope="session")
def demo_data() -> Path:
    """`data.yaml` of the generated demo set."""
    return DEMO_DATA


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, demo_data: Path) -> Path:
    """`data.yaml` of a few of its images."""
    from qat_runs import write_small_set

    return write_small_set(tmp_path_factory.mktemp("set"), demo_data)


@pytest.fixture(scope="session")
def demo_weights(checkout: Path) -> Path:
    """The demo model's float checkpoint, as upstream's train.py wrote it."""
    return checkout / "data/demo/gelan-digits.pt"


@pytest.fixture(scope="session")
def small_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float checkpoint of few layers and random weights: its AP on the demo set is small, and differs by state."""
    from forms import lively
    from random_networks import TINY, random_network, save_float

    network = lively(random_network(TINY))
    network.names = {number: str(number) for number in range(10)}  # those of the demo set
    return save_float(tmp_path_factory.mktemp("small") / "gelan-digits.pt", network)


@pytest.fixture(scope="session")
def upstream_yaml(checkout: Path) -> Callable[[str], Path]:
    """Path of an upstream YAML by name: gelan-c, segment/gelan-c-seg."""
    return lambda name: checkout / "models" / (f"{name}.yaml" if "/" in name else f"detect/{name}.yaml")


# What programs import, now and then in the middle of their work: torch's optimizers import its compiler.
WARM = """
import torch._dynamo
from utils import upstream
from utils.upstream.checkout import import_upstream
import_upstream()
upstream.load_float("data/demo/gelan-digits.pt")
from models.quantize.fake_quantize import TensorQuantizer
TensorQuantizer()
import utils.jobs.sensitivity.run
from utils.jobs import benchmark, calibrate, evaluate, export, quantize
from utils.reports import figures
figures.render(figures.new_figure(1.0, 1.0, 1)[0], "png")
import torch.onnx._internal.torchscript_exporter.utils, onnxruntime
"""


@pytest.fixture(scope="session")
def fork_server(checkout: Path) -> Iterator[ForkServer]:
    """Of this checkout."""
    with ForkServer(checkout, WARM) as server:
        yield server


@pytest.fixture(scope="session")
def start(checkout: Path, fork_server: ForkServer) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program with its arguments in the checkout, as a user does: in a process of its own."""
    return lambda *words, timeout=280: fork_server.run(words, checkout, timeout=timeout)


@pytest.fixture(scope="session")
def run(start: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., str]:
    """Runs a program as `start` does, which must end with exit code 0; gives its standard output."""

    def call(*words: object) -> str:
        done = start(*words, timeout=800)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return call


@pytest.fixture
def blank_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots of a report are empty files: where a test looks at other things, a run need not take a second for them."""
    monkeypatch.setattr("utils.reports.figures.render", lambda *_, **_kw: b"")


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str], list[str]]]:
    """Runs a program's main function; gives its exit code, lines on standard output, lines on standard error."""

    def run(main: Callable[[list[str]], int], *words: object) -> tuple[int, list[str], list[str]]:
        code = main([str(word) for word in words])
        streams = capsys.readouterr()
        return code, streams.out.splitlines(), streams.err.splitlines()

    return run
