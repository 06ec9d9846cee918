"""scripts/quickstart.sh with the real programs, on a few images of the demo set."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = """
. {root}/scripts/lib.sh
OVERLAY_ROOT=$(cd "$(dirname "${{BASH_SOURCE[0]}}")/.." && pwd)
YOLOV9_CHECKOUT={checkout}
setup_environment() {{ PYTHON={python}; }}
setup_checkout() {{ :; }}
"""


@pytest.fixture(scope="module")
def few_images(demo_data, tmp_path_factory):
    """The demo set with 8 training and 6 validation images."""
    folder = tmp_path_factory.mktemp("few")
    content = yaml.safe_load(demo_data.read_text())
    for split, count in (("train", 8), ("val", 6)):
        images = sorted((demo_data.parent / "images" / split).iterdir())[:count]
        (folder / f"{split}.txt").write_text("".join(f"{image}\n" for image in images))
    (folder / "data.yaml").write_text(
        yaml.safe_dump({**content, "path": str(folder), "train": "train.txt", "val": "val.txt"})
    )
    return folder / "data.yaml"


@pytest.fixture(scope="module")
def done(few_images, checkout, demo_weights, fork_server, tmp_path_factory):
    """The repository's folder that the quickstart ran in, and what it printed."""
    root = tmp_path_factory.mktemp("quickstart")
    (root / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/quickstart.sh", root / "scripts")
    python = fork_server.interpreter(root / "python")
    (root / "scripts/lib.sh").write_text(LIBRARY.format(root=ROOT, checkout=checkout, python=python))
    (root / "data/demo").mkdir(parents=True)
    shutil.copy(demo_weights, root / "data/demo")
    options = ["--epochs", "1", "--iters", "1", "--batch-size", "4", "--device", "cpu", "--data", few_images]
    process = subprocess.run(
        ["bash", root / "scripts/quickstart.sh", *options], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return root, process.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestQuickstart:
    def test_the_table_has_a_row_for_each_stage(self, done):
        root, output = done
        report = json.loads((root / "runs/quickstart/report-merged.json").read_text())
        stages = [row["stage"] for row in report["rows"]]
        assert stages in (["float", "PTQ", "QAT", "ONNX"], ["float", "PTQ", "best (PTQ)", "ONNX"])
        for row in report["rows"]:
            assert row["ap"] > 0.3
            assert row["size_bytes"] == (root / row["file"]).stat().st_size
            assert row["ms_per_image"] > 0
            assert re.search(rf"^{re.escape(row['stage'])} (.* )?{row['ap']:.4f} ", output, re.MULTILINE)
            assert row["measured_on"] in output
        assert "ONNX Runtime" in report["rows"][3]["measured_on"]
        assert abs(report["rows"][3]["ap"] - report["rows"][2]["ap"]) < 0.05, "6 images only"

    def test_the_report_is_complete_and_stands_alone(self, done):
        root, _ = done
        report = json.loads((root / "runs/quickstart/report-merged.json").read_text())
        assert [entry["epoch"] for entry in report["history"]] == [0]
        assert {row["kind"] for row in report["ranges"]} == {"activation", "weight"}
        predictions = [sample["predictions"] for sample in report["samples"]]
        assert [next(iter(drawn)) for drawn in predictions] == ["gelan-digits.pt"] * 4
        assert all(boxes for drawn in predictions for boxes in drawn.values())
        page = (root / "runs/quickstart/report.html").read_text()
        assert page.count("data:image/jpeg") == 4
        assert page.count("data:image/svg+xml") == 2
        assert not re.search(r"https?:", re.sub(r"base64,[A-Za-z0-9+/=]+", "", page))

    def test_no_temporary_file_is_left(self, done):
        run = done[0] / "runs/quickstart"
        hidden = [path for path in run.rglob("*") if path.name.startswith(".") or "tmp" in path.name]
        assert {path.name for path in hidden} == {".quickstart", ".lock"}  # the former tells it its own folders
