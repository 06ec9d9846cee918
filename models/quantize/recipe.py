"""What the user decides about a quantization, as frozen dataclasses that validate themselves once.

A recipe is a YAML file with any of these keys (missing ones keep their default):

    calibration: {method: percentile, percentile: 99.999, median_limit: 4, batches: 25}
    finetune: {epochs: 10, iters: 200, lr: auto, supervision: task, train: all}
    head: int8                          # int8 | last-conv-float | float
    add: both                           # inputs of an Add in INT8: both | residual
    float: [model.22, "model.4.cv2.*"]  # modules that stay in float: glob patterns over module paths

`recipe_fields.py` says what each of them may hold, `utils/core/module_patterns.py` what a pattern names.
`calibration.method: auto` tries the methods and keeps the best (`utils/jobs/calibrate.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from models.quantize import recipe_fields
from models.quantize.recipe_fields import ADD_OPTIONS, AUTO, CALIBRATION_METHODS, HEAD_OPTIONS
from utils.core.errors import RecipeError

__all__ = [
    "ADD_OPTIONS", "AUTO", "CALIBRATION_METHODS", "HEAD_OPTIONS", "QUANTIZERS", "Calibration", "Finetune", "Recipe",
]  # fmt: skip

# Keys that only recipes of 1.0 have → the value that every file of 1.0 holds, and that asks for nothing.
OF_1_0: dict[str, dict[str, Any]] = {
    "calibration": {"scales": {}},
    "finetune": {"weight_ranges": "fixed", "features": 0.0, "patience": 0},
}
QUANTIZERS = ("torch", "pytorch-quantization")  # see backend.py


@dataclass(frozen=True)
class Calibration:
    """How amax is found from statistics of the activations.

    Raises:
        RecipeError: a value that `recipe_fields` does not allow.
    """

    method: str = "percentile"
    percentile: float = 99.999  # of the magnitudes; used by method 'percentile'
    batches: int = 25
    median_limit: float = 4.0  # amax is at most so many times the largest magnitude of the median image; 0: no limit

    def __post_init__(self) -> None:
        _settle(self, recipe_fields.CALIBRATION.read("calibration", vars(self)))


@dataclass(frozen=True)
class Finetune:
    """Quantization-aware training under supervision by the float network.

    Raises:
        RecipeError: a value that `recipe_fields` does not allow.
    """

    epochs: int = 10
    iters: int = 200  # optimizer steps an epoch, at most: an epoch is one pass over the images
    lr: str | float = AUTO  # of weights, highest
    bias_rate: float = 10.0  # times lr
    range_rate: float = 500.0  # times lr, of the logarithm of amax
    train: str = "all"  # all | ranges
    ranges: str = "learned"  # of activations: learned | fixed
    supervision: str = "task"  # task | layers, see supervision.py
    supervision_stride: int = 1  # of the supervision by layers: every n-th top-level layer is compared
    held_out: int = 200  # training images that choose the best state, a tenth of the split at most
    grad_clip: float = 10.0  # largest gradient norm
    collapse: float = 0.5  # stop when AP falls below this fraction of the PTQ AP

    def __post_init__(self) -> None:
        _settle(self, recipe_fields.FINETUNE.read("finetune", vars(self)))
        if self.train == "ranges" and self.ranges == "fixed":
            raise RecipeError("finetune.train is ranges, but finetune.ranges is fixed: nothing trains")


@dataclass(frozen=True)
class Recipe:
    """Everything that turns a float network into a particular quantized one.

    Raises:
        RecipeError: a value that `recipe_fields` does not allow.
    """

    calibration: Calibration = field(default_factory=Calibration)
    finetune: Finetune = field(default_factory=Finetune)
    head: str = "int8"
    add: str = "both"
    float: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        plain = {key: getattr(self, key) for key in ("head", "add", "float")}
        _settle(self, recipe_fields.Section(recipe_fields.RECIPE).read(recipe_fields.WHOLE, plain))

    @classmethod
    def from_dict(cls, content: Any) -> Recipe:
        """Build a recipe from a mapping; missing keys keep their default.

        Raises:
            RecipeError: it is no mapping, or holds an unknown key or a value that the entry may not hold.
        """
        content = _without_keys_of_1_0(content, lambda section, key, value: value == OF_1_0[section][key])
        values = recipe_fields.Section(recipe_fields.RECIPE).read(recipe_fields.WHOLE, content)
        for key, section in (("calibration", Calibration), ("finetune", Finetune)):
            if key in values:
                values[key] = section(**values[key])
        return cls(**values)

    @classmethod
    def from_stored(cls, content: Any) -> Recipe:
        """Build the recipe that a checkpoint or a run holds, which may be one of 1.0.

        What only 1.0 could do is left out, since it says how the ranges and weights were found. Before 1.0 ranges had
        no limit, and no key for it.

        Raises:
            RecipeError: see `from_dict`.
        """
        content = _without_keys_of_1_0(content, lambda *_: True)
        if isinstance(content.get("finetune", {}).get("lr"), Mapping):
            content["finetune"]["lr"] = AUTO
        recipe = cls.from_dict(content)
        limited = "median_limit" in content.get("calibration", {})
        return recipe if limited else recipe.replace(calibration_median_limit=0.0)

    @classmethod
    def from_file(cls, path: str | Path | None) -> Recipe:
        """Read a recipe's YAML; None gives the defaults.

        Raises:
            RecipeError: the file cannot be read, or its content is not a recipe.
        """
        if path is None:
            return cls()
        from utils.core import plain_yaml

        try:
            content = plain_yaml.parse(Path(path))
        except (OSError, ValueError) as error:  # of a path with a NUL too
            raise RecipeError(f"--recipe {path}: {getattr(error, 'strerror', None) or error}") from error
        try:
            return cls.from_dict(content)
        except RecipeError as error:
            raise RecipeError(f"--recipe {path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and texts: what YAML and JSON hold, and `from_dict` takes."""
        return {**asdict(self), "float": list(self.float)}

    def replace(self, **changes: Any) -> Recipe:
        """A copy with fields replaced; those of sections as `calibration_method=...`, `finetune_epochs=...`."""
        direct = {key: value for key, value in changes.items() if key in {entry.name for entry in fields(self)}}
        for section in ("calibration", "finetune"):
            prefix = f"{section}_"
            inner = {key.removeprefix(prefix): value for key, value in changes.items() if key.startswith(prefix)}
            if inner:
                direct[section] = replace(direct.get(section, getattr(self, section)), **inner)
        return replace(self, **direct)


def _without_keys_of_1_0(content: Any, drops: Callable[[str, str, Any], bool]) -> Any:
    """A copy of a recipe's content without the keys of `OF_1_0` for which `drops` (section, key, value) holds."""
    if not isinstance(content, Mapping):
        return content
    left = dict(content)
    for section, keys in OF_1_0.items():
        if isinstance(entries := content.get(section), Mapping):
            left[section] = {
                key: value for key, value in entries.items() if key not in keys or not drops(section, key, value)
            }
    return left


def _settle(values: Any, checked: Mapping[str, Any]) -> None:
    """Give a frozen dataclass that is being made its fields in their types: a number as float, a list as tuple."""
    for name, value in checked.items():
        object.__setattr__(values, name, value)
