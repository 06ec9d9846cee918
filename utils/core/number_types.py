"""The numbers that quantizers round to, as one value that is passed down: another type is a value, not a search."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IntegerType:
    """A symmetric integer type: zero point 0, scale = amax / `quant_max`.

    Attributes:
        name: as `onnx.TensorProto` spells it.
        bits: width.
        quant_min, quant_max: smallest and largest quantized value.
        dtype: as NumPy and torch spell it.
    """

    name: str
    bits: int
    quant_min: int
    quant_max: int
    dtype: str


INT8 = IntegerType("INT8", 8, -128, 127, "int8")
