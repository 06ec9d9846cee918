"""What the user decides about a quantization, as frozen dataclasses that validate themselves once.

A recipe is a YAML file with any of these keys (missing ones keep their default):

    calibration: {method: percentile, percentile: 99.999, batches: 25, scales: {model.4.cv1: mse}}
    finetune: {epochs: 10, iters: 200, lr: {0: 1.0e-6, 6: 1.0e-5, 7: 1.0e-6}, supervision_stride: 1}
    head: int8                          # int8 | last-conv-float | float
    add: both                           # inputs of an Add in INT8: both | residual
    float: [model.22, "model.4.cv2.*"]  # modules that stay in float: glob patterns over module paths

`calibration.method: auto` tries the methods and keeps the best (`sweep.py`); `calibration.scales` are exceptions from
the method, by the name of the scale in placement.txt: max, mse, entropy, or a percentile such as 'percentile 99.9'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from utils.core.errors import RecipeError

QUANTIZERS = ("modelopt", "pytorch-quantization")  # libraries, see backend.py
CALIBRATION_METHODS = ("max", "percentile", "mse", "entropy")
AUTO = "auto"  # try them, keep the best
HEAD_OPTIONS = ("int8", "last-conv-float", "float")
ADD_OPTIONS = ("both", "residual")


@dataclass(frozen=True)
class Calibration:
    """How amax is found from statistics of the activations."""

    method: str = "percentile"
    percentile: float = 99.999  # of the magnitudes; used by method 'percentile'
    batches: int = 25
    scales: dict[str, str] = field(default_factory=dict)  # name of a scale → the method that it has instead

    def __post_init__(self) -> None:
        _check(
            self.method in (*CALIBRATION_METHODS, AUTO),
            f"calibration.method {self.method!r} is none of {', '.join((*CALIBRATION_METHODS, AUTO))}",
        )
        _check(
            isinstance(self.scales, dict), f"calibration.scales {self.scales!r} is no mapping from scales to methods"
        )
        for text in self.scales.values():
            parse_method(text)
        _check(50.0 < self.percentile <= 100.0, f"calibration.percentile {self.percentile} is outside 50..100")
        _check(self.batches >= 1, f"calibration.batches {self.batches} is below 1")


def parse_method(text: str) -> tuple[str, float]:
    """'mse' or 'percentile 99.9' → method and percentile (which only method 'percentile' reads).

    Raises:
        RecipeError: it is neither a method nor a percentile between 50 and 100.
    """
    name, _, number = str(text).partition(" ")
    try:
        percentile = float(number or 100)
    except ValueError:
        percentile = 0.0
    good = name in CALIBRATION_METHODS and (name == "percentile") == bool(number) and 50 < percentile <= 100
    _check(good, f"{text!r} is no calibration method; expected max, mse, entropy, or such as 'percentile 99.99'")
    return name, percentile


@dataclass(frozen=True)
class Finetune:
    """Quantization-aware training under supervision by the float network."""

    epochs: int = 10
    iters: int = 200  # optimizer steps an epoch
    lr: dict[int, float] = field(default_factory=lambda: {0: 1e-6, 6: 1e-5, 7: 1e-6})  # from epoch (0-based) → rate
    supervision_stride: int = 1  # every n-th top-level layer is compared
    grad_clip: float = 10.0  # largest gradient norm
    patience: int = 0  # epochs without a better AP before it stops; 0: never
    collapse: float = 0.5  # stop when AP falls below this fraction of the PTQ AP

    def __post_init__(self) -> None:
        _check(self.epochs >= 0, f"finetune.epochs {self.epochs} is below 0")
        _check(self.iters >= 1, f"finetune.iters {self.iters} is below 1")
        _check(bool(self.lr) and 0 in self.lr, "finetune.lr needs a rate for epoch 0, such as {0: 1.0e-6}")
        _check(all(rate > 0 for rate in self.lr.values()), f"finetune.lr {self.lr} holds a rate that is not positive")
        _check(self.supervision_stride >= 1, f"finetune.supervision_stride {self.supervision_stride} is below 1")
        _check(self.grad_clip > 0, f"finetune.grad_clip {self.grad_clip} is not positive")
        _check(self.patience >= 0, f"finetune.patience {self.patience} is below 0")
        _check(0 <= self.collapse < 1, f"finetune.collapse {self.collapse} is outside 0..1")

    def rate(self, epoch: int) -> float:
        """Learning rate of an epoch (0-based): the entry with the largest key that is not above it."""
        return self.lr[max(start for start in self.lr if start <= epoch)]


@dataclass(frozen=True)
class Recipe:
    """Everything that turns a float network into a particular quantized one."""

    calibration: Calibration = field(default_factory=Calibration)
    finetune: Finetune = field(default_factory=Finetune)
    head: str = "int8"
    add: str = "both"
    float: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self.add in ADD_OPTIONS, f"add {self.add!r} is none of {', '.join(ADD_OPTIONS)}")
        _check(self.head in HEAD_OPTIONS, f"head {self.head!r} is none of {', '.join(HEAD_OPTIONS)}")

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Recipe:
        """Build a recipe; missing keys keep their default.

        Raises:
            RecipeError: an unknown key, or a value of the wrong type or outside its range.
        """
        content = dict(content)
        _known(content, cls, "recipe")
        patterns = content.get("float", ())
        _check(isinstance(patterns, (list, tuple)) and all(isinstance(item, str) for item in patterns),
               f"float {patterns!r} is not a list of module paths")  # fmt: skip
        training = dict(_section(content, "finetune", Finetune))
        if "lr" in training:
            training["lr"] = _schedule(training["lr"])
        try:
            return cls(
                calibration=Calibration(**_section(content, "calibration", Calibration)),
                finetune=Finetune(**training),
                head=content.get("head", "int8"),
                add=content.get("add", "both"),
                float=tuple(patterns),
            )
        except TypeError as error:
            raise RecipeError(f"the recipe holds a value of the wrong type: {error}") from error

    @classmethod
    def from_file(cls, path: str | Path | None) -> Recipe:
        """Read a recipe's YAML; None gives the defaults.

        Raises:
            RecipeError: the file cannot be read, or its content is not a recipe.
        """
        if path is None:
            return cls()
        import yaml

        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"--recipe {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from error
        except yaml.YAMLError as error:
            raise RecipeError(f"--recipe {path} is not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(content, Mapping):
            raise RecipeError(
                f"--recipe {path} holds a {type(content).__name__}; expected keys such as calibration or float"
            )
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


def _schedule(value: Any) -> dict[int, float]:
    try:
        return (
            {int(key): float(rate) for key, rate in value.items()} if isinstance(value, Mapping) else {0: float(value)}
        )
    except (TypeError, ValueError) as error:
        raise RecipeError(f"finetune.lr {value!r} is neither a number nor a mapping from epoch to rate") from error


def _section(content: Mapping[str, Any], name: str, cls: type) -> Mapping[str, Any]:
    section = content.get(name, {})
    if not isinstance(section, Mapping):
        raise RecipeError(
            f"{name} is {section!r}; expected keys such as {', '.join(entry.name for entry in fields(cls))}"
        )
    _known(section, cls, name)
    return section


def _known(content: Mapping[str, Any], cls: Any, name: str) -> None:
    known = [entry.name for entry in fields(cls)]
    unknown = [str(key) for key in content if key not in known]
    if unknown:
        raise RecipeError(f"{name} has no key {', '.join(unknown)}; it knows {', '.join(known)}")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RecipeError(message)
