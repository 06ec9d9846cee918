"""PyTorch checkpoints, read without running any code of theirs.

A checkpoint is a zip archive of tensors and a pickle, and a pickle is a program: it names functions and calls them.
Two steps make it harmless:

1. `_Unpickler` imports no name, and gives the pickle a shell for each: a class of ours that records the arguments and
   the state that it receives, and does nothing else.
2. `_Builder` makes tensors, numbers and modules of the shells. A tensor has to lie within its storage. A module has to
   be of a listed class, whose constructor is not called: it starts as an empty `nn.Module` and receives plain data,
   tensors and child modules. Whatever could be called, such as a hook, is refused, and so is each name that is not in
   a table here; under keys that nothing needs it is left out.

`torch.load(weights_only=True)` compares no checksums, keeps one list of names for the whole process, and refuses
`getattr`, which checkpoints of segmentation networks name.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import nn

from utils.core.errors import CheckpointError, no_file

STORAGES = {  # name in a pickle → dtype of its elements
    "torch.DoubleStorage": torch.float64, "torch.FloatStorage": torch.float32, "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}  # fmt: skip
DTYPES = {str(dtype): dtype for dtype in STORAGES.values()}  # torch.float32 and so on, as values
NUMPY_DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
PATHS = tuple(f"pathlib.{prefix}{kind}" for prefix in ("", "Pure") for kind in ("Path", "PosixPath", "WindowsPath"))
# Beginnings of names of other versions of Python (protocol 2 has Python 2's) and NumPy, and what they are here.
RENAMED = {"__builtin__.": "builtins.", "numpy._core.": "numpy.core.", "pathlib._local.": "pathlib."}
ARRAY, DTYPE = "numpy.core.multiarray._reconstruct", "numpy.dtype"
GETATTR = "builtins.getattr"

# Attributes of an instance, as argparse gives options; read as a dictionary.
NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
# Beginnings of names of data that nothing here needs, wherever they are; read as None.
UNREAD = ("datetime.", "zoneinfo.", "uuid.", "decimal.", "fractions.")
# Modules that hold the network as `module`, and only distribute or average it.
WRAPPERS = (
    "torch.nn.parallel.data_parallel.DataParallel", "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.optim.swa_utils.AveragedModel",
)  # fmt: skip
QUANTIZERS = {  # beginning of a name → whose
    "pytorch_quantization.": "pytorch-quantization, as by yolov9-qat", "modelopt.": "NVIDIA's Model Optimizer",
    "torchao.": "torchao", "torch.ao.": "PyTorch's own quantization",
}  # fmt: skip
LEGACY = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")  # how files of torch.save began before PyTorch 1.6
UPSTREAMS = "give the .pt file that upstream's train.py wrote"

# A segment head keeps the forward of the head below it as its attribute `detect`, which a pickle holds as
# `getattr(DDetect, "forward")`. Class of the head → class whose forward it keeps; getattr has no other use here.
KEPT_FORWARDS = {"Segment": "Detect", "DSegment": "DDetect", "DualDSegment": "DualDDetect", "Panoptic": "Detect"}
KEPT_AS = "detect"

# Private attributes of a module that are data. All others belong to torch, and are hooks or empty.
PRIVATE_DATA = ("_non_persistent_buffers_set", "_reversed_padding_repeated_twice")
MEMBERS = {"_parameters": nn.Parameter, "_buffers": torch.Tensor, "_modules": nn.Module}
ATOMS = frozenset({type(None), bool, int, float, str, bytes})


class NotAllowed(CheckpointError):
    """A checkpoint names a class or a function, or holds something, that only code could need.

    Attributes:
        name: of the class or function, as the file has it, or what it holds.
    """

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name or message


def read_torch_file(
    file: str | Path,
    modules: Mapping[str, type[nn.Module]] | None = None,
    *,
    needed: Collection[str] | None = None,
    skip: Collection[str] = (),
    remedy: str = "copy or download it again",
) -> Any:
    """What `torch.save` wrote into `file`, on the CPU; paths become texts. No code of the file is run.

    Args:
        modules: the module classes that the file may hold, by their names in a pickle. Modules may be the content
            itself or values of a dictionary that is the content; of a wrapper such as DataParallel the network is read.
        needed: keys of that dictionary whose values must be read whole, by default all. Of other values the parts are
            left out that would be refused.
        skip: keys of that dictionary whose values are left out, and whose tensors are not read.
        remedy: what to do about a damaged file.

    Raises:
        NotAllowed: it names something that is not listed here or in `modules`, or holds hooks or the like.
        CheckpointError: it is missing, damaged, truncated, or no file of `torch.save` since torch 1.6.
    """
    if not os.path.isfile(file):
        raise CheckpointError(no_file(file, "--weights takes a .pt file"))
    _check_format(file)
    try:
        with zipfile.ZipFile(file) as archive:  # which compares what it reads with its checksum
            pickles = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise ValueError("a zip file without data.pkl")
            unpickler = _Unpickler(io.BytesIO(archive.read(pickles[0])))
            content = unpickler.load()
            builder = _Builder(modules or {}, lambda key: archive.read(f"{pickles[0][:-8]}data/{key}"))
            if type(content) in (dict, _Dict):
                needed = content if needed is None else needed
                parts = {
                    _key(key): builder.value(value, True) if key in needed else builder.listed_part(value)
                    for key, value in content.items()
                    if key not in skip
                }
                return {key: value for key, value in parts.items() if value is not LEFT_OUT}
            return builder.value(content, True)
    except NotAllowed as error:
        telling = [name for name in unpickler.names if name.startswith(TELLING) and name not in (modules or {})]
        name = [*telling, error.name][0]
        raise NotAllowed(_refusal(file, name), name) from error
    except Exception as error:  # a damaged file can break zipfile, the unpickler and the builder anywhere
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        problem = f"is damaged, or no checkpoint of PyTorch 1.6 or newer ({reason})"
        raise CheckpointError(f"{file} {problem}; {remedy}") from error


def _check_format(file: str | Path) -> None:
    """Raise `CheckpointError` for files of other formats that people take for checkpoints."""
    with open(file, "rb") as stream:
        begin = stream.read(len(LEGACY))
    length = int.from_bytes(begin[:8], "little")  # of the JSON object with which a safetensors file begins
    if len(begin) > 8 and begin[8:9] == b"{" and length <= os.path.getsize(file) - 8:
        raise CheckpointError(f"{file} is a safetensors file, which holds weights without the network; {UPSTREAMS}")
    if begin == LEGACY:
        raise CheckpointError(
            f"{file} has the format that PyTorch had before 1.6; if you trust it, write it anew in the checkout: "
            f"torch.save(torch.load({str(file)!r}, weights_only=False), 'new.pt')"
        )


def _refusal(file: str | Path, name: str) -> str:
    """What a checkpoint is that names a class which is not allowed, and what to do."""
    if quantizer := next((QUANTIZERS[begin] for begin in QUANTIZERS if name.startswith(begin)), ""):
        return f"{file} was quantized with {quantizer}; give the FP32 weights instead"
    if name.startswith("__torch__."):
        return f"{file} is a TorchScript file; give the .pt file that it was exported from"
    if name.startswith("models."):
        return (
            f"{file} holds {name}, which YOLOv9 does not have: it is a checkpoint of YOLOv5, YOLOv7 or a fork. A class "
            "of a fork has to be listed first (BLOCKS in utils/upstream/description.py, see CONTRIBUTING.md)"
        )
    package = name.partition(".")[0]
    advice = (
        "Save the network without fusing or wrapping it, as upstream's train.py does (TORCH_MODULES in utils/upstream/ "
        "lists what is taken)"
    )
    if package.isidentifier() and package not in ("torch", "builtins", "utils"):
        advice = f"If {package} is another project, {UPSTREAMS}; if it is code of your own, save the network without it"
    return (
        f"{file} holds {name}, which is no data and no module class of YOLOv9 or torch.nn; it was not loaded. {advice}"
    )


class _Shell:
    """What a pickle gets for a name: the class stands for the name, an instance for a call of it.

    A pickle can make instances, give them a state, and put them into containers. It changes neither classes nor
    instances: the instruction that sets attributes (BUILD) finds `__setstate__` on both.
    """

    __slots__ = ("args", "state")
    name = ""  # module and name, as the pickle has them
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Shell:
        shell = object.__new__(cls)
        shell.args, shell.state = args, None
        return shell

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dict(dict[Any, Any]):
    """Stands for an OrderedDict, into which a pickle puts items one by one."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """A state_dict's is the versions of its modules, which nothing here needs."""


class _Foreign(_Shell):
    """Stands for a name that is not listed: takes arguments and items as any class may, and forgets them."""

    __slots__ = ()

    def __new__(cls, *args: Any, **_: Any) -> Any:
        return super().__new__(cls, *args)

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None:
        """Take no item."""

    extend = add = append


def _shell(name: str, kind: type[_Shell] = _Shell) -> type[_Shell]:
    return type("Shell", (kind,), {"__slots__": (), "name": name})


_STORAGE = _shell("a storage")
LEFT_OUT = object()
TELLING = ("ultralytics.", *QUANTIZERS)  # beginnings of names that tell whose a checkpoint is that was refused


class _Unpickler(pickle.Unpickler):
    """Python's unpickler, which imports nothing: `find_class` gives a shell for each name, and notes it in `names`."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.names: dict[str, type[Any]] = {"collections.OrderedDict": _Dict}  # → what stands for it

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        for beginning, known in RENAMED.items():
            full = known + full.removeprefix(beginning) if full.startswith(beginning) else full
        if full not in self.names:
            self.names[full] = _shell(full[:200], _Shell if full in NAMES else _Foreign)
        return self.names[full]

    def persistent_load(self, pid: Any) -> Any:
        return _STORAGE(*pid)


def _key(value: Any) -> Any:
    """A key of a dictionary or an item of a set: a text or a number."""
    if type(value) not in ATOMS:
        raise ValueError(f"it has a key of type {type(value).__name__}")
    return value


class _Builder:
    """Makes what the shells of one file stand for; `read_storage` gives the bytes of a storage by its key."""

    def __init__(self, modules: Mapping[str, type[nn.Module]], read_storage: Callable[[str], bytes]) -> None:
        self._modules, self._read_storage = modules, read_storage
        self._storages: dict[str, torch.Tensor] = {}  # key → its bytes, uint8 [n]
        self._made: dict[int, Any] = {}  # id of a container or a shell → what was made of it, for what is shared

    def value(self, value: Any, module_allowed: bool = False) -> Any:
        """A container, text, number or tensor; or a module, which is refused within data."""
        if type(value) in ATOMS:
            return value
        is_module = isinstance(value, _Shell) and (value.name in self._modules or value.name in WRAPPERS)
        if is_module and not module_allowed:
            raise NotAllowed(f"a module within data, a {value.name}")
        if id(value) not in self._made:  # a container in itself ends in a RecursionError
            self._made[id(value)] = self._module(value) if is_module else self._data(value)
        return self._made[id(value)]

    def listed_part(self, value: Any) -> Any:
        """A value without the parts that would be refused; `LEFT_OUT` if nothing is left."""
        if isinstance(value, _Shell) and value.name in NAMESPACES:
            value = value.state
        if type(value) in (dict, _Dict):
            parts = {_key(key): self.listed_part(item) for key, item in value.items()}
            return {key: part for key, part in parts.items() if part is not LEFT_OUT}
        try:
            return self.value(value)
        except NotAllowed:
            return LEFT_OUT

    def _data(self, value: Any) -> Any:
        kind = type(value)
        if kind in (list, tuple):
            return kind(map(self.value, value))
        if kind is set:
            return set(map(_key, value))
        if kind in (dict, _Dict):
            entries = {_key(key): self.value(item) for key, item in value.items()}
            return entries if kind is dict else OrderedDict(entries)
        if kind is _STORAGE:
            return self._storage(*value.args)
        name = getattr(value, "name", f"a value of type {kind.__name__}")
        if not isinstance(value, _Shell):
            if name in DTYPES:
                return DTYPES[name]
            raise NotAllowed(name)
        if name in NAMESPACES and type(value.state) is dict:
            return self.value(value.state)
        if name.startswith(UNREAD):
            return None
        if isinstance(value, _Foreign):
            raise NotAllowed(name)
        if name == ARRAY:  # NumPy makes an empty array, and gives it its state
            _, shape, dtype, fortran, data = self.value(value.state)
            return np.ndarray(shape, _checked(dtype), data, order="F" if fortran else "C").copy(order="K")
        if name == DTYPE and value.args[0] in NUMPY_DTYPES:
            return np.dtype(value.args[0]).newbyteorder(value.state[1] if value.state else "=")
        if name not in FUNCTIONS or value.state is not None:
            raise NotAllowed(f"a call or a state of {name}")
        return FUNCTIONS[name](*map(self.value, value.args))

    def _storage(self, _tag: Any, kind: type[_Shell], key: Any, _location: Any, _count: Any) -> torch.Tensor:
        """The elements of a storage in the archive, `[n]`."""
        if key not in self._storages:
            content = bytearray(self._read_storage(key))
            self._storages[key] = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()
        return self._storages[key].view(STORAGES[kind.name])

    def _module(self, shell: _Shell) -> nn.Module:
        if shell.name in WRAPPERS:
            network: nn.Module = self.value(shell.state["_modules"]["module"], True)
            return network
        cls = self._modules[shell.name]
        if shell.args or type(shell.state) is not dict:
            raise ValueError(f"an instance of {shell.name} has constructor arguments, or no state")
        module: nn.Module = object.__new__(cls)
        nn.Module.__init__(module)
        for key, value in shell.state.items():
            if key in MEMBERS:
                for name, member in value.items():
                    vars(module)[key][_key(name)] = made = self.value(member, True)
                    if not isinstance(made, (MEMBERS[key], type(None))):
                        raise NotAllowed(f"{shell.name}.{name} of type {type(made).__name__}")
            elif key == KEPT_AS and isinstance(value, _Shell) and value.name == GETATTR:
                owner, attribute = value.args
                below = self._modules.get(getattr(owner, "name", "")) if isinstance(owner, type) else None
                if below is None or (below.__name__, attribute) != (KEPT_FORWARDS.get(cls.__name__), "forward"):
                    raise NotAllowed(f"{GETATTR} in a {cls.__name__}")
                vars(module)[key] = below.forward
            elif key.startswith("_") and key not in PRIVATE_DATA:
                if not (value is None or type(value) is bool or value == {}):
                    raise NotAllowed(f"a hook or a private attribute, {key[:80]} of {shell.name}")
            else:
                vars(module)[key] = self.value(value)
        return module


def _tensor(storage: Any, offset: int, size: Any, stride: Any, grad: Any, hooks: Any, metadata: Any = None) -> Any:
    if hooks or metadata:
        raise NotAllowed("a tensor with hooks")
    # as_strided raises where the tensor does not lie within its storage; set_ makes it no view of another tensor.
    tensor = torch.empty(0, dtype=storage.dtype).set_(storage.as_strided(size, stride, offset))
    return tensor.requires_grad_(bool(grad))


def _parameter(data: torch.Tensor, requires_grad: Any, hooks: Any) -> nn.Parameter:
    if hooks:
        raise NotAllowed("a parameter with hooks")
    return nn.Parameter(data, bool(requires_grad))


def _checked(dtype: Any) -> np.dtype[Any]:
    """A dtype that was made here; with others NumPy would take bytes for objects."""
    if not isinstance(dtype, np.dtype):
        raise ValueError("NumPy's data have no dtype")
    return dtype


# Name in a pickle → what its call with data gives. The functions of these names in torch and NumPy are not called.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.Size": torch.Size,
    "torch.device": lambda *_: torch.device("cpu"),
    "builtins.set": lambda items: set(map(_key, items)),
    "_codecs.encode": lambda text, _: text.encode("latin1"),  # protocol 2 has no bytes, and writes them as Latin-1
    "numpy.core.multiarray.scalar": lambda dtype, data: np.frombuffer(data, _checked(dtype), 1)[0],
    **dict.fromkeys(PATHS, lambda *parts: str(PurePosixPath(*parts))),
}
NAMES = frozenset({*FUNCTIONS, *STORAGES, *DTYPES, ARRAY, DTYPE, GETATTR, "numpy.ndarray"})
