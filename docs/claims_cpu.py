"""The sections of docs/claims.py about INT8 on CPUs, from the files that benchmarks/cpu.py wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from docs.measured import FOLDER, Result, load, paired_error, with_error
from utils.core.text import markdown_table, plural

OURS = ("ours", "ours, activations with zero points")  # INT8 files in results of benchmarks/cpu.py
UNSIGNED = "ours, unsigned activations"  # a form of them that val_trt.py no longer runs on these processors


def cpu_section(_: list[Result]) -> list[str]:
    """Compare INT8 of this project on CPUs with FP32 and BF16, of each file of benchmarks/cpu.py."""

    def is_shown(row: dict[str, Any]) -> bool:
        """Whether a row is FP32 in OpenVINO, with any precision of its layers, or ours as val_trt.py runs it."""
        is_ours = row["file"] in OURS and row["rest"] == "FP32"
        return row["runtime"] == "OpenVINO" and (row["file"] == "FP32" or is_ours)

    return cpu_table(cpu_contents(), is_shown)


def peers_section(_: list[Result]) -> list[str]:
    """Compare INT8 of this project on CPUs with that of the peers, of each file of benchmarks/cpu.py that has peers."""
    compared = [content for content in cpu_contents() if any(is_of_peer(row) for row in content["rows"])]
    sentences = [sentence for content in compared for sentence in cpu_sentences(content)]
    return [*cpu_table(compared, is_compared), "", *sentences]


def is_compared(row: dict[str, Any]) -> bool:
    """Whether a row is shown beside the peers: with FP32 elsewhere, and of FP32 files the one that times refer to."""
    if row["rest"] != "FP32" or row["file"] == UNSIGNED:
        return False
    return row["file"] != "FP32" or row["runtime"] == "OpenVINO"


def cpu_contents() -> list[dict[str, Any]]:
    """The files of benchmarks/cpu.py, by name."""
    return [load(path) for path in sorted(FOLDER.glob("cpu-*.json"))]


def is_of_peer(row: dict[str, Any]) -> bool:
    """Whether a row is of a file that another project quantized."""
    return row["file"] not in ("FP32", UNSIGNED, *OURS)


def simulation_section(_: list[Result]) -> list[str]:
    """Compare AP of INT8 in OpenVINO, and of the simulation on a CPU, with that of the simulation on a GPU."""
    by_file: dict[str, dict[str, dict[str, Any]]] = {}
    for row in load(FOLDER / "openvino-simulation.json")["rows"]:
        by_file.setdefault(row["file"], {})[row["network"]] = row
    base = by_file.pop("simulation, PyTorch on the GPU")
    lines = []
    for file, rows in by_file.items():
        cells = []
        for network, simulated in base.items():
            row = rows[network]
            cells.append(with_error(row["ap"] - simulated["ap"], paired_error(row, simulated)))
        lines.append([file, *cells])
    titles = ["AP minus that of the simulation on a GPU", *base]
    return markdown_table(titles, lines, titles[:1])


def all_cells_section(_: list[Result]) -> list[str]:
    """Compare NNCF's most accurate file of gelan-t with ours on all images of cells."""
    _, nncf, avx2 = load(FOLDER / "openvino-nncf-cells.json")["rows"]
    ours = {
        row["file"]: row for row in load(FOLDER / "openvino-simulation.json")["rows"] if row["network"] == "gelan-t"
    }
    ours[avx2["file"]] = avx2
    lines = []
    for file, row in ours.items():
        difference = with_error(nncf["ap"] - row["ap"], paired_error(nncf, row))
        lines.append(f"{nncf['file']}, minus {file}: {difference}")
    return lines


def cpu_table(contents: list[dict[str, Any]], is_shown: Callable[[dict[str, Any]], bool]) -> list[str]:
    """A table of the rows to show, with milliseconds for each number of threads.

    Layers that are not in INT8 are in FP32 in all rows of INT8 that are shown.
    """
    threads = sorted({count for content in contents for row in content["rows"] for count in row["times"]}, key=int)
    titles = ["model", "FP32, BF16, or INT8 by", "AP − FP32", "agreement"]
    titles += [f"ms, {plural(int(count), 'thread')}" for count in threads]
    lines: list[list[str]] = []
    for content in contents:
        base, network = content["rows"][0], content["settings"]["network"]
        lines += [cpu_line(network, row, base, threads) for row in content["rows"] if is_shown(row)]
    return markdown_table(titles, lines, titles[:2])


def cpu_line(network: str, row: dict[str, Any], base: dict[str, Any], threads: Sequence[str]) -> list[str]:
    """Return the cells of a model in one runtime; `base` is FP32 in OpenVINO, which times are compared with."""
    accuracy = "not measured"
    if row is base and "ap" in row:
        accuracy = f"AP {row['ap']:.4f}"
    elif "ap" in row:
        accuracy = with_error(row["ap"] - base["ap"], paired_error(row, base))
    agreement = "–" if row.get("agreement") is None else f"{row['agreement']:.4f}"
    times = []
    for count in threads:
        if count not in row["times"]:
            times.append("not measured")
            continue
        median, of_base = row["times"][count]["median"], base["times"][count]["median"]
        times.append(f"{median:.1f} ({of_base / median:.2f}×)")
    by = row["rest"] if row["file"] == "FP32" else row["file"]
    if row["runtime"] != "OpenVINO":
        by += f" ({row['runtime']})"
    return [network, by, accuracy, agreement, *times]


def cpu_sentences(content: dict[str, Any]) -> Iterator[str]:
    """Yield what a file of benchmarks/cpu.py was measured on, and AP of ours minus that of each peer."""
    settings, machine, software = content["settings"], content["machine"], content["software"]
    size = "×".join(str(side) for side in settings["imgsz"])
    used = [f"{name} {software[name]}" for name in ("openvino", "nncf", "onnxruntime") if name in software]
    instructions = " ".join(machine["instructions"])
    yield (
        f"{settings['network']}, {size}: {content.get('images', 0)} images, {machine['openvino']} ({instructions}), "
        f"{', '.join(used)}, {content['date']}; medians, batch size 1, all in turns."
    )
    evaluated = [row for row in content["rows"] if "ap" in row]
    for ours in evaluated:
        if ours["file"] not in OURS:
            continue
        for row in evaluated:
            if is_of_peer(row) and row["rest"] == ours["rest"]:
                difference = with_error(ours["ap"] - row["ap"], paired_error(ours, row))
                yield f"- {ours['file']}, minus {row['file']}, {ours['rest']} elsewhere: {difference}"
