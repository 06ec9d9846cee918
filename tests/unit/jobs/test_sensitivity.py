"""States of a network against networks placed anew; units, their costs, and the choice of them."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from report_examples import example_row, resampled
from small_networks import AConv, ADown, Concat, Conv, Network, RepNBottleneck, Unknown, chain
from torch import nn

from models.quantize import calibration, placement
from models.quantize.recipe import Recipe
from utils.jobs.inputs import read_profile
from utils.jobs.options import SensitiveOptions
from utils.jobs.sensitivity.search import Search, choose_units
from utils.jobs.sensitivity.units import State, Switches, Units, cost_of, cost_shares, unit_kinds

X = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))


def branches() -> Network:
    """Two branches of one tensor that meet again, a bottleneck without shortcut, and a block that no rule describes."""
    torch.manual_seed(1)
    return Network([
        (-1, Conv(3, 8, 3, 2)), (-1, RepNBottleneck(8, add=False)), (0, Conv(8, 8)), ([-1, 1], Concat()),
        (-1, ADown(16, 8)), (-1, Unknown(8)), (-1, Conv(8, 8)), (-1, nn.Conv2d(8, 4, 1)),
    ]).eval()  # fmt: skip


def pooled() -> Network:
    """A pool reads the image."""
    torch.manual_seed(2)
    layers = AConv(3, 8), nn.MaxPool2d(2), Conv(8, 8), RepNBottleneck(8), Conv(8, 8), nn.Conv2d(8, 4, 1)
    return Network([(-1, layer) for layer in layers]).eval()


NETWORKS = {"chain": chain, "branches": branches, "pooled": pooled}


def placed(network: nn.Module, recipe: Recipe, amax: dict[str, torch.Tensor]) -> nn.Module:
    """A copy with quantizers as `recipe` says, whose scales have the ranges that their tensors have in `amax`."""
    model = copy.deepcopy(network)
    plan = placement.plan(model, recipe)
    placement.apply(model, plan)
    for tensor in plan.tensors:
        model.activation_quantizers[placement.scale_key(tensor.scale)].set_amax(amax[tensor.name])
    for path in plan.fallback:
        name = f"{path}.input"
        model.activation_quantizers[placement.scale_key(name)].set_amax(amax[name])
    return model


@pytest.fixture(params=NETWORKS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, dict[str, torch.Tensor]]:
    """A float network, the same placed and calibrated, and the range of every tensor."""
    network = NETWORKS[request.param]()
    model = copy.deepcopy(network)
    plan = placement.plan(model, Recipe())
    placement.apply(model, plan)
    calibration.calibrate(model, [X], Recipe().replace(calibration_method="max").calibration)
    scales = model.activation_quantizers
    amax = {tensor.name: scales[placement.scale_key(tensor.scale)].amax for tensor in plan.tensors}
    amax |= {f"{path}.input": scales[placement.scale_key(f"{path}.input")].amax for path in plan.fallback}
    return network, model, amax


class TestStates:
    @pytest.mark.parametrize("granularity", ["layer", "module"])
    def test_every_state_is_the_network_that_a_recipe_places(self, case, granularity, monkeypatch):
        network, model, amax = case
        units = Units(network, model.quantization_plan, Recipe(), granularity)
        assert len(units.all) > 4
        monkeypatch.setattr("utils.jobs.sensitivity.units.predicted", lambda result: (result,))
        switches, seen = Switches(model), set()
        with torch.inference_mode():
            assert torch.equal(switches.predict(X, State()).raw, network(X))
            for unit in units.all:
                rest = [other for other in units.all if other is not unit]
                for recipe, state in (
                    (Recipe(float=unit.patterns), unit.in_float),
                    (Recipe(float=tuple(path for one in rest for path in one.patterns)),
                     units.in_float(path for one in rest for path in one.convolutions)),
                ):  # fmt: skip
                    expected = placed(network, recipe, amax)(X)
                    assert torch.equal(switches.predict(X, state).raw, expected), (unit.name, recipe.float)
                    seen.add(round(float(expected.double().sum()), 9))
        assert len(seen) > len(units.all)  # the states differ, so the comparison can fail


class TestUnits:
    def test_sets_free_a_scale_that_no_unit_frees_alone(self):
        network = branches()
        plan = placement.plan(network, Recipe())
        units = Units(network, plan, Recipe(), "layer")
        sets = {unit.name: unit for unit in units.shared()}
        found = sets["readers of model.0"]
        assert set(found.convolutions) == {"model.1.cv1.conv", "model.2.conv"}
        assert found.patterns == ("model.1.cv1", "model.2")
        assert "model.0" not in found.in_float.tensors
        assert all("model.0" in unit.in_float.tensors for unit in units.all)

    def test_what_the_recipe_keeps_in_float_is_no_unit(self):
        network, recipe = branches(), Recipe(float=("model.1", "model.5"))
        units = Units(network, placement.plan(network, recipe), recipe, "layer")
        assert [unit.name for unit in units.all] == ["model.0", "model.2", "model.4", "model.6", "model.7"]


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (None, {"model.0": 16 * 16 * 8 * 3 * 9, "model.6": 16 * 16 * 8 * 4, "model.1.cv2": 8 * 8 * 4 * 4}),
        (
            [("/model.4/cv1/conv/Conv + PWN(/model.4/cv1/act/Sigmoid)", 2.0),
             ("/model.4/cv2/cv2.0/m/m.0/cv1/conv/Conv", 1.0),
             ("model.14.cv1.conv + model.4.cv4.conv", 2.0),
             ("Reformatting CopyNode for Input Tensor 0", 5.0)],
            {"model.4": 4, "model.14": 1, "model.4.cv2.0.m.0.cv1": 1, "model.1": 0},
        ),
        (  # modules of a fused kernel count alike, however often it names them
            [("model.4.cv1.conv.weight + model.4.cv1.conv.weight/QuantizeLinear + /model.4/cv1/conv/Conv + "
              "PWN(/model.4/cv1/act/Sigmoid, /model.4/cv1/act/Mul) + /model.5/cv1/conv/Conv + "
              "/model.22/cv2.0/cv2.0.2/Conv", 3.0)],
            {"model.4": 1, "model.5.cv1": 1, "model.22.cv2.0.2": 1},
        ),
    ],
    ids=["multiply-adds", "engine", "fused"],
)  # fmt: skip
def test_costs_are_shares_of_multiply_adds_or_of_an_engines_time(profile, expected):
    shares = cost_shares(chain(), X[:1], profile)
    total = sum(ms for _, ms in profile) if profile else 180_224
    found = {name: cost_of([name], shares) * total for name in expected}
    assert found == pytest.approx(expected)
    names = list(expected)[:2]
    assert cost_of([*names, f"{names[0]}.cv1"], shares) * total == pytest.approx(sum(expected[name] for name in names))


SETTINGS = {"reference": 0.7, "start": 0.6, "target_drop": 0.002, "budget": 0.5}  # AP in float and in INT8


def choice(units: dict[str, tuple[float, float]], calls: list | None = None, **settings):
    """What is chosen of units whose gains and costs (in that order) add up."""

    def evaluate(names: tuple[str, ...]) -> float:
        if calls is not None:
            calls.append(names)
        return min(0.6 + sum(units[name][0] for name in names), 0.7)

    gains = {name: gain for name, (gain, _) in units.items()}
    asked = {"evaluate": evaluate, "cost_of": lambda names: sum(units[name][1] for name in names), **SETTINGS}
    return choose_units(gains, **asked | settings)


class TestChoice:
    def test_gain_per_cost_decides_until_the_target_is_reached(self):
        units = {"dear": (0.06, 0.4), "cheap": (0.05, 0.1), "cheaper": (0.049, 0.05), "none": (-0.01, 0.001)}
        calls: list = []
        found = choice(units, calls)
        assert found.names == ("cheaper", "cheap")
        assert (found.ap, found.cost) == (pytest.approx(0.699), pytest.approx(0.15))
        assert "within 0.002" in found.why
        assert calls == [("cheaper", "cheap")]  # one unit alone is known

    @pytest.mark.parametrize(
        ("units", "settings", "names", "why"),
        [
            ({"small": (0.01, 0.002), "large": (0.1, 0.1)}, {}, ("large",), "within"),  # the target needs no other
            ({"a": (0.05, 0.3), "b": (0.05, 0.4)}, {}, ("a",), "exceed --float-budget"),
            ({"a": (0.05, 0.3), "b": (0.0499, 0.4)}, {"cost_of": lambda names: 0.45}, ("a", "b"), ""),  # in common
            ({"a": (0.05, 0.1), "b": (0.04, 0.1)}, {"evaluate": lambda names: 0.64}, ("a",), "no further unit"),
            ({"a": (0.05, 0.1)}, {"start": 0.699}, (), ""),  # nothing is lost
        ],
    )
    def test_what_is_left_out_and_why(self, units, settings, names, why):
        found = choice(units, **settings)
        assert found.names == names
        assert why in found.why


@pytest.mark.parametrize("spread", [0.01, 0.6])
def test_a_search_with_any_budget_leaves_something_in_int8_and_chooses_nothing_where_nothing_is_lost(spread):
    units = Units(chain(), placement.plan(chain(), Recipe()), Recipe(), "layer")

    def measure(name, state):  # each convolution in INT8 costs the same
        ap = 0.7 - 0.6 * len(state.weights) / len(units.everything.weights)
        return example_row(name, ap=ap, ap_resampled=resampled(ap, ap + spread * (name == "INT8")))

    screened = {unit.name: {"images": 1, "score": 0.5, "share": 0.5} for unit in units.all}
    passes = SimpleNamespace(state=SimpleNamespace(screened=screened), screen=lambda units: None, measure=measure)
    options = SensitiveOptions(float_budget=1.0, target_drop=0.0)
    found = Search(options, units, passes, cost_shares(chain(), X[:1], None)).run()
    lossless = spread > 0.5
    assert len(found.names) == (0 if lossless else len(units.all) - 1)
    assert found.ap == pytest.approx(0.1) if lossless else 0.4 < found.ap < 0.7


def test_a_list_of_layers_is_read(tmp_path):
    rows, path = [{"name": "a", "ms": 1.5}, {"name": "b", "ms": None}], tmp_path / "profile.json"
    for content in (rows, {"layers": rows}):
        path.write_text(json.dumps(content))
        assert read_profile(path) == [("a", 1.5)]


def test_a_unit_has_its_class_and_its_stride():
    network = branches()
    kinds = unit_kinds(network, ["model.0", "model.4", "model.4.cv1", "readers of x"], torch.zeros(1, 3, 32, 32))
    assert kinds == {"model.0": "Conv /2", "model.4": "ADown /4", "model.4.cv1": "Conv /4"}
    assert not network.model[0]._forward_hooks


def test_a_head_has_the_first_and_the_last_of_its_strides():
    class Head(nn.Module):
        def forward(self, x):
            return torch.zeros(1, 84, 10), [x, x[..., ::2, ::2], x[..., ::4, ::4]]

    assert unit_kinds(nn.Sequential(Head()), ["0"], torch.zeros(1, 3, 32, 32)) == {"0": "Head /1-4"}
