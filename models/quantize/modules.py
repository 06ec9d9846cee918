"""Quantized stand-ins for upstream modules. Instances are replaced; upstream's classes are never changed.

A stand-in takes over the attributes of the module that it replaces (submodules, `i`, `f`, `type`, ...), so that names
in the state dict and upstream's own loop over layers stay as they are. With its quantizers off it computes what the
original computed, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from models.quantize.fake_quantize import TensorQuantizer
from models.quantize.flow import OPERATIONS, Step, exporting, parse
from models.quantize.rules import Flow

StandIn = TypeVar("StandIn", bound=nn.Module)


class QuantPoint:
    """Point where a tensor is quantized: right after it is computed, once, for all its consumers.

    The quantizer belongs to the network (several points share one); a point only refers to it.

    Args:
        quantizer: shared by all tensors of one scale.
        redundant: the tensor is a rearrangement of tensors already rounded with this scale. Rounding again changes
            nothing, so it is left out, except in an exported graph, where TensorRT wants to see Q/DQ on both sides.
    """

    def __init__(self, quantizer: TensorQuantizer, redundant: bool = False) -> None:
        self.quantizer = quantizer
        self.redundant = redundant
        self.on = True

    def __call__(self, x: Tensor) -> Tensor:
        """Round a tensor of any shape to quantized values and back; switched off it comes back as it is."""
        if self.on and (exporting() or not self.redundant):
            return self.quantizer(x)
        return x


class QuantConv2d(nn.Conv2d):
    """A convolution whose weight, and where asked its input and result, are quantized.

    `input_point` is set where the input has no quantized producer: the image, or a module that no rule describes.
    """

    weight_quantizer: TensorQuantizer | None
    input_point: QuantPoint | None
    output_point: QuantPoint | None

    @classmethod
    def from_float(cls, original: nn.Conv2d, weight_quantizer: TensorQuantizer | None) -> QuantConv2d:
        """A stand-in with the parameters of `original`; without a weight quantizer it stays a float convolution."""
        return _take_over(cls, original, input_point=None, output_point=None, weight_quantizer=weight_quantizer)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve `[B, C_in, H, W]`."""
        if self.input_point is not None:
            x = self.input_point(x)
        weight = self.weight
        if self.weight_quantizer is not None:
            weight = self.weight_quantizer(weight)
        x = self._conv_forward(x, weight, self.bias)
        if self.output_point is None:
            return x
        return self.output_point(x)


def quantized_weights(model: nn.Module) -> dict[str, tuple[QuantConv2d, TensorQuantizer]]:
    """Path of each convolution whose weight is quantized → the convolution and the quantizer of its weight."""
    quantized: dict[str, tuple[QuantConv2d, TensorQuantizer]] = {}
    for path, module in model.named_modules():
        if isinstance(module, QuantConv2d) and module.weight_quantizer is not None:
            quantized[path] = (module, module.weight_quantizer)
    return quantized


def limit_weights_to_7_bits(model: nn.Module) -> None:
    """Round weights to -64..64 in place of -127..127, with scales twice as large; in place, and once only."""
    for convolution, quantizer in quantized_weights(model).values():
        amax = quantizer.amax
        convolution.weight.data = convolution.weight.data.clamp(-amax, amax)  # as 8 bits clip them
        quantizer.set_amax(2 * amax)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a network's weights when it computes: one for each quantized value, four for each other."""
    quantized = {id(convolution.weight) for convolution, _ in quantized_weights(model).values()}
    total = 0
    for parameter in model.parameters():
        bytes_per_value = 1 if id(parameter) in quantized else 4
        total += parameter.numel() * bytes_per_value
    return total


@contextmanager
def rounded_weights(model: nn.Module) -> Iterator[None]:
    """Replace weights by their rounded values while the context is active, so that no forward rounds them again.

    For evaluation, on the device that the network is on: the results are the same to the last bit.
    """
    originals = []
    for module, quantizer in quantized_weights(model).values():
        originals.append((module, quantizer, module.weight.data))
    try:
        with torch.no_grad():
            for module, quantizer, weight in originals:
                module.weight.data = quantizer(weight)
                module.weight_quantizer = None
        yield
    finally:
        for module, quantizer, weight in originals:
            module.weight_quantizer = quantizer
            module.weight.data = weight


class ConvBlock(nn.Module):
    """Convolution and activation (upstream's Conv, DWConv or RepConvN after fusing), then the point of its result."""

    conv: nn.Module
    act: nn.Module
    output_point: QuantPoint | None

    @classmethod
    def from_float(cls, original: nn.Module) -> ConvBlock:
        """A stand-in with the submodules of `original`."""
        return _take_over(cls, original, output_point=None)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, C_in, H, W]` → `[B, C_out, H', W']`."""
        x = self.conv(x)
        point = self.output_point
        if point is None:
            return self.act(x)
        is_rounded = point.on and not point.redundant
        if is_rounded and type(self.act) is nn.SiLU and point.quantizer.can_fuse_silu(x):  # in training on a GPU
            return point.quantizer.after_silu(x)
        return point(self.act(x))


class PassThrough(nn.Module):
    """A leaf without weights (MaxPool2d, Upsample, an average pool), and the point of its result.

    `input_point` is set where it reads the image.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.input_point: QuantPoint | None = None
        self.output_point: QuantPoint | None = None
        for name in ("i", "f", "type", "np"):  # what upstream's loop over layers reads
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the module between its points."""
        if self.input_point is not None:
            x = self.input_point(x)
        x = self.inner(x)
        if self.output_point is None:
            return x
        return self.output_point(x)


class FlowModule(nn.Module):
    """Runs a rule's statements on tensors; `input_point` is set if an operation of its own reads the image."""

    steps: tuple[Step, ...]
    points: dict[str, QuantPoint]
    input_point: QuantPoint | None

    @classmethod
    def from_float(cls, original: nn.Module, flow: Flow) -> FlowModule:
        """A stand-in with the submodules and attributes of `original`."""
        return _take_over(cls, original, steps=parse(flow), points={}, input_point=None)

    def forward(self, x: Any) -> Any:
        """Run the statements; `x` is a tensor, or a list of them where the layer reads several."""
        if self.input_point is not None:
            if isinstance(x, list):
                x = [self.input_point(tensor) for tensor in x]
            else:
                x = self.input_point(x)
        values: dict[str, Any] = {"x": x}
        for step in self.steps:
            if step.is_operation:
                function = OPERATIONS[step.call]
            else:
                function = self.get_submodule(step.call)
            result = function(*step.arguments(values, self), **step.options(self))
            if len(step.targets) == 1:
                result = (result,)
            for name, value in zip(step.targets, result, strict=True):
                values[name] = self._at_site(name, value)
        return values["out"]

    def _at_site(self, name: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [self._at_site(f"{name}[{index}]", item) for index, item in enumerate(value)]
        point = self.points.get(name)
        return value if point is None else point(value)


def _take_over(cls: type[StandIn], original: nn.Module, **attributes: Any) -> StandIn:
    """A module of class `cls` with the state of `original` and these attributes."""
    stand_in = object.__new__(cls)
    stand_in.__dict__.update(original.__dict__)
    stand_in.__dict__.pop("forward", None)  # upstream's fuse() leaves a bound method, which would hide the class's
    stand_in._modules = dict(original._modules)
    for name, value in attributes.items():
        setattr(stand_in, name, value)
    return stand_in
