"""`qat.py` as a user calls it: files, names, reports, what is kept, and one line for every mistake."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

import qat
from models.quantize import checkpoint
from models.quantize.finetune import DivergedError, Finetuner
from utils import upstream, upstream_import
from utils.evaluation.data_yaml import load_data
from utils.evaluation.images import find_images
from utils.evaluation.results import EvalResult
from utils.jobs import evaluate
from utils.reports.schema import Row

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from qat_runs import checkpoints, quantize, report_of, write_small_set
from random_networks import TINY, random_network, save_float

NAME = "gelan-digits"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, demo_data: Path) -> Path:
    return write_small_set(tmp_path_factory.mktemp("set"), demo_data)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, data: Path, demo_weights: Path) -> Path:
    """The folder of a whole run of two epochs."""
    project = tmp_path_factory.mktemp("runs")
    assert quantize(demo_weights, data, project, "--epochs", "2") == 0
    return project / "exp"


def unlabelled(data: Path, folder: Path, labelled_val: bool = False) -> Path:
    """A data.yaml for copies of the training images, without labels; for validation these or the set's."""
    (folder / "bare").mkdir()
    for file in find_images(load_data(data).paths("train")):
        shutil.copy(file, folder / "bare")
    content = yaml.safe_load(data.read_text())
    bare = str(folder / "bare")
    val = content["val"] if labelled_val else bare
    (folder / "bare.yaml").write_text(yaml.safe_dump({**content, "train": bare, "val": val}))
    return folder / "bare.yaml"


def state_of(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["quantized_state"]


def same_state(one: Path, other: Path) -> bool:
    a, b = state_of(one), state_of(other)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


class TestFiles:
    def test_names_carry_stage_epoch_score_and_stem(self, finished):
        names = checkpoints(finished)
        patterns = ["last.pt", rf"ptq_ap_0\.\d{{4}}_{NAME}.pt", rf"qat_best_{NAME}.pt"]
        patterns += [rf"qat_ep_{epoch}_ap_0\.\d{{4}}_{NAME}.pt" for epoch in (0, 1)]
        assert len(names) == len(patterns)
        for name, pattern in zip(names, sorted(patterns), strict=True):
            assert re.fullmatch(pattern, name), name

    def test_the_report_has_rows_history_ranges_and_samples(self, finished):
        report = report_of(finished)
        assert [row["stage"] for row in report["rows"]] == ["float", "PTQ", "QAT"]
        for row in report["rows"]:
            assert Path(row["file"]).is_file()
            assert row["size_bytes"] == Path(row["file"]).stat().st_size
            assert {"torch", "python"} <= set(row["versions"])
            assert "modelopt" not in row["versions"]  # nothing depends on it, be it installed or not
            assert row["seconds"] > 0
            assert row["device"]
            assert Row(**{name: row[name] for name in row if not name.endswith("_error")}).resampled().error > 0
        assert [row["ap_difference_error"] is None for row in report["rows"]] == [True, False, False]
        assert [entry["epoch"] for entry in report["history"]] == [0, 1]
        assert {"ap", "ap50", "loss", "held_out", "lr", "seconds"} <= set(report["history"][0])
        assert {row["kind"] for row in report["ranges"]} == {"activation", "weight"}
        assert {"float", "QAT"} == set(report["samples"][0]["predictions"])

    def test_plots_and_placement_lie_beside_the_report(self, finished):
        assert {"ap_per_epoch.png", "ranges.png", "placement.txt"} <= set(os.listdir(finished))

    def test_the_best_file_is_one_of_the_others(self, finished):
        weights = finished / "weights"
        others = [path for path in weights.glob("*_ap_*.pt") if same_state(path, weights / f"qat_best_{NAME}.pt")]
        best = torch.load(weights / "last.pt", weights_only=True)["best"]
        assert [path.name for path in others] == [best["file"]]
        losses = [entry["held_out"] for entry in report_of(finished)["history"]]
        assert best["held_out"] == (min(losses) if best["epoch"] is None else losses[best["epoch"]])
        assert best["held_out"] <= min(losses)

    def test_training_moved_weights_and_ranges_of_activations(self, finished):
        weights = finished / "weights"
        before, after = (state_of(next(weights.glob(pattern))) for pattern in ("ptq_*", "qat_ep_1_*"))
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        activations = {name for name in before if name.endswith("_amax") and before[name].dim() == 0}
        assert len(moved & activations) > len(activations) / 2
        assert {"model.0.conv.weight", "model.0.conv.bias"} <= moved
        assert not any("dfl" in name or (name in before.keys() - activations and "amax" in name) for name in moved)

    def test_extra_says_where_it_comes_from(self, finished, demo_weights):
        loaded = checkpoint.load(next((finished / "weights").glob("qat_ep_0_*")))
        assert (loaded.extra["stage"], loaded.extra["epoch"]) == ("QAT", 0)
        assert loaded.extra["float_weights"] == str(demo_weights)


class TestEval:
    @pytest.fixture
    def evaluate(self, data, tmp_path):
        def run(weights: Path, *words: str) -> dict:
            arguments = ["--data", str(data), "--imgsz", "96", "--batch-size", "2", "--workers", "0", "--device", "cpu"]
            code = qat.main(
                ["eval", "--weights", str(weights), *arguments, "--project", str(tmp_path), "--exist-ok", *words]
            )
            assert code == 0
            return report_of(tmp_path / "exp")["rows"][0]

        return run

    def test_a_quantized_file_scores_what_its_name_says(self, evaluate, finished):
        path = next((finished / "weights").glob("ptq_ap_*"))
        row = evaluate(path)
        assert row["stage"] == "PTQ"
        assert f"_ap_{row['ap']:.4f}_" in path.name
        assert row["ap"] == report_of(finished)["rows"][1]["ap"]

    def test_a_float_file_scores_what_quantize_measured(self, evaluate, finished, demo_weights):
        row = evaluate(demo_weights)
        assert row["stage"] == "float"
        known = report_of(finished)["rows"][0]
        assert row["ap"] == known["ap"]
        assert row["ap_resampled"] == known["ap_resampled"]  # so rows of both programs can be compared

    def test_save_json_writes_detections(self, evaluate, demo_weights, tmp_path):
        row = evaluate(demo_weights, "--save-json", "--conf-thres", "0.01")
        assert row["ap_with"] == "confidence 0.01"  # such an AP is not compared with others
        assert list((tmp_path / "exp").glob("*_predictions.json"))


class Scores:
    """Stands for evaluation, and gives the APs that a test wants."""

    def __init__(self, *aps: float) -> None:
        self._aps = iter(aps)

    def __call__(self, *_args: object, **_kwargs: object) -> EvalResult:
        ap = next(self._aps)
        return EvalResult(ap, ap, ap, ap, (), 6, 9, {"inference": 1.0}, None, 0.1, (), "a test")


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    def use(*aps: float) -> None:
        monkeypatch.setattr(evaluate, "evaluate", Scores(*aps))

    return use


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Stands for the loss on held-out images: PTQ's, then one for each epoch."""

    def use(*values: float) -> None:
        left = iter(values)
        monkeypatch.setattr(Finetuner, "held_out_loss", lambda _self, _batches: next(left))

    return use


@pytest.mark.usefixtures("blank_plots")
class TestWhatIsKept:
    def test_the_epoch_with_the_smallest_loss_on_held_out_images_is_the_best_whatever_its_ap(
        self, scores, losses, data, small_weights, tmp_path, capsys
    ):
        scores(0.7, 0.6, 0.71, 0.65, 0.72)
        losses(3.0, 2.0, 1.0, 1.5)
        assert quantize(small_weights, data, tmp_path, "--epochs", "3") == 0
        weights = tmp_path / "exp/weights"
        assert same_state(weights / f"qat_best_{NAME}.pt", weights / f"qat_ep_1_ap_0.6500_{NAME}.pt")
        assert report_of(tmp_path / "exp")["rows"][2]["ap"] == 0.65
        assert "epoch 1, AP 0.6500" in capsys.readouterr().out

    def test_if_no_epoch_beats_ptq_the_best_is_ptq_and_the_log_says_so(
        self, scores, losses, data, small_weights, tmp_path, capsys
    ):
        scores(0.7, 0.6, 0.65, 0.69)
        losses(3.0, 3.0, 3.1)
        assert quantize(small_weights, data, tmp_path, "--epochs", "2") == 0
        weights = tmp_path / "exp/weights"
        assert same_state(weights / f"qat_best_{NAME}.pt", weights / f"ptq_ap_0.6000_{NAME}.pt")
        text = f"no epoch of QAT beat PTQ on the held-out images: qat_best_{NAME}.pt is the PTQ state"
        assert text in capsys.readouterr().out
        assert text in report_of(tmp_path / "exp")["notes"]

    def test_without_an_epoch_none_is_said_to_be_worse_than_ptq(
        self, scores, losses, data, small_weights, tmp_path, capsys
    ):
        scores(0.7, 0.6, 0.65)
        assert quantize(small_weights, data, tmp_path, "--epochs", "0") == 0
        text = f"no epoch of QAT was trained: qat_best_{NAME}.pt is the PTQ state"
        out = capsys.readouterr().out
        assert text in out
        assert f"qat_best_{NAME}.pt (the PTQ state, AP 0.6000)" in out
        assert report_of(tmp_path / "exp")["notes"] == [text]
        losses(3.0, 3.5)
        assert qat.main(["quantize", "--resume", str(tmp_path / "exp"), "--epochs", "1"]) == 0
        (note,) = report_of(tmp_path / "exp")["notes"]
        assert note.startswith("no epoch of QAT beat PTQ on the held-out images")

    def test_a_collapse_stops_and_restores_the_best(self, scores, losses, data, small_weights, tmp_path, capsys):
        scores(0.7, 0.6, 0.61, 0.29)
        losses(3.0, 2.0, 1.0)
        assert quantize(small_weights, data, tmp_path, "--epochs", "5") == 0
        weights = tmp_path / "exp/weights"
        assert same_state(weights / f"qat_best_{NAME}.pt", weights / f"qat_ep_0_ap_0.6100_{NAME}.pt")
        assert "epoch 1: AP fell to 0.2900, below 0.5 of 0.6000" in capsys.readouterr().out
        assert not list(weights.glob("qat_ep_1*"))
        assert len(report_of(tmp_path / "exp")["history"]) == 2

    def test_a_loss_that_is_not_finite_stops_and_restores_the_best(
        self, scores, losses, data, small_weights, tmp_path, capsys, monkeypatch
    ):
        scores(0.7, 0.6, 0.61)
        losses(3.0, 2.0)
        step, calls = Finetuner._step, []

        def fail_in_the_second_epoch(self: Finetuner, *args: object) -> float:
            calls.append(1)
            if len(calls) > 2:
                raise DivergedError("the supervision loss is nan")
            return step(self, *args)

        monkeypatch.setattr(Finetuner, "_step", fail_in_the_second_epoch)
        assert quantize(small_weights, data, tmp_path, "--epochs", "5") == 0
        weights = tmp_path / "exp/weights"
        assert same_state(weights / f"qat_best_{NAME}.pt", weights / f"qat_ep_0_ap_0.6100_{NAME}.pt")
        assert "epoch 1: the supervision loss is nan" in capsys.readouterr().out

    def test_patience_ends_a_run_that_does_not_improve(self, scores, losses, data, small_weights, tmp_path):
        scores(0.7, 0.6, 0.61, 0.62, 0.63, 0.9)
        losses(3.0, 2.0, 2.5, 2.0, 1.0)
        assert quantize(small_weights, data, tmp_path, "--epochs", "5", "--patience", "2") == 0
        report = report_of(tmp_path / "exp")
        assert len(report["history"]) == 3
        assert any("patience 2" in note for note in report["notes"])

    def test_more_epochs_after_patience_go_on_with_a_warm_up_of_their_own(
        self, scores, losses, data, small_weights, tmp_path, capsys
    ):
        scores(0.7, 0.6, 0.61, 0.6, 0.6)
        losses(3.0, 2.0, 2.5, 2.5)
        assert quantize(small_weights, data, tmp_path, "--epochs", "4", "--patience", "2") == 0
        assert qat.main(["quantize", "--resume", str(tmp_path / "exp")]) == 0
        assert "no better state in 2 epochs (patience 2); a higher --epochs goes on" in capsys.readouterr().out
        before = report_of(tmp_path / "exp")["history"]
        scores(0.62, 0.6)
        losses(2.5, 1.0)
        assert qat.main(["quantize", "--resume", str(tmp_path / "exp"), "--epochs", "5"]) == 0
        report = report_of(tmp_path / "exp")
        assert report["history"][:3] == before
        rates = [entry["lr"] for entry in report["history"]]
        assert len(rates) == 5
        assert rates == sorted(rates[:3], reverse=True) + sorted(rates[3:], reverse=True)
        assert rates[3] > rates[2]
        assert not any("QAT stopped" in note for note in report["notes"])
        weights = tmp_path / "exp/weights"
        assert same_state(weights / f"qat_best_{NAME}.pt", weights / f"qat_ep_4_ap_0.6000_{NAME}.pt")

    def test_ranges_trained_alone_leave_weights_bit_for_bit(self, scores, data, small_weights, tmp_path):
        scores(0.7, 0.6, 0.6)
        assert quantize(small_weights, data, tmp_path, "--epochs", "1", "--train", "ranges") == 0
        before, after = (state_of(tmp_path / f"exp/weights/{name}_ap_0.6000_{NAME}.pt") for name in ("ptq", "qat_ep_0"))
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved
        assert all(name.endswith("_amax") for name in moved)

    def test_a_network_that_is_taught_by_its_own_float_weights_is_taught_as_without_teacher(
        self, scores, data, small_weights, tmp_path
    ):
        for name, words in (("a", []), ("b", ["--teacher", str(small_weights)])):
            scores(0.7, 0.6, 0.6)
            assert quantize(small_weights, data, tmp_path, "--epochs", "1", "--name", name, *words) == 0
        files = [tmp_path / name / f"weights/qat_ep_0_ap_0.6000_{NAME}.pt" for name in ("a", "b")]
        assert same_state(*files)
        assert qat.main(["quantize", "--resume", str(tmp_path / "b")]) == 0

    def test_a_teacher_of_another_shape_with_the_same_head_teaches(self, scores, data, demo_weights, tmp_path):
        scores(0.7, 0.6, 0.6)
        teacher = save_float(tmp_path / "tiny.pt", random_network(TINY))
        assert quantize(demo_weights, data, tmp_path, "--epochs", "1", "--teacher", str(teacher)) == 0
        teacher.write_bytes(save_float(tmp_path / "other.pt", random_network(TINY, seed=1)).read_bytes())
        assert qat.main(["quantize", "--resume", str(tmp_path / "exp"), "--epochs", "2"]) == 2

    def test_another_teacher_teaches_otherwise(self, scores, data, small_weights, tmp_path):
        content = torch.load(small_weights, weights_only=False)
        for parameter in (content.get("ema") or content["model"]).parameters():
            parameter.data *= 1.01
        other = tmp_path / "other.pt"
        torch.save(content, other)
        for name, words in (("a", []), ("b", ["--teacher", str(other)])):
            scores(0.7, 0.6, 0.6)
            assert quantize(small_weights, data, tmp_path, "--epochs", "1", "--name", name, *words) == 0
        a, b = (tmp_path / name / "weights" for name in ("a", "b"))
        assert same_state(a / f"ptq_ap_0.6000_{NAME}.pt", b / f"ptq_ap_0.6000_{NAME}.pt")
        assert not same_state(a / f"qat_ep_0_ap_0.6000_{NAME}.pt", b / f"qat_ep_0_ap_0.6000_{NAME}.pt")

    def test_more_epochs_after_a_collapse_are_refused(self, scores, data, small_weights, tmp_path, capsys):
        scores(0.7, 0.6, 0.61, 0.1)
        assert quantize(small_weights, data, tmp_path, "--epochs", "3") == 0
        assert qat.main(["quantize", "--resume", str(tmp_path / "exp"), "--epochs", "6"]) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert "--epochs 6: the training in" in line
        assert "AP fell to 0.1000" in line
        assert qat.main(["quantize", "--resume", str(tmp_path / "exp")]) == 0
        assert "QAT stopped. epoch 1: AP fell to 0.1000" in capsys.readouterr().out

    def test_the_two_no_flags_disable_and_an_unknown_score_is_not_made_up(self, scores, data, small_weights, tmp_path):
        scores(0.6)
        assert quantize(small_weights, data, tmp_path, "--epochs", "1", "--no-eval-origin", "--no-eval-ptq") == 0
        assert checkpoints(tmp_path / "exp") == [
            "last.pt", f"ptq_{NAME}.pt", f"qat_best_{NAME}.pt", f"qat_ep_0_ap_0.6000_{NAME}.pt"
        ]  # fmt: skip
        rows = {row["stage"]: row["ap"] for row in report_of(tmp_path / "exp")["rows"]}
        assert rows == {"PTQ": None, "QAT": 0.6}

    def test_ptq_only_stops_after_ptq(self, scores, data, small_weights, tmp_path, capsys):
        scores(0.7, 0.6)
        assert quantize(small_weights, data, tmp_path, "--ptq-only") == 0
        assert checkpoints(tmp_path / "exp") == ["last.pt", f"ptq_ap_0.6000_{NAME}.pt"]
        assert f"ptq_ap_0.6000_{NAME}.pt" in capsys.readouterr().out.splitlines()[-1]

    def test_augmentation_reaches_upstreams_data_set(self, scores, data, small_weights, tmp_path, monkeypatch):
        scores(0.7, 0.6, 0.6)
        asked = []
        original = upstream.make_dataset

        def make(*args: object, **kwargs: object) -> object:
            asked.append(kwargs)
            return original(*args, **kwargs)

        monkeypatch.setattr(upstream, "make_dataset", make)
        hyp = tmp_path / "hyp.yaml"
        hyp.write_text(yaml.safe_dump(dict.fromkeys(
            ("mosaic", "mixup", "copy_paste", "degrees", "translate", "scale", "shear", "perspective", "hsv_h", "hsv_s",
             "hsv_v", "flipud", "fliplr"), 0.1)))  # fmt: skip
        assert quantize(small_weights, data, tmp_path, "--epochs", "1", "--hyp", str(hyp)) == 0
        assert [(kwargs["augment"], kwargs["hyp"]["mosaic"]) for kwargs in asked] == [(True, 0.1)]

    def test_the_same_seed_gives_the_same_weights(self, scores, data, small_weights, tmp_path):
        for name in ("a", "b"):
            scores(0.6, 0.6)
            assert quantize(small_weights, data, tmp_path, "--epochs", "1", "--no-eval-origin", "--name", name) == 0
        files = [tmp_path / name / f"weights/qat_ep_0_ap_0.6000_{NAME}.pt" for name in ("a", "b")]
        assert same_state(*files)

    def test_the_recipe_is_printed_and_stored(self, scores, data, small_weights, tmp_path, capsys):
        scores(0.7, 0.6)
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text("calibration: {method: max}\nhead: last-conv-float\n")
        assert quantize(small_weights, data, tmp_path, "--ptq-only", "--recipe", str(recipe)) == 0
        assert "head: last-conv-float" in capsys.readouterr().out
        stored = checkpoint.load(tmp_path / f"exp/weights/ptq_ap_0.6000_{NAME}.pt").recipe
        assert (stored.calibration.method, stored.calibration.batches, stored.head) == ("max", 2, "last-conv-float")


def spoil(kind: str, weights: Path, folder: Path) -> Path:
    """A weights file of which something is wrong."""
    path = folder / f"{kind}.pt"
    if kind == "truncated":
        path.write_bytes(weights.read_bytes()[:100_000])
    elif kind == "text":
        path.write_text("these are no weights")
    elif kind == "auxiliary":
        config = yaml.safe_load((Path(upstream_import.CHECKOUT) / "data/demo/gelan-digits.yaml").read_text())
        sources, count, _, arguments = config["head"][-1]
        config["head"][-1] = [[*sources, *sources], count, "DualDDetect", arguments]
        model = upstream.build_model(config, 10)
        torch.save({"model": model.half(), "ema": None}, path)
    return path


class TestMistakes:
    """Each gives one line on stderr and exit code 2, and leaves nothing behind."""

    @pytest.fixture
    def fails(self, capsys, tmp_path):
        def check(words: list[object], *expected: str) -> None:
            code = qat.main([*map(str, words), "--project", str(tmp_path / "runs")])
            error = capsys.readouterr().err.strip()
            assert code == 2, error
            assert error.startswith("error: ")
            assert "\n" not in error
            assert "Traceback" not in error
            for text in expected:
                assert text in error
            assert not (tmp_path / "runs").exists()

        return check

    @pytest.mark.parametrize("content", ["undecodable", "wrong label", "no image"])
    def test_eval_of_a_bad_dataset_leaves_no_run_folder(self, content, demo_weights, demo_data, tmp_path):
        image = Path(find_images(load_data(demo_data).paths("val"))[0])
        names = load_data(demo_data).names
        (tmp_path / "images").mkdir()
        (tmp_path / "labels").mkdir()
        whole = image.read_bytes()
        damaged = {"undecodable": whole[: len(whole) // 4], "wrong label": whole, "no image": b"none"}[content]
        (tmp_path / "images" / f"a{image.suffix}").write_bytes(damaged)
        (tmp_path / "labels/a.txt").write_text(
            "99 0.5 0.5 0.1 0.1" if content == "wrong label" else "0 0.5 0.5 0.1 0.1"
        )
        data = tmp_path / "data.yaml"
        data.write_text(yaml.safe_dump({"path": str(tmp_path), "val": "images", "names": dict(names)}))
        words = [
            "--imgsz",
            "96",
            "--workers",
            "0",
            "--device",
            "cpu",
            "--project",
            str(tmp_path / "runs"),
            "--save-json",
        ]
        assert qat.main(["eval", "--weights", str(demo_weights), "--data", str(data), *words]) == 2
        assert not list((tmp_path / "runs").glob("*"))

    @pytest.mark.parametrize("command", ["quantize", "eval"])
    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("missing", "does not exist"),
            ("truncated", "truncated"),
            ("text", "not a PyTorch checkpoint"),
            ("auxiliary", "python reparameterization.py --weights"),
        ],
    )
    def test_weights(self, fails, command, kind, expected, data, demo_weights, tmp_path):
        path = spoil(kind, demo_weights, tmp_path)
        fails([command, "--weights", path, "--data", data, "--device", "cpu"], str(path), expected)

    def test_a_quantized_file_cannot_be_quantized(self, fails, finished, data):
        fails(
            ["quantize", "--weights", next((finished / "weights").glob("ptq_*")), "--data", data],
            "quantized checkpoint",
        )

    @pytest.mark.parametrize("command", ["quantize", "eval"])
    def test_another_number_of_classes(self, fails, command, data, demo_weights, tmp_path):
        content = yaml.safe_load(data.read_text())
        content["names"] = {0: "only"}
        other = tmp_path / "other.yaml"
        other.write_text(yaml.safe_dump(content))
        fails([command, "--weights", demo_weights, "--data", other], "detects 10 classes", "has 1")

    def test_a_quantized_file_and_another_number_of_classes(self, fails, data, finished, tmp_path):
        content = yaml.safe_load(data.read_text()) | {"names": {0: "only"}}
        other = tmp_path / "other.yaml"
        other.write_text(yaml.safe_dump(content))
        fails(["eval", "--weights", finished / f"weights/qat_best_{NAME}.pt", "--data", other], "detects 10 classes")

    def test_no_data(self, fails, demo_weights):
        fails(["quantize", "--weights", demo_weights, "--data", "nowhere.yaml"], "nowhere.yaml")

    def test_no_training_images(self, fails, data, demo_weights, tmp_path):
        content = {key: value for key, value in yaml.safe_load(data.read_text()).items() if key != "train"}
        other = tmp_path / "other.yaml"
        other.write_text(yaml.safe_dump(content))
        fails(["quantize", "--weights", demo_weights, "--data", other], "no 'train:' entry")

    @pytest.mark.parametrize("words", [(), ("--no-eval-origin", "--no-eval-ptq"), ("--ptq-only", "--no-eval-ptq")])
    def test_validation_images_without_labels_are_known_before_a_run_begins(
        self, fails, data, demo_weights, tmp_path, words
    ):
        other = unlabelled(data, tmp_path)
        fails(["quantize", "--weights", demo_weights, "--data", other, *words], "no image of 'val' has a label file")

    @pytest.mark.parametrize("words", [("--ptq-only",), ("--epochs", "0")])
    def test_labels_are_not_asked_for_where_nothing_is_evaluated(self, small_weights, data, tmp_path, words):
        other = unlabelled(data, tmp_path)
        assert quantize(small_weights, other, tmp_path, "--no-eval-origin", "--no-eval-ptq", *words) == 0

    def test_augmentation_without_labels(self, small_weights, data, tmp_path, checkout, capsys):
        words = ("--hyp", str(checkout / "data/hyps/hyp.scratch-high.yaml"), "--no-eval-origin", "--no-eval-ptq")
        other = unlabelled(data, tmp_path, labelled_val=True)
        assert quantize(small_weights, other, tmp_path, "--epochs", "1", *words) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert line.endswith("has labels, and --hyp needs some; leave it out")

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["--hyp", "nowhere.yaml"], "--hyp nowhere.yaml"),
            (["--recipe", "nowhere.yaml"], "--recipe nowhere.yaml"),
            (["--device", "99"], "--device"),
            (["--calib-method", "max", "--percentile", "99"], "--calib-method percentile"),
            (["--supervision", "task", "--supervision-stride", "2"], "--supervision-stride 2 does nothing"),
            (["--teacher", "nowhere.pt"], "--teacher nowhere.pt"),
        ],
    )
    def test_options(self, fails, words, expected, data, demo_weights):
        fails(["quantize", "--weights", demo_weights, "--data", data, *words], expected)

    def test_a_teacher_with_another_head(self, fails, data, demo_weights, tmp_path):
        teacher = save_float(tmp_path / "tiny.pt", random_network({**TINY, "nc": 11}))
        fails(
            ["quantize", "--weights", demo_weights, "--data", data, "--teacher", teacher],
            f"--teacher {teacher} has classes 11, and the network to quantize 10",
        )

    @pytest.mark.parametrize("words", [["--supervision", "layers"], ["--supervision-stride", "2"]])
    def test_a_teacher_of_another_shape_where_layers_are_compared(self, fails, data, demo_weights, tmp_path, words):
        teacher = save_float(tmp_path / "tiny.pt", random_network(TINY))
        words = ["quantize", "--weights", demo_weights, "--data", data, "--teacher", teacher, *words]
        fails(words, f"--teacher {teacher} is a network of another shape")

    def test_hyp_without_what_upstream_reads(self, fails, data, demo_weights, tmp_path):
        hyp = tmp_path / "hyp.yaml"
        hyp.write_text("lr0: 0.01\n")
        fails(["quantize", "--weights", demo_weights, "--data", data, "--hyp", hyp], "lacks mosaic")

    def test_a_pattern_that_matches_nothing(self, fails, data, demo_weights, tmp_path):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text("float: [model.99]\n")
        fails(["quantize", "--weights", demo_weights, "--data", data, "--recipe", recipe], "model.99")


class TestInterruption:
    def test_ctrl_c_says_how_to_resume(self, data, small_weights, tmp_path, capsys, scores, monkeypatch):
        scores(0.7, 0.6)

        def stop(*_args: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Finetuner, "_step", stop)
        assert quantize(small_weights, data, tmp_path) == 130
        assert f"qat.py quantize --resume {tmp_path / 'exp'}" in capsys.readouterr().out
        assert checkpoints(tmp_path / "exp") == ["last.pt", f"ptq_ap_0.6000_{NAME}.pt"]

    def test_a_full_disk_is_one_line_and_spares_what_is_there(
        self, data, small_weights, tmp_path, capsys, scores, losses, monkeypatch
    ):
        scores(0.7, 0.6, 0.61, 0.62)
        losses(5.0, 4.0, 3.0)
        write = Path.write_bytes

        def full(path: Path, content: bytes) -> int:
            if "qat_ep_1" in path.name:
                write(path, bytes(content)[:1000])
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return write(path, content)

        monkeypatch.setattr(Path, "write_bytes", full)
        assert quantize(small_weights, data, tmp_path, "--epochs", "3") == 1
        error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert len(error) == 1
        assert "no space left" in error[0]
        assert checkpoints(tmp_path / "exp") == ["last.pt", f"ptq_ap_0.6000_{NAME}.pt", f"qat_ep_0_ap_0.6100_{NAME}.pt"]
        monkeypatch.setattr(Path, "write_bytes", write)
        scores(0.62, 0.63)
        losses(3.0, 2.0)
        assert qat.main(["quantize", "--resume", str(tmp_path / "exp")]) == 0
        assert report_of(tmp_path / "exp")["rows"][2]["ap"] == 0.63


@pytest.mark.parametrize("words", [["-h"], ["quantize", "-h"], ["eval", "-h"]])
def test_help_does_not_wait_for_torch(words, checkout):
    code = "import sys, runpy; sys.argv[0] = 'qat.py'; runpy.run_path('qat.py', run_name='__main__')"
    script = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); {code}"
    done = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=checkout, capture_output=True, text=True, check=True
    )
    assert "usage: qat.py" in done.stdout
    assert done.stderr.strip() == "False"
