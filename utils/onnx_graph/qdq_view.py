"""Questions about a Q/DQ graph: the quantizer of each tensor, the part in float, and the call behind each quantizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from utils.onnx_graph.view import DEQUANTIZE, QUANTIZE, GraphView, attribute, by_value, module_path, pure

WEIGHTED = {"Conv": 0, "ConvTranspose": 1}  # operator → axis of the output channels in its weight
POOLS = ("AveragePool", "GlobalAveragePool")
MOVING = frozenset({"Concat", "Flatten", "MaxPool", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})
ACTIVATIONS = frozenset(
    {"Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu", "Sigmoid", "Tanh"}
)
CURVES = ACTIVATIONS | {"Erf", "Softplus"}  # one of them at least is in any activation
FLOAT_MODULES = "float_modules"  # in a file's metadata: JSON list of the paths of all convolutions that stay in float
PIECES = CURVES | {"Add", "Div", "Mul"}  # what activations consist of that have no operator of their own in an opset

INT8_VECTOR = 32  # channels that an INT8 kernel reads at once


class QdqGraph(GraphView):
    """A graph and the questions that rules ask about it. Tensor arguments are names.

    Args:
        floats: paths of the convolutions that the recipe leaves in float.
        typing: weak | strong, as the exporter wrote it into the file; '': a file of others.
        target: 'openvino' or 'openvino-avx2'; '': TensorRT.
    """

    def __init__(
        self, model: ModelProto, floats: frozenset[str] = frozenset(), typing: str = "", target: str = ""
    ) -> None:
        super().__init__(model)
        self.model = model
        self.floats = floats
        self.typing = typing
        self.target = target

    def is_of_bytes(self, tensor: str) -> bool:
        """Whether a tensor is images as bytes, cast to floats but not divided by 255."""
        node = self.producer(tensor)
        while node is not None and node.op_type in ("Cast", "Transpose"):
            tensor = node.input[0]
            node = self.producer(tensor)
        for value in self.model.graph.input:
            if value.name == tensor:
                return bool(value.type.tensor_type.elem_type == TensorProto.UINT8)
        return False

    @cached_property
    def activations(self) -> list[NodeProto]:
        """QuantizeLinear nodes of tensors that are computed (not weights)."""
        return [node for node in self.of_type(QUANTIZE) if not self.is_constant(node.input[0])]

    def dequantizer(self, tensor: str) -> NodeProto | None:
        """The DequantizeLinear that writes a tensor, None if something else does.

        In a file for OpenVINO operators that only move values may stand between, see `drop_repeated_quantizers`.
        """
        node = self.producer(tensor)
        if node is None or node.op_type == DEQUANTIZE:
            return node
        return self.common_dequantizer(node) if self.target else None

    def common_dequantizer(self, node: NodeProto) -> NodeProto | None:
        """The DequantizeLinear before a node that only moves values; None if its inputs have several grids, or none."""
        if not self.is_moving(node):
            return None
        common = None
        for name in self.operands(node):
            producer = self.producer(name)
            if producer is not None and producer.op_type != DEQUANTIZE:
                producer = self.common_dequantizer(producer)
            if producer is None:
                return None
            if common is not None and self.quantizer_parameters(producer) != self.quantizer_parameters(common):
                return None
            common = producer
        return common

    def zero_point(self, node: NodeProto) -> np.ndarray | None:
        """The zero point of a quantizer, None if the file holds none (ONNX then takes UINT8 0) or computes it."""
        return self.array(node.input[2]) if len(node.input) > 2 else None

    def quantizers(self, tensor: str) -> list[NodeProto]:
        """The QuantizeLinear nodes that read a tensor."""
        return [node for node in self.consumers(tensor) if node.op_type == QUANTIZE]

    def operands(self, node: NodeProto) -> list[str]:
        """The tensors that a node computes with, without constants and shape arguments."""
        names = node.input if node.op_type in ("Concat", "Add") else node.input[:1]
        return [name for name in names if name and not self.is_constant(name)]

    def is_moving(self, node: NodeProto) -> bool:
        """Whether a node only moves values: its result has the scale of its input."""
        if node.op_type == "Resize":
            return bool(attribute(node, "mode", b"nearest") == b"nearest")
        return node.op_type in MOVING

    @cached_property
    def _origins(self) -> dict[str, str]:
        """Results inside and behind activations → the tensor whose value alone decides them, place by place.

        SiLU, Mish, GELU and Hardswish are several operators in some opsets: x · sigmoid(x), x · tanh(softplus(x)),
        x · (1 + erf(x / c)) · 0.5, x · hardsigmoid(x). Each reads x, constants, or what was made of these.
        """
        origins: dict[str, str] = {}
        curved = set()
        for node in self.nodes:
            computed = [name for name in node.input if name and not self.is_constant(name)]
            sources = {origins.get(name, name) for name in computed}
            if node.op_type not in PIECES or len(sources) != 1:
                continue
            if len(computed) > 1 and node.op_type != "Mul":
                continue
            source = sources.pop()
            origins[node.output[0]] = source
            if node.op_type in CURVES:
                curved.add(source)
        return {name: source for name, source in origins.items() if source in curved}

    def is_activation(self, node: NodeProto) -> bool:
        """Whether a node is an activation, or a part of one."""
        return node.output[0] in self._origins

    def before_activation(self, tensor: str) -> str:
        """The tensor that an activation was applied to; the same tensor when none was."""
        return self._origins.get(tensor, tensor)

    def after_activation(self, tensor: str) -> str:
        """The result of the activation that alone reads a tensor; the same tensor where another node reads it.

        A Sigmoid by itself makes scores, and is none.
        """
        inside = {name for name, origin in self._origins.items() if origin == tensor}
        ends = []
        for name in (tensor, *inside):
            is_read_outside = any(node.output[0] not in inside for node in self.consumers(name))
            if name in self.outputs or is_read_outside:
                ends.append(name)
        is_score = all(node.op_type == "Sigmoid" for node in self.consumers(tensor))
        return tensor if is_score or len(ends) != 1 else ends[0]

    def weight_name(self, node: NodeProto) -> str:
        """The initializer that holds a convolution's weight, behind its quantizer."""
        name = str(node.input[1])
        producer = self.producer(name)
        while producer is not None and producer.op_type in (QUANTIZE, DEQUANTIZE):
            name = str(producer.input[0])
            producer = self.producer(name)
        return name

    def path(self, node: NodeProto) -> str:
        """Path of the torch module that a node belongs to: from its weight's name, else from its scope."""
        if node.op_type in WEIGHTED:
            weight = self.weight_name(node)
            if weight.endswith((".weight", ".weight_quantized")):
                return weight.rpartition(".")[0]
        return module_path(node.name)

    def weight_quantizers(self, node: NodeProto) -> tuple[NodeProto | None, NodeProto | None]:
        """QuantizeLinear and DequantizeLinear in front of a convolution's weights; None for a missing one."""
        dequantizer = self.producer(node.input[1])
        if dequantizer is None:
            return None, None
        return self.producer(dequantizer.input[0]), dequantizer

    def own_quantizers(self, node: NodeProto) -> tuple[NodeProto, NodeProto] | None:
        """QuantizeLinear and DequantizeLinear of a convolution's weights, if they are its own and known."""
        quantizer, dequantizer = self.weight_quantizers(node)
        if dequantizer is None or quantizer is None or quantizer.op_type != QUANTIZE:
            return None
        tensors = (node.input[1], dequantizer.input[0], quantizer.input[0])
        constants = (*quantizer.input, *dequantizer.input[1:])
        if not all(self.is_constant(name) for name in constants):
            return None
        if any(len(self.consumers(name)) != 1 for name in tensors):
            return None
        return (quantizer, dequantizer)

    def quantizer_parameters(self, node: NodeProto, factor: int = 1) -> tuple[object, ...]:
        """Scale (so many times), zero point and axis, comparable: by value where they are constant, else by name."""
        scale = self.array(node.input[1])
        parameters = [self.comparable(name) for name in node.input[1:]]
        if scale is not None and factor != 1:
            parameters[0] = by_value(scale * scale.dtype.type(factor))
        axis = attribute(node, "axis", 1)
        if scale is not None and scale.ndim == 0:
            axis = None
        return (*parameters, axis)

    @cached_property
    def decoders(self) -> frozenset[str]:
        """Names of the convolutions of DFL: they read a Softmax, through operators that only move values."""
        names = set()
        for node in self.of_type("Softmax"):
            for consumer in self.consumers_through(node.output[0], MOVING | {QUANTIZE, DEQUANTIZE}):
                if consumer.op_type in WEIGHTED:
                    names.add(consumer.output[0])
        return frozenset(names)

    @cached_property
    def convolutions(self) -> list[NodeProto]:
        """Every convolution but DFL's."""
        return [node for node in self.of_type(*WEIGHTED) if node.output[0] not in self.decoders]

    @cached_property
    def last_convolutions(self) -> list[NodeProto]:
        """Convolutions whose results no further convolution reads: the ends of the head."""
        inner = self.upstream([node.input[0] for node in self.convolutions])
        return [node for node in self.convolutions if node.output[0] not in inner]

    @cached_property
    def decoding(self) -> set[str]:
        """The tensors from the results of the last convolutions on."""
        return self.downstream([node.output[0] for node in self.last_convolutions])

    def is_float(self, node: NodeProto) -> bool:
        """Whether the recipe leaves a node in float.

        It does so with a convolution that it names, and with another operator if all convolutions of the nearest
        module that has convolutions are in float.
        """
        path = self.path(node)
        if node.op_type in WEIGHTED:
            return path in self.floats
        for module in reversed(_modules_around(path)):
            if module in self._float_modules:
                return self._float_modules[module]
        return False

    @cached_property
    def _float_modules(self) -> dict[str, bool]:
        """Each module with convolutions → whether all of them stay in float."""
        are_float: dict[str, bool] = {}
        for node in self.convolutions:
            for module in _modules_around(self.path(node)):
                are_float[module] = are_float.get(module, True) and self.is_float(node)
        return are_float

    def reads_float(self, tensor: str) -> bool:
        """Whether all readers of a tensor, through operators that move or add values, are float by recipe or decoding.

        This holds for a tensor without readers, too.
        """
        for node in self.consumers_through(tensor, MOVING | {"Resize", "Add"}):
            if not self.is_float(node) and self.decoding.isdisjoint(node.output):
                return False
        return True


def _modules_around(path: str) -> list[str]:
    """Paths of the modules around a module and its own, the outermost first.

    >>> _modules_around("model.4.cv1")
    ['model', 'model.4', 'model.4.cv1']
    """
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def along_axis(node: NodeProto, weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """A quantizer's scale in a shape that broadcasts over its weight."""
    if scale.ndim == 0:
        return scale
    shape = [1] * weight.ndim
    shape[attribute(node, "axis", 1) % weight.ndim] = -1
    reshaped: np.ndarray = scale.reshape(shape)
    return reshaped


# --- where quantizers come from ---------------------------------------------------------------------------------------
# Passes drop, rename, cut and widen them. `number_quantizers` writes into each QuantizeLinear which of torch's calls it
# is, as its doc_string; passes that cut or widen tensors add what they did. `provenance_of` reads all of it.


@dataclass(frozen=True)
class ChannelLayout:
    """Places of the channels of a tensor after widening."""

    places: np.ndarray  # int64 [C], of the channels that were there before
    count: int  # of channels now
    cuts: Mapping[int, int]  # channel at which a part begins (and C, the end) → where that is now

    def spread(self, array: np.ndarray, axis: int, filling: float = 0) -> np.ndarray:
        """An array with its entries along an axis at their new places, and `filling` between them."""
        shape = list(array.shape)
        shape[axis] = self.count
        result: np.ndarray = np.full(shape, filling, array.dtype)
        index: list[slice | np.ndarray] = [slice(None) for _ in range(array.ndim)]
        index[axis] = self.places
        result[tuple(index)] = array
        return result


@dataclass(frozen=True)
class Provenance:
    """Origin of a graph's activation quantizer."""

    call: int  # which of torch's calls of activation quantizers it is, from 0
    channels: slice | None = None  # which of torch's channels the graph's tensor holds; None: all
    layout: ChannelLayout | None = None  # where these lie if the graph's tensor is wider


def annotate(quantizer: NodeProto, **entries: object) -> None:
    """Add entries to the doc_string of a QuantizeLinear: `call`, `channels` (bounds), `places` and `count`."""
    notes = json.loads(quantizer.doc_string) if quantizer.doc_string else {}
    quantizer.doc_string = json.dumps({**notes, **entries}, default=int)


@pure
def number_quantizers(model: ModelProto) -> None:
    """Write into each activation quantizer which one it is: torch calls them in this order, and passes drop some."""
    for node in model.graph.node:
        node.ClearField("doc_string")  # torch's
    for number, node in enumerate(QdqGraph(model).activations):
        annotate(node, call=number)


def provenance_of(model: ModelProto) -> dict[str, Provenance]:
    """The activation quantizers by name, and what passes wrote into them; empty for an FP32 network."""
    result = {}
    for node in QdqGraph(model).activations:
        entries = json.loads(node.doc_string)
        channels = slice(*entries["channels"]) if "channels" in entries else None
        layout = None
        if "places" in entries:
            layout = ChannelLayout(np.array(entries["places"]), entries["count"], {})
        result[node.name] = Provenance(entries["call"], channels, layout)
    return result


@pure
def without_provenance(model: ModelProto) -> None:
    """A graph whose nodes have no doc_strings."""
    for node in model.graph.node:
        node.ClearField("doc_string")
