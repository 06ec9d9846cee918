"""Checkpoints, model descriptions and datasets of strangers: no code of theirs is run, and damage is one line."""

import copy
import math
import platform
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hostile_canary import program as command_of
from hostile_canary import watched
from hostile_files import call, mapping, torch_file, value
from qat_runs import write_small_set
from random_networks import TINY, random_network, save_float, save_quantized, tiny_with
from torch import nn

import qat
from models.quantize import checkpoint
from utils import upstream
from utils.core import checkpoints
from utils.core.errors import CheckpointError, InputError
from utils.evaluation.data_yaml import load_data
from utils.evaluation.image_files import find_images
from utils.evaluation.labels import label_file
from utils.evaluation.split import read_images
from utils.upstream.description import ACTIVATIONS, TRAINING_HEADS

IMPORTS = (
    "from utils import upstream\nfrom utils.upstream.checkout import import_upstream\nimport_upstream()\n"
    "import onnx, matplotlib.pyplot, torch.utils.data"
)
COMMAND = "touch mark"
ROWS: dict[str, list[Any]] = {  # of a model description: upstream would evaluate these
    "bytes": [-1, 1, "os.system", [COMMAND.encode()]],
    "expression": [-1, 1, f"__import__('os').system('{COMMAND}') or Conv", [8]],
    "argument": [-1, 1, "Conv", [f"__import__('os').system('{COMMAND}')", 3, 2]],
    "number": [-1, 100_000_000, "Conv", [8, 3, 2]],
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("good")
    found = {"float": save_float(folder / "float.pt", random_network(TINY))}
    found["quantized"] = save_quantized(folder / "quantized.pt", found["float"])
    found["masks"] = save_float(folder / "masks.pt", random_network(tiny_with("DSegment")))
    found["training"] = save_float(folder / "training.pt", upstream.build_model(tiny_with("DualDDetect")))
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
        (partial(upstream.load_float, heads=TRAINING_HEADS), with_row(good["training"], row, tmp_path / "training.pt")),
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
    "words",
    [
        "qat.py eval --weights PICKLE --data DATA --project OUT",
        "reparameterization.py --weights MODEL --save OUT/a.pt",
        "scripts/run_upstream.py val.py --weights PICKLE --device cpu",
        "scripts/run_upstream.py train.py --cfg YAML --data DATA --device cpu --epochs 1 --project OUT "
        "--hyp data/hyps/hyp.scratch-high.yaml",
    ],
)
def test_programs_refuse_with_one_line_and_leave_no_mark(words, good, demo_data, tmp_path, checkout, fork_server):
    files = {"PICKLE": tmp_path / "pickle.pt", "YAML": tmp_path / "a.yaml", "DATA": demo_data, "OUT": tmp_path}
    files["MODEL"] = with_row(good["training"], ROWS["bytes"], tmp_path / "model.pt")
    torch_file(files["PICKLE"], mapping(model=call("os.system", value(COMMAND))))
    files["YAML"].write_text(yaml.safe_dump({**TINY, "backbone": [ROWS["bytes"], *TINY["backbone"][1:]]}))
    for name, file in files.items():
        words = words.replace(name, str(file))
    started = {"before": IMPORTS} if words.startswith("qat.py") else {"fork": fork_server}  # one starts for real
    outcome = watched(command_of(words.split()), tmp_path / "report", cwd=checkout, allowed=[tmp_path], **started)
    assert outcome.returncode == 2, outcome.err[-2000:]
    assert "os.system" in outcome.err
    assert "Traceback" not in outcome.err
    assert not [event for event in outcome.events if re.search(r"^os\.system|(^|[/ ])mark(?![\w./])", event)]
    assert not (checkout / "mark").exists()


def test_the_lists_are_what_upstreams_networks_are_made_of(checkout, monkeypatch):
    classes = upstream.module_classes()  # after which upstream can be imported
    from models.common import Conv, RepConvN
    from models.yolo import parse_model

    for layer in (Conv, RepConvN):  # upstream sets it to what the last YAML with an `activation` says
        monkeypatch.setattr(layer, "default_act", layer.default_act)
    for path in checkout.glob("models/*/*.yaml"):
        if "backbone" in yaml.safe_load(path.read_text()):
            description = upstream.read_description(path)
            if path.parent.name == "hub":  # YOLOv3 and v5 give anchors, which upstream's heads no longer take
                with pytest.raises(InputError, match="cannot build this model description"):
                    upstream.build_model(path)
            else:
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


def test_label_caches_and_arrays_are_neither_read_nor_written(demo_data, tmp_path, monkeypatch):
    """Of a few images of the demo set, with a label cache and an image's array that would run a command."""
    monkeypatch.chdir(tmp_path)
    for name in ("images", "labels"):
        (tmp_path / "set" / name).mkdir(parents=True)
    for image in find_images(load_data(demo_data).paths("train"))[:6]:
        shutil.copy(image, tmp_path / "set/images")
        shutil.copy(label_file(image), tmp_path / "set/labels")
    evil, array = np.empty((), dtype=object), tmp_path / "set/images" / f"{Path(image).stem}.npy"
    evil[()] = Runs()
    np.save(array, evil)
    shutil.copy(array, tmp_path / "set/labels.cache")
    with (tmp_path / "set/images" / Path(image).name).open("ab") as file:
        file.write(b"what a phone appends")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for _ in range(2):
        images = read_images(find_images([str(tmp_path / "set/images")]), 10).images
        known = {image.path: (image.labels.rows, image.size, image.labels.polygons) for image in images}
        dataset = upstream.make_dataset(known, 64, 2, stride=32)
        assert sum(len(labels) for labels in dataset.labels) > 0
        assert [dataset[index][0].shape for index in range(len(dataset))] == [(3, 64, 64)] * 6
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    np.load(array, allow_pickle=True)
    assert (tmp_path / "mark").exists(), "the array would have run the command"


# --- weights of which one thing is wrong ------------------------------------------------------------------------------


WEIGHT = "model.0.conv.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model, "names", ["a"]), "names of 1 class, from 0 on, and its head finds 10"),
        (lambda model: setattr(model, "names", {1 + key: "a" for key in range(10)}), "the first for class 0"),
        (lambda model: setattr(model, "model", nn.Sequential()), "lacks the layers of a YOLOv9 network"),
        (lambda model: model.model.__delitem__(-1), "ends in Concat"),
        (lambda model: setattr(model.model[2], "f", 7), "does not compute"),
        (lambda model: setattr(model, "yaml", 5), "the model description is a int"),
        (lambda model: model.model[0].conv.weight.data.fill_(math.nan), "model.0.conv.weight holds NaN or infinity"),
        ({"nc": 11}, "names 11 classes, but its head has 10"),
        ({"recipe": {"float": ["model.99"]}}, "model.99"),
        ({"yaml": {**TINY, "head": TINY["head"][:-1]}, "fp32_modules": None}, "(ends in Concat|damaged)"),
        ({"extra": None}, "damaged"),
        ({"quantized_state": {}}, "placed quantizers differently"),
        ({"quantized_state": {WEIGHT: torch.full((8, 3, 3, 3), math.nan)}}, f"{WEIGHT} holds NaN"),
        ({"format_version": 2}, "has format 2"),
    ],
)
def test_a_part_of_a_checkpoint_that_cannot_be(tmp_path, good, change, message):
    """Of a float one an attribute of the network, of a quantized one an entry."""
    path = tmp_path / "changed.pt"
    if isinstance(change, dict):
        read, content = checkpoint.load_quantized, {**torch.load(good["quantized"], weights_only=True), **change}
    else:
        read, content = upstream.load_float, {"model": upstream.read_checkpoint(good["float"])["model"].float()}
        change(content["model"])
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=f"^[^\n]*changed.pt[^\n]*{message}[^\n]*$"):
        read(path)


COUNT = 150  # of each kind of file
TEXTS = ["", "x", "nc", "../../x", "__import__('os').system('touch mark')", "a\nb", "*", "9" * 500]
NUMBERS = [0, -1, 1, 2**31, 2**70, 0.5, -0.0, 1e300, math.nan, math.inf, True, None]


def other_value(rng: random.Random) -> Any:
    """Something that does not belong there."""
    number, text = rng.choice(NUMBERS), rng.choice(TEXTS)
    return rng.choice([text, number, [number] * rng.randrange(4), {text: number}, [[[text]]]])


def places(content: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of nested dictionaries and lists."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [place for key, inner in entries for place in ((content, key), *places(inner))]


def changed(content: Any, rng: random.Random) -> Any:
    """A copy in which one to three values are replaced, deleted, swapped or added."""
    content = copy.deepcopy(content)
    for _ in range(rng.randint(1, 3)):
        found = places(content)
        if not found:
            return other_value(rng)
        (container, key), (other, name) = rng.choice(found), rng.choice(found)
        action = rng.randrange(5)
        if action == 0:
            del container[key]
        elif action == 1:
            container[key] = copy.deepcopy(other[name])
        elif action == 2 and isinstance(container, dict):
            container[rng.choice(TEXTS[:4])] = other_value(rng)
        elif action == 3 and isinstance(container[key], torch.Tensor):
            container[key] = torch.full((rng.randrange(4), 2), rng.choice([0.0, math.nan, -1.0]))
        else:
            container[key] = other_value(rng)
    return content


def changed_network(model: Any, rng: random.Random) -> Any:
    """A copy of a network in which one attribute, tensor or layer is another."""
    model = copy.deepcopy(model)
    owner = rng.choice([model, model.model[-1], *model.modules()])
    table = rng.choice([one for one in (vars(owner), owner._modules, owner._parameters, owner._buffers) if one])
    name = rng.choice([name for name in table if not name.startswith("_")] or ["extra"])
    if table is owner._modules:
        table[name] = rng.choice([nn.Identity(), nn.Conv2d(2, 3, 1), nn.Sequential(), copy.deepcopy(model.model[0])])
    elif table is vars(owner):
        table[name] = other_value(rng)
    elif isinstance(table[name], torch.Tensor):
        table[name].data = rng.choice([table[name].data * math.nan, torch.ones(2, 2), table[name].data.half()])
    return model


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """The bytes with flipped bits, or cut."""
    mutated = bytearray(content)
    if rng.randrange(3) == 0:
        return bytes(mutated[: rng.randrange(len(mutated))])
    for _ in range(rng.choice([1, 1, 4, 100])):
        mutated[rng.randrange(len(mutated))] ^= 1 << rng.randrange(8)
    return bytes(mutated)


NAMES = ["float", "quantized"]


def mutations(name: str, good: dict[str, Path], path: Path, count: int) -> Iterator[None]:
    """Write a checkpoint as it should be, then `count` mutations of it, a third of them in its bytes."""
    rng, content = random.Random(14), torch.load(good["quantized"], weights_only=True)
    if name == "float":
        content = {"model": upstream.read_checkpoint(good["float"])["model"].float()}
    torch.save(content, path)
    yield
    whole = path.read_bytes()
    for index in range(count):
        if index % 3 == 0:
            path.write_bytes(changed_bytes(whole, rng))
        elif name == "float":
            torch.save({"model": changed_network(content["model"], rng)}, path)
        else:
            torch.save(changed(content, rng), path)
        yield


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ran(BaseException):
        """No handler of errors takes it for one."""

    def forbidden(*words: Any, **_: Any) -> None:
        raise Ran(words)

    platform.processor()  # which asks a program, once
    for target in ("os.system", "os.popen", "subprocess.Popen", "socket.socket"):
        monkeypatch.setattr(target, forbidden)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", NAMES)
def test_mutations_give_only_our_errors(name, good, tmp_path):
    read = {"float": upstream.load_float, "quantized": checkpoint.load_quantized}[name]
    path, lines = tmp_path / "a.pt", []
    made = mutations(name, good, path, COUNT)
    next(made)
    read(path)
    for _ in made:
        try:
            read(path)
        except InputError as error:
            lines.append(str(error))
    assert len(lines) > COUNT // 4, "the mutations are felt"
    assert not [line for line in lines if "\n" in line or len(line) > 2000]
    assert [one.name for one in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.usefixtures("nothing_runs", "blank_plots")
@pytest.mark.parametrize("name", NAMES)
def test_programs_end_mutations_with_0_1_or_2_and_without_a_traceback(name, good, demo_data, tmp_path, program):
    data, path, codes = write_small_set(tmp_path / "set", demo_data, train=2, val=2), tmp_path / "a.pt", []
    words = ("--imgsz", 64, "--batch-size", 2, "--workers", 0, "--device", "cpu", "--project", tmp_path / "runs")
    for _ in mutations(name, good, path, 8):
        code, out, err = program(qat.main, "eval", "--weights", path, "--data", data, *words)
        assert "Traceback" not in "".join(out + err)
        assert len(err) <= 1 or code == 0
        codes.append(code)
    assert codes[0] == 0
    assert set(codes) <= {0, 1, 2}
    assert codes.count(2) > 2
