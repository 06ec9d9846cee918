"""Model descriptions: what upstream would evaluate is a listed text, everything else a number; all else is refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from utils import upstream_description
from utils.core.errors import InputError

GOOD: dict[str, Any] = {
    "nc": 80,
    "depth_multiple": 1.0,
    "width_multiple": 1,
    "anchors": [[10, 13, 16, 30], [30, 61, 62, 45]],
    "activation": "nn.ReLU()",
    "backbone": [[-1, 1, "Conv", [64, 3, 2]], [0, 1, "CBLinear", [[64, 8]]]],
    "head": [[-1, 1, "nn.Upsample", ["None", 2, "nearest"]], [[-1, 1], 1, "DDetect", ["nc"]]],
}
RECURSIVE: list = []
RECURSIVE.append(RECURSIVE)
CODE = "__import__('os').system('touch mark')"
WRONG = [CODE, b"bytes", 10**5000, float("nan"), float("inf"), {"a": 1}, {1}, RECURSIVE, object(), print, 1j]


def refused(**changes: Any) -> str:
    with pytest.raises(InputError) as caught:
        upstream_description.check({**GOOD, **changes})
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 900
    return message


def test_the_good_one_passes_and_only_what_upstream_reads_is_kept():
    assert upstream_description.check(GOOD) == GOOD
    extra = {"ch": 3, "inplace": True, "sem_nc": 93}
    assert upstream_description.check({**GOOD, **extra, "yaml_file": "x", "scale": b"x", 5: print}) == {**GOOD, **extra}


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
def test_no_place_takes_anything_else(value):
    for key in (*GOOD, "ch", "sem_nc", "inplace"):
        assert key in refused(**{key: value}) or key in ("backbone", "head")
    for place in range(4):
        row: list[Any] = [-1, 1, "Conv", [64, 3, 2]]
        row[place] = value
        assert "layer 0" in refused(backbone=[row])
    for arguments in ([value], [64, value], [[value]], [64, [3, [value]]]):
        assert "layer 0" in refused(backbone=[[-1, 1, "Conv", arguments]])
    for rows in (value, [value], [[]], [[-1, 1, "Conv"]]):
        refused(head=rows)


@pytest.mark.parametrize(
    "name",
    ["os.system", "sys.exit", "print", "eval", "conv", "nn.Module", "torch.load", "DetectMultiBackend", "AutoShape",
     "Classify", "DetectionModel", "Conv.forward", "Conv ", "Conv\n", CODE, "", "Path", "nn.Linear", b"Conv", ["Conv"]],
    ids=str,
)  # fmt: skip
def test_modules_by_exact_name_only(name):
    assert "layer 0" in refused(backbone=[[-1, 1, name, []]])


@pytest.mark.parametrize("text", ["os", "nn", "self", "d", "exit()", "nc ", "NC", "nearest\n", "__file__", "nn.SiLU()"])
def test_few_words_are_arguments(text):
    assert "layer 0" in refused(backbone=[[-1, 1, "Concat", [text]]])


@pytest.mark.parametrize("text", ["nn.ReLU", "nn.ReLU()()", "nn.ReLU();exit()", " nn.ReLU()", f"nn.ReLU({CODE})", 1])
def test_activations_by_exact_text_only(text):
    assert "activation" in refused(activation=text)


def test_yaml_that_is_code_is_bytes_or_an_error():
    """`!!binary` becomes bytes, `!!python/...` is not known to the safe loader."""
    text = yaml.safe_dump(GOOD).replace("Conv", "!!binary b3Muc3lzdGVt", 1)
    assert "is b'os.system'" in refused(**yaml.safe_load(text))


def test_the_lists_are_plain():
    """None of their texts computes anything but a class, a torch.nn module or a number of the description."""
    assert all(name.removeprefix("nn.").isidentifier() for name in upstream_description.MODULES)
    assert all(text.startswith("nn.") and text.count("(") == 1 for text in upstream_description.ACTIVATIONS)
    assert set(upstream_description.WORDS) == {"nc", "anchors", "None", "nearest"}
