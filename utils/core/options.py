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
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from utils.core.device import select_device
from utils.core.errors import InputError
from utils.core.files import check_folder_name
from utils.core.input_spec import LARGEST_BATCH, LARGEST_SIDE
from utils.core.strict_model import StrictModel, first_problem

if TYPE_CHECKING:
    import torch

Kind = TypeVar("Kind", bound="Options")
__all__ = ["Field"]  # programs take it from here, so that without pydantic `utils.cli` says what is missing

DEFAULT_SIDE = 640  # pixels
IMAGE_SIZE_FLAGS = ("--imgsz", "--img", "--img-size")
ImageSize = Annotated[int, Field(ge=1, le=LARGEST_SIDE)]  # pixels
BatchSize = Annotated[int, Field(ge=1, le=LARGEST_BATCH)]


def one_size(size: Any) -> Any:
    """Return the side of a square, or (height, width).

    >>> one_size(640), one_size([640]), one_size([640, 640]), one_size([384, 640])
    (640, 640, 640, (384, 640))
    """
    if not isinstance(size, (list, tuple)):
        return size
    sides = size
    if len(sides) > 1 and any(isinstance(side, tuple) for side in sides):
        raise ValueError("expected one size, such as 384x640")
    if len(sides) == 1 and isinstance(sides[0], tuple):  # 384x640 on the command line
        sides = sides[0]
    is_square = len(sides) in (1, 2) and sides[0] == sides[-1]
    return sides[0] if is_square else tuple(sides)


InputSize = Annotated[ImageSize | tuple[ImageSize, ImageSize], BeforeValidator(one_size)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Workers = Annotated[int, Field(ge=0, le=256)]
Count = Annotated[int, Field(ge=1, le=100_000_000)]  # of images: more than any dataset has
CheckImages = Annotated[int, Field(ge=0, le=10_000)]
FolderName = Annotated[str, AfterValidator(check_folder_name)]


OF_ARGPARSE = ("metavar", "nargs", "const", "action", "type")  # keywords of `option` that are argparse's


def option(
    default: Any, text: str, *flags: str, group: str = "", recipe: str = "", positional: bool = False, **keywords: Any
) -> Any:
    """A field of an options class.

    Args:
        default: `...` for an option that must be given.
        flags: its name, then its aliases; none for `--name-of-the-field`.
        group: the title of its group, perhaps with a description behind a colon.
        recipe: the recipe's entry that the option sets, such as `finetune.epochs`.
        keywords: metavar, nargs, const, action and type are argparse's; bounds such as ge and le are pydantic's.
    """
    of_argparse = {key: keywords.pop(key) for key in OF_ARGPARSE if key in keywords}
    extra: Any = {
        "flags": None if positional else flags,
        "group": group,
        "recipe": recipe,
        "keywords": of_argparse,
    }
    return Field(default, description=text, json_schema_extra=extra, **keywords)


COMPATIBILITY = "compatibility: options of yolov9-qat and of upstream, accepted without an effect on the result"


class Options(StrictModel):
    """Base of every program's options."""

    OFTEN: ClassVar[tuple[str, ...]] = ()  # fields that `-h` lists first, in this order
    HIDDEN: ClassVar[tuple[str, ...]] = ()  # accepted without an effect, for users of yolov9-qat; not in -h

    @classmethod
    def parsed(cls: type[Kind], arguments: argparse.Namespace) -> Kind:
        """Make options from what argparse parsed; raises as `of`."""
        return cls.of({name: value for name, value in vars(arguments).items() if name in cls.model_fields})

    @classmethod
    def of(cls: type[Kind], values: Mapping[str, Any]) -> Kind:
        """Make options from plain values; `InputError` where one does not fit, or where they contradict each other."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            problem = first_problem(cls, error)
            place = error.errors()[0]["loc"]
            name = str(place[0]) if place else ""
            if name in cls.model_fields:
                problem = problem.replace(name, cls.flag(name), 1)
            raise InputError(problem) from error

    @classmethod
    def argument(cls, name: str) -> dict[str, Any]:
        """What `option` recorded for a field: flags, group, the recipe's entry, and keywords for argparse."""
        return cast("dict[str, Any]", cls.model_fields[name].json_schema_extra)

    @classmethod
    def flags(cls, name: str) -> tuple[str, ...]:
        """The flags of a field, its name first, then its aliases; the field's name for a positional argument."""
        flags: tuple[str, ...] | None = cls.argument(name)["flags"]
        if flags is None:
            return (name,)
        return flags or (f"--{name.replace('_', '-')}",)

    @classmethod
    def flag(cls, name: str) -> str:
        """The name of a field on the command line: '--batch-size'."""
        return cls.flags(name)[0]

    def given(self, *names: str) -> list[str]:
        """The flags of these options, if they were given."""
        return [self.flag(name) for name in names if name in self.model_fields_set]

    def reject_unused(self, names: Iterable[str], why: str) -> None:
        """Raise `InputError` if one of these options was given; `why` completes '--flag does nothing ...'."""
        for flag in self.given(*names):
            raise InputError(f"{flag} does nothing {why}; leave it out")

    def reject_others(self, used: Iterable[str], why: str) -> None:
        """`reject_unused` for all options but those that are used."""
        self.reject_unused([name for name in type(self).model_fields if name not in used], why)


class DeviceOptions(Options):
    """`--device`, as upstream takes it."""

    device: str = option("", "'cpu', or a CUDA device such as 0 (default: 0 if there is one)", metavar="D")


class RuntimeOptions(DeviceOptions):
    """The runtime of an ONNX file: ONNX Runtime, or OpenVINO on a device of its own."""

    device: str = option(
        "",
        "'cpu', a CUDA device such as 0, or OpenVINO's openvino:CPU, openvino:GPU, openvino:NPU (default: 0 if there "
        "is one)",
        metavar="D",
    )
    runtime: Literal["onnxruntime", "openvino"] | None = option(
        None, "what runs an .onnx file. onnxruntime: in FP32 (default); openvino: in INT8, if the file is quantized"
    )
    float_precision: Literal["fp32", "bf16", "fp16"] | None = option(
        None, "precision of OpenVINO for the layers that are not INT8 (default: fp32)", "--precision"
    )

    @property
    def openvino(self) -> str | None:
        """OpenVINO's device, such as 'CPU'; None where OpenVINO is not used."""
        name, _, device = self.device.strip().partition(":")
        if name.lower() == "openvino":
            return device.upper() or "CPU"
        return "CPU" if self.runtime == "openvino" else None

    def select_device(self) -> torch.device:
        """The device of images and results: OpenVINO's are on the CPU; see `device.select_device`."""
        return select_device("cpu" if self.openvino else self.device)

    @model_validator(mode="after")
    def check_runtime(self) -> RuntimeOptions:
        """Raise `InputError` for a runtime and a device that exclude each other, or an option of the other runtime."""
        device = self.device.strip().lower()
        is_openvino_device = device.partition(":")[0] == "openvino"
        if device.startswith("openvino") and not is_openvino_device:
            raise InputError(f"--device {self.device}: expected openvino:CPU, openvino:GPU or openvino:NPU")
        if is_openvino_device and self.runtime == "onnxruntime":
            raise InputError(f"--device {self.device} is OpenVINO's; leave --runtime onnxruntime out")
        if self.openvino and not is_openvino_device and device not in ("", "cpu"):
            raise InputError(f"--runtime openvino does not run on --device {self.device}; give openvino:GPU, or none")
        if not self.openvino:
            self.reject_unused(["float_precision"], "without --runtime openvino")
        return self


class RunFolderOptions(Options):
    """`--project --name --exist-ok`: the folder of results; `WRITTEN` are the files of a run there (globs)."""

    WRITTEN: ClassVar[tuple[str, ...]] = ()

    project: str = option("runs", "results go to PROJECT/NAME", metavar="DIR")
    name: FolderName = option("exp", "name of the run folder (default: exp, exp2, ...)")
    exist_ok: bool = option(False, "write into an existing PROJECT/NAME, and replace the results of the run there")


def image_size(text: str) -> int | tuple[int, int]:
    """A side, or height and width.

    >>> image_size("640"), image_size("384x640")
    (640, (384, 640))
    """
    height, _, width = text.lower().partition("x")
    if not width:
        return int(text)
    return int(height), int(width)


image_size.__name__ = "image size"  # argparse says: invalid image size value: 'abc'


def size_text(size: int | Sequence[int]) -> str:
    """A size as `image_size` reads it.

    >>> size_text(640), size_text((640, 640)), size_text((384, 640))
    ('640', '640', '384x640')
    """
    height, width = height_width(size)
    return f"{height}" if height == width else f"{height}x{width}"


def height_width(sizes: int | Sequence[int] | None) -> tuple[int, int]:
    """Height and width in pixels, of one side or two; 640 where there is none."""
    if isinstance(sizes, int):
        return sizes, sizes
    if not sizes:
        return DEFAULT_SIDE, DEFAULT_SIDE
    return sizes[0], sizes[-1]


def size_option(default: str, *flags: str, group: str = "") -> Any:
    """An `InputSize`: one side, or height and width; `default` describes the default in the help."""
    text = f"side of the input in pixels, or height and width, as 384 640 or 384x640 (default: {default})"
    return option(None, text, *flags or IMAGE_SIZE_FLAGS, group=group, metavar="PX", nargs="+", type=image_size)


def project_option(default: str) -> Any:
    """`--project` with another default."""
    return option(default, "results go to PROJECT/NAME", metavar="DIR")


data_option = partial(
    option,
    None,
    "dataset's YAML (default: the one that the .pt was trained on, if the file exists)",
    metavar="FILE",
)
target_drop_option = partial(
    option,
    None,
    "AP that INT8 may lose (default: 0.002; with --unlabelled: 0.025 of agreement)",
    metavar="AP",
)
groups_option = partial(
    option,
    None,
    "images that are resampled together, such as frames of a clip: a file with a line `IMAGE GROUP` for each image, or "
    "a regular expression that matches the beginning of image names",
    metavar="FILE|REGEX",
)


def add_options(parser: argparse.ArgumentParser, kind: type[Options]) -> None:
    """Add an argument for each field of an options class; an option that is not given is not in the namespace.

    The options of `OFTEN` come first and those of `COMPATIBILITY` last. Between them a field ranks by the class that
    declared it first: the class itself, then its bases. Positional arguments belong to no group.
    """
    for title, names in fields_by_group(kind).items():
        heading, _, about = title.partition(": ")
        group = parser.add_argument_group(heading, about or None) if title else parser
        for name in names:
            group.add_argument(*kind.flags(name), **_argument(kind, name))


def fields_by_group(kind: type[Options]) -> dict[str, list[str]]:
    """Return the fields of an options class by the title of their group, in the order of `-h`; positional: ''."""
    bases = list(kind.__mro__)
    declared = {name: bases.index(base) for base in bases for name in inspect.get_annotations(base)}
    others = "more options" if kind.OFTEN else "options"
    groups: dict[str, list[str]] = {"": [], "often used": list(kind.OFTEN), others: []}
    for name in sorted(kind.model_fields, key=declared.__getitem__):
        if name in kind.OFTEN:
            continue
        argument = kind.argument(name)
        is_positional = argument["flags"] is None
        title = "" if is_positional else argument["group"] or others
        groups.setdefault(title, []).append(name)
    groups[COMPATIBILITY] = groups.pop(COMPATIBILITY, [])
    return {title: names for title, names in groups.items() if names}


def _argument(kind: type[Options], name: str) -> dict[str, Any]:
    """Return argparse's keywords for a field."""
    field = kind.model_fields[name]
    argument = kind.argument(name)
    help_text = argparse.SUPPRESS if name in kind.HIDDEN else _help(field)
    keywords: dict[str, Any] = {"help": help_text}
    keywords |= _keywords(field.annotation, field.default)
    keywords |= argument["keywords"]
    if keywords.get("action") == "append":
        del keywords["nargs"]
    if argument["flags"] is not None:
        keywords |= {"dest": name, "default": argparse.SUPPRESS, "required": field.is_required()}
    return keywords


def _help(field: FieldInfo) -> str:
    """Return the help of a field, with its default unless the text names one."""
    text = field.description or ""
    says_nothing = field.default is False or field.default in (None, "", [])  # 0 is a default to be shown
    hides_default = field.is_required() or says_nothing or "(default" in text
    if not hides_default:
        default = " ".join(map(str, field.default)) if isinstance(field.default, list) else field.default
        text = f"{text} (default: {default})"
    return text.replace("%", "%%")  # argparse formats it


def _keywords(annotation: Any, default: Any) -> dict[str, Any]:
    """Argparse's keywords for a type: a switch, a number, text, a path, one of several words, or a list of these."""
    while get_origin(annotation) in (Annotated, Union, types.UnionType):  # bounds, `| None`
        annotation = get_args(annotation)[0]
    if annotation is bool:
        return {"action": "store_true" if default is False else argparse.BooleanOptionalAction}
    if get_origin(annotation) is list:
        return {"nargs": "+", **_keywords(get_args(annotation)[0], default)}
    if get_origin(annotation) is Literal:
        return {"choices": get_args(annotation)}
    return {"type": annotation}
