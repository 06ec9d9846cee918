"""Recipes are checked whole before any work: types, bounds, names, and YAML that is made to harm."""

from __future__ import annotations

import math
import os
import random
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from small_networks import Conv, Network, chain
from torch import nn

import qat
from models.quantize import placement, recipe_fields, recipe_fit
from models.quantize.recipe import Calibration, Finetune, Recipe
from utils.core.errors import RecipeError
from utils.jobs.options import CalibrateOptions, QuantizeOptions, SensitiveOptions, merged_recipe
from utils.jobs.sensitivity.report import write_recipe

NUMBERS = [
    "'3'",
    "true",
    ".inf",
    "-.inf",
    ".nan",
    "[1]",
    "{1: 1}",
    "",
    "1e999",
    "010",
    "1:30",
    "2001-01-01",
    "9" * 5000,
]
WHOLE = [*NUMBERS, "2.5", "2.0", "1e3", "-1", "10000000000"]
ENTRIES: dict[str, tuple[list[str], str]] = {  # entry → what it may not hold, and what the message says that it may
    "calibration.method": (["median", "MAX", "1", "true", "[max]", ""], "max, percentile, mse, entropy or auto"),
    "calibration.percentile": ([*NUMBERS, "50", "100.1", "-99.9"], "a number above 50 and at most 100"),
    "calibration.median_limit": ([*NUMBERS, "-1", "1000001"], "a number from 0 to 1,000,000"),
    "calibration.batches": ([*WHOLE, "0", "1000001"], "an integer from 1 to 1,000,000"),
    "calibration.scales": (["mse", "[mse]", "3", ""], "a mapping from names of scales to methods"),
    "finetune.epochs": ([*WHOLE, "10001"], "an integer from 0 to 10,000"),
    "finetune.iters": ([*WHOLE, "0", "1000001"], "an integer from 1 to 1,000,000"),
    "finetune.lr": (["'1e-6'", "fast", "true", "[1e-6]", ""], "auto, a learning rate, or rates by the epoch"),
    "finetune.bias_rate": ([*NUMBERS, "0", "-1.5", "1000001"], "a number above 0 and at most 1,000,000"),
    "finetune.range_rate": ([*NUMBERS, "0", "-1.5", "1000001"], "a number above 0 and at most 1,000,000"),
    "finetune.train": (["none", "ALL", "1", "[all]", ""], "all or ranges"),
    "finetune.ranges": (["learnt", "true", "1", "{}", ""], "learned or fixed"),
    "finetune.weight_ranges": (["learnt", "true", "1", "{}", ""], "learned or fixed"),
    "finetune.supervision": (["labels", "true", "1", "[task]", ""], "task or layers"),
    "finetune.features": ([*NUMBERS, "-0.1", "1001"], "a number from 0 to 1,000"),
    "finetune.held_out": ([*WHOLE, "0", "100000001"], "an integer from 1 to 100,000,000"),
    "finetune.supervision_stride": ([*WHOLE, "0", "1001"], "an integer from 1 to 1,000"),
    "finetune.grad_clip": ([*NUMBERS, "0", "-1.5", "1000001"], "a number above 0 and at most 1,000,000"),
    "finetune.patience": ([*WHOLE, "10001"], "an integer from 0 to 10,000"),
    "finetune.collapse": ([*NUMBERS, "-0.1", "1"], "a number of at least 0 and below 1"),
    "head": (["half", "INT8", "1", "[int8]", ""], "int8, last-conv-float or float"),
    "add": (["none", "true", "{both: 1}", ""], "both or residual"),
    "float": (["model.22", "true", "3", "{model.1: float}", ""], "a list of module paths and glob patterns"),
}


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(path: Path) -> str:
    """The message that a file is refused with."""
    began = time.monotonic()
    with pytest.raises(RecipeError) as error:
        Recipe.from_file(path)
    text = str(error.value)
    assert time.monotonic() - began < 20
    assert text.startswith(f"--recipe {path}: ")
    assert text.isprintable(), "one line"
    assert len(text) < 600 + len(str(path))
    return text.removeprefix(f"--recipe {path}: ")


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, entry in ENTRIES.items() for value in entry[0]])
def test_an_entry_of_another_type_or_beyond_its_bounds(tmp_path, key, value):
    section, _, name = key.rpartition(".")
    text = f"{section}:\n  {name}: {value}\n" if section else f"{name}: {value}\n"
    message = refusal(write(tmp_path, text))
    if value == "9" * 5000:
        assert "not valid YAML" in message
        return
    assert message.startswith(f"{key} is ")
    assert f"; it may hold {ENTRIES[key][1]}" in message


def test_the_table_of_hostile_values_has_every_entry():
    leaves = {*Recipe().to_dict()} - {"calibration", "finetune"}
    leaves |= {f"calibration.{item.name}" for item in fields(Calibration)}
    assert set(ENTRIES) == leaves | {f"finetune.{item.name}" for item in fields(Finetune)}


def test_the_message_is_the_one_of_the_documentation(tmp_path):
    assert refusal(write(tmp_path, "calibration: {batches: 2.5}")) == (
        "calibration.batches is 2.5; it may hold an integer from 1 to 1,000,000"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("finetune: {lr: {0: 1e-6, 2.5: 1e-6}}", "a key of finetune.lr is 2.5; it may hold an integer from 0 to"),
        ("finetune: {lr: {0: 1e-6, true: 1e-6}}", "a key of finetune.lr is True"),
        ("finetune: {lr: {0: 1e-6, -1: 1e-6}}", "a key of finetune.lr is -1"),
        ("finetune: {lr: {0: 1e-6, 10001: 1e-6}}", "a key of finetune.lr is 10001"),
        ("finetune: {lr: {0: 1e-6, first: 1e-6}}", "a key of finetune.lr is 'first'"),
        ("finetune: {lr: {0: 1e-6, 6: .inf}}", "finetune.lr[6] is inf; it may hold a number above 0 and below 1"),
        ("finetune: {lr: {0: 1e-6, 6: 1}}", "finetune.lr[6] is 1;"),
        ("finetune: {lr: 0}", "finetune.lr is 0; it may hold a number above 0 and below 1"),
        ("finetune: {lr: {0: 1e-6, '6': 1e-6, 6: 1e-5}}", "finetune.lr holds epoch 6 twice"),
        ("finetune: {lr: {}}", "with a rate for epoch 0"),
        ("calibration: {scales: {model.1: 99.9}}", "calibration.scales['model.1'] is 99.9; it may hold max, mse"),
        ("calibration: {scales: {model.1: percentile nan}}", "is 'percentile nan'"),
        ("calibration: {scales: {1: mse}}", "a key of calibration.scales is 1; it may hold the name of a scale"),
        ("float: [model.1, 5]", "float[1] is 5; it may hold a module's path"),
        ("float: ['']", "float[0] is ''"),
        (f"float: [{'*' * 201}]".replace("[*", "['*").replace("*]", "*']"), "of at most 200 characters"),
        ("7: 1", "the recipe has no key 7"),
        ("flaot: [model.1]", "did you mean float?"),
        ("calibration: {<<: {batches: 3}}", "calibration has no key '<<'"),
    ],
)
def test_what_stands_inside_an_entry(tmp_path, text, message):
    assert message in refusal(write(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "calibration: {batches: 3, batches: 4}",
        "head: int8\nhead: float",
        "finetune: {lr: {0: 1e-6, 0: 1e-5}}",
        "calibration: {scales: {a: mse, a: max}}",
    ],
)
def test_a_key_that_stands_twice(tmp_path, text):
    assert "stands twice" in refusal(write(tmp_path, text))


def test_numbers_as_people_write_them(tmp_path):
    text = "finetune: {lr: {0: 1e-6, 2: 1E-5, 3: 2.0e-6, 4: +.5e-6}, grad_clip: 5}\ncalibration: {percentile: 99}\n"
    recipe = Recipe.from_file(write(tmp_path, text))
    assert recipe.finetune.lr == {0: 1e-6, 2: 1e-5, 3: 2e-6, 4: 5e-7}
    assert (recipe.finetune.grad_clip, recipe.calibration.percentile) == (5, 99)
    assert all(isinstance(rate, float) for rate in (*recipe.finetune.lr.values(), recipe.finetune.grad_clip))


LAUGHS = "a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML = {
    "aliases that grow": (LAUGHS, "alias"),
    "merges that grow": (MERGES, "alias"),
    "an alias of itself": ("float: &a [*a]", "alias"),
    "deep lists": ("float: " + "[" * 100_000, "levels"),
    "deep mappings": ("{a: " * 50_000, "levels"),
    "deep blocks": ("".join(f"{' ' * depth}a:\n" for depth in range(400)), "levels"),
    "a key that is a list": ("[1, 2]: 3", "a key is a list or a mapping"),
    "Python objects": ("float: !!python/object/apply:os.system ['touch mark']", "tag"),
    "a number that is none": ("finetune: {epochs: !!int ''}", "tag"),
    "a time that is none": ("float: !!timestamp x", "tag"),
    "bytes": ("float: !!binary 'not base 64'", "tag"),
    "two documents": ("head: int8\n---\nhead: float\n", "not valid YAML"),
    "control characters": ("head: \x07", "not valid YAML"),
    "no text": (bytes(range(128, 256)), "not a text file"),
    "a checkpoint": (b"PK\x03\x04" + bytes(1000), "not valid YAML"),
    "a tab": ("calibration:\n\tbatches: 3\n", "not valid YAML"),
    "too large": ("#" * 300_000, "larger than 256 KiB"),
    "nothing": ("", "the recipe is empty"),
    "a long text": ("'" + "x" * 200_000 + "'", "the recipe is 'xxx"),
    "a long list": ("float: [" + "a, " * 20_000 + "]", "float is ['a', 'a', "),
}


@pytest.mark.parametrize("name", YAML)
def test_yaml_that_is_made_to_harm_gets_one_line(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, message = YAML[name]
    assert message in refusal(write(tmp_path, text))
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refusal(tmp_path / "pipe")
    assert "a folder" in refusal(tmp_path)
    for path in (Path("/dev/zero"), tmp_path / "none", tmp_path / ("x" * 300), Path("a\0b")):
        with pytest.raises(RecipeError, match=r"^--recipe "):
            Recipe.from_file(path)


def test_a_file_from_windows_is_read(tmp_path):
    assert Recipe.from_file(write(tmp_path, b"\xef\xbb\xbfhead: float\r\nadd: residual\r\n")) == Recipe(
        head="float", add="residual"
    )


class TestStored:
    """What checkpoints and the states of runs hold goes through the same check."""

    @pytest.mark.parametrize(
        "content",
        [
            None, 5, "float", [], [("head", "int8")], {"head": 1}, {1: 2}, {"calibration": []}, {"float": "model.1"},
            {"calibration": {"batches": 2.5}}, {"calibration": {"scales": {"a": None}}}, {"float": [b"model.1"]},
            {"finetune": {"epochs": 10**5000}}, {"finetune": {"lr": {0: math.nan}}}, {"calibration": object()},
            {"finetune": {"lr": {"\u0664": 0.1}}}, {"finetune": {"lr": {(1, 2): 0.1}}}, {"float": ["a"] * 10_001},
        ],
    )  # fmt: skip
    def test_content_of_another_kind(self, content):
        with pytest.raises(RecipeError) as error:
            Recipe.from_dict(content)
        assert str(error.value).isprintable()

    @pytest.mark.parametrize(
        ("section", "values"),
        [(Calibration, {"batches": 2.5}), (Calibration, {"percentile": math.inf}), (Calibration, {"method": None}),
         (Finetune, {"epochs": True}), (Finetune, {"lr": {}}), (Recipe, {"float": "model.1"}), (Recipe, {"head": 3})],
    )  # fmt: skip
    def test_the_dataclasses_check_themselves(self, section, values):
        with pytest.raises(RecipeError):
            section(**values)

    def test_replace_is_checked_too(self):
        with pytest.raises(RecipeError, match=r"calibration\.batches is 0"):
            Recipe().replace(calibration_batches=0)

    def test_json_has_texts_for_epochs(self):
        recipe = Recipe().replace(finetune_lr={0: 1e-6, 6: 1e-5})
        stored = recipe.to_dict()
        stored["finetune"]["lr"] = {str(epoch): rate for epoch, rate in stored["finetune"]["lr"].items()}
        assert Recipe.from_dict(stored) == recipe


def some_recipe(generator: random.Random) -> Recipe:
    """Anything that the table allows."""
    pick = generator.choice
    names = ["model.1", "model.2.z[0]", "images", "010", "true", "null", "*cv2", "model.?", "- a", "#", "a: b", "é"]
    methods = ["max", "mse", "entropy", "percentile 99.9", "percentile 50.0001"]
    return Recipe(
        Calibration(
            pick(["max", "auto", "percentile"]), generator.uniform(50.1, 100), pick([1, 1_000_000]),
            {name: pick(methods) for name in names if generator.random() < 0.5},
        ),
        Finetune(
            pick([0, 10_000]), generator.randint(1, 10**6),
            pick([0.5, 3e-5, {0: 10.0 ** -generator.randint(1, 300), 10_000: 0.999}]),
            train=pick(recipe_fields.TRAIN_OPTIONS), ranges=pick(["learned", "fixed"]), weight_ranges="learned",
            supervision=pick(recipe_fields.SUPERVISIONS), supervision_stride=pick([1, 1000]),
            grad_clip=10.0 ** generator.randint(-300, 6), patience=pick([0, 3]), collapse=pick([0, 0.5, 0.999]),
        ),
        pick(recipe_fields.HEAD_OPTIONS), pick(recipe_fields.ADD_OPTIONS),
        tuple(generator.sample(names, generator.randint(0, len(names)))),
    )  # fmt: skip


def test_what_we_write_we_read(tmp_path):
    generator = random.Random(0)
    for _ in range(200):
        recipe = some_recipe(generator)
        write_recipe(recipe.to_dict(), "because: [it is], so", tmp_path / "recipe.yaml")
        assert Recipe.from_file(tmp_path / "recipe.yaml") == recipe
        assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_random_mutations_of_a_recipe_are_recipes_or_get_one_line(tmp_path):
    generator = random.Random(14)
    write_recipe(some_recipe(generator).to_dict(), "why", tmp_path / "recipe.yaml")
    good = (tmp_path / "recipe.yaml").read_bytes()
    pieces = [b"{", b"[", b"*a ", b"&a ", b"!!x ", b"- ", b": ", b"\n", b"'", b'"', b"\x00", b"\xff", b".inf", b"%",
              b"|", b"<<: ", b"? ", b"1e9", b"true", b"---\n", b"\t", b"9" * 50]  # fmt: skip
    messages = []
    for _ in range(500):
        content = bytearray(good)
        for _ in range(generator.randint(1, 4)):
            place = generator.randrange(len(content))
            kind = generator.randrange(4)
            if kind == 0:
                content[place] ^= 1 << generator.randrange(8)
            elif kind == 1:
                content[place:place] = generator.choice(pieces)
            elif kind == 2:
                del content[place : place + generator.randint(1, 40)]
            else:
                content[place:place] = content[: generator.randint(1, 80)]
        path = write(tmp_path, bytes(content))
        try:
            Recipe.from_file(path)
        except RecipeError as error:
            messages.append(str(error))
    refused = len(messages)
    assert all(text.isprintable() and text.startswith(f"--recipe {path}: ") for text in messages)
    assert 250 < refused < 500
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


# what the command line says of a recipe


FLAGS: dict[str, list[Any]] = {
    "calib_batches": [0, -1, 1_000_001, 2.5, True, "3"],
    "percentile": [50.0, 100.5, math.nan, math.inf, "99"],
    "calib_method": ["median", 3],
    "epochs": [-1, 10**9, 1.5, True],
    "iters": [0, 10**7],
    "lr": [0.0, -1e-6, 1.0, math.nan, math.inf, "1e-6"],
    "supervision_stride": [0, 1001],
    "patience": [-1, 10**9],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in FLAGS.items() for value in values])
def test_an_option_that_ends_in_the_recipe_is_named_as_it_was_given(name, value):
    flag = "--" + name.replace("_", "-")
    for kind in (QuantizeOptions, CalibrateOptions, SensitiveOptions):
        if name in {item.name for item in fields(kind)}:
            with pytest.raises(RecipeError, match=rf"^{flag} is .*; it may hold "):
                kind(**{name: value})


@pytest.mark.parametrize(
    "words",
    [
        "--epochs 1.5", "--epochs true", "--epochs 1000000000", "--lr inf", "--lr 1e-6x", "--percentile nan",
        "--calib-batches 0", "--iters 1e3", "--patience -1", "--supervision-stride 0", "--calib-method median",
    ],
)  # fmt: skip
def test_the_program_refuses_before_it_reads_anything(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flag = words.split()[0]
    try:
        code = qat.main(["quantize", "--weights", "none.pt", *words.split()])
    except SystemExit as error:
        code = error.code
    error = capsys.readouterr().err
    assert code == 2
    assert flag in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_rate_that_the_schedule_carries_beyond_its_bounds(tmp_path):
    path = write(tmp_path, "finetune: {lr: {0: 1e-6, 6: 1e-4}}")
    with pytest.raises(
        RecipeError, match=r"rate from epoch 6 on, which --lr 0\.05 scales, is 5\.0.*; it may hold a num"
    ):
        merged_recipe(QuantizeOptions(recipe=str(path), lr=0.05))


# a recipe and a network


@pytest.mark.parametrize(
    ("recipe", "cause"),
    [
        ({"float": ("*",)}, r"float is \['\*'\]"),
        ({"float": ("model",)}, r"float is \['model'\]"),
        ({"float": ("model.0", "model.[12].*", "model.5", "model.6")}, r"float is \['model\.0', "),
    ],
)
def test_a_recipe_that_leaves_nothing_in_int8(recipe, cause):
    network, chosen = chain(), Recipe(**recipe)
    with pytest.raises(RecipeError, match=f"{cause}.*: all 7 convolutions would stay in float; leave at least one"):
        recipe_fit.check(placement.plan(network, chosen), chosen)


@pytest.mark.parametrize(("patterns", "cause"), [(("model.0",), "float is .* and the recipe's head"), ((), "head")])
def test_a_head_that_leaves_nothing_in_int8(patterns, cause):
    layers = [(-1, Conv(3, 4))] if patterns else [(-1, nn.Upsample(None, 2, "nearest"))]
    network = Network([*layers, (-1, nn.Sequential(Conv(4 if patterns else 3, 4), nn.Conv2d(4, 4, 1)))])
    chosen = Recipe(float=patterns, head="float")
    with pytest.raises(RecipeError, match=f"the recipe's {cause} is float: all"):
        recipe_fit.check(placement.plan(network, chosen), chosen)


def test_one_convolution_in_int8_is_enough():
    chosen = Recipe(float=("model.[0-5]*",))
    recipe_fit.check(placement.plan(chain(), chosen), chosen)


def test_a_scale_that_the_network_has_not():
    chosen = Recipe().replace(calibration_scales={"model.1.q": "mse"})
    with pytest.raises(RecipeError, match=r"calibration\.scales holds 'model\.1\.q', which is no scale .* model\.1\.p"):
        recipe_fit.check(placement.plan(chain(), chosen), chosen)
