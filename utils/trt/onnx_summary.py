"""What a builder has to know about an ONNX file before the long build: inputs, opset, typing, metadata."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.core.errors import InputError
from utils.core.files import read_onnx
from utils.core.input_spec import FLOATS, InputSpec

# TensorProto's number of a type → torch's name
TYPES = {
    1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64",
    16: "bfloat16",
}  # fmt: skip
DATA_DEPENDENT = ("NonMaxSuppression", "NonZero")
# Results that are no floats, by their index; of operators that are not here all are floats.
NOT_FLOAT = {
    "TopK": {1}, "EfficientNMS_TRT": {0, 3}, "NonMaxSuppression": {0}, "ArgMax": {0}, "Shape": {0},
    "Less": {0}, "LessOrEqual": {0}, "Greater": {0}, "GreaterOrEqual": {0}, "Equal": {0},
}  # fmt: skip
# Behind these stand masks and scores: products with prototypes, which are large and need no such precision.
BEYOND = frozenset({"MatMul"})
SIDES = 4  # of a box: DFL's convolution gives one or four numbers an anchor, those of a network many more


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX file in words.

    Attributes:
        inputs, outputs: name → shape; None where the size is dynamic.
        opset: version of the operators.
        quantized: whether there are QuantizeLinear or DequantizeLinear nodes.
        half: whether weights or scales are FP16: the types of a strongly typed network are in the file.
        half_scales: whether quantizers have FP16 scales (opset 19), which weakly typed TensorRT does not read.
        plugins: whether there are nodes of TensorRT's own, such as EfficientNMS_TRT.
        data_dependent: whether the size of a result is only known once it is computed, as NonMaxSuppression's.
        metadata: its properties.
        input_spec: the form in which it takes images.
        types: of inputs and outputs, torch's names for them.
        fp32_box_layers: names of the nodes that compute boxes.
        scaled_bytes: whether it takes bytes, and a QuantizeLinear reads a product of them, as files of 1.0.0 have it.
    """

    path: Path
    inputs: dict[str, tuple[int | None, ...]]
    outputs: dict[str, tuple[int | None, ...]]
    opset: int
    quantized: bool
    half: bool
    half_scales: bool
    plugins: bool
    data_dependent: bool
    metadata: Mapping[str, str]
    input_spec: InputSpec = FLOATS
    types: Mapping[str, str] = field(default_factory=dict)
    fp32_box_layers: frozenset[str] = frozenset()
    scaled_bytes: bool = False

    @property
    def tensors(self) -> dict[str, tuple[int | None, ...]]:
        """Shapes of inputs and outputs by name."""
        return {**self.inputs, **self.outputs}

    @property
    def image(self) -> tuple[str, tuple[int | None, ...]]:
        """Name of the input that takes images, and its shape as batch, channels, height and width.

        Raises:
            InputError: there is not exactly one such input.
        """
        found = [(name, shape) for name, shape in self.inputs.items() if len(shape) == 4]
        if len(found) != 1 or len(self.inputs) != 1:
            raise InputError(f"{self.path} takes {dict(self.inputs)}; expected one input [batch, 3, height, width]")
        name, shape = found[0]
        return name, self.input_spec.nchw(shape)


def read(path: str | Path) -> OnnxFile:
    """Read a file's description.

    Raises:
        InputError: the file is missing, is no ONNX, or is truncated.
        DependencyError: onnx is not installed.
    """
    path = Path(path)
    return describe(read_onnx(path), path)


def describe(model: Any, path: Path) -> OnnxFile:
    """The same for a loaded ModelProto."""
    graph = model.graph
    stored = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        for item in node.attribute if node.op_type == "Constant" else ():
            if item.name == "value":
                stored[node.output[0]] = item.t.data_type
    half_type = 10  # TensorProto.FLOAT16
    quantizers = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    scales = {stored.get(node.input[1]) for node in quantizers}
    weights = {stored.get(node.input[1]) for node in graph.node if node.op_type == "Conv" and len(node.input) > 1}
    inputs = [value for value in graph.input if value.name not in stored]
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    form = _form(inputs, metadata)
    return OnnxFile(
        path=path,
        inputs={value.name: _shape(value) for value in inputs},
        outputs={value.name: _shape(value) for value in graph.output},
        opset=max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0),
        quantized=bool(quantizers),
        half=half_type in scales or half_type in weights,
        half_scales=half_type in scales,
        plugins=any(node.op_type.endswith("_TRT") for node in graph.node),
        data_dependent=any(node.op_type in DATA_DEPENDENT for node in graph.node),
        metadata=metadata,
        input_spec=form,
        types={value.name: _type(value) for value in (*inputs, *graph.output)},
        fp32_box_layers=fp32_box_layers(model),
        scaled_bytes=form.kind == "uint8" and _scaled_before_quantizer(graph, inputs[0].name),
    )


def fp32_box_layers(model: Any) -> frozenset[str]:
    """Names of a graph's nodes from DFL's softmax over distances on to the boxes that come out of the file.

    They stay in FP32 where TensorRT chooses precisions by itself. FP16 has steps of half a pixel from 512 pixels on,
    and of an eighth from 128 on. TensorRT 8.6.0 took it for boxes in front of its NMS plugin: mask AP of the demo's
    engine moved by 0.005, by how upstream crops masks to boxes.

    Args:
        model: an onnx.ModelProto whose boxes are decoded from distributions (DFL, Li et al., Generalized Focal Loss,
            2020). Any other softmax, such as one of attention, does not count: convolutions of features follow it.
    """
    consumers = defaultdict(list)
    for node in model.graph.node:
        for name in node.input:
            consumers[name].append(node)
    weights = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    found: set[str] = set()
    for node in model.graph.node:
        if node.op_type == "Softmax" and (names := _behind(node, consumers, weights)) is not None:
            found |= names
    return frozenset(found)


def _behind(softmax: Any, consumers: dict[str, list[Any]], weights: dict[str, list[int]]) -> set[str] | None:
    """The softmax and the nodes that compute with floats from it; None if features of a network come of it."""
    found, queue = {softmax.name}, deque([softmax])
    while queue:
        node = queue.popleft()
        whole = NOT_FLOAT.get(node.op_type, set())
        for name in (name for index, name in enumerate(node.output) if index not in whole):
            for consumer in consumers[name]:
                wide = consumer.op_type == "Conv" and weights.get(consumer.input[1], [0])[0] > SIDES
                if consumer.op_type == "QuantizeLinear" or wide:
                    return None
                if consumer.op_type not in BEYOND and consumer.name not in found:
                    found.add(consumer.name)
                    queue.append(consumer)
    return found


def _scaled_before_quantizer(graph: Any, image: str) -> bool:
    """Whether the product of a Mul or Div on the way from an image to a QuantizeLinear is what that reads."""
    kinds = {image: False}  # tensors on that way → whether they are a product
    for node in graph.node:
        come = [kinds[name] for name in node.input if name in kinds]
        if not come:
            continue
        if node.op_type == "QuantizeLinear" and come[0]:
            return True
        if node.op_type in ("Cast", "Transpose", "Mul", "Div"):
            kinds[node.output[0]] = come[0] or node.op_type in ("Mul", "Div")
    return False


def _form(inputs: list[Any], metadata: Mapping[str, str]) -> InputSpec:
    if len(inputs) != 1:
        return FLOATS
    return InputSpec.of_file(metadata, _type(inputs[0]), _shape(inputs[0]))


def _type(value: Any) -> str:
    """Torch's name of a type, by its number in TensorProto; such as 'type 8' for those that no network here has."""
    number = value.type.tensor_type.elem_type
    return TYPES.get(number, f"type {number}")


def _shape(value: Any) -> tuple[int | None, ...]:
    dims = value.type.tensor_type.shape.dim
    return tuple(dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else None for dim in dims)
