"""Patterns of a recipe's `float`: placing and verifying mean the same convolutions by them, and no others."""

import json
from collections.abc import Iterable

import onnx
import pytest
from qdq_graph import Editor, good_graph
from small_networks import chain

from models.quantize import placement
from models.quantize.placement import matches
from models.quantize.recipe import Recipe
from utils.core.errors import RecipeError
from utils.onnx_graph.verify import verify
from utils.onnx_graph.view import set_metadata

GOOD = good_graph()

# pattern → the convolutions of `small_networks.chain` that it names, found by reading the network
CHAIN = {
    "*cv2": "1.cv2.conv 2.cv2.conv", "model.?": "0.conv 5.conv 6", "model.1.cv?": "1.cv1.conv 1.cv2.conv",
    "model.2": "2.cv1.conv 2.cv2.conv", "model.2.*": "2.cv1.conv 2.cv2.conv", "model.2.cv1": "2.cv1.conv",
    "model.2.cv1.conv": "2.cv1.conv", "model.*.cv1.conv": "1.cv1.conv 2.cv1.conv", "model.[0-4]": "0.conv",
    "model.[!0]": "5.conv 6", "model.5.co?v": "5.conv", "model.6": "6",
    "*.conv": "0.conv 1.cv1.conv 1.cv2.conv 2.cv1.conv 2.cv2.conv 5.conv",
    "model": "0.conv 1.cv1.conv 1.cv2.conv 2.cv1.conv 2.cv2.conv 5.conv 6",
}  # fmt: skip
NOTHING = ["cv1", "MODEL.0", "model.1.cv", "model.77", "model.2.add", "model.2.cv1.conv.weight", "model.0.", " model.0",
           "model.?.?", "?", "model.[", ".conv"]  # fmt: skip

# the convolutions of `qdq_graph.good_graph`
CONVOLUTIONS = [
    "model.0.conv", "model.1.cv1.conv", "model.3.cv1.conv", "model.3.m.cv1.conv", "model.3.m.cv2.conv",
    "model.5.cv2.0.0.conv", "model.5.cv2.0.1.conv", "model.5.cv3.0.0.conv", "model.5.cv3.0.1.conv",
]  # fmt: skip


@pytest.mark.parametrize("pattern", CHAIN)
def test_what_is_placed_in_float(pattern):
    plan = placement.plan(chain(), Recipe(float=(pattern,)))
    expected = {f"model.{path}" for path in CHAIN[pattern].split()}
    assert set(plan.float_convolutions) == {path for path in plan.convolutions if matches(pattern, path)} == expected


def test_a_pattern_that_names_nothing_is_refused():
    for pattern in NOTHING:
        with pytest.raises(RecipeError, match=r"matches no convolution of the network; it may hold .* model\.0"):
            placement.plan(chain(), Recipe(float=("model.0", pattern)))


def named(modules: Iterable[str]) -> onnx.ModelProto:
    """The good graph as an exporter writes it that names the modules."""
    return set_metadata(GOOD, {"float_modules": json.dumps(list(modules))})


@pytest.mark.parametrize("path", CONVOLUTIONS)
def test_a_file_that_names_modules_is_judged_by_them_and_not_by_its_patterns(path):
    for modules, ok in ([path], True), ([], False), ([other for other in CONVOLUTIONS if other != path], False):
        editor = Editor(named(modules))
        editor.bypass(f"{path}.weight")
        report = verify(editor.model)
        assert report.ok is ok
        assert [finding.rule for finding in report.findings] == ([] if ok else ["convolutions"])
        assert report.counts["float_convolutions"] == len(modules)


def test_a_sum_of_float_convolutions_that_is_read_as_int8_has_quantized_inputs():
    editor = Editor(named(["model.3.m.cv1.conv", "model.3.m.cv2.conv"]))
    assert verify(editor.model).ok
    editor.rewire("/model.3/m/Add", 0, "/model.3/Split_output_1")
    assert [finding.rule for finding in verify(editor.model).findings] == ["residual"]


def test_an_operator_is_in_float_with_the_convolutions_around_it():
    for path, breaches in (("model.0.conv", set()), ("model.3.cv1.conv", {"convolutions", "float island"})):
        editor = Editor(named([path]))
        editor.bypass("model.0.conv.weight")
        editor.insert_node("Exp", "/model.0/act/Mul_output_0")
        editor.find("/inserted/Exp").name = "/model.0/Exp"
        assert {finding.rule for finding in verify(editor.model).findings} == breaches
