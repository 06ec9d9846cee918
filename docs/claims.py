#!/usr/bin/env python3
"""Print the numbers about accuracy and latency that README and docs/ quote, from the files in benchmarks/results/.

    python docs/claims.py                  all sections
    python docs/claims.py engines rates    some of them

`docs/measured.py` names the files. What is left out of a mean is named beside it. PTQ is calibrated by percentile
99.999 unless a line says otherwise. Agreement is 1 for a model with itself.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # where utils/ and docs/ lie

from docs.claims_cpu import all_cells_section, cpu_section, peers_section, simulation_section
from docs.claims_engines import forms_section, latency_section, streams_section, transfers_section
from docs.claims_steps import long_section, rates_section, stop_section
from docs.measured import (
    DOUBTFUL,
    FAILS_IN_FP32,
    FOLDER,
    IMAGES,
    LAST_CONVOLUTIONS,
    ON_A_CPU,
    PHOTOGRAPHS,
    QAT_STEPS,
    REPORTS,
    SIZES,
    TEN_DETECTORS,
    UNSEEN,
    USUAL_STEPS,
    Result,
    by_default,
    by_training,
    default_qat,
    deployed_engines,
    detectors,
    difference_of_runs,
    list_of_networks,
    load,
    mean,
    mean_and_lowest,
    mean_with_error,
    over_trainings,
    paired_runs,
    read_results,
    select,
    with_error,
)
from utils import cli
from utils.core.errors import InputError
from utils.core.options import Options, option
from utils.core.text import markdown_table

METHODS = {"99.999 %": "PTQ", "99.99 %": "PTQ 99.99", "mse": "PTQ mse", "max": "PTQ max"}
LARGE_LOSS = 0.004  # of AP, by PTQ


# Sections


def engines_section(results: list[Result]) -> list[str]:
    """Compare the INT8 engines after QAT, all that were built, with FP32."""
    engines = deployed_engines(results)
    files = [PHOTOGRAPHS, QAT_STEPS, *REPORTS]
    of_detectors = sorted(detectors(engines), key=lambda one: (files.index(one.file), SIZES.index(one.network[-1])))
    measured = [images for images in IMAGES if any(engine.images == images for engine in engines)]
    lines = [engines_line(images, [one for one in of_detectors if one.images == images]) for images in measured]
    value, error = mean_with_error(of_detectors)
    lines[-1] = [f"mean of these {len(of_detectors)}", "", f"{value:+.4f}", f"{error:.4f}"]
    lines.append(engines_line("nuclei", [engine for engine in engines if engine.has_masks]))
    titles = ["photographs", "models", "AP of the INT8 engine minus FP32, each", "±"]
    sentences = [bound_of_mean(of_detectors, "all files")]
    sentences.append(bound_of_mean([engine for engine in of_detectors if engine.file == PHOTOGRAPHS], PHOTOGRAPHS))
    bounds = []
    for engine in of_detectors:
        if engine.error is not None:
            bounds.append(f"{engine.name} ({engine.file}) {engine.value - engine.width * engine.error:+.4f}")
    sentences.append("Lower ends of the 95 % intervals: " + "; ".join(bounds) + ".")
    return [*markdown_table(titles, lines, titles[:3]), "", *sentences]


def engines_line(images: str, engines: Sequence[Result]) -> list[str]:
    """Return the cells of one set of images: models, differences, the range of their standard errors."""
    if not engines:
        return []
    networks = [engine.network for engine in engines]
    names = ", ".join(networks) if engines[0].has_masks else list_of_networks(networks)
    errors = sorted({f"{engine.error:.4f}" for engine in engines})
    limits = " to ".join(dict.fromkeys([errors[0], errors[-1]]))
    differences = ", ".join(f"{engine.value:+.4f}" for engine in engines)
    masks = ", boxes" if engines[0].has_masks else ""
    return [f"{images}, {IMAGES[images]} images{masks}", names, differences, limits]


def bound_of_mean(engines: Sequence[Result], files: str) -> str:
    """Return a sentence with the mean of engines and what it loses at most."""
    value, error = mean_with_error(engines)
    return (
        f"Mean of {len(engines)} detectors of {files}: {with_error(value, error)}, "
        f"so that it loses at most {2 * error - value:.4f} (95 %)."
    )


def unseen_section(results: list[Result]) -> list[str]:
    """List PTQ and QAT by all defaults on the three sets that the defaults had not seen, seed 57."""
    titles = ["model, set", "FP32", "PTQ − FP32", "QAT − FP32", "agreement, PTQ → QAT", "calibrated by"]
    lines: list[list[str]] = []
    of_state: dict[str, list[Result]] = {"PTQ": [], "QAT": []}
    unseen = [result for result in results if result.images in UNSEEN and result.seed == 57]
    for training in by_training(unseen):
        ptq, qat = select(training, "PTQ")[0], default_qat(training)[0]
        differences = [with_error(run.value, run.error) for run in (ptq, qat)]
        agreements = f"{ptq.agreement:.3f} → {qat.agreement:.3f}"
        lines.append([ptq.name, f"{ptq.fp32:.4f}", *differences, agreements, ptq.row["calibration"]])
        of_state["PTQ"].append(ptq)
        of_state["QAT"].append(qat)
    sentences = []
    for state, runs in of_state.items():
        sentences.append(bound_of_mean(runs, f"three unseen sets after {state}"))
        sound = [run for run in runs if run.name not in DOUBTFUL]
        sentences.append(bound_of_mean(sound, f"three unseen sets after {state}, without {' and '.join(DOUBTFUL)}"))
    return [*markdown_table(titles, lines, [titles[0], titles[-1]]), "", *sentences]


def last_convolutions_section(results: list[Result]) -> list[str]:
    """Compare `head: last-conv-float` with the default, on the ten detectors of detectors-h200.json."""
    titles = ["model, set (seeds)", "agreement, PTQ", "agreement, QAT", "AP, PTQ", "AP, QAT"]
    lines: list[list[str]] = []
    columns: list[list[float]] = [[], [], [], []]
    sets: list[str] = []
    for training in by_training(result for result in results if result.file == TEN_DETECTORS):
        cells: list[str] = []
        defaults = [select(training, "PTQ"), default_qat(training)]
        pairs = []
        for state, default in zip(("PTQ", "QAT"), defaults, strict=True):
            pairs.append(paired_runs(select(training, f"{state}{LAST_CONVOLUTIONS}"), default))
        for score in ("agreement", "ap"):
            for runs in pairs:
                value, error = difference_of_runs(runs, score)
                columns[len(cells)].append(value)
                cells.append(with_error(value, error))
        sets.append(training[0].images)
        lines.append([f"{training[0].name} ({len(pairs[0])})", *cells])
    sentences = []
    for title, values in zip(titles[1:], columns, strict=True):
        of_set: dict[str, list[float]] = {}
        for value, images in zip(values, sets, strict=True):
            of_set.setdefault(images, []).append(value)
        of_sets = [mean(of_images) for of_images in of_set.values()]
        sentences.append(f"- {title}, {len(values)} detectors: {over_trainings(values)}")
        sentences.append(f"- {title}, {len(of_sets)} sets: {over_trainings(of_sets)}")
    return [*markdown_table(titles, lines, titles[:1]), "", *sentences]


def trainings_section(results: list[Result]) -> list[str]:
    """List PTQ, and QAT by default, of every training of a detector, as means over seeds."""
    titles = ["model, set", "FP32", "PTQ − FP32", "QAT − FP32", "QAT − PTQ", "agreement, PTQ → QAT", "file"]
    lines: list[list[str]] = []
    losses: list[float] = []
    gains: list[float] = []
    agreements: list[float] = []
    sound: tuple[list[float], list[float]] = [], []
    for training in by_training(detectors(results)):
        ptq, qat = select(training, "PTQ"), default_qat(training)
        lines.append(training_line(ptq, qat))
        if ptq[0].file == FAILS_IN_FP32:
            continue
        losses.append(mean(run.value for run in ptq))
        if qat:
            gains.append(mean(run.value for run in qat) - losses[-1])
            agreements.append(mean(run.agreement for run in qat) - mean(run.agreement for run in ptq))
        if ptq[0].name not in DOUBTFUL:
            sound[0].append(losses[-1])
            sound[1].extend(gains[-1:] if qat else [])
    small = sum(1 for loss in losses if loss >= -LARGE_LOSS)
    means = [
        f"Without {FAILS_IN_FP32}, whose FP32 model fails on some images:",
        f"- PTQ − FP32 {over_trainings(losses)}; at least {-LARGE_LOSS} in {small}",
        f"- QAT − PTQ {over_trainings(gains)}",
        f"- agreement of QAT minus that of PTQ {over_trainings(agreements)}",
        f"Without {' and '.join(DOUBTFUL)}, too:",
        f"- PTQ minus FP32 {over_trainings(sound[0])}",
        f"- QAT minus PTQ {over_trainings(sound[1])}",
    ]
    return [*markdown_table(titles, lines, [titles[0], titles[-1]]), "", *means, "", *large_losses(results)]


def training_line(ptq: Sequence[Result], qat: Sequence[Result]) -> list[str]:
    """Return the cells of one training; the numbers in brackets are those of seeds."""
    loss = mean(run.value for run in ptq)
    files = "; ".join(dict.fromkeys(run.file for run in [*ptq, *qat]))
    line = [ptq[0].name, f"{ptq[0].fp32:.4f}", f"{loss:+.4f} ({len(ptq)})"]
    if not qat:
        return [*line, "–", "–", "–", files]
    after = mean(run.value for run in qat)
    agreements = [f"{mean(run.agreement for run in runs):.3f}" for runs in (ptq, qat)]
    return [*line, f"{after:+.4f} ({len(qat)})", f"{after - loss:+.4f}", " → ".join(agreements), files]


def large_losses(results: list[Result]) -> Iterator[str]:
    """Yield, for each training where PTQ loses much in the mean, every seed's difference after PTQ and after QAT."""
    yield f"PTQ → QAT of each seed, where PTQ loses more than {LARGE_LOSS} in the mean:"
    for training in by_training(detectors(results)):
        ptq = select(training, "PTQ")
        after = {run.seed: f"{run.value:+.4f}" for run in default_qat(training)}
        if mean(run.value for run in ptq) < -LARGE_LOSS:
            pairs = [f"{run.value:+.4f} → {after.get(run.seed, 'not measured')}" for run in ptq]
            yield f"- {ptq[0].name} ({ptq[0].file}): {'; '.join(pairs)}"


def photographs_section(results: list[Result]) -> list[str]:
    """List the ten models of photographs-h200.json with the default calibration of that day, seed 57."""
    titles = ["model, set", "FP32", "PTQ", "QAT", "INT8 engine", "FP16 engine"]
    lines = []
    for training in by_training(result for result in results if result.file == PHOTOGRAPHS and result.seed == 57):
        states = [by_default(training, state)[0] for state in ("PTQ", USUAL_STEPS, "INT8 engine", "FP16 engine")]
        first = states[0]
        cells = [f"{with_error(state.value, state.error)} ({state.agreement:.3f})" for state in states]
        lines.append([first.name + (": boxes" if first.has_masks else ""), f"{first.fp32:.4f}", *cells])
        if first.has_masks:
            fp32 = first.row["mask_ap"] - first.row["mask_to_float"]
            lines.append(["masks", f"{fp32:.4f}", *(state.difference("mask") for state in states)])
    return markdown_table(titles, lines, titles)


def thresholds_section(results: list[Result]) -> list[str]:
    """Compare recall and precision of INT8 engines with FP32's, at FP32's threshold of best F1."""
    titles = ["model, set", "threshold of best F1, FP32 → INT8", "recall", "precision", "missed, FP32 → INT8, of"]
    titles.append("AP by size, FP32 → INT8")
    rows = load(FOLDER / f"{PHOTOGRAPHS}.json")["rows"]
    fp32 = {row["network"]: row for row in rows if row["state"] == "float"}
    of_photographs = [result for result in results if result.file == PHOTOGRAPHS and result.seed == 57]
    lines, changed = [], []
    for engine in deployed_engines(of_photographs):
        lines.append(threshold_line(engine, fp32[engine.row["network"]]))
        for score in ("recall", "precision"):
            if engine.is_changed(score):
                changed.append(f"{score} of the engine, {engine.name}: {engine.difference(score)}")
    for training in by_training(of_photographs):
        ptq = by_default(training, "PTQ")[0]
        if ptq.is_changed("recall"):
            changed.append(f"recall after PTQ, {ptq.name}: {ptq.difference('recall')}")
    return [*markdown_table(titles, lines, titles), "", "Outside of their 95 % intervals: " + "; ".join(changed) + "."]


def threshold_line(engine: Result, fp32: dict[str, Any]) -> list[str]:
    """Return the cells of one engine."""
    row = engine.row
    missed = [f"{entry['objects'] - entry['found']:,}" for entry in (fp32, row)]
    sizes = []
    for size, ap in row.get("ap_by_size", {}).items():
        sizes.append(f"{size} {fp32['ap_by_size'][size]:.3f} → {ap:.3f}")
    return [
        engine.name,
        f"{fp32['best_threshold']:.3f} → {row['best_threshold']:.3f}",
        engine.difference("recall"),
        engine.difference("precision"),
        f"{' → '.join(missed)} of {row['objects']:,}",
        ", ".join(sizes),
    ]


def methods_section(results: list[Result]) -> list[str]:
    """Compare calibration methods on all trainings that have agreement of all four, seed 57."""
    methods: dict[str, list[Result]] = {}
    names: list[str] = []
    for training in by_training(result for result in detectors(results) if result.seed == 57):
        of_method = {method: select(training, state) for method, state in METHODS.items()}
        first = training[0]
        if first.file == FAILS_IN_FP32 or math.isnan(first.agreement) or not all(of_method.values()):
            continue
        names.append(f"{first.name} ({first.file})")
        of_method["auto"] = select(training, "PTQ auto") or by_default(training, "PTQ")
        for method, runs in of_method.items():
            methods.setdefault(method, []).append(runs[0])
    ap = [mean_and_lowest([run.value for run in runs], "+.4f") for runs in methods.values()]
    agreement = [mean_and_lowest([run.agreement for run in runs], ".3f") for runs in methods.values()]
    titles = ["", *methods]
    lines = [["AP minus FP32's, mean (lowest)", *ap], ["agreement, mean (lowest)", *agreement]]
    return [
        *markdown_table(titles, lines, titles),
        "",
        f"{len(names)} detectors: {'; '.join(names)}.",
        "",
        "Left out, since the FP32 model fails or no agreement was measured:",
        *left_out_of_methods(results),
        "",
        "Chosen by auto, by the smallest loss and without the two standard errors of today:",
        *(f"- {choice}" for choice in choices_of_auto(results)),
    ]


def left_out_of_methods(results: list[Result]) -> Iterator[str]:
    """Yield the methods of the two trainings that the table lacks."""
    for file in (FAILS_IN_FP32, "cells-yolov9-t"):
        runs = [result for result in results if result.file == file and result.state.startswith("PTQ")]
        states = [f"{run.state} {with_error(run.value, run.error)}" for run in runs]
        yield f"- {runs[0].name} ({file}): {', '.join(states)}"


def choices_of_auto(results: list[Result]) -> Iterator[str]:
    """Yield, of each model, the method that `auto` chose."""
    for row in load(FOLDER / f"{PHOTOGRAPHS}.json")["rows"]:
        if "chose" in row:
            yield f"{row['network'].rpartition(', ')[0]} ({PHOTOGRAPHS}): {row['chose']}"
    for auto in (result for result in results if result.state == "PTQ auto" and result.file != PHOTOGRAPHS):
        others = [result for result in results if (result.file, result.training) == (auto.file, auto.training)]
        equal = [name for name, state in METHODS.items() if select(others, state)[0].value == auto.value]
        yield f"{auto.name} ({auto.file}): {equal[0]}"


def spread_section(results: list[Result]) -> list[str]:
    """List what ± leaves out: how much PTQ changes with the seed of the calibration, and with the machine."""
    lines = []
    for training in by_training(results):
        ptq = select(training, "PTQ")
        name, of_seed = f"{ptq[0].name} ({ptq[0].file})", {run.seed: run.value for run in ptq}
        if len(of_seed) > 1:
            largest = max(of_seed.values()) - min(of_seed.values())
            lines.append(f"- {name}: {len(of_seed)} seeds differ by up to {largest:.4f} AP")
        for run in select(training, "PTQ" + ON_A_CPU):
            lines.append(f"- {name}, seed {run.seed}: {of_seed[run.seed]:+.4f} on an H200, {run.value:+.4f} on a CPU")
    return lines


def durations_section(_: list[Result]) -> list[str]:
    """List how long `qat.py quantize` took for yolov9-s on litter (1,800 and 670 images of 416×416)."""
    seconds: dict[str, list[float]] = {"--qat never": [], "450 steps of QAT": []}
    for name, step in load(FOLDER / "garbage-h100.json")["yolov9-s"]["steps"].items():
        if name.startswith("PTQ"):
            seconds["--qat never"].append(step["seconds"])
        elif " x 450" in name:
            seconds["450 steps of QAT"].append(step["seconds"])
    return [f"- {what}: {min(some):.0f} to {max(some):.0f} s, {len(some)} runs, H100" for what, some in seconds.items()]


SECTIONS: dict[str, Callable[[list[Result]], list[str]]] = {
    "engines": engines_section,
    "unseen": unseen_section,
    "trainings": trainings_section,
    "photographs": photographs_section,
    "thresholds": thresholds_section,
    "methods": methods_section,
    "rates": rates_section,
    "last-convolutions": last_convolutions_section,
    "long": long_section,
    "stop": stop_section,
    "spread": spread_section,
    "durations": durations_section,
    "latency": latency_section,
    "transfers": transfers_section,
    "streams": streams_section,
    "forms": forms_section,
    "cpu": cpu_section,
    "simulation": simulation_section,
    "all-cells": all_cells_section,
    "cpu-peers": peers_section,
}


class ClaimsOptions(Options):
    """What is printed."""

    sections: list[str] = option([], f"of {', '.join(SECTIONS)} (default: all)", positional=True, nargs="*")


def run(options: ClaimsOptions) -> None:
    """Print the sections."""
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        raise InputError(f"{unknown[0]} is not a section; expected one of {', '.join(SECTIONS)}")
    results = read_results()
    for name in options.sections or SECTIONS:
        print(f"## {name}", "", *SECTIONS[name](results), "", sep="\n")


if __name__ == "__main__":
    sys.exit(cli.run_program("claims.py", (ClaimsOptions, run), about=__doc__))
