"""Drawing what a network finds, with val_trt.py --source."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from known_images import MIXED, SQUARE, KnowingModel, export_answers, write_set
from known_masks import KnowingMasks, export_masks, write_outlined_set

import val_trt
from utils.core.errors import DataError, InputError
from utils.core.tasks import DETECT, SEGMENT
from utils.evaluation.mask_pixels import Patch
from utils.jobs import visualize
from utils.jobs.visualize import Artist, draw_boxes, draw_masks, show
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


def tinted(image, masks, colours):
    """Pixel by pixel: 45 % of the colour inside, the colour itself where one of the four neighbours is outside."""
    image = image.copy()
    for mask, colour in zip(masks, colours, strict=True):
        height, width = mask.shape
        for y, x in np.argwhere(mask):
            around = ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1))
            within = all(0 <= a < height and 0 <= b < width and mask[a, b] for a, b in around)
            for channel in range(3):
                mixed = round(0.55 * float(image[y, x, channel]) + 0.45 * colour[channel])
                image[y, x, channel] = mixed if within else colour[channel]
    return image


def class_colour(label):
    """The colour of a class: the most frequent one of the label that is drawn for it."""
    drawn = draw_boxes(np.full((60, 60, 3), 255, np.uint8), [[2, 40, 58, 58, 1.0, label]], {label: " "})[:38, 3:30]
    colours, counts = np.unique(drawn[(drawn != 255).any(2)], axis=0, return_counts=True)
    return colours[counts.argmax()].tolist()


def test_masks_are_tinted_and_outlined_in_the_colours_of_their_classes():
    image = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    kept = image.copy()
    masks = np.zeros((3, 50, 70), bool)
    masks[0, 5:30, 10:40] = True
    masks[0, 12:20, 18:25] = False
    masks[1, 20:50, 30:70] = True  # over the first, and up to the image's end
    parts = [Patch(8, 3, masks[0, 3:40, 8:45]), Patch(30, 20, masks[1, 20:, 30:]), Patch(5, 5, masks[2, 5:9, 5:5])]
    drawn = draw_masks(image, iter(parts), [1, 4, 0])
    assert np.array_equal(image, kept)
    assert class_colour(1) != class_colour(4)
    np.testing.assert_array_equal(drawn, tinted(image, masks, [class_colour(label) for label in (1, 4, 0)]))
    assert np.array_equal(drawn[12, 18:25], image[12, 18:25]), "the hole"


@pytest.fixture(scope="module")
def outlined(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outlined")
    samples = write_outlined_set(folder, 8, SQUARE)
    return folder, samples, KnowingMasks(samples, NAMES, 64)


def test_an_image_is_drawn_with_the_masks_of_its_detections(outlined):
    """The network's input has the image's size, so that torch can resize the prototypes to it."""
    _, samples, model = outlined
    seen = 0
    for sample in samples:
        image = cv2.imread(str(sample.path))
        ours = artist(model, imgsz=64, conf_thres=0.3)
        rows = ours.find(image)
        given = torch.from_numpy(image[..., ::-1].transpose(2, 0, 1).copy())[None] / 255
        raw, (_, coefficients, prototypes) = model(given)
        masks = []
        for row in rows:
            anchor = (raw[0, 4:7].max(0).values - row[4]).abs().argmin()
            sums = torch.einsum("k,khw->hw", coefficients[0, :, anchor], prototypes[0])
            wide = torch.nn.functional.interpolate(sums.sigmoid()[None, None], (64, 64), mode="bilinear")[0, 0]
            x1, y1, x2, y2 = row[:4].tolist()
            y, x = np.mgrid[:64, :64]
            masks.append((wide.numpy() > 0.5) & (x >= x1) & (x < x2) & (y >= y1) & (y < y2))
        expected = tinted(image, masks, [class_colour(int(row[5])) for row in rows])
        drawn, count = ours.draw(image)
        assert count == len(rows)
        expected = draw_boxes(expected, rows.tolist(), dict(enumerate(NAMES)))
        assert (drawn != expected).any(2).mean() < 0.001  # the last bit of a product may move a pixel
        seen += sum(bool(mask.any()) for mask in masks)
    assert seen > 5


def test_a_video_of_a_segmentation_network_has_masks(outlined, tmp_path):
    _, samples, model = outlined
    image = cv2.imread(str(samples[1].path))
    writer = cv2.VideoWriter(str(tmp_path / "film.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (64, 64))
    for _ in range(3):
        writer.write(image)
    writer.release()
    ours = artist(model, imgsz=64, conf_thres=0.3)
    given = torch.from_numpy(image[..., ::-1].transpose(2, 0, 1).copy())[None] / 255
    known = ours.detector._runner.infer({"images": given})
    ours.detector._runner.infer = lambda _: known  # the colours of a video are not exact
    (written,) = show(ours, tmp_path / "film.avi", tmp_path, progress=False)
    frame = cv2.VideoCapture(str(written)).read()[1]
    expected, plain = ours.draw(image)[0], draw_boxes(image, ours.find(image).tolist(), dict(enumerate(NAMES)))
    distance = [np.abs(frame.astype(int) - one).mean() for one in (expected, plain)]
    assert distance[0] < 0.7 * distance[1]


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(30000 / 1001, 29.97), (59.9994, 59.999), (119.88, 119.88), (237.3333, 237.33), (1000, 1000), (90000, 25)],
)
def test_videos_of_any_rate_are_written(known, tmp_path, monkeypatch, rate, expected):
    writer = cv2.VideoWriter(str(tmp_path / "film.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (64, 64))
    writer.write(np.zeros((64, 64, 3), np.uint8))
    writer.release()
    read = cv2.VideoCapture(str(tmp_path / "film.avi"))
    given = SimpleNamespace(read=read.read, get=lambda what: rate if what == cv2.CAP_PROP_FPS else read.get(what))
    monkeypatch.setattr(visualize, "open_video", lambda _: nullcontext(given))
    blank = artist(known[1], imgsz=64)
    blank.draw = lambda image: (image, 0)
    (written,) = show(blank, tmp_path / "film.avi", tmp_path, progress=False)
    assert cv2.VideoCapture(str(written)).get(cv2.CAP_PROP_FPS) == pytest.approx(expected, abs=1e-3)


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


def test_masks_of_a_network_with_nms_are_said_to_be_missing(outlined, caplog):
    runner = TorchRunner(outlined[2], "cpu")
    assert runner.task is SEGMENT
    runner.outputs = tuple(TensorSpec(name, (None, 100), "float32") for name in SEGMENT.detections)
    runner.metadata["nms"] = '{"kind": "none", "conf_thres": 0.25}'
    Artist(runner, imgsz=64, conf_thres=0.25)
    assert caplog.messages == ["NMS is inside the network: the boxes are drawn, and it gives no masks"]


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
        return val_trt.main([*fixed, *map(str, words)])

    assert run("--source", tmp_path / "images/val") == 0
    assert len(list((tmp_path / "runs/exp").glob("*.png"))) == 4
    assert "4 of 4 files drawn" in capsys.readouterr().out
    assert run("--source", tmp_path / "none") == 2
    assert "--source" in capsys.readouterr().err
    assert not (tmp_path / "runs/exp2").exists()


def test_the_program_draws_masks_of_an_onnx_file(outlined, tmp_path):
    folder, samples, model = outlined
    export_masks(model, tmp_path / "a.onnx", 1)
    words = [
        "--engine-file",
        tmp_path / "a.onnx",
        "--project",
        tmp_path / "runs",
        "--device",
        "cpu",
        "--conf-thres",
        0.3,
    ]
    words += ["--source", folder / "images/val"]
    assert val_trt.main(list(map(str, words))) == 0
    ours, masked = artist(model, imgsz=64, conf_thres=0.3), 0
    for sample in samples:
        image = cv2.imread(str(sample.path))
        drawn = cv2.imread(str(tmp_path / "runs/exp" / sample.path.name))
        assert (drawn != ours.draw(image)[0]).any(2).mean() < 0.001
        masked += (drawn != draw_boxes(image, ours.find(image).tolist(), dict(enumerate(NAMES)))).any()
    assert masked > 3
