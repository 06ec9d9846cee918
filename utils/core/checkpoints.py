"""PyTorch checkpoints, read without running any code of theirs.

A checkpoint is a zip archive of tensors and a pickle, and a pickle is a program: it names functions and calls them.
Two steps make it harmless:

1. `_Unpickler` imports no name, and gives the pickle a shell for each: a class of ours that records the arguments and
   the state that it receives, and does nothing else.
2. `_Builder` makes tensors, numbers and modules of the shells. A tensor has to lie within its storage. A module has to
   be of a listed class, whose constructor is not called: it starts as an empty `nn.Module` and receives plain data,
   tensors and child modules. Anything that could be called, such as a hook, is refused, and so is each name that is
   not in a table here. Under a key that nothing needs, the value that holds it is left out in its place.

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
# Prefix of names in files of other versions of Python (protocol 2 has Python 2's) and NumPy → prefix used here.
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
    """A checkpoint names a class or a function that is not allowed, or holds a hook or the like.

    Attributes:
        name: of the class or function, see RENAMED, cut to 200 characters; or the thing that it holds, in words.
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
    """Return the content that `torch.save` wrote into `file`, on the CPU; paths become texts. No code of it is run.

    Args:
        modules: the module classes that the file may hold, by their names in a pickle. A module may be the content
            itself, or the value of a needed key of a dictionary that is the content; a wrapper such as DataParallel is
            read as its network.
        needed: keys of that dictionary whose values must be read whole, by default all. From other values the entries
            of dictionaries are left out that would be refused; a list or a tuple goes whole.
        skip: keys of that dictionary whose values are left out, and whose tensors are not read.
        remedy: what to do about a damaged file.

    Raises:
        NotAllowed: it names something that is not listed here or in `modules`, or holds hooks or the like.
        CheckpointError: it is missing, damaged, truncated, or not a file of `torch.save` since torch 1.6.
    """
    if not os.path.isfile(file):
        raise CheckpointError(no_file(file, "--weights takes a .pt file"))
    _check_format(file)
    modules = modules or {}
    names: dict[str, type[Any]] = {}  # those in the pickle
    try:
        with zipfile.ZipFile(file) as archive:  # which compares all that it reads with its checksum
            folder = _folder_of_pickle(archive)
            unpickler = _Unpickler(io.BytesIO(archive.read(f"{folder}/data.pkl")))
            names = unpickler.names
            content = unpickler.load()
            builder = _Builder(modules, lambda key: archive.read(f"{folder}/data/{key}"))
            if type(content) in (dict, _Dict):
                return _parts(content, builder, content if needed is None else needed, skip)
            return builder.value(content, module_allowed=True)
    except NotAllowed as error:
        telling = (name for name in names if name.startswith(TELLING) and name not in modules)
        name = next(telling, error.name)
        raise NotAllowed(_refusal(file, name), name) from error
    except Exception as error:  # a damaged file can break zipfile, the unpickler and the builder anywhere
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        problem = f"is damaged, or not a checkpoint of PyTorch 1.6 or newer ({reason})"
        raise CheckpointError(f"{file} {problem}; {remedy}") from error


def _folder_of_pickle(archive: zipfile.ZipFile) -> str:
    """The folder in an archive that holds `data.pkl`, and the storages beside it; raises `ValueError`."""
    folders = [name.removesuffix("/data.pkl") for name in archive.namelist() if name.endswith("/data.pkl")]
    top_folders = [folder for folder in folders if "/" not in folder]
    if len(top_folders) != 1:
        raise ValueError("a zip file without data.pkl")
    return top_folders[0]


def _parts(
    content: Mapping[Any, Any],
    builder: _Builder,
    needed: Collection[str],
    skip: Collection[str],
) -> dict[Any, Any]:
    """The values of a dictionary that is a file's content, see `read_torch_file`."""
    parts: dict[Any, Any] = {}
    for key, value in content.items():
        if key in skip:
            continue
        name = _key(key)
        part = builder.value(value, module_allowed=True) if name in needed else builder.allowed_part(value)
        if part is not LEFT_OUT:
            parts[name] = part
    return parts


def _check_format(file: str | Path) -> None:
    """Raise `CheckpointError` for files of other formats that people take for checkpoints."""
    with open(file, "rb") as stream:
        begin = stream.read(len(LEGACY))
    length = int.from_bytes(begin[:8], "little")  # of the JSON object with which a safetensors file begins
    if len(begin) > 8 and begin[8:9] == b"{" and length <= os.path.getsize(file) - 8:
        raise CheckpointError(f"{file} is a safetensors file, which holds weights without the model; {UPSTREAMS}")
    if begin == LEGACY:
        raise CheckpointError(
            f"{file} has the format that PyTorch had before 1.6; if you trust it, write it anew in the checkout: "
            f"torch.save(torch.load({str(file)!r}, weights_only=False), 'new.pt')"
        )


def _refusal(file: str | Path, name: str) -> str:
    """Explain a checkpoint that names a class which is not allowed, and what to do."""
    for beginning, quantizer in QUANTIZERS.items():
        if name.startswith(beginning):
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
        "Save the model without fusing or wrapping it, as upstream's train.py does (TORCH_MODULES in utils/upstream/ "
        "lists what is taken)"
    )
    if package.isidentifier() and package not in ("torch", "builtins", "utils"):
        advice = f"If {package} is another project, {UPSTREAMS}; if it is code of your own, save the model without it"
    problem = f"{file} holds {name}, which is neither data nor a module class of YOLOv9 or torch.nn"
    return f"{problem}; it was not loaded. {advice}"


class _Shell:
    """Replaces a global of a pickle: the class stands for the name, an instance for a call of it.

    A pickle can make instances, give them a state, and put them into containers. It cannot change classes or instances:
    the instruction that sets attributes (BUILD) finds `__setstate__` on both.
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
        """Forget the state: a state_dict's is the versions of its modules, which nothing here needs."""


class _Foreign(_Shell):
    """Stands for a name that is not data: it keeps positional arguments, and forgets keywords and items.

    These are names that are refused, and the modules, namespaces and wrappers that `_Builder` knows.
    """

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
TELLING = ("ultralytics.", *QUANTIZERS)  # beginnings of names that tell which project wrote a refused checkpoint


class _Unpickler(pickle.Unpickler):
    """Python's unpickler, which imports nothing: `find_class` gives a shell for each name, and notes it in `names`."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.names: dict[str, type[Any]] = {"collections.OrderedDict": _Dict}  # → what stands for it

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        for beginning, own_name in RENAMED.items():
            if full.startswith(beginning):
                full = own_name + full.removeprefix(beginning)
        if full not in self.names:
            kind = _Shell if full in NAMES else _Foreign
            self.names[full] = _shell(full[:200], kind)
        return self.names[full]

    def persistent_load(self, pid: Any) -> Any:
        return _STORAGE(*pid)


def _key(value: Any) -> Any:
    """A key of a dictionary or an item of a set: a text or a number; raises `NotAllowed` for others."""
    if type(value) not in ATOMS:
        raise NotAllowed(f"a key of type {type(value).__name__}")
    return value


class _Builder:
    """Makes values of the shells of one file; `read_storage` gives the bytes of a storage by its key."""

    def __init__(self, modules: Mapping[str, type[nn.Module]], read_storage: Callable[[str], bytes]) -> None:
        self._modules, self._read_storage = modules, read_storage
        self._storages: dict[str, torch.Tensor] = {}  # key → its bytes, uint8 [n]
        self._made: dict[int, Any] = {}  # id of a container or a shell → its value, which may be shared

    def value(self, value: Any, *, module_allowed: bool = False) -> Any:
        """A container, text, number or tensor; or a module, which is refused within data."""
        if type(value) in ATOMS:
            return value
        is_module = isinstance(value, _Shell) and (value.name in self._modules or value.name in WRAPPERS)
        if is_module and not module_allowed:
            raise NotAllowed(f"a module within data, a {value.name}")
        if id(value) not in self._made:  # a container in itself ends in a RecursionError
            self._made[id(value)] = self._module(value) if is_module else self._data(value)
        return self._made[id(value)]

    def allowed_part(self, value: Any) -> Any:
        """A value without the entries of dictionaries that would be refused; `LEFT_OUT` for another refused value."""
        if isinstance(value, _Shell) and value.name in NAMESPACES:
            value = value.state
        if type(value) in (dict, _Dict):
            parts = {key: self.allowed_part(item) for key, item in value.items() if type(key) in ATOMS}
            return {key: part for key, part in parts.items() if part is not LEFT_OUT}
        try:
            return self.value(value)
        except NotAllowed:
            return LEFT_OUT

    def _data(self, value: Any) -> Any:
        """A container, a storage, or the value that a shell stands for."""
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
        if isinstance(value, _Shell):
            return self._called(value)
        name = getattr(value, "name", f"a value of type {kind.__name__}")
        if name in DTYPES:
            return DTYPES[name]
        if name in self._modules:
            raise NotAllowed(f"a class itself, {name}")
        raise NotAllowed(name)

    def _called(self, shell: _Shell) -> Any:
        """The value of a call of a name, where the name is listed; nothing of the file's is called."""
        name = shell.name
        if name in NAMESPACES and type(shell.state) is dict:
            return self.value(shell.state)
        if name.startswith(UNREAD):
            return None
        if isinstance(shell, _Foreign):
            raise NotAllowed(name)
        if name == ARRAY:
            return self._array(shell.state)
        if name == DTYPE and shell.args[0] in NUMPY_DTYPES:
            byte_order = shell.state[1] if shell.state else "="
            return np.dtype(shell.args[0]).newbyteorder(byte_order)
        if name not in FUNCTIONS or shell.state is not None:
            raise NotAllowed(f"a call or a state of {name}")
        return FUNCTIONS[name](*map(self.value, shell.args))

    def _array(self, state: Any) -> np.ndarray:
        """A NumPy array, which NumPy makes empty before it gives it its state."""
        _, shape, dtype, is_fortran, data = self.value(state)
        array: np.ndarray = np.ndarray(shape, _checked(dtype), data, order="F" if is_fortran else "C")
        copy: np.ndarray = array.copy(order="K")
        return copy

    def _storage(
        self,
        _tag: Any,
        kind: type[_Shell],
        key: Any,
        _location: Any,
        _count: Any,
    ) -> torch.Tensor:
        """The elements of a storage in the archive, `[n]`."""
        if key not in self._storages:
            content = bytearray(self._read_storage(key))
            if content:
                self._storages[key] = torch.frombuffer(content, dtype=torch.uint8)
            else:
                self._storages[key] = torch.empty(0, dtype=torch.uint8)
        return self._storages[key].view(STORAGES[kind.name])

    def _module(self, shell: _Shell) -> nn.Module:
        if shell.name in WRAPPERS:
            network: nn.Module = self.value(shell.state["_modules"]["module"], module_allowed=True)
            return network
        cls = self._modules[shell.name]
        if shell.args or type(shell.state) is not dict:
            raise ValueError(f"an instance of {shell.name} has constructor arguments, or no state")
        module: nn.Module = object.__new__(cls)
        nn.Module.__init__(module)
        for key, value in shell.state.items():
            if key in MEMBERS:
                self._add_members(module, key, value, shell.name)
            elif key == KEPT_AS and isinstance(value, _Shell) and value.name == GETATTR:
                vars(module)[key] = self._kept_forward(value, cls)
            elif not key.startswith("_") or key in PRIVATE_DATA:
                vars(module)[key] = self.value(value)
            elif not (value is None or type(value) is bool or value == {}):
                raise NotAllowed(f"a hook or a private attribute, {key[:80]} of {shell.name}")
        return module

    def _add_members(
        self,
        module: nn.Module,
        key: str,
        members: Mapping[Any, Any],
        owner: str,
    ) -> None:
        """Add the parameters, buffers or modules of a module, which are None or of the class that MEMBERS names."""
        for name, member in members.items():
            value = self.value(member, module_allowed=True)
            if not isinstance(value, (MEMBERS[key], type(None))):
                raise NotAllowed(f"a member of the wrong type, {owner}.{name} of type {type(value).__name__}")
            vars(module)[key][_key(name)] = value

    def _kept_forward(self, shell: _Shell, head: type[nn.Module]) -> Callable[..., Any]:
        """The forward of the head below a segment head, see KEPT_FORWARDS."""
        owner, attribute = shell.args
        below = self._modules.get(getattr(owner, "name", "")) if isinstance(owner, type) else None
        if below is None or (below.__name__, attribute) != (KEPT_FORWARDS.get(head.__name__), "forward"):
            raise NotAllowed(f"{GETATTR} in a {head.__name__}")
        forward: Callable[..., Any] = below.forward
        return forward


def _tensor(
    storage: Any,
    offset: int,
    size: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    metadata: Any = None,
) -> Any:
    if hooks or metadata:
        raise NotAllowed("a tensor with hooks")
    part = storage.as_strided(size, stride, offset)  # raises where the tensor does not lie within its storage
    tensor = torch.empty(0, dtype=storage.dtype).set_(part)  # not a view of another tensor
    return tensor.requires_grad_(bool(grad))


def _parameter(data: torch.Tensor, requires_grad: Any, hooks: Any) -> nn.Parameter:
    if hooks:
        raise NotAllowed("a parameter with hooks")
    return nn.Parameter(data, bool(requires_grad))


def _checked(dtype: Any) -> np.dtype[Any]:
    """Return a dtype that was built here; raise `ValueError` for another, as of objects, whose bytes are pointers."""
    if not isinstance(dtype, np.dtype):
        raise ValueError("NumPy's data have no dtype")
    return dtype


# Name in a pickle → function in its place. Of torch and NumPy only `torch.Size` itself is called.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.Size": torch.Size,
    "torch.device": lambda *_: torch.device("cpu"),
    "builtins.set": lambda items: set(map(_key, items)),
    "_codecs.encode": lambda text, _: text.encode("latin1"),  # protocol 2 has no bytes, and writes them as Latin-1
    "builtins.bytes": lambda: b"",  # as protocol 2 writes empty bytes
    "numpy.core.multiarray.scalar": lambda dtype, data: np.frombuffer(data, _checked(dtype), 1)[0],
    **dict.fromkeys(PATHS, lambda *parts: str(PurePosixPath(*parts))),
}
NAMES = frozenset({*FUNCTIONS, *STORAGES, *DTYPES, ARRAY, DTYPE, GETATTR, "numpy.ndarray"})
