"""What a file says that its recipe leaves in float: written by the exporter, read by the verifier.

The metadata's `float_modules` is a JSON list with the path of every convolution in float, as placement.txt spells them.
Files of version 0.1.0 lack it; of them the recipe's patterns and head are read, by the matcher that places quantizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from models.quantize import recipe_fields

KEY = "float_modules"


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
            RecipeError: the recipe's `float` or `head` is none.
        """
        if KEY in entries:
            modules = _json(KEY, entries[KEY])
            if not isinstance(modules, list) or not all(isinstance(path, str) for path in modules):
                raise ValueError(f"{KEY} is not a list of module paths")
            return cls(frozenset(modules))
        recipe = _json("recipe", entries.get("recipe") or "{}")
        if not isinstance(recipe, dict):
            raise ValueError("recipe is not a mapping")
        values = {key: recipe_fields.RECIPE[key].read(key, recipe[key]) for key in ("float", "head") if key in recipe}
        return cls(None, tuple(values.get("float", ())), values.get("head", "int8"))


def properties(convolutions: Iterable[str]) -> dict[str, str]:
    """The metadata of a file in which these convolutions stay in float."""
    return {KEY: json.dumps(list(convolutions))}


def _json(name: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
