"""A progress bar for builds: what IProgressMonitor says (from TensorRT 10), or what 8.6 writes to its log."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import interrupts
from utils.trt.tensorrt_api import Api, Log

_LAYERS = re.compile(r"After [\w -]+: (\d+) layers")  # "After vertical fusions: 253 layers"
_SHOWN = 250  # measured kernels between two looks at how many there were


@contextmanager
def build_progress(api: Api, setup: Any, log: Log, name: str, show: bool) -> Iterator[Callable[[], None]]:
    """Show how far the builder is while the block runs; a signal that is held cancels the build from TensorRT 10 on.

    Yields:
        What is to be called when there is an engine.
    """
    if api.progress_monitor is None:
        with _from_log(log, name, show) as finished:
            yield finished
        return
    monitor = _monitor(api.progress_monitor, name, show)
    setup.progress_monitor = monitor
    try:
        yield lambda: None  # the monitor hears of it
    finally:
        monitor.close()


@contextmanager
def _from_log(log: Log, name: str, show: bool) -> Iterator[Callable[[], None]]:
    """One step for each layer whose kernels are measured, and how many kernels that were.

    Identical layers are measured once, and conversions of formats behind all layers: near the end the bar stands while
    the kernels go on, and then it jumps.
    """
    from tqdm import tqdm

    measured = 0
    with tqdm(desc=f"{name}: measuring kernels", unit="layer", disable=not show) as bar:

        def watch(message: str) -> None:
            nonlocal measured
            if " Time: " in message:  # "Tactic: 0x00000000000003e8 Time: 0.0058"
                measured += 1
                if measured % _SHOWN == 0:
                    bar.set_postfix_str(f"{measured:,} kernels")
            elif "Computing costs for" in message:
                bar.update()
            elif message.startswith("After ") and (found := _LAYERS.match(message)):
                bar.total = int(found[1])

        log.watch = watch
        try:
            yield lambda: bar.update((bar.total or bar.n) - bar.n) and None
        finally:
            log.watch = None


def _monitor(base: Any, name: str, show: bool) -> Any:
    from tqdm import tqdm

    class Monitor(base):
        """One bar: the outermost phase; what runs inside it is named behind."""

        def __init__(self) -> None:
            base.__init__(self)
            self._bars: dict[str, Any] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if parent is None:
                self._bars[phase] = tqdm(total=steps, desc=f"{name}: {phase}", unit="step", disable=not show)
            elif self._bars:
                next(iter(self._bars.values())).set_postfix_str(phase, refresh=False)

        def step_complete(self, phase: str, step: int) -> bool:
            bar = self._bars.get(phase)
            if bar is not None:
                bar.update(step + 1 - bar.n)
            return not interrupts.pending()

        def phase_finish(self, phase: str) -> None:
            bar = self._bars.pop(phase, None)
            if bar is not None:
                bar.update((bar.total or bar.n) - bar.n)
                bar.close()

        def close(self) -> None:
            for bar in self._bars.values():
                bar.close()
            self._bars.clear()

    return Monitor()
