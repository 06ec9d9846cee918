"""Images, labels and videos that are links, folders, pipes, damaged, or of one name."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from known_images import SQUARE, KnowingModel, export_answers, write_set

import val_trt
from utils.core.errors import DataError, InputError
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import ImageDataset, decode, make_loader
from utils.evaluation.images import find_images
from utils.evaluation.loop import TextWriter
from utils.evaluation.sources import check_source, target_names

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).resolve().parents[3]
NAMES = ("cat", "dog", "owl")


@pytest.fixture
def folder(tmp_path):
    write_set(tmp_path, 4, SQUARE)
    return tmp_path


def images_of(folder):
    return sorted(map(str, (folder / "images/val").glob("*.png")))


# links


def test_a_folder_that_leads_to_itself_lists_its_images_once(folder):
    expected = images_of(folder)
    for name in ("loop", "again"):
        (folder / "images/val" / name).symlink_to(".")
    (folder / "images/val/up").symlink_to("../..")
    assert find_images([str(folder / "images/val")]) == expected


def test_folders_that_lead_to_each_other_end(tmp_path):
    names = [f"d{number}" for number in range(12)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jpg").touch()
    for name in names:
        for other in names:
            (tmp_path / name / f"to_{other}").symlink_to(f"../{other}")
    assert find_images([str(tmp_path)]) == sorted(str(tmp_path / name / "a.jpg") for name in names)


def test_a_linked_folder_and_linked_images_are_found(folder):
    (folder / "store").mkdir()
    (folder / "store/far.png").write_bytes(Path(images_of(folder)[0]).read_bytes())
    (folder / "images/more").mkdir()
    (folder / "images/more/linked").symlink_to(folder / "store")
    (folder / "images/more/one.png").symlink_to(images_of(folder)[1])
    more = folder / "images/more"
    assert find_images([str(more)]) == [str(more / "linked/far.png"), str(more / "one.png")]


def test_an_image_of_two_names_is_listed_once_and_said(folder, caplog):
    first = images_of(folder)[0]
    (folder / "images/aaa").mkdir()
    (folder / "images/aaa/a.png").symlink_to(first)  # without labels: the other name has them
    (folder / "list.txt").write_text(f"{first}\n{first}\n")
    with caplog.at_level(logging.WARNING):
        found = find_images([str(folder / "images/aaa"), str(folder / "images/val"), str(folder / "list.txt")])
    assert found == images_of(folder)
    assert "3 names lead to images that are listed already; each image is used once" in caplog.text


def test_an_image_of_two_names_and_different_labels_is_refused(folder):
    first = images_of(folder)[0]
    for kind in ("images", "labels"):
        (folder / kind / "aaa").mkdir()
    (folder / "images/aaa/a.png").symlink_to(first)
    (folder / "labels/aaa/a.txt").write_text("0 0.5 0.5 0.25 0.25\n")
    with pytest.raises(DataError, match="are one image, and its labels differ"):
        find_images([str(folder / "images")])


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
        ImageDataset([str(folder / "images/val")], 3, 64)
    assert "\n" not in str(caught.value)


# images that are none


def test_images_that_are_no_files_are_left_out(folder):
    paths = images_of(folder)
    for path, make in zip(paths, (os.mkdir, lambda path: os.symlink(path, path)), strict=False):
        os.unlink(path)
        make(path)
    dataset = ImageDataset([str(folder / "images/val")], 3, 64)
    assert dataset.left_out == [f"{paths[1]}: Too many levels of symbolic links"]  # a folder is looked into
    assert len(dataset) == 2


def truncated_png() -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    return cv2.imencode(".png", noise)[1].tobytes()[:6000]


def test_images_none_of_which_can_be_decoded_are_said_to_be_that(folder):
    from utils.jobs.inputs import image_batches

    for path in images_of(folder):
        with open(path, "wb") as file:
            file.write(truncated_png())
    loader = make_loader(load_data(folder / "data.yaml"), "val", imgsz=64, batch_size=2, workers=0)
    with pytest.raises(DataError, match=r"none of the 4 images can be decoded, although .*; the first: .*0001\.png"):
        list(image_batches(loader))


@pytest.mark.parametrize("shuffle", [False, True])
def test_images_that_cannot_be_decoded_among_good_ones_are_counted_once(folder, caplog, shuffle):
    from itertools import islice

    from utils.jobs.inputs import image_batches

    first, *_, last = images_of(folder)
    Path(first).write_bytes(truncated_png())
    data = load_data(folder / "data.yaml")
    loader = make_loader(data, "val", imgsz=64, batch_size=3, workers=0, shuffle=shuffle)
    caplog.clear()
    for _ in range(2):
        assert sum(map(len, image_batches(loader))) == 3
    assert caplog.messages == ["1 of 4 images cannot be decoded and are left out"]
    loader = make_loader(data, "val", imgsz=64, batch_size=2, workers=0)
    caplog.clear()
    assert len(list(islice(image_batches(loader), 1))) == 1  # calibration takes so many batches and no more
    assert caplog.messages == ["1 of 2 images cannot be decoded and are left out"]
    Path(first).write_bytes(Path(last).read_bytes())
    caplog.clear()
    assert sum(map(len, image_batches(make_loader(data, "val", imgsz=64, batch_size=3, workers=0)))) == 4
    assert caplog.messages == []


def test_what_a_decoder_prints_does_not_reach_the_terminal(tmp_path, capfd):
    (tmp_path / "a.png").write_bytes(truncated_png())
    assert decode(str(tmp_path / "a.png")) is None
    os.write(2, b"ours\n")
    assert capfd.readouterr().err == "ours\n"


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


def test_files_whose_drawings_have_one_name(folder, draw, tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    content = Path(images_of(folder)[0]).read_bytes()
    for name in ("a.jpg", "a.JPG", "a.png", "A.png", "a.mpo", "a-2.png"):
        (source / name).write_bytes(content)
    code, out, _ = draw("--source", source)
    assert code == 0
    written = sorted(path.name for path in (tmp_path / "made/runs/exp").glob("[!.]*"))
    assert len(written) == 6
    assert len({name.casefold() for name in written}) == 6
    assert {"a.jpg", "a-2.png"} <= set(written)
    assert "6 of 6 files drawn" in out
    assert f"{source / 'a.JPG'} is drawn as a-2.jpg: another file has that name" in out


def test_who_has_the_name_keeps_it(tmp_path):
    files = [tmp_path / name for name in ("a.JPG", "a.avi", "a.jpg", "a.mp4")]
    assert target_names(files) == ["a-2.jpg", "a-2.mp4", "a.jpg", "a.mp4"]


@pytest.mark.parametrize("content", [b"none", b"", b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom\0\0\0\x08mdat"])
@pytest.mark.parametrize("name", ["a.mp4", "a.avi", "a.png"])
def test_a_source_that_cannot_be_decoded_leaves_nothing(draw, tmp_path, name, content):
    (tmp_path / name).write_bytes(truncated_png() if content and name == "a.png" else content)
    code, _, err = draw("--source", tmp_path / name)
    assert (code, err) == (2, f"error: {tmp_path / name} cannot be decoded\n")
    assert not (tmp_path / "made").exists()


def test_a_folder_of_which_nothing_can_be_decoded(draw, tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a.mp4", "b.png"):
        (tmp_path / "in" / name).write_bytes(b"none")
    code, _, err = draw("--source", tmp_path / "in")
    assert (code, err.count("\n")) == (2, 1)
    assert "none of the 2 images and videos can be decoded; the first: " in err
    assert not (tmp_path / "made").exists()


def test_pipes_and_folders_among_sources(folder, tmp_path, draw, caplog):
    source = folder / "images/val"
    os.mkfifo(source / "pipe.jpg")
    (source / "folder.jpg").mkdir()
    with caplog.at_level(logging.WARNING):
        assert [str(path) for path in check_source(source)] == images_of(folder)
    assert "pipe.jpg is not a regular file" in caplog.text
    assert "folder.jpg is a folder" in caplog.text
    for name in ("pipe.jpg", "pipe.mp4"):
        path = tmp_path / name
        os.mkfifo(path)
        with pytest.raises(InputError, match="is not a regular file; expected an image, a folder of them, or a video"):
            check_source(path)


# --save-txt


def test_labels_of_images_of_one_stem_go_to_files_of_their_own(tmp_path):
    import torch

    paths = [str(tmp_path / name) for name in ("x/a.jpg", "y/a.jpg", "y/A.png")]
    writer = TextWriter(tmp_path / "labels", False, paths)
    for path in paths:
        writer.add(path, torch.tensor([[0.0, 0, 10, 10, 0.5, 1]]), (100, 100))
    assert sorted(path.name for path in (tmp_path / "labels").iterdir()) == ["A-3.txt", "a-2.txt", "a.txt"]


def test_labels_are_not_written_through_a_link(tmp_path):
    import torch

    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/a.txt").symlink_to(tmp_path / "mine.txt")
    writer = TextWriter(tmp_path / "labels", False, [str(tmp_path / "a.jpg")])
    writer.add(str(tmp_path / "a.jpg"), torch.tensor([[0.0, 0, 10, 10, 0.5, 1]]), (100, 100))
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert (tmp_path / "labels/a.txt").read_text() == "1 0.05 0.05 0.1 0.1\n"


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
    assert "is read and would be overwritten; choose another --name or --project" in err
    assert {path: path.read_bytes() for path in (tmp_path / "set").rglob("*.txt")} == before


def test_names_that_are_no_text(folder, network, draw):
    content = Path(images_of(folder)[0]).read_bytes()
    odd = os.fsdecode(b"\xff")
    (folder / f"images/val/{odd}.png").write_bytes(content)
    command = [sys.executable, "val_trt.py", "--engine-file", network, "--source", folder / "images/val"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run([*command, "--project", folder / "runs", "--device", "cpu"], cwd=ROOT, capture_output=True,
                          text=True, check=False, env=environment)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert r"\udcff.png: " in done.stdout
    assert (folder / f"runs/exp/{odd}.png").is_file()
    renamed = Path(shutil.copy(network, folder / f"{odd}.onnx"))
    code, _, err = draw("--engine-file", renamed, "--source", folder / "images/val")
    assert (code, err.count("\n")) == (2, 1)
    assert "is not UTF-8, which ONNX files need; rename it" in err
    from utils.reports.page import write_html
    from utils.reports.schema import Report

    page = write_html(Report(command="command", notes=[f"left out: {odd}.png"]), folder / "report.html")
    assert r"left out: \udcff.png" in page.read_text()
