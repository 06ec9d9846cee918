"""Detections drawn on images, videos and streams (`val_trt.py --source`), while the next are read.

Threads work before and behind the loop that detects, a few images at most:

    with Ahead(read(path), 2) as frames, Behind(write, 2) as writer:
        for frame in frames:
            writer.put(detect(frame))

Order is kept, and an error of a thread is raised in the loop. Only queues that are written in C are waited on, which a
signal's handler cannot leave locked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import cv2
import numpy as np
from tqdm import tqdm

from utils.core.errors import DataError, QatError
from utils.core.files import atomic_path, refuse_overwrite, write_bytes
from utils.core.tasks import DISPLAY_CONF, DISPLAY_IOU
from utils.core.text import plural
from utils.evaluation.batch import Batch
from utils.evaluation.coco import TextWriter
from utils.evaluation.data_yaml import load_data
from utils.evaluation.masks import Patch
from utils.jobs.open import open_runner
from utils.jobs.sources import decode_source, frames, is_stream, is_video, open_video, shown, target_names
from utils.jobs.visualize import Artist, name_of

if TYPE_CHECKING:
    from utils.jobs.options import ValOptions

logger = logging.getLogger(__name__)

DEPTH = 2  # images between two threads
PATIENCE = 1.0  # seconds that a reader may still take when nobody wants more, such as a camera that gives no frame
END: Any = object()  # behind the last item
Item = TypeVar("Item")


def run(options: ValOptions, sources: Sequence[str], folder: Path) -> None:
    """Draw detections on `sources` into a run folder; class names are the network's, or else the dataset's."""
    with open_runner(options.network, options.select_device(), options.openvino, options.float_precision) as runner:
        names: Mapping[int, str] | None = runner.names
        if not names and options.data and Path(options.data).is_file():
            names = load_data(options.data).names
        artist = Artist(
            runner,
            names,
            imgsz=options.imgsz,
            max_det=options.max_det,
            conf_thres=DISPLAY_CONF if options.conf_thres is None else options.conf_thres,
            iou_thres=DISPLAY_IOU if options.iou_thres is None else options.iou_thres,
        )
        show(artist, sources, folder, texts=options.save_txt, scores=options.save_conf, draw=not options.no_draw)
    logger.info("results: %s", folder)


def show(
    artist: Artist,
    sources: Sequence[str],
    folder: Path,
    *,
    texts: bool = False,
    scores: bool = False,
    draw: bool = True,
    progress: bool = True,
) -> list[Path]:
    """Draw detections on files and streams; Ctrl-C ends it, and files that are written until then are whole.

    Reading, detection, drawing and encoding overlap; order is that of `sources`.

    Args:
        texts, scores: write `labels/`, too, as upstream's detect.py does; see `coco.TextWriter`.
        draw: make drawings; without them `texts` alone are written.

    Returns:
        The drawing of each source that could be read.

    Raises:
        InputError: a source would be overwritten.
        DataError: no source can be decoded.
    """
    show = Show(artist, sources, folder, texts, scores, draw, progress)
    try:
        for videos, pairs in groupby(zip(sources, show.targets, strict=True), lambda pair: is_video(pair[0])):
            if not videos:
                show.images(pairs)
                continue
            for path, target in pairs:
                show.video(path, target)
    finally:
        show.report()
    if show.done:
        return show.done
    if len(sources) == 1:
        raise DataError(show.unread[0])
    raise DataError(f"cannot read any of {len(sources)} sources; the first: {show.unread[0]}")


@dataclass(frozen=True)
class Frame:
    """An image that was read.

    Attributes:
        path, target: its source, and the source's drawing.
        number: in a video, from 1 on; 0 of an image.
        image: uint8 BGR `[H, W, 3]`.
        batch: the same, as the network takes it.
    """

    path: str
    target: Path
    number: int
    image: np.ndarray
    batch: Batch


class Detected(NamedTuple):
    """A frame, the rows of `Artist.detect`, and masks."""

    frame: Frame
    rows: list[list[float]]
    masks: list[Patch]


class VideoForm(NamedTuple):
    """Description of a video: (width, height) in pixels, frames a second, and its number of frames, or 0."""

    size: tuple[int, int]
    rate: float
    total: int


class Show:
    """Sources on their way from the file to the drawing.

    A thread reads and letterboxes, this one detects, one draws and writes, and one encodes videos; `DEPTH` images may
    lie between two of them.

    Attributes:
        targets: drawings to be made.
        done: drawings that were made.
        unread: reasons why the others were not, a line each.
    """

    def __init__(
        self,
        artist: Artist,
        sources: Sequence[str],
        folder: Path,
        texts: bool,
        scores: bool,
        draw: bool,
        progress: bool,
    ) -> None:
        """See `show`."""
        self.targets = [folder / name for name in target_names(sources)]
        refuse_overwrite(self.targets if draw else [], sources, "choose another --name or --project")
        self.done: list[Path] = []
        self.unread: list[str] = []
        self._artist = artist
        self._draw = draw
        self._progress = progress
        self._texts = TextWriter(folder / "labels", scores, sources) if texts else None
        self._counts = Counter[str]()  # objects of each class in the current source
        self._images = 0
        self._began: float | None = None  # when the network was warm
        self._seconds: dict[str, float] = defaultdict(float)  # of each stage, which one thread writes

    def images(self, pairs: Iterable[tuple[str, Path]]) -> None:
        """Draw on image files, given with their drawings."""
        with Ahead(self._read_images(pairs), DEPTH) as frames, Behind(self._write_image, DEPTH) as writer:
            for frame in frames:
                if isinstance(frame, Frame):
                    writer.put(self._detect(frame))
                else:
                    self.unread.append(frame)

    def _read_images(self, pairs: Iterable[tuple[str, Path]]) -> Iterator[Frame | str]:
        """Yield each image, or the reason why it cannot be read."""
        for path, target in pairs:
            with self._timed("read"):
                image = decode_source(path)
                frame = None if image is None else Frame(path, target, 0, image, self._artist.batch_of(image))
            if frame is not None:
                yield frame
            elif "://" in path:
                yield f"{shown(path)} cannot be opened as an image"
            else:
                yield f"{shown(path)} cannot be decoded"

    def _detect(self, frame: Frame) -> Detected:
        if self._began is None:
            self._artist.warm_up(frame.batch)
            self._began = time.perf_counter()
        with self._timed("detect"):
            rows, masks = self._artist.detections(frame.batch, masks=self._draw)
        return Detected(frame, rows.tolist(), masks)

    def _write_image(self, detected: Detected) -> None:
        target = detected.frame.target
        drawn = self._drawn(detected)
        if drawn is not None:
            with self._timed("encode"):
                write_bytes(target, cv2.imencode(target.suffix, drawn)[1].tobytes())
        self._finish(detected.frame.path, target)

    def _drawn(self, detected: Detected) -> np.ndarray | None:
        """Count the objects of a frame, write its texts, and draw; None if nothing is drawn."""
        frame, rows, masks = detected
        self._images += 1
        self._counts.update(name_of(row[5], self._artist.names) for row in rows)
        if self._texts:
            with self._timed("labels"):
                self._texts.add(frame.path, rows, frame.image.shape[:2], frame.number)
        if not self._draw:
            return None
        with self._timed("draw"):
            return self._artist.paint(frame.image, rows, masks)

    def _finish(self, path: str, target: Path, text: str = "") -> None:
        """Log the objects in a source, and `text`."""
        self.done.append(target)
        name = shown(path)
        if self._draw:
            name = str(target) if target.stem == Path(path).stem else f"{target} ({name})"
        objects = plural(self._counts.total(), "object")
        if self._counts:
            objects += f" ({', '.join(f'{label}: {number}' for label, number in self._counts.most_common())})"
        logger.info("%s: %s%s", name, objects, text)
        self._counts.clear()

    def video(self, path: str, target: Path) -> None:
        """Draw on each frame of a video or stream, into an MPEG-4 at `target`, which is whole in the end."""
        if is_stream(path):
            logger.info("opening %s; Ctrl-C ends it", shown(path))
        before = self._images
        try:
            with Ahead(self._read_video(path, target), DEPTH) as frames:
                form: VideoForm = next(frames)
                with self._encoder(target, form) as encode:
                    stopped = self._draw_frames(frames, encode, form, target)
                    seen = self._images - before
                    if not seen:
                        raise stopped or DataError(f"{shown(path)} cannot be decoded")
        except DataError as error:
            self._counts.clear()
            self.unread.append(str(error))
            return
        text = f" in {seen} of {form.total} frames" if seen < form.total else f" in {seen} frames"
        if stopped:
            text += ", interrupted"
        elif is_stream(path) and seen != form.total:
            text += ", the stream ended or its connection was lost"
        self._finish(path, target, text)
        if stopped:
            raise stopped

    def _read_video(self, path: str, target: Path) -> Iterator[Any]:
        """Yield the `VideoForm` of a video, then each `Frame`."""
        with open_video(path) as video:
            yield form_of(video)
            images = frames(video)
            for number in count(1):
                with self._timed("read"):
                    image = next(images, None)
                    frame = None if image is None else Frame(path, target, number, image, self._artist.batch_of(image))
                if frame is None:
                    return
                yield frame

    @contextmanager
    def _encoder(self, target: Path, form: VideoForm) -> Iterator[Callable[[np.ndarray], None]]:
        """Give a function that takes drawn frames; nothing is opened if nothing is drawn."""
        if not self._draw:
            yield lambda _: None
            return
        with atomic_path(target) as temporary:
            writer = cv2.VideoWriter(str(temporary), cv2.VideoWriter.fourcc(*"mp4v"), form.rate, form.size)
            if not writer.isOpened():
                raise DataError(f"{target}: this OpenCV cannot write MP4 videos")

            def encode(image: np.ndarray) -> None:
                with self._timed("encode"):
                    writer.write(image)

            before = self._images
            try:
                with Behind(encode, DEPTH) as encoder:
                    yield encoder.put
            finally:
                writer.release()
            if frames_in(temporary) < self._images - before:  # OpenCV says nothing when it cannot write
                raise QatError(f"{target} could not be written whole; is there space left on the disk?")

    def _draw_frames(
        self, frames: Ahead[Any], encode: Callable[[np.ndarray], None], form: VideoForm, target: Path
    ) -> KeyboardInterrupt | None:
        """Detect in all frames and draw; returns the Ctrl-C that ended them, or None."""

        def draw(detected: Detected) -> None:
            drawn = self._drawn(detected)
            if drawn is not None:
                encode(drawn)

        bar = tqdm(frames, total=form.total or None, desc=target.name, unit="frame", disable=not self._progress)
        drawer = Behind(draw, DEPTH)
        try:
            with drawer, bar:
                for frame in bar:
                    drawer.put(self._detect(frame))
        except KeyboardInterrupt as interrupt:  # also one that comes while the last frames are drawn
            if drawer.error:
                raise drawer.error from interrupt
            return interrupt
        return None

    def report(self) -> None:
        """Log how many sources were read, how fast, and how long each stage took."""
        if not self.done or self._began is None:
            return
        wall = time.perf_counter() - self._began
        images = self._images
        verb = "drawn" if self._draw else "read"
        logger.info(
            "%d of %d files %s: %s in %.1f s", len(self.done), len(self.targets), verb, plural(images, "image"), wall
        )
        logger.info(
            "%.1f images/s, %.1f ms an image, from the first detection to the last file",
            images / wall,
            1000 * wall / images,
        )
        parts = ", ".join(f"{part} {value:.1f}" for part, value in self._artist.detector.milliseconds().items())
        stages = {name: f"{1000 * seconds / images:.1f}" for name, seconds in self._seconds.items()}
        stages["detect"] += f" ({parts})"
        logger.info("ms an image in each stage, which overlap: %s", ", ".join(map(" ".join, stages.items())))
        if self.unread:
            logger.warning("not read: %d; first: %s", len(self.unread), self.unread[0])

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Add the time of what stands within it to that of a stage."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - began


def form_of(video: cv2.VideoCapture) -> VideoForm:
    """Read the form of an opened video; 25 frames a second if its own rate cannot be written."""
    size = (int(video.get(cv2.CAP_PROP_FRAME_WIDTH)), int(video.get(cv2.CAP_PROP_FRAME_HEIGHT)))
    rate = video.get(cv2.CAP_PROP_FPS)
    total = max(int(video.get(cv2.CAP_PROP_FRAME_COUNT)), 0)
    is_writable = 0.01 < rate < 655  # MPEG-4 holds a ratio of numbers up to 65,535
    return VideoForm(size, round(rate, 2) if is_writable else 25.0, total)


def frames_in(path: Path) -> int:
    """Count the frames of a video by its header; 0 if it cannot be opened."""
    with suppress(DataError), open_video(str(path)) as video:
        return int(video.get(cv2.CAP_PROP_FRAME_COUNT))
    return 0


class Ahead(Generic[Item]):
    """The items of an iterator, made in a thread.

    At the end of the `with` block no further item is made, and a generator is closed where it is. A thread that does
    not come back within `PATIENCE` is left alone; it ends with the process.
    """

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        """Start the thread; it makes at most `depth` items ahead of those that were taken."""
        self._items = items
        self._stopped = False
        self._made: SimpleQueue[tuple[Item, BaseException | None]] = SimpleQueue()
        self._places = _tokens(depth)
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        """The next item, waited for; raises what making it raised."""
        if self._stopped:
            raise StopIteration
        item, error = self._made.get()
        if item is END:
            self._stopped = True
            raise error or StopIteration
        self._places.put(None)
        return item

    def __enter__(self) -> Ahead[Item]:
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped = True
        self._places.put(None)
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        try:
            while True:
                self._places.get()
                if self._stopped:
                    break
                item = next(self._items, END)
                self._made.put((item, None))
                if item is END:
                    break
        except BaseException as error:  # noqa: BLE001 - raised where the item is taken
            self._made.put((END, error))
        finally:
            close = getattr(self._items, "close", None)
            if close:
                close()


class Behind(Generic[Item]):
    """A thread that works on items, one after the other.

    At the end of the `with` block, also of one that an error or a signal ends, what was put is worked on first. After
    an error of the work nothing more is worked on; `put` raises it, or the end of the block.
    """

    def __init__(self, work: Callable[[Item], object], depth: int) -> None:
        """Start the thread; at most `depth` items wait to be worked on."""
        self._work = work
        self.error: BaseException | None = None
        self._items: SimpleQueue[Item] = SimpleQueue()
        self._places = _tokens(depth)
        self._thread = threading.Thread(target=self._run, name="behind", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Hand an item over, once there is room for it; raises what the work on an earlier one raised."""
        self._places.get()
        if self.error:
            raise self.error
        self._items.put(item)

    def __enter__(self) -> Behind[Item]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._items.put(END)
        try:
            self._thread.join()
        finally:  # after a Ctrl-C, too, what was put is worked on
            self._thread.join()
        if self.error and error is None:
            raise self.error

    def _run(self) -> None:
        while True:
            item = self._items.get()
            if item is END:
                return
            if self.error is None:
                self._do(item)
            self._places.put(None)

    def _do(self, item: Item) -> None:
        try:
            self._work(item)
        except BaseException as error:  # noqa: BLE001 - raised by `put`, or at the end
            self.error = error


def _tokens(count: int) -> SimpleQueue[None]:
    """Make a queue of `count` tokens: a thread takes one before it hands an item over, and another puts it back."""
    tokens: SimpleQueue[None] = SimpleQueue()
    for _ in range(count):
        tokens.put(None)
    return tokens
