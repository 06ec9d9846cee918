"""What a network's head returns, as the tensors that matter: upstream's heads nest them by task and mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def predicted(result: Any) -> tuple[Tensor, ...]:
    """The tensors that a file of the network has as outputs.

    Args:
        result: of a network in evaluation mode, whether its head's `export` is set or not.

    Returns:
        The predictions, `[B, 4 + classes, anchors]`. Of a segmentation network, these with the coefficients of masks
        as further rows, and the prototypes, `[B, coefficients, h, w]`.
    """
    if not isinstance(result, (tuple, list)):
        return (result,)
    first, *rest = result
    while isinstance(first, (tuple, list)):
        first = first[0]
    second = rest[0] if rest else None
    if isinstance(second, tuple):  # beside predictions: raw maps, coefficients, prototypes
        return first, second[2]
    return (first,) if second is None or isinstance(second, list) else (first, second)


def trained(result: Any) -> tuple[Sequence[Tensor], tuple[Tensor, ...]]:
    """What the head returns while training, as training sees it.

    Returns:
        For each level the raw map `[B, 4 * bins + classes, H, W]`; and of a segmentation network the coefficients
        `[B, coefficients, anchors]` and the prototypes `[B, coefficients, h, w]`, of a detector nothing.
    """
    if isinstance(result, tuple) and not hasattr(result[0], "shape"):
        maps, *masks = result
        return maps, tuple(masks)
    return result, ()
