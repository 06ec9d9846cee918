"""Does a recipe fit a network? Asked of its placement, before anything is computed with it.

That each pattern of `float` names a convolution is `placement.plan`'s to check.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from utils.core.errors import RecipeError
from utils.core.shown import shown

if TYPE_CHECKING:
    from models.quantize.placement import Plan
    from models.quantize.recipe import Recipe


def check(plan: Plan, recipe: Recipe) -> None:
    """Refuse a recipe that quantizes nothing, or that names a scale which the network has not.

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
    for name in recipe.calibration.scales:
        if name not in plan.scale_names:
            near = difflib.get_close_matches(name, plan.scale_names, 3, cutoff=0)
            raise RecipeError(
                f"the recipe's calibration.scales holds {shown(name)}, which is no scale of this network with this "
                f"recipe; it may hold names of scales: the nearest are {', '.join(near)}"
            )
