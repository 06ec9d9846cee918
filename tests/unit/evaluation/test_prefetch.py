"""The network is started on the next batch before NMS of this one; what is found stays the same."""

from dataclasses import replace

import pytest
from known_images import SQUARE, KnowingModel, numbers, write_set

from utils.evaluation.data_yaml import load_data
from utils.evaluation.detector import Detector, prefetch
from utils.evaluation.loop import EvalConfig, evaluate
from utils.runners.pytorch import TorchRunner

CONFIG = EvalConfig(imgsz=64, batch_size=8, workers=0)


class OneBuffer(TorchRunner):
    """Gives the same tensor each time, as engines do, so that an answer is gone with the next run; keeps a journal."""

    def __init__(self, *words):
        super().__init__(*words)
        self.journal, self._kept = [], {}

    def _infer(self, feeds):
        self.journal.append(f"network {len(feeds['images'])}")
        found = super()._infer(feeds)
        if self._kept and self._kept["output0"].shape == found["output0"].shape:
            return {name: self._kept[name].copy_(one) for name, one in found.items()}
        self._kept = {name: one.clone() for name, one in found.items()}
        return self._kept


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    folder = tmp_path_factory.mktemp("square")
    samples = write_set(folder, 20, SQUARE)
    return load_data(folder / "data.yaml"), KnowingModel(samples, ("cat", "dog", "owl"), 64)


def evaluated(known, config, monkeypatch=None):
    data, model = known
    with OneBuffer(model, "cpu") as runner:
        if monkeypatch is not None:
            finish = Detector.finish
            monkeypatch.setattr(Detector, "finish", lambda *words: runner.journal.append("NMS") or finish(*words))
        return evaluate(runner, data, config, progress=False), runner.journal


@pytest.mark.parametrize("count", [0, 1, 5])
def test_an_item_is_given_when_the_next_one_was_made(count):
    made = []
    for number, item in enumerate(prefetch(made.append(number) or number for number in range(count))):
        assert item == number
        assert len(made) == min(number + 2, count)
    assert made == list(range(count))


def test_the_next_batch_is_started_before_nms_of_this_one(known, monkeypatch):
    result, journal = evaluated(known, replace(CONFIG, overlap=True), monkeypatch)
    assert journal == ["network 8", "network 8", "NMS", "network 4", "NMS", "NMS"]
    assert set(result.ms) == {"preprocess", "inference", "nms"}


@pytest.mark.parametrize("batch_size", [1, 8, 64])
def test_it_finds_the_same(known, batch_size):
    config = replace(CONFIG, batch_size=batch_size)
    (plain, order), (ahead, _) = evaluated(known, config), evaluated(known, replace(config, overlap=True))
    assert 0.3 < plain.ap < 0.9
    assert numbers(ahead) == numbers(plain)
    assert ahead.images == plain.images == 20
    assert len(order) == -(-20 // batch_size) + (batch_size == 64)  # one image warms up where there is one batch only
    assert set(ahead.parts) == set(plain.parts)


def test_batches_without_images_keep_their_place(known):
    data, model = known

    class Empty:
        def __len__(self):
            return 0

    with TorchRunner(model, "cpu") as runner:
        for overlap in (False, True):
            batches = [Empty(), Empty()]
            assert list(Detector(runner, data, overlap=overlap).detect(batches)) == [(one, None) for one in batches]
