"""Batches on their way from the loader to the network's device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from utils.core.made_ahead import made_ahead
from utils.evaluation.batch import Batch
from utils.evaluation.nvjpeg import JpegDecoder


def ahead(loader: Iterable[Batch], device: torch.device, decoder: JpegDecoder | None = None) -> Iterator[Batch]:
    """The loader's batches, on a GPU with the images of the next one being copied there while this one is used.

    With a decoder a thread of its own lets the GPU decode the next batch meanwhile.
    """
    if device.type != "cuda":
        yield from loader if decoder is None else (decoder.letterboxed(*decoder.decode(batch)) for batch in loader)
        return
    stream = torch.cuda.Stream(device)

    def copied(batch: Batch) -> tuple[Batch, Any]:
        with torch.cuda.stream(stream):
            return batch.with_images(batch.images.to(device, non_blocking=True)), stream.record_event()

    def decoded(batch: Batch, by: JpegDecoder) -> tuple[Batch, list[Tensor], Any]:
        with torch.cuda.stream(stream):
            return *by.decode(batch), stream.record_event()

    if decoder is None:
        for batch, event in made_ahead(map(copied, loader)):
            _arrived([batch.images], event)
            yield batch
        return
    with ThreadPoolExecutor(1) as pool:
        for future in made_ahead(pool.submit(decoded, batch, decoder) for batch in loader):
            batch, pixels, event = future.result()
            _arrived([batch.images, *pixels], event)
            yield decoder.letterboxed(batch, pixels)


def _arrived(tensors: Sequence[Tensor], made: Any) -> None:
    """Let torch's current stream wait for tensors of another one, and keep their memory until it has used them."""
    for tensor in tensors:
        current = torch.cuda.current_stream(tensor.device)
        current.wait_event(made)
        tensor.record_stream(current)
