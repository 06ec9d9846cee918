"""A model repository for Triton ("Model Repository" in its user guide), of an ONNX file or an engine; and its check.

REPOSITORY/NAME/config.pbtxt
REPOSITORY/NAME/labels.txt       names of the classes
REPOSITORY/NAME/1/model.onnx     or model.plan, or `nms_model.py` as model.py; of an ensemble the folder is empty

Each model is written whole or not at all. Protobuf reads the configurations and refuses unknown fields and wrong types.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
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
from utils.serving.config import (
    ENSEMBLE,
    LABELS,
    ONNX,
    PLAN,
    PYTHON,
    ServedFile,
    ServingOptions,
    class_names,
    data_type,
    model_configs,
)
from utils.trt.engine_file import ENGINE_SUFFIXES, EngineNote
from utils.trt.preflight import BuildConfig, OnnxFile, min_opt_max, min_opt_max_sizes, profile_shapes

logger = logging.getLogger(__name__)

CONFIG = "config.pbtxt"
MODEL_FILES = {PLAN: "model.plan", ONNX: "model.onnx", PYTHON: "model.py"}  # the names that Triton looks for
PLATFORMS = {"tensorrt": PLAN, "onnxruntime": ONNX}  # by backend; a configuration has one of both
HEAD = "# Written by scripts/make_triton.py, which checks it with --check.\n"

STRONG = "it is strongly typed, which ONNX Runtime refuses; export it with --typing weak, or serve its engine"
PLUGIN = "it has a plugin of TensorRT's, which ONNX Runtime lacks; export it with --nms onnx, or serve its engine"
RTX = "{} built it, and Triton loads engines of TensorRT only; build one with TensorRT"


def make(options: ServingOptions) -> list[Path]:
    """Write a repository, or the models of a file into one; and return the folders of the models.

    Raises:
        InputError: the file cannot be served so, or something is in the way.
    """
    file, note = read_served_file(options)
    configs = model_configs(file, options)
    text = json.dumps(asdict(note), indent=2) + "\n" if note else ""
    written = write_models(
        options.output, file, configs, text, lambda folder: check_models(folder, pending=file.pending)
    )
    for folder in written:
        logger.info("%s", folder)
    if file.pending:
        (network,) = (config.name for config in configs if config.platform == PLAN)
        engine = options.output / network / "1" / MODEL_FILES[PLAN]
        program = os.path.relpath(Path(__file__).parents[2] / "scripts/build_engine.py")  # from where this was started
        words = ["python", program, file.path, "--output", engine]
        words += ["--batch-size", *(options.batch_size or DEFAULT_BATCH)] if file.batched else []
        words += ["--imgsz", *map(size_text, options.imgsz)] if options.imgsz else []
        logger.info("the engine is still to be built: %s", shlex.join(map(str, words)))
    return written


def check_models(folder: Path, *, pending: bool = False) -> None:
    """Check a repository, and log what is in it.

    Raises:
        InputError: a server would not load it.
    """
    for name, config in check_repository(folder, pending=pending).items():
        inputs, outputs = (
            ", ".join(f"{one.name} {list(one.dims)}" for one in side) for side in (config.input, config.output)
        )
        what = f"{config.platform or config.backend}, max_batch_size {config.max_batch_size}"
        logger.info("%s: %s, %s -> %s", name, what, inputs, outputs)


def _look(path: Path, platform: str) -> ServedFile | None:
    """What a file of a repository is; None for an engine about which nothing is known."""
    if platform == ONNX:
        return of_onnx(OnnxFile.read(path), ONNX)
    note = EngineNote.load(path)
    if not note.tensors:
        logger.warning("%s has no note beside it and was not looked into", path)
    return of_engine(path, note) if note.tensors else None


def read_served_file(options: ServingOptions) -> tuple[ServedFile, EngineNote | None]:
    """What the file is for a server, and the note that an engine takes along.

    Raises:
        InputError: it is neither an ONNX file nor an engine, or nothing says what an engine takes.
    """
    path = check_file(options.file or "", "expected an ONNX file or a TensorRT engine")
    profile = BuildConfig(batch=min_opt_max(options, "batch_size"), **min_opt_max_sizes(options))
    if path.suffix.lower() == ".onnx":
        platform = options.platform or ONNX
        if platform == ONNX and (options.batch_size or options.imgsz):
            raise InputError("--batch-size and --imgsz are those of an engine's profile; give --max-batch-size")
        file = OnnxFile.read(path)
        return of_onnx(file, platform, profile_shapes(file, profile) if platform == PLAN else {}), None
    if path.suffix.lower() not in ENGINE_SUFFIXES or options.platform == ONNX:
        raise InputError(f"{path}: expected .onnx, or .engine or .plan, which run as {PLAN}")
    note = EngineNote.load(path)
    if note.tensors and (options.onnx or options.batch_size or options.imgsz):
        raise InputError(f"the note of {path} says what it takes; leave --onnx, --batch-size and --imgsz out")
    if not note.tensors:
        source = check_file(options.onnx or note.onnx, f"give --onnx FILE, from which {path} was built")
        file = OnnxFile.read(source)
        shapes = note.profile or profile_shapes(file, profile)
        note = replace(note, onnx=str(source), tensors=file.tensors, profile=shapes, metadata=dict(file.metadata))
    return of_engine(path, note), note


def of_onnx(file: OnnxFile, platform: str, profile: Mapping[str, Any] | None = None) -> ServedFile:
    """An ONNX file in ONNX Runtime; or, with the shapes of a profile, as the engine that it will be."""
    unfit = "" if platform == PLAN else PLUGIN if file.plugins else STRONG if file.half_scales else ""
    inputs, outputs = (
        tuple(TensorSpec(name, shape, file.types[name]) for name, shape in side.items())
        for side in (file.inputs, file.outputs)
    )
    return ServedFile(file.path, platform, inputs, outputs, file.metadata, _limits(profile), unfit)


def of_engine(path: Path, note: EngineNote) -> ServedFile:
    """An engine, by its note.

    Raises:
        InputError: the note is damaged.
    """
    try:
        specs = {name: TensorSpec(name, tuple(shape), str(dtype)) for name, (dtype, shape) in note.tensors.items()}
        inputs = [specs[name] for name in list(note.profile) or list(specs)[:1]]  # a static engine has no profile
        outputs = [spec for spec in specs.values() if spec not in inputs]
        unfit = RTX.format(note.api) if "RTX" in note.api else ""
        return ServedFile(path, PLAN, tuple(inputs), tuple(outputs), note.metadata, _limits(note.profile), unfit)
    except (TypeError, ValueError, LookupError) as error:
        raise InputError(f"the note beside {path} is damaged ({error}); build the engine again") from error


def _limits(profile: Mapping[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Min and max shape of the only input."""
    for least, _, most in (profile or {}).values():
        return tuple(least), tuple(most)
    return None


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
    if taken := [target.name for target in targets if os.path.lexists(target)]:
        raise InputError(f"{repository} has {', '.join(taken)} already; remove what is there, or choose another --name")
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
                shutil.copyfile(Path(nms_model.__file__), version / MODEL_FILES[PYTHON])
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


def check_repository(repository: Path, *, pending: bool = False) -> dict[str, ModelConfig]:
    """Check all models of a repository, and return their configurations by name.

    What fits the server, and whether the steps of an ensemble fit each other, is the server's to say; checked is what a
    file says better: names, types, shapes and profiles.

    Args:
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
                build = "; build it by scripts/build_engine.py FILE.onnx --output THAT" if platform == PLAN else ""
                _require(path.is_file(), no_file(path, f"{where} ({platform}) needs it{build}"))
                if platform != PYTHON and (file := _look(path, platform)):
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
