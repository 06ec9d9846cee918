"""Check that a Q/DQ graph has the properties that TensorRT turns into speed.

`python export_qat.py --verify FILE.onnx` checks a file; in Python:

    report = verify(read_onnx("model.onnx"))
    report.ok, report.findings, table(report)

Each property is a function in `PROPERTIES`: its name is the property's, the first line of its docstring says why, and
it yields one entry for each thing that it looks at: the node's name, and what is wrong, or None if nothing is. To add
one, write it, and mutate a good graph for it in the tests. Sources: "Explicit Quantization" in TensorRT's developer
guide, and measurements. What the file's metadata say that the recipe leaves in float is not held against it. A file
whose metadata name OpenVINO has the properties that OpenVINO's CPU kernels want of its integers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto

from utils.core.errors import InputError
from utils.core.text import aligned, plural
from utils.onnx_graph.passes.for_openvino import LARGEST_ZERO_POINT, SEVEN_BIT_TARGET, TARGET_KEY
from utils.onnx_graph.qdq_view import FLOAT_MODULES, POOLS, WEIGHTED, QdqGraph, along_axis
from utils.onnx_graph.view import BRIGHTEST, DEQUANTIZE, QUANTIZE, attribute, input_spec, metadata_of

LARGEST_OF_SEVEN_BITS = 64
SHOWN = 20  # findings that a table lists; more are counted


class Finding(NamedTuple):
    """One breach of a property: its name, the node, and what is wrong with it."""

    rule: str
    node: str
    message: str


@dataclass(frozen=True)
class GraphReport:
    """Result of the verifier."""

    findings: tuple[Finding, ...]  # the breaches, in the order of the properties
    checked: dict[str, int]  # property → number of things that it looked at
    counts: dict[str, int]  # quantizers, convolutions, float_convolutions (left so by the recipe)

    @property
    def ok(self) -> bool:
        """Whether all properties hold."""
        return not self.findings

    def summary(self) -> str:
        """One line: what is quantized, and whether all properties hold."""
        counts = self.counts
        text = f"{counts['quantizers']} QuantizeLinear, {counts['convolutions']} convolutions"
        if counts["float_convolutions"]:
            text += f", {counts['float_convolutions']} left in float"
        if self.ok:
            return f"{text}: all {len(self.checked)} properties hold"
        return f"{text}: {plural(len(self.findings), 'breach')}"


def verify(model: ModelProto) -> GraphReport:
    """Check a graph.

    Raises:
        InputError: it has no quantizers.
    """
    properties = metadata_of(model)
    input_spec(model)  # refuses the INT8 images of 1.0
    floats = frozenset(json.loads(properties.get(FLOAT_MODULES, "[]")))
    graph = QdqGraph(model, floats, properties.get("typing", ""), properties.get(TARGET_KEY, ""))
    if not graph.of_type(DEQUANTIZE):
        raise InputError(
            "there is nothing to verify: the file holds an FP32 model, without QuantizeLinear or DequantizeLinear"
        )
    findings = []
    checked = {}
    for name, check in PROPERTIES.items():
        entries = list(check(graph))
        checked[name] = len(entries)
        findings += [Finding(name, node, message) for node, message in entries if message]
    float_convolutions = [node for node in graph.convolutions if graph.is_float(node)]
    counts = {
        "quantizers": len(graph.of_type(QUANTIZE)),
        "convolutions": len(graph.convolutions),
        "float_convolutions": len(float_convolutions),
    }
    return GraphReport(tuple(findings), checked, counts)


def table(report: GraphReport) -> str:
    """The report as text: one line a property, then the breaches."""
    breaches = Counter(finding.rule for finding in report.findings)
    rows = []
    for name, check in PROPERTIES.items():
        why = (check.__doc__ or "").partition("\n")[0].rstrip(".")
        rows.append((name, str(report.checked.get(name, 0)), str(breaches[name]), why))
    lines = aligned(("property", "checked", "breaches", "why"), rows, ("property", "why"))
    for finding in report.findings[:SHOWN]:
        lines.append(f"{finding.rule}: {finding.node}: {finding.message}")
    if len(report.findings) > SHOWN:
        lines.append(f"... and {len(report.findings) - SHOWN} more")
    return "\n".join([*lines, report.summary()])


Check = Iterator[tuple[str, str | None]]  # node, message


def _distinct(graph: QdqGraph) -> Iterator[NodeProto]:
    """Every QuantizeLinear, and the DequantizeLinear that have none before them: one a pair."""
    yield from graph.of_type(QUANTIZE)
    for node in graph.of_type(DEQUANTIZE):
        producer = graph.producer(node.input[0])
        if producer is None or producer.op_type != QUANTIZE:
            yield node


def scales(graph: QdqGraph) -> Check:
    """Every scale is positive and finite, or TensorRT refuses the file."""
    for node in _distinct(graph):
        scale = graph.array(node.input[1])
        if scale is None:
            yield node.name, "its scale is computed, not stored"
            continue
        is_good = np.isfinite(scale) & (scale > 0)
        if is_good.all():
            yield node.name, None
        else:
            yield node.name, f"its scale {float(scale[~is_good].flat[0]):g} is not positive and finite"


def symmetric(graph: QdqGraph) -> Check:
    """Every zero point is INT8 0: TensorRT knows no other. Of activations for OpenVINO it is UINT8, at most 128."""
    activation_names = {node.name for node in graph.activations}
    for node in _distinct(graph):
        if graph.target and node.name in activation_names:
            yield node.name, _zero_point_problem(graph, node, "uint8", LARGEST_ZERO_POINT)
        else:
            yield node.name, _zero_point_problem(graph, node, "int8", 0)


def _zero_point_problem(graph: QdqGraph, node: NodeProto, dtype: str, largest: int) -> str | None:
    """Message on a zero point that is not of this type, or not between 0 and `largest`."""
    zero_point = graph.zero_point(node)
    if zero_point is not None and zero_point.dtype == dtype and 0 <= zero_point.min() <= zero_point.max() <= largest:
        return None
    values = f"0 to {largest}" if largest else "0"
    return f"its zero point is not {dtype.upper()} {values}"


def seven_bits(graph: QdqGraph) -> Check:
    """Weights for OpenVINO without VNNI are -64..64, or sums of two products overflow 16 bits."""
    if graph.target != SEVEN_BIT_TARGET:
        return
    for conv in graph.of_type(*WEIGHTED):
        node = graph.dequantizer(conv.input[1])
        weight = graph.array(graph.weight_name(conv))
        scale = graph.array(node.input[1]) if node else None
        if node is None or weight is None or scale is None:
            continue
        integers = weight
        if weight.dtype != np.int8:  # the file holds them as floats in front of a QuantizeLinear
            integers = np.rint(weight / along_axis(node, weight, scale))
        largest = int(np.abs(integers.astype(np.int16)).max(initial=0))
        yield node.name, f"its weights reach {largest}" if largest > LARGEST_OF_SEVEN_BITS else None


def granularity(graph: QdqGraph) -> Check:
    """Weights have a scale an output channel, activations one: what INT8 kernels take."""
    for conv in graph.of_type(*WEIGHTED):
        node = graph.dequantizer(conv.input[1])
        if node is None:
            continue
        weight = graph.array(graph.weight_name(conv))
        axis = WEIGHTED[conv.op_type]
        scale = graph.array(node.input[1])
        if scale is None or weight is None:
            continue
        scale_axis = attribute(node, "axis", 1)
        if scale.size == weight.shape[axis] and (scale.size == 1 or scale_axis == axis):
            yield node.name, None
        else:
            yield node.name, f"{scale.size} scales on axis {scale_axis} for weight {list(weight.shape)}"
    for node in graph.activations:
        scale = graph.array(node.input[1])
        has_several = scale is not None and scale.size > 1
        yield node.name, "it quantizes an activation and has several scales" if has_several else None


def pairs(graph: QdqGraph) -> Check:
    """A QuantizeLinear feeds DequantizeLinear of the same scale, or values change.

    Of images as bytes the QuantizeLinear has 255 times the scale, since the bytes are not divided before; a network of
    others may take 0..255.
    """
    for node in graph.of_type(QUANTIZE):
        consumers = graph.consumers(node.output[0])
        others = [consumer for consumer in consumers if consumer.op_type != DEQUANTIZE]
        if others:
            yield node.name, f"{others[0].op_type} {others[0].name} reads its integers"
        elif all(_is_pair(graph, node, consumer) for consumer in consumers):
            yield node.name, None
        else:
            yield node.name, "its DequantizeLinear has another scale"
    for node in graph.of_type(DEQUANTIZE):
        producer = graph.producer(node.input[0])
        if producer is None and not graph.is_constant(node.input[0]):
            yield node.name, "it reads a graph input"
        elif producer is not None and producer.op_type != QUANTIZE:
            yield node.name, f"it reads {producer.op_type} {producer.name}, not a QuantizeLinear"


def _is_pair(graph: QdqGraph, quantizer: NodeProto, dequantizer: NodeProto) -> bool:
    """Whether two nodes have equal scales, or such as images as bytes have, see `pairs`."""
    parameters = graph.quantizer_parameters(quantizer)
    reads_bytes = graph.is_of_bytes(quantizer.input[0])
    if reads_bytes and parameters == graph.quantizer_parameters(dequantizer, BRIGHTEST):
        return True
    if reads_bytes and graph.typing:  # one of our files, whose network takes 0..1
        return False
    return parameters == graph.quantizer_parameters(dequantizer)


def one_quantizer(graph: QdqGraph) -> Check:
    """One QuantizeLinear reads a tensor, of floats: a second QuantizeLinear is a kernel too many."""
    tensors: dict[str, list[NodeProto]] = {}
    for node in graph.of_type(QUANTIZE):
        tensors.setdefault(node.input[0], []).append(node)
    for tensor, nodes in tensors.items():
        before = graph.dequantizer(tensor)
        if len(nodes) > 1:
            yield nodes[0].name, f"{len(nodes)} QuantizeLinear read {tensor}"
        elif before is not None:
            yield nodes[0].name, f"it quantizes the result of {before.name} again"
        else:
            yield nodes[0].name, None


def convolutions(graph: QdqGraph) -> Check:
    """Input and weight of each convolution are quantized unless the recipe leaves it in float, or it runs in float."""
    for node in graph.convolutions:
        if graph.is_float(node):
            continue
        sides = zip(("input", "weight"), node.input, strict=False)
        missing = [kind for kind, name in sides if not graph.dequantizer(name)]
        yield node.name, f"its {' and '.join(missing)}: not quantized" if missing else None


def activation(graph: QdqGraph) -> Check:
    """Nothing stands between a convolution and its activation, or inside that: they fuse."""
    for node in graph.nodes:
        if node.op_type in WEIGHTED or graph.is_activation(node):
            yield node.name, _between_parts(graph, node)


def _between_parts(graph: QdqGraph, node: NodeProto) -> str | None:
    """Message on a quantizer behind a convolution or a part of an activation that keeps the next part from fusing."""
    result = node.output[0]
    message = None
    for quantizer in graph.quantizers(result):
        behind = graph.consumers_through(quantizer.output[0], frozenset({DEQUANTIZE}))
        for reader in (*behind, *graph.consumers(result)):
            if node.op_type in WEIGHTED:
                fuses = graph.is_activation(reader)
            else:  # x · sigmoid(x) multiplies by x
                fuses = reader.op_type == "Mul" and graph.before_activation(result) in reader.input
            if fuses:
                message = f"{quantizer.name} stands between it and {reader.name}"
    return message


def concat(graph: QdqGraph) -> Check:
    """Inputs and result of a Concat have one scale, or they are requantized."""
    for node in graph.of_type("Concat"):
        yield from _same_scale(graph, node)


def moving(graph: QdqGraph) -> Check:
    """Operators that only move values stand between equal scales: they run in INT8 or vanish."""
    for node in graph.nodes:
        if node.op_type != "Concat" and graph.is_moving(node) and not graph.is_of_bytes(node.input[0]):
            yield from _same_scale(graph, node)


def _same_scale(graph: QdqGraph, node: NodeProto) -> Check:
    """Inputs and result of a node that moves values have one scale, as soon as the result is read as INT8."""
    inputs = graph.operands(node)
    before = [dequantizer for dequantizer in map(graph.dequantizer, inputs) if dequantizer]
    after = [quantizer for name in node.output for quantizer in graph.quantizers(name)]
    if not before and not after:
        return
    float_inputs = [name for name in inputs if not graph.dequantizer(name)]
    float_results = []
    for name in node.output:
        is_quantized = graph.quantizers(name) or graph.dequantizer(name)
        if not is_quantized and not graph.reads_float(name):
            float_results.append(name)
    if after and float_inputs:
        yield node.name, f"its input {float_inputs[0]} is not quantized, its result is"
    elif float_results and not float_inputs:
        yield node.name, f"its input is quantized, its result {float_results[0]} is not"
    else:
        scales = {_scale_and_zero_point(graph, quantizer) for quantizer in (*before, *after)}
        yield node.name, f"{len(scales)} scales meet" if after and len(scales) > 1 else None


def _scale_and_zero_point(graph: QdqGraph, node: NodeProto) -> tuple[object, int]:
    """A quantizer's scale, comparable, and zero point; without one in the file that is 0."""
    zero_point = graph.zero_point(node)
    return graph.comparable(node.input[1]), 0 if zero_point is None else int(zero_point.max())


def average_pool(graph: QdqGraph) -> Check:
    """An average over INT8 values gives INT8 values, or it runs in float."""
    for node in graph.of_type(*POOLS):
        before = graph.dequantizer(node.input[0])
        after = graph.quantizers(node.output[0])
        if after and not before:
            yield node.name, "its result is quantized, its input is not"
        elif before and not after and not graph.reads_float(node.output[0]):
            yield node.name, "its input is quantized, its result is not"
        elif before or after:
            yield node.name, None


def residual(graph: QdqGraph) -> Check:
    """The residual input of an Add is quantized, the other one a convolution's own result: both fuse."""
    for node in graph.of_type("Add"):
        inputs = graph.operands(node)
        quantized = [name for name in inputs if graph.dequantizer(name)]
        is_requantized = bool(graph.quantizers(node.output[0]))
        runs_in_float = graph.is_float(node) or not quantized
        if len(inputs) < 2 or (runs_in_float and not is_requantized):
            continue
        floats = [name for name in inputs if name not in quantized]
        fused = [name for name in floats if _fuses_with_add(graph, name)]
        unfused = [name for name in floats if name not in fused]
        if not quantized and not any(_is_sum(graph, name) for name in fused):
            yield node.name, "neither input is quantized"
        elif unfused:
            yield node.name, f"its input {unfused[0]} is neither quantized nor a convolution's own result"
        else:
            yield node.name, None


def _fuses_with_add(graph: QdqGraph, tensor: str) -> bool:
    """Whether a float input of an Add is a convolution's own result, or the sum before it in a chain of Adds."""
    if len(graph.consumers(tensor)) != 1:
        return False
    return _is_sum(graph, tensor) or _computes(graph, tensor, *WEIGHTED)


def _is_sum(graph: QdqGraph, tensor: str) -> bool:
    """Whether a tensor is the result of an Add that has a quantized input."""
    node = graph.producer(tensor)
    return node is not None and node.op_type == "Add" and any(graph.dequantizer(name) for name in node.input)


def types(graph: QdqGraph) -> Check:
    """Strongly typed: convolutions are FP16 (DFL's may be FP32), or TensorRT runs them in FP32."""
    if graph.typing != "strong":
        return
    for node in graph.of_type(*WEIGHTED):
        dequantizer = graph.dequantizer(node.input[1])
        name = (
            node.input[1] if dequantizer is None else dequantizer.input[1]
        )  # a quantized weight's type is its scale's
        value = graph.array(name)
        dtype = None if value is None else value.dtype
        is_decoder = node.output[0] in graph.decoders
        if dtype == np.float16 or (is_decoder and dtype == np.float32):
            yield node.name, None
        else:
            yield node.name, f"it computes in {np.dtype(dtype).name}, not in float16"


def decoding(graph: QdqGraph) -> Check:
    """Boxes and scores keep their precision: DFL and what follows is float."""
    for node in graph.of_type(*WEIGHTED):
        if node.output[0] in graph.decoders:
            quantized = graph.dequantizer(node.input[0]) or graph.dequantizer(node.input[1])
            yield node.name, "DFL's convolution is quantized" if quantized else None
    for node in graph.activations:
        consumers = graph.consumers_through(node.output[0], frozenset({DEQUANTIZE}))
        feeds_decoder = any(consumer.output[0] in graph.decoders for consumer in consumers)
        if node.input[0] in graph.decoding and not feeds_decoder:
            yield node.name, "it quantizes boxes or scores"


def float_island(graph: QdqGraph) -> Check:
    """No float operator that does not fuse stands between quantized ones: it costs two conversions."""
    quantized = graph.downstream([node.output[0] for node in graph.of_type(DEQUANTIZE)])
    needed = graph.upstream([node.input[0] for node in graph.activations]) - graph.decoding
    fusing = {*WEIGHTED, *POOLS, "Add", QUANTIZE, DEQUANTIZE, "Shape"}
    for node in graph.nodes:
        is_between = node.output[0] in needed and any(name in quantized for name in node.input)
        if not is_between or node.op_type in fusing or graph.is_moving(node) or graph.is_float(node):
            continue
        before = graph.before_activation(node.output[0])
        dequantizer = graph.dequantizer(before)
        quantizer = graph.producer(dequantizer.input[0]) if dequantizer else None
        if quantizer:
            before = quantizer.input[0]  # between the two, which breaks another rule
        fuses = graph.is_activation(node) and _computes(graph, before, *WEIGHTED, "Add")
        yield node.name, None if fuses else f"{node.op_type} runs in float between two quantized tensors"


def _computes(graph: QdqGraph, tensor: str, *types: str) -> bool:
    """Whether a tensor is the result of a node of these types, with or without activation."""
    source = graph.producer(graph.before_activation(tensor))
    return source is not None and source.op_type in types


CHECKS: tuple[Callable[[QdqGraph], Check], ...] = (
    scales,
    symmetric,
    seven_bits,
    granularity,
    pairs,
    one_quantizer,
    convolutions,
    activation,
    concat,
    moving,
    average_pool,
    residual,
    decoding,
    types,
    float_island,
)
PROPERTIES = {check.__name__.replace("_", " "): check for check in CHECKS}
