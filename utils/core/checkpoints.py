"""PyTorch checkpoints, read without running any code of theirs.

A checkpoint is a zip archive of tensors and a pickle, and a pickle is a program: it names functions and calls them.
Two steps make it harmless:

1. `_Unpickler` looks each name up in a table instead of importing it, and gives the pickle a shell for it: a class of
   ours that records the arguments and the state that it receives, and does nothing else.
2. `_Builder` makes tensors, numbers and modules of the shells. A tensor has to lie within its storage. A module has to
   be of a listed class, whose constructor is not called: it starts as an empty `nn.Module` and receives plain data,
   tensors and child modules. Whatever could be called, such as a hook, is refused.

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
from functools import cache
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
    skip: Collection[str] = (),
    remedy: str = "copy or download it again",
) -> Any:
    """What `torch.save` wrote into `file`, on the CPU; paths become texts. No code of the file is run.

    Args:
        modules: the module classes that the file may hold, by their names in a pickle. Modules may be the content
            itself or values of a dictionary that is the content.
        skip: keys of that dictionary whose values are left out, and whose tensors are not read.
        remedy: what to do about a damaged file.

    Raises:
        NotAllowed: it names something that is not listed here or in `modules`, or holds hooks or the like.
        CheckpointError: it is missing, damaged, truncated, or no file of `torch.save` since torch 1.6.
    """
    if not os.path.isfile(file):
        raise CheckpointError(no_file(file, "--weights takes a .pt file"))
    if _is_safetensors(file):
        raise CheckpointError(
            f"{file} is a safetensors file, which holds weights without the network; give the .pt file that upstream's "
            "train.py wrote"
        )
    try:
        with zipfile.ZipFile(file) as archive:  # which compares what it reads with its checksum
            pickles = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise ValueError("a zip file without data.pkl")
            content = _Unpickler(io.BytesIO(archive.read(pickles[0])), modules or {}).load()
            builder = _Builder(modules or {}, lambda key: archive.read(f"{pickles[0][:-8]}data/{key}"))
            if type(content) in (dict, _Dict):
                return {_key(key): builder.value(value, True) for key, value in content.items() if key not in skip}
            return builder.value(content, True)
    except NotAllowed as error:
        raise NotAllowed(_refusal(file, error.name), error.name) from error
    except Exception as error:  # a damaged file can break zipfile, the unpickler and the builder anywhere
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        problem = f"is damaged, or no checkpoint of PyTorch 1.6 or newer ({reason})"
        raise CheckpointError(f"{file} {problem}; {remedy}") from error


def _is_safetensors(file: str | Path) -> bool:
    """Whether a file begins as safetensors files do: with the length of a JSON object, and that object."""
    with open(file, "rb") as stream:
        begin = stream.read(9)
    return len(begin) == 9 and begin[8:] == b"{" and int.from_bytes(begin[:8], "little") <= os.path.getsize(file) - 8


def _refusal(file: str | Path, name: str) -> str:
    """What a checkpoint is that names a class which is not allowed, and what to do."""
    if name.startswith("pytorch_quantization."):
        return f"{file} was quantized with pytorch-quantization, as by yolov9-qat; give the FP32 weights instead"
    if name.startswith("models."):
        return (
            f"{file} holds {name}, which YOLOv9 does not have: it is a checkpoint of YOLOv5, YOLOv7 or a fork. A class "
            "of a fork has to be listed first (BLOCKS in utils/upstream/description.py, see CONTRIBUTING.md)"
        )
    return (
        f"{file} holds {name}, which is no data and no module class of YOLOv9 or torch.nn; it was not loaded. Save the "
        "network without fusing or wrapping it, as upstream's train.py does (TORCH_MODULES in utils/upstream/ lists "
        "what is taken)"
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


@cache  # of names that are allowed
def _shell(name: str) -> type[_Shell]:
    return type("Shell", (_Shell,), {"__slots__": (), "name": name})


_STORAGE = _shell("a storage")


class _Unpickler(pickle.Unpickler):
    """Python's unpickler, which imports nothing: `find_class` gives shells for the names that are allowed."""

    def __init__(self, stream: io.BytesIO, modules: Collection[str]) -> None:
        super().__init__(stream)
        self._modules = modules

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        for beginning, known in RENAMED.items():
            full = known + full.removeprefix(beginning) if full.startswith(beginning) else full
        if full == "collections.OrderedDict":
            return _Dict
        if full in NAMES or full in self._modules:
            return _shell(full)
        raise NotAllowed(full[:200])

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
        is_module = isinstance(value, _Shell) and value.name in self._modules
        if is_module and not module_allowed:
            raise NotAllowed(f"a module within data, a {value.name}")
        if id(value) not in self._made:  # a container in itself ends in a RecursionError
            self._made[id(value)] = self._module(value) if is_module else self._data(value)
        return self._made[id(value)]

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
