"""The sections of docs/claims.py about latency of engines, from the files with times of engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from docs.measured import FOLDER, LATENCY, STREAMS, Result, load, mean
from utils.core.text import markdown_table

PLAIN = ("INT8", "FP16")  # forms of engines without a change of the recipe


def latency_section(_: list[Result]) -> list[str]:
    """Compare the latency of FP16 and INT8 engines, of each model and batch size."""
    networks = {name: content for name, content in load(FOLDER / f"{LATENCY}.json").items() if "yolov9-" in name}
    first = next(iter(networks.values()))
    batches = list(dict.fromkeys(row["batch"] for row in first["rows"]))
    lines = []
    for network, content in networks.items():
        cells = []
        for batch in batches:
            of_batch = [row for row in content["rows"] if row["batch"] == batch]
            medians = {row["precision"]: row["figures"]["latency"]["median"] for row in of_batch}
            fp16, int8 = medians["FP16"], medians["INT8"]
            cells.append(f"{fp16:.2f} → {int8:.2f} ms ({fp16 / int8:.2f}×)")
        lines.append([network, *cells])
    titles = ["FP16 → INT8", *(f"batch size {batch}" for batch in batches)]
    return markdown_table(titles, lines, titles)


class EnginePair(NamedTuple):
    """Two engines of one build, timed in one sitting: rows of streams-h200.json."""

    network: str
    batch: int
    base: Mapping[str, Any]
    changed: Mapping[str, Any]

    @property
    def percent(self) -> float:
        """How much more time the changed engine takes, in percent."""
        before, after = (row["ms"]["median"] for row in (self.base, self.changed))
        return 100 * (after / before - 1)


def streams_section(_: list[Result]) -> list[str]:
    """Compare engines with auxiliary streams to engines without, of each model, batch size and precision."""
    pairs = [pair for pair in engine_pairs() if pair.changed["form"] == pair.base["form"]]
    return pairs_table(pairs, "precision", "ms, 0 streams", "ms, with streams")


def forms_section(_: list[Result]) -> list[str]:
    """Compare INT8 engines whose recipes leave layers in FP16 with those of the default recipe."""
    pairs = [pair for pair in engine_pairs() if pair.changed["form"] != pair.base["form"]]
    return pairs_table(pairs, "recipe", "ms, default recipe", "ms, this recipe")


def engine_pairs() -> Iterator[EnginePair]:
    """Yield each engine with auxiliary streams or a changed recipe, and the engine it is compared with.

    Both were built with one timing cache and timed in one sitting. An engine with streams is compared with the same
    form without; an engine of another recipe with the INT8 engine of as many streams.
    """
    for sitting in load(FOLDER / f"{STREAMS}.json")["sittings"]:
        plain = {(row["form"], row["streams"], row["build"]): row for row in sitting["rows"] if row["form"] in PLAIN}
        for row in sitting["rows"]:
            if row["form"] not in PLAIN:
                base = plain["INT8", row["streams"], row["build"]]
            elif row["streams"]:
                base = plain[row["form"], 0, row["build"]]
            else:
                continue
            yield EnginePair(sitting["network"], sitting["batch"], base, row)


def pairs_table(pairs: Iterable[EnginePair], form: str, before: str, after: str) -> list[str]:
    """Return a table with a line for each model, batch size, and form and streams of the changed engine.

    `form`, `before` and `after` are the titles of its column of forms, and of both columns of milliseconds.
    """
    groups: dict[tuple[str, str, str], list[EnginePair]] = {}
    for pair in pairs:
        name = pair.changed["form"].removeprefix("INT8, ")
        key = (f"{pair.network}, {pair.batch}", name, str(pair.changed["streams"]))
        groups.setdefault(key, []).append(pair)
    titles = ["model, batch size", form, "streams", "builds", "timings", before, after, "change of time"]
    return markdown_table(titles, [[*key, *cells_of(group)] for key, group in groups.items()], titles[:2])


def cells_of(group: Sequence[EnginePair]) -> list[str]:
    """Return the numbers of builds and timings, mean medians in ms without and with the change, and differences."""
    builds = {pair.base["build"] for pair in group}
    before = mean([pair.base["ms"]["median"] for pair in group])
    after = mean([pair.changed["ms"]["median"] for pair in group])
    percents = sorted(pair.percent for pair in group)
    span = f"{percents[0]:+.1f} %"
    if len(percents) > 1:
        span = f"{percents[0]:+.1f} to {percents[-1]:+.1f} %"
    return [str(len(builds)), str(len(group)), f"{before:.3f}", f"{after:.3f}", span]
