"""Upstream's model descriptions (YAML), checked before upstream sees them.

Upstream evaluates the strings of a description as Python. So nothing gets there but names and numbers from
utils/untrusted/allowed_names.py, and counts small enough that building ends: it may come in somebody else's checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from utils.core.errors import InputError
from utils.core.shown import shown
from utils.untrusted.allowed_names import ACTIVATIONS, HEADS, LAYERS, WORDS, Layer

REQUIRED = ("nc", "depth_multiple", "width_multiple", "backbone", "head", "anchors")
MOST_LAYERS = 300  # upstream's largest has 106
MOST_BLOCKS = 1000  # repeated modules, all layers together
MOST_CLASSES = 10_000
WIDEST = 8192  # channels, times the width multiple
LARGEST = 64  # any other number: a kernel size, a stride, a padding
LONGEST = 32  # of any list
POOLS = {"MP": 0, "SP": 0, "nn.MaxPool2d": 0, "SPP": 1, "SPPF": 1, "SPPCSPC": 1}  # first argument of the windows
NONE = LONGEST  # where an argument is not one of the list
PADDINGS = {"Conv": (3, 1), "CBLinear": (3, 1), "nn.MaxPool2d": (2, 0), "nn.ZeroPad2d": (0, NONE), "DWConv": (NONE, 1),
            "SP": (NONE, 0), "Bottleneck": (NONE, 3)}  # arguments: the padding, the kernel size  # fmt: skip
POOLING = 20  # multiplications that take as long as looking at one value of a window
SIDE = 256  # pixels of the image by which upstream finds the strides
MOST_PARAMETERS = 300_000_000  # yolov9-e with its auxiliary branch has 70 million
MOST_OPERATIONS = 5e11  # multiplications of an image of 256 x 256, by which upstream finds the strides
MOST_VALUES = 2.5e8  # values of that image's activations, all layers together


def check(description: Any) -> dict[str, Any]:
    """The part of a description that upstream reads, as it stands, when every value is one that it may hold.

    Raises:
        InputError: the first value that is not; keys that upstream does not read are left out.
    """
    if not isinstance(description, Mapping):
        raise InputError(f"the model description is a {type(description).__name__}; expected keys such as nc and head")
    missing = [key for key in REQUIRED if key not in description]
    if missing:
        raise InputError(f"the model description lacks {', '.join(missing)}")
    _number(description["nc"], "nc", 1, MOST_CLASSES, whole=True)
    for key in ("depth_multiple", "width_multiple"):
        _number(description[key], key, 0.01, 10)
    _number(description.get("ch", 3), "ch", 1, LARGEST, whole=True)
    _number(description.get("sem_nc", 0), "sem_nc", 0, MOST_CLASSES, whole=True)
    if type(description.get("inplace", True)) is not bool:
        raise _wrong("inplace", description["inplace"], "true or false")
    _check_anchors(description["anchors"])
    activation = description.get("activation")
    if activation is not None and (type(activation) is not str or activation not in {"", *ACTIVATIONS}):
        raise InputError(
            f"the model description's activation {shown(activation)} is not a torch.nn module such as nn.ReLU(); "
            f"expected one of {', '.join(sorted(ACTIVATIONS))}"
        )
    _check_layers(description)
    known = (*REQUIRED, "ch", "sem_nc", "inplace", "activation")
    return {key: description[key] for key in description if key in known}


def check_cost(parameters: list[int], description: Mapping[str, Any]) -> None:
    """Whether a network can be built and run on an image in seconds and in a few gigabytes.

    Args:
        parameters: of each layer.

    Raises:
        InputError: it cannot.
    """
    resolutions = _resolutions(description)
    positions = [(SIDE * resolution) ** 2 for resolution in resolutions]
    repeats = [_repeated(row[1], description["depth_multiple"]) for row in _rows(description)]
    widths = [width * times for width, times in zip(_widths(description), repeats, strict=True)]
    windows = [_window(row) * width for row, width in zip(_rows(description), widths, strict=True)]
    counts = [one + two for one, two in zip(parameters, windows, strict=True)]
    operations = sum(count * area for count, area in zip(counts, positions, strict=True))
    values = sum(width * area for width, area in zip(widths, positions, strict=True))
    for found, most, unit in (
        (sum(parameters), MOST_PARAMETERS, "parameters"),
        (operations, MOST_OPERATIONS, "multiplications for an image of 256 x 256"),
        (values, MOST_VALUES, "activations for an image of 256 x 256"),
    ):
        if not found <= most:
            raise InputError(
                f"the model description describes a network with {found:.3g} {unit}; the limit is {most:.3g}"
            )


def _check_anchors(anchors: Any) -> None:
    if type(anchors) is int:
        _number(anchors, "anchors", 1, 100, whole=True)
        return
    if type(anchors) is not list or not 1 <= len(anchors) <= LONGEST:
        raise _wrong("anchors", anchors, "a number, or lists of numbers")
    for row in anchors:
        if type(row) is not list or not 2 <= len(row) <= LONGEST:
            raise _wrong("anchors", row, "lists of numbers")
        for value in row:
            _number(value, "anchors", 0, 1e6)


def _check_layers(description: Mapping[str, Any]) -> None:
    for part in ("backbone", "head"):
        if type(description[part]) is not list:
            raise _wrong(part, description[part], "a list of layers")
    rows = _rows(description)
    if not 1 <= len(rows) <= MOST_LAYERS:
        raise InputError(f"the model description has {len(rows)} layers; expected 1 to {MOST_LAYERS}")
    blocks = 0
    for index, row in enumerate(rows):
        where = f"layer {index}"
        if type(row) not in (list, tuple) or len(row) != 4:
            raise _wrong(where, row, "[from, number, module, arguments]")
        sources, count, name, arguments = row
        _check_sources(sources, index, where)
        _number(count, f"{where}, number", 1, LARGEST, whole=True)
        if type(name) is not str or name not in LAYERS:
            raise InputError(
                f"{where} of the model description names {shown(name)} where a plain name was expected: one of "
                f"upstream's modules, {', '.join(LAYERS)}"
            )
        layer = LAYERS[name]
        words = WORDS if name in HEADS else WORDS - {"nc", "anchors"}  # which may be large
        _check_arguments(arguments, layer, f"{where} ({name})", description["width_multiple"], words)
        repeats = arguments[layer.repeats] if -1 < layer.repeats < len(arguments) else 1
        if layer.repeats > -1:
            _number(repeats, f"{where} ({name}), repeats", 1, LARGEST, whole=True)
        blocks += _repeated(count, description["depth_multiple"]) * repeats
    if blocks > MOST_BLOCKS:
        raise InputError(f"the model description repeats modules {blocks} times; the limit is {MOST_BLOCKS}")


def _check_sources(sources: Any, index: int, where: str) -> None:
    for source in sources if type(sources) is list and 1 <= len(sources) <= LONGEST else [sources]:
        if type(source) is not int or not (source == -1 or -index <= source < index):
            raise _wrong(f"{where}, from", source, "-1 or an earlier layer")


def _check_arguments(arguments: Any, layer: Layer, where: str, multiple: float, words: frozenset[str]) -> None:
    if type(arguments) not in (list, tuple) or len(arguments) > LONGEST:
        raise _wrong(where, arguments, "a list of arguments")
    for position, value in enumerate(arguments):
        if type(value) is str and value in words:
            continue
        if type(value) is str:
            raise InputError(
                f"{where} of the model description holds {shown(value)} where a plain name was expected: one of "
                f"{', '.join(sorted(words))}"
            )
        most = WIDEST if position in layer.widths else LARGEST
        scale = multiple if layer.scaled and position == 0 else 1
        for one in _flat(value, where):
            if one is not None and type(one) is not bool:
                _number(one, f"{where}, argument {position}", -LARGEST, most)
                if one * scale > most:
                    raise _wrong(f"{where}, argument {position}, times width_multiple", one * scale, f"at most {most}")


def _flat(value: Any, where: str, depth: int = 0) -> list[Any]:
    if type(value) not in (list, tuple):
        return [value]
    if depth > 1 or len(value) > LONGEST:
        raise _wrong(where, value, f"lists of at most {LONGEST} numbers")
    return [one for item in value for one in _flat(item, where, depth + 1)]


def _number(value: Any, where: str, least: float, most: float, *, whole: bool = False) -> None:
    if type(value) is not int and (whole or type(value) is not float):
        raise _wrong(where, value, "a whole number" if whole else "a number")
    if not least <= value <= most:  # also NaN
        raise _wrong(where, value, f"a number from {least:g} to {most:g}")


def _wrong(where: str, value: Any, expected: str) -> InputError:
    return InputError(f"{where} of the model description is {shown(value)}; expected {expected}")


def _repeated(count: int, multiple: float) -> int:
    return max(round(count * multiple), 1) if count > 1 else count


def _rows(description: Mapping[str, Any]) -> list[Any]:
    return [*description["backbone"], *description["head"]]


def _window(row: Any) -> int:
    """What each value of a pool's result costs, in multiplications."""
    _, _, name, arguments = row
    if name not in POOLS:
        return 0
    flat = [one for value in arguments[POOLS[name] :] for one in _flat(value, name)]
    return POOLING * (int(sum(one**2 for one in flat if type(one) in (int, float))) + 25)


def _growth(name: str, arguments: Any) -> float:
    """Pixels by which a layer's padding makes a side longer, at most."""
    paddings, kernels = (_numbers(arguments, place) for place in PADDINGS.get(name, (NONE, NONE)))
    even = sum(one % 2 == 0 for one in kernels)  # half of a kernel is what upstream pads by default
    return max(2 * max(paddings, default=0) - (min(kernels, default=1) - 1), even)


def _numbers(arguments: Any, place: int) -> list[float]:
    flat = _flat(arguments[place], "") if place < len(arguments) else []
    return [one for one in flat if isinstance(one, (int, float))]


def _source_indices(sources: Any, index: int) -> list[int]:
    return [index + one if one < 0 else one for one in (sources if type(sources) is list else [sources])]


def _resolutions(description: Mapping[str, Any]) -> list[float]:
    """Of each layer's result, relative to the image."""
    found: list[float] = []
    for index, (sources, count, name, arguments) in enumerate(_rows(description)):
        resolution = max((found[one] if one >= 0 else 1.0) for one in _source_indices(sources, index))
        layer = LAYERS[name]
        stride: Any = layer.stride
        if -1 < layer.stride_at < len(arguments) and type(arguments[layer.stride_at]) is int:
            stride = max(arguments[layer.stride_at], 1)
        elif name == "MP":
            stride = arguments[0] if arguments and type(arguments[0]) is int and arguments[0] > 0 else 2
        elif name == "nn.MaxPool2d" and arguments and type(arguments[0]) is int:
            stride = arguments[1] if len(arguments) > 1 and type(arguments[1]) is int else arguments[0]
            stride = max(stride, 1)
        elif name == "nn.Upsample":
            size, factor = [*arguments, None, None][:2]
            if size not in (None, "None") or type(factor) not in (int, float) or not 0.01 <= factor <= 4:
                raise _wrong(f"layer {index} (nn.Upsample)", factor, "[None, scale, nearest] with a scale of at most 4")
            stride = 1 / factor
        repeats = _repeated(count, description["depth_multiple"])
        padded = repeats * _growth(name, arguments) / SIDE
        found.append(min(resolution / float(stride) ** repeats + padded, 1e9))
    return found


def _widths(description: Mapping[str, Any]) -> list[int]:
    """Channels of each layer's result, about."""
    found: list[int] = []
    for index, (sources, _, name, arguments) in enumerate(_rows(description)):
        inputs = [found[one] if one >= 0 else description.get("ch", 3) for one in _source_indices(sources, index)]
        first = arguments[0] if arguments else 0
        if name in HEADS or name == "Concat":
            width = sum(inputs)
        elif type(first) is int and 0 in LAYERS[name].widths:
            width = math.ceil(max(first, 1) * description["width_multiple"]) + 8
        elif type(first) is list and 0 in LAYERS[name].widths:
            width = sum(one for one in first if type(one) is int)
        else:
            width = inputs[-1]
        found.append(min(width, 10**9))
    return found
