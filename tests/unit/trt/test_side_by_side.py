"""Contexts side by side: what waits for what, and that an evaluation finds the same."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from known_images import SQUARE, KnowingModel, export_answers, numbers, write_set
from tensorrt_stand_in import stand_in

from utils.core.errors import InputError, QatError
from utils.evaluation.dataset import load_data
from utils.evaluation.input_plan import InputPlan
from utils.evaluation.loop import EvalConfig, evaluate
from utils.jobs.open import open_runner
from utils.runners.base import TensorSpec
from utils.trt import side_by_side
from utils.trt.build_config import BuildConfig
from utils.trt.builder import build
from utils.trt.runner import TensorRTRunner
from utils.trt.side_by_side import SideBySide

CPU = torch.device("cpu")


class Streams:
    """torch.cuda as a record of what has happened before what: each stream knows what it has done or waited for."""

    class Stream:
        def __init__(self, device=None):
            self.past = set()

        def wait_stream(self, other):
            self.past |= other.past

        def wait_event(self, event):
            self.past |= event.past

    class Event:
        def record(self, stream):
            self.past = set(stream.past)

    def __init__(self):
        self.current = self.Stream()

    def current_stream(self, device):
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class Context:
    """A runner of which only is noted when it runs."""

    metadata, description, device, limits = {}, "a GPU", CPU, {}
    inputs = outputs = (TensorSpec("images", (1,), "float32"),)

    def __init__(self, streams, place):
        self.streams, self.place, self.before, self.closed = streams, place, {}, False

    def infer(self, feed):
        current = self.streams.current
        self.before[feed["images"]] = set(current.past)
        current.past.add(("run", feed["images"]))
        return {"images": (self.place, feed["images"])}

    def close(self):
        self.closed = True


@pytest.mark.parametrize("contexts", [2, 3])
def test_runs_wait_for_the_use_of_what_they_overwrite_and_for_nothing_else(monkeypatch, contexts):
    streams = Streams()
    monkeypatch.setattr(side_by_side, "cuda", streams)
    runners = [Context(streams, place) for place in range(contexts)]
    main = streams.current
    made, used = [], []

    def feeds():
        for number in range(8):
            main.past.add(("feed", number))
            made.append(number)
            yield {"images": number}

    with SideBySide(runners) as runner:
        for number, outputs in enumerate(runner.infer_each(feeds())):
            assert outputs == {"images": (number % contexts, number)}
            assert ("run", number) in main.past  # torch's stream has waited for it
            assert {run for run in main.past if run[0] == "run"} == {("run", one) for one in range(number + 1)}
            main.past.add(("use", number))
            used.append(number)
    assert made == used == list(range(8))
    assert all(one.closed for one in runners)
    before = {number: past for one in runners for number, past in one.before.items()}
    for number in range(8):
        assert ("feed", number) in before[number]
        last = number - contexts  # the same context's
        uses = {one for kind, one in before[number] if kind == "use"}
        runs = {one for kind, one in before[number] if kind == "run"}
        assert uses == runs == set(range(last + 1))


@pytest.fixture
def known(tmp_path):
    model = KnowingModel(write_set(tmp_path / "set", 40, SQUARE), ("cat", "dog", "owl"), 64)
    return model, load_data(tmp_path / "set/data.yaml")


def test_an_evaluation_finds_the_same(known, tmp_path, monkeypatch, caplog):
    api = stand_in(monkeypatch)
    model, data = known
    file = export_answers(model, tmp_path / "a.onnx", 2, 64)
    engine = build(file, tmp_path / "a.engine", BuildConfig(progress=False)).path
    plan = InputPlan.of
    monkeypatch.setattr(InputPlan, "of", lambda *words, **options: replace(plan(*words, **options), together=4))
    config, found, runs = EvalConfig(imgsz=64, batch_size=2, workers=0), [], []
    for contexts in (1, 3):
        own = [TensorRTRunner(engine, CPU, api=api) for _ in range(contexts)]
        for place, one in enumerate(own):
            infer = one.infer
            monkeypatch.setattr(one, "infer", lambda feeds, place=place, f=infer: runs.append(place) or f(feeds))
        with SideBySide(own) if contexts > 1 else own[0] as runner:
            found.append(evaluate(runner, data, config, progress=False))
    alone, several = found
    assert 0.2 < alone.ap < 1
    assert numbers(several) == numbers(alone)
    assert runs[:20] == [0] * 20
    assert runs[20:] == [0, *[0, 1] * 9, 0]  # the first and the last batch by themselves, four images at a time between
    assert "gained nothing" not in caplog.text
    assert several.measured_on == alone.measured_on.replace(", batch", ", 3 contexts, batch")


def test_one_run_and_a_closed_runner(known, tmp_path, monkeypatch, caplog):
    api = stand_in(monkeypatch)
    file = export_answers(known[0], tmp_path / "a.onnx", 2, 64)
    engine = build(file, tmp_path / "a.engine", BuildConfig(progress=False)).path
    runner = SideBySide([TensorRTRunner(engine, CPU, api=api) for _ in range(2)])
    images = torch.full((2, 3, 64, 64), 5 / 255)  # the first image of the set
    with TensorRTRunner(engine, CPU, api=api) as one, runner:
        assert torch.equal(runner.infer({"images": images})["output0"], one.infer({"images": images})["output0"])
        with pytest.raises(InputError, match=r"input images is float32 \[3, 3, 64, 64\]"):
            list(runner.infer_each([{"images": torch.zeros(3, 3, 64, 64)}]))
        assert "gained nothing" not in caplog.text
    assert "several contexts gained nothing: the engine took each batch at once" in caplog.text
    with pytest.raises(QatError, match="is closed"):
        next(runner.infer_each([{"images": images}]))


def test_files_that_are_no_engines_have_no_contexts(tmp_path):
    file = tmp_path / "a.onnx"
    file.touch()
    with pytest.raises(InputError, match=r"--infStreams is the number of an engine's contexts, and .*a.onnx is no eng"):
        open_runner(file, "cuda:0", contexts=2)
