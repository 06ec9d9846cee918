"""What a network finds, drawn and written by val_trt.py --source, and as samples of a report."""

import http.server
import re
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
import torch
from known_images import MIXED, SQUARE, KnowingModel, write_set
from known_masks import KnowingMasks, masks_by_torch, write_outlined_set

from utils.core.errors import DataError, InputError
from utils.evaluation.data_yaml import load_data
from utils.evaluation.masks import Patch
from utils.jobs.draw import show
from utils.jobs.sources import find_sources
from utils.jobs.visualize import Artist, best_class, collect_samples, draw_boxes, draw_masks
from utils.reports.detections import points_of
from utils.runners.pytorch import TorchRunner

NAMES = ("cat", "dog", "owl")


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    folder = tmp_path_factory.mktemp("known")
    samples = write_set(folder, 9, MIXED)
    return samples, KnowingModel(samples, NAMES, 64)


def artist(model, **more):
    return Artist(TorchRunner(model, "cpu"), **more)


def write_video(path, images):
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, images[0].shape[1::-1])
    for image in images:
        writer.write(image)
    writer.release()


def frames_of(path):
    video, frames = cv2.VideoCapture(str(path)), []
    while (read := video.read())[0]:
        frames.append(read[1])
    return frames


def test_where_it_draws_and_that_the_image_stays(known):
    image = np.full((100, 200, 3), 30, np.uint8)
    drawn = draw_boxes(image, [[50, 40, 120, 90, 0.87, 1]], dict(enumerate(NAMES)))
    assert (image == 30).all()
    changed = np.argwhere((drawn != image).any(2))
    assert changed[:, 0].max() in (90, 91)
    assert changed[:, 1].min() in (49, 50)
    assert (drawn[60:80, 60:110] == 30).all()  # inside the box nothing is drawn
    assert (drawn[20:39, 55:90] != 30).any()  # the name above it
    corner = draw_boxes(image, [[190, -9, 220, 120, 0.87, 1]], dict(enumerate(NAMES)))
    assert (corner[1:9, 165:199] != 30).any(2).mean() > 0.5  # or inside, all of it, where there is no room
    other = draw_boxes(image, [[50, 40, 120, 90, 0.87, 2]], {})
    assert tuple(other[90, 80]) != tuple(drawn[90, 80])
    large = draw_boxes(np.zeros((1080, 1920, 3), np.uint8), [[100, 100, 900, 900, 0.87, 1]], {})
    assert 5 <= large[500, 90:110].any(1).sum() <= 8  # a line of four pixels, smoothed; one of one pixel takes three


def tinted(image, masks, colours):
    image = image.copy()
    for mask, colour in zip(masks, colours, strict=True):
        image[mask] = np.round(0.55 * image[mask] + 0.45 * np.array(colour))
    return image


def class_colour(label):
    """The colour of a class: the most frequent one of the label that is drawn for it."""
    drawn = draw_boxes(np.full((60, 60, 3), 255, np.uint8), [[2, 40, 58, 58, 1.0, label]], {label: " "})[:38, 3:30]
    colours, counts = np.unique(drawn[(drawn != 255).any(2)], axis=0, return_counts=True)
    return colours[counts.argmax()].tolist()


def test_masks_are_tinted_in_the_colours_of_their_classes():
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
    return samples, KnowingMasks(samples, NAMES, 64)


def test_an_image_is_drawn_with_the_masks_of_its_detections(outlined):
    """The network's input has the image's size, so that torch can resize the prototypes to it."""
    samples, model = outlined
    seen = 0
    for sample in samples:
        image = cv2.imread(str(sample.path))
        ours = artist(model, imgsz=64, conf_thres=0.3)
        rows = ours.detect(image)[0]
        masks = masks_by_torch(model, image, rows[:, :5].tolist())
        expected = tinted(image, masks, [class_colour(int(row[5])) for row in rows])
        drawn, drawn_rows = ours.draw(image)
        assert drawn_rows == rows.tolist()
        expected = draw_boxes(expected, rows.tolist(), dict(enumerate(NAMES)))
        assert (drawn != expected).any(2).mean() < 0.001  # the last bit of a product may move a pixel
        seen += sum(bool(mask.any()) for mask in masks)
    assert seen > 5


def test_folders_images_and_videos(known, tmp_path, caplog):
    samples, model = known
    folder = tmp_path / "in"
    folder.mkdir()
    for sample in samples[:3]:
        (folder / sample.path.name).write_bytes(sample.path.read_bytes())
    (folder / "broken.jpg").write_bytes(b"no image")
    (folder / "notes.txt").write_text("no image")
    write_video(folder / "film.avi", [np.zeros((64, 64, 3), np.uint8)] * 4)
    blank = artist(model, imgsz=64, conf_thres=0.99)
    blank.warm_up, blank.detections = Mock(), Mock(return_value=(torch.zeros(0, 6), []))
    blank.paint = lambda image, rows, masks: 255 - image
    written = show(blank, find_sources([str(folder)]), tmp_path / "out", progress=False)
    assert [path.name for path in written] == sorted(["film.mp4", *(sample.path.name for sample in samples[:3])])
    before, after = (cv2.imread(str(root / samples[0].path.name)) for root in (folder, tmp_path / "out"))
    assert np.array_equal(after, 255 - before)
    frames = frames_of(tmp_path / "out/film.mp4")
    assert len(frames) == 4
    assert caplog.messages[-1] == f"not read: 1; first: {folder / 'broken.jpg'} cannot be decoded"
    assert min(frame.mean() for frame in frames) > 240


@pytest.fixture
def film(outlined, tmp_path):
    """A network, and a folder with `film.avi`, whose four frames are samples, and the first of them as `film_1.png`."""
    samples, model = outlined
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in/film.avi", [cv2.imread(str(sample.path)) for sample in samples[:4]])
    (tmp_path / "in/film_1.png").write_bytes(samples[0].path.read_bytes())
    return artist(model, imgsz=64, conf_thres=0.3), tmp_path / "in", tmp_path / "out"


def test_detections_as_upstreams_text_files(film, caplog):
    """Of a video a file for each frame, from 1 on; those of an image with such a name are not written over."""
    ours, source, out = film
    caplog.set_level("INFO")
    show(ours, find_sources([str(source)]), out, texts=True, scores=True, progress=False)
    expected, cats = {}, 0
    images = [("film.mp4", number, frame) for number, frame in enumerate(frames_of(source / "film.avi"), 1)]
    for name, number, image in [*images, ("film_1.png", 0, cv2.imread(str(source / "film_1.png")))]:
        height, width = image.shape[:2]
        for x1, y1, x2, y2, score, label in ours.detect(image)[0].tolist():
            file = f"film_{number}{'-2' * (number == 1)}.txt" if number else "film_1.txt"
            row = [label, (x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height, score]
            expected.setdefault(file, []).append(pytest.approx(row, rel=1e-5))
            cats += name == "film.mp4" and NAMES[int(label)] == "cat"
    assert {"film_1.txt", "film_1-2.txt"} < set(expected)
    texts = {path.name: [[float(word) for word in line.split()] for line in path.read_text().splitlines()]
             for path in (out / "labels").iterdir()}  # fmt: skip
    assert texts == expected
    assert f"cat: {cats}" in next(line for line in caplog.messages if "film.mp4" in line)


def test_what_was_drawn_until_ctrl_c_is_whole(film):
    ours, source, out = film
    three = [ours.detect(frame) for frame in frames_of(source / "film.avi")[:3]]
    ours.detections = Mock(side_effect=[*three, KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        show(ours, [str(source / "film.avi")], out, progress=False)
    assert len(frames_of(out / "film.mp4")) == 3
    assert [path.name for path in out.iterdir()] == ["film.mp4"]


@pytest.fixture
def server(film):
    """The URL of a server that sends the film, 'cut.avi' without its end, and a camera's 'live' images."""
    content = (film[1] / "film.avi").read_bytes()
    images = [cv2.imencode(".jpg", image)[1].tobytes() for image in frames_of(film[1] / "film.avi")]

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            kind = "video/avi" if "avi" in self.path else "multipart/x-mixed-replace; boundary=image"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            if "avi" in self.path:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            head = b"--image\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n"
            live = b"".join(head % len(image) + image + b"\r\n" for image in images)
            whole = {"/film.avi": content, "/cut.avi": content.partition(b"idx1")[0][:-300], "/a.jpg": images[0]}
            self.wfile.write(whole.get(self.path, live))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://me:secret@127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.parametrize(
    ("name", "drawing", "count", "said"),
    [("film.avi", "film.mp4", 4, "in 4 frames"), ("cut.avi", "cut.mp4", None, "connection was lost"),
     ("live?camera=1", "live.mp4", 4, "ended or its connection was lost"), ("a.jpg", "a.jpg", 1, "object")],
)  # fmt: skip
def test_a_stream_is_drawn_to_its_end_which_is_said(film, server, caplog, name, drawing, count, said):
    ours, _, out = film
    caplog.set_level("INFO")
    (written,) = show(ours, [f"{server}/{name}"], out, progress=False)
    assert written == out / drawing
    assert len(frames_of(written)) == count if count else 0 < len(frames_of(written)) < 4
    assert any(said in line for line in caplog.messages if str(written) in line)
    assert "secret" not in caplog.text


def test_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    for name in ("in/a.jpg", "in/b.png", "in/c.avi", "in/d.pdf", "in/e[1].png"):
        Path(name).touch()
    Path("in/list.txt").write_text("b.png\nnone.png\n0\nrtsp://me:secret@host/live\n")
    cases = {
        "in/a.jpg": ["in/a.jpg"], "in": ["in/a.jpg", "in/b.png", "in/c.avi", "in/e[1].png"],
        "in/*g": ["in/a.jpg", "in/b.png", "in/e[1].png"], "**/c*": ["in/c.avi"], "in/e[1].png": ["in/e[1].png"],
        "in/list.txt": ["in/b.png", "in/none.png", "0", "rtsp://me:secret@host/live"], "3": ["3"], "http://h/x?a=b": ["http://h/x?a=b"],
    }  # fmt: skip
    for source, expected in cases.items():
        assert find_sources([source]) == expected
    assert find_sources(["in/b.png", "in"]) == ["in/b.png", "in/a.jpg", "in/c.avi", "in/e[1].png"]
    for source in ("in/d.pdf", "in/*.pdf", "none.png", "in/*.gif"):
        with pytest.raises(InputError, match=re.escape(source)):
            find_sources(["in", source])


def test_the_first_image_warms_up_before_times_are_taken(known, monkeypatch, tmp_path):
    samples, model = known
    infer, waits = TorchRunner._infer, [0.5]
    monkeypatch.setattr(TorchRunner, "_infer", lambda *words: time.sleep(waits.pop() if waits else 0) or infer(*words))
    show(ours := artist(model, imgsz=64), [str(samples[0].path)], tmp_path, progress=False)
    assert ours.detector.milliseconds()["inference"] < 250


def data_of(samples):
    return load_data(samples[0].path.parents[2] / "data.yaml")


def filled(polygons):
    return cv2.fillPoly(np.zeros((64, 64), np.uint8), polygons, 1).astype(bool)


def test_boxes_are_in_pixels_of_the_image_and_images_spread_over_the_split(known):
    written, model = known
    known = {str(sample.path): sample for sample in written}
    runners = {"float": TorchRunner(model, "cpu")}
    samples = collect_samples(runners, data_of(written), imgsz=64, count=3, confidence=0.3)
    assert [list(known).index(sample.image) for sample in samples] == [0, 4, 8]
    assert sum(len(sample.predictions["float"]) for sample in samples) > 3
    for sample in samples:
        labels, answers = known[sample.image].labels, known[sample.image].answers
        assert len(sample.truth) == len(labels)
        for box in sample.truth:
            row = labels[np.abs(labels[:, 1:] - box.xyxy).max(1).argmin()]
            assert (box.name, box.xyxy) == (NAMES[int(row[0])], pytest.approx(row[1:], abs=1e-3))
        boxes = [[*box.xyxy, box.score] for box in sample.predictions["float"]]
        for box in boxes:
            assert box[4] >= 0.3
            apart = np.abs(answers[:, 1:5].clip(0, np.tile(known[sample.image].size, 2)) - box[:4]).max(1)
            assert apart.min() < 0.1
            assert answers[apart.argmin(), 5] == pytest.approx(box[4], abs=1e-5)
        drawn = artist(model, imgsz=64, conf_thres=0.3).detect(cv2.imread(sample.image))[0]
        np.testing.assert_allclose(drawn[:, :5], np.reshape(boxes, (-1, 5)), atol=0.01)


def test_images_that_are_named_are_taken_in_their_order(known):
    written, model = known
    named = [str(written[place].path) for place in (5, 0, 7)]
    samples = collect_samples({"float": TorchRunner(model, "cpu")}, data_of(written), imgsz=64, images=named)
    assert [sample.image for sample in samples] == named


def test_of_two_classes_in_one_place_the_better_is_shown():
    rows = torch.tensor([[0.0, 0, 9, 9, 0.5, 0], [0, 0, 9, 9, 0.6, 1], [20, 20, 30, 30, 0.4, 0]])
    assert rows[best_class(rows)][:, 5].tolist() == [1, 0]


def test_masks_of_labels_and_of_detections_have_outlines(outlined):
    samples, model = outlined
    runners = {"float": TorchRunner(model, "cpu"), "boxes": TorchRunner(KnowingModel(samples, NAMES, 64), "cpu")}
    found = collect_samples(runners, data_of(samples), imgsz=64, count=8)
    masks = 0
    for sample, one in zip(samples, found, strict=True):
        assert one.image == str(sample.path)
        assert len(one.truth) == len(sample.outlines)
        for box in one.truth:
            corners = [np.concatenate([points.min(0), points.max(0)]) for points in sample.outlines]
            nearest = np.abs(np.array(corners) - box.xyxy).sum(1).argmin()
            theirs = filled([sample.outlines[nearest].astype(np.int32)])
            assert (filled([points_of(text) for text in box.outline]) != theirs).mean() < 0.002
        assert not any(box.outline for box in one.predictions["boxes"])
        boxes = one.predictions["float"]
        expected_masks = masks_by_torch(model, cv2.imread(one.image), [(*box.xyxy, box.score) for box in boxes])
        for box, expected in zip(boxes, expected_masks, strict=True):
            drawn = filled([points_of(text) for text in box.outline])
            assert (drawn != expected).mean() < 0.002
            masks += bool(box.outline)
    assert masks > 5


def test_boxes_as_labels_are_refused_where_a_network_has_masks(tmp_path):
    samples = write_outlined_set(tmp_path, 2, SQUARE)
    data = data_of(samples)
    labels = tmp_path / "labels/val" / f"{samples[0].path.stem}.txt"
    labels.write_text("0 0.5 0.5 0.2 0.2\n")
    boxes = {"float": TorchRunner(KnowingModel(samples, NAMES, 64), "cpu")}
    assert len(collect_samples(boxes, data, imgsz=64, count=1)[0].truth) == 1
    with pytest.raises(DataError, match=rf"needs outlines, and 1 image of .*; the first: .*{labels.name}"):
        collect_samples({"float": TorchRunner(KnowingMasks(samples, NAMES, 64), "cpu")}, data, imgsz=64, count=1)
