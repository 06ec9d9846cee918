"""What a result means and what comes next: the rule for a loss, each row of the table of next steps, and a verdict."""

import re
import shlex

import pytest
from report_examples import example_row, resampled

from utils.core.score import AGREEMENT, Difference
from utils.core.split_counts import SplitCounts
from utils.jobs.advice import CORRECT, STEPS, Facts, advise, next_step, worse_after_qat
from utils.jobs.commands import AfterExport
from utils.jobs.judgement import TARGET_DISAGREEMENT, TARGET_DROP, allowed_drop, judge, more_units
from utils.reports.schema import BEST_PTQ, UNFINISHED, Advice, Epoch, Level, Report

OK, CHECK, LOSS, NONE = Level.OK, Level.CHECK, Level.LOSS, Level.NONE


# The rule


@pytest.mark.parametrize(
    ("value", "error", "level", "words"),
    [
        (-0.0002, 0.0005, OK, "loses at most 0.0012 AP (95 %, 500 images; measured -0.0002 ± 0.0005)"),
        (0.0006, 0.0009, OK, "loses at most 0.0012 AP (95 %, 500 images; measured +0.0006 ± 0.0009)"),
        (-0.0008, 0.0003, OK, "loses at most 0.0014 AP"),  # a measurable loss, and small enough
        (0.0200, 0.0010, OK, "gains 0.0200 ± 0.0010 AP (500 images)"),
        (-0.0115, 0.0069, CHECK, "loses at most 0.0253 AP (95 %, 500 images; measured -0.0115 ± 0.0069), and 0.002 is"),
        (0.0000, 0.0050, CHECK, "not enough images to tell"),
        (-0.0015, 0.0005, CHECK, "not enough images to tell"),  # measurable, and perhaps too large
        (-0.0130, 0.0064, LOSS, "loses 0.0130 ± 0.0064 AP (500 images), more than the 0.002 allowed"),
        (-0.0021, 0.0001, LOSS, "loses 0.0021 ± 0.0001 AP"),
        (-0.5, None, CHECK, "no standard error"),
    ],
)
def test_a_difference_is_judged_by_its_value_its_error_and_the_target(value, error, level, words):
    judgement = judge(Difference(value, error), 0.002, images="500 images")
    assert judgement.level is level
    assert words in judgement.words


def test_few_groups_make_a_wider_interval():
    assert judge(Difference(-0.0045, 0.0021), 0.002).level is LOSS
    assert judge(Difference(-0.0045, 0.0021, units=13), 0.002).level is CHECK, "2.27 standard errors are 0.0048"


@pytest.mark.parametrize(
    ("value", "error", "units", "more"),
    [
        (0.0, 0.002, 100, 300),  # a margin of 0.004 has to be halved: four times as many
        (0.002, 0.004, 100, 300),  # 0.008 to 0.004
        (-0.006, 0.002, 100, 100),  # nearly enough: as many again
        (-0.002, 0.002, 100, 6300),  # at the target itself no number would do: to a quarter of it
    ],
)
def test_how_many_images_more_could_tell(value, error, units, more):
    assert more_units(Difference(value, error), 0.002, units) == more


def test_what_may_be_lost():
    assert (allowed_drop(None, False), allowed_drop(None, True)) == (TARGET_DROP, TARGET_DISAGREEMENT)
    assert (allowed_drop(0.01, False), allowed_drop(0.002, True)) == (0.01, 0.002)


# The table


BASE = (0.7407, 0.7417, 0.7412)
NOISE = (0.7410, 0.7430, 0.7420)  # 0.0008 ± 0.0005 above it
LOST = (0.7107, 0.7127, 0.7102)  # 0.03 ± 0.001 below it
GAIN = (0.7607, 0.7627, 0.7602)
WIDE = (0.74, 0.76, 0.72)


def beside_float(*rows: tuple, file: str = "f.pt", input_size: str = "", **changes) -> Report:
    """An FP32 row and others, each (stage, file, AP, AP on three resamplings)."""
    changes = {"ap_resampled": resampled(*BASE), **changes}
    others = [
        example_row(stage, file=name, ap=ap, input_size=input_size, images=500, ap_resampled=of and resampled(*of))
        for stage, name, ap, of in rows
    ]
    return Report(command="x", data="d.yaml", rows=[example_row(file=file, input_size=input_size, **changes), *others])


EXPORT = "python export_qat.py --weights"
SENSITIVE = "python qat.py sensitive --weights f.pt --data d.yaml --imgsz 640"
QUANTIZE = "python qat.py quantize --weights f.pt --data d.yaml --imgsz 640"
CASES = [  # name of the step, rows, changes of the report, level, words, command
    ("export", [("QAT", "q.pt", 0.7420, NOISE)], {}, OK, "loses at most .* Export q.pt", f"{EXPORT} q.pt"),
    ("export", [("QAT", "q.pt", 0.7612, GAIN)], {}, OK, "gains 0.0200", f"{EXPORT} q.pt"),
    ("QAT", [("PTQ", "p.pt", 0.7112, LOST)], {}, LOSS, "loses 0.0300 .* Let QAT regain it", QUANTIZE),
    ("build", [("QAT", "q.pt", 0.7420, NOISE), ("ONNX", "q 8.onnx", 0.7420, NOISE)], {}, OK, "Build the engine",
     "scripts/generate_trt_engine.sh 'q 8.onnx' 640"),
    ("verify", [("QAT", "q.pt", 0.7420, NOISE), ("ONNX", "q.onnx", 0.7112, LOST)], {}, LOSS, "verify the file",
     "python export_qat.py --verify q.onnx"),
    ("export anew", [("QAT", "q.pt", 0.7420, NOISE), ("TensorRT INT8", "q.engine", 0.7112, LOST)], {}, LOSS,
     "Q.pt loses less", f"{EXPORT} q.pt"),
    ("step before", [("PTQ", "p.pt", 0.7420, NOISE), ("QAT", "q.pt", 0.7112, LOST)], {}, LOSS,
     "loses .* Export p.pt, which", f"{EXPORT} p.pt"),
    ("QAT", [("PTQ", "p.pt", 0.6912, (0.69, 0.7011, 0.6789)), ("QAT", "q.pt", 0.7112, LOST)], {}, LOSS, "regain it",
     QUANTIZE),
    ("layers in FP16", [("QAT", "q.pt", 0.7112, LOST)], {"history": [Epoch(epoch=0)]}, LOSS, "in FP16", SENSITIVE),
    ("layers in FP16", [("PTQ", "p.pt", 0.7112, LOST), (BEST_PTQ, "q.pt", 0.7112, LOST)], {}, LOSS, "in FP16",
     SENSITIVE),
    ("layers in FP16", [("mse", "r.yaml", 0.7112, LOST)], {}, LOSS, "in FP16", f"{SENSITIVE} --recipe r.yaml"),
    ("recipe", [("mse", "r.yaml", 0.7420, NOISE)], {}, OK, "Quantize with r.yaml", f"{QUANTIZE} --recipe r.yaml"),
    ("no layer helps", [("INT8", "recipe.yaml", 0.7112, LOST)], {}, LOSS, "let QAT regain it", f"{QUANTIZE} --recipe"),
    ("recipe", [("recipe", "recipe.yaml", 0.7112, LOST)], {}, LOSS, "Quantize with recipe", f"{QUANTIZE} --recipe"),
    ("recipe", [("mse", "r.yaml", 0.7420, WIDE)], {}, CHECK, "not enough images", f"{QUANTIZE} --recipe r.yaml"),
    ("calibration", [("INT8", "recipe.yaml", 0.7112, LOST)], {"command": "python qat.py sensitive --percentile 99"},
     LOSS, "better calibration", "python qat.py calibrate --weights f.pt"),
    ("deploy", [("QAT", "q.pt", 0.7420, NOISE), ("TensorRT FP16", "f.engine", 0.5, LOST),
                ("TensorRT INT8", "q.engine", 0.7420, NOISE)], {}, OK, "then deploy it",
     "python scripts/benchmark_trt.py q.engine"),
    ("too few images", [("QAT", "q.pt", 0.7420, WIDE)], {}, CHECK,
     "not enough images to tell. Add about [0-9]+ more images to the val split and evaluate again, or allow the loss "
     "with --target-drop 0.039", "python val_trt.py q.pt --reference f.pt --data d.yaml"),
    ("too few images", [("ONNX", "q.onnx", 0.7420, WIDE)], {}, CHECK, "Add about", "python val_trt.py q.onnx"),
    ("too few images", [("QAT", "q.pt", 0.7, None)], {}, CHECK, "no standard error", "python val_trt.py q.pt"),
    ("doubt", [("QAT", "q.pt", 0.7420, NOISE)], {"doubts": ["the class names differ"]}, CHECK,
     "at most .* The class names differ; correct", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rows", "changes", "level", "words", "command"), CASES)
def test_each_row_of_the_table(name, rows, changes, level, words, command):
    report = beside_float(*rows).model_copy(update=changes)
    advice = advise(report)
    assert next_step(Facts.of(report, advice.row)).name == name
    assert advice.level is level
    assert re.search(words, advice.text), advice.text
    assert advice.command.startswith(command)
    assert bool(advice.command) == bool(command)
    assert advice.next_line


@pytest.mark.parametrize(
    ("splits", "missing"),
    [
        (["test"], ["train", "val"]),
        (["train", "test"], ["val"]),
        (["val"], ["train"]),
        (["train", "val"], []),
        ([], []),
    ],
)
def test_no_command_is_offered_whose_splits_the_dataset_does_not_have(splits, missing):
    """As after `val_trt.py --task test`; no splits: a report that was written before they were stored."""
    report = beside_float(("PTQ", "p.pt", 0.7112, LOST)).model_copy(update={"data_splits": splits})
    assert advise(report).command.startswith("" if missing else QUANTIZE)
    assert bool(advise(report).command) != bool(missing)
    report.rows = report.rows[:1]
    advice = advise(report)
    assert bool(advice.command) != bool(missing)
    assert [split for split in ("train", "val") if split in advice.next_line.split(" with a dataset")[-1]] == missing


@pytest.mark.parametrize(
    ("splits", "task"),
    [(["test"], ["--task", "test"]), (["train", "test"], ["--task", "test"]), (["val"], []), ([], [])],
)
def test_files_are_compared_on_a_split_that_the_dataset_has(splits, task):
    report = beside_float(("QAT", "q.pt", 0.7420, WIDE)).model_copy(update={"data_splits": splits})
    words = shlex.split(advise(report).command)
    assert words[:2] == ["python", "val_trt.py"]
    assert words[words.index("d.yaml") + 1 :] == task


def test_no_row_of_the_table_is_without_a_test():
    tested = {name for name, *_ in CASES} | {"other FP32 weights"}
    assert {step.name for step in STEPS} == tested


def test_a_comparison_with_other_weights_is_said_and_leads_nowhere():
    report = beside_float(("ONNX", "q.onnx", 0.7420, NOISE))
    report.rows[1] = report.rows[1].model_copy(update={"caveat": "it was not made from the weights of o.pt"})
    advice = advise(report)
    assert (advice.level, advice.command) == (CHECK, "")
    assert "not made from the weights of o.pt" in advice.next_line


# The verdict


def test_without_enough_images_the_next_command_does_not_build():
    for file in ("q.pt", "q.onnx", "q.engine"):
        advice = advise(beside_float(("X", file, 0.7420, WIDE)))
        assert advice.level is CHECK
        assert not {"generate_trt_engine.sh", "export_qat.py"} & {*advice.command.replace("/", " ").split()}


def test_a_loss_that_one_file_of_a_network_shows_is_a_loss():
    """The ONNX file of the same network is 1.7 standard errors below FP32, the checkpoint 3."""
    report = beside_float((BEST_PTQ, "p.pt", 0.7112, LOST), ("ONNX", "p.onnx", 0.7127, WIDE))
    advice = advise(report)
    assert advice.level is LOSS
    assert advice.row is report.rows[1]
    assert "(best (PTQ))" in advice.sentence


def test_the_verdict_of_several_runs_is_that_of_the_row_closest_to_float():
    report = beside_float(("QAT", "a.pt", 0.7420, NOISE), ("PTQ", "b.pt", 0.7112, LOST))
    assert advise(report).level is LOSS
    report.command = "x\ny"
    assert advise(report).level is OK


def counts(**changes) -> SplitCounts:
    names = ("objects", "backgrounds", "without_a_label_file", "left_out", "bad_label_lines", "clipped_labels")
    return SplitCounts(**{"name": "val", "images": 24, "first": {}, "boxes_among_polygons": 0,
                          **dict.fromkeys(names, 0), **changes})  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"splits": [counts(also_in_train=24)]}, "all 24 images of val are training images"),
        ({"problems": ["the network gives NaN"]}, "the network gives NaN"),
    ],
)
def test_where_ap_means_nothing_there_is_no_verdict(changes, words):
    report = beside_float(("QAT", "q.pt", 0.7420, NOISE)).model_copy(update=changes)
    advice = advise(report)
    assert advice.sentence.startswith("No verdict: ")
    assert words in advice.sentence
    assert (advice.level, advice.command, advice.todo) == (CHECK, "", CORRECT)


def test_some_images_of_the_training_leave_the_verdict():
    report = beside_float(("QAT", "q.pt", 0.7420, NOISE))
    report.splits = [counts(also_in_train=23)]
    assert advise(report).level is OK


def test_an_fp32_model_that_finds_nothing_says_nothing_of_int8():
    advice = advise(beside_float(("QAT", "q.pt", 0.0, (0.0, 0.0, 0.0)), ap=0.0))
    assert "the FP32 model has AP 0.0000" in advice.sentence
    assert not advice.command


def test_an_unfinished_run_is_continued_first():
    report = beside_float(("PTQ", "p.pt", 0.7112, LOST))
    report.notes.append(f"{UNFINISHED}; continue with: python q --resume r")
    advice = advise(report)
    assert (advice.text, advice.command) == ("This run is not finished. Continue it.", "python q --resume r")
    report.command += "\nof another run"
    assert advise(report).command != "python q --resume r"


@pytest.mark.parametrize(
    ("agreement", "epochs", "level", "words"),
    [
        (0.985, 0, OK, "loses at most 0.0150 agreement .* Export q"),
        (0.96, 0, LOSS, "Let QAT regain"),
        (0.96, 1, CHECK, "Export q"),
    ],
)
def test_without_labels_the_target_is_that_of_agreement_and_after_qat_the_network_is_exported(
    agreement, epochs, level, words
):

    report = beside_float(("PTQ", "q.pt", agreement, [agreement] * 3), ap=1.0, ap_resampled=resampled(*[1.0] * 3))
    report.rows = [row.model_copy(update={"ap_with": AGREEMENT}) for row in report.rows]
    report.history = [Epoch(epoch=0)] * epochs
    advice = advise(report)
    assert advice.level is level
    assert re.search(words, advice.text), advice.text
    assert ("python qat.py" in advice.command) == ("--unlabelled" in advice.command)


@pytest.mark.parametrize(
    ("words", "epochs", "following"),
    [
        ("--qat never --recipe r.yaml --seed=3 --epochs 4", 0, "quantize {} --seed 3 --recipe r.yaml --epochs 4"),
        (
            "--calib-images 40 --hyp h.yaml --device '' --batch-size 4",
            1,
            "sensitive {} --batch-size 4 --calib-images 40",
        ),
        ("--calib-method auto --calib-images 40", 1, "sensitive {} --calib-method auto --calib-images 40"),
    ],
)
def test_the_next_command_has_the_options_of_the_one_before(words, epochs, following):
    report = beside_float(("QAT", "q.pt", 0.7112, LOST), input_size="640x640")
    report.command, report.history = f"python qat.py quantize {words}", [Epoch(epoch=0)] * epochs
    assert advise(report).command == "python qat.py " + following.format("--weights f.pt --data d.yaml --imgsz 640")


@pytest.mark.parametrize(("size", "words"), [("384x640", "384x640"), ("up to 640, rectangular", "640"), ("", "640")])
def test_a_command_has_the_size_that_was_measured(size, words):
    report = beside_float(("PTQ", "p 1.pt", 0.7112, LOST), file="f 1.pt", input_size=size)
    expected = ["python", "qat.py", "quantize", "--weights", "f 1.pt", "--data", "d.yaml", "--imgsz", words]
    assert shlex.split(advise(report).command) == expected


def test_masks_that_lose_more_than_boxes_decide():
    report = beside_float(("QAT", "q.pt", 0.7420, NOISE), mask_ap=0.44, mask_ap_resampled=resampled(0.44, 0.45, 0.43))
    worse = {"mask_ap": 0.40, "mask_ap_resampled": resampled(0.40, 0.411, 0.389)}
    report.rows[1] = report.rows[1].model_copy(update=worse)
    assert "loses 0.0400 ± 0.0010 mask AP" in advise(report).sentence


@pytest.mark.parametrize(
    ("rows", "text", "command"),
    [
        ([], "", ""),
        ([example_row("QAT", file="q.onnx")], "The loss of INT8 is unknown: there is no FP32 row.",
         "python val_trt.py q.onnx --reference FLOAT.pt --data d.yaml"),
        ([example_row(file="f.pt"), example_row("QAT", file="q.pt", ap=None)], "no row compares with the FP32 row",
         "python val_trt.py q.pt --reference f.pt --data d.yaml"),
        ([example_row(file="f.pt")], "", QUANTIZE),
        ([example_row(file="f.onnx")], "", "scripts/generate_trt_engine.sh f.onnx"),
        ([example_row("TensorRT FP16", file="f.engine")], "", "python scripts/benchmark_trt.py f.engine"),
    ],
)  # fmt: skip
def test_without_a_comparison_there_is_a_next_step_and_no_verdict(rows, text, command):
    advice = advise(Report(command="x", data="d.yaml", rows=rows))
    assert advice.level is NONE
    assert text in advice.text
    assert bool(advice.text) == bool(text)
    assert advice.command == command


def test_an_fp32_model_that_does_not_fit_the_dataset_is_not_quantized():
    report = Report(command="x", data="d.yaml", rows=[example_row(file="f.pt")], doubts=["other names"])
    assert advise(report).command == ""
    assert advise(report).next_line == f"other names; {CORRECT}"


def test_a_verdict_in_words():
    advice = Advice(OK, "INT8 is fine", "export it", "python x")
    assert (advice.text, advice.next_line) == ("INT8 is fine. Export it.", "python x")
    assert (Advice(OK, "INT8 is fine").text, Advice(NONE, "", "do it").text) == ("INT8 is fine.", "")
    assert Advice(NONE, "", "do it").next_line == "do it"


@pytest.mark.parametrize(
    ("ptq", "qat", "words"),
    [
        ({}, {"ap": 0.70}, "PTQ has the higher AP"),
        ({}, {"ap": 0.7412}, ""),
        ({}, {"ap": 0.78}, ""),
        ({"agreement": 0.98}, {"agreement": 0.95}, "PTQ agrees more with the FP32 model"),
        ({"ap_with": AGREEMENT}, {"ap_with": AGREEMENT, "ap": 0.70}, "PTQ agrees more with the FP32 model"),
    ],
)
def test_a_state_of_qat_that_is_worse_than_ptq_is_named(ptq, qat, words):
    errors = {"ap_resampled": resampled(0.74, 0.75, 0.73), "agreement_resampled": resampled(0.98, 0.98, 0.98)}
    rows = [example_row(stage, **errors, **changes) for stage, changes in (("PTQ", ptq), ("QAT", qat))]
    sentence = worse_after_qat(rows)
    assert sentence.startswith(words)
    assert bool(sentence) == bool(words)
    assert worse_after_qat(rows[:1]) == ""


@pytest.mark.parametrize(
    ("known", "engine_only", "lines"),
    [
        ({"has_gpu": True}, False, ["next: scripts/generate_trt_engine.sh 'a b.onnx'"]),
        ({}, True, ["next, on the machine with the GPU: scripts/generate_trt_engine.sh 'a b.onnx'"]),
        ({"reference": "f.pt", "data": "d.yaml"}, False,
         ["next: python val_trt.py 'a b.onnx' --reference f.pt --data d.yaml",
          "then, on the machine with the GPU: scripts/generate_trt_engine.sh 'a b.onnx'"]),
        ({"unlabelled": True}, False, ["next: python val_trt.py 'a b.onnx' --data DATA.yaml --unlabelled",
                                       "then, on the machine with the GPU: scripts/generate_trt_engine.sh 'a b.onnx'"]),
    ],
)  # fmt: skip
def test_what_follows_an_export(known, engine_only, lines):
    usual = {"has_gpu": False, "data": "", "reference": "", "unlabelled": False}
    assert AfterExport(**{**usual, **known}).lines("a b.onnx", engine_only=engine_only) == lines


@pytest.mark.parametrize("has_gpu", [False, True])
def test_no_engine_follows_the_export_of_a_file_for_openvino(has_gpu):
    lines = AfterExport(has_gpu, "d.yaml", "f.pt", False).lines("a.onnx", engine_only=False, for_openvino=True)
    assert lines == ["next: python val_trt.py a.onnx --runtime openvino --reference f.pt --data d.yaml"]
