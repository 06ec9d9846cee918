"""A model repository for Triton ("Model Repository" in its user guide): write one of a file, or check one.

REPOSITORY/NAME/config.pbtxt
REPOSITORY/NAME/labels.txt       names of the classes
REPOSITORY/NAME/1/model.onnx     or model.plan, or `nms_model.py` as model.py; of an ensemble the folder is empty

Each model is written whole or not at all. The check is what a server says when it starts, later and in more lines:
names, types and shapes of a configuration are those of the file; steps of an ensemble are left to the server.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from utils.core.errors import InputError, no_file
from utils.core.files import check_file, read_text
from utils.core.input_spec import DEFAULT_BATCH
from utils.core.options import size_text
from utils.runners.base import TensorSpec
from utils.serving import nms_model
from utils.serving.config import ENSEMBLE, LABELS, ONNX, PLAN, PYTHON, ServedFile, class_names, data_type, model_configs
from utils.serving.options import ServingOptions
from utils.trt.engine_file import ENGINE_SUFFIXES, EngineNote
from utils.trt.preflight import BuildConfig, OnnxFile, profile_ranges, profile_shapes

logger = logging.getLogger(__name__)

CONFIG = "config.pbtxt"
MODEL_FILES = {PLAN: "model.plan", ONNX: "model.onnx", PYTHON: "model.py"}  # the names that Triton looks for
PLATFORMS = {"tensorrt": PLAN, "onnxruntime": ONNX}  # by backend; a configuration has one of both

STRONG = "it is strongly typed, which ONNX Runtime refuses; export it with --typing weak, or serve its engine"
PLUGIN = "it has a plugin of TensorRT's, which ONNX Runtime lacks; export it with --nms onnx, or serve its engine"
STRIPPED = "it has no weights (--strip-weights), which Triton does not add; build it without that"
RTX = "{} built it, and Triton loads engines of TensorRT only; build one with TensorRT"


def make(options: ServingOptions) -> list[Path]:
    """Write a repository, or the models of a file into one; and return the folders of the models.

    They are renamed into the repository, so that a server that polls it never sees half of a model.

    Raises:
        InputError: the file cannot be served so, or something is in the way.
    """
    file, note = read_served_file(options)
    configs, repository = model_configs(file, options), options.output
    if repository.exists() and not repository.is_dir():
        raise InputError(f"--output {repository} is not a folder; give the folder of a model repository, or a new one")
    targets = [repository / config.name for config in configs]
    if taken := [target.name for target in targets if os.path.lexists(target)]:
        raise InputError(f"{repository} has {', '.join(taken)} already; remove what is there, or choose another --name")
    place = repository if repository.is_mount() else repository.absolute().parent  # a rename stays on one disk
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{repository.name}-", suffix=".part", dir=place) as temporary:
        for config in configs:
            write_model(Path(temporary, config.name), config, file, note)
        repository.mkdir(exist_ok=True)
        for target in targets:
            Path(temporary, target.name).rename(target)
    for target in targets:
        logger.info("%s", target)
    words = ["tritonserver", "--model-repository", repository]
    if file.pending:
        (network,) = (config.name for config in configs if config.platform == PLAN)
        words = ["python", "scripts/build_engine.py", file.path, "--output", repository / network / "1/model.plan"]
        words += ["--batch-size", *(options.batch_size or DEFAULT_BATCH)] if file.batched else []
        words += ["--imgsz", *map(size_text, options.imgsz)] if options.imgsz else []
    logger.info("next, on the machine that serves: %s", shlex.join(map(str, words)))
    return targets


def write_model(folder: Path, config: ModelConfig, file: ServedFile, note: EngineNote | None) -> None:
    """Write the folder of a model: its configuration, names of classes, and what runs it, an engine with its note."""
    version = folder / "1"
    version.mkdir(parents=True)
    text = text_format.MessageToString(config, as_utf8=True, use_short_repeated_primitives=True)
    (folder / CONFIG).write_text(f"# Written by scripts/make_triton.py.\n{text}", encoding="utf-8")
    if any(output.label_filename for output in config.output):
        labels = "".join(f"{name}\n" for name in class_names(file.metadata, file.path))
        (folder / LABELS).write_text(labels, encoding="utf-8")
    if config.backend == PYTHON:
        shutil.copyfile(Path(nms_model.__file__), version / MODEL_FILES[PYTHON])
    elif config.platform == file.platform:
        model = version / MODEL_FILES[file.platform]
        if not file.pending:
            shutil.copyfile(file.path, model)
        if note:
            model.with_name(f"{model.name}.json").write_text(json.dumps(asdict(note), indent=2) + "\n", "utf-8")


def read_served_file(options: ServingOptions) -> tuple[ServedFile, EngineNote | None]:
    """What the file is for a server, and the note that an engine takes along."""
    path = check_file(options.file or "", "expected an ONNX file or a TensorRT engine")
    profile = BuildConfig(**profile_ranges(options))
    if path.suffix.lower() == ".onnx":
        platform = options.platform or ONNX
        if platform == ONNX and (options.batch_size or options.imgsz):
            raise InputError("--batch-size and --imgsz are those of an engine's profile; give --max-batch-size")
        file = OnnxFile.read(path)
        return of_onnx(file, platform, profile_shapes(file, profile) if platform == PLAN else {}), None
    if path.suffix.lower() not in ENGINE_SUFFIXES or options.platform == ONNX:
        raise InputError(f"{path}: expected .onnx, or .engine or .plan, which run as {PLAN}")
    note = EngineNote.load(path)
    if not note.tensors:
        todo = f"give the ONNX file and --platform {PLAN}, and copy the engine into the repository"
        raise InputError(f"{path} has no note beside it that says what it takes; {todo}")
    options.reject_unused(["batch_size", "imgsz"], f"to an engine: the note of {path} says what it takes")
    return of_engine(path, note), note


def of_onnx(file: OnnxFile, platform: str, profile: Mapping[str, Any] | None = None) -> ServedFile:
    """An ONNX file in ONNX Runtime; or, with the shapes of a profile, as the engine that it will be."""
    unfit = "" if platform == PLAN else PLUGIN if file.plugins else STRONG if file.half_scales else ""
    return ServedFile(file.path, platform, file.inputs, file.outputs, file.metadata, _limits(profile), unfit)


def of_engine(path: Path, note: EngineNote) -> ServedFile:
    """An engine, by its note."""
    specs = {name: TensorSpec(name, tuple(shape), str(dtype)) for name, (dtype, shape) in note.tensors.items()}
    inputs = [specs[name] for name in list(note.profile) or list(specs)[:1]]  # a static engine has no profile
    outputs = [spec for spec in specs.values() if spec not in inputs]
    unfit = STRIPPED if note.options.get("strip_weights") else RTX.format(note.api) if "RTX" in note.api else ""
    return ServedFile(path, PLAN, tuple(inputs), tuple(outputs), note.metadata, _limits(note.profile), unfit)


def _limits(profile: Mapping[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Min and max shape of the only input."""
    for least, _, most in (profile or {}).values():
        return tuple(least), tuple(most)
    return None


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
            logger.warning("%s has no metadata beside it and was not looked into", path)
    return config


def _check_file(where: Path, config: ModelConfig, file: ServedFile) -> None:
    """The configuration's tensors are those of the file, and batches are within an engine's profile."""
    _require(not file.unfit, f"{file.path}: {file.unfit}")
    batch = [-1] if config.max_batch_size else []
    for side, specs in ((config.input, file.inputs), (config.output, file.outputs)):
        known, names = {spec.name: spec for spec in specs}, {tensor.name for tensor in side}
        valid = names == {*known} or (side is config.output and names < {*known})
        _require(valid, f"{where} has {', '.join(sorted(names))}; {file.path} has {', '.join(sorted(known))}")
        for tensor in side:
            spec, kind, sizes = known[tensor.name], DataType.Name(tensor.data_type), [*batch, *tensor.dims]
            own = [-1 if size is None else size for size in spec.shape]  # -1 takes any size
            fits = len(sizes) == len(own) and all(mine in (-1, size) for size, mine in zip(sizes, own, strict=True))
            words, valid = f"{tensor.name} {kind}{list(tensor.dims)}", kind == data_type(spec) and fits
            _require(valid, f"{where}: {words} with this max_batch_size is {spec} in {file.path}")
    if file.profile:
        (low, high), sizes = file.profile, [*batch, *config.input[0].dims]
        within = all(a <= size <= b for size, a, b in zip(sizes, low, high, strict=True) if size != -1)
        valid = within and (not config.max_batch_size or low[0] == 1 <= config.max_batch_size <= high[0])
        _require(valid, f"{where}: {sizes}, batches up to {config.max_batch_size}: not within profile {low} to {high}")


def _require(condition: object, message: str) -> None:
    if not condition:
        raise InputError(message)
