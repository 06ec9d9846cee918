"""`qat.py` as a user calls it: files, names, reports, what is kept, and one line for every mistake."""

import csv
import html
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import cv2
import pytest
import torch
import yaml
from qat_runs import checkpoints, quantize, report_of

import export_qat
import qat
import val_trt
from models.quantize import checkpoint
from models.quantize.finetune import HeldOutLoss
from utils import upstream
from utils.evaluation.data_yaml import load_data
from utils.evaluation.image_files import find_images
from utils.evaluation.metrics import SELF_AP
from utils.evaluation.results import EvalResult
from utils.jobs import evaluate
from utils.jobs import quantize as quantize_job
from utils.jobs.advice import CORRECT, advise
from utils.jobs.inputs import AUGMENTATION, OTHER_NAMES
from utils.reports.schema import Report

NAME = "gelan-digits"


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data, demo_weights):
    """The folder of a whole run of two epochs, whose checkpoints are kept."""
    project = tmp_path_factory.mktemp("runs")
    assert quantize(demo_weights, data, project, "--epochs", "2", "--eval-epochs", "--keep-epochs") == 0
    return project / "exp"


def state_of(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["quantized_state"]


def same_state(one: Path, other: Path) -> bool:
    a, b = state_of(one), state_of(other)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


class TestFiles:
    def test_names_carry_stage_epoch_score_and_stem_and_the_report_has_all(self, finished):
        names = checkpoints(finished)
        patterns = ["last.pt", rf"ptq_ap_0\.\d{{4}}_{NAME}.pt", rf"qat_best_{NAME}.pt"]
        patterns += [rf"qat_ep_{epoch}_ap_0\.\d{{4}}_{NAME}.pt" for epoch in (0, 1)]
        for name, pattern in zip(names, sorted(patterns), strict=True):
            assert re.fullmatch(pattern, name), name
        written = {"report.json", "report.html", "results.csv", "run.log", "placement.txt", "weights"}
        written |= {"ap_per_epoch.png", "PR_curve.png", "F1_curve.png", "confusion_matrix.png"}
        assert set(os.listdir(finished)) - {".lock"} == written
        report = Report.load(finished / "report.json")
        assert [row.stage for row in report.rows][:2] == ["float", "PTQ"]
        for row in report.rows:
            assert row.size_bytes == Path(row.file).stat().st_size
            assert row.seconds > 0
            assert row.device
            assert row.ap_resampled.error > 0
        assert [row["ap_difference_error"] is None for row in report_of(finished)["rows"]] == [True, False, False]
        assert [entry.epoch for entry in report.history] == [0, 1]
        assert all(None not in (entry.ap, entry.ap50, entry.loss, entry.lr, entry.seconds) for entry in report.history)
        assert all(entry.ap_error > 0 and entry.held_out_error > 0 for entry in report.history)
        assert {row["kind"] for row in report.ranges} == {"activation", "weight"}
        assert {"FP32", f"INT8 ({report.rows[2].stage})"} == set(report.samples[0].predictions)

    def test_what_a_run_leaves_says_what_its_report_says(self, finished):
        report = Report.load(finished / "report.json")
        with (finished / "results.csv").open() as file:
            table = list(csv.DictReader(file))
        assert [entry["epoch"] for entry in table if entry["epoch"]] == ["0", "1"]
        by_stage = {entry["stage"]: entry for entry in table if not entry["epoch"]}
        for row in report.rows:
            assert float(by_stage[row.stage]["ap"]) == pytest.approx(row.ap)
        page, log = (finished / "report.html").read_text(), (finished / "run.log").read_text()
        for text in (f"{report.rows[0].ap:.4f}", "calibration auto", advise(report).sentence):
            assert text in log
            assert text in html.unescape(page) or text == "calibration auto"
        assert "\nnext: python " in log
        for name in ("PR_curve.png", "F1_curve.png", "confusion_matrix.png"):
            height, width, _ = cv2.imread(str(finished / name)).shape
            assert min(height, width) > 400

    def test_training_moved_weights_and_ranges_of_activations(self, finished, demo_weights):
        weights = finished / "weights"
        before, after = (state_of(next(weights.glob(pattern))) for pattern in ("ptq_*", "qat_ep_1_*"))
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        activations = {name for name in before if name.endswith("_amax") and before[name].dim() == 0}
        assert len(moved & activations) > len(activations) / 2
        assert {"model.0.conv.weight", "model.0.conv.bias"} <= moved
        extra = checkpoint.load_quantized(next(weights.glob("qat_ep_0_*"))).extra
        assert (extra["stage"], extra["epoch"], extra["float_weights"]) == ("QAT", 0, str(demo_weights))

    def test_eval_gives_the_scores_of_the_run(self, finished, data, demo_weights, tmp_path):
        common = ["--data", data, "--imgsz", 96, "--batch-size", 2, "--workers", 0, "--device", "cpu"]
        (ptq,) = (finished / "weights").glob("ptq_ap_*")
        for place, (weights, words) in enumerate([(demo_weights, ()), (ptq, ()), (demo_weights, ("--save-json",))]):
            folder = tmp_path / str(place)
            assert qat.main([*map(str, ["eval", "--weights", weights, *common, "--project", folder, *words])]) == 0
            (row,) = report_of(folder / "exp")["rows"]
            known = report_of(finished)["rows"][place % 2]
            assert {row[key] == known[key] for key in ("stage", "ap", "ap_resampled")} == {True}
            assert bool(list((folder / "exp").glob("*_predictions.json"))) == bool(words)


@pytest.fixture
def scores(monkeypatch):
    """Stands for evaluation, and gives the APs that a test wants; returns those that are left."""

    def use(*aps):
        scores = ("ap", "ap50", "precision", "recall", "ap_coco", "ap50_coco")
        others = {"per_class": (), "images": 6, "instances": 9, "ms": {"inference": 1.0}, "coco": None, "seconds": 0.1,
                  "left_out": (), "measured_on": "a test"}  # fmt: skip
        results = (EvalResult(**dict.fromkeys(scores, ap), **others) for ap in aps)
        monkeypatch.setattr(evaluate, "evaluate", lambda *_args, **_kwargs: next(results))
        return results

    return use


@pytest.fixture
def losses(monkeypatch):
    """Stands for the loss on held-out images: PTQ's, then one for each epoch."""

    def use(*values):
        per_image = (value if isinstance(value, tuple) else (value, value) for value in values)
        terms = (torch.tensor([(value, 1.0) for value in one], dtype=torch.float64) for one in per_image)
        monkeypatch.setattr(quantize_job, "held_out_loss", lambda *_: HeldOutLoss(next(terms)))

    return use


@pytest.mark.usefixtures("blank_plots")
class TestWhatIsKept:
    @pytest.fixture
    def run(self, data, small_weights, tmp_path):
        """A run of the small network; its weights folder."""

        def call(*words: str, name: str = "exp") -> Path:
            assert quantize(small_weights, data, tmp_path, "--name", name, *words) == 0
            return tmp_path / name / "weights"

        return call

    # AP of the float network, of PTQ, and of what is evaluated of QAT: the best, or where there are two, each epoch;
    # losses of PTQ and of each epoch; the file that is the best; what the log says of it, and whether the notes do
    @pytest.mark.parametrize(
        ("aps", "held_out", "best", "said", "noted"),
        [
            ((0.7, 0.6, 0.71, 0.65, 0.72), (3.0, 2.0, 1.0, 1.5), "qat_ep_1_ap_0.6500", "epoch 1, AP 0.6500", False),
            ((0.7, 0.6, 0.65), (3.0, 1.0), "qat_ep_0", "QAT is chosen by the loss on all training images", True),
            ((0.7, 0.6), (3.0, 3.0, 3.1), "ptq_ap_0.6000", "PTQ is chosen by the loss on all training images", True),
            ((0.7, 0.6, 0.65), ((3.0, 3.0), (2.7, 2.68)), "qat_ep_0", "difference -0.31 ± 0.007", True),
            ((0.7, 0.6), ((3.0, 3.0, 3.0), (2.9, 2.9, 2.0)), "ptq_ap_0.6000", "difference -0.4 ± 0.", True),
            ((0.7, 0.6), (3.0,), "ptq_ap_0.6000", "QAT trained no epoch", True),
        ],
        ids=["smallest loss", "QAT", "PTQ", "beyond the error", "within the error", "no epoch"],
    )
    def test_the_state_with_the_smallest_loss_on_held_out_images_is_the_best_whatever_its_ap(
        self, run, scores, losses, tmp_path, capsys, aps, held_out, best, said, noted
    ):
        left = scores(*aps)
        losses(*held_out)
        epochs = len(held_out) - 1
        words = ["--eval-epochs"] if len(aps) > 3 else []
        weights = run("--epochs", str(epochs), "--keep-epochs", *words)
        assert not list(left), "AP is computed so often, and not more often"
        assert same_state(weights / f"qat_best_{NAME}.pt", weights / f"{best}_{NAME}.pt")
        assert said in capsys.readouterr().out
        report = report_of(tmp_path / "exp")
        assert any(said in note for note in report["notes"]) == noted
        assert len(report["history"]) == len(held_out) - 1
        assert [entry["ap"] for entry in report["history"]] == [*(aps[2:] if len(aps) > 3 else [None] * (epochs))]
        ptq = best.startswith("ptq")
        assert report["rows"][2]["stage"] == ("best (PTQ)" if ptq else "QAT")
        assert report["rows"][2]["ap"] == (aps[1] if ptq else 0.65)
        assert qat.main(["quantize", "--resume", str(tmp_path / "exp")]) == 0, "a finished run is shown again"
        assert "the run is finished" in capsys.readouterr().out

    def test_few_training_images_are_not_trained_on_unless_epochs_are_asked_for(self, run, scores, tmp_path):
        scores(0.7, 0.6)
        run()
        report = report_of(tmp_path / "exp")
        assert (report["history"], report["rows"][2]["stage"]) == ([], "best (PTQ)")
        assert "6 training images" in report["notes"][1]
        assert "--epochs 10" in report["notes"][1]

    def test_the_two_no_flags_disable_and_an_unknown_score_is_not_made_up(self, run, scores, losses, tmp_path):
        scores(0.6)
        losses(3.0, 2.0)
        run("--epochs", "1", "--no-eval-origin", "--no-eval-ptq")
        assert checkpoints(tmp_path / "exp") == [
            "last.pt", f"ptq_{NAME}.pt", f"qat_best_{NAME}.pt"
        ], "checkpoints of epochs are removed at the end"  # fmt: skip
        rows = {row["stage"]: row["ap"] for row in report_of(tmp_path / "exp")["rows"]}
        assert rows == {"PTQ": None, "QAT": 0.6}

    def test_ptq_only_stops_after_ptq_and_the_recipe_is_printed_and_stored(self, run, data, scores, tmp_path, capsys):
        scores(0.7, 0.6)
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text("calibration: {method: max}\nhead: last-conv-float\n")
        weights = run("--ptq-only", "--recipe", str(recipe))
        assert checkpoints(tmp_path / "exp") == ["last.pt", f"ptq_ap_0.6000_{NAME}.pt"]
        out = capsys.readouterr().out
        export = f"next: python export_qat.py --weights {weights}/ptq_ap_0.6000_{NAME}.pt --include onnx "
        assert out.splitlines()[-1].startswith(export.replace("next:", "or export it as it is:"))
        assert "head: last-conv-float" in out
        stored = checkpoint.load_quantized(weights / f"ptq_ap_0.6000_{NAME}.pt").recipe
        assert (stored.calibration.method, stored.calibration.images, stored.head) == ("max", 4, "last-conv-float")
        (other := tmp_path / "other.yaml").write_text(data.read_text().replace("'0'", "zero"))
        scores(0.7, 0.6)
        run("--ptq-only", "--data", str(other), name="other")
        assert f"next: {OTHER_NAMES}; {CORRECT}" in capsys.readouterr().out

    def test_augmentation_reaches_upstreams_data_set(self, run, scores, tmp_path, monkeypatch):
        scores(0.7, 0.6, 0.6)
        asked, original = [], upstream.make_dataset
        monkeypatch.setattr(upstream, "make_dataset", lambda *args, **kw: asked.append(kw) or original(*args, **kw))
        (tmp_path / "hyp.yaml").write_text(yaml.safe_dump(dict.fromkeys(AUGMENTATION, 0.1)))
        run("--epochs", "1", "--hyp", str(tmp_path / "hyp.yaml"))
        assert [(kwargs["augment"], kwargs["hyp"]["mosaic"]) for kwargs in asked] == [(True, 0.1)]


def unlabelled(data: Path, folder: Path, *, val: bool = False) -> Path:
    """A data.yaml for copies of the training images, without labels; for validation these, or with `val` the set's."""
    (folder / "bare").mkdir(parents=True)
    for file in find_images(load_data(data).paths("train")):
        shutil.copy(file, folder / "bare")
    content = yaml.safe_load(data.read_text())
    bare = str(folder / "bare")
    content |= {"train": bare, "val": content["val"] if val else bare}
    (folder / "bare.yaml").write_text(yaml.safe_dump(content))
    return folder / "bare.yaml"


def test_where_labels_are_missing_the_next_step_is_to_look_for_them(small_weights, data, tmp_path, capsys):
    mixed = unlabelled(data, tmp_path / "mixed", val=True)
    content = yaml.safe_load(mixed.read_text())
    mixed.write_text(yaml.safe_dump({**content, "val": [content["val"], content["train"]]}))
    assert quantize(small_weights, mixed, tmp_path, "--ptq-only", "--calib-images", "900") == 0
    out = capsys.readouterr().out
    assert "warning: calibration has 6 images; with fewer than 100 AP varies more" in out
    assert out.splitlines()[-1] == f"next: {CORRECT}"


def test_labels_are_needed_for_an_evaluation_and_for_augmentation(small_weights, data, tmp_path, checkout, capsys):
    bare, bare_train = unlabelled(data, tmp_path / "both"), unlabelled(data, tmp_path / "train", val=True)
    assert quantize(small_weights, bare, tmp_path, "--ptq-only", "--no-eval-origin", "--no-eval-ptq") == 0
    words = ("--hyp", str(checkout / "data/hyps/hyp.scratch-high.yaml"), "--no-eval-origin", "--no-eval-ptq")
    assert quantize(small_weights, bare_train, tmp_path, "--epochs", "1", *words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.endswith("has labels, and --hyp needs some; leave it out")


def test_images_without_labels_go_through_all_with_the_float_networks_detections_as_labels(
    demo_weights, data, tmp_path, capsys
):
    bare = unlabelled(data, tmp_path / "bare")
    words = ("--weights", demo_weights, "--imgsz", 96, "--batch-size", 2, "--workers", 0, "--device", "cpu")

    def run(command: str, folder: str, *more: object) -> Path:
        assert qat.main([command, *map(str, (*words, "--project", tmp_path / folder, *more))]) == 0
        return tmp_path / folder / "exp"

    (file,) = run("eval", "found", "--data", bare, "--save-json").glob("*_predictions.json")
    assert capsys.readouterr().out.splitlines()[-1].startswith("next: correct")  # AP of 0
    shutil.copytree(tmp_path / "bare/bare", tmp_path / "images")  # with labels that say what is detected
    (tmp_path / "labels").mkdir()
    for found in json.loads(file.read_text()):
        (image,) = (tmp_path / "images").glob(f"*{found['image_id']}.*")
        height, width, _ = cv2.imread(str(image)).shape
        left, top, w, h = found["bbox"]
        row = (found["category_id"], (left + w / 2) / width, (top + h / 2) / height, w / width, h / height)
        with (tmp_path / f"labels/{image.stem}.txt").open("a") as labels:
            labels.write(" ".join(map(str, row)) + "\n" if found["score"] >= 0.25 else "")
    content = {**yaml.safe_load(bare.read_text()), "train": str(tmp_path / "images"), "val": str(tmp_path / "images")}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(content))
    common = ("--calib-images", 4, "--data")
    rows = report_of(run("quantize", "labelled", *common, tmp_path / "data.yaml", "--ptq-only"))["rows"]
    agreed = [row["ap"] / SELF_AP for row in rows]
    assert 1 >= agreed[0] > agreed[1] > 0.1
    lost, error = agreed[0] - agreed[1], rows[1]["ap_difference_error"] / SELF_AP
    for name, target in (("trains", lost + 0.5 * error), ("skipped", lost + 5 * error)):
        qat_words = ("--qat", "auto", "--target-drop", target, "--epochs", 1, "--iters", 1)
        report = report_of(run("quantize", name, *common, bare, "--unlabelled", *qat_words))
        assert [row["ap"] for row in report["rows"][:2]] == pytest.approx(agreed, abs=0.003)
        assert "detections as labels" in report["rows"][1]["ap_with"]
        assert (len(report["history"]), name in report["notes"][1]) == (name == "trains", True)
        best = capsys.readouterr().out.rpartition("\nbest: ")[2].partition("\n")[0]
        assert (", agreement 0." in best, "AP" in best) == (True, False)
    known = report["rows"][1]["ap"]
    found = json.loads((run("calibrate", "calibrate", *common, bare, "--unlabelled") / "calibration.json").read_text())
    chosen = report["notes"][0].partition("calibration auto: ")[2].partition(";")[0]
    assert found["methods"][chosen] == pytest.approx(known, abs=1e-9)
    assert found["measure"] == "agreement"
    folder = run("sensitive", "sensitive", *common, bare, "--unlabelled", "--float-budget", 0)
    summary = json.loads((folder / "summary-sensitive-analysis.json").read_text())
    both = pytest.approx([report["rows"][0]["ap"], known], abs=1e-9)
    assert [summary["ap"][name] for name in ("float", "INT8")] == both
    weights = next((tmp_path / "skipped/exp/weights").glob("ptq_*"))  # it knows its dataset and its float network
    rows = report_of(run("eval", "eval", "--weights", weights, "--unlabelled"))["rows"]
    assert ([row["ap"] for row in rows], rows[1]["ap_with"]) == (both, report["rows"][1]["ap_with"])
    own, onnx = tmp_path / "own.pt", tmp_path / "int8.onnx"
    torch.save({"model": upstream.load_float(demo_weights).model, "opt": {"data": str(bare)}}, own)
    assert "No verdict: all 6 images of val are training images" in capsys.readouterr().out
    export = ("--weights", str(weights), "--include", "onnx", "--simplify", "--dynamic", "batch")
    assert export_qat.main([*export, "--typing", "weak", "--device", "cpu", "--output", str(onnx)]) == 0
    following = shlex.split(capsys.readouterr().out.rpartition("next: python val_trt.py ")[2].partition("\n")[0])
    assert following == [str(onnx), "--reference", str(demo_weights), "--data", str(bare), "--unlabelled"]
    for file, tolerance in ((weights, 1e-9), (onnx, 0.02)):
        command = (file, "--reference", own, "--unlabelled", *words[2:], "--project", tmp_path / file.stem)
        assert val_trt.main([*map(str, command)]) == 0
        rows = report_of(tmp_path / file.stem / "exp")["rows"]
        assert [row["ap"] for row in rows] == pytest.approx([report["rows"][0]["ap"], known], abs=tolerance)
    assert f"using {bare}, which {own} names" in capsys.readouterr().out
