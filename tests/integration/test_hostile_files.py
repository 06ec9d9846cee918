"""Checkpoints, model descriptions and datasets of strangers: no code of theirs is run, and damage is one line."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hostile_canary import program, watched
from hostile_files import call, mapping, torch_file, value
from random_networks import TINY, random_network, save_float, save_quantized, tiny_with
from torch import nn

from models.quantize import checkpoint
from utils import upstream
from utils.core import checkpoints
from utils.core.errors import CheckpointError, InputError
from utils.evaluation.data_yaml import load_data
from utils.evaluation.images import find_images, label_file, read_images
from utils.upstream.description import ACTIVATIONS

IMPORTS = (
    "from utils import upstream\nfrom utils.upstream.checkout import import_upstream\nimport_upstream()\n"
    "import onnx, matplotlib.pyplot, torch.utils.data"
)
COMMAND = "touch mark"
ROWS: dict[str, list[Any]] = {  # of a model description: upstream would evaluate these
    "bytes": [-1, 1, "os.system", [COMMAND.encode()]],
    "remove": [-1, 1, "os.remove", ["nearest"]],
    "exit": [-1, 1, "sys.exit", []],
    "expression": [-1, 1, f"__import__('os').system('{COMMAND}') or Conv", [8]],
    "argument": [-1, 1, "Conv", [f"__import__('os').system('{COMMAND}')", 3, 2]],
    "number": [-1, 100_000_000, "Conv", [8, 3, 2]],
    "backend": [-1, 1, "DetectMultiBackend", ["nc"]],
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("good")
    found = {"float": save_float(folder / "float.pt", random_network(TINY))}
    found["quantized"] = save_quantized(folder / "quantized.pt", found["float"])
    found["masks"] = save_float(folder / "masks.pt", random_network(tiny_with("DSegment")))
    training = {**TINY, "head": [*TINY["head"][:-1], [[3, 8, 6, 3, 8, 6], 1, "DualDDetect", ["nc"]]]}
    found["training"] = save_float(folder / "training.pt", upstream.build_model(training))
    return found


def with_row(path: Path, row: list[Any], target: Path) -> Path:
    """A copy of a checkpoint whose description begins with another layer."""
    content = torch.load(path, weights_only=False)
    description = content["yaml"] if "yaml" in content else content["model"].yaml
    description["backbone"][0] = row
    torch.save(content, target)
    return target


# --- model descriptions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_a_description_is_refused_before_upstream_sees_it(row, good, tmp_path, monkeypatch):
    from models.yolo import DetectionModel, parse_model

    monkeypatch.chdir(tmp_path)
    evil = {**copy.deepcopy(TINY), "backbone": [row, *TINY["backbone"][1:]]}
    (tmp_path / "evil.yaml").write_text(yaml.safe_dump(evil))
    readers: list[tuple[Callable[[Any], object], Any]] = [
        (upstream.load_float, with_row(good["float"], row, tmp_path / "float.pt")),
        (upstream.load_training, with_row(good["training"], row, tmp_path / "training.pt")),
        (checkpoint.load_quantized, with_row(good["quantized"], row, tmp_path / "quantized.pt")),
        (upstream.read_description, tmp_path / "evil.yaml"),
        (upstream.build_model, tmp_path / "evil.yaml"),
        (DetectionModel, copy.deepcopy(evil)),  # also where upstream's own programs build a network
        (lambda description: parse_model(description, [3]), copy.deepcopy(evil)),
    ]
    for read, file in readers:
        with pytest.raises(InputError, match="layer 0"):
            read(file)
    with pytest.raises(InputError, match="activation"):
        DetectionModel({**copy.deepcopy(TINY), "activation": "nn.ReLU();exit()"})
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["export_qat.py", "--weights", "FILE"], "quantized"),
        (["export_yoloV9.py", "--weights", "FILE"], "float"),
        (["qat.py", "eval", "--weights", "FILE", "--data", "DATA", "--project", "OUT"], "pickle"),
        (["reparameterization.py", "--weights", "FILE", "--save", "OUT/a.pt"], "training"),
        (["scripts/run_upstream.py", "val.py", "--weights", "FILE", "--device", "cpu"], "pickle"),
        (["scripts/run_upstream.py", "train.py", "--cfg", "YAML", "--data", "DATA", "--device", "cpu", "--epochs", "1",
          "--project", "OUT", "--hyp", "data/hyps/hyp.scratch-high.yaml"], "float"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else value,
)  # fmt: skip
def test_programs_refuse_with_one_line_and_leave_no_mark(words, kind, good, demo_data, tmp_path, checkout, fork_server):
    file = tmp_path / "evil.pt"
    if kind == "pickle":
        torch_file(file, mapping(model=call("os.system", value(COMMAND))))
    else:
        with_row(good[kind], ROWS["bytes"], file)
    (tmp_path / "evil.yaml").write_text(yaml.safe_dump({**TINY, "backbone": [ROWS["bytes"], *TINY["backbone"][1:]]}))
    names = {"FILE": str(file), "OUT": str(tmp_path), "YAML": str(tmp_path / "evil.yaml"), "DATA": str(demo_data)}
    filled = [names.get(word, word.replace("OUT", str(tmp_path))) for word in words]
    started = {"before": IMPORTS} if words[0] == "qat.py" else {"fork": fork_server}  # one of them starts for real
    found = watched(program(filled), tmp_path / "report", cwd=checkout, allowed=[tmp_path], **started)
    assert found.returncode == 2, found.err[-2000:]
    assert "os.system" in found.err
    assert "Traceback" not in found.err
    assert not any("mark" in one or one.startswith("os.system") for one in found.events)
    assert not (checkout / "mark").exists()


def test_the_lists_are_what_upstreams_networks_are_made_of(checkout, monkeypatch):
    from models.common import Conv, RepConvN
    from models.yolo import parse_model

    for layer in (Conv, RepConvN):  # upstream sets it to what the last YAML with an `activation` says
        monkeypatch.setattr(layer, "default_act", layer.default_act)
    classes = upstream.module_classes()
    for path in checkout.glob("models/*/*.yaml"):
        if "backbone" in yaml.safe_load(path.read_text()):
            description = upstream.read_description(path)
            if path.parent.name != "hub":  # upstream's own code cannot build these
                with torch.device("meta"):
                    layers, _ = parse_model(description, [3])
                assert {type(module) for module in layers.modules()} <= set(classes.values()), path
    for head, below in checkpoints.KEPT_FORWARDS.items():
        made = upstream.build_model(tiny_with(head)).model[-1]
        assert [key for key, one in vars(made).items() if callable(one)] == [checkpoints.KEPT_AS]
        assert made.detect is classes[f"models.yolo.{below}"].forward
    for text in ACTIVATIONS:
        assert isinstance(eval(text, {"nn": nn}), nn.Module)


# --- datasets ---------------------------------------------------------------------------------------------------------


class Runs:
    """A pickle that runs a command."""

    def __reduce__(self):
        import os

        return (os.system, (COMMAND,))


@pytest.fixture
def dataset(demo_data: Path, tmp_path: Path) -> Path:
    """A few images of the demo set, with a label cache and an image's array that would run a command."""
    images = [Path(path) for path in find_images(load_data(demo_data).paths("train"))[:6]]
    for image in images:
        for path, name in ((image, "images"), (label_file(str(image)), "labels")):
            (tmp_path / "set" / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / "set" / name)
    evil = np.empty((), dtype=object)
    evil[()] = Runs()
    for name in ("labels.cache", "images/" + images[0].stem + ".npy"):
        with open(tmp_path / "set" / name, "wb") as file:
            np.save(file, evil)
    return tmp_path / "set"


def test_label_caches_and_arrays_are_neither_read_nor_written(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image = next((dataset / "images").glob("*.jpg"))
    image.write_bytes(image.read_bytes() + b"what a phone appends")
    before = {path: path.read_bytes() for path in dataset.rglob("*") if path.is_file()}
    for _ in range(2):
        images = read_images(find_images([str(dataset / "images")]), 10).images
        known = {image.path: (image.labels.rows, image.size, image.labels.polygons) for image in images}
        made = upstream.make_dataset(known, 64, 2, stride=32)
        assert sum(len(labels) for labels in made.labels) > 0
        assert [made[index][0].shape for index in range(len(made))] == [(3, 64, 64)] * 6
    assert {path: path.read_bytes() for path in dataset.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "mark").exists()
    np.load(next((dataset / "images").glob("*.npy")), allow_pickle=True)
    assert (tmp_path / "mark").exists(), "the array would have run the command"


# --- weights of which one thing is wrong ------------------------------------------------------------------------------


def one_line(error: BaseException, path: Path) -> str:
    message = str(error)
    assert "\n" not in message
    assert str(path) in message
    assert len(message) < 900
    return message


def fill(name: str, number: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        with torch.no_grad():
            model.state_dict()[name].view(-1)[0] = number

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: delattr(model, "names"), "names"),
        (lambda model: setattr(model, "names", ["a"]), "names of 1 class, and its head finds 10"),
        (lambda model: setattr(model.model[-1], "nc", 11), "names of 10 classes, and its head finds 11"),
        (lambda model: setattr(model, "model", nn.Sequential()), "holds no YOLOv9 network"),
        (lambda model: model.model.__delitem__(-1), "ends in Concat"),
        (lambda model: setattr(model.model[2], "f", 7), "does not compute"),
        (lambda model: setattr(model.model[0], "conv", nn.Conv2d(3, 9, 3, 2, 1)), "does not compute"),
        (lambda model: setattr(model, "yaml", 5), "the model description is a int"),
        (fill("model.0.conv.weight", math.nan), "model.0.conv.weight holds NaN or infinity"),
    ],
)
def test_a_field_of_a_float_checkpoint(tmp_path, good, change, message):
    model = upstream.read_checkpoint(good["float"])["model"].float()
    change(model)
    torch.save({"model": model, "ema": None}, tmp_path / "changed.pt")
    with pytest.raises(CheckpointError, match=message) as caught:
        upstream.load_float(tmp_path / "changed.pt")
    one_line(caught.value, tmp_path / "changed.pt")


WEIGHT = "model.0.conv.weight"


@pytest.mark.parametrize(
    ("field", "content", "message"),
    [
        ("names", 5, "damaged"),
        ("names", {0: "only"}, "names of 1 class"),
        ("nc", 11, "names of 10 classes, and its head finds 11"),
        ("recipe", {"head": 5}, "head is 5"),
        ("recipe", {"float": ["model.99"]}, "model.99"),
        ("yaml", {}, "lacks nc"),
        ("yaml", "models/detect/gelan-c.yaml", "damaged"),
        ("yaml", {**TINY, "head": TINY["head"][:-1]}, "ends in Concat|damaged"),
        ("extra", None, "damaged"),
        ("quantized_state", {}, "placed quantizers differently"),
        ("quantized_state", {WEIGHT: torch.full((8, 3, 3, 3), math.nan)}, f"{WEIGHT} holds NaN"),
        ("quantized_state", {WEIGHT: torch.zeros(7, 3, 3, 3)}, "size mismatch"),
        ("format_version", 2, "has format 2"),
        ("format_version", torch.ones(2), "has format"),
    ],
)
def test_a_field_of_a_quantized_checkpoint(tmp_path, good, field, content, message):
    torch.save({**torch.load(good["quantized"], weights_only=True), field: content}, tmp_path / "changed.pt")
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.load_quantized(tmp_path / "changed.pt")
    one_line(caught.value, tmp_path / "changed.pt")
