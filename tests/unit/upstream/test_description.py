"""Model descriptions: activations that compute the same as an allowed one are taken, and no text is evaluated."""

import pytest
import torch
from torch import nn

from utils.core.errors import InputError
from utils.upstream.description import ACTIVATIONS, check_description

BARE = {"nc": 1, "depth_multiple": 1.0, "width_multiple": 1.0, "anchors": 3, "backbone": [], "head": []}
SAME = (
    "nn.ReLU(True)", "nn.ReLU(False)", "nn.ReLU(inplace=False)", "nn.LeakyReLU(0.01)", "nn.LeakyReLU(1e-2, True)",
    "nn.LeakyReLU(negative_slope=.1)", "nn.LeakyReLU(0.1, True)", "nn.SiLU() ", "\tnn.SiLU( )", "torch.nn.ReLU()",
    "torch.nn.SiLU(inplace = True)", "nn.ELU(1.0)", "nn.ELU(alpha=1.0)", "nn.GELU('none')", "nn.Mish(True)",
)  # fmt: skip
OTHERS = (
    "nn.LeakyReLU(0.2)", "nn.GELU('tanh')", "nn.ELU(2)", "nn.PReLU()", "nn.ReLU", "nn.ReLU(1, 2)", "nn.ReLU(*[True])",
    "nn.ReLU(**{})", "nn.ReLU(slope=1)", "os.nn.ReLU()", "nn.ReLU().forward()", "nn.ReLU(__import__('os').abort())",
    "nn.ReLU(inplace=exit())", "exit()", "(lambda: nn.ReLU())()", "nn.ReLU();exit()", "\0", "(" * 90, "x" * 1000, 5, [],
    0, False, b"nn.ReLU()",
)  # fmt: skip


@pytest.mark.parametrize("text", [*sorted(ACTIVATIONS), *SAME])
def test_an_activation_that_computes_the_same_is_taken(text):
    taken = check_description({**BARE, "activation": text})["activation"]
    assert taken in ACTIVATIONS
    written, known = (eval(one.strip(), {"nn": nn, "torch": torch}) for one in (text, taken))
    x = torch.linspace(-4, 4, 99)
    assert (type(written), repr(written)) == (type(known), repr(known))
    assert torch.equal(written(x.clone()), known(x.clone()))


@pytest.mark.parametrize("text", OTHERS)
def test_others_are_refused_with_the_list(text):
    with pytest.raises(InputError, match=r"activation of the model description .* expected one of .*nn\.SiLU\(\)"):
        check_description({**BARE, "activation": text})


@pytest.mark.parametrize("text", [None, ""])
def test_no_activation_stays_none(text):
    assert check_description({**BARE, "activation": text})["activation"] == text
