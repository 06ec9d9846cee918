"""Checkpoints and a recipe that 1.0 wrote (tests/golden/written-by-1.0) load, evaluate and export.

`UPDATE_GOLDEN=1` writes tests/golden/files-1.0.json anew. The networks are random, so that their AP is near 0 and says
little: what they detect is compared.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from golden import golden, read_golden
from golden_bounds import Detection, detections_in, different_detections, unchanged_share
from graph_signature import different_parameters, signature
from planted_faults import change_constant, convolution_weights, swap_weights

from models.quantize import checkpoint

HERE = Path(__file__).parent
WEIGHTS = {"float": "float.pt", "ptq": "ptq.pt", "masks": "int8-seg.pt"}
FEW = ("--data", "set/data.yaml", "--imgsz", "96", "--batch-size", "2", "--workers", "0", "--device", "cpu")
TIME = 1_700_000_000  # of the images, which a run remembers


@pytest.fixture
def run(fork_server: Any, checkout: Path, tmp_path: Path) -> Any:
    """Runs a program in a copy of what 1.0 wrote; gives what `subprocess.run` gives."""
    shutil.copytree(HERE / "written-by-1.0", tmp_path / "here")
    for file in (tmp_path / "here/set").rglob("*"):
        os.utime(file, (TIME, TIME))

    def call(program: str, *words: object, code: int = 0) -> Any:
        done = fork_server.run([checkout / program, *words], tmp_path / "here", timeout=200)
        assert done.returncode == code, done.stderr
        return done

    return call


# Of the detections that are compared, about 250 with float and with quantized weights.
LOWEST_SCORE = 0.98


def best_detections(run: Any, folder: Path, weights: str) -> list[Detection]:
    """Evaluate a checkpoint on the eight images; gives what it detects with a score above LOWEST_SCORE."""
    run("qat.py", "eval", "--weights", weights, *FEW, "--save-json")
    (file,) = (folder / "here/runs/qat_eval/exp").glob("*predictions.json")
    return detections_in(file, LOWEST_SCORE)


def golden_detections(kind: str) -> list[Detection]:
    return [Detection.of_text(line) for line in read_golden("files-1.0.json", f"{kind} detections")]


def test_a_float_checkpoint_detects_the_same(run, tmp_path):
    detections = best_detections(run, tmp_path, WEIGHTS["float"])
    golden("files-1.0.json", "float detections", [detection.as_text() for detection in detections])
    assert different_detections(detections, golden_detections("float"), LOWEST_SCORE) == []


def test_rounding_to_int8_is_seen(run, tmp_path):
    """What 1.0 quantized does not pass for the float network."""
    detections = best_detections(run, tmp_path, WEIGHTS["ptq"])
    assert different_detections(detections, golden_detections("float"), LOWEST_SCORE)


# The least share of unchanged boxes. Measured: 0.94 of the boxes, and at most 0.02 with one of the faults below.
UNCHANGED = 0.25


def test_a_quantized_checkpoint_detects_the_same(run, tmp_path):
    detections = best_detections(run, tmp_path, WEIGHTS["ptq"])
    golden("files-1.0.json", "ptq detections", [detection.as_text() for detection in detections])
    assert unchanged_share(detections, golden_detections("ptq")) >= UNCHANGED


@pytest.mark.parametrize("fault", ["a range times 1.02", "a wrongly shared scale"])
def test_a_fault_in_a_quantized_checkpoint_is_seen(run, tmp_path, fault):
    content = checkpoint.load_quantized(tmp_path / "here" / WEIGHTS["ptq"])
    images, first, *_ = content.model.activation_quantizers.values()
    first.set_amax(images.amax if fault == "a wrongly shared scale" else 1.02 * first.amax)
    checkpoint.save(tmp_path / "here/wrong.pt", content)
    detections = best_detections(run, tmp_path, "wrong.pt")
    assert unchanged_share(detections, golden_detections("ptq")) < UNCHANGED


def exported(run: Any, folder: Path, kind: str) -> onnx.ModelProto:
    typing = () if kind == "float" else ("--typing", "weak")
    run("export_qat.py", "--weights", WEIGHTS[kind], "--imgsz", 96, *typing, "--output", "out.onnx", "--device", "cpu")
    return onnx.load(folder / "here/out.onnx")


def different_graphs(description: dict[str, Any], golden_description: dict[str, Any]) -> list[str]:
    """Compare two signatures: wiring, attributes and constants exactly, parameters of folded convolutions in bounds."""
    assert description.keys() == golden_description.keys()
    lines = different_parameters(description.get("parameters", []), golden_description.get("parameters", []))
    for part in description.keys() - {"parameters"}:
        if description[part] != golden_description[part]:
            lines.append(f"{part}: {description[part]}, golden {golden_description[part]}")
    return lines


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_checkpoint_is_exported_as_the_same_graph(kind, run, tmp_path):
    graph = exported(run, tmp_path, kind)
    folded = kind == "float"  # quantized checkpoints hold folded weights
    description = signature(graph, folded=folded)
    assert different_graphs(description, golden("files-1.0.json", f"{kind} graph", description)) == []


def test_a_fault_in_the_float_graph_is_seen(run, tmp_path):
    """One channel times 1.02 in any convolution, its elements in another order, two weights swapped."""
    graph = exported(run, tmp_path, "float")
    pinned = read_golden("files-1.0.json", "float graph")
    for name in convolution_weights(graph):
        larger = change_constant(graph, name, last_channel_times_1_02)
        assert len(different_graphs(signature(larger, folded=True), pinned)) == 1, name
        reordered = change_constant(graph, name, first_element_last)
        assert len(different_graphs(signature(reordered, folded=True), pinned)) == 1, name
    assert different_graphs(signature(swap_weights(graph), folded=True), pinned)


def last_channel_times_1_02(weight: np.ndarray) -> np.ndarray:
    changed = weight.copy()
    changed[-1] *= 1.02
    return changed


def first_element_last(weight: np.ndarray) -> np.ndarray:
    return np.roll(weight, -1)


def test_a_float_graph_may_round_otherwise(run, tmp_path):
    """Every parameter is the next larger float32 number, as on no processor at once."""
    graph = exported(run, tmp_path, "float")
    for name in convolution_weights(graph):
        graph = change_constant(graph, name, lambda weight: np.nextafter(weight, np.float32(np.inf)))
    assert different_graphs(signature(graph, folded=True), read_golden("files-1.0.json", "float graph")) == []


def test_a_recipe_is_taken(run, tmp_path):
    done = run("qat.py", "quantize", "--weights", "float.pt", *FEW, "--recipe", "recipe.yaml", "--ptq-only", "--force")
    assert "calibration" in done.stdout
