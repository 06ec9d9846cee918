"""What stands behind a network's detections: whose pixels their boxes are in."""

import torch

from utils.evaluation.detector import in_images

SHAPES = [
    ((100, 200), ((0.5, 0.5), (0.0, 7.0))),
    ((64, 64), ((1.0, 1.0), (0.0, 0.0))),
    ((30, 60), ((2.0, 2.0), (4.0, 2.0))),
]


def test_boxes_are_in_the_pixels_of_their_own_images():
    box = torch.tensor([[10.0, 12.0, 30.0, 40.0, 0.9, 1.0]])
    found = in_images([box.repeat(2, 1), box[:0], box], SHAPES)
    assert [one[:, :4].tolist() for one in found] == [[[20, 10, 60, 66]] * 2, [], [[3, 5, 13, 19]]]
    assert all(torch.equal(one[:, 4:], box[:, 4:].expand(len(one), 2)) for one in found)
