"""YOLOv9 detectors of MultimediaTechLab/YOLO and LibreYOLO are read as upstream's; others of theirs are refused."""

import re

import pytest
import torch
from changed_networks import prune
from random_networks import random_network, save_quantized
from ultralytics_files import with_class_channels

from models.quantize import checkpoint
from utils import upstream
from utils.core.errors import CheckpointError

X = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
PLACES = {
    0: "backbone.conv0", 1: "backbone.conv1", 2: "backbone.elan1", 3: "backbone.down2", 4: "backbone.elan2",
    5: "backbone.down3", 6: "backbone.elan3", 7: "backbone.down4", 8: "backbone.elan4", 9: "backbone.spp",
    12: "neck.elan_up1", 15: "neck.elan_up2", 16: "neck.down1", 18: "neck.elan_down1", 19: "neck.down2",
    21: "neck.elan_down2", 22: "head",
}  # fmt: skip


def techlab(name: str, value: torch.Tensor) -> tuple[str, torch.Tensor]:
    """MultimediaTechLab's name of a tensor of gelan-t's to gelan-c's."""
    layer, rest = re.fullmatch(r"model\.(\d+)\.(.+)", name).groups()
    if rest == "dfl.conv.weight":
        return "22.heads.0.anc2vec.anc2vec.weight", value[..., None]
    if layer == "22":
        kind, level, rest = rest.split(".", 2)
        return f"22.heads.{level}.{ {'cv2': 'anchor_conv', 'cv3': 'class_conv'}[kind] }.{rest}", value
    rest = re.sub(r"\bcv(\d)", r"conv\1", rest.replace(".m.", ".bottleneck."))
    return f"{layer}.{rest}", value


def techlab_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = dict(techlab(name, value) for name, value in model.state_dict().items())
    down = [name for name in state if re.match(r"(3|5|7|16|19)\.conv1\.", name)]
    if not any(".conv2." in name for name in state if name.startswith("3.")):  # AConv has one convolution
        state = {name.replace(".conv1.", ".conv.", 1) if name in down else name: value for name, value in state.items()}
    return {**state, "23.conv1.conv.weight": torch.zeros(3), "30.heads.0.anchor_conv.2.bias": torch.zeros(64)}


def libre_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = {}
    for name, value in model.state_dict().items():
        layer, rest = re.fullmatch(r"model\.(\d+)\.(.+)", name).groups()
        place = PLACES[int(layer)]
        if "down" in place and "elan" not in place and "model.3.cv2.conv.weight" not in model.state_dict():
            rest = rest.replace("cv1.", "cv.", 1)
        if "dfl" not in rest:
            state[f"{place}.{rest}"] = value
    return {**state, "aux.spp.cv1.conv.weight": torch.zeros(3), "aux_head.cv2.0.2.bias": torch.zeros(64)}


def libre(model: torch.nn.Module, **changes: object) -> dict[str, object]:
    names = {number: f"class {number}" for number in range(3)}
    entries = {"schema_version": "1.0", "libreyolo_version": "1.6.0", "model_family": "yolo9", "size": "t"}
    return {"model": libre_state(model), **entries, "task": "detect", "nc": 3, "names": names, "imgsz": 320, **changes}


def predictions(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.float().eval()(X)[0]


@pytest.mark.parametrize("variant", ["t", "m", "c"])
def test_the_network_computes_what_it_did(variant, upstream_yaml, tmp_path):
    model = random_network(upstream_yaml(f"gelan-{variant}"), nc=3)
    torch.save(techlab_state(model), tmp_path / "v9.pt")
    trained = {f"ema.model.{name}": value for name, value in techlab_state(model).items()}
    raw = {f"model.model.{name}": torch.zeros_like(value) for name, value in techlab_state(model).items()}
    torch.save({"epoch": 3, "state_dict": {**raw, **trained}}, tmp_path / "last.ckpt")
    torch.save(libre(model), tmp_path / "libre.pt")
    for file in ("v9.pt", "last.ckpt", "libre.pt"):
        read = upstream.load_float(tmp_path / file)
        assert torch.equal(predictions(read.model), predictions(model)), file
        named = file == "libre.pt"
        assert read.origin == ("LibreYOLO 1.6.0" if named else "MultimediaTechLab/YOLO")
        assert read.names == {number: f"class {number}" if named else str(number) for number in range(3)}
        assert (read.nc, read.imgsz) == (3, 320 if named else None)


def test_channels_are_those_of_the_tensors(upstream_yaml, tmp_path):
    """LibreYOLO's class branch has another width; pruned networks have others everywhere. Both are quantized."""
    model = with_class_channels(random_network(upstream_yaml("gelan-t"), nc=3), 80)
    prune(model)
    torch.save(libre(model), tmp_path / "libre.pt")
    assert torch.equal(predictions(upstream.load_float(tmp_path / "libre.pt").model), predictions(model))
    quantized = checkpoint.load_quantized(save_quantized(tmp_path / "int8.pt", tmp_path / "libre.pt"))
    branch = quantized.model.model[-1].cv3[0][0].conv.weight
    assert branch.shape == model.model[-1].cv3[0][0].conv.weight.shape


def without(state: dict, name: str) -> dict:
    return {key: value for key, value in state.items() if key != name}


def test_other_networks_of_theirs_are_named(upstream_yaml, tmp_path):
    model = random_network(upstream_yaml("gelan-t"), nc=3)
    state = techlab_state(model)
    cases = {
        "model.4.cv1.conv.weight": without(state, "4.conv1.conv.weight"),
        "model.22.implicit.weight": {**state, "22.implicit.weight": torch.zeros(1)},
        "MultimediaTechLab/YOLO without the class branch": {"25.detect.heads.0.anchor_conv.2.bias": torch.zeros(64)},
        "family yolox": libre(model, model_family="yolox"),
        "yolo9 for segment": libre(model, task="segment"),
        "that is quantized": libre(model, quant={"bits": 8}),
        "something else than tensors": {**state, "22.epoch": 3},
        "LibreYOLO without the class branch": {**libre(model), "model": {"a": torch.zeros(1)}},
    }
    for problem, content in cases.items():
        torch.save(content, tmp_path / "w.pt")
        with pytest.raises(CheckpointError, match=re.escape(problem)) as refused:
            upstream.load_float(tmp_path / "w.pt")
        assert str(refused.value).startswith(f"{tmp_path / 'w.pt'} is a checkpoint of ")
        assert "\n" not in str(refused.value)
