"""Look inside an engine: layer table with times, report, image."""

from __future__ import annotations

import logging
from pathlib import Path

from utils.core.errors import InputError, QatError
from utils.core.files import read_text, refuse_overwrite, write_text
from utils.trt import tensorrt_api
from utils.trt.engine_file import EngineNote
from utils.trt.layers import (
    Layer,
    LayerSummary,
    draw_layers,
    graphviz,
    layers_from_json,
    layers_json,
    layers_of,
    parse_layers,
    report_lines,
    summarize,
)

logger = logging.getLogger(__name__)

RENAME = "rename the file that is read: the files that are written are named after it"


def look_inside(engine: Path, *, batch: int | None = None, draw: bool = False, device: str = "") -> LayerSummary:
    """Report on an engine's layers; writes `ENGINE.layers.json`, and `ENGINE.svg` if it is to be drawn.

    Args:
        batch: images, the profile's opt batch if None.

    Raises:
        InputError: the engine cannot be loaded, or the batch is outside its profile.
        DependencyError: TensorRT is not installed, or graphviz is needed and not there.
    """
    from utils.trt.runner import Execution

    refuse_overwrite(_files(engine, True, draw), [engine], RENAME)
    if draw:
        graphviz()
    execution = Execution(engine, tensorrt_api.load_tensorrt(), tensorrt_api.use_device(device))
    try:
        shapes = {spec.name: execution.profiles[spec.name][1] for spec in execution.inputs}
        if batch is not None:
            shapes = {name: (batch, *shape[1:]) for name, shape in shapes.items()}
        execution.set_shapes(shapes)
        shape = "x".join(map(str, execution.buffers[execution.inputs[0].name].shape))
        layers = layers_of(execution)
        gpu = tensorrt_api.gpu(execution.device.index)
        title = f"{engine.name}: {shape}, {execution.api.name}, {gpu.name if gpu else 'no GPU'}"
        found = report(layers, engine, title, execution.note.precision, draw)
        if found.total_ms is None and not execution.streams:
            logger.info("no times: %s measures no layers", execution.api.name)
        elif found.total_ms is None:
            logger.info(
                "no times: this engine has auxiliary streams (%d), and %s measured no layer of it; an engine built "
                "with --max-aux-streams 0 shows them", execution.streams, execution.api.name,
            )  # fmt: skip
        return found
    finally:
        execution.close()


def look_at_record(record: Path, *, draw: bool = False) -> LayerSummary:
    """The same for `ENGINE.layers.json`, and for the inspector's JSON as trtexec's `--exportLayerInfo` writes it.

    The latter has no times, and `layers.json` is written for it.

    Raises:
        InputError: it is no such file.
    """
    content = read_text(record, "expected the inspector's JSON", errors="replace")  # 8.6 writes no UTF-8
    saved = content.lstrip().startswith("[")
    try:
        layers = layers_from_json(content) if saved else parse_layers(content)
    except QatError as error:
        raise InputError(f"{record}: {error}") from error
    name = record.name.removesuffix(".json").removesuffix(".layers")
    refuse_overwrite(_files(record.with_name(f"{name}.json"), not saved, draw), [record], RENAME)
    precision = EngineNote.load(record.with_name(f"{name}.engine")).precision
    return report(layers, record.with_name(f"{name}.json"), record.name, precision, draw, written=saved)


def report(
    layers: list[Layer], file: Path, title: str, precision: str, draw: bool, written: bool = False
) -> LayerSummary:
    """Log the report, and write the layers (unless they are `written`) and the image beside `file`."""
    summary = summarize(layers)
    logger.info("%s", "\n".join(report_lines(summary, title, precision)))
    files = _files(file, not written, draw)
    if not written:
        write_text(file.with_suffix(".layers.json"), layers_json(layers))
    if draw:
        draw_layers(layers, title, file.with_suffix(".svg"))
    if files:
        logger.info("layers: %s", ", ".join(map(str, files)))
    return summary


def _files(file: Path, layers: bool, draw: bool) -> list[Path]:
    """What `report` writes."""
    return [file.with_suffix(".layers.json")] * layers + [file.with_suffix(".svg")] * draw
