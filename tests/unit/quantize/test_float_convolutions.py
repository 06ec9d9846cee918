"""Which convolutions of small networks a recipe leaves in float: patterns, and the last ones of a head."""

from __future__ import annotations

import copy

import pytest
from small_networks import Conv, Network, chain, detector, segmenter, segmenter_with_own_input
from torch import nn

from models.quantize import placement
from models.quantize.recipe import Recipe
from utils.core.errors import RecipeError


def placed(network: Network, **recipe) -> tuple[Network, placement.Plan]:
    plan = placement.plan(network, Recipe(**recipe))
    placement.apply(network, plan)
    return network, plan


def test_layers_that_nothing_reads_stay_in_float():
    """A head that was cut down to one level: the layers in front of the other one are left out by the exporter."""
    network = detector()
    network.model[-1].f = [2, 2]
    _, plan = placed(network)
    why = plan.float_convolutions
    assert {path for path, text in why.items() if text == "nothing leads from it to the head"} == {
        path for path in plan.convolutions if path.split(".")[1] in "345"
    }
    assert why
    assert not [tensor.name for tensor in plan.tensors if tensor.name.split(".")[1:2] in (["3"], ["4"], ["5"])]


def test_head_options_keep_the_last_layer_or_its_plain_convolutions_in_float():
    for option in ("float", "last-conv-float"):  # the last layer of this one is a plain convolution
        _, plan = placed(chain(), head=option)
        assert plan.float_convolutions == {"model.6": f"the recipe's head: {option}"}
    assert placed(chain(), head="int8")[1].float_convolutions == {}
    network = Network([(-1, Conv(3, 4)), (-1, nn.Sequential(Conv(4, 4), nn.Conv2d(4, 4, 1)))])
    assert set(placed(copy.deepcopy(network), head="float")[1].float_convolutions) == {"model.1.0.conv", "model.1.1"}
    assert set(placed(copy.deepcopy(network), head="last-conv-float")[1].float_convolutions) == {"model.1.1"}


@pytest.mark.parametrize(("make", "index", "prototypes"), [
    (detector, 6, set()), (segmenter, 6, {"proto.cv3.conv"}), (segmenter_with_own_input, 8, {"proto.conv"}),
])  # fmt: skip
def test_the_last_convolutions_of_a_head_are_those_of_maps_coefficients_and_prototypes(make, index, prototypes):
    branches = ("cv2", "cv3", "cv4") if prototypes else ("cv2", "cv3")
    ends = {f"{branch}.{level}.1" for branch in branches for level in range(2)} | prototypes
    network, plan = placed(make(), head="last-conv-float")
    assert set(plan.float_convolutions) == {f"model.{index}.{end}" for end in ends}
    network, plan = placed(make())
    assert plan.float_convolutions == {}
    head = network.model[-1]
    for end in ends:  # what they compute is not rounded
        owner = head.get_submodule(end.removesuffix(".conv"))
        assert owner.output_point is None, end
    assert not any(tensor.name.startswith(f"model.{index}.{end.removesuffix('.conv')}") for tensor in plan.tensors
                   for end in ends)  # fmt: skip


@pytest.mark.parametrize("patterns", [("*",), ("model",), ("model.0", "model.[12].*", "model.5", "model.6")])
def test_a_recipe_that_leaves_nothing_in_int8_is_refused(patterns):
    network, recipe = chain(), Recipe(float=patterns)
    with pytest.raises(RecipeError, match=r"float is \['.*'\]: all 7 convolutions"):
        placement.check(placement.plan(network, recipe), recipe)


@pytest.mark.parametrize(("patterns", "cause"), [(("model.0",), "float is .* and the recipe's head"), ((), "head")])
def test_a_head_that_leaves_nothing_in_int8_is_refused(patterns, cause):
    layers = [(-1, Conv(3, 4))] if patterns else [(-1, nn.Upsample(None, 2, "nearest"))]
    network = Network([*layers, (-1, nn.Sequential(Conv(4 if patterns else 3, 4), nn.Conv2d(4, 4, 1)))])
    recipe = Recipe(float=patterns, head="float")
    with pytest.raises(RecipeError, match=f"the recipe's {cause} is float: all"):
        placement.check(placement.plan(network, recipe), recipe)
