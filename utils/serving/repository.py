"""A model repository on disk ("Model Repository" in Triton's user guide): written, and checked.

REPOSITORY/NAME/config.pbtxt
REPOSITORY/NAME/labels.txt       names of the classes
REPOSITORY/NAME/1/model.onnx     or model.plan, or `nms_model.py` as model.py; of an ensemble the folder is empty

Each model is written whole or not at all. What a server would refuse is refused here, in one line: protobuf reads the
configurations, so that an unknown field or a wrong type is its refusal. The other rules are those of the server's core
(`model_config_utils.cc`, `ensemble_utils.cc`) and of its TensorRT and ONNX Runtime backends.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInstanceGroup

from utils.core.errors import InputError, no_file
from utils.core.files import read_text
from utils.serving.config import ENSEMBLE, LABELS, PYTHON, data_type
from utils.serving.served_file import ONNX, PLAN, ServedFile, class_names

CONFIG = "config.pbtxt"
MODEL_FILES = {PLAN: "model.plan", ONNX: "model.onnx", PYTHON: "model.py"}  # the names that Triton looks for
BACKENDS = {PLAN: "tensorrt", ONNX: "onnxruntime", PYTHON: PYTHON, ENSEMBLE: None}  # by platform; one of both suffices
Describe = Callable[[Path, str], "ServedFile | None"]
HEAD = "# Written by scripts/make_triton.py, which checks it with --check.\n"


def write(
    repository: Path, file: ServedFile, configs: Sequence[ModelConfig], note: str, check: Callable[[Path], object]
) -> list[Path]:
    """Write the models of a file, and return their folders.

    The models are written into a folder beside the repository, checked there and renamed into it, so that a server that
    polls the repository never sees half of a model.

    Args:
        note: the JSON to write beside an engine; '' for none.
        check: gets the folder before its models become the repository's, and may raise.

    Raises:
        InputError: something is in the way.
    """
    if repository.exists() and not repository.is_dir():
        raise InputError(f"--output {repository} is not a folder; give the folder of a model repository, or a new one")
    targets = [repository / config.name for config in configs]
    for target in filter(os.path.lexists, targets):
        raise InputError(f"{target} exists; remove it, or choose another --name or --output")
    place = repository if repository.is_mount() else repository.absolute().parent  # a rename stays on one disk
    place.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{repository.name}-", suffix=".part", dir=place))
    try:
        for config in configs:
            _write_model(temporary / config.name, config, file, note)
        check(temporary)
        repository.mkdir(exist_ok=True)
        for target in targets:
            (temporary / target.name).rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return targets


def _write_model(folder: Path, config: ModelConfig, file: ServedFile, note: str) -> None:
    version = folder / "1"
    version.mkdir(parents=True)
    text = text_format.MessageToString(config, as_utf8=True, use_short_repeated_primitives=True)
    (folder / CONFIG).write_text(HEAD + text, encoding="utf-8")
    if any(output.label_filename for output in config.output):
        labels = "".join(f"{name}\n" for name in class_names(file.metadata, file.path))
        (folder / LABELS).write_text(labels, encoding="utf-8")
    if config.backend == PYTHON:
        shutil.copyfile(Path(__file__).with_name("nms_model.py"), version / MODEL_FILES[PYTHON])
    elif config.platform == file.platform:
        if not file.pending:
            shutil.copyfile(file.path, version / MODEL_FILES[file.platform])
        if note:
            (version / f"{MODEL_FILES[file.platform]}.json").write_text(note, encoding="utf-8")


def read_config(path: Path) -> ModelConfig:
    """A config.pbtxt; raises `InputError` if protobuf cannot read it."""
    text = read_text(path, "each folder of a repository is a model and needs it")
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise InputError(f"{path}, line {' '.join(str(error).split())}") from error


def check_repository(repository: Path, describe: Describe, *, pending: bool = False) -> dict[str, ModelConfig]:
    """Check all models of a repository, and return their configurations by name.

    `describe` gives what is known about a file of a platform, or None. `pending` engines may be missing.

    Raises:
        InputError: a server would not load the repository.
    """
    _require(repository.is_dir(), no_file(repository, "expected a folder with a folder for each model"))
    configs = {path.name: read_config(path / CONFIG) for path in sorted(repository.iterdir()) if path.is_dir()}
    _require(configs, f"{repository} holds no models; expected a folder with {CONFIG} for each of them")
    for name, config in sorted(configs.items(), key=lambda item: item[1].platform == ENSEMBLE):  # after their models
        _check_model(repository / name, config, describe, pending)
        if config.platform == ENSEMBLE:
            _check_ensemble(repository / name / CONFIG, config, configs)
    return configs


def _require(condition: object, message: str) -> None:
    if not condition:
        raise InputError(message)


def _check_model(folder: Path, config: ModelConfig, describe: Describe, pending: bool) -> None:
    where, most = folder / CONFIG, config.max_batch_size
    _require(config.name in ("", folder.name), f"{where}: name is {config.name!r:.60}; expected that of the folder")
    for size in (most, *config.dynamic_batching.preferred_batch_size):
        _require(0 <= size <= most, f"{where}: batch size {size} is not within 0 and max_batch_size, {most}")
    for side in (config.input, config.output):
        names = {one.name for one in side if one.name}
        _require(0 < len(names) == len(side), f"{where}: expected inputs and outputs, each with a name of its own")
        for one in side:
            valid = one.data_type and one.dims and all(size > 0 or size == -1 for size in one.dims)
            _require(valid, f"{where}: {_text(one)} needs a data_type, and dims of 1 or more, or -1")
    for labels in (folder / output.label_filename for output in config.output if output.label_filename):
        _require(labels.is_file(), no_file(labels, f"{where} names it"))
    platform = config.platform or next((key for key, name in BACKENDS.items() if name == config.backend), "")
    valid = platform in BACKENDS and config.backend in ("", BACKENDS[platform])
    _require(valid, f"{where}: platform {config.platform!r:.40} with backend {config.backend!r:.40} is unknown")
    for group in config.instance_group:
        kind = ModelInstanceGroup.Kind.Name(group.kind)
        valid = kind not in ("KIND_CPU", "KIND_MODEL") or not (platform == PLAN or group.gpus)
        _require(valid, f"{where}: instance_group is {kind} for {platform} with gpus {list(group.gpus)}; use KIND_GPU")
    versions = [path for path in folder.iterdir() if path.is_dir() and path.name.isdecimal()]
    _require(versions, f"{folder} has no folder of a version; expected {folder / '1'}")
    for version in () if platform == ENSEMBLE or (pending and platform == PLAN) else versions:
        path = version / (config.default_model_filename or MODEL_FILES[platform])
        _require(path.is_file(), no_file(path, f"{where} ({platform}) needs it"))
        if platform != PYTHON and (file := describe(path, platform)):
            _check_file(where, config, path, file)
    _check_warmup(where, config)


def _check_warmup(where: Path, config: ModelConfig) -> None:
    for sample in config.model_warmup:
        name, most = f"{where}: model_warmup {sample.name!r:.40}", max(config.max_batch_size, 1)
        _require(sample.batch_size <= most, f"{name} has a batch_size of {sample.batch_size}; expected up to {most}")
        _require({*sample.inputs} == {one.name for one in config.input}, f"{name} needs the inputs of the model")
        for one in config.input:
            value = sample.inputs[one.name]
            valid = value.data_type == one.data_type and -1 not in value.dims and _fits(value.dims, one.dims)
            _require(valid, f"{name} has another type or shape than {_text(one)}")


def _check_file(where: Path, config: ModelConfig, path: Path, file: ServedFile) -> None:
    _require(not file.unfit, f"{path}: {file.unfit}")
    for side, specs in ((config.input, file.inputs), (config.output, file.outputs)):
        known = {spec.name: spec for spec in specs}
        names = {one.name for one in side}
        valid = names == {*known} or (side is config.output and names < {*known})
        _require(valid, f"{where} has {', '.join(sorted(names))}; {path} has {', '.join(sorted(known))}")
        for one in side:
            shape = [-1 if size is None else size for size in known[one.name].shape]
            valid = DataType.Name(one.data_type) == data_type(known[one.name]) and _fits(_whole(one, config), shape)
            _require(valid, f"{where}: {_text(one)} with this max_batch_size is {known[one.name]} in {path}")
    if file.profile:
        (low, high), sizes = file.profile, _whole(config.input[0], config)
        within = all(a <= size <= b for size, a, b in zip(sizes, low, high, strict=True) if size != -1)
        valid = within and (not config.max_batch_size or low[0] == 1 <= config.max_batch_size <= high[0])
        _require(valid, f"{where}: {sizes}, batches up to {config.max_batch_size}: not within profile {low} to {high}")


def _check_ensemble(where: Path, config: ModelConfig, configs: Mapping[str, ModelConfig]) -> None:
    """The steps exist, every tensor is written once and before it is read, and all agree on its type and shape."""
    steps = config.ensemble_scheduling.step
    own = config.instance_group or config.model_warmup or config.HasField("optimization")
    _require(steps and not own, f"{where}: expected steps, whose models have instances, warm-up and optimization")
    ends = [(config, side, {one.name: one.name for one in side}) for side in (config.input, config.output)]
    for step in steps:
        _require(step.model_name in configs, f"{where}: a step runs {step.model_name!r:.60}; there is {[*configs]}")
        model = configs[step.model_name]
        valid = model.max_batch_size == 0 or model.max_batch_size >= config.max_batch_size
        _require(valid, f"{where}: max_batch_size is {config.max_batch_size}; {model.name} takes less")
        for side, names in ((model.input, step.input_map), (model.output, step.output_map)):
            needed = {one.name for one in model.input if side is model.input and not one.optional}
            valid = names and needed <= {*names} <= {one.name for one in side}
            _require(valid, f"{where}: a step maps {sorted(names)}; {model.name} has {[one.name for one in side]}")
            ends.append((model, side, names))
    ready = {one.name for one in config.input}
    written = [*ready, *(name for step in steps for name in step.output_map.values())]
    read = {one.name for one in config.output}.union(*(step.input_map.values() for step in steps))
    wrong = {name for name in written if written.count(name) > 1} | ({*written} ^ read)
    _require(not wrong, f"{where}: {sorted(wrong)} are not written exactly once, or not read")
    for _ in steps:
        ready.update(*(step.output_map.values() for step in steps if {*step.input_map.values()} <= ready))
    _require(read <= ready, f"{where}: the steps wait for each other")
    tensors: dict[str, tuple[Any, ModelConfig]] = {}
    for model, side, names in ends:
        for one in (one for one in side if one.name in names):
            other, owner = tensors.setdefault(names[one.name], (one, model))
            valid = _fits(one.dims, other.dims, True) or _fits(_whole(one, model), _whole(other, owner), True)
            valid = valid and one.data_type == other.data_type
            _require(valid, f"{where}: {model.name} has {_text(one)}, {owner.name} has {_text(other)}")


def _text(tensor: Any) -> str:
    return f"{tensor.name} {DataType.Name(tensor.data_type)}{list(tensor.dims)}"


def _whole(tensor: Any, config: ModelConfig) -> list[int]:
    return [*([-1] if config.max_batch_size else []), *tensor.dims]


def _fits(dims: Sequence[int], shape: Sequence[int], either: bool = False) -> bool:
    """Whether dims are one of the shapes that `shape` stands for, where -1 is any size; `either`: or the reverse."""
    same = (own in (size, -1) or (either and size == -1) for size, own in zip(dims, shape, strict=True))
    return len(dims) == len(shape) and all(same)
