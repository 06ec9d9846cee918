"""Drawing what a network finds, with val_trt.py --source."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from known_images import MIXED, SQUARE, KnowingModel, export_answers, write_set

import val_trt
from utils.cli import run_program
from utils.core.errors import DataError, InputError
from utils.core.tasks import DETECT
from utils.jobs.visualize import Artist, draw_boxes, show
from utils.runners.base import TensorSpec
from utils.runners.pytorch import TorchRunner

NAMES = ("cat", "dog", "owl")


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    folder = tmp_path_factory.mktemp("known")
    samples = write_set(folder, 8, MIXED)
    return samples, KnowingModel(samples, NAMES, 64)


def artist(model, **more):
    return Artist(TorchRunner(model, "cpu"), **more)


def test_boxes_are_in_the_images_own_pixels(known):
    samples, model = known
    for sample in samples:
        found = artist(model, imgsz=64, conf_thres=0.5, iou_thres=1.0).find(cv2.imread(str(sample.path))).numpy()
        answers = sample.answers[sample.answers[:, 5] > 0.5]
        limit = np.array([*sample.size, *sample.size])
        for row in found:
            distance = np.abs(np.clip(answers[:, 1:5], 0, limit) - row[:4]).max(1)
            assert distance.min() < 0.6
            assert answers[distance.argmin(), 5] == pytest.approx(row[4], abs=1e-5)


def test_where_it_draws_and_that_the_image_stays(known):
    image = np.full((100, 200, 3), 30, np.uint8)
    drawn = draw_boxes(image, [[50, 40, 120, 90, 0.87, 1]], dict(enumerate(NAMES)))
    assert (image == 30).all()
    changed = np.argwhere((drawn != image).any(2))
    assert changed[:, 0].max() in (90, 91)
    assert changed[:, 1].min() in (49, 50)
    assert (drawn[60:80, 60:110] == 30).all()  # inside the box nothing is drawn
    assert (drawn[20:39, 55:90] != 30).any()  # the name above it
    other = draw_boxes(image, [[50, 40, 120, 90, 0.87, 2]], {})
    assert tuple(other[90, 80]) != tuple(drawn[90, 80])


@pytest.mark.parametrize(
    ("settings", "thresholds", "expected"),
    [
        ('{"conf_thres": 0.25, "iou_thres": 0.45}', (0.25, 0.45), []),
        ('{"conf_thres": 0.25, "iou_thres": 0.45}', (0.5, 0.45), []),
        (
            '{"conf_thres": 0.25, "iou_thres": 0.45}', (0.1, 0.45),
            ["leaves out what scores less than 0.25: --conf-thres 0.1 finds no more than that"],
        ),
        ('{"conf_thres": 0.25, "iou_thres": 0.45}', (0.3, 0.7), ["with its own --iou-thres 0.45 instead of 0.7"]),
        ('{"kind": "none", "conf_thres": 0.25, "iou_thres": 0.45}', (0.3, 0.7), []),
        ("[1]", (0.1, 0.45), ["does not say its thresholds: --conf-thres 0.1 finds no more"]),
        ('{"conf_thres": "low"}', (0.1, 0.45), ["does not say its thresholds: --conf-thres 0.1 finds no more"]),
        (None, (0.1, 0.7), []),
    ],
)  # fmt: skip
def test_thresholds_that_nms_in_the_file_overrules_are_named(known, caplog, settings, thresholds, expected):
    runner = TorchRunner(known[1], "cpu")
    if settings is not None:
        runner.outputs = tuple(TensorSpec(name, (None, 100), "float32") for name in DETECT.detections)
        runner.metadata["nms"] = settings
    Artist(runner, imgsz=64, conf_thres=thresholds[0], iou_thres=thresholds[1])
    assert len(caplog.messages) == len(expected)
    for message, text in zip(caplog.messages, expected, strict=True):
        assert text in message


def test_folders_images_and_videos(known, tmp_path):
    samples, model = known
    folder = tmp_path / "in"
    folder.mkdir()
    for sample in samples[:3]:
        (folder / sample.path.name).write_bytes(sample.path.read_bytes())
    (folder / "broken.jpg").write_bytes(b"no image")
    (folder / "notes.txt").write_text("no image")
    writer = cv2.VideoWriter(str(folder / "film.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (64, 64))
    for _ in range(4):
        writer.write(np.zeros((64, 64, 3), np.uint8))
    writer.release()
    blank = artist(model, imgsz=64, conf_thres=0.99)
    blank.draw = lambda image: (255 - image, 0)
    written = show(blank, folder, tmp_path / "out", progress=False)
    assert [path.name for path in written] == sorted(["film.mp4", *(sample.path.name for sample in samples[:3])])
    before, after = (cv2.imread(str(root / samples[0].path.name)) for root in (folder, tmp_path / "out"))
    assert np.array_equal(after, 255 - before)
    video = cv2.VideoCapture(str(tmp_path / "out/film.mp4"))
    frames = []
    while (read := video.read())[0]:
        frames.append(read[1])
    assert len(frames) == 4
    assert min(frame.mean() for frame in frames) > 240


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("nowhere", None, InputError, "does not exist; expected an image, a folder of them, or a video"),
        ("a.txt", b"", InputError, "is neither an image nor a video by its name"),
        ("a.jpg", b"none", DataError, "a.jpg cannot be decoded"),
        ("a.mp4", b"none", DataError, "a.mp4 cannot be decoded"),
        (".", None, InputError, "holds neither images nor videos"),
    ],
)
def test_sources_that_cannot_be_drawn(known, tmp_path, name, content, error, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        show(artist(known[1], imgsz=64), tmp_path / name, tmp_path / "out", progress=False)
    assert not list(tmp_path.glob("out/*"))


def test_the_program(tmp_path, capsys):
    samples = write_set(tmp_path, 4, SQUARE)
    export_answers(KnowingModel(samples, NAMES, 64), tmp_path / "a.onnx", 1, 64)
    fixed = ["--engine-file", str(tmp_path / "a.onnx"), "--project", str(tmp_path / "runs"), "--device", "cpu"]

    def run(*words):
        return run_program(val_trt.make_parser(), val_trt.main, [*fixed, *map(str, words)])

    assert run("--source", tmp_path / "images/val") == 0
    assert len(list((tmp_path / "runs/exp").glob("*.png"))) == 4
    assert "4 of 4 files drawn" in capsys.readouterr().out
    assert run("--source", tmp_path / "none") == 2
    assert "--source" in capsys.readouterr().err
    assert not (tmp_path / "runs/exp2").exists()
