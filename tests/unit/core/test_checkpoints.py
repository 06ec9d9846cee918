"""Checkpoints that name code are refused in one line and leave no mark; others are read as torch reads them."""

import copy
import json
import logging
import random
import re
import uuid
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hostile_canary import Outcome, watched
from hostile_files import call, instance, items, mapping, module, named, storage, tensor, torch_file, value
from torch import nn
from torch.optim.swa_utils import AveragedModel

from utils.core import checkpoints
from utils.core.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[3]
FOUR = {"0": np.arange(4, dtype=np.float32).tobytes()}
RELU = "torch.nn.modules.activation.ReLU"
CONV = "torch.nn.modules.conv.Conv2d"
SEQUENTIAL = "torch.nn.modules.container.Sequential"
BELOW, SEGMENT = "models.yolo.DDetect", "models.yolo.DSegment"
GETATTR = "builtins.getattr"
FORWARD = call(GETATTR, named(BELOW), value("forward"))
COMMAND = value("true")
RUN = items(COMMAND) + b"R"


class DDetect(nn.Module):
    def forward(self, x):
        return ["forward of", x]


class DSegment(DDetect):
    """Keeps the forward of the head below, as upstream's segment heads do."""


TORCH = {"activation": ("ReLU", "SiLU"), "batchnorm": ("BatchNorm2d",), "container": ("Sequential",),
         "conv": ("Conv2d",), "linear": ("Identity",), "upsampling": ("Upsample",)}  # fmt: skip
MODULES: dict[str, type[nn.Module]] = {BELOW: DDetect, SEGMENT: DSegment}
MODULES |= {f"torch.nn.modules.{place}.{name}": getattr(nn, name) for place, names in TORCH.items() for name in names}


def read(folder: Path, content: bytes) -> Any:
    return checkpoints.read_torch_file(torch_file(folder / "x.pt", content, FOUR), MODULES)


# --- files that would run code ----------------------------------------------------------------------------------------

FOREIGN = """
    os.system posix.system nt.system os.abort subprocess.Popen builtins.eval __builtin__.eval builtins.exec
    builtins.open builtins.__import__ builtins.setattr builtins.vars importlib.import_module runpy.run_path
    functools.partial operator.attrgetter operator.methodcaller copyreg._reconstructor copyreg.__newobj__
    torch.load torch.save torch.jit.load torch.hub.load torch.serialization.add_safe_globals
    torch._utils._rebuild_from_type_v2 torch.nn.modules.module.Module torch.nn.modules.conv.os.system
    models.common.DetectMultiBackend models.experimental.attempt_load models.yolo.DDetect.forward
    numpy.load numpy.save numpy.ndarray.tofile collections.namedtuple _codecs.lookup pathlib.Path.write_text
    pathlib.os.system sys.exit pickle.loads
"""

ATTACKS: dict[str, bytes] = {f"reduce {name}": call(name, COMMAND) for name in FOREIGN.split()} | {
    # every other way to a name or to a call
    "a name": named("os.system"), "a name in a dictionary": mapping(opt=named("os.system")),
    "inst": b"(" + COMMAND + b"i" + named("os.system")[1:], "obj": b"(" + named("os.system") + COMMAND + b"o",
    "newobj": named("os.system") + items(COMMAND) + b"\x81",
    "newobj_ex": named("os.system") + items(COMMAND) + b"}\x92",
    "stack_global": value("os") + value("system") + b"\x93" + RUN,
    "stack_global with dots": value("models.yolo") + value("DDetect.forward") + b"\x93",
    "stack_global of a path's method": value("pathlib") + value("Path.write_text") + b"\x93" + RUN,
    "from the memo": named("os.system") + b"q\x010" + b"h\x01" + RUN, "ext1": b"\x82\xf0" + RUN,
    "ext2": b"\x83\xf0\x00" + RUN, "ext4": b"\x84\xf0\x00\x00\x00" + RUN,
    "persistent id": value("os.system") + b"Q",
    "persistent id of another kind": items(value("module"), *[value("os")] * 4) + b"Q",
    "protocol 0's persistent id": b"Pos.system\n",
    # listed classes are not called, and cannot be changed
    **{f"reduce {name}": call(name, *arguments) for name, arguments in (
        (CONV, (value(3), value(3), value(1))), (RELU, ()), (BELOW, (COMMAND,)), ("torch.FloatStorage", (COMMAND,)),
        ("numpy.ndarray", (COMMAND,)), ("torch.float32", (COMMAND,)))},
    "newobj with arguments": instance(CONV, b"}", items(value(3), value(3), value(1))),
    "newobj_ex with arguments": named(CONV) + b")" + mapping(bias=b"\x89") + b"\x92",
    "obj of a class": b"(" + named(CONV) + value(3) + b"o",
    "inst of a class": b"(" + value(3) + b"i" + named(CONV)[1:],
    "build of a class": named(CONV) + mapping(forward=value(1)) + b"b",
    "build of a class's slots": named(CONV) + items(b"N", mapping(__new__=value(1))) + b"b",
    "build of a function's slots": named("torch.Size") + items(b"N", mapping(__defaults__=value((1,)))) + b"b",
    "build of a dictionary's class": named("collections.OrderedDict") + items(b"N", mapping(get=value(1))) + b"b",
    "build of a list": b"]" + mapping(append=named(RELU)) + b"b",
    "build of a tensor": tensor() + items(b"\x88", b"N", mapping(a=named(RELU))) + b"b",
    "build of a path": call("pathlib.PosixPath", value("a")) + items(b"N", mapping(_str=named(RELU))) + b"b",
    "call of a module": module(RELU) + RUN, "call of a tensor": tensor() + RUN,
    "call of a device": call("torch.device", value("cpu")) + items(named(RELU)) + b"R",
    # callables and hooks in the tree
    "a class as a value": mapping(kept=named(CONV)), "getattr as a value": mapping(detect=named(GETATTR)),
    "hooks": module(RELU, _forward_hooks=mapping(a=module(RELU))),
    "state_dict hooks": module(RELU, _state_dict_hooks=module(RELU)),
    "hooks of a child": module(SEQUENTIAL, mapping(a=module(RELU, _forward_pre_hooks=value({1: 2})))),
    "hooks of a tensor": tensor(hooks=value({"a": 1})),
    "hooks of a parameter": call("torch._utils._rebuild_parameter", tensor(), b"\x88", value({"a": 1})),
    "a compiled call": module(RELU, _compiled_call_impl=value("x")),
    "a private attribute": module(RELU, _own=value(1)), "__class__": module(RELU, __class__=named(CONV)),
    "__deepcopy__": module(RELU, __deepcopy__=module(RELU)),
    "a module as forward": module(RELU, forward=module(CONV)),
    "a module as an attribute": module(RELU, inner=module(RELU)),
    "a module within an attribute": module(RELU, inner=items(mapping(a=module(RELU)))),
    "a child as an attribute": module(SEQUENTIAL, mapping(a=module(RELU) + b"q\x07"), forward=b"h\x07"),
    "a module as a buffer": module(RELU, _buffers=mapping(a=module(RELU))),
    "a tensor as a parameter": module(RELU, _parameters=mapping(a=tensor())),
    "a tensor as a child": module(SEQUENTIAL, mapping(a=tensor())),
    "a module in a list": b"]" + module(RELU) + b"a",
    # getattr is the forward of the head below, in the one place where a segment head keeps it
    **{f"getattr {index}": module(SEGMENT, detect=call(GETATTR, *arguments)) for index, arguments in enumerate((
        (named(SEGMENT), value("forward")), (named(CONV), value("forward")), (named(BELOW), value("__init__")),
        (named(BELOW), value("forward.__globals__")), (named(BELOW), value("__subclasses__")),
        (named(BELOW), value(["forward"])), (module(BELOW), value("forward")), (FORWARD, value("__globals__")),
        (tensor(), value("numpy")), (value("os"), value("system")), (named(BELOW),)))},
    **{f"forward {index}": content for index, content in enumerate((
        FORWARD, mapping(model=FORWARD), FORWARD + items(value(1), value(2)) + b"R", b"}" + FORWARD + value(1) + b"s",
        FORWARD + mapping(__globals__=b"}") + b"b", module(SEGMENT, forward=FORWARD), module(BELOW, detect=FORWARD),
        module(SEGMENT, detect=items(FORWARD)), module(SEGMENT, mapping(detect=FORWARD)),
        module(SEGMENT, _buffers=mapping(detect=FORWARD)), call("builtins.set", b"](" + FORWARD + b"e")))},
    # NumPy's objects are pickles again
    "an array of objects": call("numpy.dtype", value("O8"), b"\x89", b"\x88"),
    "an array of addresses": call("numpy.core.multiarray._reconstruct") + items(
        value(1), value((1,)), value("O"), b"\x89", call("_codecs.encode", value("12345678"), value("latin1"))) + b"b",
    "a subclass of dtype": call("numpy.dtype", named("os.system")),
    "a scalar of an object": call("numpy.core.multiarray.scalar", value("O"), COMMAND),
}  # fmt: skip

BEFORE = """
import contextlib, copyreg, itertools, json, sys, torch
from pathlib import Path
sys.path.append({tests!r})
import test_checkpoints
from utils.core import checkpoints
copyreg.add_extension("os", "system", 240)
files = sorted(Path({folder!r}).glob("*.pt"))
"""
READ = """
for path in files:
    needed = ("model",) if "unneeded" in path.stem else None
    try:
        line = f"read: {checkpoints.read_torch_file(path, test_checkpoints.MODULES, needed=needed)!r}"
    except checkpoints.CheckpointError as error:
        line = str(error)
    print(json.dumps([path.stem, line]))
for function, count in itertools.product(checkpoints.FUNCTIONS.values(), range(5)):
    for text in ("mark", "touch mark", "http://127.0.0.1:9/a.pt", b"touch mark", ["mark"], "__import__('os').abort()"):
        with contextlib.suppress(Exception):
            function(*[text] * count)
"""
CONTROL = """
for path in files:
    with contextlib.suppress(Exception):
        torch.load(path, weights_only=False)
"""


def run(code: str, names: list[str], folder: Path) -> Outcome:
    """Let a process that is watched read the attacks of these names."""
    for name in names:
        torch_file(folder / f"{list(ATTACKS).index(name)}.pt", ATTACKS[name], FOUR)
        torch_file(folder / f"{list(ATTACKS).index(name)} unneeded.pt", mapping(model=b"N", note=ATTACKS[name]), FOUR)
    before = BEFORE.format(tests=str(Path(__file__).parent), folder=str(folder))
    return watched(code, folder / "report", before=before, cwd=ROOT)


def test_attacks_are_refused_in_one_line_and_leave_no_mark(tmp_path):
    outcome = run(READ, list(ATTACKS), tmp_path)
    lines = dict(json.loads(line) for line in outcome.out.splitlines())
    assert len(ATTACKS) > 100
    for index, name in enumerate(ATTACKS):
        line = lines.get(str(index), "the process has ended")
        assert re.search(rf"{index}\.pt (holds|is damaged)", line), (name, line)
        assert "\n" not in line
        assert len(line) < 500
        line = lines.get(f"{index} unneeded", "the process has ended")
        assert re.search(r"unneeded\.pt is damaged|^read: {'model': None(, 'note': {)?", line), (name, line)
        assert not re.search("^read.*(Shell|object at)", line), (name, line)
    assert (outcome.returncode, outcome.events) == (0, []), outcome.err


def test_attacks_would_run_a_command(tmp_path):
    names = ["reduce os.system", "inst", "obj", "stack_global", "from the memo", "ext1", "ext2", "ext4"]
    outcome = run(CONTROL, names, tmp_path)
    assert sum("os.system" in event for event in outcome.events) == 2 * len(names), outcome.err


# --- files that are damaged -------------------------------------------------------------------------------------------


def array(shape: tuple, dtype: str, order: str, data: bytes) -> bytes:
    start = call("numpy.core.multiarray._reconstruct", named("numpy.ndarray"), value((0,)), value("b"))
    kind = call("numpy.dtype", value(dtype)) + value((3, order, None, None, None, -1, -1, 0)) + b"b"
    text = call("_codecs.encode", value(data.decode("latin-1")), value("latin1"))
    return start + items(value(1), value(shape), kind, b"\x89", text) + b"b"


@pytest.mark.parametrize(
    "content",
    [
        *[tensor(size, stride, offset) for size, stride, offset in (
            ((5,), (1,), 0), ((2, 2), (4, 1), 0), ((4,), (1,), 1), ((4,), (1,), -1), ((2,), (-1,), 0), ((-1,), (1,), 0),
            ((2,), (), 0), ((1 << 62, 1 << 62), (1, 1), 0))],
        *[tensor(where=where) for where in (
            value(3), storage("1"), storage("../data.pkl"))],
        call("torch._utils._rebuild_parameter", value(1), b"\x88", b"}"),
        array((1,), "f8", "<", b"short"), array((1 << 40,), "f8", "<", b"12345678"),
        call("numpy.core.multiarray.scalar", call("numpy.dtype", value("f8")), value("text")),
        named(RELU) + b")\x81", instance(RELU, value([1])),  # without a state
        b"]q\x01h\x01a", b"}q\x01" + value("a") + b"h\x01s",  # containers in themselves
        b"]" * 100_000 + b"a" * 99_999,
        b"}" + value((1, 2)) + value(1) + b"s",
        b"\x8d" + b"\xff" * 8, b"h\x09", b"a", b"R", b"b", b"t", b"Q", b"",
    ],
)  # fmt: skip
def test_what_does_not_fit_together(tmp_path, content):
    assert read(tmp_path, tensor((2, 2), (1, 2))).tolist() == [[0, 2], [1, 3]]
    assert read(tmp_path, array((1,), "f8", ">", np.array(2, ">f8").tobytes())).tolist() == [2.0]
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, content)
    assert "\n" not in str(caught.value)


CONTENT = {"weights": torch.arange(1000.0), "bias": torch.ones(3, dtype=torch.float16), "text": "x" * 300}


def test_a_flipped_bit_anywhere_passes_only_where_nothing_reads_it(tmp_path):
    """torch itself reads a weight with a flipped bit without a word."""
    torch.save(CONTENT, tmp_path / "whole.pt")
    whole, rng, refused = (tmp_path / "whole.pt").read_bytes(), random.Random(1), 0
    first = whole.index(CONTENT["weights"].numpy().tobytes())
    for place in [first + rng.randrange(4000) for _ in range(100)] + [rng.randrange(len(whole)) for _ in range(700)]:
        changed = bytearray(whole)
        changed[place] ^= 1 << rng.randrange(8)
        (tmp_path / "x.pt").write_bytes(changed)
        try:
            content = checkpoints.read_torch_file(tmp_path / "x.pt")
            assert (content["text"], list(content)) == (CONTENT["text"], list(CONTENT))
            assert torch.equal(content["weights"], CONTENT["weights"])
        except CheckpointError:
            refused += 1
    assert refused > 500


def test_what_is_no_checkpoint_is_called_what_it_is(tmp_path):
    torch.save(CONTENT, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    torch.save(CONTENT, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.jit.script(nn.ReLU()).save(tmp_path / "script.pt")
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as archive:
        archive.writestr("readme.txt", b"x")
    (tmp_path / "folder.pt").mkdir()
    for name, content in {"empty": b"", **{f"part {end}": whole[:end] for end in (30, 1000, -1, -200)}}.items():
        (tmp_path / f"{name}.pt").write_bytes(content)
    (tmp_path / "whole.pt").unlink()
    expected = {
        "script": "is a TorchScript file",
        "legacy": "torch.save",
        "zip": "without data.pkl",
        "folder": "is a folder",
        "missing": "does not exist",
    }
    for path in [*tmp_path.iterdir(), tmp_path / "missing.pt"]:
        with pytest.raises(CheckpointError, match=expected.get(path.stem, "PyTorch 1.6 or newer")) as caught:
            checkpoints.read_torch_file(path)
        assert str(path) in str(caught.value)


# --- what torch.save writes -------------------------------------------------------------------------------------------


def plain(content: Any) -> Any:
    if isinstance(content, torch.Tensor):
        return [str(content.dtype), content.shape, content.stride(), content.requires_grad, content.tolist()]
    if isinstance(content, dict):
        return [type(content).__name__, [[key, plain(one)] for key, one in content.items()]]
    return [plain(one) for one in content] if isinstance(content, (list, tuple)) else repr(content)


@pytest.mark.parametrize("protocol", [2, 5])
def test_data_is_read_as_torch_reads_it(tmp_path, protocol):
    torch.manual_seed(0)
    base, network = torch.arange(24.0), nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    kinds = ("float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
    content = {
        "state": network.state_dict(),
        "optimizer": {"state": {0: {"momentum_buffer": torch.rand(8)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "kinds": [torch.ones(3).to(getattr(torch, kind)) for kind in kinds],
        "views": (base, base[2:8], base.view(4, 6).t(), base.view(4, 6)[:, 2], torch.empty(0, 3), torch.tensor(3),
                  base.view(4, 6)[:, 6:], base[24:], torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        "plain": [1, -1, 70000, 2**40, 1.5, float("inf"), None, True, "é", b"bytes\x80", (), (1,), {1, 2}],
        "others": [torch.Size([1, 2]), torch.float16, OrderedDict(a=1), np.float64(2), np.int64(3)],
        5: {"x": {}},
    }  # fmt: skip
    torch.save(content, tmp_path / "a.pt", pickle_protocol=protocol)
    found, expected = checkpoints.read_torch_file(tmp_path / "a.pt"), torch.load(tmp_path / "a.pt", weights_only=False)
    assert plain(found) == plain(expected)
    assert found["views"][0].data_ptr() == found["views"][2].data_ptr()
    part = checkpoints.read_torch_file(tmp_path / "a.pt", skip=("state", 5))
    assert part.keys() == content.keys() - {"state", 5}


def test_networks_arrays_and_paths(tmp_path):
    torch.manual_seed(0)
    act = nn.SiLU()
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), act, nn.Upsample(None, 2, "nearest"), act).eval()
    network[0].weight.requires_grad_(False)
    content = {"model": network, "ema": copy.deepcopy(network).half(), "path": PosixPath("/a/b"),
               "fitness": np.array([[0.5, 1.5]])}  # fmt: skip
    torch.save(content, tmp_path / "a.pt")
    read, x = checkpoints.read_torch_file(tmp_path / "a.pt", MODULES), torch.rand(1, 3, 8, 8)
    model = read["model"]
    assert torch.equal(model(x), network(x))
    assert model[2] is model[4]
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in network.parameters()]
    assert read["ema"][0].weight.dtype == torch.float16
    assert (read["fitness"].tolist(), read["path"]) == ([[0.5, 1.5]], "/a/b")
    model.train()(x).sum().backward()
    assert model[0].bias.grad is not None
    model[1].register_forward_hook(lambda *_: None)
    copy.deepcopy(model).float().state_dict()
    with pytest.raises(checkpoints.NotAllowed, match=r"torch\.nn\.modules\.container\.Sequential"):
        checkpoints.read_torch_file(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("pytorch_quantization.nn.modules.quant_conv.QuantConv2d", "was quantized with pytorch-quantization"),
        ("models.common.C3", "it is a checkpoint of YOLOv5, YOLOv7 or a fork"),
        ("my_package.Head", "holds my_package.Head, which is neither data nor a module class"),
        ("my_package.Head", "If my_package is another project, give the .pt file that upstream's train.py wrote"),
        ("modelopt.torch.quantization.nn.QuantConv2d", "was quantized with NVIDIA's Model Optimizer; give the FP32"),
        ("torch.ao.nn.quantized.modules.conv.Conv2d", "was quantized with PyTorch's own quantization; give the FP32"),
        ("torch.fx.graph_module.reduce_graph_module", "Save the model without fusing or wrapping it"),
    ],
)
def test_checkpoints_of_other_projects_are_named(tmp_path, name, problem):
    with pytest.raises(checkpoints.NotAllowed, match=re.escape(problem)) as refused:
        read(tmp_path, mapping(model=module(name)))
    assert "\n" not in str(refused.value)


def test_the_tool_that_quantized_is_named_whatever_else_is_refused_first(tmp_path):
    children = mapping(a=module("my_package.Head"), b=module("pytorch_quantization.nn.TensorQuantizer"))
    with pytest.raises(checkpoints.NotAllowed, match="was quantized with pytorch-quantization"):
        read(tmp_path, mapping(model=module(SEQUENTIAL, children)))


class Options(dict):
    """A class of somebody's, with items and attributes."""


def test_what_nothing_needs_may_be_of_any_class(tmp_path):
    """datetime and options wherever they are; other classes under keys that are not needed."""
    zone, options = timezone(timedelta(hours=2)), Options(a=1)
    options.more = [1]
    network = nn.Sequential(nn.ReLU())
    network.args = Namespace(started=datetime.now(zone), lr=0.1)
    content = {
        "model": network, "when": datetime.now(zone), "day": date.today(), "took": timedelta(3), "zone": zone,
        "opt": Namespace(imgsz=96, data=Path("a.yaml"), when=datetime.now(), inner=SimpleNamespace(x=1), own=options),
        "counted": Counter("aab"), "default": defaultdict(list, a=[1]), "queue": deque([1]), "kind": nn.Conv2d,
        "function": len, "id": uuid.uuid4(), "price": Decimal("1.5"), "own": options, "level": logging.INFO,
        "optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1),
        "generator": np.random.default_rng(0), "enum": re.IGNORECASE, "loss": nn.BCELoss(), "range": range(3),
    }  # fmt: skip
    torch.save(content, tmp_path / "a.pt")
    found = checkpoints.read_torch_file(tmp_path / "a.pt", MODULES, needed=("model",))
    assert found["opt"] == {"imgsz": 96, "data": "a.yaml", "when": None, "inner": {"x": 1}}
    assert found["model"].args == {"started": None, "lr": 0.1}
    assert found["level"] == logging.INFO
    assert not found.keys() & {"own", "queue", "kind", "function", "generator", "loss"}
    with pytest.raises(checkpoints.NotAllowed):
        checkpoints.read_torch_file(tmp_path / "a.pt", MODULES)
    torch.save({"model": {"a": options}}, tmp_path / "b.pt")
    with pytest.raises(checkpoints.NotAllowed, match=r"test_checkpoints\.Options"):
        checkpoints.read_torch_file(tmp_path / "b.pt", MODULES, needed=("model",))


@pytest.mark.parametrize("wrapper", [nn.DataParallel, AveragedModel])
def test_of_a_wrapper_the_network_is_read(tmp_path, wrapper):
    network, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.rand(1, 3, 8, 8)
    for content in (wrapper(network), {"model": wrapper(network)}):
        torch.save(content, tmp_path / "a.pt")
        found = checkpoints.read_torch_file(tmp_path / "a.pt", MODULES)
        found = found["model"] if isinstance(found, dict) else found
        assert type(found) is nn.Sequential
        assert torch.equal(found(x), network(x))
    evil = module("torch.nn.parallel.data_parallel.DataParallel", mapping(module=call("os.system", COMMAND)))
    with pytest.raises(checkpoints.NotAllowed, match=r"os\.system"):
        read(tmp_path, evil)


def test_a_safetensors_file_is_named(tmp_path):
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "a.pt").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match=r"a\.pt is a safetensors file.*give the \.pt file"):
        checkpoints.read_torch_file(tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoints.read_torch_file(tmp_path / "b.pt")


@pytest.mark.parametrize("function", [GETATTR, "__builtin__.getattr"])
def test_a_segment_head_keeps_the_forward_of_the_head_below(tmp_path, function):
    head = module(SEGMENT, detect=call(function, named(BELOW), value("forward")))
    for content in (head, mapping(model=module(SEQUENTIAL, mapping(a=head)))):
        found = read(tmp_path, content)
        found = found if isinstance(found, DSegment) else found["model"].a
        assert found.detect is DDetect.forward
        assert found.detect(found, 3) == ["forward of", 3]
