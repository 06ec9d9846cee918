"""Everything that a file may name, as data: modules of a model description, and the names in a checkpoint's pickle.

A name that is not in these lists is refused, whatever it is. What stands here can be given any argument and
leaves no mark outside of the process; tests/integration/test_hostile_allowed_names.py tries each. SECURITY.md says what
follows from that.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """How the arguments of a module are bounded in a model description.

    Attributes:
        widths: positions of arguments that count channels; every other number is small (a kernel size, a stride).
        repeats: the position of an argument that says how many blocks are built; -1 without one.
        stride: by how much the module reduces the resolution: a number, or in `stride_at` the argument that says it.
        scaled: whether the description's width multiple applies to the first argument.
    """

    widths: tuple[int, ...] = ()
    repeats: int = -1
    stride: int = 1
    stride_at: int = -1
    scaled: bool = False


# --- model descriptions -----------------------------------------------------------------------------------------------
HEADS = {
    **dict.fromkeys(("Detect", "DDetect", "DualDetect", "DualDDetect", "TripleDetect", "TripleDDetect"), Layer((0,))),
    **dict.fromkeys(("Segment", "DSegment", "DualDSegment", "Panoptic"), Layer((0, 1, 2, 3))),
}
LAYERS: dict[str, Layer] = {
    "Conv": Layer((0, 4), stride_at=2, scaled=True),
    "DWConv": Layer((0,), stride_at=2, scaled=True),
    "AConv": Layer((0,), stride=2, scaled=True),
    "ADown": Layer((0,), stride=2, scaled=True),
    "Bottleneck": Layer((0, 2), scaled=True),
    "ELAN1": Layer((0, 1, 2), scaled=True),
    "RepNCSPELAN4": Layer((0, 1, 2), repeats=3, scaled=True),
    "SPP": Layer((0,), scaled=True),
    "SPPF": Layer((0,), scaled=True),
    "SPPCSPC": Layer((0,), scaled=True),
    "SPPELAN": Layer((0, 1), scaled=True),
    "MP": Layer(),
    "SP": Layer(),
    "Concat": Layer(),
    "Silence": Layer(),
    "CBLinear": Layer((0,)),
    "CBFuse": Layer(),
    "nn.Upsample": Layer(),
    "nn.MaxPool2d": Layer(),
    "nn.ZeroPad2d": Layer(),
    **HEADS,
}
WORDS = frozenset({"nc", "anchors", "None", "nearest"})  # all that upstream's own YAMLs have as arguments
ACTIVATIONS = frozenset(
    f"nn.{name}({arguments})"
    for name, choices in {
        "SiLU": ("", "inplace=True"),
        "ReLU": ("", "inplace=True"),
        "ReLU6": ("", "inplace=True"),
        "Hardswish": ("", "inplace=True"),
        "Mish": ("", "inplace=True"),
        "LeakyReLU": ("", "0.1", "0.1, inplace=True", "inplace=True"),
        "ELU": ("",),
        "GELU": ("",),
        "Identity": ("",),
    }.items()
    for arguments in choices
)

# --- checkpoints ------------------------------------------------------------------------------------------------------
UPSTREAM_PREFIXES = ("", "yolov9.", "yolo9.")  # the checkout; trained with a package from PyPI

# What networks of upstream's YAMLs are made of. They are created empty and filled with plain state, never called.
UPSTREAM_MODULES: dict[str, tuple[str, ...]] = {
    "models.common": (
        "AConv", "ADown", "Bottleneck", "CBFuse", "CBLinear", "Concat", "Conv", "DFL", "DWConv", "ELAN1", "MP", "Proto",
        "RepConvN", "RepNBottleneck", "RepNCSP", "RepNCSPELAN4", "SP", "SPP", "SPPCSPC", "SPPELAN", "SPPF", "Silence",
        "UConv",
    ),
    "models.yolo": ("DetectionModel", "SegmentationModel", "Model", *HEADS),
}  # fmt: skip
TORCH_MODULES: dict[str, tuple[str, ...]] = {
    "torch.nn.modules.activation": ("ELU", "GELU", "Hardswish", "LeakyReLU", "Mish", "ReLU", "ReLU6", "SiLU"),
    "torch.nn.modules.batchnorm": ("BatchNorm2d",),
    "torch.nn.modules.container": ("ModuleList", "Sequential"),
    "torch.nn.modules.conv": ("Conv2d",),
    "torch.nn.modules.linear": ("Identity",),
    "torch.nn.modules.padding": ("ZeroPad2d",),
    "torch.nn.modules.pooling": ("MaxPool2d",),
    "torch.nn.modules.upsampling": ("Upsample",),
}

# A segment head keeps the forward of the head below it in an attribute, and pickle writes that function as
# `getattr(DDetect, "forward")`. Class of the head → class whose own forward it keeps, and nothing else is one.
KEPT_FORWARDS = {"Segment": "Detect", "DSegment": "DDetect", "DualDSegment": "DualDDetect", "Panoptic": "Detect"}
KEPT_AS = "detect"

STORAGES: dict[str, str] = {  # name in a pickle → dtype in torch
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}
DTYPES = tuple(STORAGES.values())  # also as values: torch.float32
NUMPY_DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")

# Name in a pickle → the function of `pickled_values.py` that makes the value. torch's and NumPy's own functions of
# these names are not called.
FUNCTIONS: dict[str, str] = {
    "collections.OrderedDict": "ordered_dict",
    "builtins.set": "plain_set",
    "builtins.getattr": "head_forward",
    "_codecs.encode": "encoded_bytes",
    "torch.Size": "torch_size",
    "torch.device": "torch_device",
    "torch._utils._rebuild_tensor_v2": "tensor",
    "torch._utils._rebuild_parameter": "parameter",
    "numpy.dtype": "numpy_dtype",
    "numpy.core.multiarray.scalar": "numpy_scalar",
    "numpy._core.multiarray.scalar": "numpy_scalar",
    "numpy.core.multiarray._reconstruct": "numpy_array",
    "numpy._core.multiarray._reconstruct": "numpy_array",
    **{
        f"{module}.{name}": "pure_path"  # train.py stores its options, with paths in them
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
    },
}
INERT = ("numpy.ndarray",)  # names that only stand as an argument of one of the functions

OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # pickles of protocol 2 use Python 2's names
