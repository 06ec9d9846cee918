"""install_dependencies.sh for real, with small packages in place of the large ones, and without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = {
    "runtime.txt": "torch>=2.4\nlibraries>=1\n",
    "quantize.txt": "-r runtime.txt\ntorch>=2.8  # newer\nreports>=1\n",
    "dev.txt": "-r quantize.txt\n",
    "tensorrt.txt": "tensorrt>=10\n",
    "pytorch-quantization.txt": "pytorch-quantization>=2.1\n",
    "constraints.txt": "torch==2.11.0\npytorch-quantization<2.2\n",
}
PACKAGES = {  # name and version → modules, as scripts/environment.py imports them
    ("torch", "2.4.0"): ["torch"],
    ("torch", "2.11.0"): ["torch"],
    ("torch", "2.9.0a0+nv25.8"): ["torch"],  # as NVIDIA numbers its builds
    ("libraries", "1.0"): [
        *("torchvision", "cv2", "onnx", "onnxruntime", "pycocotools/mask", "matplotlib", "thop"),
        *("onnxslim", "tensorboard", "sklearn", "skimage", "pytest", "coverage", "mypy"),
    ],
    ("reports", "1.0"): [],
    ("pytorch-quantization", "2.1.3"): ["pytorch_quantization"],
    ("pytorch-quantization", "2.2.1"): ["not/the/one/that/was/tested"],
}


def write_wheel(folder: Path, name: str, version: str, modules: list[str]) -> None:
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    content = {f"{module}.py": "" for module in modules} | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{stem}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in content.items():
            wheel.writestr(path, text)


def plain_environment() -> dict[str, str]:
    """Without what the caller has set for Python and its installers, such as another place for compiled modules."""
    ours = ("PYTHON", "VIRTUAL_ENV", "PIP_", "UV_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


class Project:
    """A copy of the script with requirements that are met by a folder of small wheels."""

    def __init__(self, root: Path) -> None:
        self.root, self.wheels, self.programs = root / "the project", root / "wheels", root / "programs"
        for folder in (
            self.root / "scripts",
            self.root / "utils/core",
            self.root / "requirements",
            self.wheels,
            self.programs,
        ):
            folder.mkdir(parents=True)
        modules = ("scripts/environment.py", "interrupts.py", "utils/core/console.py")
        for path in ("install_dependencies.sh", "scripts/lib.sh", *modules):
            shutil.copy(ROOT / path, self.root / path)
        for name, text in REQUIREMENTS.items():
            (self.root / "requirements" / name).write_text(text)
        for (name, version), modules in PACKAGES.items():
            write_wheel(self.wheels, name, version, modules)
        self.program("uv", "exit 1")  # pip does it, so that nothing depends on what this machine has

    def program(self, name: str, text: str) -> Path:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def install(self, *arguments: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = plain_environment() | {
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
        }
        command = [self.root / "install_dependencies.sh", *arguments]
        environment |= variables
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=cwd, check=False, timeout=120
        )


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Path, subprocess.CompletedProcess[str]]:
    """A project after a first run in a folder, which makes that folder's .venv."""
    root = tmp_path_factory.mktemp("installed")
    project, folder = Project(root), root / "a folder"
    folder.mkdir()
    return project, folder, project.install(cwd=folder)


def pip(environment: Path, *arguments: str | Path) -> str:
    command = [environment / "bin/python", "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=plain_environment(), check=True).stdout


@pytest.fixture
def with_pip(installed, tmp_path: Path) -> Path:
    """`.venv` in the test's folder: an environment with nothing but pip, copied, since venv takes 4 s for it."""
    folder, python = tmp_path / ".venv", "lib/python{}.{}/site-packages".format(*sys.version_info)
    venv.create(folder, symlinks=True)
    for package in (installed[1] / ".venv" / python).glob("pip*"):
        shutil.copytree(package, folder / python / package.name)
    return folder


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--frob"], "unknown argument --frob"),
            (["extra"], "unknown argument extra"),
            (["--venv"], "--venv needs a folder"),
            (["--venv="], "unknown argument --venv="),
            (["--system", "--venv", "x"], "exclude each other"),
            (["--runtime", "--dev"], "exclude each other"),
            (["--quantizer", "other"], "choose torch or pytorch-quantization"),
            (["--quantizer", "modelopt"], "was removed in 2.0: use --quantizer torch"),
            (["--quantizer"], "--quantizer needs a name"),
            (["--runtime", "--quantizer", "pytorch-quantization"], "exclude each other"),
        ],
    )
    def test_bad_ones(self, project: Project, tmp_path: Path, arguments: list[str], words: str):
        assert_refused(project.install(*arguments, cwd=tmp_path), words)

    def test_help_lists_every_option(self, project: Project, tmp_path: Path):
        result = project.install("-h", cwd=tmp_path)
        assert result.returncode == 0
        for option in ("--venv", "--system", "--defaults", "--tensorrt", "--trex", "--no-trex", "--dev", "--runtime"):
            assert option in result.stdout

    @pytest.mark.parametrize("version", ["2.7", "3.9", "3.14"])
    def test_a_python_out_of_range(self, project: Project, tmp_path: Path, version: str):
        other = project.program("python3", f"echo {version}")
        for variables in ({"PYTHON": str(other)}, {"PYTHON": ""}):
            result = project.install("--dry-run", cwd=tmp_path, **variables)
            assert_refused(result, f"is Python {version}", "3.10 to 3.13")

    def test_no_python(self, project: Project, tmp_path: Path):
        assert_refused(project.install(cwd=tmp_path, PYTHON="nowhere/python3"), "nowhere/python3 does not run")

    def test_a_folder_that_is_no_environment(self, project: Project, tmp_path: Path):
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis/chapter1").write_text("")
        assert_refused(project.install("--venv", "thesis", cwd=tmp_path), "is no virtual environment")
        assert (tmp_path / "thesis/chapter1").exists()


class TestPlan:
    def test_dry_run_changes_nothing(self, project: Project, tmp_path: Path):
        folder = tmp_path / "empty"
        folder.mkdir()
        result = project.install("--dry-run", "--defaults", cwd=folder)
        assert result.returncode == 0
        assert "requirements/quantize.txt" in result.stdout
        assert "virtual environment .venv" in result.stdout
        assert not list(folder.iterdir())

    def test_without_a_gpu_tensorrt_is_not_tried(self, project: Project, tmp_path: Path):
        project.program("nvidia-smi", "echo 'No devices were found'; exit 6")
        result = project.install("--dry-run", "--tensorrt", cwd=tmp_path)
        assert "skip: TensorRT (no NVIDIA GPU was found on this machine)" in result.stdout

    def test_with_a_gpu(self, project: Project, tmp_path: Path):
        project.program("nvidia-smi", "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'")
        assert "skip: TensorRT (not asked for" in project.install("--dry-run", cwd=tmp_path).stdout
        assert "install: TensorRT" in project.install("--dry-run", "--tensorrt", cwd=tmp_path).stdout

    def test_dev_and_graphviz(self, project: Project, tmp_path: Path):
        plan = project.install("--dry-run", "--dev", "--trex", cwd=tmp_path).stdout
        assert "requirements/dev.txt" in plan
        assert "graphviz" in plan
        assert "graphviz" not in project.install("--dry-run", "--no-trex", cwd=tmp_path).stdout


class TestInstalling:
    def test_a_first_run(self, installed):
        _, folder, result = installed
        assert result.returncode == 0, result.stderr
        assert "ready: Python" in result.stdout
        assert "torch 2.11.0" in result.stdout
        assert not list((folder / ".venv").rglob("pytorch_quantization")), "an optional library"
        assert "not installed: TensorRT: no NVIDIA GPU was found" in result.stdout
        assert "Without it works: quantizing" in result.stdout
        assert (folder / ".venv/bin/python").exists()

    def test_a_second_run_installs_nothing(self, installed):
        project, folder, _ = installed
        result = project.install("--defaults", cwd=folder, PIP_FIND_LINKS="/nowhere")
        assert result.returncode == 0
        assert "quantize: installed already" in result.stdout
        assert "Installing" not in result.stdout

    def test_from_another_folder(self, installed, tmp_path: Path):
        project, folder, _ = installed
        result = project.install("--venv", folder / ".venv", cwd=tmp_path)
        assert "installed already" in result.stdout
        assert not (tmp_path / ".venv").exists()

    def test_a_part_of_what_is_there(self, installed):
        project, folder, _ = installed
        assert "runtime: installed already" in project.install("--runtime", cwd=folder).stdout

    def test_a_package_that_was_removed_comes_back(self, installed):
        project, folder, _ = installed
        pip(folder / ".venv", "uninstall", "-y", "reports")
        result = project.install(cwd=folder)
        assert "installing quantize with pip" in result.stdout
        assert "reports" in pip(folder / ".venv", "list")

    def test_a_part_that_fails_is_named(self, installed):
        project, folder, _ = installed
        project.program("nvidia-smi", "echo 'GPU 0: pretended'")
        try:
            result = project.install("--tensorrt", cwd=folder)
        finally:
            (project.programs / "nvidia-smi").unlink()
        assert result.returncode == 0
        assert "not installed: tensorrt: it could not be installed" in result.stdout
        assert "No matching distribution found for tensorrt>=10" in result.stdout
        assert "evaluating ONNX files on ONNX Runtime" in result.stdout

    def test_a_quantizer_library_in_its_tested_version(self, installed):
        project, folder, _ = installed
        name = "pytorch-quantization"
        assert f"install: {name}" in project.install("--dry-run", "--quantizer", name, cwd=folder).stdout
        result = project.install("--quantizer", name, cwd=folder)
        assert result.returncode == 0
        assert f"not installed: {name}" not in result.stdout
        assert f"{name} 2.1.3" in " ".join(pip(folder / ".venv", "list").split())
        assert "torch 2.11.0" in result.stdout
        again = project.install("--quantizer", name, cwd=folder)
        assert f"{name}: installed already" in again.stdout
        pip(folder / ".venv", "uninstall", "-y", name)

    def test_the_default_quantizer_needs_nothing(self, installed):
        project, folder, _ = installed
        plan = project.install("--dry-run", "--quantizer", "torch", cwd=folder).stdout
        assert plan == project.install("--dry-run", cwd=folder).stdout

    def test_graphviz_by_apt(self, installed, tmp_path: Path):
        project, folder, _ = installed
        project.program("apt-get", f'echo "$@" >> {tmp_path}/calls; echo "Unable to locate it"; exit 100')
        bare = tmp_path / "bin"  # a PATH on which dot is not
        bare.mkdir()
        for name in ("bash", "dirname", "grep", "tail", "ls", "printf", "mktemp", "rm", "cat"):
            (bare / name).symlink_to(shutil.which(name) or "")
        path = f"{project.programs}:{bare}"
        for user, words in (
            ("0", "apt-get install graphviz failed: Unable to locate it"),
            ("7", "sudo apt-get install"),
        ):
            project.program("id", f"echo {user}")
            result = project.install("--trex", cwd=folder, PATH=path)
            assert result.returncode == 0, result.stderr
            assert f"not installed: graphviz: {'its program dot' if user == '7' else ''}" in result.stdout
            assert words in result.stdout
        assert (tmp_path / "calls").read_text().splitlines() == ["update"]
        (project.programs / "apt-get").unlink()
        result = project.install("--trex", cwd=folder, PATH=path)
        assert "there is no apt-get" in result.stdout

    def test_an_installed_torch_that_is_new_enough_stays(self, installed):
        project, folder, _ = installed
        nvidias = project.wheels / "torch-2.9.0a0+nv25.8-py3-none-any.whl"
        pip(folder / ".venv", "install", "--no-index", "--no-deps", nvidias)
        pip(folder / ".venv", "uninstall", "-y", "reports")
        assert "torch 2.9.0a0+nv25.8" in project.install(cwd=folder).stdout

    def test_an_installed_torch_that_is_too_old_is_replaced(self, installed):
        project, folder, _ = installed
        pip(folder / ".venv", "install", "--no-index", project.wheels / "torch-2.4.0-py3-none-any.whl")
        assert "torch 2.4.0" in project.install("--runtime", cwd=folder).stdout
        assert "torch 2.11.0" in project.install(cwd=folder).stdout

    def test_a_package_that_cannot_be_had(self, project: Project, with_pip: Path, tmp_path: Path):
        (project.wheels / "libraries-1.0-py3-none-any.whl").unlink()
        result = project.install(cwd=tmp_path)
        assert "using the virtual environment .venv" in result.stdout
        assert result.returncode == 1
        assert "requirements/quantize.txt could not be installed" in result.stderr
        assert "libraries" in result.stderr

    def test_nvidias_torch_without_a_torchvision_that_fits(self, project: Project, with_pip: Path, tmp_path: Path):
        (project.root / "requirements/runtime.txt").write_text("torch>=2.4\ntorchvision>=0.19\n")
        pip(with_pip, "install", "--no-index", "--no-deps", project.wheels / "torch-2.9.0a0+nv25.8-py3-none-any.whl")
        result = project.install("--runtime", cwd=tmp_path)
        assert result.returncode == 1
        assert "torchvision" in result.stderr
        assert result.stderr.splitlines()[-1].endswith(
            "the reason is above; torch 2.9.0a0+nv25.8 is not PyPI's, whose torchvision does not fit it: first install "
            "one that was built for it"
        )

    def test_what_is_installed_and_does_not_import_is_named(self, project: Project, with_pip: Path, tmp_path: Path):
        write_wheel(project.wheels, "libraries", "1.1", ["torchvision", "cv2"])
        result = project.install(cwd=tmp_path)
        assert result.returncode == 1
        assert "import onnx: ModuleNotFoundError" in result.stderr
        assert project.install(cwd=tmp_path).returncode == 1, "a failed check must not count as installed"

    def test_the_current_environment(self, installed, tmp_path: Path):
        project, folder, _ = installed
        result = project.install("--system", cwd=tmp_path, PYTHON=str(folder / ".venv/bin/python"))
        assert "installed already" in result.stdout
        assert not (tmp_path / ".venv").exists()

    def test_a_python_that_the_operating_system_manages(self, project: Project, tmp_path: Path):
        # A stand-in that can only answer questions, so that nothing is ever installed into a real interpreter.
        python = project.program(
            "python3",
            'case "$*" in *managed) ;; *version_info*) echo 3.11 ;; *executable*) echo "$0" ;; *) exit 9 ;; esac',
        )
        result = project.install("--system", cwd=tmp_path, PYTHON=str(python))
        assert result.returncode == 1
        assert "belongs to the operating system" in result.stderr


class TestManaged:
    @pytest.mark.parametrize("marked", [True, False])
    @pytest.mark.parametrize("in_venv", [True, False])
    def test_mark_of_the_operating_system(self, environment, monkeypatch, tmp_path: Path, marked: bool, in_venv: bool):
        if marked:
            (tmp_path / "EXTERNALLY-MANAGED").write_text("")
        monkeypatch.setattr(environment.sysconfig, "get_path", lambda name: str(tmp_path))
        monkeypatch.setattr(sys, "base_prefix", sys.prefix + ("/elsewhere" if in_venv else ""))
        assert environment.main(["managed"]) == (0 if marked and not in_venv else 1)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """scripts/environment.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import environment

    for name in (*environment.UV_NAMES.values(), "UV_INDEX_STRATEGY"):
        monkeypatch.delenv(name, raising=False)
    return environment


class TestConstraints:
    @pytest.mark.parametrize(
        ("installed", "wanted"),
        [
            ({}, ["torch==2.11.0", "torchvision==0.26.0"]),
            ({"torch": "2.9.0", "torchvision": "0.24.0"}, ["torch==2.9.0", "torchvision==0.24.0"]),
            ({"torch": "2.12.1"}, ["torch==2.12.1"]),  # which torchvision fits it, the installer finds out
            ({"torch": "2.4.0", "torchvision": "0.19.0"}, ["torch==2.11.0", "torchvision==0.26.0"]),
        ],
    )
    def test_what_is_installed_and_new_enough_stays(
        self, environment, monkeypatch, tmp_path: Path, installed: dict[str, str], wanted: list[str]
    ):
        (tmp_path / "quantize.txt").write_text("torch>=2.8\ntorchvision>=0.23\n")
        (tmp_path / "constraints.txt").write_text("torch==2.11.0\ntorchvision==0.26.0\n")
        monkeypatch.setattr(environment, "FOLDER", tmp_path)
        found = [SimpleNamespace(metadata={"Name": name}, version=version) for name, version in installed.items()]
        monkeypatch.setattr(environment.metadata, "distributions", lambda: found)
        monkeypatch.setattr(environment.metadata, "version", lambda name: version_of(installed, name))
        assert list(environment.constraints("quantize")) == wanted


@pytest.mark.parametrize(
    ("installed", "helps"),
    [
        ({}, False),
        ({"torch": "2.8.0+cu126"}, False),
        ({"torch": "2.5.0a0+872d972e41.nv24.8"}, True),
        ({"torch": "2.5.0a0+872d972e41.nv24.8", "torchvision": "0.20.0a0+afc54f7"}, False),
    ],
)
def test_a_hint_where_torch_is_of_another_index(environment, monkeypatch, installed: dict[str, str], helps: bool):
    found = [SimpleNamespace(metadata={"Name": name}, version=version) for name, version in installed.items()]
    monkeypatch.setattr(environment.metadata, "distributions", lambda: found)
    assert bool(environment.hint()) == helps


def version_of(installed: dict[str, str], name: str) -> str:
    if name not in installed:
        raise PackageNotFoundError(name)
    return installed[name]


class TestUvSettings:
    """uv does not read pip's settings: they are handed over."""

    def lines(self, environment, monkeypatch: pytest.MonkeyPatch, output: str) -> list[str]:
        result = subprocess.CompletedProcess([], 0, output, "")
        monkeypatch.setattr(subprocess, "run", lambda *a, **k: result)
        return list(environment.uv_settings())

    def test_indexes(self, environment, monkeypatch: pytest.MonkeyPatch):
        output = (
            "global.extra-index-url='\\nhttps://a/simple\\nhttps://b/simple'\nglobal.index-url='https://c/simple'\n"
        )
        assert self.lines(environment, monkeypatch, output) == [
            "export UV_INDEX='https://a/simple https://b/simple'",
            "export UV_DEFAULT_INDEX=https://c/simple",
            "export UV_INDEX_STRATEGY=unsafe-best-match",
        ]

    def test_other_settings_and_nothing(self, environment, monkeypatch: pytest.MonkeyPatch):
        assert self.lines(environment, monkeypatch, "global.timeout='60'\ndownload.index-url='https://c'\n") == []
        assert self.lines(environment, monkeypatch, "") == []

    def test_uvs_own_settings_win(self, environment, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("UV_DEFAULT_INDEX", "https://mine")
        assert self.lines(environment, monkeypatch, "global.index-url='https://c/simple'\n") == []

    def test_a_value_is_quoted_for_the_shell(self, environment, monkeypatch: pytest.MonkeyPatch):
        assert self.lines(environment, monkeypatch, "global.cert='/a;rm -rf'\n") == ["export SSL_CERT_FILE='/a;rm -rf'"]
