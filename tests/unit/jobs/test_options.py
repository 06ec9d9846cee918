"""The options of qat.py: what is given, what is merged into the recipe, what may change on resume."""

from pathlib import Path

import pytest

import qat
from utils import cli
from utils.core.errors import InputError
from utils.jobs.options import CalibrateOptions, QuantizeOptions, SensitiveOptions


def parsed(kind, *words):
    return kind.parsed(cli.parsers("qat.py", (kind, print), "")[0].parse_args([str(word) for word in words]))


def test_the_command_line_wins_over_the_recipe_file(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("calibration: {method: max, images: 3}\nfinetune: {epochs: 4, lr: 2.0e-6}\nhead: float\n")
    recipe = QuantizeOptions(recipe=str(file), calib_images=7, lr=4e-6, iters=2).merged_recipe()
    assert (recipe.calibration.method, recipe.calibration.images) == ("max", 7)
    assert (recipe.finetune.epochs, recipe.finetune.iters, recipe.head) == (4, 2, "float")
    assert recipe.finetune.lr == 4e-6
    assert parsed(QuantizeOptions, "--recipe", str(file), "--lr", "auto").merged_recipe().finetune.lr == "auto"


def test_batches_of_a_recipe_of_1_0_are_so_many_times_the_batch_size(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("calibration: {batches: 3}\n")
    calibration = QuantizeOptions(recipe=str(file), batch_size=4).merged_recipe().to_dict()["calibration"]
    assert (calibration["images"], "batches" in calibration) == (12, False)
    assert QuantizeOptions(recipe=str(file), calib_images=5).merged_recipe().calibration.images == 5


def test_every_recipe_flag_arrives():
    words = ("--calib-method", "percentile", "--percentile", "99.5", "--calib-images", "2", "--epochs", "3",
             "--iters", "4", "--train", "ranges", "--lr", "1e-5")  # fmt: skip
    recipe = parsed(QuantizeOptions, *words).merged_recipe()
    calibration, tune = recipe.calibration, recipe.finetune
    assert (calibration.method, calibration.percentile, calibration.images) == ("percentile", 99.5, 2)
    assert (tune.epochs, tune.iters, tune.train, tune.lr) == (3, 4, "ranges", 1e-5)
    words = ("--calib-method", "percentile", "--percentile", "99.9", "--batch-size", "4", "--hyp", "h.yaml")
    for kind in (SensitiveOptions, CalibrateOptions):
        options = parsed(kind, *words[4 * (kind is CalibrateOptions) :])
        assert (options.batch_size, options.further_files()["--hyp"]) == (4, "h.yaml")
    assert parsed(SensitiveOptions, *words).merged_recipe().calibration.percentile == 99.9


def test_resume_takes_the_saved_options_and_what_may_change():
    saved = QuantizeOptions(weights="a.pt", batch_size=4, device="0").model_dump()
    words = ("--device", "cpu", "--workers", "3", "--batch-size", "4", "--project", "elsewhere", "--resume")
    options = parsed(QuantizeOptions, *words).resumed(saved)
    assert options.project == "runs/qat"
    assert (options.weights, options.batch_size, options.device, options.workers) == ("a.pt", 4, "cpu", 3)


@pytest.mark.parametrize("words", ["--batch-size 4", "--lr 1e-4", "--epochs 3", "--train ranges", "--recipe r.yaml"])
def test_what_would_make_it_another_run_is_refused_on_resume(words):
    saved = QuantizeOptions(weights="a.pt").model_dump()
    with pytest.raises(InputError, match=words.split()[0]):
        parsed(QuantizeOptions, *words.split()).resumed(saved)


def test_options_of_training_are_named_where_there_is_none(capsys):
    """`--ptq-only` is what one adds to a usual command, so they are not refused."""
    training = ["--hyp=a.yaml", "--epochs=1", "--iters=1", "--lr=1e-5", "--train=ranges"]
    words = ["quantize", "--weights", "none.pt", *training]
    assert qat.main([*words, "--ptq-only"]) == 2  # there is no none.pt
    assert "do nothing: --hyp, --epochs, --iters, --lr, --train\n" in capsys.readouterr().out
    assert qat.main([*words, "--supervision-stride", "2"]) == 2
    assert "--supervision-stride does nothing" in (out := capsys.readouterr().out)
    assert "do nothing" not in out


def test_ptq_only_is_qat_never():
    assert QuantizeOptions(ptq_only=True) == QuantizeOptions(qat="never")
    saved = QuantizeOptions(ptq_only=True).model_dump()
    assert parsed(QuantizeOptions, "--qat", "never").resumed(saved).qat == "never"
    with pytest.raises(InputError, match="--ptq-only is --qat never, and --qat auto"):
        parsed(QuantizeOptions, "--ptq-only", "--qat", "auto")


@pytest.mark.parametrize("words", [("--qat", "auto", "--no-eval-ptq"), ("--qat", "auto", "--no-eval-origin")])
def test_qat_auto_needs_the_numbers_that_it_compares(words):
    with pytest.raises(InputError, match=f"--qat auto.*{words[2]}"):
        parsed(QuantizeOptions, *words)
    with pytest.raises(InputError, match="--target-drop does nothing"):
        qat.run_command("quantize", parsed(QuantizeOptions, "--target-drop", "0.1"))


@pytest.mark.parametrize("kind", [CalibrateOptions, SensitiveOptions])
def test_augmentation_is_only_for_qat(kind, tmp_path, caplog):
    """yolov9-qat's commands have --hyp, so it is not refused."""
    files = {name: str(tmp_path / f"a{end}") for name, end in (("weights", ".pt"), ("data", ".yaml"), ("hyp", ".yml"))}
    for file in files.values():
        Path(file).touch()
    qat.check_command(kind(**files))
    assert caplog.messages == [f"--hyp {files['hyp']} is checked only: these images are not augmented"]
