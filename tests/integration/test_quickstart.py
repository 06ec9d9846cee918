"""scripts/quickstart.sh with the real programs, on a few images of the demo set."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from qat_runs import write_small_set

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = """
. {root}/scripts/lib.sh
OVERLAY_ROOT=$(cd "$(dirname "${{BASH_SOURCE[0]}}")/.." && pwd)
YOLOV9_CHECKOUT={checkout}
setup_environment() {{ PYTHON={python}; }}
setup_checkout() {{ :; }}
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_set_comes_to_a_report(demo_data, checkout, demo_weights, fork_server, tmp_path):
    root = tmp_path / "a repository"
    for folder in ("scripts", "data/demo"):
        (root / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/quickstart.sh", root / "scripts")
    python = fork_server.interpreter(tmp_path / "python")
    (root / "scripts/lib.sh").write_text(LIBRARY.format(root=ROOT, checkout=checkout, python=python))
    shutil.copy(demo_weights, root / "data/demo")
    data = write_small_set(tmp_path / "few", demo_data, train=8, val=6)
    options = ["--epochs", "1", "--iters", "1", "--batch-size", "4", "--device", "cpu", "--data", data]
    done = subprocess.run(
        ["bash", root / "scripts/quickstart.sh", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    run = root / "runs/quickstart"
    report = json.loads((run / "report-merged.json").read_text())
    stages = [row["stage"] for row in report["rows"]]
    assert stages in (["float", "PTQ", "QAT", "ONNX"], ["float", "PTQ", "best (PTQ)", "ONNX"])
    for row in report["rows"]:
        assert row["ap"] > 0.3
        assert row["size_bytes"] == (root / row["file"]).stat().st_size
        assert row["ms_per_image"] > 0
        assert re.search(rf"^{re.escape(row['stage'])} (.* )?{row['ap']:.4f} ", done.stdout, re.MULTILINE)
        assert row["measured_on"] in done.stdout
    assert "ONNX Runtime" in report["rows"][3]["measured_on"]
    assert abs(report["rows"][3]["ap"] - report["rows"][2]["ap"]) < 0.05, "6 images only"

    assert [entry["epoch"] for entry in report["history"]] == [0]
    assert {row["kind"] for row in report["ranges"]} == {"activation", "weight"}
    predictions = [sample["predictions"] for sample in report["samples"]]
    assert [next(iter(drawn)) for drawn in predictions] == ["gelan-digits.pt"] * 4
    assert all(boxes for drawn in predictions for boxes in drawn.values())
    page = (run / "report.html").read_text()
    assert (page.count("data:image/jpeg"), page.count("data:image/svg+xml")) == (4, 2)
    assert not re.search(r"https?:", re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)), "it stands alone"
    hidden = {path.name for path in run.rglob("*") if path.name.startswith(".") or "tmp" in path.name}
    assert hidden == {".quickstart", ".lock"}  # the former tells it its own folders
