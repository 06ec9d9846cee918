"""What a file says that its recipe leaves in float: written by the exporter, read by the verifier.

The metadata's `float_modules` is a JSON list with the path of every convolution in float, as placement.txt spells them.
Files of version 0.1.0 lack it; of them the recipe's patterns and head are read, by the matcher that places quantizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

KEY = "float_modules"
HEADS = ("int8", "last-conv-float", "float")  # what a recipe's `head` may say


@dataclass(frozen=True)
class FloatParts:
    """What stays in float.

    Attributes:
        modules: paths of the convolutions; None in a file that does not name them.
        patterns, head: of the recipe, for such a file.
    """

    modules: frozenset[str] | None = None
    patterns: tuple[str, ...] = ()
    head: str = "int8"  # int8 | last-conv-float | float

    @classmethod
    def from_metadata(cls, entries: Mapping[str, str]) -> FloatParts:
        """Read what the exporter wrote into the file; without it, everything must be quantized.

        Raises:
            ValueError: it is not JSON, or not what the exporter writes.
        """
        if KEY in entries:
            modules = _json(KEY, entries[KEY])
            if not isinstance(modules, list) or not all(isinstance(path, str) for path in modules):
                raise ValueError(f"{KEY} is not a list of module paths")
            return cls(frozenset(modules))
        recipe = _json("recipe", entries.get("recipe") or "{}")
        if not isinstance(recipe, dict):
            raise ValueError("recipe is not a mapping")
        patterns, head = recipe.get("float", []), recipe.get("head", "int8")
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError("the recipe's float is not a list of module patterns")
        if head not in HEADS:
            raise ValueError(f"the recipe's head is {head!r:.40}; expected one of {', '.join(HEADS)}")
        return cls(None, tuple(patterns), head)


def properties(convolutions: Iterable[str]) -> dict[str, str]:
    """The metadata of a file in which these convolutions stay in float."""
    return {KEY: json.dumps(list(convolutions))}


def _json(name: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
