"""Images, labels and videos that are links, folders, pipes, damaged, or of one name."""

import logging
import os
import shutil
from pathlib import Path

import pytest
from known_images import SQUARE, KnowingModel, damaged_png, export_answers, write_set

import val_trt
from utils.core.errors import DataError
from utils.evaluation.coco import TextWriter
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import make_loader
from utils.evaluation.images import find_images, target_names

pytestmark = pytest.mark.timeout(120)
NAMES = ("cat", "dog", "owl")


@pytest.fixture
def folder(tmp_path):
    write_set(tmp_path, 4, SQUARE)
    return tmp_path


def images_of(folder):
    return sorted(map(str, (folder / "images/val").glob("*.png")))


# links


def test_a_linked_folder_and_linked_images_are_found(folder):
    (folder / "store").mkdir()
    (folder / "store/far.png").write_bytes(Path(images_of(folder)[0]).read_bytes())
    (folder / "images/more").mkdir()
    (folder / "images/more/linked").symlink_to(folder / "store")
    (folder / "images/more/one.png").symlink_to(images_of(folder)[1])
    more = folder / "images/more"
    assert find_images([str(more)]) == [str(more / "linked/far.png"), str(more / "one.png")]


def test_an_image_that_is_listed_twice_is_used_once_and_said(folder, caplog):
    first = images_of(folder)[0]
    (folder / "list.txt").write_text(f"{first}\n{first}\n")
    with caplog.at_level(logging.WARNING):
        found = find_images([str(folder / "images/val"), str(folder / "list.txt")])
    assert found == images_of(folder)
    assert "2 images are listed more than once" in caplog.text


def test_hidden_files_and_folders_are_left_out(tmp_path):
    for name in (".git/a.jpg", ".b.jpg", "c.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_images([str(tmp_path)]) == [str(tmp_path / "c.jpg")]


# labels


@pytest.mark.parametrize("make", [os.mkdir, lambda path: os.symlink("nowhere", path), lambda p: os.symlink(p, p)])
@pytest.mark.parametrize("place", ["labels/val/000000000002.txt", "labels/val"])
def test_labels_that_cannot_be_read_are_not_taken_for_none(folder, make, place):
    (folder / place).rename(folder / "away")
    if place.endswith("txt"):
        make(folder / place)
    else:
        (folder / place).symlink_to(folder / place)
    with pytest.raises(DataError, match=place) as caught:
        load_data(folder / "data.yaml").read("val")
    assert "\n" not in str(caught.value)


# images that are none


def test_images_that_are_no_files_are_left_out(folder):
    paths = images_of(folder)
    for path, make in zip(paths, (os.mkdir, lambda path: os.symlink(path, path)), strict=False):
        os.unlink(path)
        make(path)
    split = load_data(folder / "data.yaml").read("val")
    assert [line.split(": ")[0] for line in split.left_out] == paths[:2]
    assert len(split.images) == 2


def test_images_none_of_which_can_be_decoded_are_said_to_be_that(folder):
    from utils.jobs.inputs import image_batches

    for path in images_of(folder):
        with open(path, "wb") as file:
            file.write(damaged_png())
    loader = make_loader(load_data(folder / "data.yaml"), "val", imgsz=64, batch_size=2, workers=0)
    with pytest.raises(DataError, match=r"none of the 4 images can be decoded, although .*; the first: .*0001\.png"):
        list(image_batches(loader))


@pytest.mark.parametrize("shuffle", [False, True])
def test_images_that_cannot_be_decoded_among_good_ones_are_counted_once(folder, caplog, shuffle):
    from utils.jobs.inputs import image_batches

    Path(images_of(folder)[0]).write_bytes(damaged_png())
    data = load_data(folder / "data.yaml")
    loader = make_loader(data, "val", imgsz=64, batch_size=3, workers=0, shuffle=shuffle)
    caplog.clear()
    for _ in range(2):
        assert sum(map(len, image_batches(loader))) == 3
    assert [message.startswith("1 of 4 images") for message in caplog.messages] == [True]


# --source


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    folder = tmp_path_factory.mktemp("network")
    export_answers(KnowingModel(write_set(folder, 4, SQUARE), NAMES, 64), folder / "a.onnx", 1, 64)
    return folder / "a.onnx"


@pytest.fixture
def draw(network, tmp_path, capfd):
    def run(*words, project=tmp_path / "made/runs"):
        fixed = ["--engine-file", network, "--project", project, "--device", "cpu"]
        code = val_trt.main([str(word) for word in (*fixed, *words)])
        return code, *capfd.readouterr()

    return run


def test_files_whose_drawings_have_one_name():
    names = target_names(["in/a.jpg", "in/a.JPG", "in/a.png", "in/A.png", "in/a.mpo", "in/a-2.png"])
    assert len({name.casefold() for name in names}) == 6
    assert names[0] == "a.jpg"


@pytest.mark.parametrize("content", [b"none", b"", b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom\0\0\0\x08mdat"])
@pytest.mark.parametrize("name", ["a.mp4", "a.avi", "a.png"])
def test_a_source_that_cannot_be_decoded_leaves_nothing(draw, tmp_path, name, content):
    (tmp_path / name).write_bytes(damaged_png() if content and name == "a.png" else content)
    code, _, err = draw("--source", tmp_path / name)
    assert (code, err) == (2, f"error: {tmp_path / name} cannot be decoded\n")
    code, _, err = draw("--source", tmp_path / name, shutil.copy(tmp_path / name, tmp_path / f"b{name}"))
    said = f"none of 2 files can be read; the first: {tmp_path / name} cannot be decoded\n"
    assert (code, err.split("error: ")[1]) == (2, said)
    assert not list((tmp_path / "made/runs").iterdir())


# --save-txt


def test_labels_of_images_of_one_stem_go_to_files_of_their_own(tmp_path):
    import torch

    paths = [str(tmp_path / name) for name in ("x/a.jpg", "y/a.jpg", "y/A.png")]
    writer = TextWriter(tmp_path / "labels", False, paths)
    for path in paths:
        writer.add(path, torch.tensor([[0.0, 0, 10, 10, 0.5, 1]]), (100, 100))
    assert sorted(path.name for path in (tmp_path / "labels").iterdir()) == ["A-3.txt", "a-2.txt", "a.txt"]


def test_detections_are_not_written_over_the_labels_that_they_are_compared_with(tmp_path, draw):
    write_set(tmp_path / "set", 2, SQUARE)
    (tmp_path / "set/labels/val").rename(tmp_path / "set/val_labels")
    for kind in ("images", "labels"):  # images/ and labels/ below the split, as some exports have it
        (tmp_path / "set/val" / kind).mkdir(parents=True)
    for path in (tmp_path / "set/images/val").iterdir():
        path.rename(tmp_path / "set/val/images" / path.name)
    for path in (tmp_path / "set/val_labels").iterdir():
        path.rename(tmp_path / "set/val/labels" / path.name)
    data = tmp_path / "set/data.yaml"
    data.write_text(data.read_text().replace("images/val", "val/images"))
    before = {path: path.read_bytes() for path in (tmp_path / "set").rglob("*.txt")}
    words = ("--data", data, "--name", "val", "--exist-ok", "--save-txt", "--workers", 0)
    code, _, err = draw(*words, project=tmp_path / "set")
    assert code == 2
    assert "would be overwritten; choose another --name or --project" in err
    assert {path: path.read_bytes() for path in (tmp_path / "set").rglob("*.txt")} == before
