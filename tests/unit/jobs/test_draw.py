"""Reading, detection, drawing and encoding at the same time: order, bounds, errors of each, and an early end."""

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
from known_images import SQUARE, export_answers
from known_masks import KnowingMasks, write_outlined_set

from utils.core.errors import DataError, InputError, QatError
from utils.jobs import draw
from utils.jobs.draw import DEPTH, Ahead, Behind, show
from utils.jobs.sources import find_sources
from utils.jobs.visualize import Artist
from utils.runners.pytorch import TorchRunner

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("cat", "dog", "owl")


def until(condition, seconds=20.0):
    """Wait for what another thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# the two threads


def test_items_come_in_order_and_at_most_so_many_are_made_ahead():
    made = []

    def numbers():
        for number in range(50):
            made.append(number)
            yield number

    with Ahead(numbers(), 3) as ahead:
        until(lambda: len(made) == 3)
        time.sleep(0.05)
        assert made == [0, 1, 2]
        assert next(ahead) == 0
        until(lambda: len(made) == 4)
        assert list(ahead) == list(range(1, 50))
        assert list(ahead) == []


def test_an_error_of_the_reader_is_raised_behind_the_items_before_it():
    def numbers():
        yield from (1, 2)
        raise DataError("no third")

    taken = []

    def take():
        with Ahead(numbers(), 2) as ahead:
            for number in ahead:
                taken.append(number)

    with pytest.raises(DataError, match="no third"):
        take()
    assert taken == [1, 2]


def test_an_early_end_closes_the_reader_where_it_is():
    closed, made = threading.Event(), []

    def numbers():
        try:
            for number in range(1000):
                made.append(number)
                yield number
        finally:
            closed.set()

    def take():
        with Ahead(numbers(), 2) as ahead:
            next(ahead)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take()
    assert closed.is_set()
    assert len(made) <= 4


def test_a_reader_that_hangs_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(draw, "PATIENCE", 0.1)
    goes_on = threading.Event()

    def numbers():
        yield 1
        goes_on.wait(60)
        yield 2

    began = time.monotonic()
    with Ahead(numbers(), 2) as ahead:
        assert next(ahead) == 1
    assert time.monotonic() - began < 10
    goes_on.set()


def test_work_behind_is_in_order_and_at_most_so_many_items_wait_for_it():
    goes_on, done, given = threading.Event(), [], []

    def work(item):
        goes_on.wait(60)
        done.append(item)

    def give():
        with Behind(work, 2) as behind:
            for number in range(20):
                behind.put(number)
                given.append(number)

    thread = threading.Thread(target=give)
    thread.start()
    until(lambda: len(given) == 2)
    time.sleep(0.05)
    assert (given, done) == ([0, 1], [])
    goes_on.set()
    thread.join()
    assert done == list(range(20))


@pytest.mark.parametrize("count", [3, 50])
def test_an_error_of_the_work_is_raised_once_and_nothing_is_done_behind_it(count):
    done = []

    def work(item):
        done.append(item)
        if item == 2:
            raise QatError("third")

    def give():
        with Behind(work, 2) as behind:
            for number in range(count):
                behind.put(number)

    with pytest.raises(QatError, match="third"):
        give()
    assert done == [0, 1, 2]


def test_what_was_handed_over_before_ctrl_c_is_done():
    done = []

    def work(item):
        time.sleep(0.02)
        done.append(item)

    def give():
        with Behind(work, 2) as behind:
            for number in range(3):
                behind.put(number)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        give()
    assert done == [0, 1, 2]


# sources


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    folder = tmp_path_factory.mktemp("known")
    samples = write_outlined_set(folder, 8, SQUARE)
    return samples, KnowingMasks(samples, NAMES, 64)


@pytest.fixture
def sources(known, tmp_path):
    """A folder with images and a video between them, whose frames are the images."""
    folder = tmp_path / "in"
    folder.mkdir()
    images = [cv2.imread(str(sample.path)) for sample in known[0][:4] * 3]
    writer = cv2.VideoWriter(str(folder / "film.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, images[0].shape[1::-1])
    for number, image in enumerate(images):
        writer.write(image)
        cv2.imwrite(str(folder / f"{'az'[number % 2]}{number:02}.png"), image)
    writer.release()
    return folder


@pytest.fixture
def artist(known):
    return Artist(TorchRunner(known[1], "cpu"), imgsz=64, conf_thres=0.3)


def frames_of(path):
    video, frames = cv2.VideoCapture(str(path)), []
    while (read := video.read())[0]:
        frames.append(read[1])
    return frames


def texts_of(folder):
    return {path.name: path.read_text() for path in sorted((folder / "labels").iterdir())}


def test_drawings_are_those_of_one_image_after_the_other(artist, sources, tmp_path):
    paths = find_sources([str(sources)])
    assert [Path(path).suffix for path in paths].index(".avi") not in (0, len(paths) - 1)
    out = tmp_path / "out"
    assert [path.name for path in show(artist, paths, out, progress=False)] == [
        Path(path).name.replace(".avi", ".mp4") for path in paths
    ]
    frames = frames_of(sources / "film.avi")
    writer = cv2.VideoWriter(str(tmp_path / "a.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10.0, frames[0].shape[1::-1])
    for frame in frames:
        writer.write(artist.draw(frame)[0])
    writer.release()
    drawn, expected = frames_of(out / "film.mp4"), frames_of(tmp_path / "a.mp4")
    assert len(drawn) == 12
    assert all(map(np.array_equal, drawn, expected))
    assert any((one != other).any() for one, other in zip(drawn, frames, strict=True))
    for path in paths:
        if path.endswith(".png"):
            drawing = artist.draw(cv2.imread(path))[0]
            assert np.array_equal(cv2.imread(str(out / Path(path).name)), drawing)


def test_without_drawing_the_labels_are_the_same_and_all_there_is(artist, sources, tmp_path, caplog):
    caplog.set_level("INFO")
    paths = find_sources([str(sources)])
    show(artist, paths, tmp_path / "drawn", texts=True, scores=True, progress=False)
    caplog.clear()
    show(artist, paths, tmp_path / "labels-only", texts=True, scores=True, draw=False, progress=False)
    assert [path.name for path in (tmp_path / "labels-only").iterdir()] == ["labels"]
    assert texts_of(tmp_path / "labels-only") == texts_of(tmp_path / "drawn")
    assert len(texts_of(tmp_path / "drawn")) > 12
    assert not any(str(tmp_path / "labels-only") in line for line in caplog.messages)
    stages = next(line for line in caplog.messages if line.startswith("ms an image"))
    assert "detect" in stages
    assert "encode" not in stages
    assert any("images/s" in line for line in caplog.messages)


class Failing:
    """The stages, each of which can be made to fail at its fifth image."""

    def __init__(self, artist, monkeypatch):
        self.artist, self.monkeypatch, self.calls = artist, monkeypatch, 0

    def fail(self, stage):
        if stage == "encode":
            encoder = cv2.VideoWriter
            writer = Mock(side_effect=lambda *words: self.wrapped(encoder(*words)), fourcc=encoder.fourcc)
            self.monkeypatch.setattr(draw.cv2, "VideoWriter", writer)
            return
        name = {"read": "batch_of", "detect": "detections", "draw": "paint"}[stage]
        setattr(self.artist, name, self.counted(getattr(self.artist, name)))

    def counted(self, work):
        def call(*words, **options):
            self.calls += 1
            if self.calls == 5:
                raise QatError("the fifth")
            return work(*words, **options)

        return call

    def wrapped(self, writer):
        return Mock(wraps=writer, write=self.counted(writer.write))


@pytest.mark.parametrize("stage", ["read", "detect", "draw", "encode"])
@pytest.mark.parametrize("name", ["film.avi", "*.png"])
def test_an_error_of_any_stage_ends_it_and_leaves_nothing_half_written(
    artist, sources, tmp_path, monkeypatch, stage, name
):
    if (stage, name) == ("encode", "*.png"):
        monkeypatch.setattr(draw, "write_bytes", Failing(artist, monkeypatch).counted(draw.write_bytes))
    else:
        Failing(artist, monkeypatch).fail(stage)
    before = threading.active_count()
    with pytest.raises(QatError, match="the fifth"):
        show(artist, find_sources([str(sources / name)]), tmp_path / "out", progress=False)
    until(lambda: threading.active_count() <= before)
    written = sorted(path.name for path in (tmp_path / "out").iterdir()) if (tmp_path / "out").exists() else []
    if name == "film.avi":
        assert written == []
    else:
        assert written == [f"a{number:02}.png" for number in (0, 2, 4, 6)][: len(written)]
        assert stage not in ("draw", "encode") or len(written) == 4


def test_few_images_are_in_memory_however_slow_detection_is(artist, sources, tmp_path):
    read, most, detect = [], [], artist.detections
    batch_of = artist.batch_of
    artist.batch_of = lambda image: read.append(1) or batch_of(image)

    def slow(*words, **options):
        time.sleep(0.03)
        most.append(len(read) - len(most))
        return detect(*words, **options)

    artist.detections = slow
    show(artist, [str(sources / "film.avi")], tmp_path, progress=False)
    assert len(most) == 12
    assert max(most) <= DEPTH + 1


def test_a_video_that_is_not_whole_is_not_kept(artist, sources, tmp_path, monkeypatch):
    monkeypatch.setattr(draw, "frames_in", lambda _: 11)
    with pytest.raises(QatError, match=r"film\.mp4 could not be written whole"):
        show(artist, [str(sources / "film.avi")], tmp_path / "out", progress=False)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_source_that_would_be_written_over_is_refused_unless_nothing_is_drawn(artist, sources, tmp_path):
    with pytest.raises(InputError, match="overwritten"):
        show(artist, [str(sources / "a00.png")], sources, progress=False)
    before = (sources / "a00.png").read_bytes()
    show(artist, [str(sources / "a00.png")], sources, texts=True, draw=False, progress=False)
    assert (sources / "a00.png").read_bytes() == before


# the program, ended by signals


@pytest.fixture
def endless(known):
    """The URL of a camera that sends some images and then none, without an end."""
    image = cv2.imencode(".jpg", cv2.imread(str(known[0][0].path)))[1].tobytes()
    stop = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=image")
            self.end_headers()
            head = b"--image\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n"
            self.wfile.write((head % len(image) + image + b"\r\n") * 60)
            stop.wait(60)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/live"
        stop.set()
        running.shutdown()


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_signals_end_a_stream_that_hangs_and_what_was_drawn_is_whole(known, endless, tmp_path, number, code, word):
    network = export_answers(known[1], tmp_path / "a.onnx", 1, 64)
    program = subprocess.Popen(
        [sys.executable, ROOT / "val_trt.py", network, "--source", endless, "--device", "cpu", "--project", tmp_path,
         "--save-txt"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    folder = tmp_path / "exp"
    until(lambda: list(folder.glob(".live-*.part.mp4")) and (folder / "labels").exists(), 100)
    time.sleep(2)
    program.send_signal(number)
    began = time.monotonic()
    out, err = program.communicate(timeout=60)
    assert program.returncode == code
    assert err.strip().splitlines()[-1].endswith(word)
    assert time.monotonic() - began < 20  # FFmpeg itself gives up after 30 s
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "labels", "live.mp4"]
    assert len(frames_of(folder / "live.mp4")) > 0
    assert "interrupted" in out
