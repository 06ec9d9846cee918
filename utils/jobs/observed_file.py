"""What an exported file computes in ONNX Runtime, and what its form makes that of."""

from __future__ import annotations

import numpy as np
import torch
from onnx import ModelProto, TensorProto, helper
from torch import Tensor

from utils.core.errors import DependencyError
from utils.core.tasks import Task
from utils.jobs.check_images import pixels
from utils.jobs.compare_detections import BehindPlugin
from utils.onnx_graph.decoding import ANCHORS
from utils.onnx_graph.input_forms import input_form
from utils.onnx_graph.output_formats import PLUGIN
from utils.onnx_graph.view import drop_unused
from utils.runners.base import as_feed
from utils.runners.onnxrt import open_session


class ObservedFile:
    """A graph in ONNX Runtime that also gives its predictions, whatever its form; TensorRT's plugin is left out.

    Attributes:
        batch: the static batch size, 0 if it is dynamic.
        form: in which it takes images.
        behind_plugin: what makes masks of what the plugin keeps; None where there is no plugin, or no masks.

    Raises:
        DependencyError: ONNX Runtime is not installed.
    """

    def __init__(self, graph: ModelProto, task: Task) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise DependencyError("--check needs ONNX Runtime: pip install onnxruntime, or --check 0") from error
        self.batch = graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value
        self.form = input_form(graph)
        self._input = graph.graph.input[0].name
        observed, self._names = _observed(graph, task)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self._session = open_session(observed.SerializeToString(), options, ["CPUExecutionProvider"])
        masked = "plugin boxes" in self._names and task.prototypes in self._names
        self.behind_plugin = BehindPlugin(graph, options) if masked else None

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Results by name, the predictions among them, for images `[B, 3, H, W]` in 0..1."""
        values = self._session.run(list(self._names.values()), {self._input: self.feed(images)})
        return {name: torch.from_numpy(value) for name, value in zip(self._names, values, strict=True)}

    def feed(self, images: Tensor) -> np.ndarray:
        """What the file takes for images `[B, 3, H, W]` in 0..1."""
        if self.form.kind != "float":
            images = as_feed(pixels(images), self.form, "uint8")
        return np.ascontiguousarray(images.numpy())


def _observed(graph: ModelProto, task: Task) -> tuple[ModelProto, dict[str, str]]:
    """The graph with its predictions among its outputs, and what a result is called here → in the graph."""
    result = ModelProto()
    result.CopyFrom(graph)
    plugin = next((node for node in result.graph.node if node.op_type == PLUGIN), None)
    names = {value.name: value.name for value in result.graph.output}
    if plugin is not None:
        names = {"plugin boxes": plugin.input[0], "plugin scores": plugin.input[1]}
        result.graph.node.remove(plugin)
        del result.graph.output[:]
    written = {name for node in result.graph.node for name in node.output}
    names |= {name: name for name in (*task.outputs, ANCHORS) if name in written}
    present = {value.name for value in result.graph.output}
    for name in (name for name in names.values() if name not in present):
        kind = TensorProto.INT64 if name == ANCHORS else TensorProto.FLOAT
        result.graph.output.append(helper.make_tensor_value_info(name, kind, None))
    drop_unused(result)
    return result, names
