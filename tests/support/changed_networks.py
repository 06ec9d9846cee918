"""Networks that differ from their model description: what users do to a network after it was built."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval


def parts(block: Any) -> list[tuple[nn.Conv2d, nn.BatchNorm2d | None]]:
    """The convolutions of a Conv, a RepConvN (its branches) or a convolution, each with its batch norm."""
    if isinstance(block, nn.Conv2d):
        return [(block, None)]
    if hasattr(block, "conv1"):
        return [*parts(block.conv1), *parts(block.conv2)]
    return [(block.conv, block.bn)]


def cut(producer: Any, consumer: Any, share: float, offsets: tuple[int, ...] = (0,)) -> None:
    """Remove the channels between two blocks whose batch norms have the smallest weights.

    Args:
        share: of the channels, in 0..1.
        offsets: where the consumer's inputs hold them.
    """
    norms = torch.stack([norm.weight.detach().abs() for _, norm in parts(producer)]).sum(0)
    count = len(norms)
    left = norms.argsort(descending=True)[: count - int(share * count)].sort().values
    for convolution, norm in parts(producer):
        convolution.weight = nn.Parameter(convolution.weight.detach()[left])
        convolution.out_channels = norm.num_features = len(left)
        for name in ("weight", "bias"):
            setattr(norm, name, nn.Parameter(getattr(norm, name).detach()[left]))
        for name in ("running_mean", "running_var"):
            setattr(norm, name, getattr(norm, name)[left])
    for convolution, _ in parts(consumer):
        removed = {offset + channel for offset in offsets for channel in {*range(count)} - {*left.tolist()}}
        inputs = [channel for channel in range(convolution.in_channels) if channel not in removed]
        convolution.weight = nn.Parameter(convolution.weight.detach()[:, inputs])
        convolution.in_channels = len(inputs)


def prune(model: Any, share: float = 0.3) -> None:
    """Remove a share of the channels inside of blocks: those that no other block reads, and the head's."""
    for module in model.modules():
        kind = type(module).__name__
        if kind == "RepNBottleneck":
            cut(module.cv1, module.cv2, share)
        if kind == "RepNCSP":
            cut(module.cv2, module.cv3, share, (module.cv1.conv.out_channels,))
        if kind == "RepNCSPELAN4":
            for name in ("cv2", "cv3"):
                csp, last = getattr(module, name)
                cut(csp.cv3, last, share)
        if kind == "SPPELAN":
            cut(module.cv1, module.cv5, share, tuple(i * module.cv1.conv.out_channels for i in range(4)))
    for first, second, last in model.model[-1].cv3:
        cut(first, second, share)
        cut(second, last, share)


def fold_batch_norms(model: Any) -> None:
    """Fold every other batch norm, those in branches of RepConvN, too; an Identity stands in its place."""
    for index, block in enumerate(blocks(model, "Conv")):
        if index % 2:
            block.conv, block.bn = fuse_conv_bn_eval(block.conv, block.bn), nn.Identity()


def merge_branches(model: Any) -> None:
    """Replace each RepConvN by a Conv of one convolution with bias, as re-parameterisation leaves it."""
    from models.common import Conv

    for bottleneck in blocks(model, "RepNBottleneck"):
        branches = [
            fuse_conv_bn_eval(branch.conv, branch.bn) for branch in (bottleneck.cv1.conv1, bottleneck.cv1.conv2)
        ]
        one = Conv(branches[0].in_channels, branches[0].out_channels, 3)
        one.conv, one.bn = branches[0], nn.Identity()
        one.conv.weight = nn.Parameter(one.conv.weight + nn.functional.pad(branches[1].weight, [1, 1, 1, 1]))
        one.conv.bias = nn.Parameter(one.conv.bias + branches[1].bias)
        bottleneck.cv1 = one


def change_biases(model: Any) -> None:
    """Convolutions before a batch norm get biases, also in branches of RepConvN; the head's class scores lose them."""
    for block in blocks(model, "Conv"):
        block.conv.bias = nn.Parameter(torch.randn(block.conv.out_channels))
    for branch in model.model[-1].cv3:
        branch[-1].bias = None


def change_activations(model: Any) -> None:
    """Another activation than the description's in most blocks."""
    for block in blocks(model, "Conv"):
        if isinstance(block.act, nn.SiLU):
            block.act = nn.ReLU()


def replace_blocks(model: Any) -> None:
    """An ADown becomes an AConv, a RepNCSPELAN4 an ELAN1 with dilated convolutions; a bottleneck goes."""
    from models.common import ELAN1, AConv

    for index, layer in enumerate(model.model):
        if type(layer).__name__ == "ADown":
            other = AConv(layer.cv1.conv.in_channels * 2, layer.cv1.conv.out_channels * 2)
        elif type(layer).__name__ == "RepNCSPELAN4":
            inner = layer.cv2[1].conv.out_channels
            other = ELAN1(layer.cv1.conv.in_channels, layer.cv1.conv.out_channels, inner, layer.cv4.conv.out_channels)
            other.cv2.conv.dilation = other.cv2.conv.padding = (2, 2)
        else:
            continue
        other.i, other.f, other.type, other.np = layer.i, layer.f, type(other).__name__, 0
        model.model[index] = other
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    model.eval()


def change_description(model: Any) -> None:
    """A description of another network: of 3 classes and twice the channels."""
    model.yaml = {**model.yaml, "nc": 3, "width_multiple": 2.0}


CHANGES: dict[str, Callable[[Any], None]] = {
    change.__name__: change
    for change in (
        prune, fold_batch_norms, merge_branches, change_biases, change_activations, replace_blocks, change_description,
    )
}  # fmt: skip


def blocks(model: Any, kind: str) -> Iterator[Any]:
    """Modules of a class, by its name."""
    return (module for module in [*model.modules()] if type(module).__name__ == kind)
