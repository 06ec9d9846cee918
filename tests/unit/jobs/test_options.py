"""The command line of qat.py: what is given, what is merged, what may change on resume."""

from __future__ import annotations

import pytest

import qat
from models.quantize.recipe import Recipe
from utils.core.errors import InputError, RecipeError
from utils.jobs.options import (
    EvalOptions,
    QuantizeOptions,
    SensitiveOptions,
    check_recipe,
    further_files,
    given_options,
    merged_recipe,
    resumed_options,
)


def parse(*words: str) -> dict:
    return vars(qat.build_parser().parse_args(list(words)))


def test_defaults_are_those_that_users_know():
    options = QuantizeOptions(**given_options(parse("quantize", "--weights", "yolov9-c.pt"), QuantizeOptions))
    assert (options.batch_size, options.imgsz, options.seed, options.project) == (10, 640, 57, "runs/qat")
    assert [options.no_eval_origin, options.no_eval_ptq, options.ptq_only] == [False] * 3
    recipe = merged_recipe(options)
    assert (recipe.finetune.iters, recipe.finetune.epochs, recipe.finetune.supervision_stride) == (200, 10, 1)
    assert options.stem == "yolov9-c"


def test_evaluation_defaults_are_those_that_users_know():
    options = EvalOptions(**given_options(parse("eval", "--weights", "a.pt"), EvalOptions))
    assert (options.conf_thres, options.iou_thres, options.project) == (0.001, None, "runs/qat_eval")
    assert not options.save_json


@pytest.mark.parametrize("flag", ["--imgsz", "--img", "--img-size"])
def test_image_size_has_three_names(flag):
    assert given_options(parse("quantize", flag, "320"), QuantizeOptions) == {"imgsz": 320}


def test_the_two_no_flags_disable():
    given = given_options(parse("quantize", "--no-eval-origin", "--no-eval-ptq"), QuantizeOptions)
    assert QuantizeOptions(**given).no_eval_origin
    assert QuantizeOptions(**given).no_eval_ptq


def test_only_what_the_user_gives_counts_as_given():
    assert given_options(parse("quantize"), QuantizeOptions) == {}
    assert given_options(parse("quantize", "--exist-ok", "--seed", "0"), QuantizeOptions) == {
        "exist_ok": True,
        "seed": 0,
    }


def test_the_command_line_wins_over_the_recipe_file(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("calibration: {method: max, batches: 3}\nfinetune: {epochs: 4, lr: 2.0e-6}\nhead: float\n")
    recipe = merged_recipe(QuantizeOptions(recipe=str(file), calib_batches=7, lr=4e-6, iters=2))
    assert (recipe.calibration.method, recipe.calibration.batches) == ("max", 7)
    assert (recipe.finetune.epochs, recipe.finetune.iters, recipe.head) == (4, 2, "float")
    assert recipe.finetune.lr == 4e-6


def test_nothing_given_is_the_default_recipe():
    assert merged_recipe(QuantizeOptions()) == Recipe()


def test_every_recipe_flag_arrives():
    given = given_options(
        parse("quantize", "--calib-method", "percentile", "--percentile", "99.5", "--calib-batches", "2",
              "--epochs", "3", "--iters", "4", "--supervision-stride", "5"),
        QuantizeOptions,
    )  # fmt: skip
    recipe = merged_recipe(QuantizeOptions(**given))
    assert (recipe.calibration.method, recipe.calibration.percentile, recipe.calibration.batches) == (
        "percentile",
        99.5,
        2,
    )
    tune = recipe.finetune
    assert (tune.epochs, tune.iters, tune.supervision_stride) == (3, 4, 5)


def test_a_percentile_that_does_nothing_is_refused():
    with pytest.raises(RecipeError, match="--calib-method percentile"):
        merged_recipe(QuantizeOptions(percentile=99.9, calib_method="max"))


def test_a_stride_asks_for_supervision_by_layers():
    tune = merged_recipe(QuantizeOptions(supervision_stride=3)).finetune
    assert (tune.supervision, tune.supervision_stride) == ("layers", 3)
    assert merged_recipe(QuantizeOptions(supervision="layers", supervision_stride=3)).finetune == tune
    assert merged_recipe(QuantizeOptions()).finetune.supervision == "task"
    with pytest.raises(RecipeError, match=r"--supervision-stride 3 does nothing with --supervision task"):
        merged_recipe(QuantizeOptions(supervision="task", supervision_stride=3))


def test_what_trains_is_an_option():
    words = ("quantize", "--train", "ranges", "--supervision", "layers", "--teacher", "big.pt")
    options = QuantizeOptions(**given_options(parse(*words), QuantizeOptions))
    tune = merged_recipe(options).finetune
    assert (tune.train, tune.supervision, options.teacher) == ("ranges", "layers", "big.pt")
    assert further_files(options)["--teacher"] == "big.pt"
    with pytest.raises(RecipeError, match="--train"):
        QuantizeOptions(train="nothing")


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 1e-4), ("epochs", 3), ("train", "ranges"), ("supervision", "layers"), ("teacher", "big.pt")],
)
def test_what_would_train_otherwise_is_refused_on_resume(name, value):
    saved = QuantizeOptions(weights="a.pt").to_dict()
    with pytest.raises(InputError, match=rf"--{name} is {value} here and not given in the run to resume"):
        resumed_options(saved, {name: value}, QuantizeOptions)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"batch_size": 0}, "--batch-size"),
        ({"imgsz": -32}, "--imgsz"),
        ({"iters": 0}, "--iters"),
        ({"workers": -1}, "--workers"),
        ({"lr": 0.0}, "--lr"),
        ({"quantizer": "other"}, "--quantizer"),
    ],
)
def test_values_outside_their_range_are_named(values, named):
    with pytest.raises(InputError, match=named):
        QuantizeOptions(**values)


def test_thresholds_are_fractions():
    with pytest.raises(InputError, match="--conf-thres"):
        EvalOptions(conf_thres=25)


def test_resume_takes_the_saved_options_and_what_may_change():
    saved = QuantizeOptions(weights="a.pt", batch_size=4, device="0").to_dict()
    options = resumed_options(
        saved, {"device": "cpu", "workers": 3, "batch_size": 4, "project": "elsewhere"}, QuantizeOptions
    )
    assert options.project == "runs/qat"
    assert (options.weights, options.batch_size, options.device, options.workers) == ("a.pt", 4, "cpu", 3)


def test_resume_refuses_what_would_make_it_another_run():
    saved = QuantizeOptions(weights="a.pt").to_dict()
    with pytest.raises(InputError, match="--batch-size is 4 here and 10 in the run"):
        resumed_options(saved, {"batch_size": 4}, QuantizeOptions)


@pytest.mark.parametrize("kind", [QuantizeOptions, SensitiveOptions])
def test_a_recipe_that_is_given_again_says_what_it_said(kind, tmp_path):
    """Unless the run has changed it since: the calibration that `auto` found."""
    path = tmp_path / "recipe.yaml"
    path.write_text("head: float\nfinetune: {epochs: 3}\n")
    options = kind(weights="a.pt", recipe=str(path))
    quantize = options if isinstance(options, QuantizeOptions) else options.as_quantize()
    saved = merged_recipe(quantize)
    given = {"recipe": str(path)}
    check_recipe(quantize, given, saved)
    with pytest.raises(InputError, match="has changed"):
        check_recipe(quantize, given, saved.replace(finetune_epochs=9))
    path.write_text("head: int8\nfinetune: {epochs: 3}\n")
    check_recipe(quantize, {}, saved)  # not given again: the run's own counts
    with pytest.raises(InputError, match=r"recipe\.yaml has changed since the run was started; leave --recipe out"):
        check_recipe(quantize, given, saved)
    path.write_text("head: float\nfinetune: {epochs: 3}\ncalibration: {method: auto}\n")
    check_recipe(quantize, given, saved.replace(calibration_method="mse"))
    path.unlink()
    with pytest.raises(InputError, match=r"recipe\.yaml"):
        check_recipe(quantize, given, saved)


def test_weights_are_needed(capsys):
    assert qat.main(["quantize"]) == 2
    assert capsys.readouterr().err.startswith("error: --weights is missing")
    assert qat.main(["eval"]) == 2

    assert qat.main(["sensitive"]) == 2
    assert qat.main(["calibrate"]) == 2


def test_sensitivity_defaults_and_flags():
    options = SensitiveOptions(**given_options(parse("sensitive", "--weights", "a.pt"), SensitiveOptions))
    assert (options.project, options.granularity, options.metric) == ("runs/qat_sensitive", "layer", "proxy")
    assert (options.target_drop, options.budget, options.num_image) == (0.002, None, 200)
    given = given_options(
        parse("sensitive", "--granularity", "module", "--metric", "ap", "--budget", "5", "--num-image", "50",
              "--calib-method", "percentile", "--percentile", "99.9", "--batch-size", "4", "--hyp", "h.yaml"),
        SensitiveOptions,
    )  # fmt: skip
    options = SensitiveOptions(**given)
    assert (options.granularity, options.metric, options.budget, options.num_image) == ("module", "ap", 5, 50)
    quantize = options.as_quantize()
    assert (quantize.batch_size, quantize.hyp) == (4, "h.yaml")
    assert merged_recipe(quantize).calibration.percentile == 99.9


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"granularity": "block"}, "--granularity"),
        ({"metric": "loss"}, "--metric"),
        ({"num_image": 0}, "--num-image"),
        ({"budget": 0.0}, "--budget"),
        ({"target_drop": 2.0}, "--target-drop"),
        ({"float_budget": -0.1}, "--float-budget"),
    ],
)
def test_values_of_sensitive_outside_their_range_are_named(values, named):
    with pytest.raises(InputError, match=named):
        SensitiveOptions(**values)


def test_a_sensitivity_run_resumes_with_another_budget_only():
    saved = SensitiveOptions(weights="a.pt", budget=1.0).to_dict()
    assert resumed_options(saved, {"budget": 9.0}, SensitiveOptions).budget == 9
    with pytest.raises(InputError, match="--metric is ap here and proxy"):
        resumed_options(saved, {"metric": "ap"}, SensitiveOptions)
