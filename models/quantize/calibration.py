"""Find amax of activations: statistics are gathered once, then any method is computed from them.

The float network runs over some batches; for each tensor, a histogram of magnitudes, and for each scale the exact
maximum of every image are kept. All searches work on all scales at once.

Methods (Wu et al., "Integer Quantization for Deep Learning Inference", 2020, section 3):
max: the largest magnitude; percentile: the magnitude below which p percent of the values lie; mse: the smallest mean
squared error of rounding and clipping. The last two are limited by the median image: a few images with activations
unlike those of all others would decide the range, and leave most values of the rest in a few of its steps
(docs/accuracy.md).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn

from models.quantize.distillation import placeholder
from models.quantize.fake_quantize import INT8
from models.quantize.modules import quantized_weights
from models.quantize.placement import quantizers_off
from models.quantize.recipe import Calibration
from utils.core import distributed
from utils.core.device import disable_tf32
from utils.core.errors import InputError, QatError

logger = logging.getLogger(__name__)

BINS = 4096
EXACT = 1 << 24  # torch.histc counts in float32, which is exact up to this number
CANDIDATES = 200  # amax values tried by mse, from 1/32 of the maximum to all of it
SMALLEST_FRACTION = 1 / 32


@dataclass
class Histogram:
    """Magnitudes of the tensors that share one scale, each counted by itself."""

    counts: Tensor  # float64 [tensors, BINS] over 0..top
    top: float  # upper edge of the last bin; it doubles when a larger value comes, and pairs of bins merge
    largest: float  # the exact maximum over all tensors
    of_images: list[float] = field(default_factory=list)  # the exact maximum of each image

    @classmethod
    def empty(cls, top: float, device: torch.device) -> Histogram:
        """Make bins over 0..top, or over 0..1 where all values are zero; no tensor is counted yet."""
        return cls(torch.zeros(0, BINS, dtype=torch.float64, device=device), top or 1.0, 0.0)

    def add(self, magnitude: Tensor, largest: float | None = None, tensor: int = 0) -> None:
        """Count magnitudes of the tensor with this number: the tensors come in the same order in every forward."""
        largest = float(magnitude.max()) if largest is None else largest
        while largest > self.top:
            merged = self.counts.reshape(-1, BINS // 2, 2).sum(2)
            self.counts = torch.cat((merged, torch.zeros_like(merged)), 1)
            self.top *= 2
        if tensor >= len(self.counts):
            missing = self.counts.new_zeros(tensor + 1 - len(self.counts), BINS)
            self.counts = torch.cat((self.counts, missing))
        for part in magnitude.flatten().split(EXACT) if magnitude.numel() else ():
            self.counts[tensor] += torch.histc(part, BINS, 0, self.top)
        self.largest = max(self.largest, largest)

    def add_images(self, largest: list[float], tensor: int = 0) -> None:
        """Take the largest magnitude of each image of a forward, of the tensor with this number."""
        if tensor == 0:
            self.of_images += largest
        elif largest:
            before = self.of_images[-len(largest) :]
            self.of_images[-len(largest) :] = map(max, before, largest)

    def limit(self, times_median: float) -> float:
        """The largest amax: `times_median` times the median of `of_images`; infinite for 0, or where that is 0."""
        median = median_low(self.of_images) if self.of_images else 0.0
        return times_median * median or math.inf


@dataclass
class Statistics:
    """Histograms by name of the activation quantizer."""

    histograms: dict[str, Histogram] = field(default_factory=dict)

    def amax(self, method: str, percentile: float = 99.999, median_limit: float = 0.0) -> dict[str, Tensor]:
        """Find amax (a float32 scalar) of every scale.

        A tensor counts for what it is and not for its size: percentile is the largest over the tensors of a scale, so
        that none is clipped more often than asked; mse takes every tensor with the same weight.

        Args:
            method: max, percentile or mse.
            percentile: of the magnitudes, 50..100.
            median_limit: amax is at most so many times the largest magnitude of the median image; 0 is no limit, and
                max has none.
        """
        names, histograms = list(self.histograms), list(self.histograms.values())
        device = histograms[0].counts.device
        of_each = [[one.top, one.largest, one.limit(median_limit)] for one in histograms]
        top, largest, limits = torch.tensor(of_each, dtype=torch.float64).to(device).T
        if method == "max":
            found = largest
        elif method == "percentile":
            owner = torch.tensor([index for index, one in enumerate(histograms) for _ in one.counts], device=device)
            counts = torch.cat([one.counts for one in histograms])
            share = counts.cumsum(1) / counts.sum(1, keepdim=True)
            index = (share < percentile / 100 - 1e-12).sum(1)  # first bin that reaches the share
            each = (index + 1) * top[owner] / BINS
            found = torch.zeros_like(top).scatter_reduce(0, owner, each, "amax")
        elif method == "mse":
            counts = torch.stack([(one.counts / one.counts.sum(1, keepdim=True)).sum(0) for one in histograms])
            found = _mse(counts, top, largest)
        else:
            raise ValueError(f"no calibration method {method!r}")
        found = torch.minimum(found, largest if method == "max" else torch.minimum(largest, limits)).float()
        return {name: found[index] for index, name in enumerate(names)}


def collect(model: nn.Module, batches: Iterable[Tensor]) -> Statistics:
    """Run the float network over all batches and count magnitudes at every activation quantizer.

    Several processes count their parts of every batch, over bins that the whole batch decides. So their sums, which are
    integers, are what one process counts.

    Args:
        batches: float images `[B, 3, H, W]` in 0..1, on the model's device; a part of a shared batch may be empty.

    Raises:
        QatError: there is no batch, or a tensor holds NaN or infinity.
    """
    statistics = Statistics()
    quantizers: Any = model.activation_quantizers
    calls: Counter[str] = Counter()  # of each quantizer in the present forward: which of its tensors comes next
    counts = True  # False for a placeholder

    def count(name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        magnitude = inputs[0].detach().float().abs()
        maxima = magnitude.flatten(1).amax(1)
        of_images, largest = maxima.tolist(), float(maxima.max())  # NaN if there is one
        if not counts:
            magnitude, of_images, largest = magnitude.flatten()[:0], [], 0.0
        each = distributed.gather(largest)
        largest = max(each) if all(map(math.isfinite, each)) else math.nan
        if not math.isfinite(largest):
            place = name.replace("/", ".")
            raise InputError(f"the float network computes NaN or infinity at {place}; check the weights")
        if name not in statistics.histograms:
            statistics.histograms[name] = Histogram.empty(largest, magnitude.device)
        statistics.histograms[name].add(magnitude, largest, calls[name])
        statistics.histograms[name].add_images(of_images, calls[name])
        calls[name] += 1

    handles = [module.register_forward_pre_hook(partial(count, name)) for name, module in quantizers.items()]
    images: Tensor | None = None
    try:
        with quantizers_off(model), torch.inference_mode(), disable_tf32():
            for images in batches:
                calls.clear()
                images, counts = placeholder(images)
                model(images)
    finally:
        for handle in handles:
            handle.remove()
    if images is None:
        raise QatError("calibration got no images")
    if unseen := [name for name in quantizers if name not in statistics.histograms]:
        raise QatError(f"calibration never reached {', '.join(unseen)}: a rule in rules.py does not match the network")
    histograms = statistics.histograms.values()
    parts = distributed.gather([one.of_images for one in histograms])
    for histogram, maxima in zip(histograms, zip(*parts, strict=True), strict=True):
        histogram.counts = distributed.all_sum(histogram.counts)
        histogram.of_images = [value for part in maxima for value in part]  # of all processes
    return statistics


def set_ranges(model: Any, amax: dict[str, Tensor]) -> None:
    """Set the activation quantizers' amax."""
    for name, value in amax.items():
        model.activation_quantizers[name].set_amax(value)


def calibrate(model: nn.Module, batches: Iterable[Tensor], settings: Calibration) -> Statistics:
    """Gather statistics and set every activation scale by the method of `settings`; the statistics are returned."""
    statistics = collect(model, batches)
    apply_calibration(model, statistics, settings)
    return statistics


def apply_calibration(model: nn.Module, statistics: Statistics, settings: Calibration) -> None:
    """Set every activation scale by the method of `settings`, and say how many ranges the median image limits."""
    amax = statistics.amax(settings.method, settings.percentile, settings.median_limit)
    set_ranges(model, amax)
    if settings.method == "max":
        return
    histograms, limit = statistics.histograms, settings.median_limit
    limited = sum(float(value) >= histograms[name].limit(limit) * (1 - 1e-6) for name, value in amax.items())  # float32
    if limited:
        logger.info(
            "calibration: %d of %d ranges are at most %g times the largest magnitude of the median image, since a few "
            "images have far larger ones (calibration.median_limit)", limited, len(amax), limit,
        )  # fmt: skip


def tensor_ranges(model: Any) -> list[dict[str, Any]]:
    """List the ranges of a network, for reports, one row for each scale.

    Returns:
        rows of `name`, `kind` ('activation' or 'weight'), `amax` (the largest), `min` and `max` of amax over channels,
        `channels` (1 for activations), and `tensors` (how many share it).
    """
    shared, rows = model.quantization_plan.scales, []
    found = [(key.replace("/", "."), "activation", one) for key, one in model.activation_quantizers.items()]
    found += [(path, "weight", quantizer) for path, (_, quantizer) in quantized_weights(model).items()]
    for name, kind, quantizer in found:
        amax = quantizer.amax
        low, high = float(amax.min()), float(amax.max())
        tensors = len(shared.get(name, ("",))) if kind == "activation" else 1
        rows.append({"name": name, "kind": kind, "amax": high, "min": low, "max": high, "channels": amax.numel(),
                     "tensors": tensors})  # fmt: skip
    return rows


def _mse(counts: Tensor, top: Tensor, largest: Tensor) -> Tensor:
    centers = (torch.arange(BINS, device=counts.device, dtype=counts.dtype) + 0.5) * (top / BINS)[:, None]
    fractions = torch.linspace(SMALLEST_FRACTION, 1, CANDIDATES, dtype=largest.dtype, device=largest.device)
    candidates = largest.clamp(min=1e-30)[:, None] * fractions
    errors = []
    for amax in candidates.unbind(1):
        scale = (amax / INT8.max)[:, None]
        rounded = (centers / scale).round().clamp(max=INT8.max) * scale
        errors.append(((rounded - centers).square() * counts).sum(1))
    best = torch.stack(errors, 1).argmin(1, keepdim=True)
    return candidates.gather(1, best).squeeze(1)
