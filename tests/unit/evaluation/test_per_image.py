"""Rows of several images in one tensor, and that nothing on the way from NMS to AP is done image by image."""

import pytest
import torch

from utils.evaluation.batch import Item, RaggedBatch, collate
from utils.evaluation.loop import labels_in_images
from utils.evaluation.metrics import EvalStatistics

SHAPES = ((100, 200), ((0.5, 0.5), (0.0, 7.0)))


def test_it_is_a_sequence_of_the_rows_of_each_image():
    parts = [torch.rand(3, 2), torch.rand(0, 2), torch.rand(1, 2)]
    found = RaggedBatch.of(parts)
    assert RaggedBatch.of(found) is found
    assert (len(found), found.counts, found.flat.shape) == (3, [3, 0, 1], (4, 2))
    assert all(map(torch.equal, found, parts))
    assert torch.equal(found[-1], parts[2])
    assert [len(one) for one in found[:2]] == [3, 0]
    assert found.owners().tolist() == [0, 0, 0, 2]
    with pytest.raises(IndexError):
        found[3]


def test_what_is_kept_of_an_image_takes_nothing_of_the_others_along():
    statistics = EvalStatistics()
    rows = RaggedBatch.of([torch.rand(count, 6) for count in (3, 0, 4)])
    statistics.add(
        rows,
        RaggedBatch.of([torch.rand(2, 5)] * 3),
        ["a", "b", "c"],
        [torch.rand(2, 3), torch.rand(2, 0), torch.rand(2, 4)],
    )
    plain = statistics.to_plain()
    assert plain.pop("paths") == ["a", "b", "c"]
    assert set(plain) == {"correct", "correct_masks", "detections", "labels"}
    for images in plain.values():
        assert [type(one) for one in images] == [torch.Tensor] * 3
        assert all(one.untyped_storage().nbytes() == one.nbytes for one in images)
    copy = EvalStatistics()
    copy.extend(statistics.to_plain())
    for name, images in plain.items():
        assert all(map(torch.equal, copy.to_plain()[name], images))


def test_labels_are_in_the_pixels_of_the_originals():
    labels = torch.tensor([[0, 2, 0.5, 0.5, 0.25, 0.25]])
    image = torch.zeros(3, 64, 96, dtype=torch.uint8)
    items = [Item(image, labels.clone(), "a", SHAPES), Item(image, labels[:0], "b", SHAPES)]
    batch = collate([*items, Item(image, labels.clone(), "c", ((64, 96), ((1.0, 1.0), (0.0, 0.0))))])
    found = labels_in_images(batch, torch.device("cpu"))
    assert [one.tolist() for one in found] == [[[2, 72, 34, 120, 66]], [], [[2, 36, 24, 60, 40]]]


def test_images_that_are_put_together_of_several_have_no_labels_in_originals():
    item = Item(torch.zeros(3, 64, 64, dtype=torch.uint8), torch.rand(2, 6), "a", None)
    batch = collate([item, item._replace(shapes=SHAPES)])
    assert batch.truth is None
    with pytest.raises(ValueError, match="have no originals"):
        labels_in_images(batch, torch.device("cpu"))
