"""Model descriptions: what upstream would evaluate is a listed text, everything else a number; all else is refused."""

from typing import Any

import pytest
import yaml

from utils.core.errors import InputError
from utils.upstream.description import check_description

GOOD: dict[str, Any] = {
    "nc": 80,
    "depth_multiple": 1.0,
    "width_multiple": 1,
    "anchors": [[10, 13, 16, 30], [30, 61, 62, 45]],
    "activation": "nn.ReLU()",
    "backbone": [[-1, 1, "Conv", [64, 3, 2]], [0, 1, "CBLinear", [[64, 8]]]],
    "head": [[-1, 1, "nn.Upsample", ["None", 2, "nearest"]], [[-1, 1], 1, "DDetect", ["nc"]]],
}
CODE = "__import__('os').system('touch mark')"


def layer(*row: Any) -> dict[str, Any]:
    return {"backbone": [list(row)]}


REFUSED: list[tuple[dict[str, Any], str]] = [  # changes of the good one, what the message names
    *[({key: CODE}, key) for key in (*GOOD, "ch", "sem_nc", "inplace")],
    *[({"nc": value}, "nc") for value in (b"bytes", 10**30, float("nan"), {"a": 1}, print)],
    *[({"activation": text}, "activation") for text in (
        "nn.ReLU", "nn.ReLU()()", "nn.ReLU();exit()", " nn.ReLU()", f"nn.ReLU({CODE})", 1)],
    *[(layer(-1, 1, name, []), "layer 0") for name in (
        "os.system", "print", "conv", "nn.Module", "torch.load", "AutoShape", "Conv.forward", "Conv ", "Conv\n", CODE,
        "", b"Conv", ["Conv"])],
    *[(layer(-1, 1, "Concat", [text]), "layer 0") for text in (
        "os", "nn", "self", "d", "exit()", "nc ", "NC", "nearest\n", "__file__", [64, [3, [CODE]]], print)],
    (layer(CODE, 1, "Conv", []), "layer 0"), (layer(-1, CODE, "Conv", []), "layer 0"),
    (layer(-1, 1, "Conv"), "layer 0"),
    # `!!binary` becomes bytes, `!!python/...` is not known to the safe loader
    (yaml.safe_load(yaml.safe_dump(GOOD).replace("Conv", "!!binary b3Muc3lzdGVt", 1)), "b'os.system'"),
]  # fmt: skip


def test_the_good_one_passes_and_only_what_upstream_reads_is_kept():
    assert check_description(GOOD) == GOOD
    extra = {"ch": 3, "inplace": True, "sem_nc": 93}
    assert check_description({**GOOD, **extra, "yaml_file": "x", "scale": b"x", 5: print}) == {**GOOD, **extra}


@pytest.mark.parametrize(("changes", "named"), REFUSED)
def test_what_upstream_would_evaluate_is_refused_unless_it_is_listed(changes, named):
    with pytest.raises(InputError) as caught:
        check_description({**GOOD, **changes})
    assert named in str(caught.value)
    assert str(caught.value).isprintable()
