"""What `--tune` tries, and what it found, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.text_tables import aligned, columns
from utils.trt.build_config import BuildConfig, describe_options

if TYPE_CHECKING:
    from utils.trt.onnx_summary import OnnxFile
    from utils.trt.tensorrt_api import Api
    from utils.trt.turns import Turns

COLUMNS = columns(("built with", "built in", "ms", "spread", "time", ""), left=("built with", ""))


@dataclass(frozen=True)
class Dimension:
    """One option that is tried unless it was given.

    Attributes:
        field: of `BuildConfig`.
        values: the most promising first; the field's default is tried anyway.
        fits: whether they can be tried with this file and TensorRT.
        patience: how many times as long as the first build one of these may take.
    """

    field: str
    values: tuple[Any, ...]
    fits: Callable[[OnnxFile, Api], bool]
    patience: float = 1.0


# In the order in which they are tried. An option of BuildConfig takes part with a line here, and its words in
# `build_config.OPTIONS`. Builds with 5 streams did not end within minutes; level 3 is TensorRT's own.
DIMENSIONS = (
    Dimension("max_aux_streams", (2, 3, 1, 4, 0), lambda file, api: api.has_option("max_aux_streams")),
    Dimension("optimization_level", (2, 4, 5), lambda file, api: api.has_option("builder_optimization_level"), 3.0),
)


def left_to_try(file: OnnxFile, api: Api, config: BuildConfig) -> list[Dimension]:
    """The dimensions that fit the file and TensorRT, and whose options were not given."""
    return [
        one for one in DIMENSIONS
        if getattr(config, one.field) == getattr(BuildConfig, one.field) and one.fits(file, api)
    ]  # fmt: skip


@dataclass
class Candidate:
    """An engine that was built, or not.

    Attributes:
        engine: its file; there is none if `error` says why.
        seconds: that the build took.
        late: whether it was ended at its limit.
        turns: its times where it was timed last.
        against: its time against that of what was asked for, measured in the same turns, minus 1.
    """

    config: BuildConfig
    engine: Path
    seconds: float
    error: str = ""
    late: bool = False
    turns: Turns | None = None
    against: float | None = None

    @property
    def words(self) -> str:
        """Its options, as a table names them."""
        return describe_options(self.config.options)

    @property
    def ms(self) -> float:
        """Its time, infinite where there is none."""
        return float("inf") if self.turns is None else self.turns.ms

    def to_dict(self) -> dict[str, Any]:
        """As the note beside the engine holds it: milliseconds, seconds, fractions."""
        times = {} if self.turns is None else {"ms": self.turns.ms, "spread_ms": self.turns.spread}
        measured = {**times, "against_default": self.against}
        return {"options": self.config.options, "seconds": round(self.seconds, 1), **measured, "error": self.error}


def table(candidates: Sequence[Candidate], kept: Candidate, *, asked: bool = True) -> str:
    """Aligned columns; the first two candidates are what was asked for, or what took its place, and its control."""
    return "\n".join(aligned(COLUMNS, _rows(candidates, kept, asked)))


def _first(asked: bool) -> str:
    return "as asked for" if asked else "instead of what was asked for, which took too long"


def _rows(candidates: Sequence[Candidate], kept: Candidate, asked: bool) -> Iterator[tuple[str, ...]]:
    for number, one in enumerate(candidates):
        words = f"{one.words}, built again" if number == 1 else one.words
        remark = one.error or ("kept" if one is kept else _first(asked) if number == 0 else "")
        times = ("", "", "")
        if one.turns is not None and one.against is not None:
            times = f"{one.turns.ms:.3f}", f"{one.turns.spread:.3f}", f"{one.against:+.1%}"
        yield words, f"{one.seconds:.0f} s", *times, remark


def verdict(candidates: Sequence[Candidate], kept: Candidate, noise: float, *, asked: bool = True) -> str:
    """What was decided, in a sentence; `noise` in milliseconds."""
    first, so = candidates[0], _first(asked)
    others = candidates[2:]
    if not any(one.turns for one in others):
        if all(one.late for one in others):
            return f"{kept.words}, {so}: no other engine was built in the time; give --tune more minutes"
        return f"{kept.words}, {so}: no other engine could be built and timed; the table says why"
    share = f"{noise / first.ms:.1%}"
    if kept is first:
        return f"{kept.words}, {so}: nothing is faster by more than the noise, {share}"
    than = "as asked for" if asked else first.words
    return f"{kept.words}: {-(kept.against or 0.0):.1%} less time than {than}; the noise is {share}"
