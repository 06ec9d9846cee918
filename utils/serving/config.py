"""A file and wishes → the configurations of the models that serve it.

    NMS in the file      NAME: the file
    raw predictions      NAME: an ensemble of NAME_network, the file, and NAME_nms, `nms_model.py`
    raw, without NMS     NAME: the file

Whoever asks NAME gets the same four outputs (with masks five) in the first two cases. The fields, and what a server
makes of them: "Model Configuration" in Triton's user guide, and `model_config_utils.cc` of its core.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from utils.core.bounds import check_bounds
from utils.core.errors import InputError
from utils.core.input_form import DEFAULT_BATCH
from utils.core.tasks import DETECT, SEGMENT
from utils.core.thresholds import EVERYDAY_CONFIDENCE, EVERYDAY_NMS_IOU
from utils.serving.served_file import PLAN, ServedFile, Tensor

ENSEMBLE, PYTHON = "ensemble", "python"
LABELS = "labels.txt"
# What a client has to know and the protocol does not say; see `runner.py`.
SAID = ("task", "stride", "names", "imgsz", "input_form", "input_layout", "nms", "mask_resolution")
LIMITS = "limits"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
Config = dict[str, Any]


@dataclass(frozen=True)
class Wishes:
    """What a user decides.

    Attributes:
        name: of the model that is asked; part of its address.
        max_batch: images that a server puts together, at most; None: what the file takes.
        instances: of the network, on each GPU.
        nms_instances: of the NMS behind raw predictions; each is a process on the CPU.
        queue_delay: microseconds that a request waits for others.
        warmup: run the network before a server says that it is ready.
        cuda_graphs: let TensorRT's backend record CUDA graphs.
        nms: put NMS behind raw predictions.
        conf_thres, iou_thres, max_det, agnostic: of that NMS.
        given: which options of NMS a user gave.
    """

    name: str
    max_batch: int | None = None
    instances: int = 1
    nms_instances: int = 1
    queue_delay: int = 0
    warmup: bool = True
    cuda_graphs: bool = False
    nms: bool = True
    conf_thres: float = EVERYDAY_CONFIDENCE
    iou_thres: float = EVERYDAY_NMS_IOU
    max_det: int = 100
    agnostic: bool = False
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name)
        check_bounds(self, "instances", "nms_instances", "queue_delay", "conf_thres", "iou_thres", "max_det")


def check_name(name: str) -> None:
    """Raise `InputError` if a model cannot be called so: its name is a folder, and part of an address."""
    if not _NAME.fullmatch(name):
        raise InputError(f"--name {name!r:.60} is no name of a model; expected letters, digits, '.', '_' and '-'")


def configs(file: ServedFile, wishes: Wishes) -> dict[str, Config]:
    """The models by name, each after those that it needs.

    Raises:
        InputError: the file cannot be served, or not so.
    """
    file.check()
    if wishes.given and (file.has_nms or not wishes.nms):
        why = "NMS is inside the file, which has its own" if file.has_nms else "--no-nms leaves NMS out"
        raise InputError(f"--{wishes.given[0].replace('_', '-')} is of NMS behind raw predictions, and {why}")
    batch = largest_batch(file, wishes.max_batch)
    if file.has_nms or not wishes.nms:
        return {wishes.name: network(file, wishes, wishes.name, batch, about(file))}
    raw, nms = f"{wishes.name}_network", f"{wishes.name}_nms"
    behind = nms_config(file, wishes, nms, batch)
    return {
        raw: network(file, wishes, raw, batch, {}),
        nms: behind,
        wishes.name: ensemble(file, wishes, (raw, nms), batch, behind),
    }


def largest_batch(file: ServedFile, wished: int | None) -> int:
    """`max_batch_size`: 0 for a file whose batch size is static, which then is a part of its shapes.

    Raises:
        InputError: the file does not take so many.
    """
    if not file.batched:
        static = file.images.shape[0]
        if wished is not None and wished != static:
            raise InputError(
                f"{file.path} takes {static} images at a time, not {wished}; export it with --dynamic batch"
            )
        return 0
    most = file.profile[1][0] if file.profile else None
    if wished is not None and most is not None and wished > most:
        raise InputError(f"--max-batch-size is {wished}, and {file.path} takes up to {most} images at a time")
    return wished or most or DEFAULT_BATCH[-1]  # what build_engine.py builds for


def about(file: ServedFile, **more: str) -> dict[str, str]:
    """What the metadata say that a client needs."""
    found = {name: file.metadata[name] for name in SAID if file.metadata.get(name)} | more
    return found | ({LIMITS: json.dumps(file.profile)} if file.profile else {})


def network(file: ServedFile, wishes: Wishes, name: str, batch: int, said: Mapping[str, str]) -> Config:
    """The configuration of the file."""
    inputs, outputs = [_tensor(_fixed(file), batch)], [_tensor(one, batch) for one in file.outputs]
    if file.has_nms and file.names:
        _label(outputs)
    config: Config = {
        "name": name,
        "platform": file.platform,
        "max_batch_size": batch,
        "input": inputs,
        "output": outputs,
    }
    # Triton makes KIND_AUTO a GPU where there is one
    kind = "KIND_GPU" if file.platform == PLAN else "KIND_AUTO"
    config["instance_group"] = [{"count": wishes.instances, "kind": kind}]
    if batch > 1:
        delay = {"max_queue_delay_microseconds": wishes.queue_delay} if wishes.queue_delay else {}
        config["dynamic_batching"] = delay
    elif wishes.queue_delay:
        raise InputError("--queue-delay does nothing where a batch holds one request only; leave it out")
    if wishes.cuda_graphs:
        if file.platform != PLAN:
            raise InputError(f"--cuda-graphs is for TensorRT engines, and {file.path} runs in ONNX Runtime")
        config["optimization"] = {"cuda": {"graphs": True}}
    if said:
        config["parameters"] = {key: {"string_value": text} for key, text in said.items()}
    if wishes.warmup and None not in _fixed(file).shape[1:]:
        config["model_warmup"] = _warmup(inputs[0], batch)
    return config


def nms_config(file: ServedFile, wishes: Wishes, name: str, batch: int) -> Config:
    """The configuration of the model behind raw predictions."""
    values = {
        "conf_thres": repr(wishes.conf_thres), "iou_thres": repr(wishes.iou_thres), "max_det": str(wishes.max_det),
        "class_agnostic": str(wishes.agnostic).lower(),
    }  # fmt: skip
    raw = {one.name: one for one in file.outputs}
    outputs = [_tensor(one, batch) for one in _detections(file, wishes.max_det)]
    if file.names:
        _label(outputs)
    return {
        "name": name, "backend": PYTHON, "max_batch_size": batch,
        "input": [_tensor(raw[one], batch) for one in file.task.outputs], "output": outputs,
        "instance_group": [{"count": wishes.nms_instances, "kind": "KIND_CPU"}],
        "parameters": {key: {"string_value": text} for key, text in values.items()},
    }  # fmt: skip


def ensemble(file: ServedFile, wishes: Wishes, steps: tuple[str, str], batch: int, behind: Config) -> Config:
    """The configuration of both together."""
    raw, nms = steps
    between = {name: f"raw_{name}" for name in file.task.outputs}
    used = {"kind": "onnx", "topk": wishes.max_det, "iou_thres": wishes.iou_thres, "conf_thres": wishes.conf_thres,
            "agnostic": wishes.agnostic}  # fmt: skip
    said = about(file, nms=json.dumps(used))
    images, found = file.images.name, [one["name"] for one in behind["output"]]
    return {
        "name": wishes.name, "platform": ENSEMBLE, "max_batch_size": batch,
        "input": [_tensor(_fixed(file), batch)], "output": [dict(one) for one in behind["output"]],
        "ensemble_scheduling": {"step": [
            {"model_name": raw, "model_version": -1, "input_map": {images: images}, "output_map": between},
            {"model_name": nms, "model_version": -1, "input_map": between, "output_map": {one: one for one in found}},
        ]},
        "parameters": {key: {"string_value": text} for key, text in said.items()},
    }  # fmt: skip


def _detections(file: ServedFile, most: int) -> list[Tensor]:
    """What `nms_model.py` gives."""
    batch = file.images.shape[0]
    kinds = zip(("int32", "float32", "float32", "int32"), ((1,), (most, 4), (most,), (most,)), strict=True)
    found = [
        Tensor(name, dtype, (batch, *shape)) for name, (dtype, shape) in zip(DETECT.detections, kinds, strict=True)
    ]
    if file.task.prototypes:
        grid = next(one.shape[2:] for one in file.outputs if one.name == file.task.prototypes)
        found.append(Tensor(SEGMENT.masks, "float32", (batch, None, *grid)))
    return found


def _fixed(file: ServedFile) -> Tensor:
    """The input, with the sizes that an engine's profile leaves no choice about."""
    images = file.images
    if file.profile is None:
        return images
    least, most = file.profile
    shape = tuple(
        low if size is None and low == high and axis else size
        for axis, (size, low, high) in enumerate(zip(images.shape, least, most, strict=True))
    )
    return Tensor(images.name, images.dtype, shape)


def _tensor(tensor: Tensor, batch: int) -> Config:
    """An input or output; where Triton makes batches, its dims are without the batch."""
    shape = tensor.shape[1:] if batch else tensor.shape
    return {"name": tensor.name, "data_type": tensor.kind, "dims": [-1 if size is None else size for size in shape]}


def _label(outputs: list[Config]) -> None:
    """Say where the names of classes lie, of the output with their numbers."""
    next(one for one in outputs if one["name"] == DETECT.detections[3])["label_filename"] = LABELS


def _warmup(images: Config, batch: int) -> list[Config]:
    """One image, and the largest batch: `batch_size` requests of one image each, which Triton runs together.

    A sample whose `batch_size` is 0 is skipped, so a network of static batch size has one of 1, whose dims are whole.
    """
    value = {"data_type": images["data_type"], "dims": images["dims"], "zero_data": True}
    sizes = dict.fromkeys((1, batch or 1))
    return [{"name": f"batch_{size}", "batch_size": size, "inputs": {images["name"]: value}} for size in sizes]
