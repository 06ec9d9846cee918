"""PyTorch checkpoints, read without running any code of theirs.

A checkpoint is a zip archive that holds tensors and a pickle, and a pickle is a program: it names functions and calls
them. Two steps make it harmless:

1. `_Unpickler` runs the pickle. It looks every name up in a table instead of importing it, and gives the pickle a shell
   for it: a class of ours that records the arguments and the state that it receives, and does nothing else.
2. `_Builder` makes tensors, numbers and modules of the records. A tensor has to lie within its storage. A module has to
   be of a listed class; its constructor is not called, it starts as an empty `nn.Module` and receives plain data,
   tensors and child modules. Whatever could be called, such as a hook, is refused.

zipfile compares every member that it reads with its checksum; `torch.load(weights_only=True)` does not, and its list of
allowed names belongs to the whole process. Checkpoints of segmentation networks name `getattr`.
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
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
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
    """A checkpoint names a class or a function, or holds something, that only code could need."""


def read_torch_file(
    file: str | Path,
    modules: Mapping[str, type[nn.Module]] | None = None,
    *,
    skip: Collection[str] = (),
    remedy: str = "copy or download it again",
) -> Any:
    """What `torch.save` wrote into `file`, on the CPU. No code of the file is run.

    Args:
        modules: the module classes that the file may hold, by their names in a pickle. Modules may be the content
            itself or values of a dictionary that is the content.
        skip: keys of that dictionary whose values are left out, and whose tensors are not read.
        remedy: what to do about a damaged file.

    Returns:
        Containers, texts, numbers, tensors and modules. Paths become texts, devices the CPU.

    Raises:
        NotAllowed: it names something that is not listed here or in `modules`, or holds hooks or the like.
        CheckpointError: it is missing, damaged, truncated, or no file of `torch.save` since torch 1.6.
    """
    if not os.path.isfile(file):
        raise CheckpointError(no_file(file, "--weights takes a .pt file"))
    try:
        with zipfile.ZipFile(file) as archive:
            pickles = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise ValueError("a zip file without data.pkl")
            content = _Unpickler(io.BytesIO(archive.read(pickles[0])), modules or {}).load()
            builder = _Builder(modules or {}, lambda key: archive.read(f"{pickles[0][:-8]}data/{key}"))
            if type(content) in (dict, _Dict):
                return {builder.key(key): builder.value(value) for key, value in content.items() if key not in skip}
            return builder.value(content)
    except _Refused as error:
        raise NotAllowed(
            f"{file} holds {error}, which is no data and no module class of YOLOv9 or torch.nn; it was not loaded. "
            "Save the network without fusing or wrapping it, as upstream's train.py does; a class of a fork has to be "
            "listed first (UPSTREAM_MODULES or TORCH_MODULES in utils/upstream/network.py, see CONTRIBUTING.md)"
        ) from error
    except Exception as error:  # a damaged file can break zipfile, the unpickler and the builder anywhere
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        problem = f"is damaged, or no checkpoint of PyTorch 1.6 or newer ({reason})"
        raise CheckpointError(f"{file} {problem}; {remedy}") from error


class _Refused(Exception):
    """A file names or holds something that only code could need; the text says what."""


class _Shell:
    """What a pickle gets for a name: the class stands for the name, an instance for a call of it.

    A pickle can only make instances, give them a state, and put them into containers. Neither classes nor instances
    can be changed by it: an instruction that sets attributes (BUILD) finds `__setstate__` on both.
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
        raise _Refused(full[:200])

    def persistent_load(self, pid: Any) -> Any:
        return _STORAGE(*pid)


class _Builder:
    """Makes what the shells of one file stand for.

    Args:
        modules: the classes that modules may have, by their names in a pickle.
        read_storage: gives the bytes of a storage by its key.
    """

    def __init__(self, modules: Mapping[str, type[nn.Module]], read_storage: Callable[[str], bytes]) -> None:
        self._modules, self._read_storage = modules, read_storage
        self._storages: dict[str, torch.Tensor] = {}  # key → its bytes, uint8 [n]
        self._made: dict[int, Any] = {}  # id of a container or a shell → what was made of it, for what is shared

    def value(self, value: Any) -> Any:
        """A module, or data."""
        return self._once(value, self._make_module) if self._module_class(type(value)) else self.data(value)

    def data(self, value: Any) -> Any:
        """Containers, texts, numbers and tensors; modules are refused."""
        if type(value) in ATOMS:
            return value
        if self._module_class(type(value)):
            raise _Refused(f"a module within data, a {value.name}")
        return self._once(value, self._make_data)

    def _once(self, value: Any, make: Callable[[Any], Any]) -> Any:
        """What `value` stands for, made when it is first asked for."""
        if id(value) not in self._made:
            self._made[id(value)] = make(value)  # a container in itself ends in a RecursionError
        return self._made[id(value)]

    @staticmethod
    def key(value: Any) -> Any:
        """A key of a dictionary or an item of a set: a text or a number."""
        if type(value) not in ATOMS:
            raise ValueError(f"it has a key of type {type(value).__name__}")
        return value

    def _make_data(self, value: Any) -> Any:
        kind = type(value)
        if kind is list:
            return [self.data(item) for item in value]
        if kind is tuple:
            return tuple(self.data(item) for item in value)
        if kind is set:
            return {self.key(item) for item in value}
        if kind is dict or kind is _Dict:
            made = {self.key(key): self.data(item) for key, item in value.items()}
            return made if kind is dict else OrderedDict(made)
        if kind is _STORAGE:
            return self._storage(*value.args)
        if isinstance(value, _Shell):
            return self._called(value)
        name = getattr(value, "name", None)
        if name in DTYPES:
            return DTYPES[name]
        raise _Refused(name or f"a value of type {kind.__name__}")

    def _called(self, shell: _Shell) -> Any:
        """The value of a call of one of the listed functions."""
        if shell.name == ARRAY:  # NumPy makes an empty array, and gives it its state
            _, shape, dtype, fortran, data = self.data(shell.state)
            return np.ndarray(shape, _checked(dtype), data, order="F" if fortran else "C").copy(order="K")
        if shell.name == DTYPE:
            if shell.args[0] not in NUMPY_DTYPES:
                raise _Refused(f"NumPy's dtype {shell.args[0]}")
            return np.dtype(shell.args[0]).newbyteorder(shell.state[1] if shell.state else "=")
        if shell.name not in FUNCTIONS or shell.state is not None:
            raise _Refused(f"a call or a state of {shell.name}")
        return FUNCTIONS[shell.name](*(self.data(argument) for argument in shell.args))

    def _storage(self, _tag: Any, kind: type[_Shell], key: Any, _location: Any, _count: Any) -> torch.Tensor:
        """The elements of a storage in the archive, `[n]`."""
        dtype = STORAGES[kind.name]
        if key not in self._storages:
            content = bytearray(self._read_storage(key))
            self._storages[key] = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()
        return self._storages[key].view(dtype)

    def _module_class(self, kind: Any) -> type[nn.Module] | None:
        """The class that a class of shells stands for, if that is a module class."""
        return self._modules.get(kind.name) if isinstance(kind, type) and issubclass(kind, _Shell) else None

    def _make_module(self, shell: _Shell) -> nn.Module:
        cls = self._modules[shell.name]
        if shell.args or type(shell.state) is not dict:
            raise ValueError(f"an instance of {shell.name} has constructor arguments, or no state")
        module: nn.Module = object.__new__(cls)
        nn.Module.__init__(module)
        for key, value in shell.state.items():
            if key in MEMBERS:
                for name, member in value.items():
                    vars(module)[key][self.key(name)] = made = self.value(member)
                    if not isinstance(made, (MEMBERS[key], type(None))):
                        raise _Refused(f"{shell.name}.{name} of type {type(made).__name__}")
            elif key == KEPT_AS and isinstance(value, _Shell) and value.name == GETATTR:
                owner, attribute = value.args
                below = self._module_class(owner)
                if below is None or (below.__name__, attribute) != (KEPT_FORWARDS.get(cls.__name__), "forward"):
                    raise _Refused(f"{GETATTR} in a {cls.__name__}")
                vars(module)[key] = below.forward
            elif key.startswith("_") and key not in PRIVATE_DATA:
                if not (value is None or type(value) is bool or value == {}):
                    raise _Refused(f"a hook or a private attribute, {key[:80]} of {shell.name}")
            else:
                vars(module)[key] = self.data(value)
        return module


def _tensor(
    storage: torch.Tensor, offset: int, size: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> torch.Tensor:
    if hooks or metadata:
        raise _Refused("a tensor with hooks")
    # as_strided raises where the tensor does not lie within its storage; set_ makes it no view of another tensor.
    tensor = torch.empty(0, dtype=storage.dtype).set_(storage.as_strided(size, stride, offset))
    return tensor.requires_grad_(bool(requires_grad))


def _parameter(data: torch.Tensor, requires_grad: Any, hooks: Any) -> nn.Parameter:
    if hooks:
        raise _Refused("a parameter with hooks")
    return nn.Parameter(data, bool(requires_grad))


def _bytes(text: str, encoding: str) -> bytes:
    """Protocol 2 has no bytes, and writes them as text in Latin-1."""
    if encoding not in ("latin1", "latin-1"):
        raise _Refused(f"text in the encoding {encoding}")
    return text.encode("latin1")


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
    "builtins.set": lambda items: {_Builder.key(item) for item in items},
    "_codecs.encode": _bytes,
    "numpy.core.multiarray.scalar": lambda dtype, data: np.frombuffer(data, _checked(dtype), 1)[0],
    **dict.fromkeys(PATHS, lambda *parts: str(PurePosixPath(*parts))),
}
NAMES = frozenset({*FUNCTIONS, *STORAGES, *DTYPES, ARRAY, DTYPE, GETATTR, "numpy.ndarray"})
