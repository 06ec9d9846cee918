"""install_dependencies.sh for real, with small packages in place of the large ones, and without a network."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = {
    "runtime.txt": "torch>=2.4\nonnx>=1\nlibraries>=1\n",
    "quantize.txt": "-r runtime.txt\ntorch>=2.8  # newer\nreports>=1\n",
    "dev.txt": "-r quantize.txt\n",
    "tensorrt.txt": "tensorrt>=10\n",
    "openvino.txt": "openvino>=1\n",
    "constraints.txt": "torch==2.11.0\n",
}
PACKAGES = (
    ("torch", "2.4.0"), ("torch", "2.11.0"), ("torch", "2.9.0a0+nv25.8"),  # the last as NVIDIA numbers its builds
    ("onnx", "1.23.2"), ("libraries", "1.0"), ("reports", "1.0"), ("openvino", "1.0"),
)  # fmt: skip


def write_wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "".join(f"{info}/{file},,\n" for file in ("METADATA", "WHEEL", "RECORD")))


# without what the caller has set for Python and its installers, such as another place for compiled modules
PLAIN = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "PIP_"))}


class Project:
    """A copy of the script with requirements that are met by a folder of small wheels."""

    def __init__(self, root: Path) -> None:
        self.root, self.wheels, self.programs = root / "the project", root / "wheels", root / "programs"
        for folder in (self.root / "scripts", self.root / "requirements", self.wheels, self.programs):
            folder.mkdir(parents=True)
        for path in ("install_dependencies.sh", "scripts/lib.sh", "scripts/environment.py"):
            shutil.copy(ROOT / path, self.root / path)
        for name, text in REQUIREMENTS.items():
            (self.root / "requirements" / name).write_text(text)
        for name, version in PACKAGES:
            write_wheel(self.wheels, name, version)

    def program(self, name: str, text: str) -> str:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def install(self, *arguments: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        path = {"PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}", "PYTHON": sys.executable}
        pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}
        command, environment = [self.root / "install_dependencies.sh", *arguments], PLAIN | path | pip | variables
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=120)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Path]:
    """A project after a first run in a folder, which makes that folder's .venv."""
    root = tmp_path_factory.mktemp("installed")
    project, folder = Project(root), root / "a folder"
    folder.mkdir()
    result = project.install(cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "torch 2.11.0" in result.stdout
    assert "not installed: TensorRT: no NVIDIA GPU was found" in result.stdout
    assert "tensorrt" not in {*pip(folder / ".venv", "list").split()}
    return project, folder


def pip(environment: Path, *arguments: str | Path) -> str:
    command = [environment / "bin/python", "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=PLAIN, check=True).stdout


@pytest.mark.parametrize(
    ("arguments", "python", "named"),
    [
        (["--frob"], "", "--frob"),
        (["--venv"], "", "--venv"),
        (["--venv", "thesis"], "", "thesis"),
        (["--system", "--venv", "x"], "", "--system and --venv"),
        (["--runtime", "--dev"], "", "--runtime and --dev"),
        ([], "echo 3.9", "3.10 to 3.13"),
        ([], "echo 3.14", "3.10 to 3.13"),
    ],
)
def test_what_is_refused(project, tmp_path, arguments, python, named):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter1").write_text("")
    variables = {"PYTHON": project.program("python", python)} if python else {}
    result = project.install(*arguments, cwd=tmp_path, **variables)
    assert (result.returncode, result.stderr.startswith("error: "), result.stderr.count("\n")) == (2, True, 1), result
    assert named in result.stderr
    assert (tmp_path / "thesis/chapter1").exists()


def test_optional_parts(project, tmp_path):
    """With a GPU TensorRT can be had, which no wheel is there for; a part that is lacking is no failure."""
    project.program("nvidia-smi", "echo 'GPU 0: NVIDIA H200'")
    for words, told in (("--runtime", "TensorRT: not asked for"), ("--dev --tensorrt", "not installed: tensorrt: ")):
        result = project.install(*words.split(), cwd=tmp_path)
        assert (result.returncode, told in result.stdout) == (0, True), result.stderr
    assert "reports" in {*pip(tmp_path / ".venv", "list").split()}


def test_openvino_comes_where_no_gpu_is_or_where_it_is_asked_for(project, installed, tmp_path):
    assert "openvino" in {*pip(installed[1] / ".venv", "list").split()}
    project.program("nvidia-smi", "echo 'GPU 0: NVIDIA H200'")
    for words, there in (("--runtime", False), ("--runtime --openvino", True)):
        assert project.install(*words.split(), cwd=tmp_path).returncode == 0
        assert ("openvino" in {*pip(tmp_path / ".venv", "list").split()}) == there


def test_running_it_again_installs_only_what_is_missing(installed, tmp_path):
    project, folder = installed
    runs = [
        project.install("--defaults", cwd=folder, PIP_FIND_LINKS="/nowhere"),
        project.install("--venv", folder / ".venv", cwd=tmp_path),
        project.install("--system", "--runtime", cwd=tmp_path, PYTHON=str(folder / ".venv/bin/python")),
    ]
    assert [(run.returncode, ": installed already" in run.stdout) for run in runs] == [(0, True)] * 3
    assert "ready: onnx 1.23.2, openvino 1.0, torch 2.11.0\n" in runs[0].stdout
    assert not (tmp_path / ".venv").exists()
    pip(folder / ".venv", "uninstall", "-y", "reports")
    assert "reports: installed already" not in project.install(cwd=folder).stdout
    assert "reports" in pip(folder / ".venv", "list")


def test_an_installed_torch_stays_if_it_is_new_enough(installed):
    project, folder = installed
    for torch, words, kept in (
        ("2.9.0a0+nv25.8", [], "2.9.0a0+nv25.8"), ("2.4.0", ["--runtime"], "2.4.0"), ("2.4.0", [], "2.11.0"),
    ):  # fmt: skip
        pip(folder / ".venv", "install", "--no-index", "--no-deps", project.wheels / f"torch-{torch}-py3-none-any.whl")
        pip(folder / ".venv", "uninstall", "-y", "reports")
        assert f"torch {kept}" in project.install(*words, cwd=folder).stdout
