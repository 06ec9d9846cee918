"""Command-line options, declared once: an options class is a pydantic model, and its argparse options follow from it.

    class EvalOptions(Options):
        weights: str = option("", "checkpoint (.pt)", metavar="FILE")
        imgsz: ImageSize = option(640, "input size in pixels", "--imgsz", "--img", metavar="PX")
        rect: bool = option(False, "smallest input that holds an image")

    add_options(parser, EvalOptions)
    options = EvalOptions.parsed(parser.parse_args())

Type and bounds of a field check the command line and saved runs alike. A field's default is shown in the help text,
unless the text names one itself. `model_fields_set` holds the names of the options that were given.
"""

from __future__ import annotations

import argparse
import inspect
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from utils.core.errors import InputError
from utils.core.files import check_folder_name
from utils.core.input_spec import LARGEST_BATCH, LARGEST_SIDE
from utils.core.strict_model import StrictModel, first_problem
from utils.core.tasks import DISPLAY_CONF, DISPLAY_IOU

Kind = TypeVar("Kind", bound="Options")
__all__ = ["Field"]  # programs take it from here, so that without pydantic `utils.cli` says what is missing

IMAGE_SIZE_FLAGS = ("--imgsz", "--img", "--img-size")
MAY_BE_EMPTY = ("--device", "--title", "--note", "--resume")
ImageSize = Annotated[int, Field(ge=1, le=LARGEST_SIDE)]  # pixels
BatchSize = Annotated[int, Field(ge=1, le=LARGEST_BATCH)]
OneOrTwoSizes = Annotated[list[ImageSize], Field(max_length=2)]  # one side, or height and width
Fraction = Annotated[float, Field(ge=0, le=1)]
Workers = Annotated[int, Field(ge=0, le=256)]
Count = Annotated[int, Field(ge=1, le=100_000_000)]  # of images: more than any dataset has
CheckImages = Annotated[int, Field(ge=0, le=10_000)]
FolderName = Annotated[str, AfterValidator(check_folder_name)]


@dataclass(frozen=True)
class Argument:
    """How a field stands on the command line.

    Attributes:
        flags: none of a positional argument.
        group: its title, perhaps with a description behind a colon.
        recipe: the recipe's entry that it stands for, such as `finetune.epochs`.
        keywords: for argparse.
    """

    flags: tuple[str, ...]
    group: str
    recipe: str
    keywords: Mapping[str, Any]


def option(
    default: Any, text: str, *flags: str, group: str = "", recipe: str = "", positional: bool = False, **keywords: Any
) -> Any:
    """A field of an options class.

    Args:
        default: `...` for an option that must be given.
        text: for `-h`.
        flags: `--name-of-the-field` if none are given.
        group, recipe: see `Argument`.
        keywords: metavar, nargs, const and action are argparse's; bounds such as ge and le are pydantic's.
    """
    own: dict[str, Any] = {key: keywords.pop(key) for key in ("metavar", "nargs", "const", "action") if key in keywords}
    argument = Argument(flags if flags or positional else ("",), group, recipe, own)
    return Field(default, description=text, json_schema_extra={"argument": argument}, **keywords)  # type: ignore[dict-item]


class Options(StrictModel):
    """Base of every program's options."""

    @classmethod
    def parsed(cls: type[Kind], arguments: argparse.Namespace) -> Kind:
        """The options in what argparse parsed.

        Raises:
            InputError: they contradict each other.
        """
        return cls.of({name: value for name, value in vars(arguments).items() if name in cls.model_fields})

    @classmethod
    def of(cls: type[Kind], values: Mapping[str, Any]) -> Kind:
        """Make options from plain values.

        Raises:
            InputError: a value does not fit, or the options contradict each other.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            name = str(next(iter(error.errors()[0]["loc"]), ""))
            key = cls.flag(name) if name in cls.model_fields else ""
            raise InputError(
                first_problem(cls, error).replace(name, key, 1) if key else first_problem(cls, error)
            ) from error

    @classmethod
    def arguments(cls) -> dict[str, Argument]:
        """Each field's name, and how it stands on the command line."""
        return {name: argument_of(field) for name, field in cls.model_fields.items()}

    @classmethod
    def flag(cls, name: str) -> str:
        """The first long flag of a field: '--batch-size'."""
        flags = flags_of(name, cls.model_fields[name])
        return next((flag for flag in flags if flag.startswith("--")), flags[0])

    def given(self, *names: str) -> list[str]:
        """The flags of those of these options that were given."""
        return [self.flag(name) for name in names if name in self.model_fields_set]

    def reject_unused(self, names: Iterable[str], why: str) -> None:
        """Refuse options that were given and can have no effect.

        Args:
            why: how the sentence '--flag does nothing ...' goes on.

        Raises:
            InputError: one of them was given.
        """
        for flag in self.given(*names):
            raise InputError(f"{flag} does nothing {why}; leave it out")

    def reject_others(self, used: Iterable[str], why: str) -> None:
        """`reject_unused` for all options but those that are used."""
        self.reject_unused([name for name in type(self).model_fields if name not in {*used, "debug"}], why)


class DeviceOptions(Options):
    """`--device`, as upstream takes it."""

    device: str = option("", "'cpu', or a CUDA device such as 0 (default: 0 if there is one)", metavar="D")


class RunFolderOptions(Options):
    """`--project --name --exist-ok`: where results go."""

    project: str = option("runs", "results go to PROJECT/NAME", metavar="DIR")
    name: FolderName = option("exp", "name of the run folder (default: exp, exp2, ...)")
    exist_ok: bool = option(False, "write into an existing PROJECT/NAME")


class InputOptions(DeviceOptions):
    """In which form a file takes images."""

    input: Literal["float", "uint8"] = option(
        "float",
        "what the file takes. float: FP32 in 0..1 (default); uint8: the bytes of images, which the graph scales",
    )


class NmsOptions(Options):
    """NMS in a file; what is None has the default of `NmsSettings`."""

    nms: Literal["efficient", "onnx", "none"] | None = option(
        None, "efficient: TensorRT's plugin (default); onnx: the standard operator; none: top-k without suppression",
        group="NMS in the file",
    )  # fmt: skip
    topk_all: int | None = option(None, "detections an image (default: 100)", group="NMS in the file", metavar="N")
    iou_thres: Fraction | None = option(None, f"overlap (default: {DISPLAY_IOU})", group="NMS in the file", metavar="P")
    conf_thres: Fraction | None = option(
        None, f"confidence threshold (default: {DISPLAY_CONF})", group="NMS in the file", metavar="P"
    )

    def nms_settings(self) -> dict[str, Any]:
        """What was given, as fields of `NmsSettings`.

        Raises:
            InputError: an overlap was given, and nothing is suppressed.
        """
        if self.nms == "none":
            self.reject_unused(["iou_thres"], "with --nms none, which suppresses no boxes")
        fields = {"kind": self.nms, "topk": self.topk_all, "iou_thres": self.iou_thres, "conf_thres": self.conf_thres}
        return {name: value for name, value in fields.items() if value is not None}


def height_width(sizes: Sequence[int] | None, default: int = 640) -> tuple[int, int]:
    """Height and width in pixels, of one side or two."""
    sizes = sizes or [default]
    return sizes[0], sizes[-1]


def project_option(default: str) -> Any:
    """`--project` with another default."""
    return option(default, "results go to PROJECT/NAME", metavar="DIR")


def data_option() -> Any:
    """`--data`: a dataset's YAML in upstream's form."""
    return option("data/coco.yaml", "dataset's YAML", metavar="FILE")


def refuse_empty(refuse: Callable[[str], object], words: Sequence[str]) -> None:
    """Call `refuse` with a message if an argument is empty: as a path it would mean the working folder."""
    for before, word in zip(["", *words], words, strict=False):
        flag, equals, value = word.partition("=")
        if word and not (flag.startswith("--") and equals and not value):
            continue
        name = flag if word else before if before.startswith("-") else ""
        if name not in MAY_BE_EMPTY:
            refuse(f"argument {name}: it is empty; give a value, or leave it out" if name else "an argument is empty")


def flags_of(name: str, field: FieldInfo) -> tuple[str, ...]:
    """The flags of a field; its name for a positional argument."""
    flags = argument_of(field).flags or (name,)
    return tuple(flag or f"--{name.replace('_', '-')}" for flag in flags)


def argument_of(field: FieldInfo) -> Argument:
    """What `option` said of a field."""
    extra: Any = field.json_schema_extra
    return extra["argument"]


def add_options(parser: argparse.ArgumentParser, kind: type[Options]) -> None:
    """Add an argument for each field of an options class; what is not given is not in the namespace."""
    groups: dict[str, Any] = {"": parser}
    for name in _in_order(kind):
        field = kind.model_fields[name]
        argument = argument_of(field)
        if argument.group not in groups:
            title, _, about = argument.group.partition(": ")
            groups[argument.group] = parser.add_argument_group(title, about or None)
        keywords: dict[str, Any] = {"help": _help(field), **_kind(field), **argument.keywords}
        if keywords.get("action") == "append":
            del keywords["nargs"]
        if argument.flags:
            keywords |= {"dest": name, "default": argparse.SUPPRESS, "required": field.is_required()}
        groups[argument.group].add_argument(*flags_of(name, field), **keywords)


def _in_order(kind: type[Options]) -> list[str]:
    """The fields of an options class: its own, then those of its bases, each where it was first declared."""
    declared = {name: base for base in kind.__mro__ for name in inspect.get_annotations(base)}
    bases = list(kind.__mro__)
    return sorted(kind.model_fields, key=lambda name: bases.index(declared[name]))


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    shown = field.default is not None and field.default is not False and field.default not in ("", [], ...)
    if field.is_required() or not shown or "(default" in text:
        return text
    default = " ".join(map(str, field.default)) if isinstance(field.default, list) else field.default
    return f"{text} (default: {default})"


def _kind(field: FieldInfo) -> dict[str, Any]:
    """Argparse's keywords for the type of a field."""
    inner = _without_none(field.annotation)
    if inner is bool:
        return {"action": "store_true" if field.default is False else argparse.BooleanOptionalAction}
    whole = get_args(inner)[0] if get_origin(inner) is Annotated else inner
    if get_origin(whole) is list:
        return {"nargs": "+", **_of_one(get_args(whole)[0], [])}
    return _of_one(inner, field.metadata)


def _of_one(inner: Any, metadata: list[Any]) -> dict[str, Any]:
    if get_origin(inner) is Literal:
        return {"choices": get_args(inner)}
    kind = operator.getitem(Annotated, (inner, *metadata)) if metadata else inner
    return {"type": _parser_of(kind)}


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (part for part in get_args(annotation) if part is not type(None))
    return annotation


def _parser_of(kind: Any) -> Callable[[str], Any]:
    adapter: list[TypeAdapter[Any]] = []  # made when it is needed: `-h` needs none

    def parse(text: str) -> Any:
        if not adapter:
            adapter.append(TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)))
        try:
            return adapter[0].validate_strings(text)
        except ValidationError as error:
            expected = error.errors(include_url=False)[0]["msg"].removeprefix("Input should be ")
            raise argparse.ArgumentTypeError(f"{text[:40]!r}; expected {_bounds(kind) or expected}") from error
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix("--name ")) from error

    return parse


def _bounds(kind: Any) -> str:
    """'an integer from 1 to 8,192' for a number with bounds; '' otherwise."""
    origin: Any = kind
    found: dict[str, Any] = {}
    for part in _metadata(kind):
        found |= {name: getattr(part, name) for name in ("ge", "gt", "le", "lt") if hasattr(part, name)}
    while get_origin(origin) is Annotated:
        origin = get_args(origin)[0]
    if origin not in (int, float) or not found:
        return ""
    words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    number = "an integer" if origin is int else "a number"
    if {"ge", "le"} <= set(found):
        return f"{number} from {found['ge']:,} to {found['le']:,}"
    return f"{number} {' and '.join(f'{words[name]} {value:,}' for name, value in found.items())}"


def _metadata(kind: Any) -> Iterator[Any]:
    while get_origin(kind) is Annotated:
        kind, *parts = get_args(kind)
        for part in parts:
            yield from part.metadata if isinstance(part, FieldInfo) else [part]
