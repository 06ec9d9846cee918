"""INT8 files of an FP32 network by NNCF and by ONNX Runtime, for cpu.py to compare with; each with its defaults.

Peers also quantize the decoding of boxes and scores, which costs AP; so both are also measured with it in FP32.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, NodeProto
from torch import Tensor

from utils.core.errors import DependencyError
from utils.core.files import atomic_path, read_onnx
from utils.onnx_graph.view import GraphView
from utils.runners.base import as_feed
from utils.runners.onnxrt import OnnxRuntimeRunner
from utils.runners.openvino import OpenVinoRunner, Precision

# Neither is installed by install_dependencies.sh.
NNCF = "NNCF is not installed: pip install nncf, or leave it out by --peers"
ONNX_RUNTIME = "ONNX Runtime is not installed: pip install onnxruntime, or leave it out by --peers"


@dataclass(frozen=True)
class Images:
    """Calibration images: letterboxed, uint8 `[1, 3, H, W]` each, and the FP32 file that takes them."""

    images: Sequence[Tensor]
    file: Path

    def feeds(self) -> Iterator[dict[str, Any]]:
        """Yield the feed of each image: the input's name and a NumPy array."""
        with OnnxRuntimeRunner(self.file) as runner:
            form, spec = runner.input_spec, runner.inputs[0]
        for image in self.images:
            yield {spec.name: as_feed(image, form, spec.dtype).numpy()}


@dataclass(frozen=True)
class Peer:
    """A way to quantize.

    Attributes:
        name: of the peer, in tables.
        file: name of its file in the folder of results.
        settings: its settings, in words.
        quantize: quantizes the FP32 file of `Images` with its images, and writes the result to a path.
    """

    name: str
    file: str
    settings: str
    quantize: Callable[[Images, Path], None]


def decoding_nodes(model: ModelProto) -> list[NodeProto]:
    """The nodes that decode boxes and scores from the results of the last convolutions; DFL's convolution is one."""
    view = GraphView(model)
    softmax = [node.output[0] for node in view.of_type("Softmax")]
    behind = view.downstream(softmax)
    nodes: dict[str, NodeProto] = {}  # by first output
    names = [output.name for output in model.graph.output]
    while names:
        node = view.producer(names.pop())
        if node is None or node.output[0] in nodes:
            continue
        if node.op_type == "Conv" and node.output[0] not in behind:
            continue
        nodes[node.output[0]] = node
        names += node.input
    return list(nodes.values())


def quantize_nncf(preset: str, scoped: bool, images: Images, output: Path) -> None:
    """Write OpenVINO's .xml and .bin of the FP32 file, quantized by `nncf.quantize`.

    Raises:
        DependencyError: NNCF is not installed.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # NNCF then sends nothing
    try:
        import nncf
    except ImportError as error:
        raise DependencyError(f"{NNCF} ({error})") from error
    import openvino

    network = openvino.Core().read_model(images.file)
    feeds = list(images.feeds())
    network.reshape({name: list(array.shape) for name, array in feeds[0].items()})
    options: dict[str, Any] = {}
    if scoped:
        nodes = decoding_nodes(read_onnx(images.file))
        names = {name for node in nodes for name in (node.name, *node.output)}
        operation_names = {operation.get_friendly_name() for operation in network.get_ops()}
        options["ignored_scope"] = nncf.IgnoredScope(names=sorted(names & operation_names))
    quantized = nncf.quantize(
        network,
        nncf.Dataset(feeds),
        preset=nncf.QuantizationPreset[preset],
        subset_size=len(feeds),
        target_device=nncf.TargetDevice.CPU,
        **options,
    )
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        part = Path(folder, output.name)
        openvino.save_model(quantized, part, compress_to_fp16=False)
        part.with_suffix(".bin").replace(output.with_suffix(".bin"))
        part.replace(output)  # last: a file that is there is complete


def quantize_static(reduce_range: bool, scoped: bool, images: Images, output: Path) -> None:
    """Write the FP32 file, quantized by ONNX Runtime's `quantize_static` after its own preparation.

    Args:
        reduce_range: weights of 7 bits, as ONNX Runtime's documentation has it for x86 without VNNI.

    Raises:
        DependencyError: ONNX Runtime is not installed.
    """
    try:
        from onnxruntime import quantization
        from onnxruntime.quantization.shape_inference import quant_pre_process
    except ImportError as error:
        raise DependencyError(f"{ONNX_RUNTIME} ({error})") from error

    class Reader(quantization.CalibrationDataReader):
        """Gives images one by one."""

        def __init__(self) -> None:
            self.feeds = images.feeds()

        def get_next(self) -> dict[str, Any] | None:
            """The next image; None at the end."""
            return next(self.feeds, None)

    with tempfile.TemporaryDirectory(dir=output.parent) as folder, atomic_path(output) as part:
        prepared = Path(folder, "prepared.onnx")
        quant_pre_process(images.file, prepared, skip_symbolic_shape=True)
        excluded = [node.name for node in decoding_nodes(read_onnx(prepared))] if scoped else []
        quantization.quantize_static(
            prepared,
            part,
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            reduce_range=reduce_range,
            nodes_to_exclude=excluded,
        )
        quantized = onnx.load(part)
        del quantized.metadata_props[:]
        quantized.metadata_props.extend(read_onnx(images.file).metadata_props)
        onnx.save(quantized, part)


class IrRunner(OpenVinoRunner):
    """Runs OpenVINO's own file of a network; inputs and outputs get the names in the FP32 .onnx, in its order."""

    def __init__(self, path: Path, model: ModelProto, *, precision: Precision, threads: int | None = None) -> None:
        super().__init__(path, model, "CPU", precision=precision, threads=threads, note=f"weights of {path.name}")
        self._network = self._core.read_model(path)
        for ports, specs in ((self._network.inputs, self.inputs), (self._network.outputs, self.outputs)):
            for port, spec in zip(ports, specs, strict=True):
                port.get_tensor().set_names({spec.name})


def open_ir(path: Path, float_file: Path, precision: Precision, threads: int | None = None) -> IrRunner:
    """Open OpenVINO's own file of a network; names, shapes and metadata come from the FP32 file."""
    return IrRunner(path, read_onnx(float_file), precision=precision, threads=threads)


def peers(bits: int) -> dict[str, Peer]:
    """All peers, by their names in `--peers`; ONNX Runtime's weights have `bits` bits, 7 or 8."""
    scope = ", what follows the last convolutions in FP32"
    by_nncf = "nncf.quantize, defaults, preset"
    by_runtime = f"quantize_static, QDQ, per channel, MinMax, weights of {bits} bits"
    mixed, mixed_scoped = partial(quantize_nncf, "MIXED", False), partial(quantize_nncf, "MIXED", True)
    performance = partial(quantize_nncf, "PERFORMANCE", False)
    static, static_scoped = (partial(quantize_static, bits == 7, scoped) for scoped in (False, True))
    of_nncf = (
        ("nncf-mixed", ".xml", "NNCF MIXED", f"{by_nncf} MIXED", mixed),
        ("nncf-performance", ".xml", "NNCF PERFORMANCE", f"{by_nncf} PERFORMANCE", performance),
        ("nncf-mixed-scoped", ".xml", "NNCF MIXED, decoding in FP32", f"{by_nncf} MIXED{scope}", mixed_scoped),
    )
    of_runtime = (
        ("onnxruntime", f"-{bits}bits.onnx", "quantize_static", by_runtime, static),
        (
            "onnxruntime-scoped",
            f"-{bits}bits.onnx",
            "quantize_static, decoding in FP32",
            f"{by_runtime}{scope}",
            static_scoped,
        ),
    )
    rows = (*of_nncf, *of_runtime)
    return {word: Peer(name, f"{word}{ending}", settings, quantize) for word, ending, name, settings, quantize in rows}


PEERS = tuple(peers(8))
