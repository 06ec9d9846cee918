"""The files that DeepStream wants beside a network: class names, nvinfer's configuration and nvinferserver's.

nvinfer's configuration assumes the parser of DeepStream-Yolo since its version for DeepStream 7.1 or, of a segmentation
network, of DeepStream-Yolo-Seg (https://github.com/marcoslucianops), whose rows are x1, y1, x2, y2, score, class and
perhaps a mask. Those of an end-to-end file assume https://github.com/levipereira/nvdsinfer_yolo. nvinfer's names an
engine that trtexec has built: nvinfer would build a quantized network in FP16. Of an FP32 network nvinfer may build
one, by DeepStream-Yolo's builder or its own.
Keys: https://docs.nvidia.com/metropolis/deepstream/dev-guide/text/DS_plugin_gst-nvinfer.html, and nvinferserver's in
https://github.com/NVIDIA/DeepStream/tree/main/includes (nvdsinferserver_*.proto).
"""

from __future__ import annotations

import itertools
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from utils.core.errors import InputError
from utils.core.files import write_text
from utils.core.input_spec import DEFAULT_BATCH
from utils.core.tasks import DISPLAY_CONF, DISPLAY_IOU, IMAGES
from utils.onnx_graph.output_formats import NmsSettings

logger = logging.getLogger(__name__)

LABELS = "labels.txt"
CONFIG = "config_infer_primary_yoloV9.txt"
SERVER = "config_inferserver_primary_yoloV9.txt"
SCALE = repr(1 / 255)
INT8, FP16 = 1, 2  # of nvinfer's network-mode
TRTEXEC_FLAGS = {  # by typing; '' for an FP32 network
    "": (["--fp16"], "TensorRT up to 10"),
    "weak": (["--int8", "--fp16"], "TensorRT up to 10.11"),
    "strong": (["--stronglyTyped"], "TensorRT 10.12 and later; 11 needs no --stronglyTyped"),
}
PREBUILT = """\
# An engine that is built here, in the folder of this file, by the TensorRT of this DeepStream ({which}):
#   {trtexec}
# There is no onnx-file: where nvinfer cannot use the engine (other TensorRT or GPU, smaller batch) it then stops, and
# does not build one in FP16 or FP32 by itself.
"""
QUANTIZED = "# 1: INT8. The ranges are in the ONNX file, so there is no calibration file."
FLOAT = """\
# Of the engine, whatever the types in the ONNX file. 0: FP32, 2: FP16. 1 (INT8) needs a calibration file for this
# network, which is not quantized."""
COMPILED = "nvdsinfer_custom_impl_{0}/libnvdsinfer_custom_impl_{0}.so"
INSTALLED = "/opt/nvidia/deepstream/deepstream/lib/libnvds_infer_yolo.so"
PARSERS = {  # by whether the file is end-to-end, and whether it has masks: whose, the function, and the library
    (False, False): ("DeepStream-Yolo, for DeepStream 7.1 or later", "NvDsInferParseYolo", COMPILED.format("Yolo")),
    (False, True): ("DeepStream-Yolo-Seg", "NvDsInferParseYoloSeg", COMPILED.format("Yolo_seg")),
    (True, False): ("nvdsinfer_yolo", "NvDsInferYoloNMS", INSTALLED),
    (True, True): ("nvdsinfer_yolo", "NvDsInferYoloMask", INSTALLED),
}
ASSUMED = """\
# {onnx} in DeepStream. Written by export_yoloV9.py; what it assumes:
#   the parser of {parser}, compiled to the library named below
#   images letterboxed in the middle, as in training, {colors}, scaled to 0..1
{nms_note}"""
TEMPLATE = """\
[property]
gpu-id=0
net-scale-factor={scale}
model-color-format={color_format}
{network}model-engine-file={engine}
labelfile-path={labels}
infer-dims={channels};{height};{width}
{batch_note}
batch-size={batch}
{mode_note}
network-mode={mode}
num-detected-classes={classes}
interval=0
gie-unique-id=1
process-mode=1
# 0: boxes, 3: instance segmentation
network-type={kind}
# 2: nvinfer's NMS, with the thresholds at the end; 4: no clustering: the file gives detections
cluster-mode={cluster}
maintain-aspect-ratio=1
symmetric-padding=1
{masks}func-name={function}
custom-lib-path={library}

[class-attrs-all]
{overlap}pre-cluster-threshold={confidence}
topk={topk}
"""
SERVED = """\
#   the model {model} in the folder model_repository beside this file, which this writes, run in the same folder:
#     python /path/to/yolov9/scripts/make_triton.py {file} --platform tensorrt_plan
infer_config {{
  unique_id: 1
  max_batch_size: {batch}  {batch_note}
  backend {{ triton {{
    model_name: "{model}"
    version: -1
    model_repo {{ root: "model_repository" strict_model_config: true }}
  }} }}
  preprocess {{
    network_format: IMAGE_FORMAT_{colors}
    tensor_order: TENSOR_ORDER_LINEAR
    tensor_name: "{images}"
    maintain_aspect_ratio: 1
    symmetric_padding: 1
    normalize {{ scale_factor: {scale} }}
  }}
  postprocess {{
    labelfile_path: "{labels}"
    detection {{
      num_detected_classes: {classes}
      custom_parse_bbox_func: "{boxes_function}"
      simple_cluster {{ threshold: {confidence} }}
    }}
  }}
  custom_lib {{ path: "{library}" }}
}}
input_control {{ process_mode: PROCESS_MODE_FULL_FRAME }}
"""
MASKS = "output-instance-mask=1\nsegmentation-threshold=0.5\nparse-bbox-instance-mask-"


def label_lines(names: Mapping[int, str]) -> str:
    """One class name a line, in the order of their ids.

    Raises:
        InputError: a name is empty, has several lines or a semicolon, at which nvinfer ends a name.
    """
    for index, name in names.items():
        if name.splitlines() != [name] or ";" in name:
            raise InputError(f"class {index} is named {name!r}; {LABELS} takes one line a class, without semicolons")
    return "".join(f"{names[index]}\n" for index in sorted(names))


def trtexec_command(
    onnx: str,
    engine: str,
    size: tuple[int, int],
    *,
    typing: str,
    dynamic: bool,
    channels: int = 3,
) -> str:
    """The command that builds the engine which the configuration names; for the arguments see `configs`."""
    height, width = size
    profile = []
    if dynamic:
        for end, batch in zip(("min", "opt", "max"), DEFAULT_BATCH, strict=True):
            profile.append(f"--{end}Shapes={IMAGES}:{batch}x{channels}x{height}x{width}")
    flags, _ = TRTEXEC_FLAGS[typing]
    return shlex.join(["trtexec", f"--onnx={onnx}", *flags, *profile, f"--saveEngine={engine}"])


def configs(
    onnx: str | Path,
    size: tuple[int, int],
    batch: int,
    classes: int,
    *,
    typing: str,
    dynamic: bool,
    engine: str = "",
    nms: NmsSettings | None = None,
    masks: bool = False,
    model: str = "",
    channels: int = 3,
) -> list[str]:
    """Nvinfer's configuration for a file, and nvinferserver's for an end-to-end file of a dynamic batch.

    Args:
        onnx: the file; the configurations are to lie beside it.
        size: height and width of the input, pixels.
        typing: weak or strong, of a quantized network; '' for a float one.
        engine: built by trtexec, which the configuration names; '': nvinfer builds one, of an FP32 network.
        nms: in the file; None where nvinfer does it.
        model: of an end-to-end file its name in a Triton model repository; '' for another file.
        channels: 3, or 1 of a network that takes grey images.
    """
    name = Path(onnx).name
    network = f"onnx-file={name}\n"
    if engine:
        command = trtexec_command(name, engine, size, typing=typing, dynamic=dynamic, channels=channels)
        network = PREBUILT.format(which=TRTEXEC_FLAGS[typing][1], trtexec=command)
    elif nms is None:  # the file name under which DeepStream-Yolo's builder saves an engine
        network += "engine-create-func-name=NvDsInferYoloCudaEngineGet\n"
        engine = f"model_b{batch}_gpu0_fp16.engine"
    else:  # nvinfer's own builder
        engine = f"{name}_b{batch}_gpu0_fp16.engine"
    parser, function, library = PARSERS[bool(model), masks]
    values: dict[str, object] = {
        "onnx": name,
        "file": shlex.quote(name),
        "engine": engine,
        "network": network,
        "batch": batch,
        "channels": channels,
        "height": size[0],
        "width": size[1],
        "classes": classes,
        "labels": LABELS,
    }
    values |= {
        "images": IMAGES,
        "scale": SCALE,
        "model": model,
        "parser": parser,
        "function": function,
        "boxes_function": PARSERS[True, False][1],
        "library": library,
        "mode": INT8 if typing else FP16,
        "mode_note": QUANTIZED if typing else FLOAT,
    }
    values["batch_note"] = "# fixed in the ONNX file"
    if dynamic:
        values["batch_note"] = f"# {DEFAULT_BATCH[0]} to {DEFAULT_BATCH[-1]}: the number of streams is a good one"
    # numbers of nvinfer's
    values |= {"color_format": 2, "colors": "GRAY"} if channels == 1 else {"color_format": 0, "colors": "RGB"}
    values |= {"kind": 3, "masks": MASKS} if masks else {"kind": 0, "masks": "parse-bbox-"}
    values |= _clustering(nms)
    texts = [(ASSUMED + TEMPLATE).format(**values)]
    if model and dynamic:  # nvinferserver knows no masks of instances
        texts.append((ASSUMED + SERVED).format(**values))
    return texts


def _clustering(nms: NmsSettings | None) -> dict[str, object]:
    """The values of the templates that depend on whether NMS is in the file."""
    if nms is None:
        return {
            "cluster": 2,
            "overlap": f"nms-iou-threshold={DISPLAY_IOU}\n",
            "confidence": DISPLAY_CONF,
            "topk": 300,
            "nms_note": "",
        }
    kinds = {"efficient": "NMS (TensorRT's plugin)", "onnx": "NMS (ONNX's operator)", "none": "Top-k, no NMS,"}
    overlap = "" if nms.kind == "none" else f", overlap {nms.iou_thres:g}"
    numbers = f"confidence {nms.conf_thres:g}{overlap}, at most {nms.topk} detections"
    return {
        "cluster": 4,
        "overlap": "",
        "confidence": nms.conf_thres,
        "topk": nms.topk,
        "nms_note": f"#   {kinds[nms.kind]} is in the ONNX file: {numbers}\n",
    }


def paths(onnx: Path) -> list[Path]:
    """Paths of the labels and the configurations of an exported file."""
    return [onnx.with_name(name) for name in (LABELS, CONFIG, SERVER)]


def check_name(name: str, flag: str = "--output") -> None:
    """Raise `InputError` if the name of the ONNX file or the engine does not fit on a line of the configuration."""
    if not name.isprintable():
        raise InputError(f"{name!r} cannot be written on a line of {CONFIG}; choose another {flag}")


def write(onnx: Path, labels: str, texts: Sequence[str]) -> list[Path]:
    """Write labels and configurations; an earlier file that differs, or is not written again, becomes NAME.bak1, ..."""
    written: list[Path] = []
    for path, text in itertools.zip_longest(paths(onnx), (labels, *texts)):
        if path.is_file() and (text is None or path.read_bytes() != text.encode()):
            _back_up(path)
        if text is not None:
            write_text(path, text)
            written.append(path)
    return written


def _back_up(path: Path) -> None:
    """Rename a file to NAME.bak1, or to the next number that is free."""
    for number in itertools.count(1):
        backup = path.with_name(f"{path.name}.bak{number}")
        if not backup.exists():
            break
    path.replace(backup)
    logger.info("%s: the existing file was renamed to %s", path, backup)
