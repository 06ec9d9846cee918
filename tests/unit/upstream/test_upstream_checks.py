"""What a layer says of its sizes has to be what its tensors have: fusing makes tensors of the sizes that it says."""

from __future__ import annotations

import pytest
from torch import nn

from utils.core.file_schema import Mismatch
from utils.upstream_checks import check_sizes


class Conv(nn.Module):
    def __init__(self, wide: int, kernel: int = 3, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(wide, wide, kernel, groups=groups)
        self.bn = nn.BatchNorm2d(wide)


class RepConvN(nn.Module):
    """As upstream's is before it is fused."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = None
        self.conv1, self.conv2 = Conv(8, 3, groups=2), Conv(8, 1, groups=2)


@pytest.mark.parametrize(
    ("place", "attribute", "value", "message"),
    [
        ("0.conv1.conv", "in_channels", 14000, "conv1.conv.weight is Parameter"),
        ("0.conv1.conv", "out_channels", 14000, "expected the shape \\[14000, 4, 3, 3\\]"),
        ("0.conv1.conv", "kernel_size", (900, 900), "conv1.conv.weight is Parameter"),
        ("0.conv1.conv", "groups", 8, "conv1.conv.weight is Parameter"),
        ("0.conv1.conv", "groups", 0, "groups is 0"),
        ("0.conv1.conv", "in_channels", [[]] * 9, "in_channels is "),
        ("0.conv1.conv", "bias", nn.Parameter(nn.Conv2d(1, 9, 1).bias.data), "conv1.conv.bias is Parameter"),
        ("0.conv1.bn", "num_features", 9, "conv1.bn.weight is Parameter"),
        ("0.conv1", "bn", nn.BatchNorm2d(900), "0.conv1.bn.weight is Parameter"),
        ("0.conv2", "conv", nn.Conv2d(8, 8, 1), "0.conv2.conv.weight is Parameter"),  # would be spread over the groups
        ("0.conv1", "conv", nn.Conv2d(8, 8, 5), "0.conv1.conv.weight is Parameter"),
        ("0", "bn", nn.BatchNorm2d(8), "0.bn is 'BatchNorm2d', expected none"),
    ],
)
def test_sizes_that_are_not_those_of_the_tensors(place, attribute, value, message):
    model = nn.Sequential(RepConvN())
    check_sizes(model)
    setattr(model.get_submodule(place), attribute, value)
    with pytest.raises(Mismatch, match=message):
        check_sizes(model)
