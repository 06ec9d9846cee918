"""PyTorch files made by hand, opcode by opcode, so that a pickle may hold what no pickler would write."""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def torch_file(path: Path, content: bytes, storages: Mapping[str, bytes] | None = None, **options: Any) -> Path:
    """An archive with the layout of torch.save's, around a pickle's opcodes."""
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + content + b".")
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", b"3\n")
    return path


def value(plain: Any) -> bytes:
    """Numbers, text, and lists, tuples and dictionaries of these."""
    return pickle.dumps(plain, 2)[2:-1]


def named(name: str) -> bytes:
    """A class or a function, by its dotted name."""
    module, _, attribute = name.rpartition(".")
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def items(*parts: bytes) -> bytes:
    """A tuple."""
    return b"(" + b"".join(parts) + b"t"


def call(function: str, *arguments: bytes) -> bytes:
    """What the function returns."""
    return named(function) + items(*arguments) + b"R"


def mapping(**entries: bytes) -> bytes:
    """A dictionary."""
    return b"}(" + b"".join(value(key) + entry for key, entry in entries.items()) + b"u"


def instance(name: str, state: bytes, arguments: bytes = b")") -> bytes:
    """An object of a class, created with `arguments`, with `state`."""
    return named(name) + arguments + b"\x81" + state + b"b"


def module(name: str, children: bytes = b"}", **attributes: bytes) -> bytes:
    """A torch module with its usual attributes, and others."""
    state = {"training": b"\x89", "_parameters": b"}", "_buffers": b"}", "_modules": children}
    hooks = dict.fromkeys(("_backward_hooks", "_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks"), b"}")
    return instance(name, mapping(**{**state, **hooks, **attributes}))


def storage(key: str = "0", count: int = 4, kind: str = "FloatStorage") -> bytes:
    """A reference to a storage of the archive."""
    return items(value("storage"), named(f"torch.{kind}"), value(key), value("cpu"), value(count)) + b"Q"


def tensor(size: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,), offset: int = 0, where: bytes = b"",
           hooks: bytes = b"}") -> bytes:  # fmt: skip
    """A tensor; by default the four numbers of storage 0."""
    parts = (where or storage(), value(offset), value(size), value(stride), b"\x89", hooks)
    return call("torch._utils._rebuild_tensor_v2", *parts)
