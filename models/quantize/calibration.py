"""Find amax of activations: statistics are gathered once, then any method is computed from them.

The FP32 model runs over some batches. For each tensor a histogram of magnitudes is stored, and for each scale the exact
maximum of every image. All searches work on all scales at once.

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
        if largest is None:
            largest = float(magnitude.max())
        while largest > self.top:
            merged = self.counts.reshape(-1, BINS // 2, 2).sum(2)
            self.counts = torch.cat((merged, torch.zeros_like(merged)), 1)
            self.top *= 2
        if tensor >= len(self.counts):
            missing = self.counts.new_zeros(tensor + 1 - len(self.counts), BINS)
            self.counts = torch.cat((self.counts, missing))
        if magnitude.numel():
            for part in magnitude.flatten().split(EXACT):
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
        histograms = list(self.histograms.values())
        device = histograms[0].counts.device
        bounds = [[histogram.top, histogram.largest, histogram.limit(median_limit)] for histogram in histograms]
        top, largest, limits = torch.tensor(bounds, dtype=torch.float64).to(device).T
        if method == "max":
            amax = largest
        elif method == "percentile":
            amax = _percentile(histograms, top, percentile)
        elif method == "mse":
            amax = _mse(histograms, top, largest)
        else:
            raise ValueError(f"unknown calibration method {method!r}")
        amax = torch.minimum(amax, largest)
        if method != "max":
            amax = torch.minimum(amax, limits)
        return dict(zip(self.histograms, amax.float(), strict=True))


def collect(model: nn.Module, batches: Iterable[Tensor]) -> Statistics:
    """Run the FP32 model over all batches and count magnitudes at every activation quantizer.

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
            magnitude = magnitude.flatten()[:0]
            of_images = []
            largest = 0.0
        each = distributed.gather(largest)
        largest = max(each) if all(map(math.isfinite, each)) else math.nan
        if not math.isfinite(largest):
            place = name.replace("/", ".")
            raise InputError(f"the FP32 model computes NaN or infinity at {place}; check the weights")
        if name not in statistics.histograms:
            statistics.histograms[name] = Histogram.empty(largest, magnitude.device)
        statistics.histograms[name].add(magnitude, largest, calls[name])
        statistics.histograms[name].add_images(of_images, calls[name])
        calls[name] += 1

    handles = []
    for name, module in quantizers.items():
        handles.append(module.register_forward_pre_hook(partial(count, name)))
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
    unseen = [name for name in quantizers if name not in statistics.histograms]
    if unseen:
        raise QatError(f"calibration never reached {', '.join(unseen)}: a rule in rules.py does not match the network")
    _sum_over_processes(list(statistics.histograms.values()))
    return statistics


def _sum_over_processes(histograms: list[Histogram]) -> None:
    """Replace the counts of this process by the sums over all of them, and join the maxima of their images."""
    parts = distributed.gather([histogram.of_images for histogram in histograms])  # [process][histogram][image]
    for index, histogram in enumerate(histograms):
        histogram.counts = distributed.all_sum(histogram.counts)
        histogram.of_images = [maximum for part in parts for maximum in part[index]]


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
    """Set every activation scale by the method of `settings`, and log how many ranges the median image limits."""
    amax = statistics.amax(settings.method, settings.percentile, settings.median_limit)
    set_ranges(model, amax)
    if settings.method == "max":
        return
    histograms = statistics.histograms
    limit = settings.median_limit
    limited = 0
    for name, value in amax.items():
        if float(value) >= histograms[name].limit(limit) * (1 - 1e-6):  # amax is float32, the limit a double
            limited += 1
    if limited:
        logger.info(
            "calibration: %d of %d ranges are clipped to %g times the largest magnitude of the median image, because "
            "a few images have far larger activations (calibration.median_limit)",
            limited,
            len(amax),
            limit,
        )


def tensor_ranges(model: Any) -> list[dict[str, Any]]:
    """List the ranges of a network, for reports, one row for each scale.

    Returns:
        rows of `name`, `kind` ('activation' or 'weight'), `amax` (the largest), `min` and `max` of amax over channels,
        `channels` (1 for activations), and `tensors` (how many share it).
    """
    rows = []
    for key, quantizer in model.activation_quantizers.items():
        name = key.replace("/", ".")
        tensors = model.quantization_plan.scales.get(name, (name,))  # a fallback input has a scale of its own
        rows.append(_range_row(name, "activation", quantizer.amax, len(tensors)))
    for path, (_, quantizer) in quantized_weights(model).items():
        rows.append(_range_row(path, "weight", quantizer.amax, 1))
    return rows


def _range_row(name: str, kind: str, amax: Tensor, tensors: int) -> dict[str, Any]:
    """One row of `tensor_ranges`."""
    largest = float(amax.max())
    return {
        "name": name,
        "kind": kind,
        "amax": largest,
        "min": float(amax.min()),
        "max": largest,
        "channels": amax.numel(),
        "tensors": tensors,
    }


def _percentile(histograms: list[Histogram], top: Tensor, percentile: float) -> Tensor:
    """Amax of each histogram, float64 `[histograms]`: the largest percentile over its tensors."""
    owners = []  # of each row of `counts`, the index of its histogram
    for index, histogram in enumerate(histograms):
        owners += [index] * len(histogram.counts)
    owner = torch.tensor(owners, device=top.device)
    counts = torch.cat([histogram.counts for histogram in histograms])
    share = counts.cumsum(1) / counts.sum(1, keepdim=True)
    first = (share < percentile / 100 - 1e-12).sum(1)  # the first bin that reaches the share
    edges = (first + 1) * top[owner] / BINS
    return torch.zeros_like(top).scatter_reduce(0, owner, edges, "amax")


def _mse(histograms: list[Histogram], top: Tensor, largest: Tensor) -> Tensor:
    """Amax of each histogram, float64 `[histograms]`: the candidate with the smallest mean squared error."""
    weights = []  # each tensor counts alike, however many values it has
    for histogram in histograms:
        totals = histogram.counts.sum(1, keepdim=True)
        weights.append((histogram.counts / totals).sum(0))
    counts = torch.stack(weights)
    bins = torch.arange(BINS, device=counts.device, dtype=counts.dtype)
    centers = (bins + 0.5) * (top / BINS)[:, None]
    fractions = torch.linspace(SMALLEST_FRACTION, 1, CANDIDATES, dtype=largest.dtype, device=largest.device)
    candidates = largest.clamp(min=1e-30)[:, None] * fractions
    errors = []
    for amax in candidates.unbind(1):
        scale = (amax / INT8.max)[:, None]
        rounded = (centers / scale).round().clamp(max=INT8.max) * scale
        errors.append(((rounded - centers).square() * counts).sum(1))
    best = torch.stack(errors, 1).argmin(1, keepdim=True)
    return candidates.gather(1, best).squeeze(1)
