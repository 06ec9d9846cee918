"""Networks of a few channels in upstream's shape (`model` is a list of layers with `i` and `f`), for unit tests.

The blocks carry the names of upstream's classes, so that the table in rules.py finds their rows; each is written from
what its row says, and stands for a fused module.
"""

import torch
from torch import nn


class Conv(nn.Module):
    def __init__(self, c1: int, c2: int, k: int = 1, s: int = 1, act: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, s, k // 2)
        self.act = nn.SiLU() if act else nn.Identity()

    def forward(self, x):
        return self.act(self.conv(x))


class Concat(nn.Module):
    def __init__(self, dimension: int = 1) -> None:
        super().__init__()
        self.d = dimension

    def forward(self, x):
        return torch.cat(x, self.d)


class RepNBottleneck(nn.Module):
    def __init__(self, c: int, add: bool = True) -> None:
        super().__init__()
        self.cv1, self.cv2, self.add = Conv(c, c, 3), Conv(c, c, 3), add

    def forward(self, x):
        y = self.cv2(self.cv1(x))
        return x + y if self.add else y


class ADown(nn.Module):
    def __init__(self, c1: int, c2: int) -> None:
        super().__init__()
        self.cv1, self.cv2 = Conv(c1 // 2, c2 // 2, 3, 2), Conv(c1 // 2, c2 // 2)

    def forward(self, x):
        left, right = nn.functional.avg_pool2d(x, 2, 1, 0, False, True).chunk(2, 1)
        return torch.cat((self.cv1(left), self.cv2(nn.functional.max_pool2d(right, 3, 2, 1))), 1)


class AConv(nn.Module):
    def __init__(self, c1: int, c2: int) -> None:
        super().__init__()
        self.cv1 = Conv(c1, c2, 3, 2)

    def forward(self, x):
        return self.cv1(nn.functional.avg_pool2d(x, 2, 1, 0, False, True))


class Unknown(nn.Module):
    """A user's own block: no row describes it."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(c, c, 1)

    def forward(self, x):
        return self.inner(x).relu()


class Network(nn.Module):
    """Runs layers as upstream's BaseModel does."""

    def __init__(self, layers: list[tuple[int | list[int], nn.Module]]) -> None:
        super().__init__()
        for index, (source, layer) in enumerate(layers):
            layer.i, layer.f = index, source
        self.model = nn.Sequential(*(layer for _, layer in layers))

    def forward(self, x):
        results = []
        for layer in self.model:
            if layer.f != -1:
                x = results[layer.f] if isinstance(layer.f, int) else [x if f == -1 else results[f] for f in layer.f]
            x = layer(x)
            results.append(x)
        return x


def chain() -> Network:
    """Conv → ADown → bottleneck → upsample → Concat with the first → Conv → Conv2d."""
    torch.manual_seed(0)
    return Network(
        [
            (-1, Conv(3, 8, 3, 2)),
            (-1, ADown(8, 8)),
            (-1, RepNBottleneck(8)),
            (-1, nn.Upsample(None, 2, "nearest")),
            ([-1, 0], Concat()),
            (-1, Conv(16, 8)),
            (-1, nn.Conv2d(8, 4, 1)),
        ]
    ).eval()


class DFL(nn.Module):
    """Constant bins, as upstream's."""

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(bins, 1, 1, bias=False).requires_grad_(False)
        self.conv.weight.data[:] = torch.arange(float(bins)).view(1, bins, 1, 1)


class DDetect(nn.Module):
    """Raw maps while training, `(something decoded, raw maps)` otherwise, as upstream's head."""

    def __init__(self, nc: int, inputs: tuple[int, ...], bins: int = 4) -> None:
        super().__init__()
        self.nc, self.nl, self.reg_max = nc, len(inputs), bins
        self.cv2 = nn.ModuleList(nn.Sequential(Conv(c, 8, 3), nn.Conv2d(8, 4 * bins, 1)) for c in inputs)
        self.cv3 = nn.ModuleList(nn.Sequential(Conv(c, 8, 3), nn.Conv2d(8, nc, 1)) for c in inputs)
        self.drop = nn.Dropout(0.5)
        self.dfl = DFL(bins)

    def forward(self, x):
        maps = [self.drop(torch.cat((self.cv2[i](one), self.cv3[i](one)), 1)) for i, one in enumerate(x)]
        if self.training:
            return maps
        return self.dfl.conv(maps[0][:, : self.reg_max].softmax(1)), maps


class Proto(nn.Module):
    """Prototypes of masks, at twice the resolution."""

    def __init__(self, c1: int, c: int, masks: int) -> None:
        super().__init__()
        self.cv1, self.cv2, self.cv3 = Conv(c1, c, 3), Conv(c, c, 3), Conv(c, masks)
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")

    def forward(self, x):
        return self.cv3(self.cv2(self.upsample(self.cv1(x))))


class Segment(DDetect):
    """Maps, coefficients and prototypes while training, `(rows, these three)` otherwise, as upstream's heads."""

    def __init__(self, nc: int, inputs: tuple[int, ...], masks: int = 5, proto: nn.Module | None = None) -> None:
        super().__init__(nc, inputs)
        self.nm, self.proto = masks, proto or Proto(inputs[0], 6, masks)
        self.cv4 = nn.ModuleList(nn.Sequential(Conv(c, 8, 3), nn.Conv2d(8, masks, 1)) for c in inputs)

    def forward(self, x, source=None):
        coefficients = torch.cat([self.cv4[i](one).flatten(2) for i, one in enumerate(x)], 2)
        prototypes = self.proto(x[0] if source is None else source)
        maps = [torch.cat((self.cv2[i](one), self.cv3[i](one)), 1) for i, one in enumerate(x)]
        if self.training:
            return maps, coefficients, prototypes
        rows = torch.cat([one.flatten(2) for one in maps], 2).sigmoid()
        return torch.cat((rows, coefficients), 1), (maps, coefficients, prototypes)


class DSegment(Segment):
    """Prototypes from an input of their own, the last."""

    def __init__(self, nc: int, inputs: tuple[int, ...], masks: int = 5) -> None:
        super().__init__(nc, inputs[:-1], masks, Conv(inputs[-1], masks))

    def forward(self, x):
        return super().forward(x[:-1], x[-1])


for block in (Conv, Concat, RepNBottleneck, ADown, AConv, DDetect, Proto, Segment, DSegment):
    block.__module__ = "models.common"


def detector() -> Network:
    """`chain` with a head of two levels and three classes, and weights that make maps differ from place to place."""
    return _with_head(DDetect, [5, 2])


def segmenter() -> Network:
    """`detector` with five masks, whose prototypes come from the finest level."""
    return _with_head(Segment, [5, 2])


def segmenter_with_own_input() -> Network:
    """`detector` with five masks, whose prototypes come from an enlarged layer of their own."""
    return _with_head(DSegment, [5, 2, 7])


def _with_head(kind: type[DDetect], inputs: list[int]) -> Network:
    layers = chain().model  # it seeds what is made behind it
    head = kind(3, (8,) * len(inputs))
    more = [nn.Upsample(None, 2, "nearest"), Conv(8, 8, 3)] if kind is DSegment else []
    rows = [*((layer.f, layer) for layer in layers[:6]), *((-1, layer) for layer in more), (inputs, head)]
    network = Network(rows).eval()
    with torch.no_grad():
        for parameter in nn.ModuleList([*more, head]).parameters():
            parameter *= 3
        head.dfl.conv.weight /= 3
    return network
