"""What a recipe may hold: a table of its fields, each with its type, bounds or choices, and how a value is checked.

    RECIPE["calibration"].fields["batches"].read("calibration.batches", 2.5)
    RecipeError: calibration.batches is 2.5; it may hold an integer from 1 to 1,000,000

Defaults are the dataclasses' in `recipe.py`; bounds of numbers are those of `utils/core/bounds.py`. They lie far
outside what helps: they stand against slips.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from utils.core.bounds import BOUNDS, Bounds
from utils.core.errors import RecipeError
from utils.core.removed import removed
from utils.core.shown import shown

CALIBRATION_METHODS = ("max", "percentile", "mse", "entropy")
AUTO = "auto"  # try them, keep the best
TRAIN_OPTIONS = ("all", "ranges")
SUPERVISIONS = ("task", "layers")
HEAD_OPTIONS = ("int8", "last-conv-float", "float")
ADD_OPTIONS = ("both", "residual")
LONGEST = 200  # characters of a pattern
MOST = 10_000  # entries of a list: networks have hundreds of convolutions


class Field(Protocol):
    """One entry of a recipe."""

    @property
    def expected(self) -> str:
        """What it may hold, in words."""

    def read(self, key: str, value: Any) -> Any:
        """The value in its type.

        Args:
            key: how a message names the entry, such as `calibration.batches`.

        Raises:
            RecipeError: the entry may not hold this value.
        """


@dataclass(frozen=True)
class Number:
    """A number within bounds; `true` is none, neither infinite nor NaN, and 2.0 is no integer."""

    bounds: Bounds

    @property
    def expected(self) -> str:
        """Name the bounds, such as 'an integer from 1 to 1,000,000'."""
        return str(self.bounds)

    def read(self, key: str, value: Any) -> Any:
        """Return an int where the bounds are for integers, and a float elsewhere."""
        if value not in self.bounds:
            raise misfit(key, value, self.expected)
        return int(value) if self.bounds.whole else float(value)


@dataclass(frozen=True)
class Choice:
    """One of several words."""

    words: tuple[str, ...]

    @property
    def expected(self) -> str:
        """List the words."""
        return f"{', '.join(self.words[:-1])} or {self.words[-1]}"

    def read(self, key: str, value: Any) -> str:
        """Return the word itself; other spellings, such as capitals, are refused."""
        if not isinstance(value, str) or value not in self.words:
            raise misfit(key, value, self.expected)
        return value


@dataclass(frozen=True)
class Text:
    """A text that is not empty."""

    expected: str

    def read(self, key: str, value: Any) -> str:
        """Return the text itself; it has at most `LONGEST` characters."""
        if not isinstance(value, str) or not 1 <= len(value) <= LONGEST:
            raise misfit(key, value, self.expected)
        return value


@dataclass(frozen=True)
class Listing:
    """A list of values of one kind; becomes a tuple."""

    expected: str
    item: Field

    def read(self, key: str, value: Any) -> tuple[Any, ...]:
        """Return the items in their type; there are at most `MOST` of them."""
        if not isinstance(value, (list, tuple)) or len(value) > MOST:
            raise misfit(key, value, self.expected)
        return tuple(self.item.read(f"{key}[{index}]", item) for index, item in enumerate(value))


@dataclass(frozen=True)
class Rate:
    """The highest learning rate of a schedule, or 'auto'."""

    rate: Number
    expected: str = "auto, or a learning rate"

    def read(self, key: str, value: Any) -> str | float:
        """Return the word 'auto', or a rate."""
        if isinstance(value, str) and value == AUTO:
            return AUTO
        if isinstance(value, Mapping):
            raise RecipeError(f"{key} by epoch {removed('finetune.lr by epoch')}")
        if not _is_number(value, (int, float)):
            raise misfit(key, value, self.expected)
        return float(self.rate.read(key, value))


@dataclass(frozen=True)
class Section:
    """Entries by name; those that are missing keep their default."""

    fields: Mapping[str, Field]

    @property
    def expected(self) -> str:
        """List the keys."""
        return f"the keys {', '.join(self.fields)}"

    def read(self, key: str, value: Any) -> dict[str, Any]:
        """Return the entries that are given, in their types; a key that is not in `fields` is refused."""
        if not isinstance(value, Mapping):
            raise misfit(key, value, self.expected)
        for name in value:
            if hint := removed(f"{key}.{name}"):
                raise RecipeError(f"{key}.{name} {hint}")
            if not isinstance(name, str) or name not in self.fields:
                meant = difflib.get_close_matches(str(name)[:LONGEST], self.fields, 1) if isinstance(name, str) else []
                hint = f"; did you mean {meant[0]}?" if meant else ""
                raise RecipeError(f"{key} has no key {shown(name)}; it may hold {self.expected}{hint}")
        prefix = "" if key == WHOLE else f"{key}."
        return {name: self.fields[name].read(f"{prefix}{name}", item) for name, item in value.items()}


WHOLE = "the recipe"  # how a message names all of it
RATE = Number(BOUNDS["lr"])
CALIBRATION = Section(
    {
        "method": Choice((*CALIBRATION_METHODS, AUTO)),
        "percentile": Number(BOUNDS["percentile"]),
        "median_limit": Number(BOUNDS["median_limit"]),
        "batches": Number(BOUNDS["calib_batches"]),
    }
)
FINETUNE = Section(
    {
        "epochs": Number(BOUNDS["epochs"]),
        "iters": Number(BOUNDS["iters"]),
        "lr": Rate(RATE),
        "bias_rate": Number(BOUNDS["rate_factor"]),
        "range_rate": Number(BOUNDS["rate_factor"]),
        "train": Choice(TRAIN_OPTIONS),
        "ranges": Choice(("learned", "fixed")),
        "supervision": Choice(SUPERVISIONS),
        "held_out": Number(BOUNDS["held_out"]),
        "supervision_stride": Number(BOUNDS["supervision_stride"]),
        "grad_clip": Number(BOUNDS["grad_clip"]),
        "collapse": Number(BOUNDS["collapse"]),
    }
)
RECIPE: Mapping[str, Field] = {
    "calibration": CALIBRATION,
    "finetune": FINETUNE,
    "head": Choice(HEAD_OPTIONS),
    "add": Choice(ADD_OPTIONS),
    "float": Listing(
        "a list of module paths and glob patterns of them, such as [model.22, 'model.4.cv2.*']",
        Text(f"a module's path such as model.22, or a glob pattern of paths, of at most {LONGEST} characters"),
    ),
}


def misfit(key: str, value: Any, expected: str) -> RecipeError:
    """The error of an entry that holds what it may not hold."""
    found = "empty" if value is None else shown(value)  # as YAML writes it
    return RecipeError(f"{key} is {found}; it may hold {expected}")


def _is_number(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
