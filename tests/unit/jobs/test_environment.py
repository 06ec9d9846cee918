"""What a bug report is asked for: complete where libraries and a GPU are, useful where they are not, and anonymous."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from one_conv import write_onnx

from models.quantize import checkpoint
from utils.cli import run_program
from utils.core.errors import CheckpointError
from utils.core.files import save_torch
from utils.jobs import environment
from utils.trt import tensorrt_api
from utils.trt.engine_file import EngineNote

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "scripts"))
import make_report  # noqa: E402

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org")


def lines(text: str) -> dict[str, str]:
    """What stands behind each name; of a name that stands there twice, the last."""
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines() if line)}


def run(*words) -> int:
    return run_program(make_report.make_parser(), make_report.main, [str(word) for word in words])


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_it_says_what_is_there(capsys):
    assert run("--environment") == 0
    found = lines(capsys.readouterr().out)
    assert found["overlay"].startswith((ROOT / "VERSION").read_text().strip())
    assert found["Python"] == sys.version.split()[0]
    assert found["torch"].startswith(f"{torch.__version__.split('+')[0]}")
    assert f"CUDA {torch.version.cuda or 'none'}" in found["torch"]
    assert "CPUExecutionProvider" in found["onnxruntime"]
    assert "Linux" in found["system"] or sys.platform != "linux"


def test_it_works_where_nothing_is_installed(tmp_path):
    """A Python without site-packages and a PATH without programs; the files are there, what reads them is not."""
    (tmp_path / "a.onnx").write_bytes(b"1")
    (tmp_path / "a.pt").write_bytes(b"2")
    command = [sys.executable, "-S", "scripts/make_report.py", "--environment", tmp_path / "a.onnx", tmp_path / "a.pt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env={"PATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    head, of_onnx, of_pt = (lines(part) for part in done.stdout.split("\n\n"))
    assert {head[name] for name in ("torch", "onnxruntime", "tensorrt")} == {"not installed"}
    assert head["GPU"] == "none found"
    assert "pip install onnx" in of_onnx["cannot be read"]
    assert "needs torch" in of_pt["cannot be read"]
    assert hashlib.sha256(b"1").hexdigest() in of_onnx["size"]


def test_gpus_are_those_of_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    program(tmp_path, "nvidia-smi", """case "$*" in
      *--query-gpu*) echo 'NVIDIA A, 9.0, 100 MiB, 550.1'; echo 'NVIDIA B, 8.7, 50 MiB, 550.1' ;;
      *) echo '| NVIDIA-SMI 550.1   Driver Version: 550.1   CUDA Version: 12.4 |' ;;
    esac""")  # fmt: skip
    text = environment.describe()
    assert "NVIDIA A, 9.0, 100 MiB, driver 550.1\n" in text
    assert "NVIDIA B, 8.7, 50 MiB, driver 550.1\n" in text
    assert lines(text)["CUDA of the driver"] == "12.4"


def test_a_gpu_that_only_torch_sees_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tensorrt_api, "gpu", lambda: tensorrt_api.Gpu("Orin", "SM87", 1))
    assert lines(environment.describe())["GPU"].startswith("Orin, SM87, driver unknown")


def test_a_jetson_says_its_release(tmp_path, monkeypatch):
    (tmp_path / "release").write_text("# R36 (release), REVISION: 4.3, BOARD: generic\n# more\n")
    monkeypatch.setattr(environment, "TEGRA", tmp_path / "release")
    assert lines(environment.describe())["Jetson Linux"] == "R36 (release), REVISION: 4.3, BOARD: generic"


def test_a_library_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    (tmp_path / "onnxruntime.py").write_text("raise OSError('/home/ann/lib/libcudart.so: no such file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    found = lines(environment.describe())
    assert found["onnxruntime"].endswith("(cannot be imported: OSError: .../libcudart.so: no such file)")


def test_an_onnx_file_says_what_it_is_and_not_whose(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann mary")
    monkeypatch.setattr(environment, "_user", lambda: "annmary")
    monkeypatch.setattr(environment.platform, "node", lambda: "big-box")
    metadata = {
        "names": json.dumps({0: "secret thing", 1: "other"}), "stride": "32", "kind": "ptq", "empty": "",
        "made_from": "/home/ann mary/project x/best.pt", "data": "/data/bob lee/set.yaml",
        "note": "annmary on big-box, annmarys",
    }  # fmt: skip
    file = write_onnx(tmp_path / "a.onnx", quantized=True, metadata=metadata)
    text = environment.describe([file])
    found = lines(text)
    assert (found["file"], found["names"], found["stride"]) == ("a.onnx", "2 classes", "32")
    assert "Q/DQ nodes" in found["operators"]
    assert found["input"].startswith("images [")
    assert found["note"] == "USER on HOST, annmarys"
    assert "empty" not in found
    assert (found["made_from"], found["data"]) == (".../best.pt", ".../set.yaml")
    for private in ("secret", "lee", "project", "ann mary", "big-box", str(tmp_path)):
        assert private not in text


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("{0: 'a', 1: 'b'}", "2 classes"),
        ("['a']", "1 classes"),
        ("7", "no list of classes"),
        ("[" * 9999, "no list of"),
    ],
)
def test_class_names_as_others_write_them(tmp_path, names, said):
    """The first as upstream's export.py does; the last is deeply nested."""
    file = write_onnx(tmp_path / "a.onnx", metadata={"names": names})
    assert lines(environment.describe([file]))["names"].startswith(said)


def test_an_engine_says_what_is_noted_beside_it(tmp_path):
    engine = tmp_path / "a.engine"
    engine.write_bytes(b"plan")
    assert "there is none" in lines(environment.describe([engine]))["note"]
    EngineNote(onnx="/home/ann/a.onnx", api="TensorRT 8.6.0", gpu="NVIDIA A", metadata={"typing": "weak"}).save(engine)
    found = lines(environment.describe([engine]))
    assert (found["onnx"], found["api"], found["gpu"]) == (".../a.onnx", "TensorRT 8.6.0", "NVIDIA A")
    assert found["typing"] == "weak"
    (tmp_path / "a.engine.json").write_text("{")
    assert "damaged" in lines(environment.describe([engine]))["cannot be read"]


def test_checkpoints_say_what_they_are(tmp_path):
    content = {
        "format": "yolov9-quantized", "format_version": 1, "version": "0.1.0", "names": {0: "a"}, "nc": 1,
        "recipe": {"float": []}, "yaml": {"head": []}, "quantized_state": {"w": torch.zeros(2)},
    }  # fmt: skip
    save_torch(content, tmp_path / "int8.pt")
    found = lines(environment.describe([tmp_path / "int8.pt"]))
    assert (found["version"], found["names"], found["recipe"]) == ("0.1.0", "1 classes", "{'float': []}")
    assert not {"quantized_state", "yaml"} & set(found)
    assert "float checkpoint" in lines(environment.describe([ROOT / "data/demo/gelan-digits.pt"]))["kind"]
    (tmp_path / "cut.pt").write_bytes((tmp_path / "int8.pt").read_bytes()[:400])
    with pytest.raises(CheckpointError):
        checkpoint.summary(tmp_path / "cut.pt")
    assert "cut.pt" in lines(environment.describe([tmp_path / "cut.pt"]))["cannot be read"]


def test_a_checkout_says_its_commit_and_where_it_came_from(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert "unknown" in lines(environment.describe())["upstream"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run([*GIT, *words], cwd=tmp_path, check=True)
    head = subprocess.run([*GIT, "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert lines(environment.describe())["upstream"] == f"commit {head.strip()}"
    (tmp_path / "UPSTREAM.md").write_text("# Title\n\nPyPI's wheel yolo9 1.0.18 (yolo9-...whl), SHA-256\nabc\n")
    assert lines(environment.describe())["upstream"] == "PyPI's wheel yolo9 1.0.18"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("/home/ann/a/b.onnx", ".../b.onnx"),
        ("cannot load '/home/ann/a/b.onnx': no", "cannot load '.../b.onnx': no"),
        ("~/a/b.onnx and C:\\Users\\ann\\b.onnx", ".../b.onnx and .../b.onnx"),
        ("runs/qat/exp/a.pt, 1/255, FP16/INT8", "runs/qat/exp/a.pt, 1/255, FP16/INT8"),
        ("see https://docs.nvidia.com/a/b", "see https://docs.nvidia.com/a/b"),
    ],
)
def test_paths_lose_their_folders(text, kept):
    assert environment.without_folders(text) == kept


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give run folders"),
        (["--environment", "--output", "out"], "--output does nothing with --environment"),
        (["--environment", "missing.onnx"], "missing.onnx does not exist"),
        (["--environment", ROOT / "README.md"], "cannot tell what it is by its name"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, said, capsys):
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1
