#!/usr/bin/env python3
"""Judge a placement of quantizers by engines: FP16, INT8 in convolutions only, and ours, timed in turns.

    python benchmarks/placement.py models/detect/gelan-c.yaml --imgsz 640 --batch-size 1 8 -- --optimization-level 2

MODEL is one of upstream's YAMLs (random weights: the speed is the same), or an FP32 checkpoint. YOLOV9_CHECKOUT, or
--checkout, is a patched checkout, whose programs do the work. A step that has ended is not run again: after a change of
rules.py give another --output. Options behind -- are for benchmark_trt.py. With --device cpu, ONNX
Runtime times the files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # where benchmarks/ and utils/ lie

from benchmarks import steps
from benchmarks.steps import ENGINE_PYTHON, Setup, input_file
from utils.core.errors import InputError
from utils.core.files import atomic_path
from utils.core.options import BatchSize, option
from utils.core.run_folder import held
from utils.core.text import markdown_table
from utils.jobs.pipeline.steps import RunStep, StepError, Words
from utils.onnx_graph.qdq_view import QdqGraph
from utils.onnx_graph.view import drop_unused, pure, set_nodes

CALIBRATION_SIZE = "320"  # pixels: only the speed of the engines is looked at, not what they detect
VARIANTS = ("fp16", "int8-convs", "int8")
WHOLE = "--no-int8-rewrites"  # of the file that int8-convs is made of


class PlacementOptions(steps.StudyOptions):
    """The comparison of placements."""

    models: list[str] = option(..., "YAML of upstream's models/, or FP32 checkpoint", positional=True, metavar="MODEL")
    output: str = option("runs/placement", "where all files go", metavar="DIR")
    batch_size: list[BatchSize] = option([1, 8], "that are timed", metavar="N")
    data: str = option("", "dataset's YAML to calibrate on (default: noise)", metavar="FILE")
    recipe: str = option("", "of both INT8 variants", metavar="FILE")


@pure
def convolutions_only(model: onnx.ModelProto) -> None:
    """The placement that quantizer libraries give by default, of a file with whole convolutions (--no-int8-rewrites).

    Each convolution quantizes its own input, and nothing else is quantized. No scale is shared: each is the old one and
    a little more, as if each had been calibrated by itself.
    """
    graph = QdqGraph(model)

    def quantize_of(name: str) -> onnx.NodeProto | None:
        """The QuantizeLinear of an activation that `name` is the DequantizeLinear of."""
        node = graph.dequantizer(name)
        before = graph.producer(node.input[0]) if node is not None else None
        return before if before is not None and not graph.is_constant(before.input[0]) else None

    def unquantized(name: str) -> str:
        quantize = quantize_of(name)
        return name if quantize is None else unquantized(quantize.input[0])

    nodes: list[onnx.NodeProto] = []
    for node in graph.nodes:
        for index, name in enumerate(node.input):
            quantize = quantize_of(name)
            if quantize is None:
                continue
            source = unquantized(name)
            if node.op_type != "Conv":
                node.input[index] = source
                continue
            scale = np.asarray(graph.array(quantize.input[1]))
            own, stem = np.asarray(scale * (1 + len(nodes) * 1e-5), scale.dtype), f"{node.name}/own_input"
            model.graph.initializer.append(numpy_helper.from_array(own, f"{stem}_scale"))
            shared = [f"{stem}_scale", *quantize.input[2:]]
            nodes.append(helper.make_node("QuantizeLinear", [source, *shared], [f"{stem}_q"], f"{stem}_q"))
            nodes.append(helper.make_node("DequantizeLinear", [f"{stem}_q", *shared], [f"{stem}_dq"], f"{stem}_dq"))
            node.input[index] = f"{stem}_dq"
        nodes.append(node)
    del model.graph.value_info[:]
    set_nodes(model, nodes)
    drop_unused(model)


def model_steps(model: Path, options: PlacementOptions, setup: Setup, folder: Path) -> Iterator[RunStep]:
    """Files of FP16, of ours and of convolutions only; their times as engines, and what each engine is made of."""
    weights = model
    if model.suffix != ".pt":
        weights = folder / "float.pt"
        yield RunStep("random-weights", [ROOT / "benchmarks/random_weights.py", model, folder], weights)
    data = input_file(options.data or str(folder / "noise/data.yaml"), "--data")
    command: Words = ["qat.py", "quantize", "--weights", weights, "--data", data, *setup.device]
    command += ["--imgsz", CALIBRATION_SIZE, "--batch-size", "1", "--workers", "0", "--calib-images", "1"]
    command += ["--calib-method", "max", "--ptq-only", "--no-eval-origin", "--no-eval-ptq", "--project", folder]
    command += ["--name", "ptq", "--exist-ok"]
    command += ["--recipe", input_file(options.recipe, "--recipe")] if options.recipe else []
    quantized = folder / f"ptq/weights/ptq_{weights.stem}.pt"
    yield RunStep("ptq", command, quantized)
    fp16, convolutions, ours = (folder / f"{folder.name}-{variant}.onnx" for variant in VARIANTS)
    whole = folder / "whole.onnx"
    for source, file, further in ((weights, fp16, []), (quantized, ours, []), (quantized, whole, [WHOLE])):
        command = ["export_qat.py", "--weights", source, "--imgsz", str(options.imgsz), "--include", "onnx", *further]
        command += ["--simplify", "--dynamic", "batch", "--typing", setup.typing, "--check", "0", *setup.device]
        yield RunStep(f"export-{file.stem}", [*command, "--output", file], file)
    if not convolutions.exists():
        with atomic_path(convolutions) as temporary:
            onnx.save(convolutions_only(onnx.load(whole)), temporary)
    interpreter = sys.executable if setup.no_engines else ENGINE_PYTHON
    streams = [] if setup.no_engines else ["--max-aux-streams", "0"]  # TensorRT 8.6 times layers only so
    command = ["scripts/benchmark_trt.py", convolutions, ours, "--baseline", fp16, *streams, *setup.timing]
    command += ["--batch-size", *map(str, options.batch_size), "--project", folder, "--name", "times", "--exist-ok"]
    yield RunStep("times", command, folder / "times/benchmark.json", interpreter=interpreter)
    batches = () if setup.no_engines else options.batch_size
    for batch, file in product(batches, (fp16, convolutions, ours)):
        engine = file.with_name(f"{file.stem}-b{batch}.engine")
        command = ["scripts/inspect_engine.py", engine]
        output = engine.with_suffix(".layers.json")
        yield RunStep(f"layers-{engine.stem}", command, output, interpreter=ENGINE_PYTHON)


def layer_cells(path: Path) -> list[str]:
    """`ENGINE.layers.json` → layers in INT8, of those that compute, and copies; with shares of the time."""
    if not path.is_file():
        return ["", ""]
    layers = json.loads(path.read_text(encoding="utf-8"))
    total = sum(layer["ms"] or 0 for layer in layers)
    compute = [layer for layer in layers if layer["kind"] == "compute"]
    int8 = [layer for layer in compute if layer["precision"] == "INT8"]
    copies = [layer for layer in layers if layer["kind"] != "compute"]
    of_int8, of_copies = (
        f", {sum(layer['ms'] or 0 for layer in some) / total:.0%}" if total else "" for some in (int8, copies)
    )
    return [f"{len(int8)} of {len(compute)}{of_int8}", f"{len(copies)}{of_copies}"]


def model_rows(folder: Path) -> tuple[str, list[list[str]]]:
    """Return the machine, in words, and a row for each batch size and variant: milliseconds, FP16's share, layers."""
    measured_on, timed = steps.read_times(folder / "times/benchmark.json")
    found = {(row["batch"], row["model"].removeprefix(f"{folder.name}-")): row for row in timed}
    rows = []
    for batch, variant in product(sorted({batch for batch, _ in found}), VARIANTS):
        row, base = found[batch, variant], found[batch, "fp16"]["ms"]
        if row["ms"] is None:
            rows.append([folder.name, str(batch), variant, row["error"], *[""] * 4])
            continue
        ratio = f"{base / row['ms']:.2f}" if base else ""
        cells = layer_cells(folder / f"{row['model']}-b{batch}.layers.json")
        speed = [f"{row['ms']:.3f}", ratio, f"{row['images_per_second']:,.0f}"]
        rows.append([folder.name, str(batch), variant, *speed, *cells])
    return measured_on, rows


def run(options: PlacementOptions, timing: list[str]) -> int:
    """Compare the variants of every model; 1 if a step failed, after the others."""
    setup = Setup.of(options, "data/coco.yaml", timing)
    if setup.no_engines and options.device != "cpu":
        raise InputError(f"no engines can be built: {setup.no_engines}; --device cpu times the files by ONNX Runtime")
    near = {model: setup.checkout / model for model in options.models}  # where upstream's YAMLs lie
    models = [input_file(str(one if one.is_file() else model), "MODEL") for model, one in near.items()]
    if len({model.stem for model in models}) < len(models):
        raise InputError("two models have the same name; rename one, files are named after them")
    rows: list[list[str]] = []
    places: dict[str, None] = {}
    for model in models:
        folder = Path(options.output).resolve() / model.stem
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with held(folder):
                for step in model_steps(model, options, setup, folder):
                    setup.run(step, folder)
        except StepError as error:
            print(f"error: {error}", flush=True)
            continue
        measured_on, more = model_rows(folder)
        rows += more
        places[measured_on] = None
    heads = ["model", "batch", "variant", "ms", "FP16 takes as long", "images/s", "INT8 layers, of the time", "copies"]
    print("", *markdown_table(heads, rows, heads[2:3]), "", *places, sep="\n")
    return 0 if len({row[0] for row in rows}) == len(models) else 1


if __name__ == "__main__":
    sys.exit(steps.run_benchmark("placement.py", PlacementOptions, run, __doc__))
