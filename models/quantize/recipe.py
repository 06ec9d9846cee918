"""Settings of a quantization that the user decides: frozen pydantic models with bounds, which check themselves.

A recipe is a YAML file with any of these keys (missing ones keep their default):

    calibration: {method: auto, median_limit: 4, images: 250}
    finetune: {epochs: 10, iters: 45, lr: auto, train: all}
    head: int8                          # int8 | last-conv-float | float
    add: both                           # inputs of an Add in INT8: both | residual
    float: [model.22, "model.4.cv2.*"]  # modules that stay in float: glob patterns over module paths

A pattern of `float` is a path, or a path with wildcards, over dotted module paths:

    model.4             a path without wildcards names the module and all that is below it
    model.4.cv?         wildcards (`*`, `?`, `[0-3]`; case matters) match a convolution's whole path: cv1 and cv4, but
                        not what is inside cv2; `*` also crosses dots: model.4.* is all that is below model.4
    model.4.cv1.conv    the path as placement.txt and the weights spell it; model.4.cv1 is the same convolution

Bounds are far wider than useful values: they only catch slips.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from utils.core.errors import RecipeError
from utils.core.files import read_yaml, write_text
from utils.core.strict_model import StrictModel, validate

AUTO = "auto"  # calibration.method by the loss on training images (utils/jobs/calibrate.py); finetune.lr is USUAL_RATE
USUAL_RATE = 3e-5  # the highest learning rate of weights
Method = Literal["max", "percentile", "mse", "auto"]
Train = Literal["all", "ranges"]

# Keys that only recipes of 1.0 have → their neutral value, which files of 1.0 hold.
OF_1_0: dict[str, dict[str, Any]] = {
    "calibration": {"scales": {}},
    "finetune": {
        "weight_ranges": "fixed", "features": 0.0, "patience": 0, "ranges": "learned", "supervision": "task",
        "supervision_stride": 1, "collapse": 0.5,
    },
}  # fmt: skip


def _number(value: Any) -> Any:
    """PyYAML takes 1e-6, which has no dot, for a text; for YAML 1.2 and for people it is a number."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", value):
        return float(value)
    return value


Number = Annotated[float, BeforeValidator(_number)]
Factor = Annotated[Number, Field(gt=0, le=1_000_000)]
Pattern = Annotated[str, Field(min_length=1, max_length=200)]
Percentile = Annotated[Number, Field(gt=50, le=100)]
Images = Annotated[int, Field(ge=1, le=100_000_000)]
Epochs = Annotated[int, Field(ge=0, le=10_000)]
Iterations = Annotated[int, Field(ge=1, le=1_000_000)]
Rate = Annotated[Number, Field(gt=0, lt=1)]


class Calibration(StrictModel):
    """Settings for finding amax from statistics of the activations."""

    method: Method = Field(
        default="auto",
        description="auto: percentile 99.999, unless 99.99 or mse has a lower loss on held-out training images, by two "
        "standard errors; with fewer than 200 training images 99.999",
    )
    percentile: Percentile = Field(
        default=99.999, description="percentile of the magnitudes; given alone, the method is percentile"
    )
    images: Images = Field(
        default=250, description="training images to calibrate on, the first in the order that the seed decides"
    )
    batches: Annotated[int, Field(ge=1)] | None = Field(
        default=None, exclude=True, description="of recipes of 1.0: in place of images, in batches of --batch-size"
    )
    median_limit: Number = Field(
        default=4.0, ge=0, le=1_000_000,
        description="a range is at most this many times the largest magnitude of the median image; 0: no limit; "
        "method max has none",
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _method_of_percentile(cls, content: Any) -> Any:
        if isinstance(content, dict) and "percentile" in content:
            return {"method": "percentile", **content}
        return content


class Finetune(StrictModel):
    """Quantization-aware training under supervision by the FP32 model."""

    epochs: Epochs = Field(default=10, description="epochs of QAT; with fewer than 200 training images 0, unless given")
    iters: Iterations = Field(default=45, description="optimizer steps an epoch, at most: an epoch is one pass")
    lr: Rate | Literal["auto"] = Field(
        default="auto", description=f"highest learning rate of weights; auto is {USUAL_RATE}"
    )
    bias_rate: Factor = Field(default=10.0, description="times lr: the rate of biases")
    range_rate: Factor = Field(default=500.0, description="times lr: the rate of the logarithm of each range")
    train: Train = Field(default="all", description="all: weights, biases and ranges; ranges: these alone")
    held_out: Images = Field(
        default=200,
        description="training images, at most, that are held out of calibration and QAT to choose method and state: a "
        "tenth of the split, at least 100; none if there are fewer than 200",
    )
    grad_clip: Factor = Field(default=10.0, description="largest norm of the gradient")

    @property
    def highest_rate(self) -> float:
        """The highest learning rate of weights."""
        return USUAL_RATE if isinstance(self.lr, str) else self.lr

    @field_validator("lr", mode="before")
    @classmethod
    def _one_rate(cls, value: Any) -> Any:
        is_text = isinstance(value, str) and value != AUTO and _number(value) is value
        if is_text or isinstance(value, Mapping):
            raise ValueError("a learning rate, or auto")
        return value


class Recipe(StrictModel):
    """Everything that turns an FP32 network into a particular quantized one."""

    calibration: Calibration = Calibration()
    finetune: Finetune = Finetune()
    head: Literal["int8", "last-conv-float", "float"] = Field(
        default="int8", description="convolutions of the head: all in INT8, the last ones in float, or all in float"
    )
    add: Literal["both", "residual"] = Field(
        default="both", description="inputs of an Add in INT8; residual costs less accuracy and more time"
    )
    float: tuple[Pattern, ...] = Field(
        default=(), strict=False,  # YAML and JSON have lists
        description="modules that stay in float: a path with everything below it, or a glob pattern over paths; one "
        "that matches no convolution is refused",
    )  # fmt: skip

    @classmethod
    def from_dict(cls, content: Any, source: str | Path = "the recipe") -> Recipe:
        """Build a recipe from a mapping that `source` holds; missing keys keep their default.

        >>> Recipe.from_dict({"calibration": {"percentile": 99.99}}).calibration.method  # a percentile names the method
        'percentile'

        Raises:
            RecipeError: it is not a mapping, or holds an unknown key or a value that the entry may not hold.
        """
        content = _without_keys_of_1_0(content, only_neutral=True)
        return validate(cls, content, source, RecipeError)

    @classmethod
    def from_stored(cls, content: Any) -> Recipe:
        """Build the recipe that a checkpoint or a run holds, which may be one of 1.0.

        Settings that only 1.0 had are left out: they were for finding ranges and weights, and the file holds these.

        Raises:
            RecipeError: see `from_dict`.
        """
        return cls.from_dict(_without_keys_of_1_0(content, only_neutral=False))

    @classmethod
    def from_file(cls, path: str | Path | None) -> Recipe:
        """Read a recipe's YAML; None gives the defaults.

        Raises:
            RecipeError: the file cannot be read, or its content is not a recipe.
        """
        if path is None:
            return cls()
        return cls.from_dict(read_yaml(path, "--recipe takes a recipe's YAML", RecipeError), f"--recipe {path}")

    def save(self, path: Path, why: str) -> None:
        """Write a YAML that `from_file` reads, with a comment that says why it is what it is."""
        import yaml

        write_text(path, f"# {why}\n" + yaml.safe_dump(self.to_dict(), sort_keys=False))

    def replace(self, **changes: Any) -> Recipe:
        """A copy with fields replaced; those of sections as `calibration_method=...`, `finetune_epochs=...`.

        Raises:
            RecipeError: a value that the entry may not hold.
        """
        content = self.to_dict()
        if "calibration_percentile" in changes:
            del content["calibration"]["method"]  # a percentile sets the method, unless `changes` has one
        for name, value in changes.items():
            section, _, key = name.partition("_")
            if section in ("calibration", "finetune") and key:
                content[section][key] = value
            elif isinstance(value, StrictModel):
                content[name] = value.to_dict()
            else:
                content[name] = value
        return self.from_dict(content)


def _without_keys_of_1_0(content: Any, *, only_neutral: bool) -> Any:
    """Copy a recipe's content without the keys of `OF_1_0`, or only without those that have the neutral value."""
    if not isinstance(content, Mapping):
        return content
    result = dict(content)
    for section, neutral in OF_1_0.items():
        entries = content.get(section)
        if not isinstance(entries, Mapping):
            continue
        remaining = {}
        for key, value in entries.items():
            is_removed = key in neutral and (value == neutral[key] or not only_neutral)
            if not is_removed:
                remaining[key] = value
        if not only_neutral and isinstance(entries.get("lr"), Mapping):
            del remaining["lr"]
        if not only_neutral and entries.get("method") == "entropy":
            del remaining["method"]
        result[section] = remaining
    return result
