"""A model repository on disk ("Model Repository" in Triton's user guide): written, and checked.

REPOSITORY/NAME/config.pbtxt
REPOSITORY/NAME/labels.txt       names of the classes
REPOSITORY/NAME/1/model.onnx     or model.plan, or `nms_model.py` as model.py; of an ensemble the folder is empty

Each model is written whole or not at all. Protobuf reads the configurations and refuses unknown fields and wrong types.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from utils.core.errors import InputError, no_file
from utils.core.files import read_text
from utils.serving.config import ENSEMBLE, LABELS, ONNX, PLAN, PYTHON, ServedFile, class_names, data_type

CONFIG = "config.pbtxt"
MODEL_FILES = {PLAN: "model.plan", ONNX: "model.onnx", PYTHON: "model.py"}  # the names that Triton looks for
PLATFORMS = {"tensorrt": PLAN, "onnxruntime": ONNX}  # by backend; a configuration has one of both
Describe = Callable[[Path, str], "ServedFile | None"]
HEAD = "# Written by scripts/make_triton.py, which checks it with --check.\n"


def write_models(
    repository: Path, file: ServedFile, configs: Sequence[ModelConfig], note: str, check: Callable[[Path], object]
) -> list[Path]:
    """Write the models of a file, and return their folders.

    The models are written into a folder beside the repository, checked there and renamed into it, so that a server that
    polls the repository never sees half of a model.

    Args:
        note: the JSON to write beside an engine; '' for none.
        check: takes the folder before its models become the repository's, and may raise.

    Raises:
        InputError: something is in the way.
    """
    if repository.exists() and not repository.is_dir():
        raise InputError(f"--output {repository} is not a folder; give the folder of a model repository, or a new one")
    targets = [repository / config.name for config in configs]
    for target in filter(os.path.lexists, targets):
        raise InputError(f"{target} exists; remove it, or choose another --name or --output")
    place = repository if repository.is_mount() else repository.absolute().parent  # a rename stays on one disk
    place.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{repository.name}-", suffix=".part", dir=place))
    try:
        for config in configs:
            folder, version = temporary / config.name, temporary / config.name / "1"
            version.mkdir(parents=True)
            text = text_format.MessageToString(config, as_utf8=True, use_short_repeated_primitives=True)
            (folder / CONFIG).write_text(HEAD + text, encoding="utf-8")
            if any(output.label_filename for output in config.output):
                labels = "".join(f"{name}\n" for name in class_names(file.metadata, file.path))
                (folder / LABELS).write_text(labels, encoding="utf-8")
            if config.backend == PYTHON:
                shutil.copyfile(Path(__file__).with_name("nms_model.py"), version / MODEL_FILES[PYTHON])
            elif config.platform == file.platform:
                model = version / MODEL_FILES[file.platform]
                if not file.pending:
                    shutil.copyfile(file.path, model)
                if note:
                    model.with_name(f"{model.name}.json").write_text(note, encoding="utf-8")
        check(temporary)
        repository.mkdir(exist_ok=True)
        for target in targets:
            (temporary / target.name).rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return targets


def read_config(path: Path) -> ModelConfig:
    """A config.pbtxt; raises `InputError` if protobuf cannot read it."""
    text = read_text(path, "each folder of a repository is a model and needs it")
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise InputError(f"{path}, line {' '.join(str(error).split())}") from error


def check_repository(repository: Path, describe: Describe, *, pending: bool = False) -> dict[str, ModelConfig]:
    """Check all models of a repository, and return their configurations by name.

    What fits the server, and whether the steps of an ensemble fit each other, is the server's to say; checked is what a
    file says better: names, types, shapes and profiles.

    Args:
        describe: gives what is known about a file of a platform, or None.
        pending: engines may be missing.

    Raises:
        InputError: a server would not load the repository.
    """
    _require(repository.is_dir(), no_file(repository, "expected a folder with a folder for each model"))
    configs = {path.name: read_config(path / CONFIG) for path in sorted(repository.iterdir()) if path.is_dir()}
    _require(configs, f"{repository} holds no models; expected a folder with {CONFIG} for each of them")
    for name, config in configs.items():
        folder, where = repository / name, repository / name / CONFIG
        _require(config.name in ("", name), f"{where}: name is {config.name!r:.60}; expected that of the folder")
        for side in (config.input, config.output):
            valid = 0 < len({tensor.name for tensor in side}) == len(side)
            _require(valid, f"{where}: expected inputs and outputs, each with a name of its own")
        _require(config.max_batch_size >= 0, f"{where}: max_batch_size is {config.max_batch_size}")
        for labels in (folder / output.label_filename for output in config.output if output.label_filename):
            _require(labels.is_file(), no_file(labels, f"{where} names it"))
        platform = config.platform or PLATFORMS.get(config.backend, config.backend)
        _require(platform in (*MODEL_FILES, ENSEMBLE), f"{where}: platform or backend {platform!r:.40} is unknown")
        versions = [path for path in folder.iterdir() if path.is_dir() and path.name.isdecimal()]
        _require(versions, f"{folder} has no folder of a version; expected {folder / '1'}")
        if platform != ENSEMBLE and not (pending and platform == PLAN):
            for version in versions:
                path = version / (config.default_model_filename or MODEL_FILES[platform])
                _require(path.is_file(), no_file(path, f"{where} ({platform}) needs it"))
                if platform != PYTHON and (file := describe(path, platform)):
                    _check_file(where, config, path, file)
    return configs


def _require(condition: object, message: str) -> None:
    if not condition:
        raise InputError(message)


def _check_file(where: Path, config: ModelConfig, path: Path, file: ServedFile) -> None:
    """The configuration's tensors are those of the file, and batches are within an engine's profile."""
    _require(not file.unfit, f"{path}: {file.unfit}")
    for side, specs in ((config.input, file.inputs), (config.output, file.outputs)):
        known, names = {spec.name: spec for spec in specs}, {tensor.name for tensor in side}
        valid = names == {*known} or (side is config.output and names < {*known})
        _require(valid, f"{where} has {', '.join(sorted(names))}; {path} has {', '.join(sorted(known))}")
        for tensor in side:
            spec = known[tensor.name]
            kind, sizes = DataType.Name(tensor.data_type), _whole(tensor, config)
            own = [-1 if size is None else size for size in spec.shape]  # -1 takes any size
            fits = len(sizes) == len(own) and all(mine in (-1, size) for size, mine in zip(sizes, own, strict=True))
            words, valid = f"{tensor.name} {kind}{list(tensor.dims)}", kind == data_type(spec) and fits
            _require(valid, f"{where}: {words} with this max_batch_size is {spec} in {path}")
    if file.profile:
        (low, high), sizes = file.profile, _whole(config.input[0], config)
        within = all(a <= size <= b for size, a, b in zip(sizes, low, high, strict=True) if size != -1)
        valid = within and (not config.max_batch_size or low[0] == 1 <= config.max_batch_size <= high[0])
        _require(valid, f"{where}: {sizes}, batches up to {config.max_batch_size}: not within profile {low} to {high}")


def _whole(tensor: Any, config: ModelConfig) -> list[int]:
    """The shape with the batch."""
    return [*([-1] if config.max_batch_size else []), *tensor.dims]
