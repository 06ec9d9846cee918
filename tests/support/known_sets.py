"""A set of known images with the network that knows it, to be evaluated."""

import torch
from known_images import SQUARE, KnowingModel, write_set
from known_masks import KnowingMasks, write_outlined_set

from utils.evaluation.config import EvalConfig
from utils.evaluation.data_yaml import load_data
from utils.evaluation.loop import evaluate
from utils.runners.pytorch import TorchRunner

NAMES = ("cat", "dog", "owl")
CONFIG = EvalConfig(imgsz=64, batch_size=8, workers=0)


class Known:
    """A set, its data configuration, and the network that knows it; with `masks` one for segmentation."""

    def __init__(self, folder, sizes=SQUARE, count=40, masks=False, imgsz=64, **how):
        self.folder = folder
        self.samples = (write_outlined_set if masks else write_set)(folder, count, sizes, **how)
        self.data = load_data(folder / "data.yaml")
        self.model = (KnowingMasks if masks else KnowingModel)(self.samples, NAMES, imgsz)

    def evaluate(self, config=CONFIG, runner=None, **more):
        return evaluate(runner or TorchRunner(self.model, "cpu"), self.data, config, progress=False, **more)


class Shell(TorchRunner):
    """The knowing network behind other inputs or outputs than it has; `change` makes its results another."""

    def __init__(self, known, inputs=None, outputs=None, change=None):
        super().__init__(known.model, "cpu")
        self.inputs, self.outputs = inputs or self.inputs, outputs or self.outputs
        self._change = change or (lambda found: found)

    def _infer(self, feeds):
        (images,) = feeds.values()
        return self._change(super()._infer({"images": images.float() / (255 if images.dtype == torch.uint8 else 1)}))
