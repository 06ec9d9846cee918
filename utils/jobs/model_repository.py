"""A model repository for Triton ("Model Repository" in its user guide), of an ONNX file or an engine.

REPOSITORY/NAME/config.pbtxt
REPOSITORY/NAME/labels.txt       names of the classes
REPOSITORY/NAME/1/model.onnx     or model.plan, or `nms_model.py` as model.py; of an ensemble the folder is empty

Each model is written whole or not at all.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from utils.core.errors import InputError
from utils.core.files import check_file
from utils.core.input_spec import DEFAULT_BATCH
from utils.core.options import size_text
from utils.runners.base import TensorSpec
from utils.serving import nms_model
from utils.serving.config import (
    LABELS,
    ONNX,
    PLAN,
    PYTHON,
    ServedFile,
    ServingOptions,
    class_names,
    model_configs,
)
from utils.trt.engine_file import ENGINE_SUFFIXES, EngineNote
from utils.trt.preflight import BuildConfig, OnnxFile, profile_ranges, profile_shapes

logger = logging.getLogger(__name__)

CONFIG = "config.pbtxt"
MODEL_FILES = {PLAN: "model.plan", ONNX: "model.onnx", PYTHON: "model.py"}  # the names that Triton looks for

STRONG = "it is strongly typed, which ONNX Runtime refuses; export it with --typing weak, or serve its engine"
PLUGIN = "it has a plugin of TensorRT's, which ONNX Runtime lacks; export it with --nms onnx, or serve its engine"
STRIPPED = "it has no weights (--strip-weights), which Triton does not add; build it without that"
RTX = "{} built it, and Triton loads engines of TensorRT only; build one with TensorRT"


def make(options: ServingOptions) -> list[Path]:
    """Write a repository, or the models of a file into one; and return the folders of the models.

    The models are written into a folder beside the repository and renamed into it, so that a server that polls the
    repository never sees half of a model.

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
    if file.pending:
        (network,) = (config.name for config in configs if config.platform == PLAN)
        program = os.path.relpath(Path(__file__).parents[2] / "scripts/build_engine.py")  # from where this was started
        words = ["python", program, file.path, "--output", repository / network / "1" / MODEL_FILES[PLAN]]
        words += ["--batch-size", *(options.batch_size or DEFAULT_BATCH)] if file.batched else []
        words += ["--imgsz", *map(size_text, options.imgsz)] if options.imgsz else []
        logger.info("the engine is still to be built: %s", shlex.join(map(str, words)))
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
    """What the file is for a server, and the note that an engine takes along.

    Raises:
        InputError: it is neither an ONNX file nor an engine, or nothing says what an engine takes.
    """
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
    return ServedFile(file.path, platform, file.inputs, file.outputs, file.metadata, _limits(profile), unfit)


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
