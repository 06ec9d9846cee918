#!/usr/bin/env python3
"""Detect objects with YOLOv9 by TensorRT or OpenVINO, NumPy and OpenCV: no torch, nothing of this project.

    pip install numpy "opencv-python-headless>=4.8" cuda-python    # and TensorRT: JetPack's, or pip install tensorrt
    python detect.py yolov9-c-int8.engine images/ --output drawn   # a folder of images, an image, or a video

Without an NVIDIA GPU, OpenVINO runs an ONNX file instead of an engine; it needs `pip install openvino` and no TensorRT.
Copy this file into your product, which needs `Detector`, or `OpenVinoDetector` for an ONNX file. Class names are those
in the ONNX file, or in ENGINE.json, which scripts/build_engine.py writes. Masks of a segmentation network are left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cv2
import numpy as np

trt: Any = None
with suppress(ImportError):  # ONNX files need neither
    try:
        import tensorrt as trt
    except ImportError:
        import tensorrt_lean as trt  # it runs engines that were built with --version-compatible
    try:
        from cuda.bindings import runtime as cudart  # cuda-python from 12.6 on
    except ImportError:
        from cuda import cudart

DTYPES = {"FLOAT": np.float32, "HALF": np.float16, "UINT8": np.uint8, "INT32": np.int32, "INT64": np.int64}


class Detector:
    """An engine on a GPU, for one image at a time, at the size that it was optimised for; `names` are its classes'."""

    def __init__(self, path: str | Path, conf: float = 0.25, iou: float = 0.45, device: int = 0) -> None:
        """Load an engine on the GPU with this number; `conf` is the least score, `iou` the largest IoU that NMS keeps.

        An engine with NMS inside has an `iou` of its own, and finds nothing below its own `conf`. Raises OSError or
        ValueError if a file cannot be read, or does not fit this machine.
        """
        if trt is None:
            raise RuntimeError(f"{path} needs TensorRT and cuda-python; an .onnx file needs openvino alone")
        content = Path(path).read_bytes()
        note = Path(f"{path}.json")
        about = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {"metadata": {}}
        self.names = class_names(about["metadata"])
        self.conf = conf
        self.iou = iou
        _cuda(cudart.cudaSetDevice(device))
        self._stream = _cuda(cudart.cudaStreamCreate())
        self._logger = trt.Logger(trt.Logger.WARNING)
        if hasattr(trt, "init_libnvinfer_plugins"):  # EfficientNMS; the lean runtime has none
            trt.init_libnvinfer_plugins(self._logger, "")
        self._engine = trt.Runtime(self._logger).deserialize_cuda_engine(content)
        if self._engine is None:
            raise ValueError(f"{path} is not an engine of TensorRT {trt.__version__} for this GPU; build it again here")
        if about.get("options", {}).get("strip_weights"):
            self._read_weights(path, Path(path).with_name(Path(about["onnx"]).name))
        self._context = self._engine.create_execution_context()
        self._allocate(path)

    def _read_weights(self, path: str | Path, onnx: Path) -> None:
        """Add the weights of the ONNX file to an engine without weights."""
        refitter = trt.Refitter(self._engine, self._logger)
        parser = trt.OnnxParserRefitter(refitter, self._logger)
        if not (parser.refit_from_file(str(onnx)) and refitter.refit_cuda_engine()):
            raise ValueError(f"{path} has no weights (--strip-weights), and those of {onnx} do not fit")

    def _allocate(self, path: str | Path) -> None:
        """Fix the shape of the input, and allocate memory for each tensor on the host and on the GPU."""
        engine = self._engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        if "num_dets" not in names and "output0" not in names:
            raise ValueError(f"{path} has {', '.join(names)}; expected an engine of a file of export_qat.py")
        self._input = next(name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT)
        shape = tuple(engine.get_tensor_shape(self._input))
        if -1 in shape:
            smallest, best, _ = engine.get_tensor_profile_shape(self._input, 0)
            shape = (smallest[0], *best[1:])
        self._context.set_input_shape(self._input, shape)
        self._set_form(shape)
        self._host = {}
        self._device = {}
        for name in names:
            dtype = DTYPES[engine.get_tensor_dtype(name).name]
            array = np.zeros(tuple(self._context.get_tensor_shape(name)), dtype)
            address = int(_cuda(cudart.cudaMalloc(array.nbytes)))
            self._context.set_tensor_address(name, address)
            self._host[name] = array
            self._device[name] = address

    def _set_form(self, shape: Sequence[int]) -> None:
        """Read height and width, the order of axes, and whether images are grey, from the shape of the input."""
        self._nhwc = shape[3] in (1, 3)
        self._grey = 1 in (shape[1], shape[3])
        self.size = (shape[1], shape[2]) if self._nhwc else (shape[2], shape[3])

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """Detect in uint8 BGR `[H, W, 3]`; float32 `[n, 6]`: x1, y1, x2, y2 in its pixels, score, class, sorted."""
        pixels, ratio, corner = letterbox(image, self.size)
        outputs = self.infer(pixels)
        rows = self._read_detections(outputs) if "num_dets" in outputs else self._suppress(outputs)
        boxes = (rows[:, :4] - np.tile(corner, 2)) / np.tile(ratio, 2)
        rows[:, :4] = boxes.clip(0, np.tile(image.shape[1::-1], 2))
        return nms(rows, 0.45, np.zeros(len(rows)))  # boxes of several classes at one place are one object

    def infer(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """Run the network on a letterboxed image, uint8 RGB `[H, W, 3]`; outputs by name, without the batch's axis."""
        feed = self._feed(pixels)
        upload = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        download = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        _cuda(cudart.cudaMemcpyAsync(self._device[self._input], feed.ctypes.data, feed.nbytes, upload, self._stream))
        if not self._context.execute_async_v3(int(self._stream)):
            raise RuntimeError("TensorRT could not run the engine; its log says why")
        outputs = {name: array for name, array in self._host.items() if name != self._input}
        for name, array in outputs.items():
            address = self._device[name]
            _cuda(cudart.cudaMemcpyAsync(array.ctypes.data, address, array.nbytes, download, self._stream))
        _cuda(cudart.cudaStreamSynchronize(self._stream))
        return {name: array[0] for name, array in outputs.items()}

    def _feed(self, pixels: np.ndarray) -> np.ndarray:
        """Write a letterboxed image into the memory of the input, in the input's form."""
        feed = self._host[self._input]
        if self._grey:
            pixels = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)[..., None]
        if not self._nhwc:
            pixels = pixels.transpose(2, 0, 1)
        feed[:] = pixels  # the same for each image of a static batch
        if feed.dtype != np.uint8:
            feed /= 255
        return feed

    def _read_detections(self, outputs: dict[str, np.ndarray]) -> np.ndarray:
        """Rows of x1, y1, x2, y2 in pixels of the input, score and class, of an engine with NMS inside."""
        count = int(outputs["num_dets"][0])
        columns = (outputs["det_boxes"], outputs["det_scores"], outputs["det_classes"])
        rows = np.column_stack(columns).astype(np.float32)[:count]
        return rows[rows[:, 4] > self.conf]

    def _suppress(self, outputs: dict[str, np.ndarray]) -> np.ndarray:
        """Rows as in `_read_detections`, from raw predictions `[4 + classes + masks, anchors]`; NMS is by class."""
        raw: np.ndarray = outputs["output0"].astype(np.float32)
        prototypes = [array for array in outputs.values() if array.ndim == 3]  # of a segmentation network
        masks = len(prototypes[0]) if prototypes else 0
        middle = raw[:2].T
        half = raw[2:4].T / 2
        scores = raw[4 : len(raw) - masks].T
        anchor, label = np.nonzero(scores > self.conf)  # a box counts for each class that it may be
        corners = (middle[anchor] - half[anchor], middle[anchor] + half[anchor])
        rows = np.column_stack([*corners, scores[anchor, label], label]).astype(np.float32)
        return nms(rows, self.iou, label)


class OpenVinoDetector(Detector):
    """An ONNX file in OpenVINO; all else as `Detector`."""

    def __init__(self, path: str | Path, conf: float = 0.25, iou: float = 0.45, device: str = "CPU") -> None:
        """Load a file on OpenVINO's CPU, GPU or NPU; thresholds as of `Detector`. Raises RuntimeError or ValueError."""
        import openvino

        core = openvino.Core()
        network = core.read_model(str(path))
        about = {}
        for key in ("names", "imgsz", "target"):
            if network.has_rt_info(["framework", key]):
                about[key] = network.get_rt_info(["framework", key]).value
        self.names = class_names(about)
        self.conf = conf
        self.iou = iou
        self._outputs = [output.any_name for output in network.outputs]
        if "num_dets" not in self._outputs and "output0" not in self._outputs:
            raise ValueError(f"{path} has {', '.join(self._outputs)}; expected a file of export_qat.py")
        is_int8 = any(operation.get_type_name() == "FakeQuantize" for operation in network.get_ops())
        if is_int8 and device == "CPU" and about.get("target") != "openvino-avx2" and lacks_vnni():
            advice = "export it with export_qat.py --target openvino-avx2"
            print(f"warning: this CPU has no VNNI, so {path} gives wrong detections; {advice}", file=sys.stderr)
        image = network.inputs[0]
        shape = self._fixed_shape(image, json.loads(about.get("imgsz", "[640, 640]")))
        self._set_form(shape)
        self._input = image.any_name
        self._host = {self._input: np.zeros(shape, image.element_type.to_dtype())}
        network.reshape(shape)
        settings = {"PERFORMANCE_HINT": "LATENCY"}
        if device == "CPU":
            settings["INFERENCE_PRECISION_HINT"] = "f32"  # of layers that are not INT8; some CPUs would take BF16
        self._request = core.compile_model(network, device, settings).create_infer_request()

    @staticmethod
    def _fixed_shape(image: Any, size: Sequence[int]) -> list[int]:
        """The shape of the input, for one image of (height, width) `size` where it is dynamic."""
        shape = [dimension.get_length() if dimension.is_static else 0 for dimension in image.partial_shape]
        height, width = size
        default = (1, height, width, 0) if shape[3] in (1, 3) else (1, 0, height, width)
        return [own or other for own, other in zip(shape, default, strict=True)]

    def infer(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """See `Detector.infer`."""
        self._request.infer({self._input: self._feed(pixels)})
        return {name: self._request.get_tensor(name).data[0] for name in self._outputs}


def class_names(metadata: dict[str, str]) -> dict[int, str]:
    """Names of the classes by id."""
    return {int(key): name for key, name in json.loads(metadata.get("names", "{}")).items()}


def lacks_vnni(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this is an x86 CPU whose 8-bit products overflow; False if the system does not tell."""
    if platform.machine().lower() not in ("x86_64", "amd64") or not cpuinfo.is_file():
        return False
    return not {"avx512_vnni", "avx_vnni"} & set(cpuinfo.read_text(encoding="utf-8").split())


def letterbox(image: np.ndarray, size: tuple[int, int]) -> tuple[np.ndarray, tuple[float, float], tuple[float, float]]:
    """Fit an image into the input as in training and evaluation: its aspect ratio stays, grey is around it.

    Returns uint8 RGB `[*size, 3]`, the ratios of width and height, and x and y of the image's corner in the input.
    """
    height, width = image.shape[:2]
    ratio = min(size[0] / height, size[1] / width)
    new_height = max(int(height * ratio), 1)
    new_width = max(int(width * ratio), 1)
    interpolation = cv2.INTER_LINEAR if ratio > 1 else cv2.INTER_AREA
    image = cv2.resize(image, (new_width, new_height), interpolation=interpolation)
    x = (size[1] - new_width) / 2
    y = (size[0] - new_height) / 2
    left = round(x - 0.1)
    top = round(y - 0.1)
    canvas = np.full((*size, 3), 114, np.uint8)
    canvas[top : top + new_height, left : left + new_width] = image[..., ::-1]
    return canvas, (new_width / width, new_height / height), (x, y)


def nms(rows: np.ndarray, iou: float, classes: np.ndarray) -> np.ndarray:
    """The best 300 rows, sorted, without boxes that overlap a better one of their class by more than `iou`."""
    boxes = np.column_stack([rows[:, :2], rows[:, 2:4] - rows[:, :2]])  # x, y, width, height
    labels = classes.astype(int).tolist()
    indices = cv2.dnn.NMSBoxesBatched(boxes.tolist(), rows[:, 4].tolist(), labels, 0.0, iou)
    return rows[np.array(indices, int).reshape(-1)[:300]]  # an empty tuple if there is no box


def draw(image: np.ndarray, rows: np.ndarray, names: dict[int, str]) -> np.ndarray:
    """Return a copy of an image with boxes, names and scores."""
    image = image.copy()
    for *box, score, label in rows.tolist():
        x1, y1, x2, y2 = map(round, box)
        colour = np.random.default_rng(int(label)).integers(0, 200, 3).tolist()
        cv2.rectangle(image, (x1, y1), (x2, y2), colour, 2)
        text = f"{names.get(int(label), int(label))} {score:.2f}"
        cv2.putText(image, text, (x1, max(y1 - 4, 12)), cv2.FONT_HERSHEY_SIMPLEX, 0.5, colour, 1, cv2.LINE_AA)
    return image


def draw_video(detector: Detector, source: Path, target: Path) -> None:
    """Write a video with the detections in each frame."""
    video = cv2.VideoCapture(str(source))
    _, frame = video.read()
    if frame is None:
        raise ValueError(f"{source} cannot be read as an image or a video")
    rate = video.get(cv2.CAP_PROP_FPS) or 25
    writer = cv2.VideoWriter(str(target), cv2.VideoWriter.fourcc(*"mp4v"), rate, frame.shape[1::-1])
    while frame is not None:
        writer.write(draw(frame, detector(frame), detector.names))
        _, frame = video.read()
    writer.release()


def draw_image(detector: Detector, source: Path, image: np.ndarray, target: Path) -> None:
    """Write an image with its detections."""
    if target.resolve() == source.resolve():
        raise ValueError(f"{source} would be overwritten; choose another --output")
    rows = detector(image)
    if not cv2.imwrite(str(target), draw(image, rows, detector.names)):
        raise OSError(f"{target} cannot be written")
    print(f"{target}: {len(rows)} objects")


def _cuda(answer: tuple[Any, ...]) -> Any:
    """Return the value that a function of the CUDA runtime gives behind its error code."""
    error, *values = answer
    if int(error):
        raise RuntimeError(f"CUDA: {cudart.cudaGetErrorString(error)[1].decode()}")
    return values[0] if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("network", type=Path, help="an engine, or an ONNX file for OpenVINO")
    parser.add_argument("source", type=Path, help="a folder of images, an image, or a video")
    parser.add_argument("--output", type=Path, default=Path("drawn"), help="folder (default: drawn)")
    parser.add_argument("--conf", type=float, default=0.25, help="least score (default: 0.25)")
    parser.add_argument("--iou", type=float, default=0.45, help="IoU of NMS (default: 0.45)")
    args = parser.parse_args()
    kind = OpenVinoDetector if args.network.suffix == ".onnx" else Detector
    detector = kind(args.network, args.conf, args.iou)
    args.output.mkdir(parents=True, exist_ok=True)
    paths = sorted(args.source.iterdir()) if args.source.is_dir() else [args.source]
    for path in paths:
        image = cv2.imread(str(path))
        if image is not None:
            draw_image(detector, path, image, args.output / path.name)
        elif path == args.source:
            draw_video(detector, path, args.output / f"{path.stem}.mp4")
        else:
            print(f"{path} cannot be read as an image")


if __name__ == "__main__":
    try:
        main()
    except (ImportError, OSError, RuntimeError, ValueError, cv2.error) as error:
        raise SystemExit(f"error: {error}") from None
