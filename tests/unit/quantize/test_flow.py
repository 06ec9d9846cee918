"""The statements of rules.py: parsing, running, and that the table is well formed."""

import ast

import pytest
import torch
from torch import nn

from models.quantize import modules, rules


@pytest.mark.parametrize(
    "rule", [rule for rule in rules.RULES if isinstance(rule.flow, str) and rule.flow], ids=lambda r: r.name
)
def test_statements_parse_and_use_only_what_was_computed_before(rule):
    known = {"x", "self"}
    for step in modules.parse(rule.flow):
        if not step.is_operation:
            known.add(step.call.split(".")[0])
        used = {node.id for argument in step.args for node in ast.walk(argument) if isinstance(node, ast.Name)}
        assert used <= known
        known.update(step.targets)
    assert "out" in known


@pytest.mark.parametrize("text", ["cv1(x)", "y = x", "y = 3"])
def test_other_statements_are_refused(text):
    with pytest.raises(SyntaxError, match="name = call"):
        modules.parse(text)


def test_a_flow_computes_what_its_statements_say():
    original = nn.Module()
    original.cv1, original.sizes, original.d = nn.Conv2d(4, 4, 1), (1, 3), 1
    flow = modules.FlowModule.from_float(
        original, "y = cv1(x); a, b = split(y, self.sizes); z = concat(b, a, dim=self.d); out = add(z, x)"
    )
    x = torch.rand(2, 4, 5, 5)
    y = original.cv1(x)
    assert torch.equal(flow(x), torch.cat((y[:, 1:], y[:, :1]), 1) + x)


def test_resize_takes_only_the_size_of_its_second_argument():
    small, large = torch.rand(1, 2, 4, 4), torch.rand(1, 7, 8, 8)
    out = modules.OPERATIONS["resize_like"](small, large)
    assert torch.equal(out, small.repeat_interleave(2, 2).repeat_interleave(2, 3))


def test_subclasses_and_foreign_classes_of_the_same_name_have_no_row():
    class Conv2d(nn.Conv2d):
        """A user's own."""

    assert rules.find(Conv2d(1, 1, 1)) is None
    assert rules.find(nn.Conv2d(1, 1, 1)).kind == "conv"
