"""Every variant of a trained YOLOv9 becomes the deployed GELAN that computes what its main branch computed."""

from dataclasses import replace

import pytest
import torch
import yaml
from random_networks import narrow, random_network, save_float, tiny_with

import reparameterization
from models import reparam
from utils import upstream
from utils.core.errors import CheckpointError, QatError
from utils.upstream import checkout
from utils.upstream.description import TRAINING_HEADS

NAMES = ("t", "s", "m", "c", "e")
X = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True, scope="module")
def _no_denormals():
    torch.set_flush_denormal(True)  # random networks are full of them, and slow with them
    yield
    torch.set_flush_denormal(False)


def load_training(path):
    return upstream.load_float(path, TRAINING_HEADS)


@pytest.fixture(scope="module")
def small(tmp_path_factory, upstream_yaml):
    """Training checkpoints of -t with 3 classes: as trained, converted, other widths."""
    folder = tmp_path_factory.mktemp("training")
    weights = save_float(folder / "best.pt", random_network(upstream_yaml("yolov9-t"), nc=3))
    assert reparameterization.main(["--weights", str(weights), "--device", "cpu"]) == 0
    wide = yaml.safe_load(upstream_yaml("yolov9-t").read_text()) | {"width_multiple": 1.5}
    wide = save_float(folder / "wide.pt", random_network(wide, nc=3))
    return {"training": weights, "converted": folder / "best-converted.pt", "wide": wide}


@pytest.mark.parametrize(("name", "channels"), [*((name, 3) for name in NAMES), ("t", 1)])
def test_converted_network_computes_the_main_branch(name, channels, upstream_yaml, tmp_path, capsys):
    files = (upstream_yaml(f"{family}-{name}") for family in ("yolov9", "gelan"))
    description, deployed = ({**yaml.safe_load(file.read_text()), "ch": channels} for file in files)
    training = random_network(description, nc=3, seed=4)
    for number in (one for one in training.buffers() if not one.is_floating_point()):
        number += 100_001  # batches that were seen, which half precision could not hold
    weights, target = save_float(tmp_path / "best.pt", training), tmp_path / "deployed.pt"
    words = ["--weights", weights, "--save", target, "--cfg", upstream_yaml(f"gelan-{name}"), "--device", "cpu"]
    assert reparameterization.main([*map(str, words), "--model", name, "--classes_num", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{target}: GELAN, 3 classes")
    done = f"from the training model's output: 0\nnext: python qat.py quantize --weights {target}\n"
    assert out.endswith(done)
    found = upstream.load_float(target)
    with torch.no_grad():
        (auxiliary, expected), _ = training.float()(X[:, :channels])
        result, _ = found.model(X[:, :channels])
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
    assert (auxiliary - expected).abs().max() > 1
    assert found.names == {index: f"class {index}" for index in range(3)}
    assert {value.dtype for value in upstream.read_checkpoint(target)["model"].parameters()} == {torch.float16}
    networks = found.model, random_network(deployed, nc=3)
    shapes = [{key: value.shape for key, value in one.state_dict().items()} for one in networks]
    assert shapes[0] == shapes[1]


def test_values_that_half_precision_cannot_hold_are_refused(upstream_yaml, tmp_path, capsys):
    model = random_network(upstream_yaml("yolov9-t"), nc=3)
    model.model[0].bn.running_var.fill_(1e5)
    torch.save({"model": model, "ema": None}, tmp_path / "single.pt")
    assert reparameterization.main(["--weights", str(tmp_path / "single.pt"), "--device", "cpu"]) == 2
    assert "model.0.bn.running_var holds values above 65504" in capsys.readouterr().err
    assert not (tmp_path / "single-converted.pt").exists()


def test_upstreams_own_loader_takes_the_file(small, monkeypatch):
    """It fuses, as val.py and detect.py do; train.py reads the description and the state."""
    from models.experimental import attempt_load
    from models.yolo import DetectionModel

    monkeypatch.setattr(torch, "load", torch.load)
    checkout.load_safely_by_default(upstream.read_checkpoint)
    model = attempt_load(str(small["converted"]), device=torch.device("cpu"))
    with torch.no_grad():
        expected = load_training(small["training"]).model(X)[0][1]
        torch.testing.assert_close(model(X)[0], expected, atol=1e-3, rtol=1e-4)
    content = torch.load(small["converted"])
    assert content["epoch"] == -1
    assert content["optimizer"] is content["ema"] is None
    again = DetectionModel(content["model"].yaml, ch=3, nc=3)
    again.load_state_dict(content["model"].float().state_dict())


def test_mistakes_get_one_line(small, tmp_path, upstream_yaml, capsys):
    (tmp_path / "text.yaml").write_text("nothing")
    target, training = tmp_path / "out.pt", small["training"]
    cases: list[tuple[str, list]] = [
        ("--classes_num 80 was given, and", [training, "--classes_num", 80]),
        ("converted already", [small["converted"]]),
        ("model.0.conv.weight", [training, "--cfg", upstream_yaml("gelan-s")]),
        ("does not match the converted model", [training, "--cfg", upstream_yaml("yolov9-t")]),
        ("is not a model description", [training, "--cfg", tmp_path / "text.yaml"]),
        ("and would be overwritten; choose another name with --save", [training, "--save", training]),
        ("is not the name of a .pt file", [training, "--save", tmp_path]),
    ]
    for message, words in cases:
        words = ["--save", target, "--device", "cpu", "--weights", *words]
        assert reparameterization.main([str(word) for word in words]) == 2, message
        out, err = capsys.readouterr()
        assert message in err
        assert (err.startswith("error: "), err.count("\n"), out, target.exists()) == (True, 1, "", False)


def test_a_wrong_map_and_layers_of_another_network_are_noticed(small, monkeypatch):
    training, wide = load_training(small["training"]), load_training(small["wide"])
    wide.model.model = wide.model.model[:9]
    with pytest.raises(CheckpointError, match="has 9 layers, but its description"):
        reparam.convert(replace(training, model=wide.model))
    wrong = replace(reparam.HEADS["DualDDetect"], main={"cv2": "cv2", "cv3": "cv3", "dfl": "dfl"})  # of the same shapes
    monkeypatch.setitem(reparam.HEADS, "DualDDetect", wrong)
    with pytest.raises(QatError, match="differs by"):
        reparam.largest_difference(training.model, reparam.convert(training).model, torch.device("cpu"))


@pytest.mark.parametrize("name", ["tiny", "c-dseg"])
def test_a_network_with_masks_computes_its_main_branch(name, upstream_yaml, tmp_path):
    config = tiny_with("DualDSegment") if name == "tiny" else narrow(upstream_yaml("segment/yolov9-c-dseg"))
    training = load_training(save_float(tmp_path / "a.pt", random_network(config)))
    deployed = reparam.convert(training)
    assert (type(deployed.model).__name__, deployed.names) == ("SegmentationModel", training.names)
    with torch.no_grad():
        expected, (_, coefficients, prototypes) = training.model(X)
        result, (_, own_coefficients, own_prototypes) = deployed.model(X)
    pairs = (result, expected), (own_coefficients, coefficients), (own_prototypes, prototypes)
    assert all(torch.equal(one, other) for one, other in pairs)
    before = dict(vars(deployed.model.model[-1]))
    assert reparam.largest_difference(training.model, deployed.model, torch.device("cpu")) == 0
    assert vars(deployed.model.model[-1]) == before  # anchors of the check are not kept
    with torch.no_grad():
        next(one for one in deployed.model.model[-1].proto.modules() if isinstance(one, torch.nn.BatchNorm2d)).bias += 1
    with pytest.raises(QatError, match="differs by"):  # the prototypes are compared, too
        reparam.largest_difference(training.model, deployed.model, torch.device("cpu"))
