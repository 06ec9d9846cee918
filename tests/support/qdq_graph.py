"""A small Q/DQ graph with every construct that the verifier knows, written by hand, and tools to break it.

    images ─ conv ─┬─ avg pool ─ max pool ─ conv ─ resize ┐
                   └─ conv ─ split ─┬─────────────┐       │
                                    ├─ conv ─ conv ┴ add  │
                                    └──────────── concat ─┴ concat ─ head: conv ─ last convs ─ DFL, sigmoid

(a pair stands behind every convolution and every node that moves values; the last convolutions are followed by the
decoding in float).
"""

import re

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

SIZE, CLASSES, BINS = 16, 2, 4


class Builder:
    """Collects nodes and initializers; each method returns the name of its result."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[NodeProto] = []
        self.tensors: list[TensorProto] = []

    def tensor(self, name: str, value: np.ndarray) -> str:
        self.tensors.append(numpy_helper.from_array(value, name))
        return name

    def node(self, kind: str, name: str, *inputs: str, outputs: int = 1, **attributes: object) -> str | list[str]:
        names = [f"{name}_output_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=name, **attributes))
        return names if outputs > 1 else names[0]

    def pair(self, tensor: str, scale: float | np.ndarray, name: str, axis: int | None = None) -> str:
        """QuantizeLinear and DequantizeLinear with initializers of their own."""
        value = np.asarray(scale, np.float32)
        zero = self.tensor(f"{name}/zero_point", np.zeros(value.shape, np.int8))
        parameters = [self.tensor(f"{name}/scale", value), zero]
        attributes = {} if axis is None else {"axis": axis}
        integers = self.node("QuantizeLinear", f"{name}/QuantizeLinear", tensor, *parameters, **attributes)
        return self.node("DequantizeLinear", f"{name}/DequantizeLinear", integers, *parameters, **attributes)

    def conv(self, x: str, path: str, channels: tuple[int, int], *, kernel: int = 1, silu: bool = True) -> str:
        """A convolution with a weight per output channel, not yet quantized itself."""
        scope = _scope(path)
        weight = self.random.normal(0, 0.3, (channels[1], channels[0], kernel, kernel)).astype(np.float32)
        scale = np.abs(weight).max((1, 2, 3)) / 127
        quantized = self.pair(self.tensor(f"{path}.conv.weight", weight), scale, f"{path}.conv.weight", axis=0)
        bias = self.tensor(f"{path}.conv.bias", self.random.normal(0, 0.1, channels[1]).astype(np.float32))
        sizes = {"kernel_shape": [kernel] * 2, "pads": [kernel // 2] * 4}
        x = self.node("Conv", f"{scope}/conv/Conv", x, quantized, bias, **sizes)
        if not silu:
            return x
        gate = self.node("Sigmoid", f"{scope}/act/Sigmoid", x)
        return self.node("Mul", f"{scope}/act/Mul", x, gate)

    def dfl(self, box: str, bins: int) -> str:
        """Upstream's integral of box distributions, in the head `/model.5`."""
        box = self.node("Reshape", "/model.5/dfl/Reshape", box, self.tensor("bins", np.array([0, 4, bins, -1])))
        box = self.node("Transpose", "/model.5/dfl/Transpose", box, perm=[0, 2, 1, 3])
        box = self.node("Softmax", "/model.5/dfl/Softmax", box, axis=1)
        levels = self.tensor("model.5.dfl.conv.weight", np.arange(bins, dtype=np.float32).reshape(1, bins, 1, 1))
        box = self.node("Conv", "/model.5/dfl/conv/Conv", box, levels, kernel_shape=[1, 1])
        return self.node("Reshape", "/model.5/dfl/Reshape_1", box, self.tensor("sides", np.array([0, 4, -1])))

    def model(self, output: str, shape: list[int], batch: int | str = 1, opset: int = 17) -> ModelProto:
        images = helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, SIZE, SIZE])
        result = helper.make_tensor_value_info(output, TensorProto.FLOAT, [batch, *shape])
        graph = helper.make_graph(self.nodes, "test", [images], [result], self.tensors)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def _scope(path: str) -> str:
    """Torch's scope of a module: `model.5.cv2.0.1` → `/model.5/cv2.0/cv2.0.1`."""
    parts = re.findall(r"[^.]+(?:\.\d+)*", path)
    numbers = [re.findall(r"[^.]+", part) for part in parts]
    scopes = [[".".join(part[: i + 1]) for i in range(min(1, len(part) - 1), len(part))] for part in numbers]
    return "/" + "/".join(scope for group in scopes for scope in group)


def good_graph() -> ModelProto:
    """A network in which every property holds."""
    b = Builder()
    x = b.pair("images", 1 / 127, "images")
    x = b.pair(b.conv(x, "model.0", (3, 8), kernel=3), 0.05, "/model.0/act/Mul")

    pooled = b.node("AveragePool", "/model.1/AveragePool", x, kernel_shape=[2, 2], strides=[1, 1])
    pooled = b.pair(pooled, 0.04, "/model.1/AveragePool")
    pooled = b.node("MaxPool", "/model.1/MaxPool", pooled, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    pooled = b.pair(pooled, 0.04, "/model.1/MaxPool")
    pooled = b.pair(b.conv(pooled, "model.1.cv1", (8, 8)), 0.03, "/model.1/cv1/act/Mul")
    factors = b.tensor("/model.2/scales", np.array([1, 1, 2, 2], np.float32))
    up = b.node(
        "Resize", "/model.2/Resize", pooled, "", factors,
        mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip
    up = b.pair(up, 0.03, "/model.2/Resize")

    y = b.pair(b.conv(x, "model.3.cv1", (8, 8)), 0.03, "/model.3/cv1/act/Mul")
    first, second = b.node("Split", "/model.3/Split", y, outputs=2, axis=1)
    first, second = b.pair(first, 0.03, "/model.3/Split"), b.pair(second, 0.03, "/model.3/Split.1")
    z = b.pair(b.conv(second, "model.3.m.cv1", (4, 4), kernel=3), 0.02, "/model.3/m/cv1/act/Mul")
    z = b.node("Add", "/model.3/m/Add", second, b.conv(z, "model.3.m.cv2", (4, 4), kernel=3))
    z = b.pair(z, 0.03, "/model.3/m/Add")
    y = b.pair(b.node("Concat", "/model.3/Concat", first, z, axis=1), 0.03, "/model.3/Concat")
    x = b.pair(b.node("Concat", "/model.4/Concat", y, up, axis=1), 0.03, "/model.4/Concat")

    box = b.pair(b.conv(x, "model.5.cv2.0.0", (16, 8)), 0.05, "/model.5/cv2.0/cv2.0.0/act/Mul")
    box = b.conv(box, "model.5.cv2.0.1", (8, 4 * BINS), silu=False)
    score = b.pair(b.conv(x, "model.5.cv3.0.0", (16, 8)), 0.05, "/model.5/cv3.0/cv3.0.0/act/Mul")
    score = b.conv(score, "model.5.cv3.0.1", (8, CLASSES), silu=False)
    model = b.model(_decode(b, box, score), [4 + CLASSES, SIZE * SIZE])
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def _decode(b: Builder, box: str, score: str) -> str:
    joined = b.node("Concat", "/model.5/Concat", box, score, axis=1)
    flat = b.node("Reshape", "/model.5/Reshape", joined, b.tensor("flat", np.array([0, 4 * BINS + CLASSES, -1])))
    sizes = b.tensor("sizes", np.array([4 * BINS, CLASSES]))
    box, score = b.node("Split", "/model.5/Split", flat, sizes, outputs=2, axis=1)
    box = b.dfl(box, BINS)
    score = b.node("Sigmoid", "/model.5/Sigmoid", score)
    b.nodes.append(helper.make_node("Concat", [box, score], ["output0"], name="/model.5/Concat_1", axis=1))
    return "output0"


def results(model: ModelProto, *, check=True, optimize=False, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    """What a graph gives in ONNX Runtime, by default as it is written; inputs that it lacks may be among them."""
    if check:
        onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    read = {value.name for value in session.get_inputs()}
    found = session.run(names, {name: value for name, value in feeds.items() if name in read})
    return dict(zip(names, found, strict=True))


class Editor:
    """Breaks a copy of a graph."""

    def __init__(self, model: ModelProto) -> None:
        self.model = ModelProto()
        self.model.CopyFrom(model)

    def find(self, name: str) -> NodeProto:
        return next(node for node in self.model.graph.node if node.name == name)

    def set_tensor(self, name: str, value: np.ndarray) -> None:
        """Replace an initializer's value."""
        tensor = next(tensor for tensor in self.model.graph.initializer if tensor.name == name)
        tensor.CopyFrom(numpy_helper.from_array(value, name))

    def rewire(self, node: str, position: int, tensor: str) -> None:
        """Let a node read another tensor."""
        self.find(node).input[position] = tensor

    def bypass(self, pair: str) -> None:
        """Let all readers of a pair read the tensor in front of it."""
        quantizer, dequantizer = self.find(f"{pair}/QuantizeLinear"), self.find(f"{pair}/DequantizeLinear")
        self.replace_readers(dequantizer.output[0], quantizer.input[0])
        for node in (quantizer, dequantizer):
            self.model.graph.node.remove(node)

    def replace_readers(self, old: str, new: str) -> None:
        for node in self.model.graph.node:
            node.input[:] = [new if name == old else name for name in node.input]

    def insert_pair(self, tensor: str, scale: float, name: str) -> None:
        """Put a pair between a tensor and all its readers."""
        b = Builder()
        result = b.pair(tensor, scale, name)
        self.replace_readers(tensor, result)
        self._insert(tensor, b)

    def insert_node(self, kind: str, tensor: str, *more: str) -> None:
        """Put a node between a tensor and all its readers, which may read more tensors."""
        b = Builder()
        self.replace_readers(tensor, b.node(kind, f"/inserted/{kind}", tensor, *more))
        self._insert(tensor, b)

    def _insert(self, tensor: str, b: Builder) -> None:
        producers = [i for i, node in enumerate(self.model.graph.node) if tensor in node.output]
        for node in reversed(b.nodes):
            self.model.graph.node.insert(producers[0] + 1 if producers else 0, node)
        self.model.graph.initializer.extend(b.tensors)
