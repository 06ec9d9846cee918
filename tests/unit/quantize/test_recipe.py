"""Recipes: what is refused and how it is named, what 1.0 wrote, what we write, and what options say of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

import qat
from models.quantize.recipe import Calibration, Finetune, Recipe
from utils.core.errors import InputError, RecipeError
from utils.jobs.options import CalibrateOptions, QuantizeOptions, SensitiveOptions
from utils.jobs.sensitivity.report import write_recipe


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


NUMBERS = ("'3'", "true", ".inf", ".nan", "[1]", "{1: 1}", "", "1e999", "2001-01-01", "-1")
INTEGERS = (*NUMBERS, "2.5", "2.0", "1e3", "10000000000")
WORDS = ("other", "true", "1", "{a: 1}", "")
ENTRIES: dict[str, tuple[str, ...]] = {  # entry → what it may not hold
    "calibration": ("3", "[]", "max", ""),
    "calibration.method": (*WORDS, "MAX", "[max]"),
    "calibration.percentile": (*NUMBERS, "50", "100.1"),
    "calibration.median_limit": (*NUMBERS, "1000001"),
    "calibration.batches": (*INTEGERS, "0", "1000001"),
    "finetune": ("3", "[]", ""),
    "finetune.epochs": (*INTEGERS, "10001"),
    "finetune.iters": (*INTEGERS, "0"),
    "finetune.lr": (*NUMBERS, "0", "1", "fast"),
    "finetune.bias_rate": (*NUMBERS, "0", "1000001"),
    "finetune.range_rate": (*NUMBERS, "0", "1000001"),
    "finetune.train": WORDS,
    "finetune.ranges": WORDS,
    "finetune.supervision": WORDS,
    "finetune.held_out": (*INTEGERS, "0"),
    "finetune.supervision_stride": (*INTEGERS, "0", "1001"),
    "finetune.grad_clip": (*NUMBERS, "0"),
    "finetune.collapse": (*NUMBERS, "1"),
    "head": WORDS,
    "add": WORDS,
    "float": ("model.22", "true", "3", "{model.1: float}", "", "[model.1, 5]", "['']", f"['{'*' * 201}']"),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ENTRIES.items() for value in values])
def test_an_entry_of_another_type_or_beyond_its_bounds_is_named(tmp_path: Path, key: str, value: str) -> None:
    section, _, name = key.rpartition(".")
    path = write(tmp_path, f"{section}:\n  {name}: {value}\n" if section else f"{name}: {value}\n")
    with pytest.raises(RecipeError) as caught:
        Recipe.from_file(path)
    text = str(caught.value)
    assert text.startswith((f"--recipe {path}: {key} is ", f"--recipe {path}: {key}["))
    assert "; expected " in text
    assert text.isprintable(), "one line"


def test_the_table_has_every_entry() -> None:
    keys = set(Recipe.model_fields)
    keys |= {f"calibration.{name}" for name in Calibration.model_fields}
    assert set(ENTRIES) == keys | {f"finetune.{name}" for name in Finetune.model_fields}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("colour: red", "there is no key colour; the keys are calibration, finetune"),
        ("flaot: [model.1]", "did you mean float?"),
        ("calibration: {batch: 1}", "there is no key calibration.batch; did you mean batches?"),
        ("finetune: {train: ranges, ranges: fixed}", "finetune is"),
        ("calibration: {batches: 3, batches: 4}", "the key batches stands twice"),
        ("head: int8\nhead: float", "the key head stands twice"),
        ("7: 1", "7"),
        ("- a", "['a']; expected a mapping with the keys calibration"),
        ("", "empty; expected a mapping"),
        ("a: [", "not valid YAML"),
        ("a: &a [*a]", "there is no key a"),
        ("float: !!python/object/apply:os.system ['touch mark']", "not valid YAML"),
    ],
)
def test_mistakes_are_named_with_the_file(tmp_path: Path, content: str, named: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(RecipeError) as caught:
        Recipe.from_file(path)
    assert named in str(caught.value)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    text = "finetune: {lr: 1e-6, range_rate: 1E2, bias_rate: 2.0e+1, grad_clip: 5}\ncalibration: {percentile: 99}\n"
    recipe = Recipe.from_file(write(tmp_path, text))
    tune = recipe.finetune
    found = (tune.lr, tune.range_rate, tune.bias_rate, tune.grad_clip, recipe.calibration.percentile)
    assert found == (1e-6, 100, 20, 5, 99)
    assert all(isinstance(one, float) for one in found)


def test_no_file_and_an_empty_section_give_the_defaults(tmp_path: Path) -> None:
    assert Recipe.from_file(None) == Recipe.from_file(write(tmp_path, "calibration: {}\n")) == Recipe()
    with pytest.raises(RecipeError, match=r"none\.yaml does not exist"):
        Recipe.from_file(tmp_path / "none.yaml")


def test_replace_reaches_into_sections_and_checks() -> None:
    changed = Recipe().replace(calibration_method="max", finetune_epochs=2, head="float", float=("a",))
    assert (changed.calibration.method, changed.finetune.epochs, changed.head, changed.float) == (
        *("max", 2, "float"),
        ("a",),
    )
    assert changed.calibration.batches == Recipe().calibration.batches
    assert changed.replace(calibration=Calibration()).calibration == Calibration()
    with pytest.raises(RecipeError, match=r"calibration\.batches is 0"):
        Recipe().replace(calibration_batches=0)


# what 1.0 wrote

OF_1_0 = [
    ("calibration", "scales", {}, {"model.1": "mse"}),
    ("finetune", "weight_ranges", "fixed", "learned"),
    ("finetune", "features", 0.0, 0.5),
    ("finetune", "patience", 0, 3),
    ("finetune", "lr", "auto", {0: 1e-6, 6: 1e-5}),
]


@pytest.mark.parametrize(("section", "key", "neutral", "asking"), OF_1_0)
def test_a_file_that_asks_for_what_1_0_had_is_refused_and_says_what_to_use(tmp_path, section, key, neutral, asking):
    assert Recipe.from_file(write(tmp_path, yaml.safe_dump({section: {key: neutral}}))) == Recipe()
    with pytest.raises(RecipeError, match=rf"{section}\.{key}.* removed in 2\.0: "):
        Recipe.from_file(write(tmp_path, yaml.safe_dump({section: {key: asking}})))


@pytest.mark.parametrize("asks", [False, True])
def test_what_1_0_stored_loads_whatever_it_asked_for(asks: bool) -> None:
    stored = Recipe(head="float").to_dict()
    for section, key, *values in OF_1_0:
        stored[section][key] = values[asks]
    before = yaml.safe_dump(stored)
    assert Recipe.from_stored(stored) == Recipe(head="float")
    assert yaml.safe_dump(stored) == before, "it is left as it was"


def test_what_was_stored_before_ranges_had_a_limit_had_none() -> None:
    stored = Recipe().to_dict()
    assert Recipe.from_stored(stored) == Recipe()
    del stored["calibration"]["median_limit"]
    assert Recipe.from_stored(stored) == Recipe().replace(calibration_median_limit=0.0)
    assert Recipe.from_dict(stored) == Recipe()  # a file of the user's
    assert Recipe.from_stored({}).calibration.median_limit == 0
    for content in (None, 5, [], {"calibration": 3}, {"finetune": 3}):
        with pytest.raises(RecipeError):
            Recipe.from_stored(content)


def some_recipe(generator: random.Random) -> Recipe:
    """Anything that the bounds allow."""
    pick = generator.choice
    names = ["model.1", "model.2.z[0]", "images", "010", "1e5", "true", "null", "*cv2", "- a", "#", "a: b", "é"]
    return Recipe(
        calibration=Calibration(
            method=pick(["max", "auto"]), percentile=generator.uniform(50.1, 100), batches=pick([1, 10**6])
        ),
        finetune=Finetune(
            epochs=pick([0, 10_000]), iters=generator.randint(1, 10**6),
            lr=pick(["auto", 0.5, 3e-5, 10.0 ** -generator.randint(1, 300)]),
            train=pick(["all", "ranges"]), supervision=pick(["task", "layers"]), supervision_stride=pick([1, 1000]),
            grad_clip=10.0 ** generator.randint(-300, 6), collapse=pick([0.0, 0.5, 0.999]),
        ),
        head=pick(["int8", "last-conv-float", "float"]), add=pick(["both", "residual"]),
        float=tuple(generator.sample(names, generator.randint(0, len(names)))),
    )  # fmt: skip


def test_what_we_write_we_read(tmp_path: Path) -> None:
    generator = random.Random(0)
    for _ in range(100):
        recipe = some_recipe(generator)
        write_recipe(recipe.to_dict(), "because: [it is], so", tmp_path / "recipe.yaml")
        assert Recipe.from_file(tmp_path / "recipe.yaml") == recipe
        assert Recipe.from_stored(recipe.to_dict()) == recipe


# what the command line says of a recipe

FLAGS: dict[str, list[Any]] = {
    "calib_batches": [0, 1_000_001, 2.5, True, "3"],
    "percentile": [50.0, 100.5, float("nan"), "99"],
    "calib_method": ["median", 3],
    "epochs": [-1, 10**9, 1.5, True],
    "iters": [0, 10**7],
    "lr": [0.0, 1.0, float("nan"), "fast"],
    "supervision_stride": [0, 1001],
    "supervision": ["labels"],
    "train": ["none"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in FLAGS.items() for value in values])
def test_an_option_that_ends_in_the_recipe_is_named_as_it_was_given(name: str, value: Any) -> None:
    for kind in (QuantizeOptions, CalibrateOptions, SensitiveOptions):
        if name in kind.model_fields:
            with pytest.raises(InputError, match=rf"^--{name.replace('_', '-')} is .*; expected "):
                kind.of({name: value})


@pytest.mark.parametrize(
    "words", ["--epochs 1.5", "--epochs 1000000000", "--lr inf", "--lr 1e-6x", "--percentile nan", "--calib-batches 0",
              "--iters 1e3", "--supervision-stride 0", "--calib-method median", "--patience 3", "--quantizer modelopt"]
)  # fmt: skip
def test_the_program_refuses_before_it_reads_anything(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = qat.main(["quantize", "--weights", "none.pt", *words.split()])
    except SystemExit as error:
        code = error.code
    error = capsys.readouterr().err
    assert code == 2
    assert words.split()[0] in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
