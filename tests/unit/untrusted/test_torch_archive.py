"""Files that name code, lie about their tensors, or never end: none is loaded, and what torch.save writes is."""

from __future__ import annotations

import copy
import pickle
import zipfile
from collections import OrderedDict
from pathlib import PosixPath, PurePosixPath

import numpy as np
import pytest
import torch
from hostile_files import call, instance, items, mapping, module, named, storage, tensor, torch_file, value
from torch import nn

from utils.untrusted import pickle_machine, torch_archive
from utils.untrusted.allowed_names import TORCH_MODULES
from utils.untrusted.pickle_machine import Damaged, NotAllowed

MODULES = {f"{place}.{name}": getattr(nn, name) for place, names in TORCH_MODULES.items() for name in names}
RELU = "torch.nn.modules.activation.ReLU"
SEQUENTIAL = "torch.nn.modules.container.Sequential"
CONV = "torch.nn.modules.conv.Conv2d"
FOUR = {"0": np.arange(4, dtype=np.float32).tobytes()}


def read(path, content: bytes, storages=FOUR, **options):
    return torch_archive.read(torch_file(path / "x.pt", content, storages, **options), MODULES)


@pytest.mark.parametrize(
    "name",
    [
        "os.system", "posix.system", "nt.system", "subprocess.Popen", "builtins.eval", "__builtin__.exec",
        "__builtin__.getattr", "builtins.getattr", "builtins.open", "__builtin__.__import__", "importlib.import_module",
        "builtins.setattr", "builtins.hasattr", "builtins.vars",
        "functools.partial", "operator.attrgetter", "torch.load", "torch.jit.load", "torch.hub.load", "torch.save",
        "torch.serialization.add_safe_globals", "torch._utils._rebuild_from_type_v2", "torch._tensor.Tensor",
        "torch.nn.modules.container.ModuleDict", "torch.nn.modules.module.Module", "torch.nn.modules.conv.warnings",
        "models.common.DetectMultiBackend", "models.common.AutoShape", "models.experimental.attempt_load",
        "yolov9.models.common.DetectMultiBackend", "models.common.Conv.forward", "numpy.load", "numpy.save",
        "numpy.core.multiarray.fromfile", "numpy.ndarray.tofile", "pathlib.Path.write_text", "pathlib.os.system",
        "collections.os.system", "collections.namedtuple", "_codecs.lookup", "sys.exit", "os.abort", "",
    ],
)  # fmt: skip
def test_names_that_are_not_listed_are_refused_wherever_they_stand(tmp_path, name):
    for content in (named(name), call(name, value("touch mark")), instance(name, b"}"), mapping(opt=named(name))):
        with pytest.raises((NotAllowed, Damaged)) as caught:
            read(tmp_path, content)
        if name and "__builtin__" not in name:
            assert name in str(caught.value)


@pytest.mark.parametrize("name", [CONV, RELU, SEQUENTIAL, "torch.FloatStorage", "numpy.ndarray", "torch.float32"])
def test_classes_are_never_called(tmp_path, name):
    for arguments in ((), (value(3),), (value("touch mark"), value(2), value(1))):
        with pytest.raises(NotAllowed):
            read(tmp_path, call(name, *arguments))
    for content in (
        instance(name, b"}", items(value(3), value(3), value(1))),  # NEWOBJ with arguments
        named(name) + b")}\x92",  # NEWOBJ_EX
        b"(" + named(name) + value(3) + b"o",  # OBJ
        b"(" + value(3) + b"i" + named(name)[1:],  # INST
        named(name) + b")\x81" if name == "torch.float32" else mapping(kept=named(name)),  # the class as a value
    ):
        with pytest.raises(NotAllowed):
            read(tmp_path, content)


@pytest.mark.parametrize(
    "code", [b"I1\n", b"S'a'\n", b"Pid\n", b"\x82\x01", b"\x96" + b"\x00" * 8, b"(l", b"0", b"\x91"]
)
def test_opcodes_that_torch_does_not_write(tmp_path, code):
    with pytest.raises((NotAllowed, Damaged)):
        read(tmp_path, code)


@pytest.mark.parametrize(
    "attributes",
    [
        {"forward": module(RELU)},
        {"forward": value("text")},
        {"__class__": value("text")},
        {"__dict__": value({"a": 1})},
        {"__setstate__": module(RELU)},
        {"eval": module(RELU)},
        {"_call_impl": module(RELU)},
        {"_compiled_call_impl": module(RELU)},
        {"_compiled_call_impl": value(1)},
        {"_forward_hooks": mapping(a=module(RELU))},
        {"_forward_hooks": value([1])},
        {"_forward_pre_hooks": mapping(a=value(1))},
        {"_backward_pre_hooks": mapping(a=module(RELU))},
        {"_load_state_dict_post_hooks": mapping(a=module(RELU))},
        {"_state_dict_hooks": module(RELU)},
        {"_own": value(1)},
        {"inner": module(RELU)},
        {"inner": items(items(value(1), module(RELU)))},
        {"_modules": mapping(a=value("text"))},
        {"_modules": mapping(a=tensor())},
        {"_modules": mapping(forward=module(RELU))},
        {"_modules": value({"a.b": None})},
        {"_modules": value([])},
        {"_buffers": mapping(a=module(RELU))},
        {"_buffers": mapping(a=value(1))},
        {"_parameters": mapping(weight=tensor())},
        {"training": value("text")},
        {"default_act": named(RELU)},
    ],
)  # fmt: skip
def test_modules_hold_children_tensors_and_data_only(tmp_path, attributes):
    assert isinstance(read(tmp_path, module(RELU, inplace=b"\x89")), nn.ReLU)
    with pytest.raises((NotAllowed, Damaged)):
        read(tmp_path, module(RELU, **attributes))
    with pytest.raises((NotAllowed, Damaged)):
        read(tmp_path, mapping(model=module(SEQUENTIAL, mapping(**{"0": module(RELU, **attributes)}))))


@pytest.mark.parametrize(
    "content",
    [
        named(RELU) + b")\x81",  # without a state
        instance(RELU, value([1])),
        instance(RELU, items(mapping(training=b"\x89"), mapping(inplace=b"\x89"))),  # a state with slots
        module(RELU) + mapping(inplace=b"\x88") + b"b",  # a second one
        instance(RELU, value({1: 2})),
        value([1]) + mapping(a=value(1)) + b"b",
        value("text") + mapping(a=value(1)) + b"b",
        tensor() + mapping(grad_fn=value(1)) + b"b",
    ],
)
def test_states_that_are_none(tmp_path, content):
    with pytest.raises((NotAllowed, Damaged)):
        read(tmp_path, content)


@pytest.mark.parametrize(
    "content",
    [
        tensor(size=(5,)),
        tensor(size=(2, 2), stride=(4, 1)),
        tensor(offset=1),
        tensor(offset=-1),
        tensor(size=(2,), stride=(-1,)),
        tensor(size=(-1,)),
        tensor(size=(1 << 40,), stride=(0,)),
        tensor(size=(1,) * 99, stride=(1,) * 99),
        tensor(size=(2,), stride=()),
        tensor(size=(1 << 62, 1 << 62), stride=(1, 1)),
        tensor(hooks=value({"a": 1})),
        tensor(where=value(3)),
        tensor(where=storage("1")),
        tensor(where=storage("../data.pkl")),
        tensor(where=storage(count=5)),
        tensor(where=storage(count=-4)),
        tensor(where=storage(count=1 << 60)),
        tensor(where=storage(kind="DoubleStorage")),
        tensor(where=value("id") + b"Q"),
        tensor(where=items(value("module"), value("os")) + b"Q"),
        call("torch._utils._rebuild_tensor_v2", storage(), value(0)),
        call("torch._utils._rebuild_tensor_v2", storage(), value(0), value(4.0), value((1,)), b"\x89", b"}"),
        call("torch._utils._rebuild_parameter", value(1), b"\x88", b"}"),
        call("torch.Size", value(("a",))),
        call("torch.device", value("touch mark")),
        call("collections.OrderedDict", value([1])),
        call("_codecs.encode", value("ab"), value("zlib")),
        call("numpy.dtype", value("O8")),
        call("numpy.dtype", value("O8"), b"\x89", b"\x88"),
        call("numpy.core.multiarray.scalar", call("numpy.dtype", value("f8")), value("text")),
        call("numpy.core.multiarray._reconstruct", named("os.system"), value((0,)), value("b")),
        call("numpy.core.multiarray._reconstruct", named("numpy.ndarray"), value((1 << 40,)), value("b")),
        call("pathlib.PosixPath", value(1)),
    ],
)
def test_arguments_that_do_not_fit(tmp_path, content):
    assert read(tmp_path, tensor()).tolist() == [0, 1, 2, 3]
    assert read(tmp_path, tensor(size=(2, 2), stride=(1, 2))).tolist() == [[0, 2], [1, 3]]
    with pytest.raises((NotAllowed, Damaged)):
        read(tmp_path, content)


def array(state: bytes) -> bytes:
    start = call("numpy.core.multiarray._reconstruct", named("numpy.ndarray"), value((0,)), value("b"))
    return start + state + b"b"


@pytest.mark.parametrize(
    ("shape", "dtype", "order", "data"),
    [((1,), "f8", "<", b"short"), ((1 << 40,), "f8", "<", b"12345678"), ((-1,), "f8", "<", b"12345678"),
     ((1,), "f8", ">", b"12345678"), ((1,), "O8", "|", b"12345678")],
)  # fmt: skip
def test_arrays_that_are_none(tmp_path, shape, dtype, order, data):
    def state(shape, dtype, order, data):
        kind = call("numpy.dtype", value(dtype)) + value((3, order, None, None, None, -1, -1, 0)) + b"b"
        text = call("_codecs.encode", value(data.decode("latin-1")), value("latin1"))
        return items(value(1), value(shape), kind, b"\x89", text)

    assert read(tmp_path, array(state((1,), "f8", "<", np.float64(2).tobytes()))) == np.array([2.0])
    with pytest.raises((NotAllowed, Damaged)):
        read(tmp_path, array(state(shape, dtype, order, data)))


def nested(depth: int) -> bytes:
    return b"]" * depth + b"a" * (depth - 1)


def doubled(times: int) -> bytes:
    """Lists of two, each of the one before it twice; the last is remembered under `times`."""
    return b"]q\x00" + b"".join(b"](" + b"h%ch%ceq%c" % (i, i, i + 1) for i in range(times))


SHARED = doubled(39)  # 2^39 lists when it is written out
NAMED_SO = instance(RELU, b"}" + value("name") + b"h\x27s")
KEYS = b"]}q\x01(" + b"".join(value(chr(i) + chr(j)) + b"N" for i in range(65, 123) for j in range(65, 123)) + b"ua"
LAUGHS = doubled(99)
INNER = b"".join(
    b"".join((named(SEQUENTIAL), b")\x81}(", value("training"), b"\x89", value("_parameters"), b"}", value("_buffers"),
              b"}", value("_modules"), b"}(", value("0"), b"h" + bytes([i]), value("1"), b"h" + bytes([i]),
              b"u", b"ubr" + (i + 1).to_bytes(4, "little")))
    for i in range(100, 140)
)  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        b"]q\x01h\x01a",  # a list in itself
        b"}q\x01" + value("a") + b"h\x01s",
        named(SEQUENTIAL) + b")\x81q\x07}(" + b"".join(
            (value("training"), b"\x89", value("_parameters"), b"}", value("_buffers"), b"}", value("_modules"), b"}",
             value("0"), b"h\x07s")) + b"ub",  # a network that is its own layer
        nested(100_000),
        LAUGHS,
        module(SEQUENTIAL) + b"q\x64" + INNER,  # each layer twice in the next: 2^40 of them
        b"\x8b\xff\xff\xff\x7f",  # LONG4 of two gigabytes
        b"\x8a\xff" + b"\xff" * 255,
        b"\x8d" + b"\xff" * 8,  # text of 2^64 bytes
        b"h\x09",  # not remembered
        b"cno end",
        b"a", b"(", b"(e", b"s", b"R", b"b", b"\x81", b"t", b"Q", b"",
        call("builtins.set", b"](" + b"".join(value(i << 80) for i in range(9)) + b"e"),
        b"}" + value((1, 2)) + value(1) + b"s",
        b"]q\x01(" + b"N" * 60_000 + b"e" + (named("builtins.set") + b"h\x01\x85R0") * 1,
        b"]q\x01(" + b"N" * 60_000 + b"e" + b"]" + (named("builtins.set") + b"h\x01\x85Ra") * 1000,
        b"(" + SHARED + b"h\x27" + value((1,)) + b"\x81t",  # what the message names
        b"(" + SHARED + call("torch.device", b"h\x27") + b"t",
        b"(" + SHARED + call("numpy.dtype", b"h\x27") + b"t",
        b"(" + SHARED + NAMED_SO + b")Rt",
        b"(" + SHARED + NAMED_SO + b")\x81t",
        KEYS + (named("collections.OrderedDict") + b"h\x01\x85Ra") * 100_000,
    ],
)  # fmt: skip
@pytest.mark.timeout(60)
def test_what_never_ends_is_refused_at_once(tmp_path, content):
    with pytest.raises((NotAllowed, Damaged)):
        read(tmp_path, content)


@pytest.mark.parametrize("code", [b"\x8f", b"}", b"N\x94"])
def test_the_objects_that_a_small_file_may_make_are_counted(tmp_path, monkeypatch, code):
    monkeypatch.setattr(pickle_machine, "MOST_OPCODES", 1000)
    read(tmp_path, b"(" + code * 400 + b"t")
    with pytest.raises(Damaged, match="more than 1000 opcodes"):
        read(tmp_path, b"(" + code * 1000 + b"t")


class DDetect(nn.Module):
    def forward(self, x):
        return ["forward of", x]


class DSegment(DDetect):
    """Keeps the forward of the head below, as upstream's segment heads do."""


class Conv(nn.Module):
    def forward(self, x):
        return x


HEADS = {f"models.yolo.{cls.__name__}": cls for cls in (DDetect, DSegment)} | {"models.common.Conv": Conv}
HEADS |= {f"yolov9.{name}": cls for name, cls in HEADS.items()}
GETATTR = "builtins.getattr"
FORWARD = call(GETATTR, named("models.yolo.DDetect"), value("forward"))
SEGMENT = "models.yolo.DSegment"


def read_head(path, content: bytes):
    return torch_archive.read(torch_file(path / "x.pt", content, FOUR), MODULES | HEADS)


@pytest.mark.parametrize("function", [GETATTR, "__builtin__.getattr"])
@pytest.mark.parametrize("prefix", ["", "yolov9."])
def test_a_segment_head_keeps_the_forward_of_the_head_below(tmp_path, function, prefix):
    forward = call(function, named(f"{prefix}models.yolo.DDetect"), value("forward"))
    head = read_head(tmp_path, module(SEGMENT, detect=forward))
    assert head.detect is DDetect.forward
    assert head.detect(head, 3) == ["forward of", 3]
    again = read_head(tmp_path, mapping(model=module(SEQUENTIAL, mapping(**{"0": module(SEGMENT, detect=forward)}))))
    torch.save(copy.deepcopy(again), tmp_path / "again.pt", pickle_protocol=2)
    place = f"{__name__}."
    own = {f"{place}{cls.__name__}": cls for cls in (DDetect, DSegment)}
    assert torch_archive.read(tmp_path / "again.pt", MODULES | own)["model"][0].detect is DDetect.forward


@pytest.mark.parametrize(
    "arguments",
    [
        (named("models.common.Conv"), value("forward")),
        (named(SEGMENT), value("forward")),  # none of upstream's keeps that
        (named(CONV), value("forward")),
        (named(SEQUENTIAL), value("forward")),
        (named("models.yolo.DDetect"), value("__init__")),
        (named("models.yolo.DDetect"), value("__globals__")),
        (named("models.yolo.DDetect"), value("__subclasses__")),
        (named("models.yolo.DDetect"), value("__class__")),
        (named("models.yolo.DDetect"), value("register_forward_hook")),
        (named("models.yolo.DDetect"), value("forward.__globals__")),
        (named("models.yolo.DDetect"), value(b"forward")),
        (named("models.yolo.DDetect"), value(["forward"])),
        (named("models.yolo.DDetect"), named(GETATTR)),
        (named("models.yolo.DDetect"),),
        (named("models.yolo.DDetect"), value("forward"), value(1)),
        (module("models.yolo.DDetect"), value("forward")),  # of an instance: a bound method
        (FORWARD, value("forward")),
        (FORWARD, value("__globals__")),
        (FORWARD, value("__code__")),
        (FORWARD, value("__class__")),
        (named(GETATTR), value("forward")),
        (named(GETATTR), value("__self__")),
        (value("text"), value("format")),
        (named("torch.float32"), value("forward")),
        (tensor(), value("numpy")),
        (value("models.yolo.DDetect"), value("forward")),
    ],
)
def test_getattr_takes_the_class_of_a_head_and_forward_only(tmp_path, arguments):
    for function in (GETATTR, "__builtin__.getattr"):
        got = call(function, *arguments)
        for content in (got, module(SEGMENT, detect=got), got + items(value("touch mark")) + b"R"):
            with pytest.raises((NotAllowed, Damaged)) as caught:
                read_head(tmp_path, content)
            assert "\n" not in str(caught.value)


@pytest.mark.timeout(60)
def test_what_getattr_is_asked_for_is_not_written_out(tmp_path):
    with pytest.raises(NotAllowed, match=r"attribute list of models\.yolo\.DDetect"):
        read_head(tmp_path, b"(" + SHARED + call(GETATTR, named("models.yolo.DDetect"), b"h\x27") + b"t")


@pytest.mark.parametrize(
    "content",
    [
        FORWARD,
        mapping(model=FORWARD),
        items(FORWARD),
        mapping(key=items(FORWARD)),
        FORWARD + items(value(1)) + b"R",  # called
        FORWARD + items(value(1), value(2)) + b"R",
        FORWARD + mapping(__globals__=b"}") + b"b",  # given a state
        FORWARD + b")\x81",  # an instance of it
        b"}" + FORWARD + value(1) + b"s",  # as a key
        call("builtins.set", b"](" + FORWARD + b"e"),
        named(GETATTR),
        mapping(detect=named(GETATTR)),
        module(SEGMENT, detect=named(GETATTR)),
        module(SEGMENT, forward=FORWARD),
        module(SEGMENT, other=FORWARD),
        module(SEGMENT, detect=items(FORWARD)),
        module(SEGMENT, detect=mapping(detect=FORWARD)),
        module(SEGMENT, mapping(detect=FORWARD)),  # as a child
        module(SEGMENT, _forward_hooks=mapping(a=FORWARD)),
        module(SEGMENT, _buffers=mapping(detect=FORWARD)),
        module(SEGMENT, detect=named("models.yolo.DDetect")),
        module("models.yolo.DDetect", detect=FORWARD),
        module("models.common.Conv", detect=FORWARD),
        module(RELU, detect=FORWARD),
        module(RELU, __setstate__=FORWARD),
        call("collections.OrderedDict", items(items(value("a"), FORWARD))),
    ],
)
def test_that_forward_may_lie_nowhere_else(tmp_path, content):
    read_head(tmp_path, module(SEGMENT, detect=FORWARD))
    with pytest.raises((NotAllowed, Damaged)) as caught:
        read_head(tmp_path, content)
    assert "\n" not in str(caught.value)


def test_a_dotted_name_is_no_way_around_getattr(tmp_path):
    """Protocol 4 names a function of a class with dots; torch.save writes protocol 2."""
    for name in ("DDetect.forward", "DDetect.forward.__globals__", "DDetect.__subclasses__"):
        with pytest.raises(NotAllowed, match=r"models\.yolo\.DDetect"):
            read_head(tmp_path, module(SEGMENT, detect=value("models.yolo") + value(name) + b"\x93"))


def test_archives_that_torch_does_not_write(tmp_path):
    with pytest.raises(Damaged):
        read(tmp_path, tensor(), compression=zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(torch_file(tmp_path / "two.pt", value(1)), "a") as archive:
        archive.writestr("other/data.pkl", b"\x80\x02N.")
    with pytest.raises(Damaged):
        torch_archive.read(tmp_path / "two.pt")
    torch_file(tmp_path / "one.pt", value(1))
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(tmp_path / "one.pt", "a") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.")
    with pytest.raises(Damaged):
        torch_archive.read(tmp_path / "one.pt")
    torch.jit.script(nn.ReLU()).save(tmp_path / "script.pt")
    with pytest.raises((NotAllowed, Damaged)):
        torch_archive.read(tmp_path / "script.pt", MODULES)
    torch.save([1], tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(Damaged):
        torch_archive.read(tmp_path / "legacy.pt")


def test_each_bit_flip_is_an_error_of_ours_or_the_checksums(tmp_path):
    whole = torch_file(tmp_path / "x.pt", mapping(a=tensor(), b=value([1, "x"])), FOUR).read_bytes()
    for position in range(0, len(whole), 3):
        (tmp_path / "y.pt").write_bytes(whole[:position] + bytes([whole[position] ^ 16]) + whole[position + 1 :])
        try:
            torch_archive.read(tmp_path / "y.pt")
        except (NotAllowed, Damaged):
            continue


def test_no_other_list_of_names_counts(tmp_path):
    """modelopt adds to torch's list when it is imported, and anybody may."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([PosixPath, nn.Linear])
    try:
        for name in ("torch.nn.modules.linear.Linear", RELU):
            with pytest.raises(NotAllowed, match=name):
                torch_archive.read(torch_file(tmp_path / "x.pt", module(name)))  # a file that holds no modules
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def test_what_torch_writes_is_read_as_torch_reads_it(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Sequential(nn.Identity()))
    base = torch.arange(24.0)
    kinds = ("float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
    content = {
        "state": network.state_dict(),
        "optimizer": {"state": {0: {"momentum_buffer": torch.rand(8)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "rng": torch.get_rng_state(),
        "kinds": [torch.ones(3).to(getattr(torch, kind)) for kind in kinds],
        "views": (
            base,
            base[2:8],
            base.view(4, 6).t(),
            base.view(4, 6)[:, 2],
            torch.empty(0, 3),
            torch.tensor(3),
            base.view(4, 6)[:, 6:],
            base[24:],
            torch.rand(4, 2)[torch.zeros(4, dtype=torch.bool)][:, 1:],
        ),
        "plain": [1, -1, 300, 70000, 2**40, 1.5, float("inf"), None, True, "é", b"bytes\x80", (), (1,), {1, 2}],
        "size": torch.Size([1, 2]),
        "dtype": torch.float16,
        "ordered": OrderedDict(a=1),
        5: {"x": {}},
    }
    for protocol in (2, 3, 4):
        torch.save(content, tmp_path / "a.pt", pickle_protocol=protocol)
        found = torch_archive.read(tmp_path / "a.pt")
        expected = torch.load(tmp_path / "a.pt", weights_only=False)
        assert pickle.dumps(_plain(found)) == pickle.dumps(_plain(expected))
    assert found["views"][0].data_ptr() == found["views"][2].data_ptr()
    with open(tmp_path / "a.pt", "rb") as file:
        assert torch_archive.read(file).keys() == content.keys()


def _plain(value):
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), list(value.stride()), value.requires_grad, value.tolist()]
    if isinstance(value, dict):
        return [type(value).__name__, [[key, _plain(one)] for key, one in value.items()]]
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else repr(value)


@pytest.mark.parametrize("kind", ["_parameters", "_buffers"])
def test_a_storage_serves_two_tensors_and_not_thousands(tmp_path, kind):
    """A network's conversion to float32 copies each of its tensors."""

    def network(count: int) -> nn.Module:
        found, storage = nn.Sequential(nn.Identity()), torch.zeros(100, dtype=torch.half)
        for number in range(count):
            view = storage.view(100)
            getattr(found[0], kind)[f"x{number}"] = nn.Parameter(view) if kind == "_parameters" else view
        return found

    for count in (1, 2):
        torch.save(network(count), tmp_path / "a.pt")
        torch_archive.read(tmp_path / "a.pt", MODULES)
    torch.save({"model": network(3)}, tmp_path / "a.pt")
    with pytest.raises(Damaged, match="tensors of 600 bytes share a storage"):
        torch_archive.read(tmp_path / "a.pt", MODULES)


def test_networks_numpy_and_paths(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Upsample(None, 2, "nearest")).eval()
    network[0].weight.requires_grad_(False)
    numbers = {"fitness": np.array([0.5, 1.5]), "best": np.float64(2), "count": np.int64(3)}
    content = {"model": network, "ema": copy.deepcopy(network).half(), "path": PosixPath("/a/b"), **numbers}
    torch.save(content, tmp_path / "a.pt")
    found = torch_archive.read(tmp_path / "a.pt", MODULES)
    x = torch.rand(1, 3, 8, 8)
    assert torch.equal(found["model"](x), network(x))
    assert [p.requires_grad for p in found["model"].parameters()] == [p.requires_grad for p in network.parameters()]
    assert {type(p) for p in found["model"].parameters()} == {nn.Parameter}
    assert found["ema"][0].weight.dtype == torch.float16
    assert found["fitness"].tolist() == [0.5, 1.5]
    assert (found["best"], found["count"], type(found["best"])) == (2, 3, np.float64)
    assert found["path"] == PurePosixPath("/a/b")
    assert not hasattr(found["path"], "write_text")
    found["model"].train()(x).sum().backward()
    assert found["model"][0].bias.grad is not None
    copy.deepcopy(found["model"]).float().state_dict()
