"""Does a Q/DQ graph have the properties that TensorRT turns into speed?

`python export_qat.py --verify FILE.onnx` asks it of a file; in Python:

    report = verify(read_onnx("model.onnx"))
    report.ok, report.findings, table(report)

The properties are in `checks.py`. What the file's metadata say that the recipe leaves in float is not held against it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from utils.core.errors import InputError
from utils.core.onnx_files import read_onnx
from utils.core.text_tables import aligned, columns
from utils.onnx_graph.checks import RULES
from utils.onnx_graph.input_forms import input_form
from utils.onnx_graph.qdq_view import FLOAT_MODULES, Context
from utils.onnx_graph.view import DEQUANTIZE, QUANTIZE, metadata_of

SHOWN = 20  # findings that a table lists; more are counted


@dataclass(frozen=True)
class Finding:
    """One breach of a rule: the rule, the node, and what is wrong with it."""

    rule: str
    node: str
    message: str


@dataclass(frozen=True)
class Report:
    """What the verifier saw.

    Attributes:
        findings: the breaches, in the order of the rules.
        checked: rule → number of things that it looked at.
        counts: quantizers, dequantizers, convolutions, float_convolutions (left so by the recipe).
    """

    findings: tuple[Finding, ...]
    checked: dict[str, int]
    counts: dict[str, int]

    @property
    def ok(self) -> bool:
        """Whether all properties hold."""
        return not self.findings

    def summary(self) -> str:
        """One line: what is quantized, and whether all properties hold."""
        counts = self.counts
        count = len(self.findings)
        broken = f"{count} breach{'es' if count > 1 else ''}"
        verdict = f"all {len(self.checked)} properties hold" if self.ok else broken
        left = f", {counts['float_convolutions']} left in float" if counts["float_convolutions"] else ""
        return f"{counts['quantizers']} QuantizeLinear, {counts['convolutions']} convolutions{left}: {verdict}"


def verify(model: ModelProto) -> Report:
    """Check a graph.

    Raises:
        InputError: it has no quantizers, or its metadata cannot be read.
    """
    properties = metadata_of(model)
    try:
        floats = frozenset(json.loads(properties.get(FLOAT_MODULES, "[]")))
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(
            f"{FLOAT_MODULES} in the file's metadata is not what export_qat.py writes, a JSON list of module paths"
        ) from error
    input_form(model)  # refuses the INT8 images of 1.0
    graph = Context(model, floats, properties.get("typing", ""))
    quantizers = len(graph.nodes(QUANTIZE))
    if not graph.nodes(DEQUANTIZE):
        raise InputError("there is nothing to verify: the network is float, without QuantizeLinear or DequantizeLinear")
    findings, checked = [], {}
    for rule in RULES:
        entries = list(rule.check(graph))
        checked[rule.name] = len(entries)
        findings += [Finding(rule.name, node, message) for node, message in entries if message]
    counts = {
        "quantizers": quantizers,
        "dequantizers": len(graph.nodes(DEQUANTIZE)),
        "convolutions": len(graph.convolutions),
        "float_convolutions": sum(graph.is_float(node) for node in graph.convolutions),
    }
    return Report(tuple(findings), checked, counts)


def verify_file(path: str | Path) -> Report:
    """Check an ONNX file.

    Raises:
        InputError: the file is missing, is no ONNX, or has no quantizers.
    """
    return verify(read_onnx(path, check=True))


def table(report: Report) -> str:
    """The report as text: one line a property, then the breaches."""
    breaches = {rule.name: sum(finding.rule == rule.name for finding in report.findings) for rule in RULES}
    rows = [(rule.name, str(report.checked.get(rule.name, 0)), str(breaches[rule.name]), rule.why) for rule in RULES]
    lines = aligned(columns(("property", "checked", "breaches", "why"), left=("property", "why")), rows)
    for finding in report.findings[:SHOWN]:
        lines.append(f"{finding.rule}: {finding.node}: {finding.message}")
    if len(report.findings) > SHOWN:
        lines.append(f"... and {len(report.findings) - SHOWN} more")
    return "\n".join([*lines, report.summary()])
