"""Random mutations of every file that is read: only our own errors come out, nothing runs, nothing is written.

FUZZ_MUTATIONS says how many of each kind (default 60); the seed is fixed. Files are read in this process by what the
programs read them with, and a few by whole programs.
"""

from __future__ import annotations

import builtins
import copy
import io
import json
import math
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from random_networks import TINY, random_network, save_float, save_quantized, tiny_with
from report_examples import make_row
from torch import nn

import qat
from models.quantize import checkpoint, placement
from models.quantize.recipe import Recipe
from utils import upstream
from utils.core.errors import InputError
from utils.core.score import Score
from utils.evaluation.data_yaml import load_data
from utils.jobs import run_state
from utils.jobs.options import QuantizeOptions, SensitiveOptions
from utils.jobs.run_state import Best, RunState
from utils.jobs.sensitivity.state import AnalysisState

COUNT = int(os.environ.get("FUZZ_MUTATIONS", "60"))
STRINGS = [
    "",
    "x",
    "nc",
    "../../x",
    "__import__('os').system('touch ran')",
    "\ud800",
    "a\nb",
    "nn.Identity",
    "*",
    "9" * 500,
]
NUMBERS = [0, -1, 1, 2**31, 2**70, -(2**70), 0.5, -0.0, 1e-320, 1e300, math.nan, math.inf, True, None]


def value(rng: random.Random, tensors: bool) -> Any:
    """Something that does not belong there."""
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice(STRINGS),
        lambda: rng.choice(NUMBERS),
        lambda: [rng.choice(NUMBERS)] * rng.randrange(4),
        lambda: {rng.choice(STRINGS[:3]): rng.choice(NUMBERS)},
        lambda: [[[rng.choice(STRINGS)]]],
    ]
    if tensors:
        kinds += [
            lambda: torch.full((rng.randrange(4), 2), rng.choice([0.0, math.nan, -1.0])),
            lambda: b"x",
            lambda: (1,),
        ]
    return rng.choice(kinds)()


def places(content: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """Every (container, key) of nested dicts and lists."""
    found = [] if found is None else found
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, inner in entries:
        found.append((content, key))
        places(inner, found)
    return found


def mutate(content: Any, rng: random.Random, tensors: bool = False) -> Any:
    """A copy with one to three values replaced, deleted, doubled, added or swapped."""
    content = copy.deepcopy(content)
    for _ in range(rng.randint(1, 3)):
        where = places(content)
        if not where:
            return value(rng, tensors)
        container, key = rng.choice(where)
        action = rng.randrange(6)
        if action == 0:
            del container[key]
        elif action == 1:
            other, name = rng.choice(where)
            if (isinstance(other, dict) and name in other) or (isinstance(other, list) and name < len(other)):
                container[key] = copy.deepcopy(other[name])
        elif action == 2 and isinstance(container, dict):
            container[rng.choice([*STRINGS[:4], 7, *([None] if tensors else [])])] = value(rng, tensors)
        elif action == 3 and isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        elif action == 4 and isinstance(container[key], torch.Tensor):
            tensor = container[key] = container[key].clone()
            if tensor.numel():
                tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice([0, 1, -1])
        else:
            container[key] = value(rng, tensors)
    return content


def bytes_mutated(content: bytes, rng: random.Random) -> bytes:
    """Flipped bits, a cut, or a block in another place."""
    changed = bytearray(content)
    kind = rng.randrange(4)
    if kind == 0:
        return bytes(changed[: rng.randrange(len(changed))])
    if kind == 1:
        start, length = rng.randrange(len(changed)), rng.randrange(64)
        target = rng.randrange(len(changed))
        changed[target : target + length] = changed[start : start + length]
        return bytes(changed)
    for _ in range(rng.choice([1, 1, 4, 100])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def network_mutated(model: Any, rng: random.Random) -> Any:
    """A copy of a network with one attribute, tensor or submodule changed."""
    model = copy.deepcopy(model)
    owner = rng.choice([model, model.model[-1], *model.modules()])
    kind = rng.randrange(3)
    public = [name for name in vars(owner) if not name.startswith("_")] + ["names", "stride", "yaml", "save"]
    if kind == 0:
        vars(owner)[rng.choice(public)] = value(rng, True)
    elif kind == 1 and owner._modules:
        name = rng.choice(list(owner._modules))
        owner._modules[name] = rng.choice(
            [nn.Identity(), nn.Conv2d(2, 3, 1), nn.Sequential(), copy.deepcopy(model.model[0])]
        )
    else:
        tables = [table for module in model.modules() for table in (module._parameters, module._buffers) if table]
        table = rng.choice(tables)
        name = rng.choice(list(table))
        if isinstance(table[name], torch.Tensor):
            bad = value(rng, True)
            table[name] = (
                nn.Parameter(bad.float())
                if isinstance(bad, torch.Tensor) and isinstance(table[name], nn.Parameter)
                else (
                    bad
                    if isinstance(bad, torch.Tensor)
                    else table[name].new_full(table[name].shape, rng.choice([0, 1, 100]))
                )
            )
    return model


class Touched(BaseException):
    """Something outside was reached for; no handler of errors takes it for one."""


@contextmanager
def canary(allowed: Path) -> Iterator[None]:
    """Nothing is run, connected to, or opened for writing but below `allowed`."""

    def forbidden(*words: Any, **_: Any) -> Any:
        raise Touched(repr(words)[:200])

    real = builtins.open

    def watched(file: Any, mode: str = "r", *words: Any, **more: Any) -> Any:
        if set(mode) & set("wax+") and not isinstance(file, int) and allowed not in Path(file).resolve().parents:
            raise Touched(f"open({file!r}, {mode!r})")
        return real(file, mode, *words, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "system", forbidden)
        patch.setattr(os, "popen", forbidden)
        patch.setattr(subprocess, "Popen", forbidden)
        patch.setattr(socket, "socket", forbidden)
        patch.setattr(builtins, "open", watched)
        patch.setattr(io, "open", watched)
        yield


def torch_bytes(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def yaml_bytes(content: Any) -> bytes:
    return yaml.safe_dump(content).encode("utf-8", "surrogatepass")


def json_bytes(content: Any) -> bytes:
    return json.dumps(content).encode()


class Kind:
    """A kind of file: what is in it, how it is written, mutated and read."""

    def __init__(self, name: str, content: Any, write: Callable[[Any], bytes], read: Callable[[Path], object],
                 change: Callable[[Any, random.Random], Any] | None = None) -> None:  # fmt: skip
        self.name, self.content, self.write, self.read = name, content, write, read
        tensors = write is torch_bytes
        self.change = change or (lambda content, rng: mutate(content, rng, tensors))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    save_quantized(folder / "int8.pt", save_float(folder / "float.pt", random_network(TINY)))
    save_float(folder / "masks.pt", random_network(tiny_with("DSegment")))
    return folder


@pytest.fixture(scope="module")
def kinds(weights: Path, demo_data: Path) -> dict[str, Kind]:
    network, masks = (upstream.read_checkpoint(weights / name)["model"] for name in ("float.pt", "masks.pt"))
    network_of = upstream.fuse(upstream.load_float(weights / "float.pt").model)
    quantized = torch.load(weights / "int8.pt", weights_only=True)
    found = [
        Kind("float.pt", network, lambda model: torch_bytes({"model": model, "ema": None}), upstream.load_float,
             network_mutated),
        Kind("masks.pt", masks, lambda model: torch_bytes({"model": model, "ema": None}), upstream.load_float,
             network_mutated),
        Kind("int8.pt", quantized, torch_bytes, checkpoint.load),
        Kind("last.pt", run_content(), torch_bytes, lambda path: RunState.load(path.parents[1])),
        Kind("state.json", analysis_content(), json_bytes, lambda path: AnalysisState.load(path.parent)),
        Kind("recipe.yaml", Recipe().to_dict() | {"float": ["model.3"]}, yaml_bytes,
             lambda path: placement.plan(network_of, Recipe.from_file(path))),
        Kind("data.yaml", yaml.safe_load(demo_data.read_text()), yaml_bytes, lambda path: load_data(path).paths("val")),
        Kind("model.yaml", TINY, yaml_bytes, upstream.build_model),
    ]  # fmt: skip
    return {kind.name: kind for kind in found}


def run_content() -> dict[str, Any]:
    row = make_row("PTQ", file="a.pt", ap=0.5).to_dict()
    state = RunState(QuantizeOptions(weights="toy.pt").to_dict(), Recipe().to_dict(), "00ff")
    state.rows = {stage: {**row, "stage": stage} for stage in ("float", "PTQ", "QAT")}
    state.history = [{"epoch": 0, "ap": 0.5, "ap50": 0.6, "loss": 0.1, "lr": 1e-6, "seconds": 1.0}]
    state.files, state.checkpoint = ["a.pt", "b.pt"], "b.pt"
    moments = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    state.trainer = {"optimizer": {"state": {0: moments}, "param_groups": [{"lr": 0.0, "params": [0]}]}, "scaler": {}}
    return {"run_state": run_state.STATE_VERSION, **vars(state), "best": Best(Score(0.5), 0, "a.pt").to_dict()}


def analysis_content() -> dict[str, Any]:
    state = AnalysisState(SensitiveOptions(weights="toy.pt").to_dict(), Recipe().to_dict(), "00ff", {"model.0": 1.5})
    state.screened = {"units": {"0": {"model.0": [10, 1.0, 0.5, 0.2, 0.3]}}}
    state.ap, state.seconds = {"units": {"float": 0.5, "INT8": 0.4}}, {"calibration": 1.0}
    return {"analysis_state": 1, **asdict(state)}


def mutations(kind: Kind, count: int) -> Iterator[bytes]:
    """A third of them in the bytes, the others in what is in the file."""
    rng = random.Random(14)
    whole = kind.write(kind.content)
    made = 0
    while made < count:
        if made % 3 == 0:
            yield bytes_mutated(whole, rng)
        else:
            try:
                yield kind.write(kind.change(kind.content, rng))
            except Exception:  # noqa: BLE001 - what cannot be written is no file
                continue
        made += 1


NAMES = ["float.pt", "masks.pt", "int8.pt", "last.pt", "state.json", "recipe.yaml", "data.yaml", "model.yaml"]


def place(folder: Path, name: str) -> Path:
    """Where a file of this kind lies."""
    path = folder / ("weights" if name == "last.pt" else ".") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for other in ("a.pt", "b.pt"):
        (path.parent / other).write_bytes(b"x")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_only_our_errors_come_out(name: str, kinds: dict[str, Kind], tmp_path: Path):
    kind, path = kinds[name], place(tmp_path / "run", name)
    path.write_bytes(kind.write(kind.content))
    kind.read(path)
    files = {one for one in Path.cwd().iterdir() if one.name != "__pycache__"}
    refused, lines = 0, []
    for index, content in enumerate(mutations(kind, COUNT)):
        path.write_bytes(content)
        with canary(tmp_path):
            try:
                kind.read(path)
            except InputError as error:
                refused += 1
                lines.append(str(error))
            except (Exception, Touched) as error:
                shutil.copy(path, tmp_path / f"found-{name}")
                raise AssertionError(f"mutation {index} of {name}: {type(error).__name__}: {error}") from error
    assert refused > COUNT // 4  # the mutations are felt
    assert not [line for line in lines if len(line) > 2000]
    assert {one for one in Path.cwd().iterdir() if one.name != "__pycache__"} == files


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float.pt", "int8.pt"])
def test_whole_programs_end_with_0_1_or_2_and_without_a_traceback(
    name: str, kinds: dict[str, Kind], tmp_path: Path, demo_data: Path, capsys: pytest.CaptureFixture[str]
):
    kind, path = kinds[name], tmp_path / name
    for content in mutations(kind, max(COUNT // 20, 2)):
        path.write_bytes(content)
        with canary(tmp_path):
            code = qat.main(["eval", "--weights", str(path), "--data", str(demo_data.with_name("missing.yaml")),
                             "--device", "cpu", "--project", str(tmp_path / "runs")])  # fmt: skip
        out, err = capsys.readouterr()
        assert code == 2
        assert "Traceback" not in out + err
        assert err.count("\n") == 1
    assert [one.name for one in tmp_path.iterdir()] == [name]
