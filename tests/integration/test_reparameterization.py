"""Every variant of a trained YOLOv9 becomes the deployed GELAN that computes what its main branch computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from random_networks import TINY, random_network, save_float, save_quantized, tiny_with

import reparameterization
from models import reparam
from utils import upstream
from utils.core.errors import CheckpointError, QatError
from utils.upstream import checkout
from utils.upstream.description import TRAINING_HEADS

NAMES = ("t", "s", "m", "c", "e")
MASKS = "c-dseg"
X = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True, scope="module")
def _no_denormals() -> Iterator[None]:
    torch.set_flush_denormal(True)  # random networks are full of them, and slow with them
    yield
    torch.set_flush_denormal(False)


def load_training(path: Path) -> upstream.FloatCheckpoint:
    return upstream.load_float(path, TRAINING_HEADS)


def layers(path: Path) -> list[list]:
    content = yaml.safe_load(path.read_text())
    return [*content["backbone"], *content["head"]]


def read_by(row: list, index: int) -> list[int]:
    """Absolute numbers of the layers that layer `index` reads; -1 is the image."""
    sources = [row[0]] if isinstance(row[0], int) else row[0]
    return [index + one if one < 0 else one for one in sources]


def folder_of(name: str) -> str:
    """Where upstream has a variant's YAMLs, for `upstream_yaml`."""
    return "segment/" if name == MASKS else ""


@pytest.mark.parametrize("name", [*NAMES, MASKS])
def test_map_is_what_the_two_yamls_say(name: str, upstream_yaml: Callable[[str], Path]):
    """The reference walks both networks from their heads to the image, pairing what computes the same."""
    files = [upstream_yaml(f"{folder_of(name)}{family}-{name}") for family in ("yolov9", "gelan")]
    training, deployed = (layers(path) for path in files)
    pairs = {len(deployed) - 1: len(training) - 1}
    inputs = read_by(training[-1], len(training) - 1)
    half = inputs[3:] if name != MASKS else [*inputs[3:6], inputs[7]]  # [6] are the auxiliary branch's prototypes
    stack = list(zip(read_by(deployed[-1], len(deployed) - 1), half, strict=True))
    while stack:
        ours, theirs = stack.pop()
        if ours < 0 or ours in pairs:
            assert pairs.get(ours, theirs) == theirs or training[theirs][2] == "Silence"
            continue
        pairs[ours] = theirs
        if (name, ours) == (MASKS, 22):  # one of upstream's two YAMLs has another number of repeats there
            assert deployed[ours][3][3:] != training[theirs][3][3:]
            deployed[ours][3][3] = training[theirs][3][3]
        assert deployed[ours][1:] == training[theirs][1:]
        sources = read_by(deployed[ours], ours), read_by(training[theirs], theirs)
        stack += zip(*sources, strict=True)
    assert list(reparam.main_branch(yaml.safe_load(files[0].read_text()))) == [pairs[i] for i in range(len(deployed))]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, upstream_yaml: Callable[[str], Path]) -> dict[str, Path]:
    """Training checkpoints of -t with 3 classes: as trained, quantized, converted, truncated, other widths."""
    folder = tmp_path_factory.mktemp("training")
    weights = save_float(folder / "best.pt", random_network(upstream_yaml("yolov9-t"), nc=3))
    assert reparameterization.main(["--weights", str(weights), "--device", "cpu"]) == 0
    converted = folder / "best-converted.pt"
    (folder / "part.pt").write_bytes(weights.read_bytes()[:100_000])
    wide = yaml.safe_load(upstream_yaml("yolov9-t").read_text()) | {"width_multiple": 1.5}
    tiny = save_float(folder / "tiny.pt", random_network(TINY))
    return {
        "training": weights,
        "converted": converted,
        "quantized": save_quantized(folder / "int8.pt", tiny),
        "truncated": folder / "part.pt",
        "wide": save_float(folder / "wide.pt", random_network(wide, nc=3)),
    }


@pytest.mark.parametrize(("name", "channels"), [*((name, 3) for name in NAMES), ("t", 1)])
def test_converted_network_computes_the_main_branch(
    name: str, channels: int, upstream_yaml: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
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
    done = f"from the training network's output: 0\nnext: python qat.py quantize --weights {target}\n"
    assert out.endswith(done)
    found = upstream.load_float(target)
    with torch.no_grad():
        (auxiliary, expected), _ = training.float()(X[:, :channels])
        result, _ = found.model(X[:, :channels])
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
    assert (auxiliary - expected).abs().max() > 1
    assert found.names == {index: f"class {index}" for index in range(3)}
    assert {value.dtype for value in upstream.read_checkpoint(target)["model"].parameters()} == {torch.float16}
    own = random_network(deployed, nc=3).state_dict()
    assert {key: value.shape for key, value in found.model.state_dict().items()} == {
        key: value.shape for key, value in own.items()
    }


def test_values_that_half_precision_cannot_hold_are_refused(
    upstream_yaml: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = random_network(upstream_yaml("yolov9-t"), nc=3)
    model.model[0].bn.running_var.fill_(1e5)
    torch.save({"model": model, "ema": None}, tmp_path / "single.pt")
    assert reparameterization.main(["--weights", str(tmp_path / "single.pt"), "--device", "cpu"]) == 2
    assert "model.0.bn.running_var holds values above 65504" in capsys.readouterr().err
    assert not (tmp_path / "single-converted.pt").exists()


def test_upstreams_own_loader_takes_the_file(small: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
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


def test_mistakes_get_one_line(
    small: dict[str, Path], tmp_path: Path, upstream_yaml: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "text.yaml").write_text("nothing")
    target, training = tmp_path / "out.pt", small["training"]
    cases: list[tuple[str, list]] = [
        ("--classes_num 80 was given, and", [training, "--classes_num", 80]),
        ("converted already", [small["converted"]]),
        ("is damaged", [small["truncated"]]),
        ("is a quantized checkpoint", [small["quantized"]]),
        ("does not exist", [tmp_path / "none.pt"]),
        ("layer 0 is Conv [32, 3, 2]", [training, "--cfg", upstream_yaml("gelan-s")]),
        ("layer 22 is SPPELAN", [training, "--cfg", upstream_yaml("yolov9-t")]),
        ("is not a model description", [training, "--cfg", tmp_path / "text.yaml"]),
        ("best.pt is read and would be overwritten; choose another name", [training, "--save", training]),
        ("is not the name of a .pt file", [training, "--save", tmp_path]),
    ]
    for message, words in cases:
        words = ["--save", target, "--device", "cpu", "--weights", *words]
        assert reparameterization.main([str(word) for word in words]) == 2, message
        out, err = capsys.readouterr()
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert message in err
        assert out == ""
        assert not target.exists()


def test_a_wrong_map_and_tensors_of_another_network_are_noticed(
    small: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    training, wide = load_training(small["training"]), load_training(small["wide"])
    with pytest.raises(CheckpointError, match=r"size mismatch for model\.0\.conv\.weight"):
        reparam.convert(replace(training, model=wide.model))
    wrong = replace(reparam.HEADS["DualDDetect"], main={"cv2": "cv2", "cv3": "cv3", "dfl": "dfl"})  # of the same shapes
    monkeypatch.setitem(reparam.HEADS, "DualDDetect", wrong)
    with pytest.raises(QatError, match="differs by"):
        reparam.largest_difference(training.model, reparam.convert(training).model, torch.device("cpu"))


# --- with masks -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory, upstream_yaml: Callable[[str], Path]) -> dict[str, Path]:
    """yolov9-c-dseg with 3 classes: the checkpoint as trained, and converted."""
    folder = tmp_path_factory.mktemp("masks")
    weights = save_float(folder / "best.pt", random_network(upstream_yaml("segment/yolov9-c-dseg"), nc=3, seed=4))
    assert reparameterization.main(["--weights", str(weights), "--device", "cpu"]) == 0
    return {"training": weights, "converted": folder / "best-converted.pt"}


@pytest.mark.slow
def test_predictions_and_prototypes_of_a_converted_network_are_the_main_branchs(masks: dict[str, Path]):
    training = load_training(masks["training"]).model
    found = upstream.load_float(masks["converted"])
    with torch.no_grad():
        expected, (_, coefficients, prototypes) = training(X)
        result, (_, own_coefficients, own_prototypes) = found.model(X)
        training.model[-1].training = True
        maps, (auxiliary, _), (first, second) = training(X)
    assert result.shape == (1, 4 + 3 + 32, 84)
    assert own_prototypes.shape == (1, 32, 16, 16)
    for one, other in ((result, expected), (own_coefficients, coefficients), (own_prototypes, prototypes)):
        assert torch.equal(one, other)
    assert torch.equal(own_prototypes, second)
    assert not torch.equal(first, second)
    assert not torch.equal(auxiliary, coefficients)
    assert not torch.equal(maps[0][0], maps[1][0])
    assert type(found.model).__name__ == "SegmentationModel"
    stored = upstream.read_checkpoint(masks["converted"])["model"]
    assert {value.dtype for value in stored.parameters()} == {torch.float16}
    assert found.names == {index: f"class {index}" for index in range(3)}


@pytest.mark.slow
def test_the_description_of_a_network_with_masks_comes_from_the_checkpoint(
    masks: dict[str, Path], tmp_path: Path, upstream_yaml: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
):
    found = upstream.load_float(masks["converted"]).yaml
    rows, theirs = [*found["backbone"], *found["head"]], layers(upstream_yaml("segment/gelan-c-dseg"))
    assert rows[22] == [15, 1, "RepNCSPELAN4", [256, 256, 128, 2]]
    assert theirs[22] == [15, 1, "RepNCSPELAN4", [256, 256, 128, 1]]
    assert rows[25] == [[15, 18, 21, -1], 1, "DSegment", ["nc", 32, 256]]
    assert [row[1:] for row in rows[:22]] == [row[1:] for row in theirs[:22]]
    words = ["--weights", str(masks["training"]), "--save", str(tmp_path / "out.pt"), "--device", "cpu", "--cfg"]
    capsys.readouterr()
    assert reparameterization.main([*words, str(upstream_yaml("segment/gelan-c-dseg"))]) == 2
    assert "its layer 22 is RepNCSPELAN4 [256, 256, 128, 1] x 1" in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()


def test_every_network_with_masks_and_an_auxiliary_branch_has_a_map(tmp_path: Path):
    """The tiny network converted along it computes its main branch."""
    training = load_training(save_float(tmp_path / "a.pt", random_network(tiny_with("DualDSegment"))))
    deployed = reparam.convert(training)
    before = dict(vars(deployed.model.model[-1]))
    assert reparam.largest_difference(training.model, deployed.model, torch.device("cpu")) == 0
    assert vars(deployed.model.model[-1]) == before  # anchors of the check are not kept
    with torch.no_grad():
        deployed.model.model[-1].proto.bn.bias += 1
    with pytest.raises(QatError, match="differs by"):  # the prototypes are compared, too
        reparam.largest_difference(training.model, deployed.model, torch.device("cpu"))
