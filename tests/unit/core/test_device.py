"""Copies to a device, with stand-ins for tensors of a GPU."""

from types import SimpleNamespace

import pytest
import torch

from utils.core.device import sent

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Copied(SimpleNamespace):
    """A tensor of three rows: where it is, and what was done with it."""

    def __len__(self):
        return 3

    def pin_memory(self):
        if self.device.type != "cpu":
            raise RuntimeError("only dense CPU tensors can be pinned")
        return Copied(device=self.device, done=[*self.done, "pinned"])

    def to(self, device, non_blocking=False):
        return Copied(device=device, done=[*self.done, "waits" if not non_blocking else "does not wait"])


@pytest.mark.parametrize(
    ("before", "after", "done"),
    [
        (CPU, GPU, ["pinned", "does not wait"]),
        (GPU, GPU, ["waits"]),
        (GPU, CPU, ["waits"]),
        (CPU, CPU, ["waits"]),
    ],
)
def test_only_rows_of_the_cpu_are_pinned(before, after, done):
    copy = sent(Copied(device=before, done=[]), after)
    assert copy.device == after
    assert copy.done == done
