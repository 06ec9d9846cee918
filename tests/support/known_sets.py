"""A set of known images with the network that knows it, to be evaluated."""

from known_images import KnowingModel, write_set

from utils.evaluation.data_yaml import load_data
from utils.evaluation.loop import EvalConfig, evaluate
from utils.runners.pytorch import TorchRunner

NAMES = ("cat", "dog", "owl")
CONFIG = EvalConfig(imgsz=64, batch_size=8, workers=0)


class Known:
    """A set, its data configuration, and the network that knows it."""

    def __init__(self, folder, sizes, count=40):
        self.folder = folder
        self.samples = write_set(folder, count, sizes)
        self.data = load_data(folder / "data.yaml")
        self.model = KnowingModel(self.samples, NAMES, 64)

    def evaluate(self, config=CONFIG, **more):
        return evaluate(TorchRunner(self.model, "cpu"), self.data, config, progress=False, **more)
