"""The commands of how-to pages, run as they are printed, on a small network and a few images, where that needs no GPU.

What differs from the page: the names of its files stand for small ones, an engine's name for its ONNX file, results go
to a folder of the test, and options make the runs short. torchrun starts two processes on the CPU, which work together
through Gloo. NOT_RUN says of every other command why no test here runs it: most of them build or time an engine.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from documentation import ROOT, TORCHRUN, commands
from forms import lively
from known_images import SQUARE
from known_masks import write_outlined_set
from qat_runs import SMALL_RUN
from random_networks import random_network, save_float, save_quantized, tiny_with
from ultralytics_files import DESCRIPTION, write_theirs

from utils.evaluation.data_yaml import load_data
from utils.evaluation.image_files import find_images

SIZE = ("--imgsz", "96")
QUICK = (*SIZE, "--workers", "0", "--force")
ONE_IMAGE = (*SIZE, "--batch-size", "1")
FEW = SMALL_RUN[: SMALL_RUN.index("--iters")]  # of commands that do not train
SHORT = {  # a program and what tells its kind → options that make it short and keep results in the folder of the test
    "qat.py quantize": [*SMALL_RUN, "--epochs", "1", "--no-plots", "--project", "runs/qat"],
    "qat.py calibrate": [*FEW, "--num-image", "4", "--project", "runs/qat_calibrate"],
    "qat.py sensitive": [*FEW, "--num-image", "4", "--granularity", "module", "--project", "runs/qat_sensitive"],
    "qat.py eval": [*QUICK, "--device", "cpu", "--project", "runs/qat"],
    "reparameterization.py": ["--device", "cpu"],
    "export_qat.py": [*SIZE, "--device", "cpu"],
    "export_yoloV9.py": [*SIZE, "--device", "cpu"],
    "val_trt.py": [*QUICK, "--device", "cpu", "--project", "runs/val_trt"],
    "val_trt.py --source": [*SIZE, "--device", "cpu", "--project", "runs/val_trt"],
    "val_trt.py openvino": [*QUICK, "--project", "runs/val_trt"],
    "scripts/benchmark_trt.py openvino": [*ONE_IMAGE, "--duration", "0.1", "--project", "runs/benchmark_trt"],
    "scripts/inspect_engine.py openvino": [],
    "scripts/cpu_speed.py": ["--imgsz", "64"],
    "scripts/to_yolo.py": [],
    "scripts/make_triton.py": [],
}
ENGINE = "builds or times an engine, which needs a GPU"
SET_UP = "fetches or installs; tests/unit/setup has its tests"
SERVER = "needs a running Triton server; tests/unit/programs/test_triton.py has one that stands in"
DEMO = "is the pair of commands above it once more, on all images of the demo"
NOT_RUN = {  # the beginning of a command, as a regular expression → why it is not run here
    r"(\./)?scripts/(benchmark_trt|generate_trt_engine|val_trt)\.sh": ENGINE,
    r"python scripts/benchmark_trt\.py (?!.*--runtime openvino)": ENGINE,
    r"python scripts/build_engine\.py": ENGINE,  # but for TensorRT-RTX: test_rtx_builds.py
    r"\./(install_dependencies|patch_yolov9|scripts/get_yolov9)\.sh": SET_UP,
    r"(pip|\.|cd) ": SET_UP,
    r"python scripts/triton_client\.py": SERVER,
    r"python (data/demo/make_digits\.py|qat\.py \w+ --weights data/demo/)": DEMO,
}
OBJECT = "<object><name>3</name><bndbox><xmin>9</xmin><ymin>9</ymin><xmax>60</xmax><ymax>70</ymax></bndbox></object>"


def commands_of(page: str) -> list[list[str]]:
    """The words of the commands in a page's blocks of bash."""
    return commands((ROOT / "docs" / page).read_text("utf-8"))


def why_not(words: list[str]) -> str | None:
    """Why a command is not run here; None for one that is."""
    return next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, " ".join(words))), None)


INDEX = (ROOT / "docs/index.md").read_text("utf-8")
HOW_TO = re.findall(r"\((.*?\.md)\)", INDEX.partition("\n## How-to\n")[2].partition("\n## ")[0])
RUN = [page for page in HOW_TO if not all(map(why_not, commands_of(page)))]


DIGITS = {number: str(number) for number in range(10)}  # the classes of the demo set


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory, small_weights: Path, data: Path, run: Callable[..., str], demo_data: Path
) -> Path:
    """A folder with the files that the pages name; those that one page alone needs lie in a folder of its name."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("yolov9-c-converted.pt", "yolov9-s-converted.pt"):
        shutil.copy(small_weights, folder / name)
    for name in ("coco", "unlabelled"):
        shutil.copy(data, folder / f"{name}.yaml")
    write_images(folder, find_images(load_data(data).paths("val"))[:2], demo_data.parent)
    weights = save_quantized(folder / "qat_best.pt", folder / "yolov9-s-converted.pt")
    write_exports(folder, weights, run)
    write_files_of_pages(folder, data)
    shutil.copy(ROOT / "data/demo/gelan-digits-seg.pt", folder / "gelan-digits-seg.pt")
    return folder


def write_images(folder: Path, images: list[str], demo: Path) -> None:
    """Images alone, images with VOC's annotations, and the demo set's with COCO's."""
    for name in ("images", "JPEGImages", "Annotations"):
        (folder / name).mkdir()
    for path in map(Path, images):
        shutil.copy(path, folder / "images")
        shutil.copy(path, folder / "JPEGImages")
        text = f"<annotation><filename>{path.name}</filename>{OBJECT}</annotation>"
        (folder / "Annotations" / f"{path.stem}.xml").write_text(text)
    (folder / "train2017").symlink_to(demo / "images/val")
    shutil.copy(demo / "annotations/instances_val.json", folder / "instances_train2017.json")


def write_exports(folder: Path, weights: Path, run: Callable[..., str]) -> None:
    """ONNX files in INT8 and in FP32, with NMS inside and with masks."""
    masks = save_float(folder / "seg.pt", lively(random_network(tiny_with("DSegment"))))
    inside = ("--include", "onnx_end2end", "--nms", "onnx")
    for name, source, words in (
        ("yolov9-c-int8", weights, ("--typing", "weak")),
        ("yolov9-c-int8-strong", weights, ("--typing", "strong")),
        ("yolov9-c-end2end", weights, ("--typing", "weak", *inside)),
        ("yolov9-c-seg-end2end", masks, inside),
        ("yolov9-c-float", folder / "yolov9-c-converted.pt", ()),
    ):
        target = folder / f"{name}.onnx"
        run("export_qat.py", "--weights", source, *SIZE, "--dynamic", "batch", *words, "--output", target)
    shutil.copy(folder / "yolov9-c-int8.onnx", folder / "yolov9-s-int8.onnx")
    shutil.copy(folder / "yolov9-c-float.onnx", folder / "yolov9-s.onnx")


def write_files_of_pages(folder: Path, data: Path) -> None:
    """What your-model.md converts, what names its dataset itself, a network with masks, and one of Ultralytics."""
    for page in ("your-model", "from-yolov9-qat", "segmentation", "ultralytics"):
        (folder / f"{page}.md").mkdir()
    dual = random_network(tiny_with("DualDDetect"))
    dual.names = DIGITS
    save_float(folder / "your-model.md/yolov9-c.pt", dual)

    trained = torch.load(folder / "yolov9-c-converted.pt", weights_only=False)
    torch.save(trained | {"opt": {"data": str(data)}}, folder / "from-yolov9-qat.md/yolov9-c-converted.pt")

    masks = random_network(tiny_with("DualDSegment"))
    save_float(folder / "segmentation.md/yolov9-c-dseg.pt", masks)
    write_outlined_set(folder / "outlined", 8, SQUARE, [*masks.names.values()], splits=("train", "val"))
    shutil.copy(folder / "outlined/data.yaml", folder / "segmentation.md/coco.yaml")

    theirs = folder / "ultralytics.md/runs/detect/train/weights/best.pt"
    theirs.parent.mkdir(parents=True)
    description = {**DESCRIPTION, "nc": len(DIGITS)}
    model = random_network({**description, "depth_multiple": 1.0, "width_multiple": 1.0, "anchors": 3})
    write_theirs(theirs, model, yaml=description, names=DIGITS)
    shutil.copy(data, folder / "ultralytics.md/data.yaml")


def copied(files: Path, page: str, target: Path) -> Path:
    """A copy of the files for one page, with its own in place of those of the same name."""
    shutil.copytree(files, target, symlinks=True)
    if (files / page).is_dir():
        shutil.copytree(files / page, target, dirs_exist_ok=True)
    return target


def kind_of(words: list[str]) -> str:
    """The key of `SHORT` for a command, without `python`."""
    program = words[0]
    if program == "qat.py":
        return f"{program} {words[1]}"
    for word in ("openvino", "--source"):
        if word in words:
            return f"{program} {word}"
    return program


def in_place(word: str, place: Path) -> str:
    """A word of a command, and where it names a file or a folder, that of this test."""
    name = word.removeprefix("data/").removeprefix("demo/")
    if name.endswith(".engine"):
        name = "yolov9-c-int8.onnx"
    is_new = re.fullmatch(r"runs/.*|coco|cards|model_repository|(deepstream/)?[\w-]+\.onnx|[\w-]+\.pt", name)
    return str(place / name) if is_new or (place / name).exists() else word


def by_two_processes(*words: str) -> str:
    """What torchrun prints; it takes a free port, since pages are tested side by side."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", *TORCHRUN[1:]]
    done = subprocess.run([*launcher, *words], capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 processes" in done.stdout
    return done.stdout


@pytest.mark.parametrize("page", RUN)
def test_commands_of_a_page_run_and_print_the_tables_of_the_page(page, files, run, tmp_path):
    place, printed = copied(files, page, tmp_path / "place"), ""
    for words in commands_of(page):
        if why_not(words):
            continue
        start, words = (by_two_processes, words[3:]) if words[:3] == TORCHRUN else (run, words[1:])
        printed += start(*(in_place(word, place) for word in [*words, *SHORT[kind_of(words)]]))
    sample = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lines = {" ".join(line.split()) for line in printed.splitlines()}
    for title in re.findall(r"^stage .*", sample, re.MULTILINE):
        assert any(line.startswith(" ".join(title.split())) for line in lines), title


def test_pages_without_a_command_that_runs_here_are_these():
    """Engines alone; and own-program.md has programs in Python and C++, which tests/unit/examples runs."""
    assert set(HOW_TO) - set(RUN) == {"tensorrt.md", "own-program.md"}


def test_every_reason_is_needed():
    every = [" ".join(words) for page in HOW_TO for words in commands_of(page)]
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, command) for command in every)] == []


def test_what_is_converted_is_counted_as_on_the_page(files, run, tmp_path):
    """The page's three lines are those of this conversion, but for the split."""
    words = ("--images", files / "train2017", "--output", tmp_path / "out")
    printed = run("scripts/to_yolo.py", files / "instances_train2017.json", *words)
    page = (ROOT / "docs/datasets.md").read_text(encoding="utf-8")
    assert "\n".join(printed.splitlines()[-2:]) in page
