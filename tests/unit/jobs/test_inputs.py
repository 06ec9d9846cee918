"""Which training images are held out, who gets which of them, what the weights know; what QAT trains on."""

import copy
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
import yaml
from small_networks import detector

from models.quantize import calibration, placement
from models.quantize.finetune import held_out_loss, learning_rate
from models.quantize.recipe import Calibration, Finetune, Recipe
from utils import upstream
from utils.core.errors import DataError, InputError
from utils.evaluation.data_yaml import DataConfig, load_data
from utils.jobs import quantize
from utils.jobs.evaluate import check_float_ap, low_ap
from utils.jobs.inputs import AUGMENTATION, Inputs, check_left_out, choose_held_out, from_training, read_hyp
from utils.jobs.options import EvalOptions, QuantizeOptions
from utils.jobs.quantize import Training


def data_of(folder: Path, count: int) -> DataConfig:
    (folder / "images/train").mkdir(parents=True)
    for index in range(count):
        cv2.imwrite(str(folder / f"images/train/{index:04d}.png"), np.full((32, 32, 3), index % 256, np.uint8))
    (folder / "data.yaml").write_text(yaml.safe_dump({"path": str(folder), "train": "images/train", "names": ["a"]}))
    return load_data(folder / "data.yaml")


def numbers(files: object) -> list[int]:
    return sorted(int(Path(file).stem) for file in files)


@pytest.mark.parametrize(
    ("count", "asked", "expected"),
    [
        (1110, 200, [5 + 10 * index for index in range(111)]),  # a tenth
        (1100, 105, [int((2 * index + 1) * 1100 / 210) for index in range(105)]),
        (200, 200, list(range(1, 200, 2))),  # a hundred, and at least as many to train on
        (199, 200, []),
        (100, 2, [25, 75]),
        (2, 1, [1]),
        (1, 1, []),
    ],
)
def test_held_out_images_are_evenly_spread_a_tenth_and_at_least_a_hundred(tmp_path, count, asked, expected):
    assert numbers(choose_held_out(data_of(tmp_path, count), asked)) == expected


def test_the_choice_is_by_real_paths(tmp_path):
    data_of(tmp_path / "there", 20)
    (tmp_path / "link").symlink_to(tmp_path / "there")
    content = yaml.safe_load((tmp_path / "there/data.yaml").read_text()) | {"path": str(tmp_path / "link")}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(content))
    found = choose_held_out(load_data(tmp_path / "data.yaml"), 2)
    assert found == {os.path.realpath(tmp_path / f"there/images/train/{number:04d}.png") for number in (5, 15)}


def made(tmp_path: Path, count: int) -> Inputs:
    data = data_of(tmp_path, count)
    held_out = choose_held_out(data, 4)
    options = QuantizeOptions(workers=0, batch_size=4, imgsz=32)
    source = SimpleNamespace(stride=32, model=detector())
    return Inputs(options, Recipe(), source, None, data, torch.device("cpu"), 32, held_out)


@pytest.mark.parametrize(("count", "held_out"), [(40, [5, 15, 25, 35]), (7, [])])
def test_neither_training_nor_calibration_sees_what_is_held_out(tmp_path, count, held_out):
    found = made(tmp_path, count)
    training = [path for batch in found.training_loader() for path in batch.paths]
    assert numbers(training) == [number for number in range(count) if number not in held_out]
    assert training != sorted(training), "the order is that of the seed"
    calibration = [round(float(image.max() * 255)) for batch in found.calibration_images() for image in batch]
    assert sorted(calibration) == [number for number in range(count) if number not in held_out]
    measured = [int(image.max()) for batch in found.held_out_images for image in batch]
    assert measured == (held_out or list(range(count)))


@pytest.mark.parametrize("number", [5, 250])
def test_calibration_sees_the_same_images_in_the_same_order_whatever_the_batch_size(tmp_path, number):
    found = made(tmp_path, 9)
    seen = []
    for size in (1, 4, 9):
        options = found.options.model_copy(update={"batch_size": size})
        one = replace(found, options=options, recipe=Recipe().replace(calibration_images=number))
        seen.append([round(float(image.max() * 255)) for batch in one.calibration_images() for image in batch])
    assert seen[0] == seen[1] == seen[2]
    assert (len(set(seen[0])), seen[0] != sorted(seen[0])) == (min(number, 5), True), "four of nine are held out"


def test_a_split_of_which_much_is_left_out_stops_a_run_unless_it_is_forced(tmp_path):
    data = data_of(tmp_path, 40)
    for number, stop in ((2, False), (3, True)):
        for path in sorted((tmp_path / "images/train").iterdir())[:number]:
            path.write_bytes(b"no image")
        data = load_data(tmp_path / "data.yaml")
        data.read("train")
        check_left_out(data, force=True)
        if not stop:
            check_left_out(data, force=False)
            continue
        with pytest.raises(DataError, match=r"^3 of 40 images of train are left out \(first: images/train/0000.png"):
            check_left_out(data, force=False)


# what the weights know


def trained(**known: object) -> upstream.FloatCheckpoint:
    return upstream.FloatCheckpoint(None, {}, 1, 32, {}, **known)


@pytest.mark.parametrize(
    ("given", "known", "imgsz", "level"),
    [({}, {"imgsz": 160}, 160, "INFO"), ({"imgsz": 320}, {"imgsz": 160}, 320, "INFO"), ({}, {}, 640, "INFO"),
     ({"imgsz": 160}, {"imgsz": 160}, 160, None), ({"imgsz": 320}, {}, 320, None)],
)  # fmt: skip
def test_the_image_size_is_that_of_the_training_and_another_one_is_said(given, known, imgsz, level, caplog):
    caplog.set_level("INFO")
    assert from_training(QuantizeOptions(weights="a.pt", data="d.yaml", **given), trained(**known)).imgsz == imgsz
    assert [(one.levelname, "--imgsz" in one.message) for one in caplog.records] == [(level, True)] * bool(level)


def test_the_dataset_is_that_of_the_training_if_it_is_there(tmp_path, caplog):
    caplog.set_level("INFO")
    own, options = tmp_path / "own.yaml", EvalOptions(weights="a.pt", imgsz=64)
    for known, named in (({"data": str(own)}, "own.yaml"), ({}, "a.pt")):
        with pytest.raises(InputError, match=f"--data was not given.*{named}"):
            from_training(options, trained(**known))
    own.touch()
    assert from_training(options, trained(data=str(own))).data == str(own)
    assert "own.yaml" in caplog.text
    assert from_training(EvalOptions(weights="a.pt", imgsz=64, data="d.yaml"), trained(data=str(own))).data == "d.yaml"


@pytest.mark.parametrize(("ap", "warned"), [(0.0, True), (0.099, True), (0.1, False), (0.5, False)])
def test_an_fp32_model_that_finds_nothing_stops_a_run_with_the_usual_reasons_unless_it_is_forced(ap, warned):
    text = low_ap(ap)
    assert bool(text) == warned
    check_float_ap(ap, force=True)
    if not warned:
        check_float_ap(ap, force=False)
        return
    with pytest.raises(DataError) as caught:
        check_float_ap(ap, force=False)
    assert all(word in str(caught.value) for word in ("--imgsz", "--data", "classes", "--force"))


@pytest.mark.parametrize("value", ["'half'", "[1]", "true", "null", ".nan", ".inf", "-1", "1000", "2020-01-01"])
@pytest.mark.parametrize("name", ["mosaic", "degrees"])
def test_hyp_holds_numbers_within_bounds_of_what_the_augmentation_reads(tmp_path, name, value):
    good, path = dict.fromkeys(AUGMENTATION, 0.0), tmp_path / "hyp.yaml"
    path.write_text(yaml.safe_dump({**good, "lr0": "text"}))
    assert read_hyp(path) == good
    path.write_text(path.read_text().replace(f"{name}: 0.0", f"{name}: {value}"))
    with pytest.raises(InputError, match=f"--hyp .*hyp.yaml: {name} is .*; expected ") as caught:
        read_hyp(path)
    assert "\n" not in str(caught.value)


# the epochs of QAT


@pytest.fixture(scope="module")
def student():
    network = detector()
    placement.apply(network, placement.plan(network, Recipe()))
    calibration.calibrate(network, [torch.rand(2, 3, 32, 32)], Calibration(method="max"))
    return network


def training(student, inputs: Inputs) -> Training:
    return Training(copy.deepcopy(student), detector(), inputs, Finetune(epochs=3, iters=5, lr=1e-4))


def test_an_epoch_tells_its_loss_its_mean_rate_and_the_loss_on_held_out_images(student, tmp_path):
    inputs = made(tmp_path, 40)
    trains = training(student, inputs)
    done = trains.epoch(0)
    assert done["lr"] == pytest.approx(sum(learning_rate(step, 15, 1e-4) for step in range(5)) / 5)
    assert done["loss"] > 0
    after = held_out_loss(trains._student, trains._teacher, inputs.held_out_images, inputs.device)
    assert (done["held_out"], done["held_out_error"]) == (after.value, after.difference(trains.ptq).error)
    assert done["held_out"] != trains.ptq.value


@pytest.mark.parametrize("iters", [5, 3])  # all 20 images that are not held out, or some
def test_an_epochs_images_depend_on_seed_and_epoch_alone(iters, student, tmp_path, monkeypatch):
    """Also where processes read them, which stay from epoch to epoch, and have read ahead when one ends."""
    inputs, orders, reads = made(tmp_path, 24), {}, quantize.image_batches

    def watched(loader):
        for images in reads(loader):
            seen.extend(int(image.max()) for image in images)
            yield images

    monkeypatch.setattr(quantize, "image_batches", watched)
    for epochs, workers in (((0, 1, 2), 0), ((0, 1, 2), 2), ((1,), 0), ((2,), 0)):
        seen: list[int] = []
        options = inputs.options.model_copy(update={"workers": workers})
        settings = Finetune(epochs=3, iters=iters, lr=1e-4)
        trains = Training(copy.deepcopy(student), detector(), replace(inputs, options=options), settings)
        for epoch in epochs:
            seen.clear()
            trains.epoch(epoch)
            orders.setdefault(epoch, set()).add(tuple(seen))
    assert [len(of_epoch) for of_epoch in orders.values()] == [1, 1, 1]
    assert len(set.union(*orders.values())) == 3
    for ((*images,),) in orders.values():
        assert len({*images} - {3, 9, 15, 21}) == len(images) == 4 * iters
