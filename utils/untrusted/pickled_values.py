"""The values that a checkpoint's pickle may make: tensors, NumPy numbers, paths, and modules without code.

Each function stands for one of the names in `allowed_names.py` and checks its arguments; torch's and NumPy's own
functions of these names are not called.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import nn

from utils.untrusted import allowed_names
from utils.untrusted.pickle_machine import Damaged, NotAllowed, checked_key, name_of

MOST_DIMENSIONS = 8
MOST_WORK = 3_000_000  # items, or times 64 bytes, that calls may copy, all together; yolov9-e's need 100,000


@dataclass(frozen=True)
class Function:
    """Stands for a function that a pickle names."""

    name: str


@dataclass(frozen=True)
class ModuleClass:
    """Stands for a module class that a pickle names: it can be created empty, and is never called."""

    name: str
    cls: type[nn.Module]


@dataclass(frozen=True)
class Inert:
    """Stands for a name that is only an argument."""

    name: str


@dataclass(frozen=True)
class StorageKind:
    """Stands for a storage class."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Storage:
    """The bytes of one storage in the archive, as `dtype`."""

    data: torch.UntypedStorage
    dtype: torch.dtype
    count: int  # elements


class Values:
    """The meanings of a pickle's names, see `pickle_machine.Meanings`; one object for one file.

    Args:
        modules: module classes by the name that a pickle has for them; empty for files that hold none.
        storages: the archive's records, see `storage`.
    """

    def __init__(self, modules: Mapping[str, type[nn.Module]], storages: Any) -> None:
        self._modules = modules
        self._storages = storages
        self._work = 0

    def find(self, name: str) -> Any:
        """The value or the stand-in for a name."""
        module, _, rest = name.partition(".")
        name = f"{allowed_names.OLD_MODULES.get(module, module)}.{rest}"
        if name in self._modules:
            return ModuleClass(name, self._modules[name])
        if name in allowed_names.FUNCTIONS:
            return Function(name)
        if name in allowed_names.STORAGES:
            return StorageKind(getattr(torch, allowed_names.STORAGES[name]))
        if name in allowed_names.INERT:
            return Inert(name)
        if module == "torch" and rest in allowed_names.DTYPES:
            return getattr(torch, rest)
        raise NotAllowed(name[:200])

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """The value that a named function makes of its arguments."""
        if not isinstance(function, Function):
            raise NotAllowed(f"a call of {name_of(function)}")
        self._count(1 + sum(_work(argument) for argument in arguments))
        try:
            return MAKERS[allowed_names.FUNCTIONS[function.name]](*arguments)
        except Damaged:
            raise
        except (TypeError, ValueError, OverflowError, RuntimeError, AttributeError) as error:
            raise Damaged(f"{function.name} does not take what it is given") from error

    def create(self, kind: Any) -> nn.Module:
        """An empty module."""
        if not isinstance(kind, ModuleClass):
            raise NotAllowed(f"an instance of {name_of(kind)}")
        self._count(1)
        module: nn.Module = object.__new__(kind.cls)
        return module

    def fill(self, instance: Any, state: Any) -> None:
        """Give a module its attributes, an array its values."""
        if isinstance(instance, nn.Module):
            fill_module(instance, state)
        elif type(instance) is np.ndarray:
            self._count(sum(len(part) // 64 for part in state if type(part) is bytes) if type(state) is tuple else 1)
            _fill_array(instance, state)
        elif isinstance(instance, np.dtype):
            _check_dtype_state(state)
        elif type(instance) is OrderedDict:
            pass  # versions of modules in a state_dict
        else:
            raise NotAllowed(f"state for {type(instance).__name__}")

    def storage(self, identity: Any) -> Storage:
        """The storage that the persistent id `("storage", kind, key, location, count)` names."""
        if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
            raise Damaged("a reference to something that is no storage")
        _, kind, key, _, count = identity
        if not isinstance(kind, StorageKind) or type(key) is not str or type(count) is not int:
            raise Damaged("a reference to something that is no storage")
        return Storage(self._storages(key, count * kind.dtype.itemsize), kind.dtype, count)

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > MOST_WORK:
            raise Damaged("its pickle copies more than it holds")


def _work(argument: Any) -> int:
    """Items that a function may copy of an argument, or times 64 bytes of text."""
    items = len(argument) if type(argument) in (str, bytes, list, tuple, dict, OrderedDict, set) else 0
    return 1 + (items // 64 if type(argument) in (str, bytes) else items)


def fill_module(module: nn.Module, state: Any) -> None:
    """Give an empty module its attributes. None may hide a method; which values fit is checked when all are there."""
    if type(state) is not dict or vars(module):
        raise Damaged(f"the state of {type(module).__name__} is no dictionary")
    for key in state:
        if type(key) is not str or key.startswith("__"):
            raise NotAllowed(f"attribute {key!s:.80} of {type(module).__name__}")
        own = getattr(type(module), key, None)
        hides = callable(own) or hasattr(type(own), "__get__")
        if hides and not (key == "type" and type(state[key]) is str):  # upstream's name of the layer's class
            raise NotAllowed(f"attribute {key:.80} of {type(module).__name__}, where a method is")
    nn.Module.__setstate__(module, state)


def tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> torch.Tensor:
    """A tensor that lies within its storage."""
    if not isinstance(storage, Storage) or hooks or metadata:
        raise Damaged("a tensor has hooks, or no storage")
    for numbers in (size, stride):
        if not isinstance(numbers, tuple) or len(numbers) > MOST_DIMENSIONS:
            raise Damaged("a tensor's shape is none")
    if len(size) != len(stride) or any(type(n) is not int or n < 0 for n in (offset, *size, *stride)):
        raise Damaged("a tensor's shape is none")
    if 0 in size:  # a view of nothing may begin anywhere
        return torch.empty_strided(size, stride, dtype=storage.dtype)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if last >= storage.count or math.prod(size) > storage.count:
        raise Damaged(f"a tensor of shape {list(size)} does not fit into its storage")
    found = torch.empty(0, dtype=storage.dtype).set_(storage.data, offset, size, stride)
    return found.requires_grad_(bool(requires_grad) and storage.dtype.is_floating_point)


def parameter(data: Any, requires_grad: Any, hooks: Any) -> nn.Parameter:
    """A parameter, from its tensor."""
    if type(data) is not torch.Tensor or hooks:
        raise Damaged("a parameter has hooks, or no tensor")
    return nn.Parameter(data.detach(), requires_grad=bool(requires_grad) and data.is_floating_point())


def ordered_dict(pairs: Any = ()) -> OrderedDict[Any, Any]:
    """An OrderedDict, empty or from pairs."""
    if type(pairs) not in (list, tuple):
        raise Damaged("an OrderedDict of something that is no list")
    return OrderedDict((checked_key(key), value) for key, value in pairs)


def plain_set(items: Any = ()) -> set[Any]:
    """A set of words and numbers."""
    if type(items) not in (list, tuple):
        raise Damaged("a set of something that is no list")
    return {checked_key(item) for item in items}


def head_forward(kind: Any, name: Any) -> Any:
    """The forward of a head's class: in place of `getattr`, which would give anything of anything."""
    if not isinstance(kind, ModuleClass) or kind.cls.__name__ not in allowed_names.KEPT_FORWARDS.values():
        raise NotAllowed(f"an attribute of {name_of(kind)}")
    if type(name) is not str or name != "forward":
        raise NotAllowed(f"attribute {name_of(name)} of {kind.name}")
    return kind.cls.forward


def encoded_bytes(text: Any, encoding: Any) -> bytes:
    """Bytes: protocol 2 has them as text in Latin-1."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise Damaged("bytes in another encoding than Latin-1")
    return text.encode("latin-1")


def torch_size(numbers: Any) -> torch.Size:
    """A tensor's shape."""
    if type(numbers) is not tuple or len(numbers) > MOST_DIMENSIONS or any(type(n) is not int for n in numbers):
        raise Damaged("a shape is no tuple of integers")
    return torch.Size(numbers)


def torch_device(kind: Any, index: Any = None) -> torch.device:
    """The CPU: where a tensor was saved from does not matter."""
    known = type(kind) is str and re.fullmatch(r"(cpu|cuda)(:\d{1,2})?", kind)
    if not known or type(index) not in (int, type(None)):
        raise Damaged("a device is none of torch's")
    return torch.device("cpu")


def numpy_dtype(name: Any, *_: Any) -> np.dtype[Any]:
    """A numeric dtype of this machine's byte order."""
    if type(name) is not str or name not in allowed_names.NUMPY_DTYPES:
        raise NotAllowed(f"NumPy's dtype {name_of(name)}")
    return np.dtype(name)


def numpy_scalar(dtype: Any, data: Any) -> Any:
    """One number."""
    if not isinstance(dtype, np.dtype) or type(data) is not bytes or len(data) != dtype.itemsize:
        raise Damaged("a NumPy number is none")
    return np.frombuffer(data, dtype)[0]


def numpy_array(kind: Any, shape: Any, code: Any) -> np.ndarray:
    """An empty array, which gets its values afterwards."""
    if kind != Inert("numpy.ndarray") or shape != (0,) or code not in (b"b", "b"):
        raise NotAllowed("a subclass of NumPy's array")
    return np.empty(0, np.int8)


def pure_path(*parts: Any) -> PurePosixPath:
    """A path that can be shown and not opened."""
    if any(type(part) is not str for part in parts):
        raise Damaged("a path is no text")
    return PurePosixPath(*parts)


def _fill_array(array: np.ndarray, state: Any) -> None:
    if type(state) is not tuple or len(state) != 5:
        raise Damaged("an array's state is none")
    version, shape, dtype, fortran, data = state
    numeric = isinstance(dtype, np.dtype) and dtype.str[1:] in allowed_names.NUMPY_DTYPES
    if version != 1 or not numeric or type(fortran) is not bool or type(data) is not bytes or array.size:
        raise Damaged("an array's state is none")
    if type(shape) is not tuple or len(shape) > MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
        raise Damaged("an array's shape is none")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise Damaged(f"an array of shape {list(shape)} has {len(data)} bytes")
    array.__setstate__((1, shape, dtype, fortran, data))  # type: ignore[arg-type]


def _check_dtype_state(state: Any) -> None:
    if type(state) is not tuple or state[1:2] not in (("<",), ("|",)) or any(part for part in state[2:5]):
        raise Damaged("NumPy values of another byte order, or with fields")


MAKERS = {function.__name__: function for function in (
    ordered_dict, plain_set, head_forward, encoded_bytes, torch_size, torch_device, tensor, parameter, numpy_dtype,
    numpy_scalar, numpy_array, pure_path,
)}  # fmt: skip
