"""A file and options → the configurations (ModelConfig) of the models that serve it.

    NMS in the file      NAME: the file
    raw predictions      NAME: an ensemble of NAME_network, the file, and NAME_nms, `nms_model.py`
    raw, without NMS     NAME: the file

Clients of NAME get the same outputs in the first two cases. The fields are those of "Model Configuration" in Triton's
user guide.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.utils import np_to_triton_dtype

from utils.core.errors import InputError
from utils.core.input_spec import DEFAULT_BATCH
from utils.core.tasks import DETECT, DISPLAY_CONF, DISPLAY_IOU, SEGMENT
from utils.runners.base import TensorSpec
from utils.serving.options import ServingOptions
from utils.serving.served_file import PLAN, ServedFile

ENSEMBLE, PYTHON = "ensemble", "python"
LABELS, LIMITS = "labels.txt", "limits"
# Metadata that clients need and the protocol does not carry: a `parameters` entry each, which `runner.py` reads.
CLIENT_METADATA = ("task", "stride", "names", "imgsz", "input_form", "input_layout", "nms", "mask_resolution")
NMS_OPTIONS = ("conf_thres", "iou_thres", "max_det", "class_agnostic", "nms_instances")


def model_configs(file: ServedFile, options: ServingOptions) -> list[ModelConfig]:
    """The configurations, each after those of the models that it runs.

    Raises:
        InputError: the file cannot be served, or not so.
    """
    file.check()
    batch = _max_batch_size(file, options)
    if not options.no_nms and not file.has_nms:
        return _with_nms(file, options, batch)
    why = "NMS is inside the file" if file.has_nms else "--no-nms leaves it out"
    options.reject_unused(NMS_OPTIONS, f"here: it is for NMS behind raw predictions, and {why}")
    return [_network(file, options, options.model_name, batch, _client_metadata(file))]


def _max_batch_size(file: ServedFile, options: ServingOptions) -> int:
    """Images in a batch; 0 for a file of static batch size, where the batch is a part of `dims`."""
    asked, static = options.max_batch_size, file.images.shape[0]
    largest = file.profile[1][0] if file.profile else None
    if not file.batched and asked not in (None, static):
        raise InputError(f"--max-batch-size is {asked}, and {file.path} has a static batch size of {static}")
    if asked and largest and asked > largest:
        raise InputError(f"--max-batch-size is {asked}, and the profile of {file.path} ends at {largest} images")
    return (asked or largest or DEFAULT_BATCH[-1]) if file.batched else 0


def _network(
    file: ServedFile, options: ServingOptions, name: str, batch: int, parameters: dict[str, str]
) -> ModelConfig:
    """The model that runs the file."""
    images = _tensor(file.images, batch)
    config = ModelConfig(
        name=name, platform=file.platform, max_batch_size=batch, input=[images],
        output=_outputs(file.outputs, file.metadata, batch), parameters=_parameters(parameters),
        # Triton makes KIND_AUTO a GPU where there is one
        instance_group=[{"count": options.instances, "kind": "KIND_GPU" if file.platform == PLAN else "KIND_AUTO"}],
    )  # fmt: skip
    if batch > 1:
        config.dynamic_batching.max_queue_delay_microseconds = options.queue_delay
    elif options.queue_delay:
        raise InputError("--queue-delay does nothing where a batch holds one request only; leave it out")
    if options.cuda_graphs:
        if file.platform != PLAN:
            raise InputError(f"--cuda-graphs is for TensorRT engines, and {file.path} runs in ONNX Runtime")
        config.optimization.cuda.graphs = True
    if not options.no_warmup and -1 not in images["dims"]:
        zeros = {"data_type": images["data_type"], "dims": images["dims"], "zero_data": True}
        for size in sorted({1, batch or 1}):  # requests of one image each; Triton skips a sample of 0 requests
            config.model_warmup.add(name=f"batch_{size}", batch_size=size, inputs={file.images.name: zeros})
    return config


def _with_nms(file: ServedFile, options: ServingOptions, batch: int) -> list[ModelConfig]:
    """Three models: the network, NMS behind it, and the ensemble of both."""
    name, network, nms = options.model_name, f"{options.model_name}_network", f"{options.model_name}_nms"
    conf_thres = DISPLAY_CONF if options.conf_thres is None else options.conf_thres
    iou_thres = DISPLAY_IOU if options.iou_thres is None else options.iou_thres
    max_det, agnostic = options.max_det or 100, bool(options.class_agnostic)
    settings = {"conf_thres": conf_thres, "iou_thres": iou_thres, "max_det": max_det, "class_agnostic": agnostic}
    applied = {"kind": "onnx", "topk": max_det, "iou_thres": iou_thres, "conf_thres": conf_thres, "agnostic": agnostic}
    specs = {spec.name: spec for spec in file.outputs}
    raw = [_tensor(specs[output], batch) for output in file.task.outputs]
    detections = _outputs(_detections(file, max_det), file.metadata, batch)
    images, between = file.images.name, {output: f"raw_{output}" for output in file.task.outputs}
    results = {output["name"]: output["name"] for output in detections}
    steps = [
        {"model_name": network, "model_version": -1, "input_map": {images: images}, "output_map": between},
        {"model_name": nms, "model_version": -1, "input_map": between, "output_map": results},
    ]
    return [
        _network(file, options, network, batch, {}),
        ModelConfig(
            name=nms, backend=PYTHON, max_batch_size=batch, input=raw, output=detections,
            instance_group=[{"count": options.nms_instances or 1, "kind": "KIND_CPU"}],
            parameters=_parameters({key: json.dumps(value) for key, value in settings.items()}),
        ),
        ModelConfig(
            name=name, platform=ENSEMBLE, max_batch_size=batch, input=[_tensor(file.images, batch)], output=detections,
            ensemble_scheduling={"step": steps},
            parameters=_parameters(_client_metadata(file) | {"nms": json.dumps(applied)}),
        ),
    ]  # fmt: skip


def _detections(file: ServedFile, max_det: int) -> Iterable[TensorSpec]:
    """The outputs of `nms_model.py`."""
    batch = file.images.shape[0]
    count, boxes, scores, classes = DETECT.detections
    yield TensorSpec(count, (batch, 1), "int32")
    yield TensorSpec(boxes, (batch, max_det, 4), "float32")
    yield TensorSpec(scores, (batch, max_det), "float32")
    yield TensorSpec(classes, (batch, max_det), "int32")
    for spec in file.outputs:
        if spec.name == file.task.prototypes:
            yield TensorSpec(SEGMENT.masks, (batch, None, *spec.shape[2:]), "float32")


def _client_metadata(file: ServedFile) -> dict[str, str]:
    limits = {LIMITS: json.dumps(file.profile)} if file.profile else {}
    return {key: file.metadata[key] for key in CLIENT_METADATA if file.metadata.get(key)} | limits


def _parameters(values: dict[str, str]) -> dict[str, Any]:
    return {key: {"string_value": text} for key, text in values.items()}


def _outputs(specs: Iterable[TensorSpec], metadata: Mapping[str, str], batch: int) -> list[dict[str, Any]]:
    """Outputs; where the classes have names, the output with their ids says in which file."""
    outputs = [_tensor(spec, batch) for spec in specs]
    for output in outputs:
        if output["name"] == DETECT.detections[3] and metadata.get("names"):
            output["label_filename"] = LABELS
    return outputs


def _tensor(spec: TensorSpec, batch: int) -> dict[str, Any]:
    """Where Triton makes batches (`batch` > 0), `dims` are without the batch."""
    shape = spec.shape[1:] if batch else spec.shape
    return {"name": spec.name, "data_type": data_type(spec), "dims": [-1 if size is None else size for size in shape]}


def data_type(spec: TensorSpec) -> str:
    """Triton's name of a tensor's type, such as TYPE_FP32."""
    return f"TYPE_{np_to_triton_dtype(np.dtype(spec.dtype))}"
