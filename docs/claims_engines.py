"""The sections of docs/claims.py about latency of engines, from the files with times of engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from docs.measured import ENGINES, FOLDER, LATENCY, STREAMS, Result, load, mean
from utils.core.text import markdown_table

PLAIN = ("INT8", "FP16")  # forms of engines without a change of the recipe
WITH_NMS = "INT8, uint8 images, NMS inside"
NETWORKS = tuple(f"yolov9-{size}" for size in "tsmce")
BATCHES = (1, 8)


class Gain(NamedTuple):
    """Milliseconds of the FP16 and the INT8 engine of one model and batch size, timed in turns."""

    fp16: float
    int8: float
    streams: int  # auxiliary ones, of both engines

    @property
    def times(self) -> str:
        """The factor between both, as text."""
        return f"{self.fp16 / self.int8:.2f}×"

    def __str__(self) -> str:
        mark = "" if self.streams else " †"  # README and docs/benchmarks.md say what it means
        return f"{self.fp16:.2f} → {self.int8:.2f} ({self.times}){mark}"


def gains() -> dict[tuple[str, int], Gain]:
    """Return the gain of each model and batch size: with two auxiliary streams where that was measured."""
    measured: dict[tuple[str, int], Gain] = {}
    for network, content in load(FOLDER / f"{LATENCY}.json").items():
        for row in content["rows"] if network in NETWORKS else []:
            if row["precision"] == "INT8":
                fp16 = latency_of(content["rows"], "FP16", row["batch"])
                measured[network, row["batch"]] = Gain(fp16, row["figures"]["latency"]["median"], 0)
    medians: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for sitting in load(FOLDER / f"{ENGINES}.json")["sittings"]:
        by_default = {row["form"]: row["ms"]["median"] for row in sitting["rows"] if row["streams"]}
        if by_default.keys() >= set(PLAIN):
            pair = (by_default["FP16"], by_default["INT8"])
            medians.setdefault((sitting["network"], sitting["batch"]), []).append(pair)
    for key, pairs in medians.items():
        fp16, int8 = (mean(values) for values in zip(*pairs, strict=True))
        measured[key] = Gain(fp16, int8, 2)
    return measured


def latency_of(rows: Iterable[Mapping[str, Any]], precision: str, batch: int) -> float:
    """Return the median milliseconds of a precision and batch size in rows of benchmark_trt.py."""
    (latency,) = (row["figures"]["latency"] for row in rows if (row["precision"], row["batch"]) == (precision, batch))
    return float(latency["median"])


def latency_section(_: list[Result]) -> list[str]:
    """Compare the latency of FP16 and INT8 engines, of each model and batch size."""
    measured = gains()
    lines = [[network, *(str(measured.get((network, batch), "–")) for batch in BATCHES)] for network in NETWORKS]
    titles = ["ms, FP16 → INT8", *(f"batch size {batch}" for batch in BATCHES)]
    return markdown_table(titles, lines, titles)


def transfers_section(_: list[Result]) -> list[str]:
    """Compare INT8 engines alone with those whose images are uploaded and whose results are downloaded, too."""
    lines = []
    for sitting in load(FOLDER / f"{ENGINES}.json")["sittings"]:
        for row in sitting["rows"]:
            if row["form"] != "FP16" and "ms_with_transfers" in row:
                images = "uint8, NMS inside" if row["form"] == WITH_NMS else "FP32"
                milliseconds = [row["ms"]["median"], row["ms_with_transfers"]["median"]]
                milliseconds.append(1000 / row["queries_per_second_with_transfers"])
                name = f"{sitting['network']}, {sitting['batch']}"
                lines.append([name, images, *(f"{value:.2f}" for value in milliseconds)])
    titles = ["model, batch size", "images", "engine alone, ms", "with transfers, ms", "ms from query to query"]
    return markdown_table(titles, lines, titles[:2])


class EnginePair(NamedTuple):
    """Two engines of one build, timed in one sitting: rows of streams-h200.json or engines-h200.json."""

    network: str
    batch: int
    base: Mapping[str, Any]
    changed: Mapping[str, Any]

    def percent(self, kind: str = "ms", statistic: str = "median") -> float:
        """How much more time the changed engine takes, in percent; `kind` is a key of rows."""
        before, after = (row[kind][statistic] for row in (self.base, self.changed))
        return 100 * (after / before - 1)


def streams_section(_: list[Result]) -> list[str]:
    """Compare engines with auxiliary streams to engines without, of each model, batch size and precision."""
    pairs = [pair for pair in engine_pairs() if pair.changed["form"] == pair.base["form"]]
    order = list(dict.fromkeys((*NETWORKS, *(pair.network for pair in pairs))))  # by size; others behind
    pairs.sort(key=lambda pair: (pair.changed["streams"], pair.batch, order.index(pair.network)))
    table = pairs_table(pairs, "precision", "ms, 0 streams", "ms, with streams", launches=True)
    return [*table, "", *streams_sentences(pairs)]


def streams_sentences(pairs: Iterable[EnginePair]) -> Iterator[str]:
    """Yield what the pairs of INT8 engines show together, with two streams and none."""
    of_int8 = [pair for pair in pairs if (pair.changed["form"], pair.changed["streams"]) == ("INT8", 2)]
    engines = {(pair.network, pair.batch): pair for pair in of_int8}
    percents = [-pair.percent() for pair in of_int8]
    less = f"{min(percents):.0f} to {max(percents):.0f} % less time"
    yield f"CUDA graphs: {len(engines)} INT8 engines of the default take {less}"
    launched = [pair for pair in of_int8 if "ms_without_graph" in pair.base]
    changes = [pair.percent("ms_without_graph") for pair in launched]
    slower = sum(1 for change in changes if change > 0)
    span = f"{min(changes):+.0f} to {max(changes):+.0f} %"
    yield f"without CUDA graphs: {slower} of {len(launched)} slower by the median, {span}"
    slower = sum(1 for pair in launched if pair.percent("ms_without_graph", "mean") > 0)
    yield f"without CUDA graphs: {slower} of {len(launched)} slower by the mean"
    ratios = [pair.changed["activation_memory"] / pair.base["activation_memory"] for pair in of_int8]
    yield f"memory for activations: {min(ratios):.1f} to {max(ratios):.1f} times as large"
    for name, batch in (("yolov9-c", 8), ("yolov9-t", 1)):
        sizes = [row["activation_memory"] / 2**20 for row in engines[name, batch][2:4]]
        yield f"{name}, {batch}: {sizes[0]:.0f} → {sizes[1]:.0f} MiB"


def forms_section(_: list[Result]) -> list[str]:
    """Compare INT8 engines whose recipes leave layers in FP16 with those of the default recipe."""
    pairs = [pair for pair in engine_pairs() if pair.changed["form"] != pair.base["form"]]
    return pairs_table(pairs, "recipe", "ms, default recipe", "ms, this recipe")


def engine_pairs() -> Iterator[EnginePair]:
    """Yield each engine with auxiliary streams or a changed recipe, and the engine it is compared with.

    Both were built with one timing cache and timed in one sitting. An engine with streams is compared with the same
    form without; an engine of another recipe with the INT8 engine of as many streams.
    """
    for sitting in (sitting for file in (STREAMS, ENGINES) for sitting in load(FOLDER / f"{file}.json")["sittings"]):
        plain = {(row["form"], row["streams"], row["build"]): row for row in sitting["rows"] if row["form"] in PLAIN}
        for row in sitting["rows"]:
            base = None
            if row["form"] in PLAIN and row["streams"]:
                base = plain.get((row["form"], 0, row["build"]))
            elif row["form"] not in (*PLAIN, WITH_NMS):
                base = plain["INT8", row["streams"], row["build"]]
            if base:
                yield EnginePair(sitting["network"], sitting["batch"], base, row)


def pairs_table(
    pairs: Iterable[EnginePair], form: str, before: str, after: str, *, launches: bool = False
) -> list[str]:
    """Return a table with a line for each model, batch size, and form and streams of the changed engine.

    `form`, `before` and `after` are the titles of its column of forms, and of both columns of milliseconds. With
    `launches` a further column has the change of time without CUDA graphs.
    """
    groups: dict[tuple[str, str, str], list[EnginePair]] = {}
    for pair in pairs:
        name = pair.changed["form"].removeprefix("INT8, ")
        key = (f"{pair.network}, {pair.batch}", name, str(pair.changed["streams"]))
        groups.setdefault(key, []).append(pair)
    titles = ["model, batch size", form, "streams", "builds", "timings", before, after, "change of time"]
    lines = [[*key, *cells_of(group)] for key, group in groups.items()]
    if launches:
        titles.append("without CUDA graphs")
        for line, group in zip(lines, groups.values(), strict=True):
            line.append(change_of(group, "ms_without_graph"))
    return markdown_table(titles, lines, titles[:2])


def cells_of(group: Sequence[EnginePair]) -> list[str]:
    """Return the numbers of builds and timings, mean medians in ms without and with the change, and differences."""
    builds = {pair.base["build"] for pair in group}
    before = mean([pair.base["ms"]["median"] for pair in group])
    after = mean([pair.changed["ms"]["median"] for pair in group])
    return [str(len(builds)), str(len(group)), f"{before:.3f}", f"{after:.3f}", change_of(group, "ms")]


def change_of(group: Iterable[EnginePair], kind: str) -> str:
    """Return how much more time the changed engines take, from the smallest to the largest; – without measurements."""
    measured = [pair for pair in group if kind in pair.base and kind in pair.changed]
    percents = sorted(round(pair.percent(kind), 1) + 0.0 for pair in measured)  # + 0.0: no -0.0
    if not percents:
        return "–"
    if percents[0] == percents[-1]:
        return f"{percents[0]:+.1f} %"
    return f"{percents[0]:+.1f} to {percents[-1]:+.1f} %"
