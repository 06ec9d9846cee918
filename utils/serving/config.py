"""A network in a file, and options → the configurations (ModelConfig) of the models that serve it.

    NMS in the file      NAME: the file
    raw predictions      NAME: an ensemble of NAME_network, the file, and NAME_nms, `nms_model.py`
    raw, without NMS     NAME: the file

Clients of NAME get the same outputs in the first two cases. The fields are those of "Model Configuration" in Triton's
user guide.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.utils import np_to_triton_dtype

from utils.core.errors import InputError
from utils.core.input_spec import DEFAULT_BATCH
from utils.core.output_form import END_TO_END, OutputForm
from utils.core.tasks import DETECT, DETECTIONS
from utils.runners.base import TensorSpec, literal
from utils.serving.nms_model import Settings
from utils.serving.options import ServingOptions

PLAN, ONNX, ENSEMBLE, PYTHON = "tensorrt_plan", "onnxruntime_onnx", "ensemble", "python"
LABELS, LIMITS = "labels.txt", "limits"
# Metadata that clients need and the protocol does not carry: a `parameters` entry each, which `runner.py` reads.
CLIENT_METADATA = ("task", "stride", "names", "imgsz", "input_form", "input_layout", "nms", "mask_resolution")
NMS_OPTIONS = ("conf_thres", "iou_thres", "max_det", "class_agnostic")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class ServedFile:
    """A network in a file.

    Attributes:
        path: the file, or the ONNX file of an engine that is built later.
        platform: PLAN or ONNX.
        inputs, outputs: with the batch.
        metadata: of the ONNX file.
        profile: min and max shape of an engine's input, `[B, 3, H, W]` or `[B, H, W, 3]`; None without dynamic axes.
        unfit: why this platform cannot run the file; '' if it can.
    """

    path: Path
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    metadata: Mapping[str, str]
    profile: tuple[Shape, Shape] | None = None
    unfit: str = ""

    @property
    def images(self) -> TensorSpec:
        """The input, with the sizes that an engine's profile leaves no choice about."""
        spec = self.inputs[0]
        if self.profile is None:
            return spec
        least, most = self.profile
        shape = list(spec.shape)
        for axis in range(1, len(shape)):
            if shape[axis] is None and least[axis] == most[axis]:
                shape[axis] = least[axis]
        return TensorSpec(spec.name, tuple(shape), spec.dtype)

    @property
    def is_pending(self) -> bool:
        """Return whether `path` is an ONNX file from which the engine has still to be built."""
        return self.platform == PLAN and self.path.suffix.lower() == ".onnx"

    @property
    def form(self) -> OutputForm:
        """The form of the outputs, with or without NMS and masks."""
        return OutputForm.of(self.metadata, {spec.name: spec.shape for spec in self.outputs})

    @property
    def is_batched(self) -> bool:
        """Return whether the batch size is dynamic, so that a server can put requests together."""
        return all(spec.shape and spec.shape[0] is None for spec in (*self.inputs, *self.outputs))

    def check(self) -> None:
        """Raise `InputError` if the file cannot be served."""
        if self.unfit:
            raise InputError(f"{self.path}: {self.unfit}")
        form = self.form
        names = {spec.name for spec in self.outputs}
        has_outputs = form.name == END_TO_END or set(form.task.outputs) <= names
        if len(self.inputs) != 1 or not has_outputs:
            expected = f"{' and '.join(form.task.outputs)}, or {', '.join(DETECTIONS)}, as export_qat.py writes them"
            raise InputError(f"{self.path} gives {', '.join(sorted(names))}; expected one input, and {expected}")
        if self.is_batched and self.profile and self.profile[0][0] > 1:
            least, most = self.profile[0][0], self.profile[1][0]
            raise InputError(
                f"{self.path} has a minimum batch size of {least}, so requests of one image fail; "
                f"build it with --batch-size 1 {most} {most}"
            )
        class_names(self.metadata, self.path)


def class_names(metadata: Mapping[str, str], source: Path) -> list[str]:
    """Names of the classes by id; empty if the metadata has none.

    Raises:
        InputError: the ids in `source` are not 0, 1, 2, ..., or a name is not one line of text.
    """
    text = metadata.get("names", "")
    names = literal(text) if text else []
    if isinstance(names, dict):
        names = [names.get(str(number), names.get(number)) for number in range(len(names))]
    if isinstance(names, list) and None not in names and all(_is_one_line(str(name)) for name in names):
        return [str(name) for name in names]
    raise InputError(f"{source} names its classes {text!r:.80}; expected one line of text for each id from 0")


def _is_one_line(text: str) -> bool:
    return len(f"{text}.".splitlines()) == 1


def model_configs(file: ServedFile, options: ServingOptions) -> list[ModelConfig]:
    """Make the configurations, each after those of the models that it runs.

    `InputError` if the file cannot be served with these options.
    """
    file.check()
    batch = _max_batch_size(file, options.max_batch_size)
    has_nms = file.form.has_nms
    if not options.no_nms and not has_nms:
        return _with_nms(file, options, batch)
    why = "NMS is inside the file" if has_nms else "--no-nms leaves it out"
    options.reject_unused(NMS_OPTIONS, f"here: it is for NMS behind raw predictions, and {why}")
    return [_network(file, options, options.model_name, batch, _client_metadata(file))]


def _max_batch_size(file: ServedFile, limit: int | None) -> int:
    """Images that the server puts together: `limit`, or by default as many as the file takes.

    It is 0 for a file of static batch size, whose batch is a part of `dims`. `InputError` if `limit` does not fit.
    """
    static = file.images.shape[0]
    if not file.is_batched:
        if limit not in (None, static):
            raise InputError(f"--max-batch-size is {limit}, but {file.path} has a static batch of {static}")
        return 0
    if file.profile is None:
        return limit or DEFAULT_BATCH[-1]
    _, most = file.profile
    if limit and limit > most[0]:
        raise InputError(f"--max-batch-size is {limit}, but the profile of {file.path} ends at {most[0]}")
    return limit or most[0]


def _network(
    file: ServedFile, options: ServingOptions, name: str, batch: int, parameters: dict[str, str]
) -> ModelConfig:
    """Make the configuration of the model that runs the file."""
    images = _tensor(file.images, batch)
    kind = "KIND_GPU" if file.platform == PLAN else "KIND_AUTO"  # Triton makes KIND_AUTO a GPU where there is one
    config = ModelConfig(
        name=name,
        platform=file.platform,
        max_batch_size=batch,
        input=[images],
        output=_outputs(file.outputs, file.metadata, batch),
        parameters=_parameters(parameters),
        instance_group=[{"count": options.instances, "kind": kind}],
    )
    if batch > 1:
        config.dynamic_batching.max_queue_delay_microseconds = options.queue_delay
    elif options.queue_delay:
        raise InputError("--queue-delay does nothing where a batch holds one request only; leave it out")
    if -1 not in images["dims"]:
        zeros = {"data_type": images["data_type"], "dims": images["dims"], "zero_data": True}
        for size in sorted({1, batch or 1}):  # requests of one image each; Triton skips a sample of 0 requests
            config.model_warmup.add(name=f"batch_{size}", batch_size=size, inputs={file.images.name: zeros})
    return config


def _with_nms(file: ServedFile, options: ServingOptions, batch: int) -> list[ModelConfig]:
    """Make the configurations of a detector, of NMS behind it, and of the ensemble of both."""
    if file.form.masks:
        todo = "export it with --include onnx_end2end, or serve raw predictions with --no-nms"
        raise InputError(f"{file.path} gives raw predictions of masks, and NMS behind them is for detectors; {todo}")
    settings = _nms_settings(options)
    (predictions,) = (spec for spec in file.outputs if spec.name == DETECT.prediction)
    results = _results_of_nms(file.images.shape[0], settings.max_det)
    detections = _outputs(results, file.metadata, batch)
    entries = {name: json.dumps(value) for name, value in asdict(settings).items()}
    network = _network(file, options, f"{options.model_name}_network", batch, {})
    nms = ModelConfig(
        name=f"{options.model_name}_nms",
        backend=PYTHON,
        max_batch_size=batch,
        input=[_tensor(predictions, batch)],
        output=detections,
        instance_group=[{"count": 1, "kind": "KIND_CPU"}],
        parameters=_parameters(entries),
    )
    between = {predictions.name: f"raw_{predictions.name}"}
    steps = [
        _step(network.name, {file.images.name: file.images.name}, between),
        _step(nms.name, between, {spec.name: spec.name for spec in results}),
    ]
    ensemble = ModelConfig(
        name=options.model_name,
        platform=ENSEMBLE,
        max_batch_size=batch,
        input=[_tensor(file.images, batch)],
        output=detections,
        ensemble_scheduling={"step": steps},
        parameters=_parameters(_client_metadata(file) | {"nms": json.dumps(_as_in_files(settings))}),
    )
    return [network, nms, ensemble]


def _nms_settings(options: ServingOptions) -> Settings:
    """The settings that the user gave, and the defaults of the others."""
    values = {name: getattr(options, name) for name in NMS_OPTIONS}
    return Settings(**{name: value for name, value in values.items() if value is not None})


def _as_in_files(settings: Settings) -> dict[str, Any]:
    """Settings as the metadata of a file with NMS inside has them, see `NmsSettings`."""
    return {
        "kind": "onnx",
        "topk": settings.max_det,
        "iou_thres": settings.iou_thres,
        "conf_thres": settings.conf_thres,
        "agnostic": settings.class_agnostic,
    }


def _results_of_nms(images: int | None, max_det: int) -> list[TensorSpec]:
    """The outputs of `nms_model.py` for a batch of `images`."""
    count, boxes, scores, classes = DETECT.detections
    return [
        TensorSpec(count, (images, 1), "int32"),
        TensorSpec(boxes, (images, max_det, 4), "float32"),
        TensorSpec(scores, (images, max_det), "float32"),
        TensorSpec(classes, (images, max_det), "int32"),
    ]


def _step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> dict[str, Any]:
    """A step of an ensemble; the maps go from names of the model's tensors to names in the ensemble."""
    return {"model_name": model, "model_version": -1, "input_map": inputs, "output_map": outputs}


def _client_metadata(file: ServedFile) -> dict[str, str]:
    """The part of a file's metadata that clients need, and the limits of an engine's profile."""
    entries = {key: file.metadata[key] for key in CLIENT_METADATA if file.metadata.get(key)}
    if file.profile:
        entries[LIMITS] = json.dumps(file.profile)
    return entries


def _parameters(values: dict[str, str]) -> dict[str, Any]:
    return {key: {"string_value": text} for key, text in values.items()}


def _outputs(specs: Iterable[TensorSpec], metadata: Mapping[str, str], batch: int) -> list[dict[str, Any]]:
    """Describe outputs; if the classes have names, the output with their ids names the file that lists them."""
    outputs = [_tensor(spec, batch) for spec in specs]
    for output in outputs:
        if output["name"] == DETECT.detections[3] and metadata.get("names"):
            output["label_filename"] = LABELS
    return outputs


def _tensor(spec: TensorSpec, batch: int) -> dict[str, Any]:
    """Describe a tensor; if Triton makes batches (`batch` > 0), `dims` are without the batch."""
    shape = spec.shape[1:] if batch else spec.shape
    return {"name": spec.name, "data_type": data_type(spec), "dims": [-1 if size is None else size for size in shape]}


def data_type(spec: TensorSpec) -> str:
    """Triton's name of a tensor's type, such as TYPE_FP32."""
    return f"TYPE_{np_to_triton_dtype(np.dtype(spec.dtype))}"
