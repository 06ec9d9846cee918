"""Does a recipe fit a network? Asked of its placement, before anything is computed with it.

That each pattern of `float` names a convolution is `placement.plan`'s to check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from utils.core.errors import RecipeError
from utils.core.shown import shown

if TYPE_CHECKING:
    from models.quantize.placement import Plan
    from models.quantize.recipe import Recipe


def check(plan: Plan, recipe: Recipe) -> None:
    """Refuse a recipe that quantizes nothing.

    Raises:
        RecipeError: see above; the message names the recipe's key.
    """
    if len(plan.float_convolutions) == len(plan.convolutions):
        causes = [f"the recipe's float is {shown(list(recipe.float))}"] if recipe.float else []
        if recipe.head != "int8":
            causes.append(f"the recipe's head is {recipe.head}")
        raise RecipeError(
            f"{' and '.join(causes) or 'the network has no convolution that can be quantized'}: all "
            f"{len(plan.convolutions)} convolutions would stay in float; leave at least one to INT8"
        )
