"""YOLOv9 detectors of Ultralytics are read as upstream's networks; other networks of theirs are named and refused."""

import json
import pickle

import onnx
import pytest
import torch
from changed_networks import cut, prune
from torch import nn
from ultralytics_files import DESCRIPTION, NAMES, network, with_class_channels, write_theirs

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
    assert read.model.model[-1].cv3[0][0].conv.out_channels == class_channels


def test_it_goes_through_every_program(checkout, run, demo_data, tmp_path):
    """The demo set has ten classes, and this network finds none of them: `--force`."""
    ten = {**DESCRIPTION, "nc": 10}
    torch.manual_seed(0)
    model = upstream.build_model({**ten, "depth_multiple": 1, "width_multiple": 1, "anchors": 3})
    model = with_class_channels(model, 24)
    names = {number: str(number) for number in range(10)}
    weights = write_theirs(tmp_path / "best.pt", model, yaml=ten, names=names)
    small = ["--data", demo_data, "--imgsz", 64, "--workers", 0, "--device", "cpu", "--project", tmp_path]
    calibration = ["--force", "--calib-images", 4, "--calib-method", "max"]
    run("qat.py", "quantize", "--weights", weights, *small, *calibration, "--ptq-only", "--no-eval-origin",
        "--no-eval-ptq", "--name", "mine")  # fmt: skip
    quantized = tmp_path / "mine/weights/ptq_mine.pt"
    read = checkpoint.load_quantized(quantized)
    assert (read.origin, read.model.model[-1].cv3[2][1].conv.out_channels) == ("Ultralytics 8.4.190", 24)
    said = run("export_qat.py", "--weights", quantized, "--typing", "weak", "--device", "cpu")
    assert "matches PyTorch" in said
    entries = {entry.key: entry.value for entry in onnx.load(quantized.with_name("ptq_mine-int8.onnx")).metadata_props}
    assert (entries["origin"], json.loads(entries["names"])["3"]) == ("Ultralytics 8.4.190", "3")
    said = run("export_qat.py", "--weights", quantized, "--typing", "strong", "--device", "cpu", "--output",
               tmp_path / "strong.onnx")  # fmt: skip
    assert "matches PyTorch" in said
    for name, file in (("float", weights), ("int8", quantized)):
        said = run("export_yoloV9.py", "--weights", file, "--size", 64, "--output", tmp_path / name / "n.onnx")
        assert "matches PyTorch" in said
        assert [value.name for value in onnx.load(tmp_path / name / "n.onnx").graph.output] == ["output"]
    run("val_trt.py", quantized, "--reference", weights, *small, "--limit", 4, "--name", "compared")
    rows = json.loads((tmp_path / "compared/report.json").read_text())["rows"]
    assert [(row["stage"], row["images"]) for row in rows] == [("float", 4), ("PTQ", 4)]
    run("qat.py", "sensitive", "--weights", weights, *small, *calibration, "--num-image", 4, "--name", "sensitive")
    assert (tmp_path / "sensitive/report.json").is_file()


def changed(index: int, block: str) -> dict:
    """The description with another block, of the backbone and the head together."""
    rows = [[*row] for row in (*DESCRIPTION["backbone"], *DESCRIPTION["head"])]
    rows[index][2] = block
    return {**DESCRIPTION, "backbone": rows[:5], "head": rows[5:], "yaml_file": "yolo11n.yaml"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"yaml": changed(3, "C3k2")}, "yolo11n, which is not YOLOv9 (it has the block C3k2)"),
        (
            {"yaml": changed(-1, "Segment")},
            "Upsample those of upstream, so its weights do not fit; train masks by upstream's segment/train.py",
        ),
        ({"yaml": changed(-1, "OBB")}, "yolo11n, whose head is OBB; of"),
        ({"yaml": {**DESCRIPTION, "backbone": [], "head": []}}, "whose head is no layers"),
        ({"yaml": {**DESCRIPTION, "backbone": None}}, "has no backbone and head of layers"),
        ({"yaml": {**DESCRIPTION, "head": [[-1, 1], 3]}}, "has no backbone and head of layers"),
        ({"yaml": "yolov9t.yaml"}, "without a network under 'ema' or 'model'"),
        ({"yaml": changed(0, "ADown")}, "upstream cannot build this model description"),
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


def test_a_pruned_network_keeps_its_channels(checkout, tmp_path):
    """Channels are those of the weights: inner ones, the class branch's, and those that two blocks share."""
    model = network()
    cut(model.model[0], model.model[1].cv1, 0.25)
    prune(model)
    read = upstream.load_float(write_theirs(tmp_path / "best.pt", model))
    assert torch.equal(outputs(read.model), outputs(model.half()))
    shapes = [{name: value.shape for name, value in one.state_dict().items()} for one in (read.model, model)]
    assert shapes[0] == shapes[1]


def test_a_network_that_lacks_a_weight_is_refused_by_its_name(checkout, tmp_path):
    model = network()
    model.model[0].bn = nn.Identity()
    with pytest.raises(CheckpointError, match=r"first: model\.0\.bn\.bias\)"):
        upstream.load_float(write_theirs(tmp_path / "best.pt", model))


def another_activation(model):
    model.model[1].cv1.act = nn.ReLU()
    return "model.1.cv1.act"


def another_dilation(model):
    model.model[3].cv1.conv.dilation = (2, 2)
    return "model.3.cv1.conv"


@pytest.mark.parametrize("change", [another_activation, another_dilation])
def test_what_computes_something_else_is_refused_by_its_name(checkout, tmp_path, change):
    model = network()
    name = change(model)
    with pytest.raises(CheckpointError, match=rf"first: {name}\)"):
        upstream.load_float(write_theirs(tmp_path / "best.pt", model))


@pytest.mark.parametrize(("numbers", "remedy"), [((1, 2, 3), "class 0"), ((0, 1, 3), "again")])
def test_names_that_do_not_begin_at_0_or_have_gaps_are_refused(checkout, tmp_path, numbers, remedy):
    file = write_theirs(tmp_path / "best.pt", network(), names=dict(zip(numbers, "abc", strict=True)))
    with pytest.raises(CheckpointError, match=rf"{file} has names of 3 classes, from {numbers[0]} on.*{remedy}"):
        upstream.load_float(file)


@pytest.mark.parametrize("nc", [7, None])
def test_the_number_of_classes_is_that_of_the_head(checkout, tmp_path, nc):
    model = network()
    read = upstream.load_float(write_theirs(tmp_path / "best.pt", model, yaml={**DESCRIPTION, "nc": nc}))
    assert (read.nc, read.names) == (3, NAMES)
    assert torch.equal(outputs(read.model), outputs(model.half()))
