"""scripts/yolov9_from_wheel.py on a small wheel of the same layout. Of the real one, get_yolov9.sh knows the result."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/yolov9_from_wheel.py"
INFO = "yolo9-1.0.18.dist-info"
# file of the wheel → what becomes of it; None: left out, True: the same
FILES = {
    "__init__.py": ("from yolo9.models.common import AutoShape\n", None),
    "data/class_names.py": ("names = {}\n", None),
    "data/coco.yaml": ("path: yolo9.x\n", True),
    "utils/segment/loss.py": ("from ..general import crop\nfrom .general import emojis\n", True),
    "models/yolo.py": (
        "import yolo9.models.common as common_mod\n#from yolo9.x import y\nif 1:\n    from yolo9.models import tf\n",
        "import models.common as common_mod\n#from yolo9.x import y\nif 1:\n    from models import tf\n",
    ),
    "models/common.py": (
        "from yolo9.export import export_formats\ndef _model_type(p):\n    # types\n    sf = list(export_formats())\n",
        "def _model_type(p):\n    # types\n    from export import export_formats\n    sf = list(export_formats())\n",
    ),
    "models/experimental.py": (
        "from yolo9.models.yolo import Detect, Model\ndef attempt_load(w):\n    m = Ensemble()\n"
        "    return torch.load(w, map_location='cpu', weights_only=False)\n",
        "def attempt_load(w):\n    from models.yolo import Detect, Model\n    m = Ensemble()\n"
        "    return torch.load(w, map_location='cpu')\n",
    ),
    "utils/general.py": (
        "def non_max_suppression(p):\n    prediction = prediction[0][0]\n",
        "def non_max_suppression(p):\n    prediction = prediction[0]\n",
    ),
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / "renamed.whl", "w") as archive:
        for name, (text, _) in FILES.items():
            archive.writestr(f"yolo9/{name}", text)
        archive.writestr(
            f"{INFO}/METADATA", "Name: yolo9\nRequires-Dist: numpy>=1.18.5\nRequires-Dist: torch\n\ntext\n"
        )
        archive.writestr(f"{INFO}/licenses/LICENSE.md", "a licence\n")
    return tmp_path / "renamed.whl"


def convert(wheel: Path, sha256: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", SCRIPT, wheel, sha256, wheel.parent / "checkout"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_checkout(wheel: Path):
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert convert(wheel, sha256).returncode == 0
    checkout = wheel.parent / "checkout"
    made = {path.relative_to(checkout).as_posix(): path.read_text() for path in checkout.rglob("*") if path.is_file()}
    stamp = made.pop("UPSTREAM.md")
    assert sha256 in stamp
    assert "yolo9-1.0.18-py3-none-any.whl" in stamp  # whatever the file is called here
    wanted = {name: text if becomes is True else becomes for name, (text, becomes) in FILES.items() if becomes}
    assert made == wanted | {"LICENSE.md": "a licence\n", "requirements.txt": "numpy>=1.18.5\ntorch\n"}


@pytest.mark.parametrize("there", [True, False])
def test_another_file_makes_nothing(wheel: Path, there: bool):
    done = convert(wheel if there else wheel.with_name("nowhere.whl"), "0" * 64)
    assert (done.returncode, done.stderr.startswith("error: "), done.stderr.count("\n")) == (1, True, 1)
    assert not (wheel.parent / "checkout").exists()
