"""Overlaps of masks on a GPU are those that a CPU finds."""

import torch

from utils.evaluation import masks as masks_module
from utils.evaluation.masks import Masks, mask_overlaps

LABELS = 7


def made(counts, device):
    """Masks of whole numbers, whose sums are exact in any order; detections of two classes, and labels of one."""
    random = torch.Generator().manual_seed(0)
    corners = [torch.rand(count, 2, generator=random) * 400 for count in counts]
    boxes = [torch.cat([one, one + torch.rand(len(one), 2, generator=random) * 200 + 20], 1) for one in corners]
    prototypes = torch.randint(-3, 4, (len(counts), 32, 160, 160), generator=random).half()
    coefficients = [torch.randint(-3, 4, (count, 32), generator=random).float() for count in counts]
    found = [torch.cat([one, torch.rand(len(one), 1), torch.arange(len(one))[:, None] % 2], 1) for one in boxes]
    labels = [torch.cat([torch.zeros(min(LABELS, len(one)), 1), one[:LABELS]], 1) for one in boxes]
    truth = torch.rand(sum(map(len, labels)), 160, 160, generator=random) < 0.3
    masks = Masks(
        prototypes.to(device), tuple(one.to(device) for one in coefficients), tuple(one.to(device) for one in boxes),
        (640, 640),
    )  # fmt: skip
    return masks, truth, *([one.to(device) for one in rows] for rows in (found, labels))


def test_overlaps_are_those_of_the_cpu(monkeypatch):
    monkeypatch.setitem(masks_module.LARGEST, "cuda", 50 * 4 * 160 * 160)
    counts, results = (30, 0, 120, 3, 14), []
    for device in ("cpu", "cuda:0"):
        masks, truth, found, labels = made(counts, device)
        results.append([one.cpu() for one in mask_overlaps(masks, truth, found, labels)])
    for expected, one in zip(*results, strict=True):
        torch.testing.assert_close(one, expected, atol=1e-6, rtol=0)
    assert max(float(one.max()) for one in results[0] if one.numel()) > 0.05
