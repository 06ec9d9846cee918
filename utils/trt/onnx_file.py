"""Description of an ONNX file: inputs, outputs, types and form, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.core.errors import InputError
from utils.core.files import read_onnx
from utils.core.input_spec import InputSpec
from utils.core.output_form import OutputForm
from utils.runners.base import TensorSpec

UINT8 = 2  # TensorProto's numbers of types
FLOAT16 = 10
DATA_DEPENDENT = ("NonMaxSuppression", "NonZero")


@dataclass(frozen=True)
class OnnxFile:
    """Description of an ONNX file.

    Attributes:
        quantized: there are QuantizeLinear or DequantizeLinear nodes.
        half: weights or scales are FP16: the types of a strongly typed network are in the file.
        half_scales: quantizers have FP16 scales (opset 19), which weakly typed TensorRT does not read.
        unsigned: quantizers round to UINT8, as in files for OpenVINO.
        plugins: there are nodes of TensorRT's own, such as EfficientNMS_TRT.
        data_dependent: the size of a result is only known once it is computed, as NonMaxSuppression's.
    """

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    opset: int
    quantized: bool
    half: bool
    half_scales: bool
    unsigned: bool
    plugins: bool
    data_dependent: bool
    metadata: Mapping[str, str]
    input_spec: InputSpec

    @classmethod
    def read(cls, path: str | Path) -> OnnxFile:
        """Read a file's description; raises as `read_onnx`, or `InputError` for a file with INT8 images as input."""
        return cls.of_model(read_onnx(path), Path(path))

    @classmethod
    def of_model(cls, model: Any, path: Path) -> OnnxFile:
        """Describe a loaded ModelProto; `path` is the file that it was read from."""
        graph = model.graph
        types = _types_of_constants(graph)
        quantizers = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
        scales = {types.get(node.input[1]) for node in quantizers}
        zero_points = {types.get(name) for node in quantizers for name in node.input[2:]}
        weights = {types.get(node.input[1]) for node in graph.node if node.op_type == "Conv"}
        operators = {node.op_type for node in graph.node}
        inputs = tuple(TensorSpec.of_onnx(value) for value in graph.input if value.name not in types)
        outputs = tuple(TensorSpec.of_onnx(value) for value in graph.output)
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        has_plugins = any(operator.endswith("_TRT") for operator in operators)
        has_half_scales = FLOAT16 in scales
        is_half = has_half_scales or FLOAT16 in weights
        is_data_dependent = not operators.isdisjoint(DATA_DEPENDENT)
        input_spec = InputSpec()
        if inputs:
            input_spec = InputSpec.of_file(metadata, inputs[0].dtype, inputs[0].shape)
        return cls(
            path=path,
            inputs=inputs,
            outputs=outputs,
            opset=_opset(model),
            quantized=bool(quantizers),
            half=is_half,
            half_scales=has_half_scales,
            unsigned=UINT8 in zero_points,
            plugins=has_plugins,
            data_dependent=is_data_dependent,
            metadata=metadata,
            input_spec=input_spec,
        )

    @property
    def form(self) -> OutputForm:
        """The form of the outputs, with or without NMS and masks."""
        return OutputForm.of(self.metadata, {spec.name: spec.shape for spec in self.outputs})

    @property
    def tensors(self) -> dict[str, list[Any]]:
        """Inputs and outputs by name: type and shape, as an engine's note and JSON hold them."""
        return {spec.name: [spec.dtype, list(spec.shape)] for spec in (*self.inputs, *self.outputs)}

    @property
    def image(self) -> tuple[str, tuple[int | None, ...]]:
        """Name and shape (batch, channels, height, width) of the only input; `InputError` if there are others."""
        if [len(spec.shape) for spec in self.inputs] != [4]:
            inputs = ", ".join(map(str, self.inputs)) or "nothing"
            raise InputError(f"{self.path} takes {inputs}; expected one input [batch, channels, height, width]")
        return self.inputs[0].name, self.input_spec.nchw(self.inputs[0].shape)


def _types_of_constants(graph: Any) -> dict[str, int]:
    """TensorProto's number of the type of each initializer and Constant, by name."""
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute:  # the value of a Constant
            types[node.output[0]] = attribute.t.data_type
    return types


def _opset(model: Any) -> int:
    """Version of ONNX's own operators; 0 if the file names none."""
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
