"""Recipes: defaults, files, and one clear line for each mistake."""

from __future__ import annotations

import pytest
import yaml

from models.quantize.recipe import Recipe
from utils.core.errors import RecipeError


def test_round_trip_through_yaml(tmp_path):
    recipe = Recipe.from_dict(
        {
            "calibration": {"method": "entropy", "batches": 3},
            "finetune": {"lr": 1e-4},
            "float": ["model.3"],
            "head": "float",
        }
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.to_dict()))
    assert Recipe.from_file(path) == recipe


def test_no_file_and_an_empty_section_give_the_defaults(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("calibration: {}\n")
    assert Recipe.from_file(None) == Recipe.from_file(path) == Recipe()


def test_what_was_stored_before_ranges_had_a_limit_had_none():
    stored = Recipe().to_dict()
    assert Recipe.from_stored(stored) == Recipe()
    del stored["calibration"]["median_limit"]
    assert Recipe.from_stored(stored) == Recipe().replace(calibration_median_limit=0.0)
    assert Recipe.from_dict(stored) == Recipe()  # a file of the user's
    assert Recipe.from_stored({}).calibration.median_limit == 0
    with pytest.raises(RecipeError, match=r"^calibration is 3"):
        Recipe.from_stored({"calibration": 3})


OF_1_0 = [
    ("calibration", "scales", {}, {"model.1": "mse"}),
    ("finetune", "weight_ranges", "fixed", "learned"),
    ("finetune", "features", 0.0, 0.5),
    ("finetune", "patience", 0, 3),
    ("finetune", "lr", "auto", {0: 1e-6, 6: 1e-5}),
]


@pytest.mark.parametrize(("section", "key", "neutral", "asking"), OF_1_0)
def test_a_file_that_asks_for_what_1_0_had_is_refused_and_says_what_to_use(tmp_path, section, key, neutral, asking):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({section: {key: neutral}}))
    assert Recipe.from_file(path) == Recipe()
    path.write_text(yaml.safe_dump({section: {key: asking}}))
    with pytest.raises(RecipeError, match=rf"{section}\.{key}.* removed in 2\.0: "):
        Recipe.from_file(path)


def test_what_1_0_stored_loads_whatever_it_asked_for():
    plain = Recipe().to_dict()
    for value in (2, 3):
        stored = {**plain, "calibration": dict(plain["calibration"]), "finetune": dict(plain["finetune"])}
        for section, key, *values in OF_1_0:
            stored[section][key] = values[value - 2]
        assert Recipe.from_stored(stored) == Recipe()
        assert len(stored["finetune"]) == len(plain["finetune"]) + 3, "it is left as it was"


def test_a_training_of_nothing_is_refused():
    fixed = {"train": "ranges", "ranges": "fixed"}
    with pytest.raises(RecipeError, match=r"finetune\.train is ranges, but .* fixed: nothing trains"):
        Recipe.from_dict({"finetune": fixed})


def test_replace_reaches_into_sections():
    changed = Recipe().replace(calibration_method="max", finetune_epochs=2, finetune_iters=7, head="float")
    assert (changed.calibration.method, changed.finetune.epochs, changed.finetune.iters, changed.head) == (
        "max",
        2,
        7,
        "float",
    )
    assert changed.calibration.batches == Recipe().calibration.batches


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("calibration: {method: median}", "calibration.method is 'median'; it may hold max, percentile, mse,"),
        (
            "calibration: {percentile: 101}",
            "calibration.percentile is 101; it may hold a number above 50 and at most 100",
        ),
        ("calibration: {batches: 0}", "calibration.batches is 0; it may hold an integer from 1 to 1,000,000"),
        ("calibration: 3", "calibration is 3; it may hold the keys method, percentile"),
        ("calibration:", "calibration is empty; it may hold the keys method"),
        ("finetune: {lr: fast}", "finetune.lr is 'fast'; it may hold auto, or a learning rate"),
        ("finetune: {epochs: many}", "finetune.epochs is 'many'; it may hold an integer from 0 to 10,000"),
        ("head: half", "head is 'half'; it may hold int8, last-conv-float or float"),
        ("add: none", "add is 'none'; it may hold both or residual"),
        ("float: model.22", "float is 'model.22'; it may hold a list of module paths"),
        ("colour: red", "the recipe has no key 'colour'; it may hold the keys calibration"),
        ("finetune: {momentum: 1}", "finetune has no key 'momentum'; it may hold the keys epochs"),
        ("calibration: {batch: 1}", "did you mean batches?"),
        ("- a", "the recipe is ['a']; it may hold the keys calibration"),
        ("", "the recipe is empty"),
        ("a: [", "not valid YAML"),
    ],
)
def test_mistakes_are_named_with_the_file(tmp_path, content, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    with pytest.raises(RecipeError) as error:
        Recipe.from_file(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(RecipeError, match="No such file"):
        Recipe.from_file(tmp_path / "none.yaml")
