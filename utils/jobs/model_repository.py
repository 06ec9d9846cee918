"""A model repository for Triton ("Model Repository" in its user guide): write one of a file, or check one.

REPOSITORY/NAME/config.pbtxt
REPOSITORY/NAME/labels.txt       names of the classes
REPOSITORY/NAME/1/model.onnx     or model.plan, or `nms_model.py` as model.py; of an ensemble the folder is empty

Each model is written whole or not at all. The check finds what a server would find when it starts: names, types and
shapes of a configuration that are not those of the file. It leaves the steps of an ensemble to the server.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
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
from utils.trt.build_options import BuildConfig, profile_ranges
from utils.trt.engine_file import ENGINE_SUFFIXES, EngineNote
from utils.trt.onnx_file import OnnxFile
from utils.trt.preflight import profile_shapes

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
        InputError: the file cannot be served with these options, or something is in the way.
    """
    file, note = read_served_file(options)
    configs = model_configs(file, options)
    repository = options.output
    if repository.exists() and not repository.is_dir():
        raise InputError(f"--output {repository} is not a folder; give the folder of a model repository, or a new one")
    targets = [repository / config.name for config in configs]
    taken = [target.name for target in targets if os.path.lexists(target)]
    if taken:
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
    words = ["tritonserver", "--model-repository", str(repository)]
    if file.is_pending:
        (network,) = (config.name for config in configs if config.platform == PLAN)
        words = _build_command(file, repository / network / "1/model.plan", options)
    logger.info("next, on the machine that serves: %s", shlex.join(words))
    return targets


def _build_command(file: ServedFile, engine: Path, options: ServingOptions) -> list[str]:
    """The command that builds the engine of an ONNX file."""
    words = ["python", "scripts/build_engine.py", str(file.path), "--output", str(engine)]
    if file.is_batched:
        words += ["--batch-size", *map(str, options.batch_size or DEFAULT_BATCH)]
    if options.imgsz:
        words += ["--imgsz", *map(size_text, options.imgsz)]
    return words


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
        if not file.is_pending:
            shutil.copyfile(file.path, model)
        if note:
            beside = model.with_name(f"{model.name}.json")
            beside.write_text(json.dumps(asdict(note), indent=2) + "\n", "utf-8")


def read_served_file(options: ServingOptions) -> tuple[ServedFile, EngineNote | None]:
    """Read the description of the file for a server, and the note that belongs to an engine."""
    path = check_file(options.file or "", "expected an ONNX file or a TensorRT engine")
    if path.suffix.lower() == ".onnx":
        return _read_served_onnx(path, options), None
    if path.suffix.lower() not in ENGINE_SUFFIXES or options.platform == ONNX:
        raise InputError(f"{path}: expected .onnx, or .engine or .plan, which run as {PLAN}")
    note = EngineNote.load(path)
    if not note.tensors:
        todo = f"give the ONNX file and --platform {PLAN}, and copy the engine into the repository"
        raise InputError(f"{path} has no note beside it with its inputs and outputs; {todo}")
    options.reject_unused(["batch_size", "imgsz"], f"to an engine: the note of {path} has its shapes")
    return of_engine(path, note), note


def _read_served_onnx(path: Path, options: ServingOptions) -> ServedFile:
    """Describe an ONNX file, in ONNX Runtime or as the engine that is built later."""
    platform = options.platform or ONNX
    if platform == ONNX and (options.batch_size or options.imgsz):
        raise InputError("--batch-size and --imgsz are those of an engine's profile; give --max-batch-size")
    profile = BuildConfig(**profile_ranges(options))
    file = OnnxFile.read(path)
    if platform == PLAN:
        return of_onnx(file, platform, profile_shapes(file, profile))
    return of_onnx(file, platform)


def of_onnx(file: OnnxFile, platform: str, profile: Mapping[str, Any] | None = None) -> ServedFile:
    """Describe an ONNX file in ONNX Runtime; or, with the shapes of a profile, as the engine that it will be."""
    unfit = ""
    if platform != PLAN and file.plugins:
        unfit = PLUGIN
    elif platform != PLAN and file.half_scales:
        unfit = STRONG
    return ServedFile(file.path, platform, file.inputs, file.outputs, file.metadata, _limits(profile), unfit)


def of_engine(path: Path, note: EngineNote) -> ServedFile:
    """Describe an engine by its note."""
    specs = {name: TensorSpec(name, tuple(shape), str(dtype)) for name, (dtype, shape) in note.tensors.items()}
    names = list(note.profile) or list(specs)[:1]  # a static engine has no profile
    inputs = [specs[name] for name in names]
    outputs = [spec for spec in specs.values() if spec not in inputs]
    unfit = ""
    if note.options.get("strip_weights"):
        unfit = STRIPPED
    elif "RTX" in note.api:
        unfit = RTX.format(note.api)
    return ServedFile(path, PLAN, tuple(inputs), tuple(outputs), note.metadata, _limits(note.profile), unfit)


def _limits(profile: Mapping[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Min and max shape of the only input; None without a profile."""
    for least, _, most in (profile or {}).values():
        return tuple(least), tuple(most)
    return None


def check_repository(repository: Path) -> None:
    """Check all models of a repository, and log the inputs and outputs of each.

    Raises:
        InputError: a server would not load the repository.
    """
    _require(repository.is_dir(), no_file(repository, "expected a folder with a folder for each model"))
    folders = [path for path in sorted(repository.iterdir()) if path.is_dir()]
    _require(folders, f"{repository} holds no models; expected a folder with {CONFIG} for each of them")
    for folder in folders:
        config = _check_model(folder)
        platform = config.platform or config.backend
        inputs = ", ".join(f"{tensor.name} {list(tensor.dims)}" for tensor in config.input)
        outputs = ", ".join(f"{tensor.name} {list(tensor.dims)}" for tensor in config.output)
        logger.info(
            "%s: %s, max_batch_size %d, %s -> %s", folder.name, platform, config.max_batch_size, inputs, outputs
        )


def _check_model(folder: Path) -> ModelConfig:
    """Check the folder of a model; returns its configuration."""
    path = folder / CONFIG
    config = _read_config(path)
    _require(config.name in ("", folder.name), f"{path}: name is {config.name!r:.60}; expected that of the folder")
    for tensors in (config.input, config.output):
        names = {tensor.name for tensor in tensors}
        has_names = 0 < len(names) == len(tensors)
        _require(has_names, f"{path}: expected inputs and outputs, each with a name of its own")
    _require(config.max_batch_size >= 0, f"{path}: max_batch_size is {config.max_batch_size}; expected 0 or more")
    for output in config.output:
        labels = folder / output.label_filename
        _require(not output.label_filename or labels.is_file(), no_file(labels, f"{path} names it"))
    platform = config.platform or PLATFORMS.get(config.backend, config.backend)
    is_known = platform in (*MODEL_FILES, ENSEMBLE)
    _require(is_known, f"{path}: platform or backend {platform!r:.40} is unknown")
    versions = [version for version in folder.iterdir() if version.is_dir() and version.name.isdecimal()]
    _require(versions, f"{folder} has no folder of a version; expected {folder / '1'}")
    if platform != ENSEMBLE:
        for version in versions:
            _check_version(path, config, platform, version)
    return config


def _read_config(path: Path) -> ModelConfig:
    config = ModelConfig()
    try:
        text_format.Parse(read_text(path, "each folder of a repository is a model and needs it"), config)
    except text_format.ParseError as error:
        raise InputError(f"{path}, line {' '.join(str(error).split())}") from error
    return config


def _check_version(where: Path, config: ModelConfig, platform: str, version: Path) -> None:
    """Check the file in the folder of a version; `where` is the configuration's."""
    path = version / (config.default_model_filename or MODEL_FILES[platform])
    build = "; build it by scripts/build_engine.py FILE.onnx --output THAT" if platform == PLAN else ""
    _require(path.is_file(), no_file(path, f"{where} ({platform}) needs it{build}"))
    if platform == PYTHON:
        return
    if platform == ONNX:
        _check_file(where, config, of_onnx(OnnxFile.read(path), ONNX))
        return
    note = EngineNote.load(path)
    if note.tensors:
        _check_file(where, config, of_engine(path, note))
    else:
        logger.warning("%s has no metadata beside it and was not checked", path)


def _check_file(where: Path, config: ModelConfig, file: ServedFile) -> None:
    """Check that the configuration's tensors are those of the file, and batches within an engine's profile."""
    _require(not file.unfit, f"{file.path}: {file.unfit}")
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    has_inputs = inputs == {spec.name for spec in file.inputs}
    has_outputs = outputs <= {spec.name for spec in file.outputs}  # a configuration may leave outputs out
    _require(has_inputs, _other_names(where, inputs, file.path, file.inputs))
    _require(has_outputs, _other_names(where, outputs, file.path, file.outputs))
    specs = {spec.name: spec for spec in (*file.inputs, *file.outputs)}
    for tensor in (*config.input, *config.output):
        spec = specs[tensor.name]
        kind = DataType.Name(tensor.data_type)
        fits = kind == data_type(spec) and _fits(_with_batch(config, tensor.dims), spec)
        words = f"{tensor.name} {kind}{list(tensor.dims)}"
        _require(fits, f"{where}: {words} with this max_batch_size is {spec} in {file.path}")
    if file.profile:
        _check_profile(where, config, *file.profile)


def _other_names(where: Path, names: Collection[str], path: Path, specs: Sequence[TensorSpec]) -> str:
    """The message for a configuration whose inputs or outputs are not those of the file."""
    return f"{where} has {', '.join(sorted(names))}; {path} has {', '.join(sorted(spec.name for spec in specs))}"


def _with_batch(config: ModelConfig, dims: Sequence[int]) -> list[int]:
    """Sizes with the batch, which `dims` do not have where the server makes batches; -1 is any size."""
    return [-1, *dims] if config.max_batch_size else list(dims)


def _fits(sizes: Sequence[int], spec: TensorSpec) -> bool:
    """Return whether a file takes or gives tensors of these sizes; -1 is any size."""
    if len(sizes) != len(spec.shape):
        return False
    return all(own in (None, size) for size, own in zip(sizes, spec.shape, strict=True))


def _check_profile(where: Path, config: ModelConfig, least: Sequence[int], most: Sequence[int]) -> None:
    """Check that images and batches are within the min and max shape of an engine."""
    sizes = _with_batch(config, config.input[0].dims)
    within = all(
        size == -1 or smallest <= size <= largest for size, smallest, largest in zip(sizes, least, most, strict=True)
    )
    if config.max_batch_size:
        within = within and least[0] == 1 <= config.max_batch_size <= most[0]
    batches = f"{sizes}, batches up to {config.max_batch_size}"
    _require(within, f"{where}: {batches}: not within profile {tuple(least)} to {tuple(most)}")


def _require(condition: object, message: str) -> None:
    if not condition:
        raise InputError(message)
