"""What the quantized network (the student) is compared with the float one (the teacher) by.

The task loss compares what detection is made of: the head's raw maps, each anchor weighted by the score that the
teacher gives it. It is distillation of class probabilities and box distributions (Hinton et al., "Distilling the
Knowledge in a Neural Network", 2015; Zheng et al., "Localization Distillation for Dense Object Detection", CVPR 2022),
without labels. A segmentation head also has the coefficients and prototypes that masks are made of (Bolya et al.,
"YOLACT: Real-time Instance Segmentation", ICCV 2019).

The layer loss compares the results of top-level layers, as yolov9-qat does; it weighs background as much as objects.

A tap takes the result of a layer before the student's own quantizer rounds it: behind it, the rounding itself would be
part of the loss, and its straight-through gradient would pull values towards the borders between quantized values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.quantize.placement import point_of
from utils.core.tasks import trained

SMALLEST_VARIANCE = 1e-8  # a layer whose output is constant must not divide by zero
SMALLEST_WEIGHT = 1.0  # of a batch in which the teacher sees nothing: about one certain object
SMALLEST_SHARE = 1e-12  # of an image in which it sees nothing


def top_layers(model: nn.Module) -> nn.Sequential:
    """The sequence of top-level layers of an upstream model (`model.model`)."""
    layers = getattr(model, "model", None)
    if not isinstance(layers, nn.Sequential) or len(layers) < 2:
        raise TypeError(f"expected a model with two or more layers in .model, got {type(model).__name__}")
    return layers


def supervised_layers(count: int, stride: int) -> list[int]:
    """Indices of the layers that the layer loss compares, for a model of `count` top-level layers, the head included.

    Every `stride`-th layer, the last one before the head, and the head itself, whose raw maps are what AP depends on.

    >>> supervised_layers(6, 3)
    [0, 3, 4, 5]
    """
    if stride < 1:
        raise ValueError(f"supervision stride must be 1 or more, got {stride}")
    return sorted({*range(0, count - 1, stride), count - 2, count - 1})


def task_terms(student: Any, teacher: Any, classes: int, *, by_image: bool = False) -> tuple[Tensor, Tensor]:
    """Distance of the student's head from the teacher's, and what it is relative to; two float32 scalars.

    The distance is the sum over anchors of the Kullback-Leibler divergences of the class probabilities (each class a
    Bernoulli variable) and, weighted by the teacher's best probability at that anchor, of the four distributions of the
    distances to the box's sides; and of a segmentation head `mask_distance`. The weight is the sum of those best
    probabilities. Levels are taken together, so that one without objects weighs nothing.

    Args:
        student, teacher: what the head returns while training: for each level the raw map
            `[B, 4 * bins + classes, H, W]`, logits of the distances, then of the classes; with masks a tuple of these,
            the coefficients and the prototypes.
        by_image: give both of each image, `[B]`, whose sums are those of the batch.
    """

    def total(values: Tensor) -> Tensor:
        return values.reshape(len(values), -1).sum(1) if by_image else values.sum()

    (our_maps, our_masks), (their_maps, their_masks) = trained(student), trained(teacher)
    ours, theirs = (torch.cat([one.flatten(2) for one in maps], 2).float() for maps in (our_maps, their_maps))
    sides = ours.shape[1] - classes
    our_logits, their_logits = ours[:, sides:], theirs[:, sides:]
    probability = their_logits.sigmoid()
    cross, entropy = (
        functional.binary_cross_entropy_with_logits(logits, probability, reduction="none")
        for logits in (our_logits, their_logits)
    )
    distance = total(cross - entropy)  # not of sums: they are large, and nearly equal
    best = probability.amax(1)  # [B, anchors]
    our_bins, their_bins = (one[:, :sides].unflatten(1, (4, -1)).log_softmax(2) for one in (ours, theirs))
    boxes = (their_bins.exp() * (their_bins - our_bins)).sum((1, 2))
    distance = distance + total(best * boxes)
    if their_masks:
        distance = distance + total(mask_distance(our_masks, their_masks, best))
    return distance, total(best)


def mask_distance(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...], best: Tensor) -> Tensor:
    """Distance of the student's masks from the teacher's, without computing one; float32 `[B]`.

    The logits of an anchor's mask are its coefficients c times the image's prototypes P. With d for a difference from
    the teacher's, those of the student's are off by dc P + c dP; the mean square of that over all pixels is a quadratic
    form in (dc, c), whose matrix holds the mean products of (P, dP). In each image these errors, where anchors are
    weighted by `best` as their boxes are, are taken relative to the variance of the teacher's logits, weighted alike.
    The ratio counts as often as the teacher sees objects: by the sum of the weights. Nothing depends on other images,
    so that parts of a batch add up.

    Args:
        student, teacher: coefficients `[B, masks, anchors]` and prototypes `[B, masks, h, w]`.
        best: the weight of each anchor, in 0..1, `[B, anchors]`.
    """
    (ours, our_prototypes), (theirs, prototypes) = (
        (one.float(), maps.float().flatten(2)) for one, maps in (student, teacher)
    )
    differences = torch.cat((our_prototypes, our_prototypes - prototypes), 1)
    errors = _mean_squares(torch.cat((ours - theirs, theirs), 1), differences)
    variances = _mean_squares(theirs, prototypes - prototypes.mean(2, keepdim=True))
    objects = best.sum(1)  # [B]
    share = best / objects.clamp(min=SMALLEST_SHARE)[:, None]
    ratios = (share * errors).sum(1) / (share * variances).sum(1).clamp(min=SMALLEST_VARIANCE)
    return objects * ratios


def _mean_squares(factors: Tensor, maps: Tensor) -> Tensor:
    """Mean squares over pixels of products of `[B, n, anchors]` and `[B, n, pixels]`, `[B, anchors]`."""
    products = maps @ maps.transpose(1, 2) / maps.shape[2]
    return (factors * (products @ factors)).sum(1)


def layer_loss(student: Sequence[Sequence[Tensor]], teacher: Sequence[Sequence[Tensor]]) -> Tensor:
    """Sum over tensors of the mean squared error relative to the variance of the teacher's tensor, a float32 scalar.

    The error is relative, because plain errors let the layer with the largest values decide alone: with them, one image
    with one clipped outlier was seen to weigh more than the rest of an epoch. It is computed in float32 also under AMP,
    where squares of small half-precision differences would vanish.
    """
    total = torch.zeros((), device=student[0][0].device)
    for ours, theirs in zip(student, teacher, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            target = b.float()
            spread = target.var(correction=0).clamp(min=SMALLEST_VARIANCE)
            total = total + functional.mse_loss(a.float(), target) / spread
    return total


@contextlib.contextmanager
def raw_head(model: nn.Module) -> Iterator[None]:
    """Everything in eval mode, except that the head itself returns what training reads; eval mode again afterwards."""
    model.eval()
    head = top_layers(model)[-1]
    head.training = True  # not .train(): that would also reach the head's children
    try:
        yield
    finally:
        model.eval()


class LayerTaps:
    """Context manager that collects the results of chosen top-level layers during a forward, before they are rounded.

    Tensors are held only between a forward and `take`, and leaving the context removes hooks and tensors.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int]) -> None:
        self._modules = [top_layers(model)[i] for i in layers]
        plan = getattr(model, "quantization_plan", None)
        tensors = {} if plan is None else {tensor.name: tensor for tensor in plan.tensors if tensor.owner}
        results = [None if plan is None else tensors.get(plan.results[i]) for i in layers]
        self._points = [None if tensor is None else point_of(model, tensor) for tensor in results]
        self._outputs: list[Any] = [None] * len(layers)
        self._handles: list[Any] = []

    def __enter__(self) -> LayerTaps:
        for slot, (module, point) in enumerate(zip(self._modules, self._points, strict=True)):
            if point is not None:
                point.keep = True
            self._handles.append(module.register_forward_hook(self._hook(slot)))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        for point in filter(None, self._points):
            point.keep, point.kept = False, None
        self._handles.clear()
        self._outputs = [None] * len(self._modules)

    def _hook(self, slot: int) -> Any:
        point = self._points[slot]

        def collect(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._outputs[slot] = output if point is None else point.kept
            if point is not None:
                point.kept = None

        return collect

    def take(self) -> list[list[Tensor]]:
        """The tensors of each tapped layer in the last forward, which are then forgotten."""
        taken, self._outputs = self._outputs, [None] * len(self._modules)
        return [list(tensors_of(output)) for output in taken]


def tensors_of(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors in a layer's output: a tensor, or lists and tuples of them (CBLinear, the head)."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from tensors_of(item)


def placeholder(images: Tensor) -> tuple[Tensor, bool]:
    """The images, or a black one in the place of none, and whether they count."""
    if len(images):
        return images, True
    return images.new_zeros((1, *images.shape[1:])), False
