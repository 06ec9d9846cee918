"""A small ONNX file as export_qat.py writes them: an image's pixels decide where its boxes are, and what they score.

Each cell of 8 × 8 pixels has a box around it and a score for each class; with masks it has coefficients, too, and there
are prototypes on a grid of a quarter of the input's size.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from utils.core.input_spec import InputSpec
from utils.onnx_graph.output_formats import OutputFormat, plain
from utils.onnx_graph.passes.take_bytes import take_bytes
from utils.onnx_graph.view import set_metadata
from utils.trt.engine_file import EngineNote
from utils.trt.onnx_file import OnnxFile

HEIGHT, WIDTH, CELL = 64, 96, 8
NAMES = ("cat", 'a "dog"\\', "uhu ü")
MASKS = 4


def write_boxes(
    path: Path, form: OutputFormat | None = None, *, batch: int | str = "batch", masks: bool = False,
    classes: Sequence[str] = NAMES, takes: InputSpec | None = None, quantized: bool = False,
    **metadata: str,
) -> Path:  # fmt: skip
    """Write the file, in a form of output and of input."""
    form, takes = form or plain(), takes or InputSpec()
    graph = boxes_graph(len(classes), batch, MASKS if masks else 0, quantized=quantized)
    about = {
        "names": json.dumps(dict(enumerate(classes))), "stride": "8", "imgsz": json.dumps([HEIGHT, WIDTH]),
        "task": "segment" if masks else "detect",
    }  # fmt: skip
    graph = form.attach(set_metadata(graph, about | metadata))
    graph = take_bytes(graph, takes)
    onnx.save(set_metadata(graph, {"form": form.name, **takes.metadata()}), path)
    return path


def boxes_graph(nc: int, batch: int | str, nm: int = 0, *, quantized: bool = False) -> onnx.ModelProto:
    """Images `[batch, 3, 64, 96]` → `output0 [batch, 4 + nc + nm, 96]`, and `output1 [batch, nm, 16, 24]`."""
    rng = np.random.default_rng(7)
    rows, columns = HEIGHT // CELL, WIDTH // CELL
    y, x = np.mgrid[:rows, :columns].reshape(2, -1).astype(np.float32) * CELL + CELL / 2
    constants = {
        "weight": rng.normal(0, 0.3, (4 + nc + nm, 3, CELL, CELL)).astype(np.float32),
        "bias": np.concatenate([np.zeros(4), np.full(nc, -0.5), np.zeros(nm)]).astype(np.float32),
        "flat": np.array([0, 0, -1], np.int64), "parts": np.array([2, 2, nc, nm][: 4 if nm else 3], np.int64),
        "middle": np.stack([x, y])[None], "half": np.array(0.5, np.float32), "shift": np.array(20, np.float32),
        "size": np.array(36, np.float32), "least": np.array(4, np.float32),
    }  # fmt: skip
    node = helper.make_node
    nodes, source = [], "images"
    if quantized:
        constants |= {"scale": np.array(1 / 127, np.float32), "zero": np.array(0, np.int8)}
        nodes = [node("QuantizeLinear", ["images", "scale", "zero"], ["levels"]),
                 node("DequantizeLinear", ["levels", "scale", "zero"], ["rounded"])]  # fmt: skip
        source = "rounded"
    kinds = ["place", "extent", "class", "coefficients"][: 4 if nm else 3]
    nodes += [
        node("Conv", [source, "weight", "bias"], ["map"], strides=[CELL, CELL], kernel_shape=[CELL, CELL]),
        node("Reshape", ["map", "flat"], ["cells"]), node("Split", ["cells", "parts"], kinds, axis=1),
        *(node("Sigmoid", [kind], [f"{kind}/share"]) for kind in kinds[:3]),
        node("Sub", ["place/share", "half"], ["offset"]), node("Mul", ["offset", "shift"], ["moved"]),
        node("Add", ["moved", "middle"], ["centre"]), node("Mul", ["extent/share", "size"], ["grown"]),
        node("Add", ["grown", "least"], ["sides"]),
        node("Concat", ["centre", "sides", "class/share", *kinds[3:]], ["output0"], axis=1),
    ]  # fmt: skip
    shapes = {"output0": [batch, 4 + nc + nm, rows * columns]}
    if nm:
        constants["kernel"] = rng.normal(0, 0.6, (nm, 3, 4, 4)).astype(np.float32)
        nodes.append(node("Conv", [source, "kernel"], ["output1"], strides=[4, 4], kernel_shape=[4, 4]))
        shapes["output1"] = [batch, nm, HEIGHT // 4, WIDTH // 4]
    for number, one in enumerate(nodes):
        one.name = f"/boxes/{one.op_type}_{number}"
    graph = helper.make_graph(
        nodes, "boxes", [helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, HEIGHT, WIDTH])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


SHAPES = {"images": ((1, 3, 64, 96), (8, 3, 64, 96), (16, 3, 64, 96))}


def write_engine(path: Path, onnx_file: Path, shapes=SHAPES, **more) -> Path:
    """A file and the note of an engine that build_engine.py would have built."""
    file = OnnxFile.read(onnx_file)
    path.write_bytes(b"a plan")
    note = EngineNote(
        onnx=str(onnx_file), api="TensorRT 10.13.0", gpu="Fake GPU", precision="fp16", metadata=dict(file.metadata),
        profile={name: [list(shape) for shape in three] for name, three in shapes.items()},
        tensors=file.tensors,
    )  # fmt: skip
    replace(note, **more).save(path)
    return path
