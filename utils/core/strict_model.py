"""Pydantic models for what people write and programs store: strict types, no unknown keys, errors of one line.

    class Calibration(StrictModel):
        batches: int = Field(25, ge=1)

    validate(Calibration, {"batchs": 3}, "recipe.yaml")
    InputError: recipe.yaml: there is no key batchs; did you mean batches?

Strict means that `true`, `"3"` and NaN are not numbers; an integer is a float.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from utils.core.errors import InputError
from utils.core.text import short_repr

Model = TypeVar("Model", bound="StrictModel")


class StrictModel(BaseModel):
    """Base of every model: strict, frozen, unknown keys forbidden, numbers finite."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML and JSON: mappings, lists, texts and numbers."""
        return self.model_dump(mode="json", by_alias=True)


def validate(
    model: type[Model],
    content: Any,
    source: str | Path,
    error: type[InputError] = InputError,
) -> Model:
    """Make a model of the content of `source`; raise `error` with the first wrong key, its value, and what to give."""
    try:
        return model.model_validate(content)
    except ValidationError as problem:
        raise error(f"{source}: {first_problem(model, problem)}") from problem


BRANCHES = ("float", "int", "constrained-int", "str", "bool")  # of a union, as Pydantic names them
PREFIX = re.compile(r"^(Value error, )?((Input|String|List|Tuple|Keys) should (be|have) )?")  # of Pydantic's messages


def first_problem(model: type[BaseModel], problem: ValidationError) -> str:
    """The first error of a validation as one line: key, value, expectation."""
    first = problem.errors(include_url=False)[0]
    key, holder = _place(model, first["loc"])
    if first["type"] == "extra_forbidden":
        return _unknown_key(key, str(first["loc"][-1]), holder)
    if first["type"] == "missing":
        return f"the key {key} is missing"
    if first["type"] == "model_type":
        expected = f"a mapping with the keys {', '.join(holder.model_fields)}"
    else:
        expected = PREFIX.sub("", first["msg"])
    value = "empty" if first["input"] is None else short_repr(first["input"])  # as YAML writes it
    return f"{key or 'the content'} is {value}; expected {expected}"


def _place(model: type[BaseModel], parts: Iterable[int | str]) -> tuple[str, type[BaseModel]]:
    """The key of an error as people write it, 'rows[2].ap', and the model that holds it."""
    key = ""
    holder = model
    for part in parts:
        field = holder.model_fields.get(str(part))
        if isinstance(part, int):
            key += f"[{part}]"
        elif field or not ("[" in part or part in BRANCHES):
            key += f".{part}" if key else part
        inner = _model_in(field.annotation) if field else None
        holder = inner or holder
    return key, holder


def _unknown_key(key: str, name: str, holder: type[BaseModel]) -> str:
    """The line for a key that a model does not have: which one may have been meant."""
    close = difflib.get_close_matches(name, holder.model_fields, 1)
    advice = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(holder.model_fields)}"
    return f"there is no key {short_repr(key)[1:-1]}; {advice}"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first model in an annotation such as `list[Row] | None`."""
    arguments = get_args(annotation)
    if arguments:
        return next(filter(None, map(_model_in, arguments)), None)
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_model else None
