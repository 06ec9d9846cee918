"""benchmarks/thresholds.py and detections.py: counts, halves, fitted thresholds, the decision and its two controls."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import detections, thresholds
from benchmarks.detections import Detections, Dump
from benchmarks.thresholds import BEST_F1, CONTROLS, Counts, Estimate, Study, ThresholdOptions
from utils.core.errors import InputError

TRIED = np.array([0.2, 0.4, 0.6])


def make_dump(seed: int = 0, images: int = 120, classes: int = 3, **networks: float) -> Dump:
    """Images with objects of three classes; a network finds most and some that are not there.

    `networks` have the same boxes as `float`, with the scores of class 0 multiplied by their number.
    """
    random = np.random.default_rng(seed)
    label_image = np.repeat(np.arange(images), 6)
    label_class = random.integers(classes, size=len(label_image))
    hit = random.random(len(label_image)) < 0.9
    extra = random.integers(images, size=2 * images)
    image = np.concatenate([label_image[hit], extra])
    label = np.concatenate([label_class[hit], random.integers(classes, size=len(extra))])
    score = np.concatenate([random.beta(4, 2, hit.sum()), random.beta(2, 5, len(extra))]).astype(np.float32)
    correct = np.zeros((len(image), 10), bool)
    correct[: hit.sum()] = True
    boxes = np.zeros((len(image), 4), np.float16)
    base = Detections(image.astype(np.int32), score, label.astype(np.int16), boxes, correct)
    others = {
        name: replace(base, score=np.where(label == 0, score * np.float32(factor), score))
        for name, factor in networks.items()
    }
    return Dump(
        class_names=[f"class {number}" for number in range(classes)],
        images=[f"{number:04}.jpg" for number in range(images)],
        sizes=np.full((images, 2), 100, np.int32),
        label_image=label_image.astype(np.int32),
        label_class=label_class.astype(np.int16),
        label_boxes=np.zeros((len(label_image), 4), np.float32),
        networks={"float": base, **others},
    )


def test_counts_are_those_of_a_loop():
    dump = make_dump()
    units = np.arange(len(dump.images)) // 40
    base = dump.networks["float"]
    counts = Counts.of(dump, base, units, TRIED)
    for unit in range(3):
        for label in range(3):
            objects = (units[dump.label_image] == unit) & (dump.label_class == label)
            assert counts.objects[unit, label] == objects.sum()
            mine = (units[base.image] == unit) & (base.classes == label)
            for number, threshold in enumerate(TRIED):
                taken = mine & (base.score >= threshold)
                assert counts.taken[unit, label, number] == taken.sum()
                assert counts.found[unit, label, number] == (taken & base.correct[:, 0]).sum()


def test_a_score_is_counted_at_a_threshold_that_equals_it():
    dump = make_dump()
    base = replace(dump.networks["float"], score=np.full(len(dump.networks["float"].score), 0.4, np.float32))
    counts = Counts.of(dump, base, np.zeros(len(dump.images), int), np.array([0.2, float(np.float32(0.4)), 0.6]))
    assert counts.taken.sum((0, 1)).tolist() == [len(base.score), len(base.score), 0]


def test_scores():
    counts = Counts(np.array([[[8.0, 0.0]]]), np.array([[[10.0, 0.0]]]), np.array([[16.0]]))
    scores = {name: counts.score(name)[0, 0].tolist() for name in (*thresholds.CRITERIA, thresholds.DETECTIONS)}
    assert scores == {"precision": [0.8, 0], "recall": [0.5, 0], "F1": [16 / 26, 0], "detections": [10 / 16, 0]}


def test_halves_share_no_unit_and_hold_all_that_were_drawn():
    halves = thresholds.draw_halves(13, 50, 20, 57)
    assert halves.fit.shape == (50 + 20 * thresholds.HALVINGS, 13)
    assert not (halves.fit * halves.test).any()
    both = halves.fit + halves.test
    assert (both[:50] == 1).all()
    assert {*(halves.fit[:50] > 0).sum(1).tolist()} == {6, 7}
    assert (both.sum(1) == 13).all()
    resampled = both[50:].reshape(20, thresholds.HALVINGS, 13)
    assert (resampled == resampled[:, :1]).all()  # the halvings of one resampling
    assert len(np.unique(resampled[:, 0], axis=0)) == 20


@pytest.mark.parametrize(
    ("scores", "number"),
    [
        ([0.9, 0.8, 0.7], 1),  # t0's own
        ([0.8, 0.9, 0.7], 0),  # exactly reached
        ([0.7, 0.9, 0.804], 2),  # within half of 100 objects
        ([0.70, 0.90, 0.82], 2),  # reached by none: the closest
    ],
)
def test_the_nearest_threshold_that_reaches_the_target(scores, number):
    found = thresholds.reached(np.array([[scores]]), np.array([[[0.8]]]), np.array([[100.0]]), TRIED, 0.4)
    assert found.tolist() == [[number]]


def test_a_shift_of_one_class_is_found_by_class_and_not_by_few_objects():
    dump = make_dump(INT8=0.8)
    tried, start = thresholds.tried(0.5)
    units = np.arange(len(dump.images))
    base, other = (Counts.of(dump, dump.networks[name], units, tried) for name in ("float", "INT8"))
    everything = np.ones((1, len(units)), np.float32)
    study = Study(base, other, tried, start, least_objects=50)
    fitted = tried[study.fitted("by class", "detections", everything)[0]]
    assert fitted == pytest.approx([0.4, 0.5, 0.5], abs=0.004)
    assert tried[study.fitted("same", "recall", everything)[0]].tolist() == [0.5] * 3
    shifted = study.fitted("shifted", "recall", everything)[0]
    assert 0.4 < tried[shifted[0]] < 0.5
    few = replace(study, least_objects=10_000)
    assert few.fitted("by class", "recall", everything)[0].tolist() == shifted.tolist()


def test_tried_thresholds_stay_inside():
    for t0 in (0.01, 0.5, 0.99):
        tried, start = thresholds.tried(t0)
        assert tried[start] == t0
        assert 0 < tried.min() < tried.max() < 1


def test_an_estimate_takes_off_what_halving_adds():
    random = np.random.default_rng(0)
    of_resampling = random.normal(0, 1.0, (2000, 1))
    draws = (of_resampling + random.normal(0, 3.0, (2000, thresholds.HALVINGS))).ravel()
    estimate = Estimate.of(np.concatenate([np.full(50, 0.25), draws]), 50, 1000)
    assert estimate.value == 0.25
    assert estimate.error == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(("value", "units", "below"), [(-2.1, 40, True), (-1.9, 40, False), (-2.1, 13, False)])
def test_two_standard_errors_or_the_t_quantile(value, units, below):
    assert thresholds.smaller(Estimate(value, 1.0), units) is below


def run_study(folder: Path, dump: Dump) -> dict:
    detections.write_dump(folder / "set.npz", dump)
    options = ThresholdOptions(
        sets=[f"set={folder / 'set.npz'}"], output=folder / "results.json", splits=40, resamplings=20
    )
    assert thresholds.run(options) == 0
    return json.loads((folder / "results.json").read_text())


def test_the_study_finds_what_is_there(tmp_path, capsys):
    results = run_study(tmp_path, make_dump(same=1.0, shifted=0.8))
    decision = results["decision"]
    assert decision["won"] == {"same": [], "shifted": ["set"], CONTROLS[0]: [], CONTROLS[1]: ["set"]}
    assert decision["noise wins nothing"]
    assert decision["one class wins where it can"]
    assert decision["worth its code"] == {"same": False, "shifted": False}  # of one set
    rows = [row for row in results["sets"]["set"]["rows"] if row["network"] == "same" and row["at"] == BEST_F1]
    assert len(rows) == 5
    for row in rows:
        assert row["over classes"]["by class"] == 0
        assert row["all together"]["shifted"] == 0
    assert "| set | shifted |" in capsys.readouterr().out


def test_a_set_without_a_class_for_the_control_shows_nothing(tmp_path):
    results = run_study(tmp_path, make_dump(images=20, INT8=0.8))
    assert results["decision"]["sets that can show something"] == []
    assert CONTROLS[1] not in results["decision"]["won"]


def test_a_file_is_read_as_it_was_written(tmp_path):
    dump = make_dump(INT8=0.5)
    detections.write_dump(tmp_path / "set.npz", dump)
    again = detections.read_dump(tmp_path / "set.npz")
    assert (again.class_names, again.images, [*again.networks]) == (dump.class_names, dump.images, ["float", "INT8"])
    for name in detections.IMAGES[1:]:
        assert np.array_equal(getattr(again, name), getattr(dump, name))
    for name, one in dump.networks.items():
        for part in vars(one):
            assert np.array_equal(getattr(again.networks[name], part), getattr(one, part))


@pytest.mark.parametrize("content", [b"", b"no such format", b"PK\x03\x04", None])
def test_another_file_is_refused(content, tmp_path):
    if content is None:
        np.savez(tmp_path / "set.npz", a=np.zeros(3))
    else:
        (tmp_path / "set.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"set\.npz: .*; expected a file of benchmarks/detections\.py"):
        detections.read_dump(tmp_path / "set.npz")


@pytest.mark.parametrize("words", [["a"], ["=a"], ["a="], ["a/b=c"], ["a=none.npz"], ["a=set.npz", "a=set.npz"]])
def test_names_of_files(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("set.npz").touch()
    with pytest.raises(InputError):
        detections.named_files(words)
    assert detections.named_files(["a=set.npz", "b=set.npz"]) == {"a": Path("set.npz"), "b": Path("set.npz")}


def test_groups_belong_to_a_set():
    assert thresholds.named_groups([r"a=\d{3}"], ["a", "b"]) == {"a": r"\d{3}"}
    for words in (["a"], ["c=x"], ["a="]):
        with pytest.raises(InputError, match="is not SET=REGEX of one of the sets a, b"):
            thresholds.named_groups(words, ["a", "b"])
