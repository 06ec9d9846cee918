"""Settings of an export, below the exporter and the passes that read them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Literal

from utils.core.errors import InputError
from utils.core.input_spec import FLOATS, InputSpec
from utils.core.typing_policy import TYPINGS, FloatType, Typing, wanted_typing

OPSETS = range(13, 21)  # quantization per output channel came with 13; torch's exporter ends at 20
Dynamic = Literal["none", "batch", "all"]
Target = Literal["tensorrt", "openvino", "openvino-avx2"]


@dataclass(frozen=True)
class ExportConfig:
    """Settings of an export.

    The typing is 'weak' (FP32, TensorRT chooses), 'strong' (the float part in FP16 up to DFL, inputs and outputs FP32)
    or 'auto', which `resolved` settles by the opset or else by the installed TensorRT.
    """

    imgsz: tuple[int, int] = (640, 640)  # height and width of the input, pixels
    batch_size: int = 1  # with a dynamic batch only the one that is traced
    dynamic: Dynamic = "none"  # axes: none, the batch, or batch, height and width
    simplify: bool = False  # run onnxslim
    typing: Typing | Literal["auto"] = "weak"
    opset: int | None = None  # None: 17, or for a strongly typed quantized file the first that it may have
    inplace: bool = False  # upstream's switch of the same name on the head
    int8_weights: bool = False  # store quantized weights as INT8, see `passes/quantizers.py`
    for_int8_kernels: bool = True  # put layers into the form with the fastest INT8 kernels, see `passes/__init__.py`
    input: InputSpec = FLOATS  # the form in which the file takes images
    target: Target = "tensorrt"  # what runs a quantized network: others take weakly typed files

    @property
    def floats(self) -> FloatType:
        """Type of the values that are not quantized; inputs and outputs are FP32."""
        return "FP32" if self.typing == "auto" else TYPINGS[self.typing].floats

    @property
    def for_openvino(self) -> bool:
        """True if OpenVINO runs the file, and not TensorRT."""
        return self.target != "tensorrt"

    def resolved(self, quantized: bool) -> ExportConfig:
        """Settle typing and opset for a network.

        'auto' is 'strong' for a quantized network, unless the TensorRT that is installed, or the opset, needs 'weak';
        for a float one it is 'weak', which is FP32.

        Raises:
            InputError: the opset does not suit the typing, or the typing does not suit the target.
        """
        typing = self._resolved_typing(quantized)
        opsets = TYPINGS[typing].opsets if quantized else OPSETS
        if self.opset is not None:
            opset = self.opset
        elif typing == "strong" and quantized:
            opset = opsets[0]
        else:
            opset = 17
        if opset not in opsets:
            raise InputError(
                f"a {typing}ly typed file needs --opset {opsets[0]} to {opsets[-1]}, not {opset}; TensorRT 8.6 and "
                "later read opset 17, and FP16 scales need opset 19"
            )
        return replace(self, typing=typing, opset=opset)

    def _resolved_typing(self, quantized: bool) -> Typing:
        """'weak' or 'strong', see `resolved`."""
        if self.for_openvino:
            if self.typing == "strong":
                raise InputError(
                    f"--target {self.target} writes weakly typed files; leave --typing strong and --half out"
                )
            return "weak"
        if self.typing != "auto":
            return self.typing
        if not quantized:
            return "weak"
        if self.opset is None:
            return default_typing()
        return "strong" if self.opset in TYPINGS["strong"].opsets else "weak"


def default_typing() -> Typing:
    """Typing of a quantized file for the TensorRT on this machine: 'strong' without one, and from 10.12 on."""
    for name in ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu11"):
        with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
            return wanted_typing(metadata.version(name))
    return "strong"
