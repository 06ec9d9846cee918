"""Networks and checkpoints of upstream YOLOv9: load, build, fuse."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Collection, Iterator, Mapping
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
    """A float network as upstream trained it: float32, evaluation mode, batch norms not yet fused."""

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
    import torch
    from torch import nn

    content = read_checkpoint(path, needed=NETWORK_KEYS)
    if isinstance(content, nn.Module):
        content = {"model": content}
    model = _network_in(path, content)
    opt = content["opt"] if isinstance(content.get("opt"), Mapping) else {}
    check_head(model, path, heads)
    try:
        head = model.model[-1]
        if isinstance(model.stride, (list, tuple)):
            model.stride = torch.tensor(model.stride)
        if not isinstance(model.names, (Mapping, list, tuple)):
            raise CheckpointError(
                f"{path}: the names of its classes are {short_repr(model.names)}; set a list of {head.nc} texts as the "
                "network's `names`, and save it again"
            )
        names = model.names if isinstance(model.names, Mapping) else dict(enumerate(model.names))
        names = {int(key): str(value) for key, value in names.items()}
        check_class_names(path, names, head.nc, AGAIN)
        check_finite(path, model.state_dict(), AGAIN)
        model = model.float().eval()
        for module in model.modules():
            if type(module).__name__ == "Upsample" and not hasattr(module, "recompute_scale_factor"):
                module.recompute_scale_factor = None  # saved by a torch before 1.11
            if isinstance(module, nn.Conv2d):
                set_channels(module)
        with torch.no_grad():
            side, masks = 2 * network_stride(model), int(getattr(head, "nm", 0))
            outputs = predicted(deepcopy(model)(torch.zeros(1, channels_of(model), side, side)))  # does it compute?
        if [output.shape[1] for output in outputs] != [4 + head.nc + masks, *[masks] * bool(masks)]:
            raise CheckpointError(f"{path} computes other classes or masks than its head says; {AGAIN}")
        yaml = check_description(model.yaml)
        data = opt.get("data") and str(opt["data"])
        origin = str(content.get("origin", ""))
        if origin:
            logger.info("%s was trained with %s; its network is built of upstream's blocks", path, origin)
        return FloatCheckpoint(
            model, names, head.nc, network_stride(model), yaml, size_in(opt), data, origin, hash_of_weights(model)
        )
    except InputError:
        raise
    except Exception as error:  # modules whose state is not what their class makes can fail anywhere
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path} is damaged or from another version: its network does not compute "
            f"({type(error).__name__}: {reason}); {AGAIN}"
        ) from error


def _network_in(path: str | Path, content: Any) -> Any:
    """The EMA or else the network in a checkpoint's content; `CheckpointError` that names another content."""
    from torch import nn

    from utils.core.checkpoints import UPSTREAMS

    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a YOLOv9 checkpoint; {UPSTREAMS}")
    if "state_version" in content:
        raise CheckpointError(f"{path} is what --resume continues from; give qat_best_*, qat_ep_* or ptq_* beside it")
    model: Any = content.get("model") if content.get("ema") is None else content["ema"]
    layers = getattr(model, "model", None)
    if not hasattr(model, "yaml") or not isinstance(layers, nn.Sequential) or not len(layers):
        if _is_state_dict(content):
            raise CheckpointError(
                f"{path} holds weights without the network (a state_dict). Build the network and save both "
                "together, in the checkout: m = models.yolo.DetectionModel(YAML, nc=CLASSES); "
                "m.load_state_dict(WEIGHTS); torch.save({'model': m}, 'new.pt')"
            )
        if isinstance(model, nn.Module):
            raise CheckpointError(f"{path} holds no YOLOv9 network but a {type(model).__name__}; {UPSTREAMS}")
        raise CheckpointError(
            f"{path} holds no YOLOv9 network under 'ema' or 'model' (keys: {short_repr(list(content))}); {UPSTREAMS}"
        )
    return model


def _is_state_dict(value: Any) -> bool:
    """Whether it holds weights by name, also below further keys."""
    import torch

    if not isinstance(value, Mapping):
        return False
    return any(
        (isinstance(item, torch.Tensor) and str(name).endswith("weight")) or _is_state_dict(item)
        for name, item in value.items()
    )


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
    """Raises `CheckpointError` unless the classes 0 to count - 1, and no others, have names."""
    if set(names) != set(range(count)):
        if set(names) == set(range(1, count + 1)):
            remedy = "set the network's `names` to a list of texts, the first for class 0, and save it again"
        raise CheckpointError(
            f"{path} has names of {plural(len(names), 'class')}, from {min(names, default=0)} on, and its head finds "
            f"{count}, from 0 on; {remedy}"
        )


def check_finite(path: str | Path, state: Mapping[str, torch.Tensor], remedy: str) -> None:
    """Raises `CheckpointError` for the first tensor that holds NaN or infinity, as a training that diverged leaves."""
    for name, value in state.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise CheckpointError(f"{path}: {name} holds NaN or infinity; {remedy}")


def network_stride(model: Any) -> int:
    """The pixels that image sizes are multiples of."""
    return max(int(model.stride.max()), 32)


def build_model(config: Mapping[str, Any] | str | Path, nc: int | None = None) -> nn.Module:
    """Upstream's network with random weights, of its YAML (a file or its content); `InputError` where it is refused."""
    import_upstream()
    from models.common import Conv, RepConvN
    from models.yolo import DetectionModel, SegmentationModel

    description = deepcopy(check_description(config if isinstance(config, Mapping) else read_description(config)))
    defaults = Conv.default_act, RepConvN.default_act
    head = [*description["backbone"], *description["head"]][-1][2]
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
        state: name → tensor, as a state_dict; names that the network does not have are left out of account.
    """
    import torch
    from torch import nn

    for path, module in model.named_modules():
        weight = state.get(f"{path}.weight")
        own = getattr(module, "weight", None)
        if own is None or not isinstance(weight, torch.Tensor) or weight.shape == own.shape:
            continue
        if isinstance(module, nn.BatchNorm2d) and weight.dim() == 1:
            tensors = {"weight": module.weight, "bias": module.bias}
            tensors |= {"running_mean": module.running_mean, "running_var": module.running_var}
            for name, value in tensors.items():
                if value is not None:
                    setattr(module, name, _resized(value, weight.shape))
            module.num_features = len(weight)
        if isinstance(module, nn.Conv2d) and weight.shape[2:] == own.shape[2:]:
            if module.groups == module.out_channels > 1:
                module.groups = len(weight)
            module.weight = _resized(own, weight.shape)
            if module.bias is not None:
                module.bias = _resized(module.bias, weight.shape[:1])
            set_channels(module)


def _resized(tensor: torch.Tensor, shape: torch.Size) -> Any:
    """A tensor of ones, or a parameter where `tensor` is one."""
    import torch
    from torch import nn

    made = torch.ones(shape, dtype=tensor.dtype)
    return nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made


def set_channels(convolution: nn.Conv2d) -> None:
    """Set the attributes that count channels to those of the weight, which pruning by hand leaves as they were."""
    convolution.out_channels = convolution.weight.shape[0]
    convolution.in_channels = convolution.weight.shape[1] * convolution.groups


def read_description(path: str | Path) -> dict[str, Any]:
    """A model YAML of upstream's; `InputError` if the file cannot be read, or is no model description."""
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
    """Paths of the Conv and RepConvN that `fuse` has left as they were, each with the reason."""
    import_upstream()
    from models.common import Conv, RepConvN

    for path, module in model.named_modules():
        if isinstance(module, RepConvN) and not hasattr(module, "conv"):
            yield path, _why_not_merged(module)
        if isinstance(module, Conv) and hasattr(module, "bn"):
            yield path, _why_not_folded(module)


def _why_not_folded(module: Any) -> str:
    """Why the batch norm of a Conv cannot be folded; empty where it can, or was (and may have left an Identity)."""
    from torch import nn

    if not hasattr(module, "bn"):
        return ""
    if not isinstance(module.conv, nn.Conv2d):
        return f"has a {type(module.conv).__name__} in place of its convolution"
    if not isinstance(module.bn, (nn.BatchNorm2d, nn.Identity)):
        return f"has a {type(module.bn).__name__} in place of its batch norm"
    if isinstance(module.bn, nn.BatchNorm2d) and module.bn.running_mean is None:
        return "has a batch norm without running mean and variance"
    return ""


def _why_not_merged(module: Any) -> str:
    """Why the branches of a RepConvN cannot be merged into one convolution; empty where they can, or are."""
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
        if reason := _why_not_folded(branch):
            return f"has a branch {name} that {reason}"
        if branch.conv.kernel_size != kernel:
            return f"has a branch {name} with the kernel {branch.conv.kernel_size}"
    if module.bn is not None and not isinstance(module.bn, nn.BatchNorm2d):
        return f"has a {type(module.bn).__name__} as its third branch"
    return ""


def _prepare_branches(module: Any) -> None:
    """Give the branches of a RepConvN what upstream's `fuse_convs` reads: batch norms with weights, no other bias."""
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
        one_branch = isinstance(module, RepConvN) and hasattr(module, "conv")
        if one_branch or (isinstance(module, Conv) and not hasattr(module, "bn")):
            module.forward = module.forward_fuse
    return model


@lru_cache(maxsize=1)
def module_classes() -> dict[str, type[nn.Module]]:
    """The module classes that a checkpoint may hold, by each name that a pickle may have for them."""
    import_upstream()
    classes: dict[str, type[nn.Module]] = {}
    for place, names in {**UPSTREAM_MODULES, **TORCH_MODULES}.items():
        for name in names:
            if hasattr(sys.modules[place], name):  # not every release of upstream has all of them
                packages = PACKAGES if place in UPSTREAM_MODULES else ("",)
                classes |= {f"{package}{place}.{name}": getattr(sys.modules[place], name) for package in packages}
    return classes


def read_checkpoint(file: str | Path, needed: Collection[str] | None = None) -> Any:
    """What a checkpoint of upstream's holds; `needed` and what is raised are as of `checkpoints.read_torch_file`."""
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
            f"{file} is a quantized checkpoint; this command takes the float weights it was made from, and "
            "python qat.py eval takes both"
        )
    for value in content.values() if isinstance(content, dict) else [content]:
        if isinstance(value, nn.Module) and hasattr(value, "yaml"):
            try:
                check_description(value.yaml)  # upstream's train.py builds its network from it
            except InputError as error:
                raise CheckpointError(f"{file} is not loaded: {error}") from error
    return content
