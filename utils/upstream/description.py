"""Upstream's model descriptions (YAML), checked before upstream sees them.

Upstream's `parse_model` evaluates texts of a description as Python, and a description may come from a stranger's
checkpoint. So each text that it evaluates has to be listed here, and everything else be a number.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Collection, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from utils.core.errors import CheckpointError, InputError
from utils.core.text import short_repr

REQUIRED = ("nc", "depth_multiple", "width_multiple", "backbone", "head", "anchors")
NUMBERS = ("nc", "depth_multiple", "width_multiple", "anchors", "ch", "sem_nc", "inplace", "class_channels")
BLOCKS = (
    "AConv", "ADown", "Bottleneck", "CBFuse", "CBLinear", "Concat", "Conv", "DFL", "DWConv", "ELAN1", "MP", "Proto",
    "RepConvN", "RepNBottleneck", "RepNCSP", "RepNCSPELAN4", "SP", "SPP", "SPPCSPC", "SPPELAN", "SPPF", "Silence",
    "UConv",
)  # fmt: skip
ALL_HEADS = (
    "Detect", "DDetect", "DualDetect", "DualDDetect", "TripleDetect", "TripleDDetect",
    "Segment", "DSegment", "DualDSegment", "Panoptic",
)  # fmt: skip
MODULES = (*BLOCKS, *ALL_HEADS, "nn.Upsample", "nn.MaxPool2d", "nn.ZeroPad2d")  # that a description may name
WORDS = ("nc", "anchors", "None", "nearest")  # all that upstream's own YAMLs have as arguments
ACTIVATIONS = frozenset(
    f"nn.{name}({arguments})"
    for name in ("SiLU", "ReLU", "ReLU6", "Hardswish", "Mish", "LeakyReLU", "ELU")
    for arguments in ("", "inplace=True")
) | {"nn.LeakyReLU(0.1)", "nn.LeakyReLU(0.1, inplace=True)", "nn.GELU()", "nn.Identity()"}
PARAMETERS: dict[str, dict[str, Any]] = {  # of activations, with their defaults
    **{name: {"inplace": False} for name in ("SiLU", "ReLU", "ReLU6", "Hardswish", "Mish")},
    "LeakyReLU": {"negative_slope": 0.01, "inplace": False}, "ELU": {"alpha": 1.0, "inplace": False},
    "GELU": {"approximate": "none"}, "Identity": {},
}  # fmt: skip
LARGEST = 10_000  # of any number: classes, channels, the size of an anchor


def check_description(description: Any) -> dict[str, Any]:
    """Return the part of a description that upstream reads; `InputError` for the first value that is not allowed."""
    if not isinstance(description, Mapping):
        raise InputError(f"the model description is a {type(description).__name__}; expected keys such as nc and head")
    missing = [key for key in REQUIRED if key not in description]
    if missing:
        raise InputError(f"the model description lacks {', '.join(missing)}")
    for key in NUMBERS:
        _check_numbers(description.get(key), key)
    keys = (*REQUIRED, *NUMBERS, "activation")
    checked = {key: value for key, value in description.items() if key in keys}
    if checked.get("activation") not in (None, ""):
        checked["activation"] = _check_activation(checked["activation"])
    for part in ("backbone", "head"):
        if type(description[part]) is not list:
            raise _wrong(part, description[part], "a list of layers")
    for index, row in enumerate([*description["backbone"], *description["head"]]):
        _check_layer(f"layer {index}", row)
    return checked


def _check_layer(where: str, row: Any) -> None:
    """Check a layer: its sources, the number of repetitions, the module's class, and arguments."""
    if type(row) not in (list, tuple) or len(row) != 4 or type(row[3]) not in (list, tuple):
        raise _wrong(where, row, "[from, number, module, arguments]")
    sources, count, name, arguments = row
    if type(name) is not str or name not in MODULES:
        raise _wrong(where, name, "a module class of upstream's (BLOCKS in utils/upstream/description.py)")
    _check_numbers([sources, count], where)
    _check_numbers(arguments, f"{where} ({name})", WORDS)


def _check_activation(text: Any) -> str:
    """Return the activation of `ACTIVATIONS` that computes the same; `InputError` if none does."""
    expected = f"one of {', '.join(sorted(ACTIVATIONS))}"
    if type(text) is not str or len(text) > 100:
        raise _wrong("activation", text, expected)
    try:
        call = _parsed_call(text)
    except (SyntaxError, ValueError, TypeError) as error:
        raise _wrong("activation", text, expected) from error
    for activation in sorted(ACTIVATIONS):
        if _parsed_call(activation) == call:
            return activation
    raise _wrong("activation", text, expected)


def _parsed_call(text: str) -> tuple[str, dict[str, Any]]:
    """Parse name and arguments of a call, defaults too; nothing is evaluated but constants.

    >>> _parsed_call("nn.ReLU(True)")
    ('ReLU', {'inplace': True})
    >>> _parsed_call("torch.nn.LeakyReLU()")
    ('LeakyReLU', {'negative_slope': 0.01, 'inplace': False})
    """
    call = ast.parse(text.strip(), mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError("not a call")
    module, _, name = ast.unparse(call.func).rpartition(".")
    if module not in ("nn", "torch.nn") or name not in PARAMETERS:
        raise ValueError("not an activation of torch.nn")
    signature = Signature([Parameter(key, Parameter.POSITIONAL_OR_KEYWORD) for key in PARAMETERS[name]])
    named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    positional = [ast.literal_eval(argument) for argument in call.args]
    arguments = signature.bind_partial(*positional, **named).arguments
    return name, PARAMETERS[name] | arguments


def _check_numbers(value: Any, where: str, words: Collection[str] = (), depth: int = 0) -> None:
    """Raise `InputError` for another value than numbers, true, false, None, some `words`, and lists of these."""
    if type(value) in (list, tuple) and depth < 4:
        for item in value:
            _check_numbers(item, where, words, depth + 1)
        return
    is_word = type(value) is str and value in words
    is_number = type(value) in (bool, int, float) and -LARGEST <= value <= LARGEST
    if value is not None and not is_word and not is_number:
        raise _wrong(where, value, f"a number up to {LARGEST}{', or '.join(['', *words])}")


def _wrong(where: str, value: Any, expected: str) -> InputError:
    return InputError(f"{where} of the model description is {short_repr(value)}; expected {expected}")


AUXILIARY_HEADS = ("DualDetect", "DualDDetect", "TripleDetect", "TripleDDetect", "DualDSegment")
TRAINING_HEAD = "DualDDetect"  # of yolov9-t, -s, -m, -c and -e
TRAINING_HEADS = (TRAINING_HEAD, "DualDSegment")  # the second of yolov9-c-dseg
HEADS = ("Detect", "DDetect", "Segment", "DSegment")


def check_head(model: Any, where: str | Path, heads: Collection[str] = HEADS) -> None:
    """Raise `CheckpointError` for a network that ends in another head than those in `heads`, saying what to do."""
    head = type(model.model[-1]).__name__
    if head in heads:
        return
    if head in TRAINING_HEADS:
        converted = Path(where).with_name(f"{Path(where).stem}-converted.pt")
        words = ["python", "reparameterization.py", "--weights", str(where), "--save", str(converted)]
        raise CheckpointError(
            f"{where} still has its auxiliary training branch ({head}); convert it first: {shlex.join(words)}"
        )
    if head in AUXILIARY_HEADS:
        raise CheckpointError(f"{where} ends in {head}, whose auxiliary branch this overlay does not convert")
    converted_already = " It is converted already and can be used as it is" if head in HEADS else ""
    raise CheckpointError(f"{where} ends in {head}; expected {' or '.join(heads)}.{converted_already}")
