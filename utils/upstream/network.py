"""Networks and checkpoints of upstream YOLOv9: load, build, fuse."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.errors import CheckpointError, InputError
from utils.core.files import read_yaml
from utils.core.input_spec import channels_of, size_in
from utils.core.tasks import predicted
from utils.core.text import plural, short_repr
from utils.upstream.checkout import import_upstream
from utils.upstream.description import ALL_HEADS, BLOCKS, HEADS, check_description, check_head
from utils.upstream.renamed import origin_of, read_renamed
from utils.upstream.ultralytics import is_theirs, read_theirs

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger(__name__)

NETWORK_KEYS = ("model", "ema")  # of a checkpoint, where the network is
AGAIN = "copy the file again, or export it from the training run again"

# The module classes that a checkpoint may hold: what networks of upstream's YAMLs are made of.
PACKAGES = ("", "yolov9.", "yolo9.")  # before the names: a checkout has none, packages from PyPI have theirs
UPSTREAM_MODULES = {
    "models.common": BLOCKS,
    "models.yolo": ("DetectionModel", "SegmentationModel", "Model", *ALL_HEADS),
}
TORCH_MODULES = {
    "torch.nn.modules.activation": ("ELU", "GELU", "Hardswish", "LeakyReLU", "Mish", "ReLU", "ReLU6", "SiLU"),
    "torch.nn.modules.batchnorm": ("BatchNorm2d",),
    "torch.nn.modules.container": ("ModuleList", "Sequential"),
    "torch.nn.modules.conv": ("Conv2d",),
    "torch.nn.modules.linear": ("Identity",),
    "torch.nn.modules.padding": ("ZeroPad2d",),
    "torch.nn.modules.pooling": ("MaxPool2d",),
    "torch.nn.modules.upsampling": ("Upsample",),
}


@dataclass(frozen=True)
class FloatCheckpoint:
    """An FP32 network as upstream trained it: float32, evaluation mode, batch norms not yet fused."""

    model: nn.Module
    names: dict[int, str]
    nc: int
    stride: int  # pixels: image sizes are multiples of it
    yaml: dict[str, Any]  # upstream's model description, from which the network can be built again
    imgsz: int | tuple[int, int] | None = None  # side or (height, width) of its training, pixels; None: not known
    data: str | None = None  # the dataset's YAML that it was trained with
    origin: str = ""  # who trained it, if not upstream
    weights_hash: str = ""  # see `hash_of_weights`


def load_float(path: str | Path, heads: Collection[str] = HEADS) -> FloatCheckpoint:
    """Load a checkpoint that upstream's `train.py` or our `reparameterization.py` wrote, the EMA where there is one.

    No code of the file is run (`utils/core/checkpoints.py`). `CheckpointError` for one that is missing, truncated,
    foreign, quantized, of a network that does not compute, or that ends in another layer than those in `heads`.
    """
    from torch import nn

    content = read_checkpoint(path, needed=NETWORK_KEYS)
    if isinstance(content, nn.Module):
        content = {"model": content}
    model = _network_in(path, content)
    check_head(model, path, heads)
    try:
        return _float_checkpoint(path, content, model)
    except InputError:
        raise
    except Exception as error:  # a module with a state that its class never makes can fail anywhere
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path} is damaged or from another version: its network does not compute "
            f"({type(error).__name__}: {reason}); {AGAIN}"
        ) from error


def _float_checkpoint(path: str | Path, content: Mapping[str, Any], model: Any) -> FloatCheckpoint:
    """Check a network and bring it into the form that `FloatCheckpoint` has, in place."""
    import torch

    classes = model.model[-1].nc
    names = _class_names(path, model.names, classes)
    check_finite(path, model.state_dict(), AGAIN)
    if isinstance(model.stride, (list, tuple)):
        model.stride = torch.tensor(model.stride)
    model = model.float().eval()
    _complete_modules(model)
    _check_computes(path, model)
    yaml = check_description(model.yaml)
    origin = str(content.get("origin", ""))
    if origin:
        logger.info("%s was trained with %s; its network is built of upstream's blocks", path, origin)
    opt = content["opt"] if isinstance(content.get("opt"), Mapping) else {}
    return FloatCheckpoint(
        model,
        names,
        classes,
        network_stride(model),
        yaml,
        imgsz=size_in(opt),
        data=str(opt["data"]) if opt.get("data") else None,
        origin=origin,
        weights_hash=hash_of_weights(model),
    )


def _class_names(path: str | Path, names: Any, count: int) -> dict[int, str]:
    """Names of the classes by id, of a mapping or a list; `CheckpointError` unless there are `count`."""
    if isinstance(names, (list, tuple)):
        names = dict(enumerate(names))
    if not isinstance(names, Mapping):
        raise CheckpointError(
            f"{path}: the names of its classes are {short_repr(names)}; set a list of {count} texts as the network's "
            "`names`, and save it again"
        )
    by_id = {int(key): str(value) for key, value in names.items()}
    check_class_names(path, by_id, count, AGAIN)
    return by_id


def _complete_modules(model: nn.Module) -> None:
    """Set attributes that files of an old torch, or of networks pruned by hand, lack or have wrong, in place."""
    from torch import nn

    for module in model.modules():
        if type(module).__name__ == "Upsample" and not hasattr(module, "recompute_scale_factor"):
            module.recompute_scale_factor = None  # saved by a torch before 1.11
        if isinstance(module, nn.Conv2d):
            set_channels(module)


def _check_computes(path: str | Path, model: Any) -> None:
    """Run a copy of a network on a small image; `CheckpointError` if its outputs do not have its head's channels."""
    import torch

    head = model.model[-1]
    masks = int(getattr(head, "nm", 0))
    side = 2 * network_stride(model)
    with torch.no_grad():
        outputs = predicted(deepcopy(model)(torch.zeros(1, channels_of(model), side, side)))
    channels = [output.shape[1] for output in outputs]
    expected = [4 + head.nc + masks]
    if masks:
        expected.append(masks)
    if channels != expected:
        raise CheckpointError(f"{path} computes other numbers of classes or masks than its head has; {AGAIN}")


def _network_in(path: str | Path, content: Any) -> Any:
    """Find the EMA or else the network in a checkpoint's content; `CheckpointError` if there is none."""
    from torch import nn

    from utils.core.checkpoints import UPSTREAMS

    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a YOLOv9 checkpoint; {UPSTREAMS}")
    if "state_version" in content:
        raise CheckpointError(f"{path} is what --resume continues from; give qat_best_*, qat_ep_* or ptq_* beside it")
    model: Any = content.get("ema")
    if model is None:
        model = content.get("model")
    layers = getattr(model, "model", None)
    if hasattr(model, "yaml") and isinstance(layers, nn.Sequential) and len(layers):
        return model
    if _is_state_dict(content):
        raise CheckpointError(
            f"{path} holds weights without the network (a state_dict). Build the network and save both together, in "
            "the checkout: m = models.yolo.DetectionModel(YAML, nc=CLASSES); m.load_state_dict(WEIGHTS); "
            "torch.save({'model': m}, 'new.pt')"
        )
    if isinstance(model, nn.Module):
        raise CheckpointError(
            f"{path} holds a {type(model).__name__}, which lacks the layers of a YOLOv9 network; {UPSTREAMS}"
        )
    raise CheckpointError(
        f"{path} holds no YOLOv9 network under 'ema' or 'model' (keys: {short_repr(list(content))}); {UPSTREAMS}"
    )


def _is_state_dict(value: Any) -> bool:
    """Return whether a mapping holds weights by name, also below further keys."""
    import torch

    if not isinstance(value, Mapping):
        return False
    for name, item in value.items():
        is_weight = isinstance(item, torch.Tensor) and str(name).endswith("weight")
        if is_weight or _is_state_dict(item):
            return True
    return False


def hash_of_weights(model: nn.Module) -> str:
    """SHA-256 of a network's weights before batch norms are fused: names, shapes, and values rounded to FP16.

    It is the same for a checkpoint with and without optimizer, in FP32 and in FP16; another training has another one.
    """
    import torch

    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if value.is_floating_point():
            digest.update(f"{name} {list(value.shape)}".encode())
            digest.update(value.detach().to("cpu", torch.float16).contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_class_names(path: str | Path, names: Mapping[int, str], count: int, remedy: str) -> None:
    """Raise `CheckpointError` unless the classes 0 to count - 1, and no others, have names."""
    if set(names) == set(range(count)):
        return
    if set(names) == set(range(1, count + 1)):
        remedy = "set the network's `names` to a list of texts, the first for class 0, and save it again"
    raise CheckpointError(
        f"{path} has names of {plural(len(names), 'class')}, from {min(names, default=0)} on, and its head finds "
        f"{count}, from 0 on; {remedy}"
    )


def check_finite(path: str | Path, state: Mapping[str, torch.Tensor], remedy: str) -> None:
    """Raise `CheckpointError` for the first tensor with NaN or infinity, which a training that diverged leaves."""
    for name, value in state.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise CheckpointError(f"{path}: {name} holds NaN or infinity; {remedy}")


def network_stride(model: Any) -> int:
    """Stride in pixels: image sizes are multiples of it."""
    return max(int(model.stride.max()), 32)


def build_model(config: Mapping[str, Any] | str | Path, nc: int | None = None) -> nn.Module:
    """Build upstream's network of a YAML (a file or its content) with random weights; `InputError` if it cannot be."""
    import_upstream()
    from models.common import Conv, RepConvN
    from models.yolo import DetectionModel, SegmentationModel

    content = config if isinstance(config, Mapping) else read_description(config)
    description = deepcopy(check_description(content))
    defaults = (Conv.default_act, RepConvN.default_act)
    rows = [*description["backbone"], *description["head"]]
    head = rows[-1][2]
    kind = SegmentationModel if "Segment" in head else DetectionModel
    try:
        return kind(description, ch=description.get("ch", 3), nc=nc).eval()
    except InputError:
        raise
    except Exception as error:  # upstream assumes that layers fit together, and fails anywhere when they do not
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"upstream cannot build this model description: {type(error).__name__}: {reason}") from error
    finally:  # a YAML's `activation` would otherwise stay for every later model
        Conv.default_act, RepConvN.default_act = defaults


def resize(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give convolutions and batch norms the channels that tensors of the same names have, in place, with new weights.

    Kernels, strides and paddings stay. A convolution with as many groups as channels stays depthwise, others keep their
    number of groups.

    Args:
        state: name → tensor, as a state_dict; names that the network does not have are ignored.
    """
    import torch
    from torch import nn

    for path, module in model.named_modules():
        weight = state.get(f"{path}.weight")
        own = getattr(module, "weight", None)
        if own is None or not isinstance(weight, torch.Tensor) or weight.shape == own.shape:
            continue
        if isinstance(module, nn.BatchNorm2d) and weight.dim() == 1:
            _resize_batch_norm(module, len(weight))
        if isinstance(module, nn.Conv2d) and weight.shape[2:] == own.shape[2:]:
            _resize_convolution(module, weight.shape)


def _resize_batch_norm(module: nn.BatchNorm2d, channels: int) -> None:
    for name in ("weight", "bias", "running_mean", "running_var"):
        tensor = getattr(module, name)
        if tensor is not None:
            setattr(module, name, _resized(tensor, [channels]))
    module.num_features = channels


def _resize_convolution(module: nn.Conv2d, shape: Sequence[int]) -> None:
    """Give a convolution a weight of a shape, `[out, in / groups, kH, kW]`."""
    if module.groups == module.out_channels > 1:
        module.groups = shape[0]
    module.weight = _resized(module.weight, shape)
    if module.bias is not None:
        module.bias = _resized(module.bias, shape[:1])
    set_channels(module)


def _resized(tensor: torch.Tensor, shape: Sequence[int]) -> Any:
    """Make a tensor of ones of the type of `tensor`, or a parameter if that is one."""
    import torch
    from torch import nn

    ones = torch.ones(shape, dtype=tensor.dtype)
    return nn.Parameter(ones) if isinstance(tensor, nn.Parameter) else ones


def set_channels(convolution: nn.Conv2d) -> None:
    """Set the attributes that count channels to those of the weight, which pruning by hand leaves as they were."""
    convolution.out_channels = convolution.weight.shape[0]
    convolution.in_channels = convolution.weight.shape[1] * convolution.groups


def read_description(path: str | Path) -> dict[str, Any]:
    """Read a model YAML of upstream's; `InputError` if the file cannot be read, or is not a model description."""
    content = read_yaml(path, "--cfg takes a model YAML such as models/detect/gelan-c.yaml")
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a model description: expected keys such as nc, backbone and head")
    return check_description(content)


def fuse(model: nn.Module) -> nn.Module:
    """Fold batch norms into convolutions and RepConvN branches into one, in place; float32, evaluation mode.

    Unlike after upstream's `fuse` the network can be copied: no bound method is stored on an instance. What is folded
    already, or cannot be folded (`unfused` lists it), stays as it is.
    """
    import_upstream()
    from torch import nn
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    from models.common import Conv, RepConvN

    for module in model.modules():
        if isinstance(module, RepConvN) and not _why_not_merged(module):
            _prepare_branches(module)
            module.fuse_convs()
    for module in model.modules():
        if isinstance(module, Conv) and hasattr(module, "bn") and not _why_not_folded(module):
            if isinstance(module.bn, nn.BatchNorm2d):
                module.conv = fuse_conv_bn_eval(module.conv, module.bn)
            del module.bn
    return model


def unfused(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the path of each Conv and RepConvN that `fuse` has left as it was, with the reason."""
    import_upstream()
    from models.common import Conv, RepConvN

    for path, module in model.named_modules():
        if isinstance(module, RepConvN) and not hasattr(module, "conv"):
            yield path, _why_not_merged(module)
        if isinstance(module, Conv) and hasattr(module, "bn"):
            yield path, _why_not_folded(module)


def _why_not_folded(module: Any) -> str:
    """Reason why the batch norm of a Conv cannot be folded; empty if it can, or if it is folded already."""
    from torch import nn

    if not hasattr(module, "bn"):
        return ""
    if not isinstance(module.conv, nn.Conv2d):
        return f"has a {type(module.conv).__name__} in place of its convolution"
    if not isinstance(module.bn, (nn.BatchNorm2d, nn.Identity)):  # an Identity stands for a folded one
        return f"has a {type(module.bn).__name__} in place of its batch norm"
    if isinstance(module.bn, nn.BatchNorm2d) and module.bn.running_mean is None:
        return "has a batch norm without running mean and variance"
    return ""


def _why_not_merged(module: Any) -> str:
    """Reason why the branches of a RepConvN cannot be merged into one convolution; empty if they can, or are."""
    from torch import nn

    from models.common import Conv

    if hasattr(module, "conv"):
        return ""
    for name, kernel in (("conv1", (3, 3)), ("conv2", (1, 1))):
        branch = getattr(module, name)
        if not isinstance(branch, Conv):
            return f"has a {type(branch).__name__} as its branch {name}"
        if not isinstance(branch.act, nn.Identity):
            return f"has an activation in its branch {name}"
        reason = _why_not_folded(branch)
        if reason:
            return f"has a branch {name} that {reason}"
        if branch.conv.kernel_size != kernel:
            return f"has a branch {name} with the kernel {branch.conv.kernel_size}"
    if module.bn is not None and not isinstance(module.bn, nn.BatchNorm2d):
        return f"has a {type(module.bn).__name__} as its third branch"
    return ""


def _prepare_branches(module: Any) -> None:
    """Give branches of a RepConvN the form that upstream's `fuse_convs` reads: no bias, a batch norm with weights."""
    import torch
    from torch import nn

    for branch in (module.conv1, module.conv2):
        convolution = branch.conv
        if isinstance(branch.bn, nn.Identity):
            branch.bn = nn.BatchNorm2d(convolution.out_channels, eps=0.0).eval()  # mean 0, variance 1: changes nothing
        if branch.bn.weight is None:
            branch.bn.weight = nn.Parameter(torch.ones_like(branch.bn.running_var))
            branch.bn.bias = nn.Parameter(torch.zeros_like(branch.bn.running_mean))
        if convolution.bias is not None:
            branch.bn.running_mean = branch.bn.running_mean - convolution.bias.detach()
            convolution.bias = None
    module.c1 = module.conv1.conv.in_channels


def call_fused(model: nn.Module) -> nn.Module:
    """Give fused Conv and RepConvN instances the forward that upstream has for that state, in place."""
    import_upstream()
    from models.common import Conv, RepConvN

    for module in model.modules():
        is_merged = isinstance(module, RepConvN) and hasattr(module, "conv")
        if is_merged or (isinstance(module, Conv) and not hasattr(module, "bn")):
            module.forward = module.forward_fuse
    return model


@lru_cache(maxsize=1)
def module_classes() -> dict[str, type[nn.Module]]:
    """The module classes that a checkpoint may hold, by each name that a pickle may have for them."""
    import_upstream()
    classes: dict[str, type[nn.Module]] = {}
    for place, names in TORCH_MODULES.items():
        for name in names:
            classes[f"{place}.{name}"] = getattr(sys.modules[place], name)
    for place, names in UPSTREAM_MODULES.items():
        for name in names:
            if not hasattr(sys.modules[place], name):
                continue  # not every release of upstream has all of them
            for package in PACKAGES:
                classes[f"{package}{place}.{name}"] = getattr(sys.modules[place], name)
    return classes


def read_checkpoint(file: str | Path, needed: Collection[str] | None = None) -> Any:
    """Read a checkpoint of upstream's; `needed` and errors are those of `checkpoints.read_torch_file`."""
    from torch import nn

    from utils.core import checkpoints

    try:
        content = checkpoints.read_torch_file(file, module_classes(), needed=needed)
    except checkpoints.NotAllowed as error:
        if not is_theirs(error):
            raise
        content = read_theirs(file, build_model, resize)
    if origin_of(content):
        content = read_renamed(file, content, build_model, resize)
    if isinstance(content, dict) and "quantized_state" in content:
        raise CheckpointError(
            f"{file} is a quantized checkpoint; this command takes the FP32 weights that it was made from, and "
            "python qat.py eval takes both"
        )
    values = content.values() if isinstance(content, dict) else [content]
    for value in values:
        if isinstance(value, nn.Module) and hasattr(value, "yaml"):
            _check_yaml(file, value.yaml)
    return content


def _check_yaml(file: str | Path, yaml: Any) -> None:
    """Check a description in a checkpoint, from which upstream's train.py builds its network."""
    try:
        check_description(yaml)
    except InputError as error:
        raise CheckpointError(f"{file} is not loaded: {error}") from error
