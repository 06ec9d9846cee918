"""Rows of several images in one tensor, and that nothing on the way from NMS to AP is done image by image."""

import pytest
import torch

from utils.evaluation.batch import RaggedBatch
from utils.evaluation.metrics import EvalStatistics


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
