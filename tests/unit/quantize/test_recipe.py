"""Recipes: what is refused and how it is named, what 1.0 wrote, what we write, and what options say of them."""

from pathlib import Path

import pytest
import yaml

from models.quantize.recipe import Calibration, Finetune, Recipe
from utils.core.errors import RecipeError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        Recipe.from_file(path)
    assert str(caught.value).isprintable(), "one line"
    return str(caught.value)


ENTRIES: dict[str, tuple[str, ...]] = {  # entry → what it may not hold
    "calibration": ("3", "max", ""),
    "calibration.method": ("other", "true", ""),
    "calibration.percentile": ("'3'", "50", "100.1"),
    "calibration.median_limit": ("-1", "1000001"),
    "calibration.images": ("2.5", "0", "100000001"),
    "calibration.batches": ("2.5", "0"),
    "finetune": ("[]", ""),
    "finetune.epochs": ("-1", "10001"),
    "finetune.iters": ("1e3", "0"),
    "finetune.lr": (".nan", "0", "1", "fast"),
    "finetune.bias_rate": ("0", "1000001"),
    "finetune.range_rate": ("0", "1000001"),
    "finetune.train": ("other",),
    "finetune.held_out": ("0",),
    "finetune.grad_clip": ("0", ".inf"),
    "head": ("other", "{a: 1}"),
    "add": ("other",),
    "float": ("model.22", "{model.1: float}", "", "[model.1, 5]", "['']", f"['{'*' * 201}']"),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ENTRIES.items() for value in values])
def test_an_entry_of_another_type_or_beyond_its_bounds_is_named(tmp_path, key, value):
    section, _, name = key.rpartition(".")
    path = write(tmp_path, f"{section}:\n  {name}: {value}\n" if section else f"{name}: {value}\n")
    text = refusal(path)
    assert text.startswith((f"--recipe {path}: {key} is ", f"--recipe {path}: {key}["))
    assert "; expected " in text


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("flaot: [model.1]", "did you mean float?"),
        ("calibration: {batch: 1}", "there is no key calibration.batch; did you mean batches?"),
        ("- a", "['a']; expected a mapping with the keys calibration"),
        ("a: [", "not valid YAML"),
        ("float: !!python/object/apply:os.system ['touch mark']", "not valid YAML"),
    ],
)
def test_mistakes_are_named_with_the_file(tmp_path, content, named):
    path = write(tmp_path, content)
    text = refusal(path)
    assert named in text
    assert str(path) in text


def test_numbers_as_people_write_them_no_file_and_an_empty_section(tmp_path):
    text = "finetune: {lr: 1e-6, range_rate: 1E2, bias_rate: 2.0e+1, grad_clip: 5}\ncalibration: {percentile: 99}\n"
    recipe = Recipe.from_file(write(tmp_path, text))
    tune = recipe.finetune
    found = (tune.lr, tune.range_rate, tune.bias_rate, tune.grad_clip, recipe.calibration.percentile)
    assert found == (1e-6, 100, 20, 5, 99)
    assert (recipe.calibration.method, Recipe().calibration.method) == ("percentile", "auto")
    assert all(isinstance(one, float) for one in found)
    assert Recipe.from_file(None) == Recipe.from_file(write(tmp_path, "calibration: {}\n")) == Recipe()
    with pytest.raises(RecipeError, match=r"none\.yaml does not exist"):
        Recipe.from_file(tmp_path / "none.yaml")


def test_replace_reaches_into_sections_and_checks():
    changed = Recipe().replace(calibration_method="max", finetune_epochs=2, head="float", float=("a",))
    found = (changed.calibration.method, changed.finetune.epochs, changed.head, changed.float)
    assert found == ("max", 2, "float", ("a",))
    assert changed.calibration.images == Recipe().calibration.images
    assert changed.replace(calibration=Calibration()).calibration == Calibration()
    with pytest.raises(RecipeError, match=r"calibration\.images is 0"):
        Recipe().replace(calibration_images=0)


OF_1_0 = [  # what 1.0 wrote
    ("calibration", "scales", {}, {"model.1": "mse"}),
    ("calibration", "method", "auto", "entropy"),
    ("finetune", "weight_ranges", "fixed", "learned"),
    ("finetune", "features", 0.0, 0.5),
    ("finetune", "patience", 0, 3),
    ("finetune", "collapse", 0.5, 0.3),
    ("finetune", "ranges", "learned", "fixed"),
    ("finetune", "supervision", "task", "layers"),
    ("finetune", "supervision_stride", 1, 5),
    ("finetune", "lr", "auto", {0: 1e-6, 6: 1e-5}),
]


@pytest.mark.parametrize(("section", "key", "neutral", "asking"), OF_1_0)
def test_a_file_of_1_0_is_read_unless_it_asks_for_what_only_1_0_had(tmp_path, section, key, neutral, asking):
    assert Recipe.from_file(write(tmp_path, yaml.safe_dump({section: {key: neutral}}))) == Recipe()
    with pytest.raises(RecipeError, match=rf"recipe\.yaml: .*\b{key}\b"):
        Recipe.from_file(write(tmp_path, yaml.safe_dump({section: {key: asking}})))


@pytest.mark.parametrize("asks", [False, True])
def test_what_1_0_stored_loads_whatever_it_asked_for(asks):
    stored = Recipe(head="float").to_dict()
    for section, key, *values in OF_1_0:
        stored[section][key] = values[asks]
    before = yaml.safe_dump(stored)
    assert Recipe.from_stored(stored) == Recipe(head="float").replace(calibration_method=("auto", "percentile")[asks])
    assert yaml.safe_dump(stored) == before, "it is left as it was"
    for content in (None, 5, [], {"calibration": 3}, {"finetune": 3}):
        with pytest.raises(RecipeError):
            Recipe.from_stored(content)


@pytest.mark.parametrize("name", ["model.2.z[0]", "010", "1e5", "true", "null", "*cv2", "- a", "#", "a: b", "é"])
def test_what_we_write_we_read(tmp_path, name):
    recipe = Recipe(finetune=Finetune(lr=1e-300, grad_clip=1e6), float=(name,), head="last-conv-float")
    recipe.save(tmp_path / "recipe.yaml", "because: [it is], so")
    assert Recipe.from_file(tmp_path / "recipe.yaml") == Recipe.from_stored(recipe.to_dict()) == recipe
