"""A graph as a segmentation network's, whose predictions and prototypes are inputs, and values for them."""

from collections.abc import Sequence

import onnx
import torch
import torchvision
from onnx import TensorProto, helper

from utils.core.tasks import DETECT, SEGMENT, Prediction

CLASSES, COEFFICIENTS, ANCHORS = 5, 8, 90
HEIGHT, WIDTH = 64, 96
ROWS = 4 + CLASSES + COEFFICIENTS
FIXED = {"batch": 3, "anchors": ANCHORS, "height": HEIGHT, "width": WIDTH}


def raw_graph(opset: int = 17, dynamic: Sequence[str] = (), grid: tuple = (HEIGHT // 4, WIDTH // 4)) -> onnx.ModelProto:
    """A network whose predictions and prototypes are inputs, beside images that it does not look at."""
    size = {name: name if name in dynamic else value for name, value in FIXED.items()}
    grid = ("mask_height", "mask_width") if "height" in dynamic else grid
    shapes = {
        "images": (size["batch"], 3, size["height"], size["width"]), "raw": (size["batch"], ROWS, size["anchors"]),
        "maps": (size["batch"], COEFFICIENTS, *grid),
    }  # fmt: skip
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    names = {"raw": DETECT.prediction, "maps": SEGMENT.prototypes}
    outputs = [helper.make_tensor_value_info(own, TensorProto.FLOAT, shapes[name]) for name, own in names.items()]
    nodes = [helper.make_node("Identity", [name], [own]) for name, own in names.items()]
    graph = helper.make_graph(nodes, "raw", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def prediction(seed: int = 0, batch: int = 3, height: int = HEIGHT, width: int = WIDTH) -> Prediction:
    """Boxes of all sizes, some under a pixel, some out of the image; the second image is empty."""
    random = torch.Generator().manual_seed(seed)
    middle = torch.rand(batch, 2, ANCHORS, generator=random) * torch.tensor([width, height])[:, None]
    size = torch.rand(batch, 2, ANCHORS, generator=random) * 50 + 4
    size[:, :, ::7] *= 0.01
    middle[:, 0, 3::7] += width * 0.6
    middle[:, 1, 5::7] -= height * 0.6
    scores = torch.rand(batch, CLASSES, ANCHORS, generator=random) ** 2
    scores[1] = 0
    coefficients = torch.randn(batch, COEFFICIENTS, ANCHORS, generator=random)
    maps = torch.randn(batch, COEFFICIENTS, height // 4, width // 4, generator=random)
    return Prediction(torch.cat([middle, size, scores, coefficients], 1), maps)


def pooled(found: Prediction, image: int, rows: torch.Tensor, size: int | tuple[int, int]) -> torch.Tensor:
    """Masks in their boxes' frames: torchvision pools the prototypes for each box, then they are summed."""
    maps = torchvision.ops.roi_align(
        found.prototypes[image : image + 1], [rows[:, :4]], size, spatial_scale=0.25, sampling_ratio=1, aligned=True
    )
    coefficients = found.coefficients[image][:, rows[:, 6].long()].T
    return torch.einsum("nk,nkhw->nhw", coefficients, maps).sigmoid()
