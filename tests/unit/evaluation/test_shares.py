"""Three processes read and evaluate images as one does: the same order, the same AP, the same predictions."""

import itertools

import pytest
import shared_work
from known_images import MIXED, write_set
from known_masks import write_outlined_set
from together import together

CASES = [
    {"batch_size": 7},
    {"batch_size": 2},  # smaller than the number of processes
    {"batch_size": 8, "rect": True},
    {"batch_size": 4, "limit": 2},  # a dataset that is smaller than it
]
IMAGES, SIZE = 23, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("set")


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    """Of one process and of three: images, one of which can only be opened, and two with outlines: one has none."""
    samples = write_set(folder, IMAGES, MIXED, splits=("train", "val"))
    samples[5].path.write_bytes(samples[5].path.read_bytes()[:200])
    where = tmp_path_factory.mktemp("outlined")
    outlined = where, write_outlined_set(where, 2, MIXED, seed=4)
    alone = shared_work.of_images(folder, samples, CASES, folder / "alone", outlined)
    results = tmp_path_factory.mktemp("three")
    return alone, together(shared_work.of_images, SIZE, results, folder, samples, CASES, folder / "three", outlined)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_process_gets_the_numbers_of_one(folder, runs, case):
    alone, three = runs
    expected = alone["evaluated"][case]
    assert expected["numbers"]["ap"] > 0.1
    for one in three:
        assert one["evaluated"][case]["numbers"] == expected["numbers"]
    assert three[0]["evaluated"][case]["paths"] == expected["paths"]
    assert three[0]["evaluated"][case]["measured_on"].endswith("3 processes")
    ours, theirs = ((folder / who / str(case) / "model_predictions.json").read_text() for who in ("three", "alone"))
    assert ours == theirs


def test_masks_of_several_processes_are_those_of_one(folder, runs):
    alone, three = runs
    (expected,) = alone["masks"]
    assert expected["numbers"]["masks"].ap > 0.05
    for one in three:
        assert one["masks"][0]["numbers"] == expected["numbers"]
    ours, theirs = ((folder / who / "masks/0/model_predictions.json").read_text() for who in ("three", "alone"))
    assert ours == theirs
    assert "segmentation" in ours


@pytest.mark.parametrize("workers", [0, 1])
def test_parts_put_together_are_the_batches_of_one_process(runs, workers):
    alone, three = runs
    batches = zip(*(one["loaded"][workers] for one in three), strict=True)
    assert [[image for part in parts for image in part] for parts in batches] == alone["loaded"][workers]
    passes = alone["loaded"][workers]
    assert sorted(itertools.chain(*passes[:6])) == sorted(itertools.chain(*passes[6:]))
    assert passes[:6] != passes[6:]


def test_collectives(runs):
    found = [one["collectives"] for one in runs[1]]
    assert [one["world"] for one in found] == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
    assert [one["main"] for one in found] == [True, False, False]
    for one in found:
        assert one["sum"] == [3.0, 3.0]
        assert one["gathered"] == [(0, 2**53), (1, 2**53), (2, 2**53)]
        assert one["from_main"] == {"rank": 0}
        assert one["refused"] == "only 0 can see it"
