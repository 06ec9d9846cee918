"""The keys of a primary detector that DeepStream's plugins read from their configurations, and what each takes.

From the parser of DeepStream 9.1, which is public (https://github.com/NVIDIA/DeepStream, Apache-2.0:
gstnvinfer_property_parser.cpp), and from the tables of
https://docs.nvidia.com/metropolis/deepstream/dev-guide/text/DS_plugin_gst-nvinfer.html. nvinfer prints a line about a
key that it does not know and goes on, so that a wrong key is easily overlooked; here it is a complaint.
nvinferserver reads protobuf's text format, by the messages in the same repository's includes/nvdsinferserver_*.proto.
"""

import configparser
import re
from collections.abc import Iterator, Mapping

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

NUMBER, REAL = r"\d{1,9}", r"\d+(\.\d*)?([eE][-+]?\d+)?"


def _table(text: str) -> dict[str, str]:
    """Key → the regular expression of its values; lines are `expression: keys`."""
    rows = (line.split(": ") for line in text.strip().splitlines())
    return {key: pattern for pattern, keys in rows for key in keys.split()}


PROPERTY = _table(rf"""
.*\S.*: onnx-file model-engine-file labelfile-path int8-calib-file mean-file tlt-encoded-model tlt-model-key
.*\S.*: custom-network-config output-blob-names output-io-formats layer-device-precision
.*\S.*: custom-lib-path parse-bbox-func-name parse-bbox-instance-mask-func-name engine-create-func-name
[01]: network-input-order strongly-typed enable-dla warmup-engine maintain-aspect-ratio symmetric-padding
[01]: input-tensor-from-meta crop-objects-to-roi-boundary segmentation-output-order output-instance-mask
[01]: output-tensor-meta disable-output-host-copy
[0-2]: scaling-compute-hw
[0-3]: network-mode
[0-4]: model-color-format cluster-mode
[0-6]: scaling-filter
[0-3]|100: network-type
[12]: process-mode
[1-9]\d{{0,3}}: batch-size gie-unique-id
{NUMBER}: workspace-size use-dla-core gpu-id interval num-detected-classes
({NUMBER};)*{NUMBER};?: filter-out-class-ids
([1-9]\d*;){{2}}[1-9]\d*;?: infer-dims
{REAL}: net-scale-factor segmentation-threshold
({REAL};)*{REAL};?: offsets
""")
CLASS_ATTRS = _table(rf"""
{REAL}: pre-cluster-threshold post-cluster-threshold eps dbscan-min-score
{NUMBER}: group-threshold minBoxes
0(\.\d+)?|1: nms-iou-threshold
-1|{NUMBER}: topk
""")


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


def _of_group(name: str, values: Mapping[str, str], known: Mapping[str, str]) -> Iterator[str]:
    for key, value in values.items():
        if key not in known:
            yield f"[{name}] {key} is unknown"
        elif not re.fullmatch(known[key], value):
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
