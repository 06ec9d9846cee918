"""Is a model repository one that a Triton server loads? What a server would refuse is refused here, in one line.

The rules are those of the server's core (`model_config_utils.cc`, `model.cc`, `backend_model_instance.cc`) and of its
TensorRT and ONNX Runtime backends, for the fields that `config.py` writes and their neighbours. Other fields have to be
in the schema, and are left to the server.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.core.errors import InputError, no_file
from utils.core.input_files import is_regular, read_text
from utils.serving import pbtxt
from utils.serving.config import ENSEMBLE, PYTHON, Config
from utils.serving.config_checks import LARGEST_TEXT, check_config, check_warmup, fits
from utils.serving.ensembles import check_ensemble
from utils.serving.repository import CONFIG
from utils.serving.served_file import FILE_NAMES, ONNX, PLAN, ServedFile, Tensor

BACKENDS = {PLAN: "tensorrt", ONNX: "onnxruntime"}
FILES = {**FILE_NAMES, PYTHON: "model.py"}
Look = Callable[[Path, str], ServedFile | None]


@dataclass(frozen=True)
class Model:
    """A model of a repository.

    Attributes:
        platform: PLAN, ONNX, PYTHON or ENSEMBLE.
        seen: whether the file was looked into, too; engines say nothing about themselves without a note.
    """

    name: str
    platform: str
    config: Config
    seen: bool = True

    @property
    def batch(self) -> int:
        """`max_batch_size`."""
        return int(self.config.get("max_batch_size", 0))

    def __str__(self) -> str:
        shapes = [
            ", ".join(
                f"{one['name']} {one['data_type'].removeprefix('TYPE_')}{one['dims']}" for one in self.config[side]
            )
            for side in ("input", "output")
        ]
        most = f"batches of up to {self.batch}" if self.batch else "no batches of its own"
        unseen = "" if self.seen else "; the engine has no note beside it and was not looked into"
        return f"{self.name}: {self.platform}, {most}, {' -> '.join(shapes)}{unseen}"


def check_repository(folder: Path, look: Look, *, pending: bool = False) -> list[Model]:
    """Check all models of a repository.

    Args:
        look: a file and its platform → what it is; None for an engine without a note.
        pending: engines may be missing: they are built later.

    Raises:
        InputError: a server would not load it.
    """
    if not folder.is_dir():
        raise InputError(no_file(folder, "expected a model repository: a folder with a folder for each model"))
    if is_regular(folder / CONFIG):
        raise InputError(
            f"{folder} is one model, and its repository is the folder around it: {folder.absolute().parent}"
        )
    models = {path.name: _check_model(path, look, pending) for path in sorted(folder.iterdir()) if path.is_dir()}
    if not models:
        raise InputError(f"{folder} holds no models; expected a folder with {CONFIG} for each of them")
    for name, model in models.items():
        if model.platform == ENSEMBLE:
            others = {key: one.config for key, one in models.items()}
            check_ensemble(f"{folder / name / CONFIG}", model.config, others)
    return list(models.values())


def _check_model(folder: Path, look: Look, pending: bool) -> Model:
    path = folder / CONFIG
    config = pbtxt.loads(
        read_text(path, "each folder of a repository is a model and needs it", limit=LARGEST_TEXT), str(path)
    )
    where = str(path)
    if config.get("name", folder.name) != folder.name:
        raise InputError(f"{where} is named {config['name']!r:.60}; expected {folder.name}, as its folder is")
    platform = _platform(where, config)
    check_config(folder, config, platform)
    seen = _check_versions(folder, config, platform, look, pending)
    check_warmup(where, config)
    return Model(folder.name, platform, config, seen)


def _platform(where: str, config: Config) -> str:
    platform, backend = config.get("platform", ""), config.get("backend", "")
    if platform == ENSEMBLE and not backend:
        return ENSEMBLE
    if backend == PYTHON and platform in ("", PYTHON):
        return PYTHON
    for known, its in BACKENDS.items():
        if (platform or known, backend or its) == (known, its) and (platform or backend):
            return known
    said = ", ".join(f"{key} {value!r:.40}" for key, value in (("platform", platform), ("backend", backend)) if value)
    raise InputError(
        f"{where}: {said or 'neither platform nor backend is given'}; expected platform {PLAN}, {ONNX} or {ENSEMBLE}, "
        f"or backend {PYTHON}"
    )


def _check_versions(folder: Path, config: Config, platform: str, look: Look, pending: bool) -> bool:
    """The folders of versions, and the file in each; whether all files were looked into."""
    versions = sorted(
        path for path in folder.iterdir() if path.is_dir() and path.name.isdecimal() and path.name[0] != "0"
    )
    if not versions:
        raise InputError(f"{folder} has no folder of a version; expected {folder / '1'}{os.sep}")
    for wanted in config.get("version_policy", {}).get("specific", {}).get("versions", ()):
        if str(wanted) not in {path.name for path in versions}:
            raise InputError(
                f"{folder / CONFIG} asks for version {wanted}, and there is no {folder / str(wanted)}{os.sep}"
            )
    if platform == ENSEMBLE:
        return True
    found = [
        _check_file(path / (config.get("default_model_filename") or FILES[platform]), config, platform, look, pending)
        for path in versions
    ]
    return all(found)


def _check_file(path: Path, config: Config, platform: str, look: Look, pending: bool) -> bool:
    where = str(path.parents[1] / CONFIG)
    if not is_regular(path):
        if pending and platform == PLAN:
            return True
        raise InputError(f"{no_file(path, f'{where} ({platform}) needs it')}")
    if platform == PYTHON:
        _check_python(path)
        return True
    file = look(path, platform)
    if file is None:
        return False
    if file.unfit:
        raise InputError(f"{path}: {file.unfit}")
    _compare(where, config, "input", file.inputs)
    _compare(where, config, "output", file.outputs)
    _check_batch(where, config, file)
    return True


def _check_python(path: Path) -> None:
    try:
        tree = ast.parse(read_text(path, "expected a model for the Python backend", limit=LARGEST_TEXT))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is no Python: {' '.join(str(error).split())}") from error
    if not any(isinstance(node, ast.ClassDef) and node.name == "TritonPythonModel" for node in tree.body):
        raise InputError(f"{path} has no class TritonPythonModel, which the Python backend makes an instance of")


def _compare(where: str, config: Config, side: str, tensors: Sequence[Tensor]) -> None:
    """Names, types and shapes of a configuration and of its file."""
    own, said = {one.name: one for one in tensors}, {one["name"]: one for one in config[side]}
    unknown = [name for name in said if name not in own]
    if unknown:
        raise InputError(f"{where}: the file has no {side} {unknown[0]!r:.60}; it has {', '.join(own)}")
    if side == "input" and len(said) < len(own):
        raise InputError(f"{where}: input {next(name for name in own if name not in said)} of the file is missing")
    for name, one in said.items():
        if one["data_type"] != own[name].kind:
            raise InputError(f"{where}: {side} {name} is {one['data_type']}, and {own[name].kind} in the file")
        dims = [-1, *one["dims"]] if config.get("max_batch_size", 0) else one["dims"]
        shape = [-1 if size is None else size for size in own[name].shape]
        if not fits(dims, shape):
            batch = ", the batch included" if config.get("max_batch_size", 0) else ""
            raise InputError(f"{where}: {side} {name} is {dims}{batch}, and {shape} in the file")


def _check_batch(where: str, config: Config, file: ServedFile) -> None:
    most = config.get("max_batch_size", 0)
    if most and not file.batched:
        static = file.images.shape[0]
        raise InputError(
            f"{where}: max_batch_size is {most}, and the file takes {static} images, no more and no fewer; use 0"
        )
    if file.profile is None:
        return
    least, largest = file.profile
    if most > largest[0]:
        raise InputError(f"{where}: max_batch_size is {most}, and the engine's profile ends at {largest[0]} images")
    if most and least[0] > 1:
        raise InputError(f"{where}: the engine's profile begins at {least[0]} images, so that requests of one fail")
    dims: list[Any] = [*([1] if most else []), *config["input"][0]["dims"]]
    for size, low, high in zip(dims, least, largest, strict=True):
        if size != -1 and not low <= size <= high:
            raise InputError(
                f"{where}: input {file.images.name} is {dims}, outside of the profile {least} to {largest}"
            )
