"""Quantized networks as the exporter writes them, small and of any shape: their results are exact in any order."""

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper
from qdq_graph import SIZE, Builder, results

from utils.onnx_graph.verify import verify
from utils.onnx_graph.view import GraphView, attribute, overwrite


def run(model: ModelProto, batch: int = 2) -> np.ndarray:
    images = np.random.default_rng(1).random((batch, 3, SIZE, SIZE), dtype=np.float32)
    return results(model, check=False, images=images)["output0"]


def assert_same(result: ModelProto, model: ModelProto, batch: int = 2) -> None:
    """A pass's result is valid, and has the same results and properties as before."""
    onnx.checker.check_model(result, full_check=True)
    np.testing.assert_array_equal(run(result, batch), run(model, batch))
    assert verify(result).ok == verify(model).ok


class Network(Builder):
    """Blocks with quantizers as the exporter places them."""

    def convolve(self, x: str, path: str, channels: tuple[int, int], kernel: int = 1) -> str:
        return self.pair(self.conv(x, path, channels, kernel=kernel), 0.05, f"/{path}/act/Mul")

    def quantized(self, kind: str, name: str, *inputs: str, **attributes: object) -> str:
        return self.pair(self.node(kind, name, *inputs, **attributes), 0.05, name)

    def finish(self, x: str, channels: int, batch: int | str = "batch") -> ModelProto:
        x = self.conv(x, "last", (channels, 5), silu=False)
        self.nodes.append(helper.make_node("Flatten", [x], ["output0"], name="/Flatten"))
        model = self.model("output0", [None], batch=batch)
        exact = {}  # sums of few multiples of powers of two: the same in any order
        for tensor in model.graph.initializer:
            value = numpy_helper.to_array(tensor)
            if tensor.name.endswith("/scale"):
                exact[tensor.name] = np.full_like(value, 2.0 ** (-7 if value.ndim else -5))
            elif tensor.name.endswith("bias"):
                exact[tensor.name] = np.round(value * 1024) / np.float32(1024)
        overwrite(model, exact)
        return model


def block(parts: int) -> ModelProto:
    """An ELAN block with parts of so many channels: `concat(y, c, d)`, where c is computed from y's second half."""
    b = Network()
    x = b.pair("images", 1 / 127, "images")
    y = b.convolve(x, "cv1", (3, 2 * parts), kernel=3)
    _, half = b.node("Split", "/Split", y, outputs=2, axis=1)
    half = b.pair(half, 0.05, "/Split.1")
    c = b.convolve(half, "cv2", (parts, parts), kernel=3)
    c = b.quantized("Add", "/Add", half, c)
    d = b.convolve(c, "cv3", (parts, parts), kernel=3)
    d = b.quantized("MaxPool", "/MaxPool", d, kernel_shape=[3, 3], pads=[1] * 4)
    x = b.quantized("Concat", "/Concat", y, c, d, axis=1)
    return b.finish(x, 4 * parts)


def nodes(model: ModelProto, kind: str) -> list[NodeProto]:
    return [node for node in model.graph.node if node.op_type == kind]


def one_scale_for_all_weights(model: ModelProto) -> None:
    names = {name for node in nodes(model, "QuantizeLinear") if attribute(node, "axis") == 0 for name in node.input[1:]}
    view = GraphView(model)
    overwrite(model, {name: view.constant(name).flat[0].reshape(()) for name in names})
