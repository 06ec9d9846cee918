"""Look-ups in an ONNX graph: the producer of a tensor, its consumers, and which tensors are constant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import wraps
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from utils.core.input_spec import FLOATS, InputSpec

QUANTIZE = "QuantizeLinear"
DEQUANTIZE = "DequantizeLinear"
QDQ = (QUANTIZE, DEQUANTIZE)
BRIGHTEST = 255  # the byte that is 1.0 in an image of floats


class GraphView:
    """Indices over a ModelProto, as it is when the view is made: make a new one after edits."""

    def __init__(self, model: ModelProto) -> None:
        graph = model.graph
        self.nodes: list[NodeProto] = list(graph.node)
        self.inputs: set[str] = {value.name for value in graph.input}
        self.outputs: set[str] = {value.name for value in graph.output}
        self._producers = {name: node for node in self.nodes for name in node.output if name}
        self._consumers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                if name:
                    self._consumers[name].append(node)
        self._tensors: dict[str, TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
        for node in self.of_type("Constant"):
            value = attribute(node, "value")
            if value is not None:
                self._tensors[node.output[0]] = value
        self._arrays: dict[str, np.ndarray] = {}

    def of_type(self, *types: str) -> list[NodeProto]:
        """The nodes of these types, in graph order."""
        return [node for node in self.nodes if node.op_type in types]

    def producer(self, name: str) -> NodeProto | None:
        """The node that writes tensor `name`; None for inputs and initializers."""
        return self._producers.get(name)

    def consumers(self, name: str) -> list[NodeProto]:
        """The nodes that read tensor `name`, each once, in graph order."""
        return self._consumers.get(name, [])

    def is_constant(self, name: str) -> bool:
        """Whether `name` is an initializer or the output of a Constant node."""
        return name in self._tensors

    def array(self, name: str) -> np.ndarray | None:
        """The value of a constant tensor, None for everything else."""
        if name not in self._tensors:
            return None
        if name not in self._arrays:
            self._arrays[name] = numpy_helper.to_array(self._tensors[name])
        return self._arrays[name]

    def constant(self, name: str) -> np.ndarray:
        """The value of a tensor that is constant."""
        value = self.array(name)
        assert value is not None, f"{name} is constant"
        return value

    def channel_bounds(self, node: NodeProto) -> tuple[int, int] | None:
        """First channel and end of a Slice that takes neighbouring channels and nothing else."""
        if node.op_type != "Slice" or len(node.input) < 4:
            return None
        numbers = []
        for name in node.input[1:]:
            value = self.array(name)
            if value is None or value.size != 1:
                return None
            numbers.append(int(value.item()))
        start, end, axis = numbers[:3]
        step = numbers[3] if len(numbers) > 3 else 1
        if axis == 1 and step == 1 and 0 <= start < end:
            return (start, end)
        return None

    def comparable(self, name: str) -> object:
        """A tensor by its value where that is constant, else by its name."""
        value = self.array(name)
        return name if value is None else by_value(value)

    def consumers_through(self, name: str, through: frozenset[str]) -> Iterator[NodeProto]:
        """The nodes that read `name`, directly or through nodes of the given types (which are not yielded)."""
        stack = [name]
        seen = {name}
        while stack:
            for node in self.consumers(stack.pop()):
                if node.op_type not in through:
                    yield node
                    continue
                fresh = [output for output in node.output if output not in seen]
                seen.update(fresh)
                stack += fresh

    def downstream(self, start: list[str]) -> set[str]:
        """The names of all tensors that depend on the given ones, these included."""

        def results(name: str) -> list[str]:
            return [output for node in self.consumers(name) for output in node.output]

        return _reached(start, results)

    def upstream(self, start: list[str]) -> set[str]:
        """The names of all tensors that the given ones depend on, these included."""
        return _reached(start, lambda name: getattr(self.producer(name), "input", ()))


def by_value(array: np.ndarray) -> tuple[object, ...]:
    """Return a key that is equal for equal arrays: type, shape and bytes."""
    return str(array.dtype), array.shape, array.tobytes()


def _reached(start: Iterable[str], following: Callable[[str], Iterable[str]]) -> set[str]:
    """All names that can be reached from `start`, these included; tensors without a name do not count."""
    seen = set(start)
    stack = list(start)
    while stack:
        fresh = {name for name in following(stack.pop()) if name} - seen
        seen |= fresh
        stack += fresh
    return seen


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """The value of a node's attribute, or `default`."""
    for item in node.attribute:
        if item.name == name:
            return onnx.helper.get_attribute_value(item)
    return default


def channel_counts(model: ModelProto) -> dict[str, int]:
    """Channels of the tensors `[B, C, H, W]` whose shapes are known or can be inferred, by name."""
    counts = {}
    for value in with_shapes(model):
        dims = value.type.tensor_type.shape.dim
        if len(dims) == 4 and dims[1].dim_value:
            counts[value.name] = dims[1].dim_value
    return counts


def with_shapes(model: ModelProto, *, data_prop: bool = False) -> list[ValueInfoProto]:
    """The tensors with the types and shapes that the file holds or that ONNX infers, without initializers."""
    graph = onnx.shape_inference.infer_shapes(model, data_prop=data_prop).graph
    return [*graph.value_info, *graph.input, *graph.output]


def metadata_of(model: ModelProto) -> dict[str, str]:
    """The file's own properties: stride, names, recipe, ..."""
    return {entry.key: entry.value for entry in model.metadata_props}


def module_path(node_name: str) -> str:
    """The torch module that a node belongs to, from the scope that torch's exporter gives it.

    A container inside a container repeats its prefix: `/model.22/cv2.0/cv2.0.1/conv/Conv` → `model.22.cv2.0.1.conv`.
    """
    parts: list[str] = []
    for part in node_name.strip("/").split("/")[:-1]:
        if parts and part.startswith(f"{parts[-1]}."):
            parts[-1] = part
        else:
            parts.append(part)
    return ".".join(parts)


def pure(edit: Callable[..., None]) -> Callable[..., ModelProto]:
    """Run an in-place edit on a copy and return the copy."""

    @wraps(edit)
    def edited(model: ModelProto, *args: object, **kwargs: object) -> ModelProto:
        result = deepcopy(model)
        edit(result, *args, **kwargs)
        return result

    return edited


@pure
def set_metadata(model: ModelProto, entries: Mapping[str, str]) -> None:
    """Write key/value properties into the file, in place of those with the same key."""
    helper.set_model_props(model, {**metadata_of(model), **entries})


def input_spec(model: ModelProto) -> InputSpec:
    """The form in which a file takes images, see `InputSpec.of_file`; floats if it takes nothing."""
    weights = {tensor.name for tensor in model.graph.initializer}  # old exporters list them among the inputs
    value = next((value for value in model.graph.input if value.name not in weights), None)
    if value is None:
        return FLOATS
    kind = value.type.tensor_type
    dtype = ""
    if kind.elem_type:
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type).name
    shape = [dim.dim_value or None for dim in kind.shape.dim]
    return InputSpec.of_file(metadata_of(model), dtype, shape)


def set_nodes(model: ModelProto, nodes: list[NodeProto]) -> None:
    """Make these the graph's nodes; they may be some of its own."""
    copies = [deepcopy(node) for node in nodes]  # deleting the field would empty the originals
    del model.graph.node[:]
    model.graph.node.extend(copies)


def rename_inputs(node: NodeProto, renamed: Mapping[str, str]) -> None:
    """Replace input names of a node."""
    if renamed:
        node.input[:] = [renamed.get(name, name) for name in node.input]


def drop_unused(model: ModelProto) -> None:
    """Drop nodes, initializers and shape records that no graph output depends on."""
    view = GraphView(model)
    needed = view.upstream(sorted(view.outputs))
    set_nodes(model, [node for node in model.graph.node if set(node.output) & needed])
    for field in (model.graph.initializer, model.graph.value_info):
        unused = [index for index, entry in enumerate(field) if entry.name not in needed]
        for index in reversed(unused):
            del field[index]


def store(model: ModelProto, name: str, value: np.ndarray) -> str:
    """Add an initializer; returns its name."""
    model.graph.initializer.append(numpy_helper.from_array(value, name))
    return name


def overwrite(model: ModelProto, arrays: Mapping[str, np.ndarray]) -> None:
    """Give the initializers of these names other values."""
    for tensor in model.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(numpy_helper.from_array(arrays[tensor.name], tensor.name))


class GraphAppender:
    """Adds nodes behind the last ones of a graph, in place; names start with `prefix`.

    An input is the name of a tensor, or a value, which becomes a constant: whole numbers int64, others float32.
    """

    def __init__(self, model: ModelProto, prefix: str) -> None:
        self._model = model
        self._prefix = prefix
        self._count = 0

    def add(self, kind: str, *inputs: object, output: str = "", **attributes: object) -> str:
        """Add a node; returns the name of its result: `output`, or a new name."""
        return self.several(kind, *inputs, outputs=[output], **attributes)[0]

    def several(self, kind: str, *inputs: object, outputs: int | Sequence[str], **attributes: object) -> list[str]:
        """Add a node with several results; returns their names."""
        name = self._name(kind)
        if isinstance(outputs, int):
            outputs = ["" for _ in range(outputs)]
        results = [output or f"{name}_output_{index}" for index, output in enumerate(outputs)]
        names = [item if isinstance(item, str) else self._constant(item) for item in inputs]
        self._model.graph.node.append(helper.make_node(kind, names, results, name=name, **attributes))
        return results

    def outputs(self, values: Mapping[str, tuple[int, Sequence[int | str]]]) -> None:
        """Make tensors of these names, types and shapes the graph's outputs, in place of those before."""
        graph = self._model.graph
        del graph.output[:]
        for name, (kind, shape) in values.items():
            graph.output.append(helper.make_tensor_value_info(name, kind, shape))

    def _constant(self, value: Any) -> str:
        array = np.asarray(value)
        if not isinstance(value, np.ndarray):
            dtype = np.int64 if array.dtype.kind == "i" else np.float32
            array = array.astype(dtype)
        return store(self._model, self._name("constant"), array)

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"/{self._prefix}/{kind}_{self._count}"
