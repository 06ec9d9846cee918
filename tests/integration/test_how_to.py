"""The commands of how-to pages that need no GPU, run as they are printed, on a small network and a few images.

What differs from the page: the names of its files stand for small ones, an engine's name for its ONNX file, results go
to a folder of the test, and options make the runs short.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from documentation import ROOT, commands
from qat_runs import SMALL_RUN
from random_networks import save_quantized

from utils.evaluation.data_yaml import load_data
from utils.evaluation.image_files import find_images

SIZE = ("--imgsz", "96")
QUICK = (*SIZE, "--workers", "0")
FEW = SMALL_RUN[: SMALL_RUN.index("--iters")]  # of commands that do not train
SHORT = {  # a program and what tells its kind → options that make it short and keep results in the folder of the test
    "qat.py quantize": [*SMALL_RUN, "--epochs", "1", "--no-plots", "--project", "runs/qat"],
    "qat.py calibrate": [*FEW, "--num-image", "4", "--project", "runs/qat_calibrate"],
    "qat.py sensitive": [*FEW, "--num-image", "4", "--granularity", "module", "--project", "runs/qat_sensitive"],
    "export_qat.py": [*SIZE, "--device", "cpu"],
    "export_yoloV9.py": [*SIZE, "--device", "cpu"],
    "val_trt.py": [*QUICK, "--device", "cpu", "--force", "--project", "runs/val_trt"],
    "val_trt.py --source": [*SIZE, "--device", "cpu", "--project", "runs/val_trt"],
    "val_trt.py openvino": [*QUICK, "--force", "--project", "runs/val_trt"],
    "scripts/benchmark_trt.py openvino": [
        *SIZE,
        "--batch-size",
        "1",
        "--duration",
        "0.1",
        "--project",
        "runs/benchmark_trt",
    ],
    "scripts/inspect_engine.py openvino": [],
    "scripts/to_yolo.py": [],
    "scripts/make_triton.py": [],
}
LACKING = {"Annotations/", "data/demo/gelan-digits.pt", "yolov9-c-end2end.onnx"}
LACKING |= {"yolov9-c-seg-end2end.onnx", "yolov9-c-int8-strong.onnx"}
HOW_MANY = {  # page → its commands that run here
    "your-model.md": 4,
    "calibration.md": 2,
    "unlabelled.md": 2,
    "sensitivity.md": 2,
    "from-modelopt.md": 2,
    "frigate.md": 2,
    "deepstream.md": 1,
    "triton.md": 3,
    "set-the-threshold.md": 1,
    "detect.md": 1,
    "openvino.md": 3,
    "datasets.md": 1,
}


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, small_weights: Path, data: Path, run: Callable[..., str], demo_data: Path
) -> Path:
    """A folder with the files that the pages name."""
    folder = tmp_path_factory.mktemp("how-to")
    for name in ("yolov9-c-converted.pt", "yolov9-s-converted.pt"):
        shutil.copy(small_weights, folder / name)
    for name in ("coco", "unlabelled"):
        shutil.copy(data, folder / f"{name}.yaml")
    (folder / "images").mkdir()
    for path in find_images(load_data(data).paths("val"))[:2]:
        shutil.copy(path, folder / "images")
    (folder / "train2017").symlink_to(demo_data.parent / "images/val")
    shutil.copy(demo_data.parent / "annotations/instances_val.json", folder / "instances_train2017.json")
    weights = save_quantized(folder / "yolov9-c-int8.pt", folder / "yolov9-s-converted.pt")
    shutil.copy(weights, folder / "qat_best.pt")
    int8 = folder / "yolov9-c-int8.onnx"
    run("export_qat.py", "--weights", weights, *SIZE, "--typing", "weak", "--dynamic", "batch", "--output", int8)
    for name in ("yolov9-s-int8.onnx", "INT8.engine", "yolov9-c-int8.engine"):
        shutil.copy(int8, folder / name)
    fp32 = ("--weights", folder / "yolov9-s-converted.pt", "--output", folder / "yolov9-s.onnx")
    run("export_qat.py", *fp32, *SIZE, "--dynamic", "batch")
    return folder


def kind_of(words: list[str]) -> str:
    """The key of `SHORT` for a command, without `python`."""
    program = words[0]
    if program == "qat.py":
        return f"{program} {words[1]}"
    for word in ("openvino", "--source"):
        if word in words:
            return f"{program} {word}"
    return program


def commands_of(page: str) -> list[list[str]]:
    """The words of the commands of a page that run without a GPU and on files that are here."""
    found = [words[1:] for words in commands((ROOT / "docs" / page).read_text("utf-8")) if words[0] == "python"]
    return [words for words in found if kind_of(words) in SHORT and not LACKING & set(words)]


def in_place(word: str, place: Path) -> str:
    """A word of a command, and where it names a file or a folder, that of this test."""
    name = word.removeprefix("data/")
    if name.endswith(".engine"):
        name = "yolov9-c-int8.onnx"
    is_new = re.fullmatch(r"runs/.*|coco|model_repository|(deepstream/)?[\w-]+\.onnx", name)
    return str(place / name) if is_new or (place / name).exists() else word


@pytest.mark.parametrize("page", HOW_MANY)
def test_commands_of_a_page_run_and_print_the_tables_of_the_page(page, place, run):
    found = commands_of(page)
    assert len(found) == HOW_MANY[page]
    shutil.rmtree(place / "runs", ignore_errors=True)  # of another page, whose folder names would be taken
    printed = ""
    for words in found:
        printed += run(*(in_place(word, place) for word in [*words, *SHORT[kind_of(words)]]))
    sample = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lines = {" ".join(line.split()) for line in printed.splitlines()}
    for title in re.findall(r"^stage .*", sample, re.MULTILINE):
        assert any(line.startswith(" ".join(title.split())) for line in lines), title


def test_what_is_converted_is_counted_as_on_the_page(place, run, tmp_path):
    """The page's three lines are those of this conversion, but for the split."""
    printed = run(
        "scripts/to_yolo.py",
        place / "instances_train2017.json",
        "--images",
        place / "train2017",
        "--output",
        tmp_path / "out",
    )
    page = (ROOT / "docs/datasets.md").read_text(encoding="utf-8")
    assert "\n".join(printed.splitlines()[-2:]) in page
