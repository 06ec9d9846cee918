"""Contexts of an engine side by side: what is given together they compute in turns, each while others compute too."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, cuda

from utils.core.made_ahead import made_ahead
from utils.runners.base import Runner
from utils.trt.runner import TensorRTRunner

logger = logging.getLogger(__name__)


class SideBySide(Runner):
    """Runners of the same engine as one. `infer` runs the first of them, `infer_each` all."""

    def __init__(self, runners: Sequence[TensorRTRunner]) -> None:
        """Take the runners over: they are closed with this one."""
        first = runners[0]
        description = f"{first.description}, {len(runners)} contexts"
        super().__init__(first.inputs, first.outputs, first.metadata, first.device, description)
        self.limits = dict(first.limits)
        self._runners = tuple(runners)
        self._streams = [cuda.Stream(first.device) for _ in runners]
        self._used = 0  # of what was given together, the most

    def infer_each(self, feeds: Iterable[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Start the next run before the outputs of the last but one are given, with two contexts; and so on."""
        self._check_open()
        runs = (self._started(number, feed) for number, feed in enumerate(feeds))
        for outputs, done, _ in made_ahead(runs, len(self._runners) - 1):
            cuda.current_stream(self.device).wait_event(done)
            yield outputs

    def _started(self, number: int, feed: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any, object]:
        """Outputs of a run that torch's current stream does not wait for, the event at its end, and the feed.

        The feed's memory must stay until that event has been waited for.

        The run waits for that stream, so for whoever has used the outputs of this context's last run, and for no other
        run: what these give is awaited later.
        """
        place = number % len(self._runners)
        self._used = max(self._used, number + 1)
        stream, done = self._streams[place], cuda.Event()
        stream.wait_stream(cuda.current_stream(self.device))
        with cuda.stream(stream):
            outputs = self._runners[place].infer(feed)
            done.record(stream)
        return outputs, done, feed

    def _infer(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._runners[0].infer(feeds)

    def _to_device(self, name: str, feed: Tensor) -> Tensor:
        return feed  # the runner's own affair

    def _close(self) -> None:
        if self._used == 1:
            logger.warning(
                "several contexts gained nothing: the engine took each batch at once; they are for engines with a "
                "small static batch"
            )
        for runner in self._runners:
            runner.close()
