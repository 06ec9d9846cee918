"""Does a config.pbtxt hold together by itself, and with the labels beside it?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from utils.core.errors import InputError
from utils.core.input_files import MEBIBYTE, read_text
from utils.core.tasks import DETECT
from utils.serving.config import ENSEMBLE, Config
from utils.serving.repository import CONFIG
from utils.serving.served_file import PLAN, ServedFile

LARGEST_TEXT = 4 * MEBIBYTE


def check_config(folder: Path, config: Config, platform: str) -> None:
    """Check the configuration of the model in `folder`.

    Raises:
        InputError: a server would refuse it.
    """
    where = str(folder / CONFIG)
    if not 0 <= config.get("max_batch_size", 0) < 1 << 31:
        raise InputError(
            f"{where}: max_batch_size is {config['max_batch_size']}; expected 0 or more, as 32 bits hold it"
        )
    for side in ("input", "output"):
        _check_tensors(where, config, side)
    _check_labels(folder, config)
    _check_batching(where, config)
    _check_instances(where, config, platform)


def _check_tensors(where: str, config: Config, side: str) -> None:
    tensors = config.get(side, [])
    if not tensors:
        raise InputError(f"{where} has no {side}")
    names: set[str] = set()
    for one in tensors:
        name = one.get("name", "")
        if not name or name in names:
            raise InputError(f"{where}: an {side} has no name of its own ({name!r:.60})")
        names.add(name)
        if one.get("data_type", "TYPE_INVALID") == "TYPE_INVALID":
            raise InputError(f"{where}: {side} {name} has no data_type")
        if not one.get("dims") or any(size < 1 and size != -1 for size in one["dims"]):
            raise InputError(
                f"{where}: {side} {name} has dims {one.get('dims', [])}; expected sizes of 1 or more, or -1"
            )
        if one.get("format", "FORMAT_NONE") != "FORMAT_NONE" and len(one["dims"]) != 3:
            raise InputError(f"{where}: {side} {name} has a format, which needs three dims; found {one['dims']}")


def _check_labels(folder: Path, config: Config) -> None:
    """Each file of labels is there, and has a line for each class that the configuration names to clients."""
    for output in config["output"]:
        name = output.get("label_filename", "")
        if not name:
            if output["name"] == DETECT.detections[3] and "names" in config.get("parameters", {}):
                raise InputError(
                    f"{folder / CONFIG}: {output['name']} has no label_filename, and parameters names the classes"
                )
            continue
        path = folder / name
        if folder.resolve() not in path.resolve().parents:
            raise InputError(f"{folder / CONFIG}: label_filename {name!r:.60} lies outside of {folder}")
        lines = read_text(path, f"output {output['name']} takes its labels from it", limit=LARGEST_TEXT).splitlines()
        known = ServedFile(path, "", (), (), {"names": _parameter(config, "names")}).names
        if not lines or (known and lines != known):
            expected = f"the {len(known)} of parameters' names" if known else "one class a line"
            raise InputError(f"{path} has {len(lines)} labels; expected {expected}")


def _parameter(config: Config, name: str) -> str:
    return str(config.get("parameters", {}).get(name, {}).get("string_value", ""))


def _check_batching(where: str, config: Config) -> None:
    most = config.get("max_batch_size", 0)
    for size in config.get("dynamic_batching", {}).get("preferred_batch_size", ()):
        if not 0 < size <= most:
            raise InputError(f"{where}: preferred_batch_size {size} is not within 1 and max_batch_size, {most}")


def _check_instances(where: str, config: Config, platform: str) -> None:
    for group in config.get("instance_group", ()):
        kind = group.get("kind", "KIND_AUTO")
        if group.get("count", 1) < 0:
            raise InputError(f"{where}: instance_group has a count of {group['count']}; expected 1 or more, or 0 for 1")
        if platform == PLAN and kind in ("KIND_CPU", "KIND_MODEL"):
            raise InputError(f"{where}: instance_group is {kind}, and a TensorRT engine runs on a GPU: KIND_GPU")
        if kind in ("KIND_CPU", "KIND_MODEL") and group.get("gpus"):
            raise InputError(f"{where}: instance_group is {kind} and names gpus; leave them out")
    if platform == ENSEMBLE:
        for name in ("instance_group", "optimization", "model_warmup", "dynamic_batching"):
            if name in config:
                raise InputError(f"{where}: an ensemble has no {name}; that belongs to the models of its steps")


def check_warmup(where: str, config: Config) -> None:
    """Check what a server runs before it is ready, against inputs that are those of the file.

    Raises:
        InputError: a server would refuse it.
    """
    inputs = {one["name"]: one for one in config["input"]}
    most = max(config.get("max_batch_size", 0), 1)
    for sample in config.get("model_warmup", ()):
        name = f"model_warmup {sample.get('name', '')!r:.40}"
        if not 0 <= sample.get("batch_size", 0) <= most:
            raise InputError(
                f"{where}: {name} has a batch_size of {sample['batch_size']}, and the model takes up to {most}"
            )
        for key, value in sample.get("inputs", {}).items():
            own = inputs.get(key)
            if own is None:
                raise InputError(f"{where}: {name} has input {key!r:.60}; the model takes {', '.join(inputs)}")
            if value.get("data_type") != own["data_type"]:
                raise InputError(
                    f"{where}: {name} gives {value.get('data_type')} to {key}, which takes {own['data_type']}"
                )
            dims = value.get("dims", [])
            if -1 in dims or not fits(dims, own["dims"]):
                raise InputError(f"{where}: {name} gives {dims} to {key}, which takes {own['dims']}")
            if not {"zero_data", "random_data", "input_data_file"} & set(value):
                raise InputError(f"{where}: {name} says no data for {key}; expected zero_data: true")
        missing = sorted(set(inputs) - set(sample.get("inputs", {})))
        if missing:
            raise InputError(f"{where}: {name} has no input {missing[0]}")


def fits(dims: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether dims of a configuration may stand for a shape of a file: they say as much; -1 is any size."""
    return len(dims) == len(shape) and all(own in (-1, size) for size, own in zip(dims, shape, strict=True))
