"""The options of qat.py: what is given, what is merged into the recipe, what may change on resume."""

import pytest

import qat
from utils import cli
from utils.core.errors import InputError
from utils.jobs.options import QuantizeOptions, SensitiveOptions


def parsed(kind, *words):
    return kind.parsed(cli.parsers("qat.py", (kind, print), "")[0].parse_args([str(word) for word in words]))


def test_the_command_line_wins_over_the_recipe_file(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("calibration: {method: max, images: 3}\nfinetune: {epochs: 4, lr: 2.0e-6}\nhead: float\n")
    words = ("--calib-method", "percentile", "--percentile", "99.5", "--calib-images", "2", "--epochs", "3",
             "--iters", "4", "--train", "ranges", "--lr", "1e-5")  # fmt: skip
    recipe = parsed(QuantizeOptions, "--recipe", file, *words).merged_recipe()
    calibration, tune = recipe.calibration, recipe.finetune
    assert (calibration.method, calibration.percentile, calibration.images) == ("percentile", 99.5, 2)
    assert (tune.epochs, tune.iters, tune.train, tune.lr) == (3, 4, "ranges", 1e-5)
    implied = parsed(SensitiveOptions, "--recipe", file, *words[2:4]).merged_recipe().calibration
    assert (implied.method, implied.percentile) == ("percentile", 99.5)
    recipe = parsed(QuantizeOptions, "--recipe", file, "--lr", "auto").merged_recipe()
    found = (recipe.calibration.images, recipe.finetune.epochs, recipe.finetune.lr, recipe.head)
    assert found == (3, 4, "auto", "float")
    file.write_text("calibration: {batches: 3}\n")  # of 1.0: so many times the batch size
    calibration = QuantizeOptions(recipe=str(file), batch_size=4).merged_recipe().to_dict()["calibration"]
    assert (calibration["images"], "batches" in calibration) == (12, False)
    assert QuantizeOptions(recipe=str(file), calib_images=5).merged_recipe().calibration.images == 5


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


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("quantize --ptq-only", "--hyp, --epochs, --iters, --lr, --train"),
        ("quantize --target-drop 0.1 --supervision-stride 2", "--supervision-stride"),
        ("sensitive", "--hyp"),
        ("calibrate", "--hyp"),
    ],
)
def test_options_that_do_nothing_are_named_and_not_refused(words, named, capsys):
    """They are those of yolov9-qat's commands, and what one adds `--ptq-only` to."""
    training = ["--hyp=a.yaml", "--epochs=1", "--iters=1", "--lr=1e-5", "--train=ranges"]
    given = [flag for flag in training if words[0] == "q" or "hyp" in flag]
    assert qat.main([*words.split(), "--weights", "none.pt", *given]) == 2  # there is no none.pt
    assert f"do nothing here: {named}\n" in capsys.readouterr().out


def test_ptq_only_is_qat_never():
    assert QuantizeOptions(ptq_only=True) == QuantizeOptions(qat="never")
    saved = QuantizeOptions(ptq_only=True).model_dump()
    assert parsed(QuantizeOptions, "--qat", "never").resumed(saved).qat == "never"
    with pytest.raises(InputError, match="--ptq-only is --qat never, and --qat auto"):
        parsed(QuantizeOptions, "--ptq-only", "--qat", "auto")


@pytest.mark.parametrize("flag", ["--no-eval-ptq", "--no-eval-origin"])
def test_qat_auto_needs_the_numbers_that_it_compares(flag):
    with pytest.raises(InputError, match=f"--qat auto.*{flag}"):
        parsed(QuantizeOptions, "--qat", "auto", flag)
