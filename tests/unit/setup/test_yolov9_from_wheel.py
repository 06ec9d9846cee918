"""scripts/yolov9_from_wheel.py on a small wheel of the same layout: what it changes, and what it refuses."""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/yolov9_from_wheel.py"
INFO = "yolo9-1.0.18.dist-info"
COMMON = """import torch
from yolo9.utils.general import (colours,
                                 edges)  # yolo9 in a comment
from yolo9.export import export_formats


class DetectMultiBackend:
    @staticmethod
    def _model_type(path):
        # suffixes
        known = export_formats()
        return known.index(path)
"""
EXPERIMENTAL = '''"""Ensembles: ä."""
from yolo9.models.yolo import Detect, Model
from yolo9.utils.general import colours


def attempt_load(path):
    """Load it."""
    found = torch.load(path, map_location="cpu", weights_only=False)["model"]
    return found if type(found) in (Detect, Model) else None
'''
GENERAL = """from . import emojis
from .downloads import fetch


def non_max_suppression(prediction, nm=0):
    if isinstance(prediction, list):
        prediction = prediction[0][0]  # first
    return prediction
"""
FILES = {
    "__init__.py": "from yolo9.models.common import DetectMultiBackend\n",
    "data/__ini__.py": "",
    "data/class_names.py": "names = {}\n",
    "data/coco.yaml": "path: yolo9.x\n",
    "models/common.py": COMMON,
    "models/experimental.py": EXPERIMENTAL,
    "models/yolo.py": "import os, yolo9.models.common as common_mod\nfrom yolo9.models.common import *\n",
    "utils/__init__.py": "",
    "utils/general.py": GENERAL,
    "utils/segment/loss.py": "from ..general import crop\nfrom .general import emojis\n",
}


class Wheel:
    """A wheel to be made of files, and the program run on it."""

    def __init__(self, folder: Path) -> None:
        self.path, self.target = folder / "renamed.whl", folder / "checkout"
        self.files = {f"yolo9/{name}": text for name, text in FILES.items()}
        self.files |= {f"{INFO}/METADATA": "Name: yolo9\nRequires-Dist: numpy>=1.18.5\nRequires-Dist: torch\n\ntext\n"}
        self.files |= {f"{INFO}/licenses/LICENSE.md": "a licence\n"}

    def run(self, sha256: str | None = None) -> subprocess.CompletedProcess[str]:
        with zipfile.ZipFile(self.path, "w") as archive:
            for name, text in self.files.items():
                archive.writestr(name, text)
        sha256 = sha256 or hashlib.sha256(self.path.read_bytes()).hexdigest()
        command = [sys.executable, "-B", SCRIPT, self.path, sha256, self.target]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    def refused(self) -> str:
        """The one line that it ends with, having written nothing."""
        result = self.run()
        assert result.returncode == 1, result
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        assert not self.target.exists()
        return result.stderr

    def made(self, name: str) -> str:
        return (self.target / name).read_text()


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    return Wheel(tmp_path)


@pytest.fixture
def made(wheel: Wheel) -> Wheel:
    result = wheel.run()
    assert result.returncode == 0, result.stderr
    return wheel


class TestCheckout:
    def test_files_of_the_package_itself_stay_out(self, made: Wheel):
        files = {path.relative_to(made.target).as_posix() for path in made.target.rglob("*") if path.is_file()}
        assert files == {*FILES, "LICENSE.md", "requirements.txt", "UPSTREAM.md"} - {
            "__init__.py",
            "data/__ini__.py",
            "data/class_names.py",
        }
        assert made.made("requirements.txt") == "numpy>=1.18.5\ntorch\n"
        assert made.made("data/coco.yaml") == FILES["data/coco.yaml"]

    def test_the_stamp_says_where_it_comes_from(self, made: Wheel):
        stamp = made.made("UPSTREAM.md")
        name = "yolo9-1.0.18-py3-none-any.whl"  # whatever the file is called here: the content must not depend on it
        for text in ("yolo9 1.0.18", name, hashlib.sha256(made.path.read_bytes()).hexdigest(), "data/images"):
            assert text in stamp

    def test_imports_lose_the_prefix_and_nothing_else_changes(self, made: Wheel):
        assert made.made("models/yolo.py") == "import os, models.common as common_mod\nfrom models.common import *\n"
        assert "from utils.general import (colours,\n" in made.made("models/common.py")
        assert "# yolo9 in a comment" in made.made("models/common.py")
        assert made.made("utils/segment/loss.py") == FILES["utils/segment/loss.py"]  # relative imports stay

    @pytest.mark.parametrize(
        ("file", "line", "function"),
        [
            ("models/common.py", "from export import export_formats", "_model_type"),
            ("models/experimental.py", "from models.yolo import Detect, Model", "attempt_load"),
        ],
    )
    def test_imports_that_close_a_circle_are_made_where_they_are_used(
        self, made: Wheel, file: str, line: str, function: str
    ):
        tree = ast.parse(made.made(file))
        assert line not in [ast.unparse(node) for node in tree.body]
        found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function]
        assert line in [ast.unparse(node) for node in found[0].body]
        assert ast.get_docstring(found[0]) == ("Load it." if function == "attempt_load" else None)

    def test_no_checkpoint_may_run_code(self, made: Wheel):
        assert 'torch.load(path, map_location="cpu")["model"]' in made.made("models/experimental.py")

    def test_nms_takes_the_first_output_of_all_images(self, made: Wheel):
        assert made.made("utils/general.py") == GENERAL.replace("[0][0]", "[0]")


class TestRefusals:
    def test_another_hash(self, wheel: Wheel):
        result = wheel.run("0" * 64)
        assert result.returncode == 1
        assert "does not have the SHA-256" in result.stderr
        assert not wheel.target.exists()

    def test_no_wheel(self, wheel: Wheel):
        wheel.path.write_text("text")
        command = [sys.executable, SCRIPT, wheel.path, hashlib.sha256(b"text").hexdigest(), wheel.target]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr) == (1, "error: File is not a zip file\n")

    def test_another_version(self, wheel: Wheel):
        wheel.files = {name.replace("1.0.18", "1.0.19"): text for name, text in wheel.files.items()}
        assert "lacks yolo9-1.0.18.dist-info/METADATA; the rules are for yolo9 1.0.18" in wheel.refused()

    def test_a_file_outside(self, wheel: Wheel):
        wheel.files["yolo9/../evil.txt"] = ""
        assert "outside its folder: ../evil.txt" in wheel.refused()

    @pytest.mark.parametrize("name", ["data/__ini__.py", "models/experimental.py", "utils/general.py"])
    def test_a_file_that_a_rule_is_about(self, wheel: Wheel, name: str):
        del wheel.files[f"yolo9/{name}"]
        assert f"lacks {name}" in wheel.refused()

    @pytest.mark.parametrize(
        ("name", "text", "words"),
        [
            ("val.py", "import yolo9.models.common\n", "an import without a name of its own"),
            ("val.py", "import yolo9\n", "an import without a name of its own"),
            ("val.py", "from yolo9 import val\n", "expected from yolo9. in an import"),
            ("val.py", "from  yolo9.models import common\n", "expected from yolo9. in an import"),
            ("val.py", "from . import models\n", "reaches the package itself: from . import models"),
            ("utils/plots.py", "from ..models import common\n", "reaches the package itself"),
            ("val.py", "x = __import__('yolo9.models')\n", "yolo9 is named outside an import: 'yolo9.models'"),
            ("val.py", "def f(:\n", "val.py is not Python"),
            ("val.py", "load(f, weights_only=False)\n", r"expected torch.load(..., weights_only=False)"),
            ("val.py", "torch.load(f, weights_only=True)\n", r"found torch.load(f, weights_only=True)"),
        ],
    )
    def test_statements_that_no_rule_describes(self, wheel: Wheel, name: str, text: str, words: str):
        wheel.files[f"yolo9/{name}"] = text
        assert words in wheel.refused()

    @pytest.mark.parametrize(
        ("name", "old", "new", "words"),
        [
            ("models/common.py", "from yolo9.export import export_formats\n", "", "expected one line: from export"),
            ("models/common.py", "import export_formats", "import export_formats, run", "expected one line"),
            ("models/common.py", "export_formats()", "formats()", "to be used in DetectMultiBackend._model_type and"),
            ("models/common.py", "import torch\n", "import torch\nx = export_formats\n", "nowhere else"),
            ("models/common.py", "_model_type", "_kind", "one definition of DetectMultiBackend._model_type, found 0"),
            ("models/common.py", "import export_formats", "import export_formats; x = 1", "on a line of its own"),
            ("models/experimental.py", "Detect, Model\n", "Model, Detect\n", "import Detect, Model"),
            ("models/experimental.py", "def attempt_load", "class attempt_load:\n  def x", "found a class"),
            ("utils/general.py", "prediction[0][0]", "prediction[0]", "expected one prediction[0][0]"),
        ],
    )
    def test_a_rule_that_does_not_find_what_it_expects(self, wheel: Wheel, name: str, old: str, new: str, words: str):
        before = wheel.files[f"yolo9/{name}"]
        assert before.count(old) == 1
        wheel.files[f"yolo9/{name}"] = before.replace(old, new)
        assert words in wheel.refused()
