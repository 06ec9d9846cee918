"""Engines on disk: the plan, and a note about its ONNX file, TensorRT, GPU and options; and why one does not load.

A plan holds no classes or image sizes, and TensorRT's refusal of a plan of another version is hard to read. So
`X.engine` is accompanied by `X.engine.json`; an engine without one (built by trtexec) is loaded as well.
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

from utils.core.errors import InputError
from utils.core.files import check_file, file_hash, write_text
from utils.trt.build_options import BuildConfig
from utils.trt.tensorrt_api import Api, Gpu

ENGINE_SUFFIXES = (".engine", ".plan")


@dataclass(frozen=True)
class EngineNote:
    """Description of an engine; see `OnnxFile` and `preflight.Decision` for fields that come from these."""

    __pydantic_config__ = ConfigDict(strict=True)  # for `load`; keys of other versions are left out

    onnx: str = ""  # the file it was built from
    onnx_sha256: str = ""  # of that file, if the engine's weights are read from it (`--strip-weights`)
    api: str = ""  # name and version of the TensorRT that built it
    gpu: str = ""  # name of the GPU that it was built on, or the architectures it was built for ahead of time
    architecture: str = ""  # such as 'SM89': of that GPU, or those it was built for
    typing: str = ""
    precision: str = ""
    profile: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    plugins: bool = False
    data_dependent: bool = False
    seconds: float = 0.0  # that the build took
    warnings: tuple[str, ...] = ()  # TensorRT's
    options: Mapping[str, Any] = field(default_factory=dict)  # `BuildConfig.options`
    tensors: Mapping[str, Any] = field(default_factory=dict)
    weights_bytes: int | None = None  # of the weights as the engine computes with them
    tuning: Mapping[str, Any] = field(default_factory=dict)  # candidates and options of `--tune`; empty without it

    def save(self, engine: Path) -> None:
        """Write the note beside an engine, as `X.engine.json`."""
        write_text(engine.with_name(f"{engine.name}.json"), json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, engine: Path) -> EngineNote:
        """The note beside an engine; an empty one where there is none; `InputError` if it is damaged."""
        path = engine.with_name(f"{engine.name}.json")
        if not path.is_file():
            return cls()
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise InputError(f"{path} is damaged: {reason}; delete it, or build the engine again") from error


def is_current(engine: Path, onnx: Path, api: Api, gpu: Gpu | None, config: BuildConfig) -> bool:
    """Return whether an engine is newer than its ONNX file, and built by this TensorRT for this GPU with these options.

    Precisions are compared only for a weakly typed network: there an option decides whether it is FP32.
    """
    if not engine.is_file() or engine.stat().st_mtime < onnx.stat().st_mtime:
        return False
    note = EngineNote.load(engine)
    if note.api != api.name or (gpu is not None and gpu.name != note.gpu):
        return False
    if note.typing == "weak" and (note.precision == "fp32") != (config.precision == "fp32"):
        return False
    if config.tune is None:
        return not note.tuning and dict(note.options) == config.with_streams(api).options
    tuned = note.tuning.get("complete") and note.tuning["minutes"] >= config.tune
    return bool(tuned and note.tuning["given"] == config.options)


def load_engine(path: str | Path, api: Api, log: Any, gpu: Gpu | None) -> Any:
    """Deserialize an engine; code inside plans is never allowed to run on the host.

    Returns:
        The ICudaEngine; TensorRT's bindings keep its runtime alive as long as it.

    Raises:
        InputError: it is missing, truncated, not an engine, of another TensorRT or GPU, or its weights are missing.
    """
    path = check_file(path, "expected a TensorRT engine")
    note = EngineNote.load(path)
    if gpu is None:
        raise InputError(f"{path} needs an NVIDIA GPU, and torch sees none; the .onnx it was built from runs on a CPU")
    if note.plugins:
        api.register_plugins(log)
    elif not note.api:  # built by others: it may have plugins
        with contextlib.suppress(InputError):
            api.register_plugins(log)
    engine = None
    reason = "it is not an engine, or it is truncated"
    try:
        engine = api.module.Runtime(log).deserialize_cuda_engine(path.read_bytes())
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())
    if engine is None:
        why = _refusal(note, api, gpu, log.reason(reason))
        here = "here " if api.builds else ""
        onnx = note.onnx or "its .onnx"
        raise InputError(f"{path}: {why}; build it again {here}from {onnx}{_option_that_helps(note, api, gpu)}")
    if note.options.get("strip_weights"):
        _add_weights(engine, path, note, api, log)
    return engine


def _refusal(note: EngineNote, api: Api, gpu: Gpu, reason: str) -> str:
    """The reason why an engine is not loaded, in words; `reason` is TensorRT's."""
    version = note.api.rpartition(" ")[2]
    if note.api and version != api.version:
        return f"this engine was built by {note.api}, but this machine has {api.name}"
    if note.gpu and gpu.name != note.gpu and gpu.architecture not in note.gpu.split():
        return f"this engine was built for {note.gpu}, but this machine has {gpu.name} ({gpu.architecture})"
    return f"{api.name} on {gpu.name} cannot load this engine: {reason}"


def _option_that_helps(note: EngineNote, api: Api, gpu: Gpu) -> str:
    """Return advice that names a builder option; '' if no option helps.

    `--version-compatible` lets another version of TensorRT load an engine. `--hardware-compatible` lets another GPU
    load it: one of the same compute capability, or any from Ampere (8.0) on.
    """
    version = note.api.rpartition(" ")[2]
    if "RTX" in note.api or not (note.api and note.architecture):
        return ""
    if version != api.version or not (api.builds or note.options.get("version_compatible")):
        return f"; tensorrt_lean {version} loads engines that are built with --version-compatible"
    capabilities = [int(digits) for digits in re.findall(r"\d+", f"{note.architecture} {gpu.architecture}")]
    level = ""
    if len(set(capabilities)) == 1 and not api.lacks("hardware_compatible", "same-cc"):
        level = "same-cc"
    elif min(capabilities) >= 80:
        level = "ampere+"
    if note.gpu == gpu.name or level in ("", note.options.get("hardware_compatible")):
        return ""
    return f"; an engine that is built there with --hardware-compatible {level} loads here"


def _add_weights(engine: Any, path: Path, note: EngineNote, api: Api, log: Any) -> None:
    """Give an engine that was built with `--strip-weights` the weights of its ONNX file."""
    if not hasattr(api.module, "OnnxParserRefitter"):
        raise InputError(f"{path} has no weights, which {api.name} cannot add; build it without --strip-weights")
    places = [path.with_name(Path(note.onnx).name), Path(note.onnx)]
    onnx = next((place for place in places if place.is_file() and file_hash(place) == note.onnx_sha256), None)
    if onnx is None:
        raise InputError(
            f"{path} was built with --strip-weights, and its weights are in {note.onnx}; put that file, unchanged, "
            "beside the engine, or build it again"
        )
    refitter = api.module.Refitter(engine, log)
    parser = api.module.OnnxParserRefitter(refitter, log)
    if not (parser.refit_from_file(str(onnx)) and refitter.refit_cuda_engine()):
        raise InputError(f"{path} does not take the weights of {onnx}: {log.reason('TensorRT gives no reason')}")
