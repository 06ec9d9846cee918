"""Steps of `scripts/accuracy.py`: what is run, what is not run again, and what a failure says."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from utils.core.errors import InputError
from utils.jobs.accuracy import measure, run, steps, train
from utils.jobs.accuracy.measure import MeasureOptions
from utils.jobs.accuracy.networks import NETWORKS, network
from utils.jobs.accuracy.steps import StepError, Steps
from utils.jobs.accuracy.train import TrainOptions

CLASSES = ["eight", "nine"]
PROGRAM = (
    "import os, pathlib, sys\n"
    "print('on', os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
    "if sys.argv[1] == 'fail': sys.exit('error: no such thing')\n"
    "pathlib.Path(sys.argv[1]).write_text('made')\n"
)


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A folder with one program, which writes the file that it is given."""
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "make.py").write_text(PROGRAM)
    monkeypatch.setattr(steps, "CHECKOUT", tmp_path / "checkout")
    return tmp_path / "checkout"


class Recorded(Steps):
    """Steps whose programs are not started: their results are written, and their commands kept."""

    commands: ClassVar[dict[str, list[str]]] = {}

    def call(self, step, command, *, tensorrt=False):
        words = [*(["TensorRT"] if tensorrt else []), *map(str, command)]
        self.commands[step] = words
        named = dict(itertools.pairwise(words))
        results = [Path(named[flag]) for flag in ("--save", "--output") if flag in named]
        if "--name" in named:
            results += [self.folder / named["--name"] / name for name in ("report.json", "benchmark.json")]
        for result in results:
            result.parent.mkdir(parents=True, exist_ok=True)
            result.write_text("{}")


@pytest.fixture
def recorded(tmp_path, monkeypatch) -> Recorded:
    monkeypatch.setattr(Recorded, "commands", {})
    folder = tmp_path / "out" / "yolov9-t"
    folder.mkdir(parents=True)
    return Recorded(folder, "yolov9-t")


def test_a_step_runs_once_and_is_noted(checkout, tmp_path):
    folder = tmp_path / "net"
    folder.mkdir()
    one = Steps(folder, "net", {"CUDA_VISIBLE_DEVICES": "7"})
    one.run("first", folder / "a.txt", ["make.py", folder / "a.txt"])
    log = (folder / "logs" / "first.log").read_text().splitlines()
    assert log[0] == f"$ {sys.executable} make.py {folder / 'a.txt'}"
    assert log[1] == "on 7"
    (note,) = one.notes()
    assert (note["step"], note["command"]) == ("first", ["make.py", str(folder / "a.txt")])
    (folder / "a.txt").write_text("kept")
    one.run("first", folder / "a.txt", ["make.py", folder / "a.txt"])
    assert (folder / "a.txt").read_text() == "kept"
    (folder / "a.txt").unlink()
    one.run("first", folder / "a.txt", ["make.py", folder / "a.txt"])
    assert (folder / "a.txt").read_text() == "made"


def test_a_result_that_no_finished_step_left_is_made_anew(checkout, tmp_path):
    (tmp_path / "a.txt").write_text("of a program that was killed")
    Steps(tmp_path, "net").run("first", tmp_path / "a.txt", ["make.py", tmp_path / "a.txt"])
    assert (tmp_path / "a.txt").read_text() == "made"


def test_a_program_that_fails_says_why_and_is_not_noted(checkout, tmp_path):
    one = Steps(tmp_path, "net")
    with pytest.raises(StepError, match=r"net: first failed with exit code 1: .*no such thing.*first\.log"):
        one.run("first", tmp_path / "a.txt", ["make.py", "fail"])
    with pytest.raises(StepError, match="left no"):
        one.run("second", tmp_path / "a.txt", ["make.py", tmp_path / "b.txt"])
    assert [note["step"] for note in one.notes()] == ["second"]


@pytest.mark.parametrize("content", ["{", "[1]", '[{"step": "x"}]'])
def test_damaged_notes_are_refused(tmp_path, content):
    (tmp_path / "steps.json").write_text(content)
    with pytest.raises(InputError, match=r"damaged|steps run again"):
        Steps(tmp_path, "net").notes()


class Upstream:
    """Stands in for `utils.upstream`: checkpoints are text files with the number of an epoch."""

    def read_checkpoint(self, path):
        from utils.core.errors import CheckpointError

        text = Path(path).read_text()
        if not text.lstrip("-").isdigit():
            raise CheckpointError(f"{path} is truncated")
        return {"epoch": int(text)}


@pytest.fixture
def digits(tmp_path, monkeypatch) -> TrainOptions:
    """A dataset of 1,000 training images and 100 for validation, which nobody decodes."""
    monkeypatch.setattr(train.upstream_import, "ensure", lambda: None)
    monkeypatch.setattr(train, "upstream", Upstream())
    for split, number in (("train", 1000), ("val", 100)):
        (tmp_path / split).mkdir()
        for image in range(number):
            (tmp_path / split / f"{image:04}.jpg").touch()
    (tmp_path / "data.yaml").write_text(f"train: train\nval: val\nnames: {CLASSES}\n")
    monkeypatch.setattr(train, "CHECKOUT", Path(__file__).resolve().parents[3])
    return TrainOptions(tmp_path / "data.yaml", 640, None, None, None, workers=6, gpus=1)


def leave(steps_, last: str, best: str = "") -> None:
    """The checkpoints of a training."""
    weights = steps_.folder / "train" / "weights"
    weights.mkdir(parents=True)
    for name, text in (("last.pt", last), ("best.pt", best)):
        if text:
            (weights / name).write_text(text)


def trained(monkeypatch) -> None:
    """Let the training write its last checkpoint."""
    call = Recorded.call

    def with_weights(self, step, command, **rest):
        call(self, step, command, **rest)
        if step == "train":
            (self.folder / "train" / "weights").mkdir(parents=True, exist_ok=True)
            (self.folder / "train" / "weights" / "last.pt").write_text("-1")

    monkeypatch.setattr(Recorded, "call", with_weights)


def test_a_training_from_the_beginning(recorded, digits, monkeypatch):
    import yaml

    trained(monkeypatch)
    result = train.train(NETWORKS["yolov9-m"], digits, recorded)
    words = recorded.commands["train"]
    assert words[:3] == ["scripts/run_upstream.py", "--fast", "train_dual.py"]
    options = dict(zip(words[3::2], words[4::2], strict=False))
    assert options["--cfg"] == "models/detect/yolov9-m.yaml"
    assert options["--epochs"] == "110"  # 110,000 images
    assert options["--batch-size"] == "48"
    assert "--device" not in words
    dataset = yaml.safe_load(Path(options["--data"]).read_text())
    assert (dataset["train"], dataset["names"]) == ([str(digits.data.parent / "train")], dict(enumerate(CLASSES)))
    assert len(Path(dataset["val"]).read_text().splitlines()) == 64  # upstream's own evaluation is short
    hyper = yaml.safe_load(Path(options["--hyp"]).read_text())
    assert (hyper["lr0"], hyper["warmup_bias_lr"], hyper["fliplr"], hyper["flipud"]) == (0.001, 0.001, 0.0, 0.0)
    assert result == recorded.folder / "float.pt"
    assert (recorded.folder / "trained.pt").read_text() == "-1"
    assert recorded.commands["convert"][:3] == [
        "reparameterization.py",
        "--weights",
        str(recorded.folder / "trained.pt"),
    ]


def test_a_training_on_several_gpus_and_one_on_the_cpu(recorded, digits, monkeypatch):
    from dataclasses import replace

    trained(monkeypatch)
    train.train(NETWORKS["yolov9-c"], replace(digits, gpus=4, epochs=3, batch_size=256, lr0=0.01), recorded)
    words = recorded.commands["train"]
    assert words[:8] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4",
                         "scripts/run_upstream.py", "--fast", "train_dual.py"]  # fmt: skip
    assert (words[words.index("--epochs") + 1], words[words.index("--batch-size") + 1]) == ("3", "256")
    on_cpu = train._fresh(NETWORKS["yolov9-c"], replace(digits, gpus=0), recorded.folder)
    assert on_cpu[on_cpu.index("--device") + 1] == "cpu"


@pytest.mark.parametrize(("last", "best"), [("7", ""), ("7", "7"), ("cut off", "6")])
def test_an_interrupted_training_goes_on(recorded, digits, monkeypatch, last, best):
    leave(recorded, last, best)
    trained(monkeypatch)
    train.train(NETWORKS["yolov9-t"], digits, recorded)
    weights = recorded.folder / "train" / "weights" / "last.pt"
    assert recorded.commands["train"][2:] == ["train_dual.py", "--resume", str(weights)]


def test_a_finished_training_is_converted_only_and_a_converted_one_is_left_alone(recorded, digits):
    leave(recorded, "-1")
    train.train(NETWORKS["yolov9-t"], digits, recorded)
    assert list(recorded.commands) == ["convert"]
    recorded.commands.clear()
    train.train(NETWORKS["yolov9-t"], digits, recorded)
    assert recorded.commands == {}


def test_an_unknown_network_is_refused():
    assert network("yolov9-s").batch_size == 64
    with pytest.raises(InputError, match="yolov9-x: there is no such network; expected some of yolov9-t"):
        network("yolov9-x")


def options(**changes) -> MeasureOptions:
    values = {"data": Path("/data/coco.yaml"), "imgsz": 640, "workers": 4, "on_gpu": True, "epochs": None,
              "iters": None, "optimization_level": None, "typing": "strong", "no_engines": ""}  # fmt: skip
    return MeasureOptions(**{**values, **changes})


def test_the_ways_of_quantizing(recorded):
    measure.quantize(recorded, options(epochs=2, iters=5))
    auto, ranges, qat = (recorded.commands[name] for name in ("ptq-auto", "ranges", "qat"))
    assert {"--ptq-only", "auto"} <= set(auto)
    assert "--epochs=2" not in auto
    assert ranges[ranges.index("--train") + 1] == "ranges"
    assert {"--epochs=2", "--iters=5", "--no-eval-origin"} <= set(ranges) & set(qat)
    assert not {"--train", "--calib-method", "--device"} & set(qat)
    recorded.commands.clear()
    (recorded.folder / "qat" / "report.json").unlink()
    measure.quantize(recorded, options(epochs=0))
    assert "--epochs=0" in recorded.commands["qat"]  # not the ten of qat.py
    (recorded.folder / "qat" / "weights").mkdir()
    (recorded.folder / "qat" / "weights" / "last.pt").write_text("a state")
    measure.quantize(recorded, options())
    assert recorded.commands["qat"][-2:] == ["--resume", str(recorded.folder / "qat")]


def test_engines_are_built_timed_and_evaluated_where_tensorrt_is(recorded):
    for step in (measure.export, measure.measure_times, measure.evaluate):
        step(recorded, options(optimization_level=3))
    folder, commands = recorded.folder, recorded.commands
    assert commands["export int8"][2] == str(folder / "qat" / "weights" / "qat_best_float.pt")
    assert commands["export float"][2] == str(folder / "float.pt")
    assert commands["times"][:5] == ["TensorRT", "scripts/benchmark_trt.py", str(folder / "yolov9-t-int8.onnx"),
                                     "--baseline", str(folder / "yolov9-t-float.onnx")]  # fmt: skip
    assert commands["times"][-5:] == ["--useCudaGraph", "--useSpinWait", "--noDataTransfers",
                                      "--optimization-level", "3"]  # fmt: skip
    assert commands["eval float engine"][3] == str(folder / "yolov9-t-float-b8.engine")
    assert commands["eval int8 engine"][3] == str(folder / "yolov9-t-int8-b8.engine")
    assert "--device" not in commands["eval int8 engine"]


def test_onnx_runtime_takes_their_place_elsewhere(recorded):
    for step in (measure.measure_times, measure.evaluate):
        step(recorded, options(on_gpu=False, no_engines="engines need a GPU", optimization_level=3))
    assert recorded.commands["times-onnx"][-2:] == ["--device", "cpu"]
    assert recorded.commands["eval int8 onnx"][2] == str(recorded.folder / "yolov9-t-int8.onnx")
    assert all(words[0] != "TensorRT" for words in recorded.commands.values())


def test_what_a_tensorrt_is_asked_and_what_it_lacks(checkout):
    (checkout / "scripts").mkdir()
    program = checkout / "scripts" / "check_engine_setup.py"
    program.write_text("print('a word of a library')\nprint('weak')\n")
    assert measure.tensorrt(sys.executable, Path("data.yaml"), on_gpu=False) == ("", "engines need a GPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "CHECKOUT", checkout)
        assert measure.tensorrt(sys.executable, Path("data.yaml"), on_gpu=True) == ("weak", "")
        program.write_text("import sys\nsys.exit('error: TensorRT is not installed; pip install tensorrt')\n")
        found = measure.tensorrt(sys.executable, Path("data.yaml"), on_gpu=True)
    assert found == ("", "TensorRT is not installed")


@pytest.mark.parametrize(
    ("text", "visible", "gpus"),
    [
        ("cpu", "4,5", []),
        ("", "", ["0", "1", "2"]),
        ("", "5,4,7", ["5", "4", "7"]),
        ("1", "5,4,7", ["4"]),
        ("0,2", "", ["0", "2"]),
        ("cuda:2", "GPU-a,GPU-b,GPU-c", ["GPU-c"]),
    ],
)
def test_devices(monkeypatch, text, visible, gpus):
    monkeypatch.setattr(run.torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert run.devices(text) == gpus


@pytest.mark.parametrize("text", ["3", "0,x", "-1"])
def test_devices_that_are_not_there(monkeypatch, text):
    monkeypatch.setattr(run.torch.cuda, "device_count", lambda: 3)
    with pytest.raises(InputError, match="torch sees 3 CUDA devices"):
        run.devices(text)


def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[run.Source]:
    """Networks whose weights are given, and a dataset that is not looked at."""
    for name in names:
        (tmp_path / f"{name}.pt").write_text(name)
    monkeypatch.setattr(run, "load_data", lambda path: path)
    monkeypatch.setattr(run, "dataset_digest", str)
    return [run.Source(name, weights=tmp_path / f"{name}.pt") for name in names]


@pytest.mark.parametrize(
    ("changes", "name"), [({"data": Path("other.yaml")}, "out"), ({"imgsz": 320}, "out"), ({}, "out/a")]
)
def test_results_of_other_weights_or_images_are_not_taken_for_these(tmp_path, monkeypatch, changes, name):
    sources = given(tmp_path, monkeypatch, "a")
    took = []
    monkeypatch.setattr(run, "_run_network", lambda source, *_: took.append(source.name))
    monkeypatch.setattr(run, "_about", lambda options, networks: {})
    monkeypatch.setattr(run.page, "write", lambda found, output, about: [])
    for _ in range(2):
        run.run(sources, ["train"], None, options(), tmp_path / "out", [], sys.executable)
    if not changes:
        (tmp_path / "a.pt").write_text("trained longer")
    with pytest.raises(InputError, match=f"the results in .*{name} were made with other --.*choose another --output"):
        run.run(sources, ["train"], None, options(**changes), tmp_path / "out", [], sys.executable)
    assert took == ["a", "a"]


def test_a_network_that_is_trained_here_is_not_one_of_that_name_that_is_given(tmp_path, monkeypatch):
    sources = given(tmp_path, monkeypatch, "yolov9-c")
    monkeypatch.setattr(run, "_run_network", lambda *_: None)
    monkeypatch.setattr(run, "_about", lambda options, networks: {})
    monkeypatch.setattr(run.page, "write", lambda found, output, about: [])
    trained_here = [run.Source("yolov9-c", network=network("yolov9-c"))]
    run.run(trained_here, ["train"], None, options(), tmp_path / "out", [], sys.executable)
    with pytest.raises(InputError, match="made with other --weights"):
        run.run(sources, ["train"], None, options(), tmp_path / "out", [], sys.executable)


def test_a_network_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    sources = given(tmp_path, monkeypatch, "a", "b")

    def taken(weights, one):
        if weights.stem == "a":
            raise StepError("a: convert failed")
        (one.folder / "float.pt").write_text("weights")
        (one.folder / "steps.json").write_text(json.dumps([{"step": "convert", "command": ["x"], "seconds": 1.0}]))

    monkeypatch.setattr(run, "take", taken)
    monkeypatch.setattr(run, "_about", lambda options, networks: {})
    pages = []
    monkeypatch.setattr(run.page, "write", lambda found, output, about: pages.append([one.name for one in found]) or [])
    with pytest.raises(StepError, match="not all steps of a succeeded"):
        run.run(sources, ["train"], None, options(), tmp_path / "out", [], sys.executable)
    assert pages == [["b"]]
    with pytest.raises(StepError, match="not all steps of a succeeded"):
        run.run(sources[:1], ["export"], None, options(), tmp_path / "out", [], sys.executable)


@pytest.mark.parametrize(("head", "steps_run"), [("DualDDetect", ["convert"]), ("DDetect", [])])
def test_weights_that_are_given_are_converted_where_they_have_an_auxiliary_branch(
    recorded, tmp_path, monkeypatch, head, steps_run
):
    (tmp_path / "mine.pt").write_text("weights")
    model = SimpleNamespace(model=[type(head, (), {})()])
    monkeypatch.setattr(run.upstream, "load_float", lambda path, auxiliary: SimpleNamespace(model=model))
    run.take(tmp_path / "mine.pt", recorded)
    assert list(recorded.commands) == steps_run
    assert (recorded.folder / "float.pt").read_text() == ("{}" if steps_run else "weights")
    monkeypatch.setattr(run.upstream, "load_float", lambda path, auxiliary: pytest.fail("it is there already"))
    run.take(tmp_path / "mine.pt", recorded)


def test_the_program_names_the_steps_and_networks_that_there_are():
    """It says them itself, so that -h need not import torch."""
    path = Path(__file__).resolve().parents[3] / "scripts" / "accuracy.py"
    spec = importlib.util.spec_from_file_location("accuracy_program", path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert ("train", *run.STEPS, "page") == program.STEPS
    assert list(NETWORKS) == program.NETWORKS
