"""Batches on their way from the loader to the network's device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from utils.core.made_ahead import made_ahead
from utils.evaluation.batch import Batch


def ahead(loader: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The loader's batches, on a GPU with the images of the next one being copied there while this one is used."""
    if device.type != "cuda":
        yield from loader
        return
    stream = torch.cuda.Stream(device)

    def copied(batch: Batch) -> tuple[Batch, Any]:
        with torch.cuda.stream(stream):
            return replace(batch, images=batch.images.to(device, non_blocking=True)), stream.record_event()

    for batch, event in made_ahead(map(copied, loader)):
        current = torch.cuda.current_stream(device)
        current.wait_event(event)
        batch.images.record_stream(current)  # its memory is kept until that stream has used it
        yield batch
