"""Pydantic models for what people write and programs store: strict types, no unknown keys, errors of one line.

    class Calibration(StrictModel):
        batches: int = Field(25, ge=1)

    validate(Calibration, {"batchs": 3}, "recipe.yaml")
    InputError: recipe.yaml: there is no key batchs; did you mean batches?

Strict means that `true` is no number, `"3"` is no integer, and NaN is no number at all; an integer is a float.
"""

from __future__ import annotations

import difflib
import re
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
        """The model as YAML and JSON hold it: mappings, lists, texts and numbers."""
        return self.model_dump(mode="json", by_alias=True)


def validate(model: type[Model], content: Any, source: str | Path, error: type[InputError] = InputError) -> Model:
    """Make a model of the content of `source`; `error` says the first wrong key, its value, and what is expected."""
    try:
        return model.model_validate(content)
    except ValidationError as problem:
        raise error(f"{source}: {first_problem(model, problem)}") from problem


BRANCHES = ("float", "int", "constrained-int", "str", "bool")  # of a union, as Pydantic names them


def first_problem(model: type[BaseModel], problem: ValidationError) -> str:
    """The first error of a validation as one line: key, value, what is expected."""
    first = problem.errors(include_url=False)[0]
    kind, holder, key = first["type"], model, ""
    for part in first["loc"]:
        field = holder.model_fields.get(str(part))
        if isinstance(part, int):
            key += f"[{part}]"
        elif field or not ("[" in part or part in BRANCHES):
            key += f".{part}" if key else part
        holder = (field and _model_in(field.annotation)) or holder
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(str(first["loc"][-1]), holder.model_fields, 1)
        advice = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(holder.model_fields)}"
        return f"there is no key {short_repr(key)[1:-1]}; {advice}"
    if kind == "missing":
        return f"the key {key} is missing"
    expected = re.sub(r"^(Value error, )?((Input|String|List|Tuple|Keys) should (be|have) )?", "", first["msg"])
    if kind == "model_type":
        expected = f"a mapping with the keys {', '.join(holder.model_fields)}"
    value = "empty" if first["input"] is None else short_repr(first["input"])  # as YAML writes it
    return f"{key or 'the content'} is {value}; expected {expected}"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first model in an annotation such as `list[Row] | None`."""
    if arguments := get_args(annotation):
        return next(filter(None, map(_model_in, arguments)), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
