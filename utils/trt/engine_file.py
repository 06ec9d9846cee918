"""Engines on disk: the plan, a note beside it about what it was built from, by what and for what; refusals in words.

A plan says nothing about classes or image sizes, and TensorRT's refusal of a plan of another version is hard to read.
So `X.engine` is accompanied by `X.engine.json`; an engine without one (built by trtexec) is loaded as well.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from utils.core.errors import InputError, no_file
from utils.core.files import file_hash, write_text
from utils.trt.preflight import BuildConfig
from utils.trt.tensorrt_api import Api, Gpu, Log

ENGINE_SUFFIXES = (".engine", ".plan")


@dataclass(frozen=True)
class EngineNote:
    """What is known about an engine.

    Attributes:
        onnx: the file it was built from.
        onnx_sha256: of that file, if the engine's weights are read from it (`--strip-weights`).
        api: name and version of what built it.
        gpu: name of the GPU it was built on, or the architectures it was built for ahead of time, such as 'SM89'.
        architecture: of that GPU, such as 'SM89', or the same architectures.
        typing: 'weak' or 'strong'.
        precision: 'int8', 'fp16' or 'fp32', as it was asked for.
        profile: input → min, opt, max shape.
        metadata: the ONNX file's.
        plugins: whether it uses TensorRT's own plugins.
        data_dependent: whether the size of a result in it depends on the image, see `OnnxFile`.
        seconds: that the build took.
        warnings: TensorRT's.
        options: `BuildConfig.options` of the build.
        tensors: input or output → its type, torch's name, and its shape in the ONNX file, null where dynamic.
        tuning: what `--tune` measured and decided, see `utils/trt/tune.py`; empty without it.
    """

    __pydantic_config__ = ConfigDict(strict=True)  # for `load`; keys of other versions are left out

    onnx: str = ""
    onnx_sha256: str = ""
    api: str = ""
    gpu: str = ""
    architecture: str = ""
    typing: str = ""
    precision: str = ""
    profile: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    plugins: bool = False
    data_dependent: bool = False
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Any] = field(default_factory=dict)
    tuning: Mapping[str, Any] = field(default_factory=dict)

    def save(self, engine: Path) -> None:
        """Write the note beside an engine."""
        write_text(note_path(engine), json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, engine: Path) -> EngineNote:
        """The note beside an engine; an empty one where there is none.

        Raises:
            InputError: the note is damaged.
        """
        path = note_path(engine)
        if not path.is_file():
            return cls()
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
            raise InputError(f"{path} is damaged: {reason}; delete it, or build the engine again") from error


def note_path(engine: Path) -> Path:
    """Where the note of an engine lies: `X.engine.json` beside `X.engine`."""
    return engine.with_name(f"{engine.name}.json")


def is_current(engine: Path, onnx: Path, api: Api, gpu: Gpu | None, config: BuildConfig) -> bool:
    """Whether an engine is newer than its ONNX file, and was built by this TensorRT for this GPU with these options.

    Of its precision that counts which a weakly typed network leaves to the options: whether it is FP32.
    """
    if not engine.is_file() or engine.stat().st_mtime < onnx.stat().st_mtime:
        return False
    note = EngineNote.load(engine)
    if note.api != api.name or (gpu is not None and gpu.name != note.gpu):
        return False
    if note.typing == "weak" and (note.precision == "fp32") != (config.precision == "fp32"):
        return False
    if config.tune is None:
        return not note.tuning and dict(note.options) == config.options
    tuned = note.tuning.get("complete") and note.tuning["minutes"] >= config.tune
    return bool(tuned and note.tuning["given"] == config.options)


def load_engine(path: str | Path, api: Api, log: Log, gpu: Gpu | None) -> Any:
    """Deserialize an engine; code inside plans is never allowed to run on the host.

    Returns:
        The ICudaEngine; TensorRT's bindings keep its runtime alive as long as it.

    Raises:
        InputError: it is missing, truncated, no engine, of another TensorRT or GPU, or its weights cannot be had.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(no_file(path, "expected a TensorRT engine"))
    note = EngineNote.load(path)
    if gpu is None:
        raise InputError(f"{path} needs an NVIDIA GPU, and torch sees none; the .onnx it was built from runs on a CPU")
    if note.plugins or not note.api:
        with contextlib.suppress(*(() if note.plugins else (InputError,))):
            api.register_plugins(log)
    engine, reason = None, ""
    try:
        engine = api.module.Runtime(log.handle).deserialize_cuda_engine(path.read_bytes())
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())
    if engine is None:
        if note.api and note.api.rpartition(" ")[2] != api.version:
            why = f"this engine was built by {note.api}, and here is {api.name}"
        elif note.gpu and gpu.name != note.gpu and gpu.architecture not in note.gpu.split():
            why = f"this engine was built for {note.gpu}, and here is {gpu.name} ({gpu.architecture})"
        else:
            reason = reason or log.reason("it is no engine, or it is truncated")
            why = f"{api.name} on {gpu.name} cannot load this engine: {reason}"
        where = f"{'here ' if api.builds else ''}from {note.onnx or 'its .onnx'}"
        raise InputError(f"{path}: {why}; build it again {where}{_helpful(note, api, gpu)}")
    if note.options.get("strip_weights"):
        _add_weights(engine, path, note, api, log)
    return engine


def _helpful(note: EngineNote, api: Api, gpu: Gpu) -> str:
    """In words, the builder option with which a refused engine would have been loaded; '' where there is none."""
    version, options = note.api.rpartition(" ")[2], note.options
    if not note.api or "RTX" in note.api:
        return ""
    if options.get("version_compatible") and version != api.version:
        return f"; tensorrt_lean {version} loads it, where TensorRT itself is not installed"
    if not options.get("version_compatible") and (version != api.version or not api.builds):
        return f"; built with --version-compatible, tensorrt_lean {version} would load it"
    both = [int(name[2:]) for name in (note.architecture, gpu.architecture) if re.fullmatch(r"SM\d+", name)]
    if note.gpu == gpu.name or len(both) < 2:
        return ""
    fits = {"same-cc": both[0] == both[1], "ampere+": min(both) >= 80, options.get("hardware_compatible"): False}
    levels = [one for one, fit in fits.items() if fit and not api.lacks("hardware_compatible", one)]
    return f"; built there with --hardware-compatible {levels[0]}, it would be loaded" if levels else ""


def _add_weights(engine: Any, path: Path, note: EngineNote, api: Api, log: Log) -> None:
    """Give an engine that was built with `--strip-weights` those of its ONNX file, beside it or where that was."""
    if not hasattr(api.module, "OnnxParserRefitter"):
        raise InputError(f"{path} has no weights, which {api.name} cannot add; build it without --strip-weights")
    places = [path.with_name(Path(note.onnx).name), Path(note.onnx)]
    onnx = next((place for place in places if place.is_file()), None)
    if onnx is None or file_hash(onnx) != note.onnx_sha256:
        what = f"and {note.onnx} has its weights; put that beside it" if onnx is None else f"and {onnx} has changed"
        raise InputError(f"{path} was built with --strip-weights, {what}, or build it again")
    refitter = api.module.Refitter(engine, log.handle)
    parser = api.module.OnnxParserRefitter(refitter, log.handle)
    if not (parser.refit_from_file(str(onnx)) and refitter.refit_cuda_engine()):
        raise InputError(f"{path} does not take the weights of {onnx}: {log.reason('TensorRT gives no reason')}")
