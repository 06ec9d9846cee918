"""Networks in PyTorch that end in upstream's kinds of heads, small enough to be timed in tests."""

from __future__ import annotations

import torch
from torch import nn


class Head(nn.Module):
    """Gives what upstream's detector returns in evaluation mode: the prediction `[B, 6, anchors]` and maps."""

    def forward(self, x):
        return x.flatten(2), [x]


class Detector(nn.Module):
    """One 1×1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Conv2d(3, 6, 1), Head())
        self.stride = torch.tensor([8.0, 16.0, 32.0])

    def forward(self, x):
        return self.model(x)
