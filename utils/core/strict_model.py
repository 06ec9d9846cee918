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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from utils.core.errors import InputError, removed
from utils.core.text import short_repr

Model = TypeVar("Model", bound="StrictModel")


class StrictModel(BaseModel):
    """Base of every model: strict, frozen, unknown keys forbidden, numbers finite."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    def to_dict(self) -> dict[str, Any]:
        """The model as YAML and JSON hold it: mappings, lists, texts and numbers."""
        return self.model_dump(mode="json", by_alias=True)


def validate(model: type[Model], content: Any, source: str | Path, error: type[InputError] = InputError) -> Model:
    """Make a model from plain values.

    Args:
        source: the file or the option that holds `content`, which the message names first.

    Raises:
        InputError: or the given `error`, in one line: the first key that does not fit, its value, what is expected.
    """
    try:
        return model.model_validate(content)
    except ValidationError as problem:
        raise error(f"{source}: {first_problem(model, problem)}") from problem


def first_problem(model: type[BaseModel], problem: ValidationError) -> str:
    """The first error of a validation as one line: key, value, what is expected."""
    first = problem.errors(include_url=False)[0]
    location, kind = first["loc"], first["type"]
    holders = list(_holders(model, location))
    parts = [part for part, holder in zip(location, holders, strict=False) if not _is_branch(part, holder)]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    if kind == "extra_forbidden":
        return _unknown_key(holders[-2], key, str(location[-1]))
    if kind == "missing":
        return f"the key {key} is missing"
    expected = re.sub(r"^(Value error, )?((Input|String|List|Tuple|Keys) should (be|have) )?", "", first["msg"])
    expected = expected.replace("a valid tuple", "a list")
    if kind == "too_long":
        expected = f"at most {first['ctx']['max_length']} values"
    if kind == "model_type":
        expected = f"a mapping with the keys {', '.join(holders[-1].model_fields)}"
    value = "empty" if first["input"] is None else short_repr(first["input"])  # as YAML writes it
    return f"{key or 'the content'} is {value}; expected {expected}"


def _unknown_key(model: type[BaseModel], key: str, name: str) -> str:
    if hint := removed(key):
        return f"{key} {hint}"
    known = list(model.model_fields)
    close = difflib.get_close_matches(name, known, 1)
    return f"there is no key {short_repr(key).strip(chr(39))}; " + (
        f"did you mean {close[0]}?" if close else f"the keys are {', '.join(known)}"
    )


def _holders(model: type[BaseModel], location: tuple[int | str, ...]) -> Iterator[type[BaseModel]]:
    """The model that each part of an error's location is a key of, and the one that lies there, or around it."""
    yield model
    for part in location:
        field = model.model_fields.get(str(part))
        inner = next(_models_in(field.annotation), None) if field else None
        model = inner or model  # an index or the branch of a union is no step down
        yield model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _is_branch(part: int | str, holder: type[BaseModel]) -> bool:
    """Whether pydantic put the name of a union's branch into a location, such as `float` or `dict[int,float]`."""
    if not isinstance(part, str) or part in holder.model_fields:
        return False
    return part in ("float", "int", "str", "bool") or "[" in part
