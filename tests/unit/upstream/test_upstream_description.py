"""Model descriptions: what upstream would evaluate is a listed name or a small number; all else is refused."""

from __future__ import annotations

import copy

import pytest
import yaml

from utils import upstream_description
from utils.core.errors import InputError
from utils.untrusted.allowed_names import ACTIVATIONS, LAYERS, WORDS

GOOD = {
    "nc": 80,
    "depth_multiple": 1.0,
    "width_multiple": 1,
    "anchors": 3,
    "activation": "nn.ReLU()",
    "backbone": [
        [-1, 1, "Conv", [64, 3, 2]],
        [-1, 1, "RepNCSPELAN4", [256, 128, 64, 1]],
        [0, 1, "CBLinear", [[64, 8]]],
    ],
    "head": [[-1, 1, "nn.Upsample", ["None", 2, "nearest"]], [[-1, 1], 1, "Concat", [1]], [[1], 1, "DDetect", ["nc"]]],
}
RECURSIVE: list = []
RECURSIVE.append(RECURSIVE)
DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]
HUGE = 10**5000
WRONG = [None, "text", b"bytes", "__import__('os').system('x')", -1, 0, HUGE, -HUGE, float("nan"), float("inf"), True,
         1.5, [], {}, [1], {"a": 1}, {1}, RECURSIVE, DEEP, object(), print, lambda: 1, bytearray(b"x"), 1j]  # fmt: skip


def refused(**changes):
    with pytest.raises(InputError) as caught:
        upstream_description.check({**copy.copy(GOOD), **changes})
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 900
    return message


def test_the_good_one_passes_and_only_what_upstream_reads_is_kept():
    assert upstream_description.check(GOOD) == GOOD
    extra = {"ch": 3, "inplace": True, "sem_nc": 93}
    assert upstream_description.check({**GOOD, **extra, "yaml_file": "x", "scale": b"x", 5: print}) == {**GOOD, **extra}


@pytest.mark.parametrize("key", sorted(GOOD.keys() | {"ch", "sem_nc", "inplace"}))
@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
def test_every_key_takes_values_of_its_kind_only(key, value):
    allowed = {"activation": (None,), "depth_multiple": (1.5,), "width_multiple": (1.5,), "inplace": (True,)}
    if any(value is one or (type(value) is type(one) and value == one) for one in allowed.get(key, ())):
        upstream_description.check({**GOOD, key: value})
    elif not (key == "sem_nc" and type(value) is int and value == 0) and not (key == "head" and value == []):
        assert key in refused(**{key: value}) or key in ("backbone", "head")


@pytest.mark.parametrize(
    "value", [one for one in WRONG if type(one) is not list or one], ids=lambda v: type(v).__name__
)
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_every_place_of_a_layer(place, value):
    row = [-1, 1, "Conv", [64, 3, 2]]
    row[place] = value
    if place == 0 and value == -1 and type(value) is int:
        return
    if place == 3 and value == [1]:
        return
    assert "layer 0" in refused(backbone=[row])
    assert "layer" in refused(backbone=[row[:place]])
    assert "layer" in refused(backbone=[value])


@pytest.mark.parametrize(
    "name",
    ["os.system", "os.remove", "os.abort", "sys.exit", "exit", "print", "eval", "exec", "open", "input", "conv",
     "nn.Module", "nn.modules.os.system", "torch.load", "torch.hub.load", "DetectMultiBackend", "AutoShape", "Classify",
     "DetectionModel", "Model", "attempt_load", "Conv.forward", "Conv ", "Conv\n", "__import__('os').system", "",
     "Path", "requests.get", "parse_model", "LOGGER.info", "nn.Linear", "Ensemble", "End2End", b"Conv"],
)  # fmt: skip
def test_modules_by_exact_name_only(name):
    assert "layer 0" in refused(backbone=[[-1, 1, name, []]])
    refused(backbone=[[-1, 1, name, [b"touch mark"]]])


@pytest.mark.parametrize(
    "argument",
    ["os", "nn", "self", "d", "ch", "exit()", "print", "Path", "nc ", "NC", "nearest\n", "__file__", "bilinear",
     "nn.SiLU()", b"nc", {"nc": 1}, {"nc"}, 65, -65, 1e9, float("nan"), HUGE, [["nc"]], ["nc"], [[[1]]], RECURSIVE,
     DEEP, [1] * 99, [65], object(), 1j],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_arguments_are_small_numbers_and_few_words(argument):
    assert "layer 0" in refused(backbone=[[-1, 1, "Concat", [argument]]])
    assert "layer 0" in refused(backbone=[[-1, 1, "Conv", [8, 1, argument]]])


@pytest.mark.parametrize(
    "text",
    ["nn.ReLU", "nn.ReLU()()", "nn.ReLU();exit()", "nn.ReLU( )", " nn.ReLU()", "nn.Module()", "nn.Linear(9,9)",
     "exit()", "nn.ReLU(__import__('os').system('x'))", "nn.Softmax(inplace=exit())", "nn.Conv2d(10000, 10000, 9)",
     1, b"nn.ReLU()"],
)  # fmt: skip
def test_activations_by_exact_text_only(text):
    assert "is not a torch.nn module" in refused(activation=text)


def test_counts_and_layers_are_bounded():
    conv = [-1, 1, "Conv", [64, 3, 1]]
    for rows in (
        [[-1, 100_000_000, "Conv", [64, 3, 2]]],
        [[-1, 1, "RepNCSPELAN4", [64, 64, 64, 10**8]]],
        [[-1, 1, "RepNCSPELAN4", [64, 64, 64, "nc"]]],
        [[-1, 1, "Conv", [10**8, 3, 2]]],
        [conv] * 301,
        [[-1, 60, "Conv", [64, 3, 1]]] * 20,
        [[-1, 8, "RepNCSPELAN4", [64, 64, 64, 60]]] * 3,
        [[1, 1, "Conv", [64]]],
        [conv, [-3, 1, "Conv", [64]]],
        [[[], 1, "Concat", [1]]],
    ):
        refused(backbone=rows)
    refused(width_multiple=10, backbone=[[-1, 1, "Conv", [8000, 3, 1]]])
    refused(depth_multiple=10, backbone=[[-1, 50, "Conv", [8, 3, 1]]] * 3)


@pytest.mark.parametrize(
    ("rows", "parameters", "message"),
    [
        ([[-1, 1, "Conv", [8, 3, 1]]], [10**9], "parameters"),
        ([[-1, 1, "Conv", [8, 3, 1]]] * 9, [10**7] * 9, "multiplications"),
        ([[-1, 1, "Conv", [8000, 1, 1]]] * 9, [10] * 9, "activations"),
        ([[-1, 1, "nn.Upsample", ["None", 4, "nearest"]]] * 9, [0] * 9, "activations"),
        ([[-1, 1, "nn.Upsample", [10**4, None, "nearest"]]], [0], "at most 4"),
        ([[-1, 1, "nn.Upsample", [None, 1e-300, "nearest"]]], [0], "at most 4"),
        ([[[-1] * 30, 1, "Concat", [1]]] * 300, [0] * 300, "activations"),
        ([[-1, 1, "SPP", [512, [63] * 8]]], [10], "multiplications"),
        ([[-1, 1, "Conv", [64, 1, 1]], *[[-1, 1, "nn.MaxPool2d", [63, 1, 31]]] * 40], [0] * 41, "multiplications"),
        ([[-1, 1, "nn.ZeroPad2d", [64]]] * 200, [0] * 200, "activations"),
        ([[-1, 1, "nn.ZeroPad2d", [[0, 64, 0, 64]]]] * 200, [0] * 200, "activations"),
        ([[-1, 60, "nn.ZeroPad2d", [64]]] * 3, [0] * 3, "activations"),
        ([[-1, 1, "Conv", [16, 1, 1, 64]]] * 200, [0] * 200, "activations"),
        ([[-1, 1, "Conv", [16, 1, 1, [64, 64]]]] * 200, [0] * 200, "activations"),
        ([[-1, 1, "CBLinear", [[8, 8], 1, 1, 64]]] * 200, [0] * 200, "activations"),
        ([[-1, 60, "Conv", [8, 2, 1]]] * 15, [0] * 15, "activations"),
        ([[-1, 1, "MP", [1]], [-1, 1, "SP", [64, 1]]] * 60, [0] * 120, "multiplications"),
        ([[-1, 60, "SP", [63, 1]]] * 2, [0] * 2, "multiplications"),
    ],
)
def test_networks_that_would_take_all_memory_or_time(rows, parameters, message):
    with pytest.raises(InputError, match=message):
        upstream_description.check_cost(parameters, {**GOOD, "backbone": rows, "head": []})


def test_padding_that_keeps_the_size_costs_nothing():
    rows = [[-1, 1, "Conv", [16, 3, 1, 1]], [-1, 1, "nn.MaxPool2d", [3, 1, 1]], [-1, 1, "nn.ZeroPad2d", [[0, 1, 0, 1]]]]
    upstream_description.check_cost([400, 0, 0] * 25, {**GOOD, "backbone": rows * 25, "head": []})


@pytest.mark.parametrize("word", ["nc", "anchors"])
@pytest.mark.parametrize("name", ["nn.ZeroPad2d", "Conv", "nn.MaxPool2d"])
def test_only_heads_have_the_number_of_classes_as_an_argument(name, word):
    """Ten thousand pixels of padding, if the network has as many classes."""
    assert "one of None, nearest" in refused(backbone=[[-1, 1, name, [word]]])


def test_yaml_that_is_code_is_bytes_or_an_error(tmp_path):
    """`!!binary` becomes bytes, `!!python/...` is not known to the safe loader."""
    text = yaml.safe_dump(GOOD).replace("Conv", "!!binary b3Muc3lzdGVt", 1)
    assert "names b'os.system' where" in refused(**yaml.safe_load(text))


def test_the_lists_are_small_and_plain():
    assert set(WORDS) == {"nc", "anchors", "None", "nearest"}
    assert all(text.startswith("nn.") and text.count("(") == 1 for text in ACTIVATIONS)
    assert all(name.removeprefix("nn.").isidentifier() for name in LAYERS)
