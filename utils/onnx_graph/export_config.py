"""How a network becomes a file: its size, its dynamic axes, how it is typed and in which operator set."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Literal

from utils.core.errors import InputError
from utils.core.files import wanted_typing
from utils.core.input_spec import FLOATS, InputSpec
from utils.core.tasks import DETECT, IMAGES, SEGMENT

OPSETS = range(13, 21)  # quantization per output channel came with 13; torch's exporter ends at 20
Typing = Literal["auto", "weak", "strong"]
TYPINGS: dict[Typing, range] = {  # the operator sets that each may have
    "weak": range(13, 18),  # FP32: TensorRT 8.6 to 10.11 choose the types; 8.6 reads no newer operators
    "strong": range(19, 21),  # FP16 and FP32 as written: TensorRT 10.12 and later; FP16 scales came with 19
}
INPUT, OUTPUT = IMAGES, DETECT.prediction
PROTOTYPES = SEGMENT.prototypes
Dynamic = Literal["none", "batch", "all"]
AXES: dict[Dynamic, dict[str, dict[int, str]]] = {
    "none": {},
    "batch": {INPUT: {0: "batch"}, OUTPUT: {0: "batch"}, PROTOTYPES: {0: "batch"}},
    "all": {
        INPUT: {0: "batch", 2: "height", 3: "width"},
        OUTPUT: {0: "batch", 2: "anchors"},
        PROTOTYPES: {0: "batch", 2: "mask_height", 3: "mask_width"},
    },
}


@dataclass(frozen=True)
class ExportConfig:
    """How a network becomes a file.

    Attributes:
        imgsz: height and width of the input, pixels.
        batch_size: images a batch; with a dynamic batch only the one that is traced.
        dynamic: dynamic axes: none, the batch, or batch, height and width.
        simplify: run onnxslim.
        typing: 'weak': FP32, TensorRT chooses; 'strong': the float part in FP16 up to DFL, inputs and
            outputs FP32; 'auto': what the opset says, else what `resolved` finds.
        opset: version of the ONNX operators; None: the last that suits a weakly typed file, the first that suits a
            strongly typed quantized one.
        inplace: upstream's switch of the same name on the head.
        int8_weights: store quantized weights as INT8, see `passes/store_int8_weights.py`.
        for_int8_kernels: give a quantized network the layers that INT8 kernels are fastest with, with the same results:
            see `passes/__init__.py`.
        input: the form in which the file takes images.
    """

    imgsz: tuple[int, int] = (640, 640)
    batch_size: int = 1
    dynamic: Dynamic = "none"
    simplify: bool = False
    typing: Typing = "weak"
    opset: int | None = None
    inplace: bool = False
    int8_weights: bool = False
    for_int8_kernels: bool = True
    input: InputSpec = FLOATS

    def __post_init__(self) -> None:
        if self.opset is not None and self.opset not in OPSETS:
            raise InputError(
                f"--opset {self.opset} is outside {OPSETS[0]} to {OPSETS[-1]}; 17 suits TensorRT 8.6 and later"
            )

    @property
    def half(self) -> bool:
        """Whether the float part is FP16."""
        return self.typing == "strong"

    def resolved(self, quantized: bool) -> ExportConfig:
        """Settle typing and opset for a network.

        'auto' is 'strong' for a quantized network, unless the TensorRT that is installed, or the opset, needs 'weak';
        for a float one it is 'weak', which is FP32.

        Raises:
            InputError: the typing does not go with the opset.
        """
        typing: Typing = self.typing
        if typing == "auto" and self.opset is not None:
            typing = "strong" if quantized and self.opset in TYPINGS["strong"] else "weak"
        elif typing == "auto":
            typing = default_typing() if quantized else "weak"
        suits = TYPINGS[typing] if quantized else OPSETS
        opset = self.opset if self.opset is not None else (suits[0] if typing == "strong" and quantized else 17)
        if opset not in suits:
            why = "FP16 scales came with 19" if typing == "strong" else "TensorRT 8.6 reads nothing newer"
            raise InputError(f"--typing {typing} takes --opset {suits[0]} to {suits[-1]}, not {opset}: {why}")
        return replace(self, typing=typing, opset=opset)


def default_typing() -> Typing:
    """How the TensorRT on this machine wants a quantized network: 'strong' without one, and from 10.12 on."""
    for name in ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu11"):
        with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
            return wanted_typing(metadata.version(name))
    return "strong"
