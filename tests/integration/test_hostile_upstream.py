"""Files that would run code by way of upstream: descriptions in checkpoints and YAMLs, label caches of a dataset."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hostile_canary import Outcome, program, watched
from random_networks import TINY, random_network, save_float, save_quantized

from utils import upstream
from utils.core.errors import InputError

BEFORE = (
    "from utils import upstream, upstream_import\nupstream_import.ensure()\n"
    "import onnx, matplotlib.pyplot, torch.utils.data"
)
COMMAND = "touch mark"
ROWS: dict[str, list[Any]] = {
    "bytes": [-1, 1, "os.system", [COMMAND.encode()]],
    "remove": [-1, 1, "os.remove", ["nearest"]],
    "exit": [-1, 1, "sys.exit", []],
    "abort": [-1, 1, "os.abort", []],
    "expression": [-1, 1, f"__import__('os').system('{COMMAND}') or Conv", [8]],
    "argument": [-1, 1, "Conv", [f"__import__('os').system('{COMMAND}')", 3, 2]],
    "number": [-1, 100_000_000, "Conv", [8, 3, 2]],
    "backend": [-1, 1, "DetectMultiBackend", ["nc"]],
}


class Runs:
    """A pickle that runs a command."""

    def __reduce__(self):
        import os

        return (os.system, (COMMAND,))


def run(words: list[Any], tmp_path: Path, checkout: Path, **options: Any) -> Outcome:
    """A program, from a folder of its own, so that `touch mark` is seen too."""
    return watched(program(words), tmp_path / "report", before=BEFORE, cwd=checkout, allowed=[tmp_path], **options)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("good")
    found = {"float": save_float(folder / "float.pt", random_network(TINY))}
    found["quantized"] = save_quantized(folder / "quantized.pt", found["float"])
    training = copy.deepcopy(TINY)
    training["head"][-1] = [[3, 8, 6, 3, 8, 6], 1, "DualDDetect", ["nc"]]
    found["training"] = save_float(folder / "training.pt", upstream.build_model(training))
    return found


def with_row(path: Path, row: list[Any], target: Path) -> Path:
    """A copy of a checkpoint whose description begins with another layer."""
    content = torch.load(path, weights_only=False)
    description = content["yaml"] if "yaml" in content else content["model"].yaml
    description["backbone"][0] = row
    torch.save(content, target)
    return target


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
@pytest.mark.parametrize("kind", ["float", "quantized", "training"])
def test_a_description_in_a_checkpoint_is_refused_before_upstream_sees_it(row, kind, good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from models.quantize import checkpoint

    file = with_row(good[kind], row, tmp_path / "evil.pt")
    readers = {"float": upstream.load_float, "training": upstream.load_training, "quantized": checkpoint.load}
    with pytest.raises(InputError, match=r"layer 0|backbone\[0\]"):
        readers[kind](file)
    assert [path.name for path in tmp_path.iterdir()] == ["evil.pt"]


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_a_description_in_a_yaml_is_refused(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "evil.yaml"
    file.write_text(yaml.safe_dump({**TINY, "backbone": [row, *TINY["backbone"][1:]]}))
    for read in (upstream.read_description, upstream.build_model):
        with pytest.raises(InputError, match=r"layer 0|backbone\[0\]"):
            read(file)
    assert [path.name for path in tmp_path.iterdir()] == ["evil.yaml"]


@pytest.mark.parametrize(
    "text",
    ["[" * 5000, "nc: " + "9" * 5000, "nc: 2001-99-99", "a: &a [*a]\nnc: *a", "nc: !!python/name:os.system ''", "x"],
)
def test_yamls_that_are_none(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        upstream.read_description(tmp_path / "a.yaml")
    assert "\n" not in str(caught.value)


def test_upstreams_parser_gets_nothing_unchecked_whoever_calls_it(tmp_path, monkeypatch):
    from models.yolo import DetectionModel, parse_model

    monkeypatch.chdir(tmp_path)
    for row in ROWS.values():
        evil = {**copy.deepcopy(TINY), "backbone": [row]}
        with pytest.raises(InputError, match=r"layer 0|backbone\[0\]"):
            DetectionModel(copy.deepcopy(evil), ch=3)
        with pytest.raises(InputError, match=r"layer 0|backbone\[0\]"):
            parse_model(copy.deepcopy(evil), [3])
    with pytest.raises(InputError, match="activation"):
        DetectionModel({**copy.deepcopy(TINY), "activation": "nn.ReLU();exit()"})
    assert list(tmp_path.iterdir()) == []


def test_a_network_is_built_with_the_weights_that_it_would_have_had():
    """Its size is found without memory; that must not take random numbers."""
    first = random_network(TINY).state_dict()
    torch.manual_seed(0)
    one = upstream.build_model(TINY).state_dict()
    torch.manual_seed(0)
    two = upstream.build_model(TINY).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in first)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "rows", [[[-1, 1, "Conv", [8192, 64, 1]]] * 9, [[-1, 9, "RepNCSPELAN4", [4000, 4000, 4000, 60]]]]
)
def test_a_network_larger_than_any_memory_is_refused_at_once(rows):
    with pytest.raises(InputError, match="the limit is"):
        upstream.build_model({**TINY, "backbone": rows, "head": [[[-1], 1, "DDetect", ["nc"]]]})


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["export_qat.py", "--weights", "FILE"], "quantized"),
        (["export_yoloV9.py", "--weights", "FILE"], "float"),
        (["reparameterization.py", "--weights", "FILE", "--save", "OUT/a.pt"], "training"),
        (["scripts/run_upstream.py", "val.py", "--weights", "FILE", "--device", "cpu"], "float"),
        (["scripts/run_upstream.py", "train.py", "--cfg", "YAML", "--data", "DATA", "--device", "cpu", "--epochs", "1",
          "--project", "OUT", "--hyp", "data/hyps/hyp.scratch-high.yaml"], "float"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)  # fmt: skip
def test_programs_refuse_with_one_line_and_leave_no_mark(words, kind, good, demo_data, tmp_path, checkout):
    file = with_row(good[kind], ROWS["bytes"], tmp_path / "evil.pt")
    text = yaml.safe_dump({**TINY, "backbone": [ROWS["bytes"], *TINY["backbone"][1:]]})
    (tmp_path / "evil.yaml").write_text(text)
    names = {"FILE": str(file), "OUT": str(tmp_path), "YAML": str(tmp_path / "evil.yaml"), "DATA": str(demo_data)}
    filled = [names.get(word, word.replace("OUT", str(tmp_path))) for word in words]
    found = run(filled, tmp_path, checkout)
    marks = [one for one in found.events if not one.startswith(("subprocess.Popen ('git'", "os.putenv"))]
    assert found.returncode == 2, found.err[-2000:]
    assert re.search(r"layer 0|backbone\[0\]", found.err)
    assert "Traceback" not in found.err
    assert not any("mark" in one or one.startswith("os.system") for one in marks)
    assert not (checkout / "mark").exists()


@pytest.fixture
def dataset(demo_data: Path, tmp_path: Path) -> Path:
    """A few images of the demo set, with a label cache and an image's array that would run a command."""
    source = Path(yaml.safe_load(demo_data.read_text())["path"])
    source = source if source.is_absolute() else demo_data.parent / source
    images = sorted((source / "images").rglob("*.*"))[:6]
    for image in images:
        label = Path(str(image).replace("/images/", "/labels/")).with_suffix(".txt")
        for path, folder in ((image, "images"), (label, "labels")):
            (tmp_path / "set" / folder).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / "set" / folder / path.name)
    evil = np.empty((), dtype=object)
    evil[()] = Runs()
    for name in ("labels.cache", "images/" + images[0].stem + ".npy"):
        with open(tmp_path / "set" / name, "wb") as file:
            np.save(file, evil)
    return tmp_path / "set"


def test_label_caches_and_arrays_are_neither_read_nor_written(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in dataset.rglob("*") if path.is_file()}
    for _ in range(2):
        found = upstream.make_dataset(str(dataset / "images"), 64, 2, stride=32)
        assert sum(len(labels) for labels in found.labels) > 0
        assert [found[index][0].shape for index in range(len(found))] == [(3, 64, 64)] * 6
    assert {path: path.read_bytes() for path in dataset.rglob("*") if path.is_file()} == before
    image = next(path for path in before if path.suffix == ".jpg")
    image.write_bytes(image.read_bytes() + b"what a phone appends")
    (dataset / "labels.cache").unlink()
    upstream.make_dataset(str(dataset / "images"), 64, 2, stride=32)
    assert not list(dataset.rglob("*.cache*"))
    assert image.read_bytes() == before[image] + b"what a phone appends"
    assert not (tmp_path / "mark").exists()
    np.load(dataset / "images" / next(path.name for path in before if path.suffix == ".npy"), allow_pickle=True)
    assert (tmp_path / "mark").exists(), "the array would have run the command"


def test_upstreams_own_programs_read_no_cache(dataset, tmp_path, checkout):
    """What train.py and val.py make their batches with."""
    cache = (dataset / "labels.cache").read_bytes()
    code = f"""
from utils.dataloaders import create_dataloader
create_dataloader({str(dataset / "images")!r}, 64, 2, 32, workers=0)
"""
    found = watched(code, tmp_path / "report", before=BEFORE, cwd=checkout, allowed=[tmp_path])
    assert found.returncode == 0, found.err[-2000:]
    assert not any("os.system" in one for one in found.events)
    assert not (checkout / "mark").exists()
    assert (dataset / "labels.cache").read_bytes() == cache
