"""Look inside an engine: layer table with times, report, picture."""

from __future__ import annotations

import logging
from pathlib import Path

from utils.cli import select_device
from utils.engine import engine_graph, engine_report, inspector, tensorrt_api
from utils.engine.engine_file import EngineNote
from utils.engine.execution import Execution
from utils.engine.inspector import Summary

logger = logging.getLogger(__name__)


def look_inside(engine: Path, *, batch: int | None = None, draw: bool = False, device: str = "") -> Summary:
    """Report on an engine's layers; writes `ENGINE.layers.json`, and `ENGINE.svg` if it is to be drawn.

    Args:
        batch: pictures, the profile's best if None.

    Raises:
        InputError: the engine cannot be loaded, or the batch is outside its profile.
        DependencyError: TensorRT is not installed, or graphviz is needed and not there.
    """
    if draw:
        engine_graph.program()
    execution = Execution(engine, tensorrt_api.load(), select_device(device))
    try:
        execution.set_shapes({spec.name: _shape(execution, spec.name, batch) for spec in execution.inputs})
        shape = "x".join(map(str, execution.buffers[execution.inputs[0].name].shape))
        layers = engine_report.layers_of(execution)
        gpu = tensorrt_api.gpu(execution.device.index)
        title = f"{engine.name}: {shape}, {execution.api.name}, {gpu.name if gpu else 'no GPU'}"
        return report(layers, engine, title, execution.note.precision, draw)
    finally:
        execution.close()


def look_at_record(record: Path, *, draw: bool = False) -> Summary:
    """The same for the inspector's JSON of an engine, as trtexec's `--exportLayerInfo` writes it; without times.

    Raises:
        InputError: it is no such file.
    """
    layers = inspector.parse(inspector.read(record))
    return report(layers, record, record.name, EngineNote.load(record.with_suffix(".engine")).precision, draw)


def report(layers: list[inspector.Layer], file: Path, title: str, precision: str, draw: bool) -> Summary:
    """Log the report, and write the layers and the picture beside `file`."""
    summary = inspector.summarize(layers)
    logger.info("%s", "\n".join(engine_report.text(summary, title, precision)))
    written = [engine_report.save(layers, file.with_suffix(".layers.json"))]
    if draw:
        written.append(engine_graph.draw(layers, title, file.with_suffix(".svg")))
    logger.info("layers: %s", ", ".join(map(str, written)))
    return summary


def _shape(execution: Execution, name: str, batch: int | None) -> tuple[int, ...]:
    best = execution.best_shape(name)
    return best if batch is None else (batch, *best[1:])
