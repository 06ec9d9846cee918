"""Would Triton load a model repository? Protobuf reads the configurations; names, types, shapes are those of the files.

A server says the same when it starts, later and in more lines; steps of an ensemble are left to it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from utils.core.errors import InputError, no_file
from utils.core.files import read_text
from utils.jobs.model_repository import CONFIG, MODEL_FILES, of_engine, of_onnx
from utils.serving.config import ENSEMBLE, ONNX, PLAN, PYTHON, ServedFile, data_type
from utils.trt.engine_file import EngineNote
from utils.trt.preflight import OnnxFile

logger = logging.getLogger(__name__)

PLATFORMS = {"tensorrt": PLAN, "onnxruntime": ONNX}  # by backend; a configuration has one of both


def check_repository(repository: Path) -> None:
    """Check all models of a repository, and log what each takes and gives.

    Raises:
        InputError: a server would not load the repository.
    """
    _require(repository.is_dir(), no_file(repository, "expected a folder with a folder for each model"))
    folders = [path for path in sorted(repository.iterdir()) if path.is_dir()]
    _require(folders, f"{repository} holds no models; expected a folder with {CONFIG} for each of them")
    for folder in folders:
        config = _check_model(folder)
        inputs, outputs = (
            ", ".join(f"{one.name} {list(one.dims)}" for one in side) for side in (config.input, config.output)
        )
        what = f"{config.platform or config.backend}, max_batch_size {config.max_batch_size}"
        logger.info("%s: %s, %s -> %s", folder.name, what, inputs, outputs)


def _check_model(folder: Path) -> ModelConfig:
    where, config = folder / CONFIG, ModelConfig()
    try:
        text_format.Parse(read_text(where, "each folder of a repository is a model and needs it"), config)
    except text_format.ParseError as error:
        raise InputError(f"{where}, line {' '.join(str(error).split())}") from error
    _require(config.name in ("", folder.name), f"{where}: name is {config.name!r:.60}; expected that of the folder")
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
    for version in versions if platform != ENSEMBLE else []:
        path = version / (config.default_model_filename or MODEL_FILES[platform])
        build = "; build it by scripts/build_engine.py FILE.onnx --output THAT" if platform == PLAN else ""
        _require(path.is_file(), no_file(path, f"{where} ({platform}) needs it{build}"))
        if platform == ONNX:
            _check_file(where, config, of_onnx(OnnxFile.read(path), ONNX))
        elif platform == PLAN and (note := EngineNote.load(path)).tensors:
            _check_file(where, config, of_engine(path, note))
        elif platform != PYTHON:
            logger.warning("%s has no note beside it and was not looked into", path)
    return config


def _require(condition: object, message: str) -> None:
    if not condition:
        raise InputError(message)


def _check_file(where: Path, config: ModelConfig, file: ServedFile) -> None:
    """The configuration's tensors are those of the file, and batches are within an engine's profile."""
    _require(not file.unfit, f"{file.path}: {file.unfit}")
    for side, specs in ((config.input, file.inputs), (config.output, file.outputs)):
        known, names = {spec.name: spec for spec in specs}, {tensor.name for tensor in side}
        valid = names == {*known} or (side is config.output and names < {*known})
        _require(valid, f"{where} has {', '.join(sorted(names))}; {file.path} has {', '.join(sorted(known))}")
        for tensor in side:
            spec, kind, sizes = known[tensor.name], DataType.Name(tensor.data_type), _whole(tensor, config)
            own = [-1 if size is None else size for size in spec.shape]  # -1 takes any size
            fits = len(sizes) == len(own) and all(mine in (-1, size) for size, mine in zip(sizes, own, strict=True))
            words, valid = f"{tensor.name} {kind}{list(tensor.dims)}", kind == data_type(spec) and fits
            _require(valid, f"{where}: {words} with this max_batch_size is {spec} in {file.path}")
    if file.profile:
        (low, high), sizes = file.profile, _whole(config.input[0], config)
        within = all(a <= size <= b for size, a, b in zip(sizes, low, high, strict=True) if size != -1)
        valid = within and (not config.max_batch_size or low[0] == 1 <= config.max_batch_size <= high[0])
        _require(valid, f"{where}: {sizes}, batches up to {config.max_batch_size}: not within profile {low} to {high}")


def _whole(tensor: Any, config: ModelConfig) -> list[int]:
    """The shape with the batch."""
    return [*([-1] if config.max_batch_size else []), *tensor.dims]
