"""Does a Q/DQ graph have the properties that TensorRT turns into speed?

`python export_qat.py --verify FILE.onnx` asks it of a file; in Python:

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
from utils.core.text import aligned
from utils.onnx_graph.passes.for_openvino import MIDDLE, SEVEN_BIT_TARGET, TARGET_KEY
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
    """What the verifier saw."""

    findings: tuple[Finding, ...]  # the breaches, in the order of the properties
    checked: dict[str, int]  # property → number of things that it looked at
    counts: dict[str, int]  # quantizers, convolutions, float_convolutions (left so by the recipe)

    @property
    def ok(self) -> bool:
        """Whether all properties hold."""
        return not self.findings

    def summary(self) -> str:
        """One line: what is quantized, and whether all properties hold."""
        counts, count = self.counts, len(self.findings)
        verdict = f"{count} breach{'es' * (count > 1)}" if count else f"all {len(self.checked)} properties hold"
        left = f", {counts['float_convolutions']} left in float" if counts["float_convolutions"] else ""
        return f"{counts['quantizers']} QuantizeLinear, {counts['convolutions']} convolutions{left}: {verdict}"


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
        raise InputError("there is nothing to verify: the network is float, without QuantizeLinear or DequantizeLinear")
    findings, checked = [], {}
    for name, check in PROPERTIES.items():
        entries = list(check(graph))
        checked[name] = len(entries)
        findings += [Finding(name, node, message) for node, message in entries if message]
    counts = {
        "quantizers": len(graph.of_type(QUANTIZE)),
        "convolutions": len(graph.convolutions),
        "float_convolutions": sum(graph.is_float(node) for node in graph.convolutions),
    }
    return GraphReport(tuple(findings), checked, counts)


def table(report: GraphReport) -> str:
    """The report as text: one line a property, then the breaches."""
    breaches = Counter(finding.rule for finding in report.findings)
    why = {name: (check.__doc__ or "").partition("\n")[0].rstrip(".") for name, check in PROPERTIES.items()}
    rows = [(name, str(report.checked.get(name, 0)), str(breaches[name]), why[name]) for name in PROPERTIES]
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
        elif (bad := scale[~(np.isfinite(scale) & (scale > 0))]).size:
            yield node.name, f"its scale {float(bad.flat[0]):g} is not positive and finite"
        else:
            yield node.name, None


def symmetric(graph: QdqGraph) -> Check:
    """Every zero point is INT8 0: TensorRT knows no other. Of activations for OpenVINO it is UINT8 128."""
    computed = {node.name for node in graph.activations}
    for node in _distinct(graph):
        wanted: np.generic = MIDDLE if graph.target and node.name in computed else np.int8(0)
        zero = graph.array(node.input[2]) if len(node.input) > 2 else None
        right = zero is not None and zero.dtype == wanted.dtype and (zero == wanted).all()
        yield node.name, None if right else f"its zero point is not {wanted.dtype.name.upper()} {wanted}"


def seven_bits(graph: QdqGraph) -> Check:
    """Weights for OpenVINO without VNNI are -64..64, or sums of two products overflow 16 bits."""
    if graph.target != SEVEN_BIT_TARGET:
        return
    for conv in graph.of_type(*WEIGHTED):
        node = graph.dequantizer(conv.input[1])
        weight, scale = graph.array(graph.weight_name(conv)), graph.array(node.input[1]) if node else None
        if node is None or weight is None or scale is None:
            continue
        stored = weight.dtype == np.int8
        integers = weight if stored else np.rint(weight / along_axis(node, weight, scale))
        largest = int(np.abs(integers.astype(np.int16)).max(initial=0))
        yield node.name, f"its weights reach {largest}" if largest > LARGEST_OF_SEVEN_BITS else None


def granularity(graph: QdqGraph) -> Check:
    """Weights have a scale an output channel, activations one: what INT8 kernels take."""
    for conv in graph.of_type(*WEIGHTED):
        node = graph.dequantizer(conv.input[1])
        if node is None:
            continue
        weight, axis = graph.array(graph.weight_name(conv)), WEIGHTED[conv.op_type]
        scale = graph.array(node.input[1])
        if scale is None or weight is None:
            continue
        on = attribute(node, "axis", 1)
        wrong = scale.size != weight.shape[axis] or (scale.size > 1 and on != axis)
        yield node.name, f"{scale.size} scales on axis {on} for weight {list(weight.shape)}" if wrong else None
    for node in graph.activations:
        scale = graph.array(node.input[1])
        several = scale is not None and scale.size > 1
        yield node.name, "it has several scales, and is an activation's" if several else None


def pairs(graph: QdqGraph) -> Check:
    """A QuantizeLinear feeds DequantizeLinear of the same scale, or values change.

    Of images as bytes the QuantizeLinear has 255 times the scale, since the bytes are not divided before; a network of
    others may take 0..255.
    """
    for node in graph.of_type(QUANTIZE):
        consumers = graph.consumers(node.output[0])
        strangers = [consumer for consumer in consumers if consumer.op_type != DEQUANTIZE]
        factors = (1,) if not graph.is_of_bytes(node.input[0]) else (BRIGHTEST,) if graph.typing else (1, BRIGHTEST)
        own = graph.quantizer_parameters(node)
        if strangers:
            yield node.name, f"{strangers[0].op_type} {strangers[0].name} reads its integers"
        elif any(own not in [graph.quantizer_parameters(one, by) for by in factors] for one in consumers):
            yield node.name, "its DequantizeLinear has another scale"
        else:
            yield node.name, None
    for node in graph.of_type(DEQUANTIZE):
        producer = graph.producer(node.input[0])
        if producer is None and not graph.is_constant(node.input[0]):
            yield node.name, "it reads a graph input"
        elif producer is not None and producer.op_type != QUANTIZE:
            yield node.name, f"it reads {producer.op_type} {producer.name}, not a QuantizeLinear"


def one_quantizer(graph: QdqGraph) -> Check:
    """One QuantizeLinear reads a tensor, of floats: a second one is a kernel too many."""
    tensors: dict[str, list[NodeProto]] = {}
    for node in graph.of_type(QUANTIZE):
        tensors.setdefault(node.input[0], []).append(node)
    for tensor, nodes in tensors.items():
        before = graph.dequantizer(tensor)
        if len(nodes) > 1:
            yield nodes[0].name, f"{len(nodes)} QuantizeLinear read {tensor}"
        elif before is not None:
            yield nodes[0].name, f"it quantizes again what {before.name} dequantized"
        else:
            yield nodes[0].name, None


def convolutions(graph: QdqGraph) -> Check:
    """Input and weight of each convolution are quantized but where the recipe says, or it runs in float."""
    for node in graph.convolutions:
        if graph.is_float(node):
            continue
        sides = zip(("input", "weight"), node.input, strict=False)
        missing = [kind for kind, name in sides if not graph.dequantizer(name)]
        yield node.name, f"its {' and '.join(missing)}: not quantized" if missing else None


def activation(graph: QdqGraph) -> Check:
    """Nothing stands between a convolution and its activation, or inside that: they fuse."""
    for node in graph.nodes:
        if node.op_type not in WEIGHTED and not graph.is_activation(node):
            continue
        result, broken = node.output[0], None
        for quantizer in graph.quantizers(result):
            behind = graph.consumers_through(quantizer.output[0], frozenset({DEQUANTIZE}))
            for reader in (*behind, *graph.consumers(result)):
                if node.op_type in WEIGHTED:
                    goes_on = graph.is_activation(reader)
                else:  # x · sigmoid(x) multiplies by x
                    goes_on = reader.op_type == "Mul" and graph.before_activation(result) in reader.input
                if goes_on:
                    broken = f"{quantizer.name} stands between it and {reader.name}"
        yield node.name, broken


def concat(graph: QdqGraph) -> Check:
    """Inputs and result of a Concat have one scale, or they are requantized."""
    for node in graph.of_type("Concat"):
        yield from _same_scale(graph, node)


def moving(graph: QdqGraph) -> Check:
    """What only moves values stands between equal scales: it runs in INT8 or vanishes."""
    for node in graph.nodes:
        if node.op_type != "Concat" and graph.is_moving(node) and not graph.is_of_bytes(node.input[0]):
            yield from _same_scale(graph, node)


def _same_scale(graph: QdqGraph, node: NodeProto) -> Check:
    """Inputs and result of a node that moves values have one scale, as soon as the result is read as INT8."""
    inputs = graph.operands(node)
    before = [item for item in map(graph.dequantizer, inputs) if item]
    after = [item for name in node.output for item in graph.quantizers(name)]
    if not before and not after:
        return
    leaving = [name for name in node.output if not graph.quantizers(name) and not graph.reads_float(name)]
    if after and len(before) < len(inputs):
        floating = next(name for name in inputs if not graph.dequantizer(name))
        yield node.name, f"its input {floating} is not quantized, its result is"
    elif leaving and len(before) == len(inputs):
        yield node.name, f"its input is quantized, its result {leaving[0]} is not"
    else:
        scales = {graph.comparable(item.input[1]) for item in (*before, *after)}
        yield node.name, f"{len(scales)} scales meet" if after and len(scales) > 1 else None


def average_pool(graph: QdqGraph) -> Check:
    """An average over INT8 values gives INT8 values, or it runs in float."""
    for node in graph.of_type(*POOLS):
        before, after = graph.dequantizer(node.input[0]), graph.quantizers(node.output[0])
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
        result = graph.quantizers(node.output[0])
        if len(inputs) < 2 or not (quantized or result) or (graph.is_float(node) and not result):
            continue
        fused = [  # a convolution's own result, or the sum before it in a chain of Adds
            name for name in inputs
            if name not in quantized and len(graph.consumers(name)) == 1
            and (_is_sum(graph, name) or _computes(graph, name, *WEIGHTED))
        ]  # fmt: skip
        if not quantized and not any(_is_sum(graph, name) for name in fused):
            yield node.name, "neither input is quantized"
        elif len(quantized) + len(fused) < len(inputs):
            other = next(name for name in inputs if name not in quantized and name not in fused)
            yield node.name, f"its input {other} is neither quantized nor a convolution's own result"
        else:
            yield node.name, None


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
        value = graph.array(dequantizer.input[1] if dequantizer is not None else node.input[1])
        kind = None if value is None else value.dtype  # of a quantized weight that of its scale
        allowed = (np.float16, np.float32) if node.output[0] in graph.decoders else (np.float16,)
        yield node.name, None if kind in allowed else f"it computes in {np.dtype(kind).name}, not in float16"


def decoding(graph: QdqGraph) -> Check:
    """Boxes and scores keep their precision: DFL and what follows is float."""
    for node in graph.of_type(*WEIGHTED):
        if node.output[0] in graph.decoders:
            quantized = graph.dequantizer(node.input[0]) or graph.dequantizer(node.input[1])
            yield node.name, "DFL's convolution is quantized" if quantized else None
    for node in graph.activations:
        consumers = graph.consumers_through(node.output[0], frozenset({DEQUANTIZE}))
        around_decoder = any(consumer.output[0] in graph.decoders for consumer in consumers)
        if node.input[0] in graph.decoding and not around_decoder:
            yield node.name, "it quantizes boxes or scores"


def float_island(graph: QdqGraph) -> Check:
    """No float operator that does not fuse stands between quantized ones: it costs two conversions."""
    quantized = graph.downstream([node.output[0] for node in graph.of_type(DEQUANTIZE)])
    needed = graph.upstream([node.input[0] for node in graph.activations]) - graph.decoding
    known = {*WEIGHTED, *POOLS, "Add", QUANTIZE, DEQUANTIZE, "Shape"}
    for node in graph.nodes:
        between = node.output[0] in needed and any(name in quantized for name in node.input)
        if not between or node.op_type in known or graph.is_moving(node) or graph.is_float(node):
            continue
        before = graph.before_activation(node.output[0])
        if (dequantizer := graph.dequantizer(before)) and (quantizer := graph.producer(dequantizer.input[0])):
            before = quantizer.input[0]  # between the two, which breaks another rule
        fuses = graph.is_activation(node) and _computes(graph, before, *WEIGHTED, "Add")
        yield node.name, None if fuses else f"{node.op_type} runs in float between two quantized tensors"


def _computes(graph: QdqGraph, tensor: str, *types: str) -> bool:
    """Whether a tensor is the result of a node of these types, with or without activation."""
    source = graph.producer(graph.before_activation(tensor))
    return source is not None and source.op_type in types


PROPERTIES: dict[str, Callable[[QdqGraph], Check]] = {
    check.__name__.replace("_", " "): check
    for check in (
        scales, symmetric, seven_bits, granularity, pairs, one_quantizer, convolutions, activation, concat, moving,
        average_pool, residual, decoding, types, float_island,
    )
}  # fmt: skip
