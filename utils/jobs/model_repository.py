"""A model repository for Triton from an ONNX file or an engine; and the check of one. See `utils/serving/`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from utils.core.errors import InputError
from utils.core.input_files import check_file, is_regular
from utils.core.input_form import DEFAULT_BATCH
from utils.serving import checks, repository
from utils.serving.config import Wishes, check_name, configs
from utils.serving.served_file import FILE_NAMES, ONNX, PLAN, ServedFile, Tensor
from utils.trt import onnx_summary
from utils.trt.build_config import BuildConfig, Range
from utils.trt.decision import profile_shapes
from utils.trt.engine_file import ENGINE_SUFFIXES, EngineNote
from utils.trt.onnx_summary import OnnxFile

logger = logging.getLogger(__name__)

STRONG = "it is strongly typed, which ONNX Runtime refuses; export it with --typing weak, or serve its engine"
PLUGIN = "it has a plugin of TensorRT's, which ONNX Runtime lacks; export it with --nms onnx, or serve its engine"
RTX = "{} built it, and Triton's backend loads engines of TensorRT; build one with TensorRT"


def make(path: Path, output: Path, wishes: Wishes, *, platform: str = "", onnx: Path | None = None,
         batch: Range | None = None, sides: Range | None = None) -> list[Path]:  # fmt: skip
    """Write a repository, or the models of a file into one.

    Args:
        path: an ONNX file or an engine.
        platform: PLAN for an ONNX file whose engine is built later; '': as the file is.
        onnx: the file that an engine was built from, if its note does not say what it takes.
        batch, sides: images and pixels of the profile of an engine that is built later, or whose note says none.

    Returns:
        The folders of the models.

    Raises:
        InputError: the file cannot be served so, or something is in the way.
    """
    file, note = describe(
        path, platform or (PLAN if path.suffix.lower() in ENGINE_SUFFIXES else ONNX), onnx, batch, sides
    )
    models = configs(file, wishes)
    text = json.dumps(asdict(note), indent=2) + "\n" if note else ""
    written = repository.write(output, file, models, text, lambda folder: _check_written(folder, pending=file.pending))
    for folder in written:
        logger.info("%s", folder)
    if file.pending:
        engine = next(one for one in written if models[one.name].get("platform") == PLAN) / "1" / FILE_NAMES[PLAN]
        logger.info("the engine is still to be built: %s", build_command(file, engine, batch, sides))
    return written


def _check_written(folder: Path, *, pending: bool) -> None:
    for model in checks.check_repository(folder, look, pending=pending):
        logger.info("%s", model)


def build_command(file: ServedFile, engine: Path, batch: Range | None, sides: Range | None) -> str:
    """How the engine of a repository is built."""
    words = ["python", "scripts/build_engine.py", str(file.path), "--output", str(engine)]
    for flag, values in (("--batch-size", (batch or DEFAULT_BATCH) if file.batched else None), ("--imgsz", sides)):
        words += [flag, *map(str, values)] if values else []
    return " ".join(words)


def check(folder: Path) -> None:
    """Check a repository, and say what is in it.

    Raises:
        InputError: a server would not load it.
    """
    for model in checks.check_repository(folder, look):
        logger.info("%s", model)


def look(path: Path, platform: str) -> ServedFile | None:
    """What a file of a repository is; None for an engine about which nothing is known."""
    if platform == ONNX:
        return of_onnx(onnx_summary.read(path), ONNX)
    note = EngineNote.load(path)
    return of_engine(path, note) if note.tensors else None


def describe(
    path: Path, platform: str, onnx: Path | None, batch: Range | None, sides: Range | None
) -> tuple[ServedFile, EngineNote | None]:
    """What a file is for a server, and the note that an engine takes along.

    Raises:
        InputError: it is neither an ONNX file nor an engine, or an engine of which is not known what it takes.
    """
    check_file(path, "expected an ONNX file or a TensorRT engine")
    config = BuildConfig(batch=batch, height=sides, width=sides)
    if path.suffix.lower() == ".onnx":
        file = onnx_summary.read(path)
        if platform == ONNX and (batch or sides):
            raise InputError("--batch-size and --imgsz are those of an engine's profile; give --max-batch-size")
        return of_onnx(file, platform, profile_shapes(file, config) if platform == PLAN else {}), None
    if path.suffix.lower() not in ENGINE_SUFFIXES:
        raise InputError(f"{path}: cannot tell what it is by its name; expected .onnx, .engine or .plan")
    if platform != PLAN:
        raise InputError(f"{path} is an engine, which runs as {PLAN} only")
    note = EngineNote.load(path)
    source = onnx or Path(note.onnx)
    if not note.tensors:
        if not is_regular(source):
            raise InputError(
                f"nothing beside {path} says what it takes and gives; give the file that it was built from with --onnx"
            )
        file = onnx_summary.read(source)
        tensors = {name: [file.types[name], list(shape)] for name, shape in file.tensors.items()}
        note = replace(note, onnx=str(source), tensors=tensors, metadata=note.metadata or dict(file.metadata))
        if not note.profile and onnx is not None:
            shapes = profile_shapes(file, config)
            note = replace(note, profile={name: [list(shape) for shape in three] for name, three in shapes.items()})
    elif onnx is not None:
        raise InputError(f"--onnx does nothing: the note of {path} says what it takes and gives; leave it out")
    elif batch or sides:
        raise InputError(f"the note of {path} says its profile; leave --batch-size and --imgsz out")
    return of_engine(path, note), note


def of_onnx(file: OnnxFile, platform: str, shapes: dict[str, tuple[tuple[int, ...], ...]] | None = None) -> ServedFile:
    """An ONNX file in ONNX Runtime; or, with the shapes of a profile, as the engine that it will be."""
    images = next(iter(file.inputs), "")
    three = (shapes or {}).get(images)
    unfit = "" if platform == PLAN else PLUGIN if file.plugins else STRONG if file.half_scales else ""
    return ServedFile(
        file.path, platform, _tensors(file, file.inputs), _tensors(file, file.outputs), file.metadata,
        (three[0], three[-1]) if three else None, unfit, pending=platform == PLAN,
    )  # fmt: skip


def of_engine(path: Path, note: EngineNote) -> ServedFile:
    """An engine, by its note.

    Raises:
        InputError: the note is damaged.
    """
    try:
        tensors = {name: Tensor(name, str(dtype), tuple(shape)) for name, (dtype, shape) in note.tensors.items()}
        inputs = list(note.profile) or [name for name, one in tensors.items() if name == next(iter(tensors))]
        three = note.profile.get(inputs[0])
        profile = (tuple(map(int, three[0])), tuple(map(int, three[-1]))) if three else None
        unfit = RTX.format(note.api) if "RTX" in note.api else ""
        return ServedFile(
            path, PLAN, tuple(tensors[name] for name in inputs),
            tuple(one for name, one in tensors.items() if name not in inputs), note.metadata, profile, unfit,
        )  # fmt: skip
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise InputError(f"the note beside {path} is damaged ({error}); build the engine again") from error


def _tensors(file: OnnxFile, shapes: dict[str, tuple[int | None, ...]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, file.types[name], shape) for name, shape in shapes.items())


def default_name(path: Path) -> str:
    """The name of a file's model: the file's, without what cannot stand in an address."""
    name = "".join(one if one.isascii() and (one.isalnum() or one in "._-") else "_" for one in path.stem).lstrip("._-")
    check_name(name or "model")
    return name or "model"


def three(values: Sequence[int] | None, flag: str) -> Range | None:
    """One number, or min, opt and max.

    Raises:
        InputError: there are others.
    """
    if values is None:
        return None
    if len(values) not in (1, 3):
        raise InputError(f"{flag} takes one number, or three: min opt max")
    least, opt, most = list(values) * (3 // len(values))
    return least, opt, most
