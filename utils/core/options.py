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
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from utils.core.device import select_device
from utils.core.errors import InputError
from utils.core.files import check_folder_name
from utils.core.input_spec import LARGEST_BATCH, LARGEST_SIDE
from utils.core.strict_model import StrictModel, first_problem
from utils.core.tasks import DISPLAY_CONF, DISPLAY_IOU

if TYPE_CHECKING:
    import torch

Kind = TypeVar("Kind", bound="Options")
__all__ = ["Field"]  # programs take it from here, so that without pydantic `utils.cli` says what is missing

IMAGE_SIZE_FLAGS = ("--imgsz", "--img", "--img-size")
ImageSize = Annotated[int, Field(ge=1, le=LARGEST_SIDE)]  # pixels
BatchSize = Annotated[int, Field(ge=1, le=LARGEST_BATCH)]


def one_size(size: Any) -> Any:
    """A side as it is; of a list of one side, or of height and width, the side of a square, or (height, width)."""
    sides = size if isinstance(size, (list, tuple)) else [size]
    sides = sides[0] if len(sides) == 1 and isinstance(sides[0], tuple) else sides
    return sides[0] if len(sides) < 3 and len({*sides}) == 1 else tuple(sides)


InputSize = Annotated[ImageSize | tuple[ImageSize, ImageSize], BeforeValidator(one_size)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Workers = Annotated[int, Field(ge=0, le=256)]
Count = Annotated[int, Field(ge=1, le=100_000_000)]  # of images: more than any dataset has
CheckImages = Annotated[int, Field(ge=0, le=10_000)]
FolderName = Annotated[str, AfterValidator(check_folder_name)]


def option(
    default: Any, text: str, *flags: str, group: str = "", recipe: str = "", positional: bool = False, **keywords: Any
) -> Any:
    """A field of an options class.

    Args:
        default: `...` for an option that must be given.
        flags: its name, then its aliases; none for `--name-of-the-field`.
        group: the title of its group, perhaps with a description behind a colon.
        recipe: the recipe's entry that it stands for, such as `finetune.epochs`.
        keywords: metavar, nargs, const, action and type are argparse's; bounds such as ge and le are pydantic's.
    """
    own = {key: keywords.pop(key) for key in ("metavar", "nargs", "const", "action", "type") if key in keywords}
    extra: Any = {"flags": None if positional else flags, "group": group, "recipe": recipe, "keywords": own}
    return Field(default, description=text, json_schema_extra=extra, **keywords)


COMPATIBILITY = "compatibility: taken from users of yolov9-qat and upstream, without an effect on the result"


class Options(StrictModel):
    """Base of every program's options."""

    OFTEN: ClassVar[tuple[str, ...]] = ()  # fields that `-h` lists first, in this order
    HIDDEN: ClassVar[tuple[str, ...]] = ()  # taken, since users of yolov9-qat type it, and not in -h: it does nothing

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
            problem, name = first_problem(cls, error), str(next(iter(error.errors()[0]["loc"]), ""))
            known = name in cls.model_fields
            raise InputError(problem.replace(name, cls.flag(name), 1) if known else problem) from error

    @classmethod
    def argument(cls, name: str) -> dict[str, Any]:
        """How a field stands on the command line: the arguments of `option`."""
        extra: Any = cls.model_fields[name].json_schema_extra
        return extra

    @classmethod
    def flags(cls, name: str) -> tuple[str, ...]:
        """The flags of a field, its name first, then its aliases; the field's name for a positional argument."""
        flags = cls.argument(name)["flags"]
        return (name,) if flags is None else flags or (f"--{name.replace('_', '-')}",)

    @classmethod
    def flag(cls, name: str) -> str:
        """The name of a field on the command line: '--batch-size'."""
        return cls.flags(name)[0]

    def given(self, *names: str) -> list[str]:
        """The flags of those of these options that were given."""
        return [self.flag(name) for name in names if name in self.model_fields_set]

    def reject_unused(self, names: Iterable[str], why: str) -> None:
        """Raise `InputError` if one of these options was given: '--flag does nothing' `why`."""
        for flag in self.given(*names):
            raise InputError(f"{flag} does nothing {why}; leave it out")

    def reject_others(self, used: Iterable[str], why: str) -> None:
        """`reject_unused` for all options but those that are used."""
        self.reject_unused([name for name in type(self).model_fields if name not in used], why)


class DeviceOptions(Options):
    """`--device`, as upstream takes it."""

    device: str = option("", "'cpu', or a CUDA device such as 0 (default: 0 if there is one)", metavar="D")


class RuntimeOptions(DeviceOptions):
    """What runs an ONNX file: ONNX Runtime, or OpenVINO on a device of its own."""

    device: str = option(
        "", "'cpu', a CUDA device such as 0, or OpenVINO's openvino:CPU, openvino:GPU, openvino:NPU (default: 0 if "
        "there is one)", metavar="D",
    )  # fmt: skip
    runtime: Literal["onnxruntime", "openvino"] | None = option(
        None, "what runs an .onnx file. onnxruntime: in float (default); openvino: in INT8 on this CPU"
    )
    float_precision: Literal["fp32", "bf16", "fp16"] | None = option(
        None, "OpenVINO's for layers that are not INT8 (default: fp32)", "--precision"
    )

    @property
    def openvino(self) -> str | None:
        """OpenVINO's device, such as 'CPU'; None where OpenVINO runs nothing."""
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
        if self.device.lower().startswith("openvino") and self.runtime == "onnxruntime":
            raise InputError(f"--device {self.device} is OpenVINO's; leave --runtime onnxruntime out")
        if self.openvino and self.device.lower() not in ("", "cpu") and not self.device.lower().startswith("openvino"):
            raise InputError(f"--runtime openvino does not run on --device {self.device}; give openvino:GPU, or none")
        if not self.openvino:
            self.reject_unused(["float_precision"], "without --runtime openvino")
        return self


class RunFolderOptions(Options):
    """`--project --name --exist-ok`: where results go; `WRITTEN` are the files of a run there (globs)."""

    WRITTEN: ClassVar[tuple[str, ...]] = ()

    project: str = option("runs", "results go to PROJECT/NAME", metavar="DIR")
    name: FolderName = option("exp", "name of the run folder (default: exp, exp2, ...)")
    exist_ok: bool = option(False, "write into an existing PROJECT/NAME, and replace the results of the run there")


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
    topk_all: Annotated[int, Field(ge=1, le=3840)] | None = option(
        None, "detections an image (default: 100), at most 3840, as TensorRT's TopK", group="NMS in the file",
        metavar="N",
    )  # fmt: skip
    iou_thres: Fraction | None = option(None, f"overlap (default: {DISPLAY_IOU})", group="NMS in the file", metavar="P")
    conf_thres: Fraction | None = option(
        None, f"confidence threshold (default: {DISPLAY_CONF})", group="NMS in the file", metavar="P"
    )

    def nms_settings(self) -> dict[str, Any]:
        """What was given, as fields of `NmsSettings`; `InputError` for an overlap where nothing is suppressed."""
        if self.nms == "none":
            self.reject_unused(["iou_thres"], "with --nms none, which suppresses no boxes")
        fields = {"kind": self.nms, "topk": self.topk_all, "iou_thres": self.iou_thres, "conf_thres": self.conf_thres}
        return {name: value for name, value in fields.items() if value is not None}


def image_size(text: str) -> int | tuple[int, int]:
    """A side, or height and width.

    >>> image_size("640"), image_size("384x640")
    (640, (384, 640))
    """
    height, _, width = text.lower().partition("x")
    return (int(height), int(width)) if width else int(text)


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
    sizes = [sizes] if isinstance(sizes, int) else sizes or [640]
    return sizes[0], sizes[-1]


def size_option(default: str, *flags: str, group: str = "") -> Any:
    """An `InputSize`: one side, or height and width; `default` says which is taken where none is given."""
    text = f"side of the input in pixels, or height and width, as 384 640 or 384x640 (default: {default})"
    return option(None, text, *flags or IMAGE_SIZE_FLAGS, group=group, metavar="PX", nargs="+", type=image_size)


def project_option(default: str) -> Any:
    """`--project` with another default."""
    return option(default, "results go to PROJECT/NAME", metavar="DIR")


data_option = partial(
    option, None, "dataset's YAML (default: that of the weights' training, of a .pt that knows one which is there)",
    metavar="FILE",
)  # fmt: skip
target_drop_option = partial(
    option, None, "AP that INT8 may lose (default: 0.002; of agreement, with --unlabelled, 0.025)", metavar="AP"
)
groups_option = partial(
    option, None, "images that are resampled together, such as frames of a clip: a file of lines `image group`, or a "
    "regular expression for the beginning of image names", metavar="FILE|REGEX",
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser, kind: type[Options]) -> None:
    """Add an argument for each field of an options class; what is not given is not in the namespace.

    The options of `OFTEN` come first and those of `COMPATIBILITY` last. Between them the class's own fields come first,
    then those of its bases. Positional arguments belong to no group.
    """
    for title, names in fields_by_group(kind).items():
        heading, _, about = title.partition(": ")
        group = parser.add_argument_group(heading, about or None) if title else parser
        for name in names:
            group.add_argument(*kind.flags(name), **_argument(kind, name))


def fields_by_group(kind: type[Options]) -> dict[str, list[str]]:
    """Return the fields of an options class by the title of their group, in the order of `-h`; '': positional."""
    bases = list(kind.__mro__)
    declared = {name: bases.index(base) for base in bases for name in inspect.get_annotations(base)}
    others = "more options" if kind.OFTEN else "options"
    groups: dict[str, list[str]] = {"": [], "often used": list(kind.OFTEN), others: []}
    for name in sorted(kind.model_fields, key=declared.__getitem__):
        argument = kind.argument(name)
        title = "" if argument["flags"] is None else argument["group"] or others
        if name not in kind.OFTEN:
            groups.setdefault(title, []).append(name)
    groups[COMPATIBILITY] = groups.pop(COMPATIBILITY, [])
    return {title: names for title, names in groups.items() if names}


def _argument(kind: type[Options], name: str) -> dict[str, Any]:
    """Return argparse's keywords for a field."""
    field, argument = kind.model_fields[name], kind.argument(name)
    text = field.description or ""
    silent = field.default is False or field.default in (None, "", [])  # 0 is a default to be shown
    if not (field.is_required() or silent or "(default" in text):
        default = " ".join(map(str, field.default)) if isinstance(field.default, list) else field.default
        text = f"{text} (default: {default})"
    text = text.replace("%", "%%")  # argparse formats it
    keywords: dict[str, Any] = {"help": argparse.SUPPRESS if name in kind.HIDDEN else text}
    keywords |= _keywords(field.annotation, field.default) | argument["keywords"]
    if keywords.get("action") == "append":
        del keywords["nargs"]
    if argument["flags"] is not None:
        keywords |= {"dest": name, "default": argparse.SUPPRESS, "required": field.is_required()}
    return keywords


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
