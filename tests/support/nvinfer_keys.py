"""The keys of a primary detector that DeepStream's plugins read from their configurations, and what each takes.

From the parser of DeepStream 9.1, which is public (https://github.com/NVIDIA/DeepStream, Apache-2.0:
gstnvinfer_property_parser.cpp), and from the tables of
https://docs.nvidia.com/metropolis/deepstream/dev-guide/text/DS_plugin_gst-nvinfer.html. nvinfer prints a line about a
key that it does not know and goes on, so that a wrong key is easily overlooked; here it is a complaint.
nvinferserver reads protobuf's text format, by the messages in the same repository's includes/nvdsinferserver_*.proto.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

Rule = Callable[[str], bool]
Group = Mapping[str, Rule]


def integer(low: int = 0, high: int = 2**31 - 1) -> Rule:
    return lambda text: bool(re.fullmatch(r"-?\d+", text)) and low <= int(text) <= high


def real(low: float = 0.0, high: float = float("inf")) -> Rule:
    def holds(text: str) -> bool:
        try:
            return low <= float(text) <= high
        except ValueError:
            return False

    return holds


def numbers(rule: Rule, count: int | None = None) -> Rule:
    """A list, with a semicolon behind each entry but perhaps the last one."""

    def holds(text: str) -> bool:
        parts = text.removesuffix(";").split(";")
        return (count is None or len(parts) == count) and all(map(rule, parts))

    return holds


def text(value: str) -> bool:
    return bool(value.strip())


switch = integer(0, 1)

PROPERTY: Group = {
    # the network
    "onnx-file": text, "model-engine-file": text, "labelfile-path": text, "int8-calib-file": text,
    "mean-file": text, "tlt-encoded-model": text, "tlt-model-key": text, "custom-network-config": text,
    "network-mode": integer(0, 3), "network-type": lambda value: value in ("0", "1", "2", "3", "100"),
    "network-input-order": switch,
    "infer-dims": numbers(integer(1), 3), "output-blob-names": text, "output-io-formats": text,
    "layer-device-precision": text, "strongly-typed": switch, "workspace-size": integer(),
    "enable-dla": switch, "use-dla-core": integer(), "warmup-engine": switch,
    # where and when
    "gpu-id": integer(), "gie-unique-id": integer(1), "process-mode": integer(1, 2), "batch-size": integer(1, 1024),
    "interval": integer(), "filter-out-class-ids": numbers(integer()),
    # images
    "net-scale-factor": real(), "offsets": numbers(real()), "model-color-format": integer(0, 4),
    "maintain-aspect-ratio": switch, "symmetric-padding": switch, "scaling-filter": integer(0, 6),
    "scaling-compute-hw": integer(0, 2), "input-tensor-from-meta": switch, "crop-objects-to-roi-boundary": switch,
    # what becomes of the outputs
    "num-detected-classes": integer(), "cluster-mode": integer(0, 4), "segmentation-threshold": real(),
    "segmentation-output-order": switch, "output-instance-mask": switch, "output-tensor-meta": switch,
    "disable-output-host-copy": switch, "custom-lib-path": text, "parse-bbox-func-name": text,
    "parse-bbox-instance-mask-func-name": text, "engine-create-func-name": text,
}  # fmt: skip
CLASS_ATTRS: Group = {
    "pre-cluster-threshold": real(), "post-cluster-threshold": real(), "eps": real(), "group-threshold": integer(),
    "minBoxes": integer(), "dbscan-min-score": real(), "nms-iou-threshold": real(0, 1), "topk": integer(-1),
}  # fmt: skip


def entries(text: str) -> dict[str, dict[str, str]]:
    """The groups of a file in GLib's form, with their entries."""
    parser = configparser.RawConfigParser(comment_prefixes=("#",), delimiters=("=",), strict=True)
    parser.optionxform = str
    parser.read_string(text)
    return {name: dict(parser[name]) for name in parser.sections()}


def complaints(text: str) -> list[str]:
    """What nvinfer would not read of its configuration, or not take; one sentence each."""
    groups = entries(text)
    found = [] if "property" in groups else ["there is no group [property]"]
    classes = int(groups.get("property", {}).get("num-detected-classes", 0))
    for name, values in groups.items():
        if name == "property":
            found += _of_group(name, values, PROPERTY)
        elif name == "class-attrs-all" or re.fullmatch(r"class-attrs-\d+", name):
            found += _of_group(name, values, CLASS_ATTRS)
            if name != "class-attrs-all" and int(name.rpartition("-")[2]) >= classes:
                found.append(f"[{name}] is for a class that is not there")
        else:
            found.append(f"[{name}] is no group of nvinfer's")
    return [*found, *_contradictions(groups.get("property", {}))]


def _of_group(name: str, values: Mapping[str, str], known: Group) -> Iterable[str]:
    for key, value in values.items():
        if key not in known:
            yield f"[{name}] {key} is unknown"
        elif not known[key](value):
            yield f"[{name}] {key} does not take {value!r}"


def _contradictions(values: Mapping[str, str]) -> Iterator[str]:
    if not {"onnx-file", "model-engine-file"} & set(values):
        yield "[property] names no network"
    if values.get("network-type") == "3":
        if "parse-bbox-instance-mask-func-name" not in values or values.get("output-instance-mask") != "1":
            yield "[property] network-type=3 has no parser for masks, or shows none"
    elif "parse-bbox-instance-mask-func-name" in values:
        yield "[property] a parser for masks stands in a detector's configuration"
    if {"parse-bbox-func-name", "engine-create-func-name"} & set(values) and "custom-lib-path" not in values:
        yield "[property] functions are named, and no custom-lib-path"
    if values.get("symmetric-padding") == "1" and values.get("maintain-aspect-ratio") != "1":
        yield "[property] symmetric-padding means nothing without maintain-aspect-ratio"


# Of Gst-nvinferserver: messages, whose fields are numbers unless a type follows, and enumerations.
SERVER = """\
ProcessMode PROCESS_MODE_DEFAULT PROCESS_MODE_FULL_FRAME PROCESS_MODE_CLIP_OBJECTS
MediaFormat MEDIA_FORMAT_NONE IMAGE_FORMAT_RGB IMAGE_FORMAT_BGR IMAGE_FORMAT_GRAY
TensorOrder TENSOR_ORDER_NONE TENSOR_ORDER_LINEAR TENSOR_ORDER_NHWC
PluginControl infer_config:InferenceConfig input_control:InputControl
InputControl process_mode:ProcessMode
InferenceConfig unique_id max_batch_size backend:Backend preprocess:PreProcess postprocess:PostProcess custom_lib:Lib
Backend triton:Triton
Triton model_name:string version model_repo:Repository
Repository root:string strict_model_config:bool
PreProcess network_format:MediaFormat tensor_order:TensorOrder tensor_name:string maintain_aspect_ratio \
symmetric_padding normalize:Normalize
Normalize scale_factor:float
PostProcess labelfile_path:string detection:Detection
Detection num_detected_classes custom_parse_bbox_func:string simple_cluster:Cluster
Cluster threshold:float
Lib path:string"""
TYPES = {"": 5, "float": 2, "bool": 8, "string": 9}  # protobuf's numbers


def read_server(text: str) -> dict[str, str]:
    """The value of each field of nvinferserver's configuration; ParseError if protobuf would not read it."""
    file = descriptor_pb2.FileDescriptorProto(name="nvdsinferserver.proto", syntax="proto3")
    for name, *words in map(str.split, SERVER.splitlines()):
        if words[0].isupper():
            file.enum_type.add(name=name, value=[{"name": word, "number": at} for at, word in enumerate(words)])
            continue
        message = file.message_type.add(name=name)
        for number, (word, _, kind) in enumerate((field.partition(":") for field in words), 1):
            kinds = {"type": TYPES[kind]} if kind in TYPES else {"type_name": kind}
            message.field.add(name=word, number=number, label=1, **kinds)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    read = text_format.Parse(text, message_factory.GetMessageClass(pool.FindMessageTypeByName("PluginControl"))())
    return dict(line.strip().split(": ", 1) for line in text_format.MessageToString(read).splitlines() if ": " in line)
