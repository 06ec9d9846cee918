"""A progress bar for builds, where TensorRT says how far it is (IProgressMonitor, from TensorRT 10)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from utils.engine.tensorrt_api import Api

logger = logging.getLogger(__name__)


@contextmanager
def build_progress(api: Api, setup: Any, name: str, show: bool) -> Iterator[None]:
    """Show the builder's phases while the block runs; Ctrl-C cancels the build where TensorRT listens."""
    if api.progress_monitor is None:
        if show:
            logger.info("building %s; it takes minutes, and %s reports no progress", name, api.name)
        yield
        return
    monitor = _monitor(api.progress_monitor, name, show)
    setup.progress_monitor = monitor
    try:
        yield
    finally:
        monitor.close()


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
            return True

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
