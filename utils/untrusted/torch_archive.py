"""PyTorch's files, read without running anything of theirs: the archive, its pickle, and what came out of it.

`torch.load` is not used: its list of allowed names can be extended from anywhere in the process, it calls constructors
with arguments from the file, and it hands TorchScript archives to a loader that runs them.
"""

from __future__ import annotations

import errno
import struct
import sys
import zipfile
from collections.abc import Mapping
from os import PathLike
from typing import IO, Any

import torch
from torch import nn

from utils.untrusted import loaded_values, pickle_machine
from utils.untrusted.pickle_machine import Damaged
from utils.untrusted.pickled_values import Values

LARGEST_PICKLE = 64 << 20  # bytes; the largest network of upstream's has 1 MB, its training state 2 MB


def read(
    file: str | PathLike[str] | IO[bytes], modules: Mapping[str, type[nn.Module]] | None = None, device: Any = "cpu"
) -> Any:
    """What `torch.save` wrote into `file`.

    Args:
        modules: module classes that it may hold, by the names that a pickle has for them. Without, it holds containers,
            numbers, text and tensors.
        device: where the tensors go.

    Raises:
        pickle_machine.NotAllowed: it names a class or a function that is not in utils/untrusted/allowed_names.py.
        pickle_machine.Damaged: it is no such file, or what it holds does not fit together.
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = _Records(archive, device)
            content = pickle_machine.run(records.pickle(), Values(modules or {}, records.storage))
    except Damaged:
        raise
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error) as error:
        raise Damaged(str(error)) from error
    except OSError as error:
        if error.errno == errno.EINVAL:  # a record that begins before the file does
            raise Damaged("its directory does not fit") from error
        raise
    loaded_values.check(content, frozenset((modules or {}).values()))
    return content


class _Records:
    """The records of an archive: `NAME/data.pkl` and the storages `NAME/data/KEY`, as they lie there."""

    def __init__(self, archive: zipfile.ZipFile, device: Any) -> None:
        self._archive = archive
        self._device = device
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._sizes: dict[str, int] = {}
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED or record.filename in self._sizes:
                raise Damaged("its records are compressed, or two have one name")
            self._sizes[record.filename] = record.file_size
        if archive.fp is None or sum(self._sizes.values()) > archive.fp.seek(0, 2):
            raise Damaged("its records are longer than the file")
        pickles = [name for name in self._sizes if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise Damaged("it has no data.pkl")
        self._folder = pickles[0].removesuffix("data.pkl")
        order = f"{self._folder}byteorder"
        if order in self._sizes and archive.read(order) != sys.byteorder.encode():
            raise Damaged("it was written on a machine of another byte order")

    def pickle(self) -> bytes:
        """The pickle's bytes."""
        name = f"{self._folder}data.pkl"
        if self._sizes[name] > LARGEST_PICKLE:
            raise Damaged(f"its pickle has {self._sizes[name]} bytes")
        return self._archive.read(name)

    def storage(self, key: str, size: int) -> torch.UntypedStorage:
        """The storage of that key, which has to have that many bytes."""
        name = f"{self._folder}data/{key}"
        if self._sizes.get(name) != size:
            raise Damaged(f"storage {key!s:.20} has {self._sizes.get(name, 'no')} bytes, not {size}")
        if key not in self._storages:
            data = torch.empty(size, dtype=torch.uint8)
            if size:
                data.numpy()[:] = memoryview(self._archive.read(name))
            self._storages[key] = data.to(self._device).untyped_storage()
        return self._storages[key]
