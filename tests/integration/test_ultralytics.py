"""YOLOv9 detectors of Ultralytics are read as upstream's networks; other networks of theirs are named and refused."""

import json
import pickle

import onnx
import pytest
import torch
from torch import nn
from ultralytics_files import DESCRIPTION, NAMES, network, write_theirs

from models.quantize import checkpoint
from utils import upstream
from utils.core.errors import CheckpointError

X = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.float().eval()(X)[0]


@pytest.mark.parametrize("class_channels", [16, 20])
def test_the_network_computes_what_it_did_and_keeps_what_the_file_says(checkout, tmp_path, class_channels):
    """16 is upstream's own width of this network's class branch."""
    model = network(class_channels)
    read = upstream.load_float(write_theirs(tmp_path / "best.pt", model))
    assert torch.equal(outputs(read.model), outputs(model.half()))
    assert (read.names, read.nc, read.stride, read.imgsz) == (NAMES, 3, 32, 96)
    assert (read.data, read.origin) == ("animals.yaml", "Ultralytics 8.4.190")
    assert read.yaml["class_channels"] == class_channels


def test_it_is_quantized_and_exported(checkout, run, demo_data, tmp_path):
    """The demo set has ten classes, and this network finds none of them: `--force`."""
    ten = {**DESCRIPTION, "nc": 10}
    torch.manual_seed(0)
    model = upstream.build_model({**ten, "depth_multiple": 1, "width_multiple": 1, "anchors": 3, "class_channels": 24})
    names = {number: str(number) for number in range(10)}
    weights = write_theirs(tmp_path / "best.pt", model, yaml=ten, names=names)
    run("qat.py", "quantize", "--weights", weights, "--data", demo_data, "--imgsz", 64, "--ptq-only", "--force",
        "--no-eval-origin", "--no-eval-ptq", "--calib-images", 4, "--calib-method", "max", "--workers", 0,
        "--device", "cpu", "--project", tmp_path, "--name", "mine")  # fmt: skip
    quantized = tmp_path / "mine/weights/ptq_mine.pt"
    read = checkpoint.load_quantized(quantized)
    assert (read.origin, read.yaml["class_channels"]) == ("Ultralytics 8.4.190", 24)
    said = run("export_qat.py", "--weights", quantized, "--typing", "weak", "--device", "cpu")
    assert "matches PyTorch" in said
    entries = {entry.key: entry.value for entry in onnx.load(quantized.with_name("ptq_mine-int8.onnx")).metadata_props}
    assert (entries["origin"], json.loads(entries["names"])["3"]) == ("Ultralytics 8.4.190", "3")


def changed(index: int, block: str) -> dict:
    """The description with another block, of the backbone and the head together."""
    rows = [[*row] for row in (*DESCRIPTION["backbone"], *DESCRIPTION["head"])]
    rows[index][2] = block
    return {**DESCRIPTION, "backbone": rows[:5], "head": rows[5:], "yaml_file": "yolo11n.yaml"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"yaml": changed(3, "C3k2")}, "yolo11n, which is not YOLOv9 (it has the block C3k2)"),
        ({"yaml": changed(-1, "Segment")}, "yolo11n, whose head is Segment"),
        ({"yaml": {**DESCRIPTION, "backbone": [], "head": []}}, "whose head is no layers"),
        ({"yaml": {**DESCRIPTION, "backbone": None}}, "has no backbone and head of layers"),
        ({"yaml": {**DESCRIPTION, "head": [[-1, 1], 3]}}, "has no backbone and head of layers"),
        ({"yaml": {**DESCRIPTION, "nc": None}}, "upstream cannot build this model description"),
        ({"yaml": "yolov9t.yaml"}, "without a network under 'ema' or 'model'"),
        ({"yaml": changed(0, "ADown")}, "upstream cannot build this model description"),
        ({"yaml": {**DESCRIPTION, "nc": 4}}, "whose weights are not those of its description"),
        ({"forward": nn.Identity().extra_repr}, "was fused"),  # a bound method, as `fuse` leaves it
        ({"args": pickle.PickleBuffer}, "holds"),
    ],
)
def test_another_network_of_theirs_is_named(checkout, tmp_path, changes, problem):
    file = write_theirs(tmp_path / "best.pt", network(), **changes)
    with pytest.raises(CheckpointError) as refused:
        upstream.load_float(file)
    assert str(refused.value).startswith(f"{file} is a checkpoint of Ultralytics")
    assert problem in str(refused.value)


def test_a_pruned_network_is_refused_by_the_first_weight_that_differs(checkout, tmp_path):
    model = network()
    model.model[0].conv.weight = nn.Parameter(model.model[0].conv.weight[:4])
    with pytest.raises(CheckpointError, match=r"first: \['model\.0\.conv\.weight'\]"):
        upstream.load_float(write_theirs(tmp_path / "best.pt", model))
