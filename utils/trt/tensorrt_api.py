"""The only importer of TensorRT: 8.6, 10, 11 as `tensorrt`, TensorRT-RTX, and TensorRT's lean runtime.

Differences between versions are properties of the module (`Api.weakly_typed`, `Api.ahead_of_time`, ...), so that no
other code compares version numbers.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.core.device import select_device
from utils.core.errors import DependencyError, InputError
from utils.core.typing_policy import Typing, wanted_typing

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

RTX = ("tensorrt_rtx", "tensorrt_rtx_bindings")
MODULES = ("tensorrt", *RTX, "tensorrt_lean", "tensorrt_lean_bindings")
# TensorRT's name of a data type → torch's; inputs and outputs of our files have no other
TORCH_TYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}


# Fields of BuildConfig that change which kernels an engine has, and where it runs: properties of IBuilderConfig and
# flags of the builder. A version may lack them.
SETTINGS = {
    "optimization_level": "builder_optimization_level",
    "max_aux_streams": "max_aux_streams",
    "hardware_compatible": "hardware_compatibility_level",
}
FLAGS = {
    # without the lean runtime inside, which would be code that a plan brings along
    "version_compatible": ("VERSION_COMPATIBLE", "EXCLUDE_LEAN_RUNTIME"),
    "strip_weights": ("STRIP_PLAN", "REFIT_IDENTICAL"),
}
BUILDER_OPTIONS = (*SETTINGS, *FLAGS)
# Words that are values of these → a property's enum, and its member
MEMBERS = {
    "same-cc": ("HardwareCompatibilityLevel", "SAME_COMPUTE_CAPABILITY"),
    "ampere+": ("HardwareCompatibilityLevel", "AMPERE_PLUS"),
}


@dataclass(frozen=True)
class Api:
    """A TensorRT module and its capabilities."""

    module: Any

    @property
    def version(self) -> str:
        """The module's version, such as '8.6.0'; without the number of the build, as trtexec prints it."""
        return ".".join(self.module.__version__.split(".")[:3])

    @property
    def name(self) -> str:
        """Name and version, such as 'TensorRT 8.6.0', 'TensorRT-RTX 1.7.1' or 'TensorRT's lean runtime 10.16.1'."""
        if self.is_rtx:
            return f"TensorRT-RTX {self.version}"
        if self.builds:
            return f"TensorRT {self.version}"
        return f"TensorRT's lean runtime {self.version}"

    @property
    def builds(self) -> bool:
        """Return whether it builds engines; the lean runtime only runs those that were built version compatible."""
        return hasattr(self.module, "Builder")

    @property
    def is_rtx(self) -> bool:
        """Return whether it is TensorRT-RTX."""
        return "rtx" in self.module.__name__

    @property
    def typing(self) -> Typing:
        """Typing with which files for it are exported, 'weak' or 'strong'; it may read both."""
        if not self.weakly_typed:
            return "strong"
        return wanted_typing(self.version)

    @cached_property
    def weakly_typed(self) -> bool:
        """Return whether builder flags choose the precision (until TensorRT 10.x); else the ONNX file alone does."""
        return hasattr(self.module.BuilderFlag, "FP16")

    @cached_property
    def strongly_typed(self) -> bool:
        """Return whether a network can be built in the types that the ONNX file has (from TensorRT 9)."""
        return not self.weakly_typed or hasattr(self.module.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")

    @property
    def can_stop_builds(self) -> bool:
        """Return whether a build that has begun can be stopped (from TensorRT 10)."""
        return hasattr(self.module, "IProgressMonitor")

    @cached_property
    def ahead_of_time(self) -> tuple[str, ...]:
        """Architectures that engines can be built for without such a GPU, such as 'SM89'; TensorRT-RTX only."""
        capability = getattr(self.module, "ComputeCapability", None)
        if capability is None or not hasattr(self.module.IBuilderConfig, "set_compute_capability"):
            return ()
        return tuple(name for name in dir(capability) if re.fullmatch(r"SM\d+", name))

    def lacks(self, name: str, value: Any) -> str:
        """The missing part of a builder option with this value, such as 'BuilderFlag.STRIP_PLAN'; '' if it has all."""
        needed = [("BuilderFlag", flag) for flag in FLAGS.get(name, ())]
        if name in SETTINGS:
            needed.append(("IBuilderConfig", SETTINGS[name]))
        if value in MEMBERS:
            needed.append(MEMBERS[value])
        for class_name, member in needed:
            if not hasattr(getattr(self.module, class_name, None), member):
                return f"{class_name}.{member}"
        return ""

    def set_option(self, setup: Any, name: str, value: Any) -> None:
        """Set a builder option in an IBuilderConfig."""
        for flag in FLAGS.get(name, ()):
            setup.set_flag(getattr(self.module.BuilderFlag, flag))
        if name not in SETTINGS:
            return
        if value in MEMBERS:
            class_name, member = MEMBERS[value]
            value = getattr(getattr(self.module, class_name), member)
        setattr(setup, SETTINGS[name], value)

    def register_plugins(self, log: Any) -> None:
        """Make TensorRT's plugins known, before a file or an engine that uses them is read; `InputError` if none."""
        register = getattr(self.module, "init_libnvinfer_plugins", None)  # RTX has it, and no plugin behind it
        if self.is_rtx or register is None or not register(log, ""):
            way = "without NMS" if self.is_rtx else "with --nms onnx, or without NMS"  # RTX reads no NonMaxSuppression
            raise InputError(f"{self.name} has no plugins here; export {way}")

    def log(self) -> Any:
        """The logger for TensorRT's objects, without earlier messages; see `_log`."""
        log = _log(self.module)
        log.messages.clear()
        return log


@cache
def _log(module: Any) -> Any:
    """TensorRT's logger: it keeps the first one that a process gives it for all its objects."""

    class Log(module.ILogger):
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.messages: list[tuple[str, str]] = []  # severity and text

        def log(self, severity: Any, message: str) -> None:
            name = severity.name.removeprefix("INTERNAL_")
            if name in ("VERBOSE", "INFO") and not logger.isEnabledFor(logging.DEBUG):
                return  # there are several for each kernel that is measured
            entry = (name, readable(message))
            # errors are raised by whoever notices the failure
            is_new_warning = name == "WARNING" and entry not in self.messages
            level = logging.WARNING if is_new_warning else logging.DEBUG
            logger.log(level, "TensorRT: %s", entry[1])
            if name in ("ERROR", "WARNING"):
                self.messages.append(entry)

        def said(self, severity: str) -> tuple[str, ...]:
            """The messages of a severity, 'ERROR' or 'WARNING', once each."""
            return tuple(dict.fromkeys(text for kind, text in self.messages if kind == severity))

        def reason(self, default: str) -> str:
            """The reason why something failed: the last error."""
            return (default, *self.said("ERROR"))[-1]

    return Log()


def readable(message: str) -> str:
    """A message without source file, function and error code in front, on one line."""
    place = r"\S+\.(?:cpp|h|cu|inl):\d+: |\d+: |\[[^\]]*\.(?:cpp|h|cu)::[^\]]*\] |Error Code \d+: "
    return re.sub(f"^(?:{place})+", "", " ".join(message.split()))


def installed_module(names: Sequence[str] | None = None) -> str | None:
    """Name of the first TensorRT module, or of these, that is installed; nothing is imported."""
    return next((name for name in names or MODULES if importlib.util.find_spec(name) is not None), None)


def load_tensorrt(name: str | None = None) -> Api:
    """Import TensorRT, or the module of that name; `DependencyError` if it is not installed or does not load."""
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


class Gpu(NamedTuple):
    """The GPU that torch sees: its name, such as 'NVIDIA H200', 'SM90', and free bytes of memory."""

    name: str
    architecture: str
    free: int


def use_device(text: str, *, for_engines: bool = True) -> torch.device:
    """The device that `--device` names; a GPU becomes the one that TensorRT builds and runs on.

    `InputError` if it does not exist, or is the CPU beside a GPU where it is to run engines.
    """
    import torch

    device = select_device(text)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif for_engines and torch.cuda.is_available():
        raise InputError(f"--device {text}: engines are built and run on a GPU; leave it out, or give the GPU's number")
    return device


def gpu(index: int | None = None) -> Gpu | None:
    """The GPU, None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(index)
    return Gpu(torch.cuda.get_device_name(index), f"SM{major}{minor}", int(torch.cuda.mem_get_info(index)[0]))
