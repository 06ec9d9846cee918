"""The only importer of TensorRT: 8.6, 10, 11 as `tensorrt`, TensorRT-RTX, and TensorRT's lean runtime.

What differs between versions is asked of the module (`Api.weakly_typed`, `Api.ahead_of_time`, ...), so that nothing
else compares version numbers.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from utils.core.device import select_device
from utils.core.errors import DependencyError, InputError
from utils.core.files import wanted_typing

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

RTX = ("tensorrt_rtx", "tensorrt_rtx_bindings")
MODULES = ("tensorrt", *RTX, "tensorrt_lean", "tensorrt_lean_bindings")
# TensorRT's name of a data type → torch's
TORCH_TYPES = {
    "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT8": "int8", "UINT8": "uint8",
    "INT32": "int32", "INT64": "int64", "BOOL": "bool",
}  # fmt: skip


class BuilderOption(NamedTuple):
    """An option as TensorRT knows it: a property of IBuilderConfig, with members of its enum for words; or flags."""

    setting: str = ""
    members: Mapping[str, str] = {}
    flags: tuple[str, ...] = ()

    @property
    def enum(self) -> str:
        """Name of the property's enum."""
        return "".join(word.capitalize() for word in self.setting.split("_"))


# Fields of BuildConfig that change which kernels an engine has, and where it runs; a version may lack them
BUILDER_OPTIONS = {
    "optimization_level": BuilderOption("builder_optimization_level"),
    "max_aux_streams": BuilderOption("max_aux_streams"),
    "tiling_level": BuilderOption(
        "tiling_optimization_level", {"fast": "FAST", "moderate": "MODERATE", "full": "FULL"}
    ),
    "max_tactics": BuilderOption("max_num_tactics"),
    # without the lean runtime inside, which would be code that a plan brings along
    "version_compatible": BuilderOption(flags=("VERSION_COMPATIBLE", "EXCLUDE_LEAN_RUNTIME")),
    "hardware_compatible": BuilderOption(
        "hardware_compatibility_level", {"same-cc": "SAME_COMPUTE_CAPABILITY", "ampere+": "AMPERE_PLUS"}
    ),
    "strip_weights": BuilderOption(flags=("STRIP_PLAN", "REFIT_IDENTICAL")),
}


@dataclass(frozen=True)
class Api:
    """A TensorRT module, and what it can do."""

    module: Any

    @property
    def version(self) -> str:
        """The module's version, such as '8.6.0', or 'unknown'; without the number of the build, as trtexec says it."""
        return ".".join(str(getattr(self.module, "__version__", "unknown")).split(".")[:3])

    @property
    def name(self) -> str:
        """Name and version, such as 'TensorRT 8.6.0', 'TensorRT-RTX 1.7.1' or 'TensorRT's lean runtime 10.16.1'."""
        name = "TensorRT-RTX" if self.is_rtx else "TensorRT" if self.builds else "TensorRT's lean runtime"
        return f"{name} {self.version}"

    @property
    def builds(self) -> bool:
        """Whether it builds engines; the lean runtime only runs those that were built version compatible."""
        return hasattr(self.module, "Builder")

    @property
    def is_rtx(self) -> bool:
        """Whether this is TensorRT-RTX."""
        return "rtx" in self.module.__name__

    @property
    def typing(self) -> Literal["weak", "strong"]:
        """How files for it are exported, 'weak' or 'strong'; it may read both."""
        return "strong" if not self.weakly_typed else wanted_typing(self.version)

    @cached_property
    def weakly_typed(self) -> bool:
        """Whether builder flags choose the precision (until TensorRT 10.x); else the ONNX file alone does."""
        return hasattr(self.module.BuilderFlag, "FP16")

    @cached_property
    def strongly_typed(self) -> bool:
        """Whether a network can be built in the types that the ONNX file has (from TensorRT 9)."""
        return not self.weakly_typed or hasattr(self.module.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")

    @cached_property
    def ahead_of_time(self) -> tuple[str, ...]:
        """Architectures that engines can be built for without such a GPU, such as 'SM89'; TensorRT-RTX only."""
        capability = getattr(self.module, "ComputeCapability", None)
        if capability is None or not hasattr(self.module.IBuilderConfig, "set_compute_capability"):
            return ()
        return tuple(name for name in dir(capability) if re.fullmatch(r"SM\d+", name))

    def lacks(self, name: str, value: Any) -> str:
        """What it has not of a builder option with this value, such as 'BuilderFlag.STRIP_PLAN'; '' if it has all."""
        option = BUILDER_OPTIONS[name]
        needed = [("BuilderFlag", flag) for flag in option.flags]
        needed += [("IBuilderConfig", option.setting)] if option.setting else []
        needed += [(option.enum, option.members[value])] if option.members else []
        holders = ((kind, member, getattr(self.module, kind, None)) for kind, member in needed)
        return next((f"{kind}.{member}" for kind, member, holder in holders if not hasattr(holder, member)), "")

    def set_option(self, setup: Any, name: str, value: Any) -> None:
        """Set a builder option in an IBuilderConfig."""
        option = BUILDER_OPTIONS[name]
        for flag in option.flags:
            setup.set_flag(getattr(self.module.BuilderFlag, flag))
        if option.setting:
            member = option.members.get(value)
            setattr(setup, option.setting, getattr(getattr(self.module, option.enum), member) if member else value)

    @property
    def progress_monitor(self) -> type | None:
        """IProgressMonitor, from TensorRT 10."""
        return getattr(self.module, "IProgressMonitor", None)

    def register_plugins(self, log: Log) -> None:
        """Make TensorRT's own plugins known, before a file or an engine that uses them is read.

        Raises:
            InputError: there are none (TensorRT-RTX), or they do not load.
        """
        register = getattr(self.module, "init_libnvinfer_plugins", None)  # RTX has it, and no plugin behind it
        if self.is_rtx or register is None or not register(log.handle, ""):
            way = "without NMS" if self.is_rtx else "with --nms onnx, or without NMS"  # RTX reads no NonMaxSuppression
            raise InputError(f"{self.name} has no plugins here; export {way}")

    def torch_type(self, dtype: Any) -> str:
        """Name of torch's data type for TensorRT's.

        Raises:
            InputError: torch has none.
        """
        name = str(getattr(dtype, "name", dtype))
        if name not in TORCH_TYPES:
            raise InputError(f"{self.name}'s data type {name} is none of {', '.join(TORCH_TYPES)}")
        return TORCH_TYPES[name]

    def log(self) -> Log:
        """A new logger for TensorRT's objects; keep it as long as them."""
        return Log(self.module)


class Log:
    """What TensorRT has said since this was made: errors and warnings, without source positions.

    TensorRT keeps the first logger that a process gives it for all its objects, so that all Logs share one.

    Attributes:
        handle: the object that TensorRT takes.
    """

    def __init__(self, module: Any) -> None:
        self.handle = _handle(module)
        self._before = len(self.handle.messages)

    def said(self, severity: str) -> tuple[str, ...]:
        """The messages of a severity, 'ERROR' or 'WARNING', once each."""
        return tuple(dict.fromkeys(text for kind, text in self.handle.messages[self._before :] if kind == severity))

    def reason(self, default: str) -> str:
        """Why something failed: the last error."""
        return (default, *self.said("ERROR"))[-1]


@cache
def _handle(module: Any) -> Any:
    class Handle(module.ILogger):
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.messages: list[tuple[str, str]] = []  # severity and text

        def log(self, severity: Any, message: str) -> None:
            name = str(getattr(severity, "name", severity)).removeprefix("INTERNAL_")
            if name in ("VERBOSE", "INFO") and not logger.isEnabledFor(logging.DEBUG):
                return  # there are several for each kernel that is measured
            text = readable(message)
            # errors are raised by whoever notices the failure
            new = name == "WARNING" and (name, text) not in self.messages
            logger.log(logging.WARNING if new else logging.DEBUG, "TensorRT: %s", text)
            if name in ("ERROR", "WARNING"):
                self.messages.append((name, text))

    return Handle()


def readable(message: str) -> str:
    """A message without source file, function and error code in front, on one line."""
    text = " ".join(message.split())
    text = re.sub(r"^(?:\S+\.(?:cpp|h|cu|inl):\d+:\s*)+", "", text)
    text = re.sub(r"^(?:\d+: )?(?:\[[^\]]*\.(?:cpp|h|cu)::[^\]]*\] )?(?:Error Code \d+: )?", "", text)
    return text[:500]


def installed_module(names: Sequence[str] | None = None) -> str | None:
    """Name of the first TensorRT module, or of these, that is installed; nothing is imported."""
    return next((name for name in names or MODULES if importlib.util.find_spec(name) is not None), None)


def load_tensorrt(name: str | None = None) -> Api:
    """Import TensorRT, or the module of that name.

    Raises:
        DependencyError: it is not installed, or its libraries do not load.
    """
    name = name or installed_module()
    if name is None:
        raise DependencyError(
            "TensorRT is not installed: where there is a GPU, run install_dependencies.sh --tensorrt in the folder "
            "of this overlay's clone; where there is none, pip install -r requirements/rtx.txt there, for --target"
        )
    try:
        return Api(importlib.import_module(name))
    except (ImportError, OSError, AttributeError) as error:
        raise DependencyError(f"{name} is installed but cannot be imported: {' '.join(str(error).split())}") from error


@dataclass(frozen=True)
class Gpu:
    """The GPU that torch sees.

    Attributes:
        name: such as 'NVIDIA H200'.
        architecture: such as 'SM90'.
        free: bytes of memory.
    """

    name: str
    architecture: str
    free: int


def use_device(text: str, *, for_engines: bool = True) -> torch.device:
    """The device that `--device` names; a GPU becomes the one that TensorRT builds and runs on.

    Args:
        for_engines: refuse the CPU beside a GPU. Where there is no GPU, whatever needs one refuses with more words.

    Raises:
        InputError: it does not exist, or is the CPU beside a GPU.
    """
    import torch

    device = select_device(text)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif for_engines and torch.cuda.is_available():
        raise InputError(f"--device {text}: engines are built and run on a GPU; leave it out, or give the GPU's number")
    return device


def current_device() -> torch.device:
    """Torch's current GPU, or the CPU where there is none."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def gpu(index: int | None = None) -> Gpu | None:
    """The GPU, None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(index)
    return Gpu(torch.cuda.get_device_name(index), f"SM{major}{minor}", int(torch.cuda.mem_get_info(index)[0]))
