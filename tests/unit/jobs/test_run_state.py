"""The state of a run: written whole, read back equal, found again; and the hash of the dataset in it."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from utils.core.errors import CheckpointError, DataError, InputError
from utils.core.run_folder import stem_of
from utils.core.score import Score
from utils.evaluation.data_yaml import load_data
from utils.evaluation.disk_state import check_unchanged, dataset_hash
from utils.jobs.options import QuantizeOptions
from utils.jobs.run_state import (
    AnalysisState,
    RunState,
    checkpoint_name,
    find_run,
)
from utils.reports.schema import UNFINISHED, Report


def made(kind, **changes):
    options = QuantizeOptions(weights="weights/toy.pt").model_dump()
    return kind(options, {"finetune": {"lr": {0: 1e-6}}, "float": []}, "00ff", **changes)


def test_a_state_comes_back_equal_and_a_checkpoint_that_is_gone_is_named(tmp_path):
    optimizer = {"state": {0: {"exp_avg": torch.arange(3.0)}}, "param_groups": [{"lr": 0.0}]}
    trainer = {"optimizer": optimizer, "scaler": {}, "log_amax": torch.ones(2)}
    history = [{"epoch": 0, "ap": 0.5, "loss": 0.1, "held_out": 0.2, "lr": 1e-6, "seconds": 1.0}]
    files = ["ptq.pt", "qat_0.pt", "qat_1.pt"]
    state = made(RunState, files=files, rows={"PTQ": {"ap": 0.5}}, history=history, trainer=trainer, best_epoch=0)
    state.save(tmp_path)
    for name in files[1:]:  # the best, and that of the last epoch
        with pytest.raises(CheckpointError, match=r"qat_\d\.pt is gone"):
            RunState.load(tmp_path)
        (tmp_path / "weights" / name).touch()
    loaded = RunState.load(tmp_path)
    assert torch.equal(loaded.trainer["log_amax"], torch.ones(2))
    assert torch.equal(loaded.trainer["optimizer"]["state"][0]["exp_avg"], torch.arange(3.0))
    assert (loaded.best_file, made(RunState, files=files).best_file) == ("qat_0.pt", "ptq.pt")
    loaded.trainer = state.trainer
    assert loaded == state


@pytest.mark.parametrize("kind", [RunState, AnalysisState])
def test_a_damaged_state_and_what_this_version_did_not_write_are_named(tmp_path, kind):
    state, path = made(kind), tmp_path / kind.FILE
    state.save(tmp_path)
    assert kind.load(tmp_path) == state
    whole, content = path.read_bytes(), torch.load(path, weights_only=True)
    for damaged in (b"", b"not a pickle", whole[:200]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"{path.name} .*start a new run"):
            kind.load(tmp_path)
    changes = [{"state_version": 1}, {"options_hash": "00"}, {"options": {"seed": 1}}, {"recipe": {}}]
    for other in (*({**content, **change} for change in changes), {"model": 1}, [1], None):
        torch.save(other, path)
        with pytest.raises(CheckpointError, match=rf"{path.name} .*start a new run"):
            kind.load(tmp_path)


def test_file_names_carry_the_score():
    assert checkpoint_name("ptq", "yolov9-c", Score(0.52968)) == "ptq_ap_0.5297_yolov9-c.pt"
    assert checkpoint_name("ptq", "c-dseg", Score(0.5201, 0.42131)) == "ptq_ap_0.5201_mask_0.4213_c-dseg.pt"
    assert checkpoint_name("ptq", "yolov9-c", None) == "ptq_yolov9-c.pt"


def test_weights_that_upstream_calls_best_or_last_take_the_name_of_the_run():
    folder = Path("runs/qat/cars")
    names = ["yolov9-c.pt", "a/best.pt", "last.pt", "best-converted.pt", "BEST_2.pt", "bestie.pt", "lasting.pt"]
    assert [stem_of(name, folder) for name in names] == ["yolov9-c", *["cars"] * 4, "bestie", "lasting"]


def test_runs_are_found_by_folder_file_or_time(tmp_path):
    for name, age in (("exp", 50), ("exp2", 5), ("exp3", 500)):
        made(RunState).save(tmp_path / name)
        path = tmp_path / name / RunState.FILE
        seconds = path.stat().st_mtime - age
        os.utime(path, (seconds, seconds))
    assert find_run("", tmp_path, RunState.FILE) == tmp_path / "exp2"
    for name, note in (("exp2", "done"), ("exp", "done"), ("exp3", f"{UNFINISHED}; continue with: ...")):
        Report(command="", notes=[note]).save(tmp_path / name / "report.json")
    assert find_run("", tmp_path, RunState.FILE) == tmp_path / "exp3"  # the only one with something left to do
    for where in (tmp_path / "exp", tmp_path / "exp/weights", tmp_path / "exp/weights/last.pt"):
        assert find_run(where, "elsewhere", RunState.FILE) == tmp_path / "exp"
    with pytest.raises(InputError, match="no run in"):
        find_run("", tmp_path / "nothing", RunState.FILE)
    with pytest.raises(InputError, match="there is no run"):
        find_run(tmp_path / "exp", tmp_path, AnalysisState.FILE)


# the hash of a dataset


IMAGES = {"train": 3, "val": 4}


@pytest.fixture
def dataset(tmp_path) -> Path:
    """A dataset of files that nobody decodes; some have labels."""
    for split, count in IMAGES.items():
        for number in range(count):
            for kind, suffix, content in (("images", ".png", b"pixels"), ("labels", ".txt", b"0 0.5 0.5 0.1 0.1\n")):
                path = tmp_path / kind / split / f"{number}{suffix}"
                path.parent.mkdir(parents=True, exist_ok=True)
                if kind == "images" or number:
                    path.write_bytes(content)
    (tmp_path / "val.txt").write_text("".join(f"images/val/{number}.png\n" for number in range(IMAGES["val"])))
    content = {"path": str(tmp_path), "train": "images/train", "val": "val.txt", "names": ["cat", "dog"]}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "hyp.yaml").write_text("degrees: 0.0\n")
    return tmp_path


def look(dataset: Path) -> str:
    files = {"--hyp": str(dataset / "hyp.yaml"), "--profile": None}
    return dataset_hash(load_data(dataset / "data.yaml"), ("train", "val"), files)


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def as_old(path: Path, content: bytes) -> None:
    """Change a file's content, but neither its size nor its time."""
    status = path.stat()
    assert len(content) == status.st_size
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


CHANGES = {
    "removed, though a list names it": (lambda root: (root / "images/val/2.png").unlink(), "the images of val"),
    "renamed": (lambda root: (root / "images/train/2.png").rename(root / "images/train/7.png"), "the images of train"),
    "size": (lambda root: (root / "images/train/1.png").write_bytes(b"other"), "sizes or times of images of train"),
    "time": (lambda root: os.utime(root / "images/train/1.png", (1, 1)), "sizes or times of images of train"),
    "labels of the same size and time": (
        lambda root: as_old(root / "labels/val/1.txt", b"1 0.5 0.5 0.1 0.1\n"), "labels of val",
    ),
    "labels for one that had none": (lambda root: (root / "labels/train/0.txt").touch(), "labels of train"),
    "classes": (lambda root: edit(root / "data.yaml", "cat", "cow"), "the names of the classes"),
    "augmentation": (lambda root: edit(root / "hyp.yaml", "0.0", "0.1"), "the content of --hyp"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named(change, dataset):
    before = look(dataset)
    apply, expected = CHANGES[change]
    apply(dataset)
    with pytest.raises(DataError, match=f"run in runs/qat/exp .*{expected}"):
        check_unchanged(before, look(dataset), Path("runs/qat/exp"))


def test_nothing_changed(dataset, tmp_path_factory):
    (dataset / os.fsdecode(b"images/train/\xff.png")).touch()
    before = look(dataset)
    os.utime(dataset / "labels/val/1.txt", (1, 1))  # the content counts
    (dataset / "labels/val/nobody's.txt").write_text("no labels of any image")
    check_unchanged(before, look(dataset), Path("run"))
    place = tmp_path_factory.mktemp("moved") / "set"
    shutil.copytree(dataset, place)  # keeps times
    edit(place / "data.yaml", str(dataset), str(place))
    assert look(place) == before


@pytest.mark.parametrize("text", ["", "[1]", "3"])
def test_a_damaged_hash_is_named(text, dataset):
    with pytest.raises(CheckpointError, match="the run in run is damaged in 'dataset'"):
        check_unchanged(text, look(dataset), Path("run"))


def test_what_cannot_be_read_is_named(dataset):
    (dataset / "labels/val/1.txt").unlink()
    (dataset / "labels/val/1.txt").mkdir()
    with pytest.raises(DataError, match=r"labels/val/1\.txt"):
        look(dataset)
    with pytest.raises(InputError, match=r"--hyp nowhere\.yaml"):
        dataset_hash(load_data(dataset / "data.yaml"), (), {"--hyp": "nowhere.yaml"})
