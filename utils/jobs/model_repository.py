"""A model repository for Triton from an ONNX file or an engine; and the check of one. See `utils/serving/`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from utils.core.errors import InputError
from utils.core.files import check_file
from utils.core.input_spec import DEFAULT_BATCH
from utils.core.options import size_text
from utils.runners.base import TensorSpec
from utils.serving import repository
from utils.serving.config import ONNX, PLAN, ServedFile, ServingOptions, model_configs
from utils.trt.engine_file import ENGINE_SUFFIXES, EngineNote
from utils.trt.preflight import BuildConfig, OnnxFile, min_opt_max, min_opt_max_sizes, profile_shapes

logger = logging.getLogger(__name__)

STRONG = "it is strongly typed, which ONNX Runtime refuses; export it with --typing weak, or serve its engine"
PLUGIN = "it has a plugin of TensorRT's, which ONNX Runtime lacks; export it with --nms onnx, or serve its engine"
RTX = "{} built it, and Triton loads engines of TensorRT only; build one with TensorRT"
STRIPPED = "it has no weights (--strip-weights), which Triton does not add; build it without that"


def make(options: ServingOptions) -> list[Path]:
    """Write a repository, or the models of a file into one; and return the folders of the models.

    Raises:
        InputError: the file cannot be served so, or something is in the way.
    """
    file, note = read_served_file(options)
    configs = model_configs(file, options)
    text = json.dumps(asdict(note), indent=2) + "\n" if note else ""
    written = repository.write_models(
        options.output, file, configs, text, lambda folder: check_models(folder, pending=file.pending)
    )
    for folder in written:
        logger.info("%s", folder)
    if file.pending:
        (network,) = (config.name for config in configs if config.platform == PLAN)
        engine = options.output / network / "1" / repository.MODEL_FILES[PLAN]
        words = ["python", "scripts/build_engine.py", file.path, "--output", engine]
        words += ["--batch-size", *(options.batch_size or DEFAULT_BATCH)] if file.batched else []
        words += ["--imgsz", *map(size_text, options.imgsz)] if options.imgsz else []
        logger.info("the engine is still to be built: %s", " ".join(map(str, words)))
    return written


def check_models(folder: Path, *, pending: bool = False) -> None:
    """Check a repository, and log what is in it.

    Raises:
        InputError: a server would not load it.
    """
    for name, config in repository.check_repository(folder, _look, pending=pending).items():
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
        tensors = {name: [file.types[name], list(shape)] for name, shape in file.tensors.items()}
        shapes = note.profile or profile_shapes(file, profile)
        note = replace(note, onnx=str(source), tensors=tensors, profile=shapes, metadata=dict(file.metadata))
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
        unfit = STRIPPED if note.options.get("strip_weights") else RTX.format(note.api) if "RTX" in note.api else ""
        return ServedFile(path, PLAN, tuple(inputs), tuple(outputs), note.metadata, _limits(note.profile), unfit)
    except (TypeError, ValueError, LookupError) as error:
        raise InputError(f"the note beside {path} is damaged ({error}); build the engine again") from error


def _limits(profile: Mapping[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Min and max shape of the only input."""
    for least, _, most in (profile or {}).values():
        return tuple(least), tuple(most)
    return None
