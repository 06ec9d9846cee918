"""Reading data.yaml, images and labels; letterboxing; batches."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
import yaml
from known_images import MIXED, write_set
from torch.utils.data import DataLoader

from utils import upstream
from utils.core.distributed import World
from utils.core.errors import DataError
from utils.evaluation import images as images_module
from utils.evaluation.augmented import SeededImages
from utils.evaluation.dataset import ImageDataset, ShapeBatches, collate, load_data, make_loader
from utils.evaluation.images import find_images, label_file, read_labels
from utils.evaluation.letterbox import boxes_to_image, boxes_to_input, letterbox, letterboxed_planes, rectangular_shapes
from utils.evaluation.quiet_decoders import decode

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("set")
    write_set(path, 20)
    return path


def write_yaml(file, **content):
    file.write_text(yaml.safe_dump(content))
    return file


# data.yaml


def test_data_yaml(folder):
    data = load_data(folder / "data.yaml")
    assert data.names == {0: "cat", 1: "dog", 2: "owl"}
    assert data.nc == 3
    assert data.splits["val"] == (str(folder / "images/val"),)
    assert data.annotations == folder / "annotations/instances_val.json"
    assert data.annotations_of("test") is None
    assert not data.is_coco
    with pytest.raises(DataError, match=r"has no 'test:' entry; it has train, val"):
        data.paths("test")


def test_a_split_that_lies_nowhere_is_not_said_to_be_left_out_of_the_yaml(folder, tmp_path):
    content = yaml.safe_load((folder / "data.yaml").read_text()) | {"path": str(folder)}
    data = load_data(write_yaml(tmp_path / "data.yaml", **content | {"train": ["images/val", "images/train2017"]}))
    message = f"train images 'images/train2017' not found in {folder}; correct 'path:' or 'train:'"
    with pytest.raises(DataError, match=message):
        data.paths("train")
    with pytest.raises(DataError, match=r"has no 'test:' entry; it has val"):
        data.paths("test")


@pytest.mark.parametrize("root", [None, ".", "..", "elsewhere"])
def test_root_is_found_beside_the_yaml_or_in_the_working_folder(tmp_path, monkeypatch, root):
    """Upstream counts a relative `path:` from the checkout, which here is tried first, then these two."""
    base = {"..": tmp_path, "elsewhere": tmp_path / "work" / "elsewhere"}.get(root, tmp_path / "yamls")
    for each in (tmp_path / "yamls", base / "images" / "a", tmp_path / "work"):
        each.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path / "work")
    content = {"path": root} if root else {}
    file = write_yaml(tmp_path / "yamls" / "d.yaml", train="../images/a", val=["images/a"], names=["x"], **content)
    assert load_data(file).splits == {split: (str(base / "images/a"),) for split in ("train", "val")}


def test_coco_form(tmp_path):
    (tmp_path / "val2017.txt").write_text("./images/val2017/000000000139.jpg\n")
    names = {index: f"n{index}" for index in range(80)}
    data = load_data(write_yaml(tmp_path / "coco.yaml", path=str(tmp_path), train="train2017.txt", val="val2017.txt",
                                test="test-dev2017.txt", names=names))  # fmt: skip
    assert data.is_coco
    assert set(data.splits) == {"val"}  # the lists that were not downloaded are not offered
    assert data.annotations is None
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/instances_val2017.json").write_text("{}")
    assert data.annotations == tmp_path / "annotations/instances_val2017.json"


BAD_YAML = {
    "missing": (None, "does not exist; --data takes a dataset's YAML"),
    "not YAML": ("names: [a", "is not valid YAML"),
    "a list": ("- a\n- b\n", "is no dataset's YAML"),
    "no names": ("val: .\n", "has no class names"),
    "gap in names": ("val: .\nnames: {0: a, 2: b}\n", "must be 0 to 1, found \\[0, 2\\]"),
    "nc": ("val: .\nnc: 3\nnames: [a, b]\n", "says nc: 3 and gives 2 names"),
    "no split": ("test: .\nnames: [a]\n", "neither 'train:' nor 'val:'"),
    "no folder": ("val: nowhere\nnames: [a]\n", "val images 'nowhere' not found in"),
    "number": ("val: 3\nnames: [a]\n", "'val:' is 3; expected a folder"),
}


@pytest.mark.parametrize("name", BAD_YAML)
def test_a_bad_yaml_says_what_is_wrong(tmp_path, name):
    content, message = BAD_YAML[name]
    if content:
        (tmp_path / "data.yaml").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        load_data(tmp_path / "data.yaml")
    assert "\n" not in str(caught.value)


# images and labels


def test_find_images_in_folders_and_lists(tmp_path, monkeypatch):
    for name in ("b/2.JPG", "b/deep/1.png", "b/notes.md", "a.bmp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    absolute = str(tmp_path / "a.bmp")
    expected = [absolute, str(tmp_path / "b/2.JPG"), str(tmp_path / "b/deep/1.png")]
    assert find_images([str(tmp_path / "b"), absolute]) == expected
    (tmp_path / "list.txt").write_text(f"./b/2.JPG\r\n\nb/deep/1.png\n{absolute}\n")
    assert find_images([str(tmp_path / "list.txt")]) == expected
    monkeypatch.chdir(tmp_path)  # lists that count from the working folder
    (tmp_path / "b" / "list.txt").write_text("b/2.JPG\n")
    assert find_images([str(tmp_path / "b" / "list.txt")]) == [str(tmp_path / "b/2.JPG")]


def test_no_images(tmp_path):
    with pytest.raises(DataError, match="no images in"):
        find_images([str(tmp_path)])
    with pytest.raises(DataError, match="does not exist"):
        find_images([str(tmp_path / "nowhere")])


def test_label_file():
    assert label_file("/x/images/a/images/b/c.d.jpg") == Path("/x/images/a/labels/b/c.d.txt")
    assert label_file("/x/y/c.jpg") == Path("/x/y/c.txt")


def test_labels(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("1 0.5 0.5 0.25 1\n\n0 0.1 0.2 0.5 0.2 0.5 0.6 0.1 0.6\n1 0.5 0.5 0.25 1\n")
    expected = [[0, 0.3, 0.4, 0.4, 0.4], [1, 0.5, 0.5, 0.25, 1]]
    np.testing.assert_allclose(read_labels(file, 2), expected, atol=1e-6)
    file.write_text("\n")
    assert read_labels(file, 2).shape == (0, 5)


BAD_LABELS = {
    "1 0.5 0.5 0.1": "4 values; expected class cx cy w h",
    "2 0.5 0.5 0.1 0.1": "class 2 is not one of the dataset's 2 classes",
    "-1 0.5 0.5 0.1 0.1": "class -1 is not",
    "0.5 0.5 0.5 0.1 0.1": "class 0.5 is not",
    "nan 0.5 0.5 0.1 0.1": "class nan is not",
    "1 0.5 1.5 0.1 0.1": "must be fractions of the image, 0 to 1; found '1 0.5 1.5",
    "1 0.5 nan 0.1 0.1": "must be fractions",
    "1 0.5 -0.5 0.1 0.1": "must be fractions",
    "cat 0.5 0.5 0.1 0.1": "is not a list of numbers",
}


@pytest.mark.parametrize("line", BAD_LABELS)
def test_a_bad_label_names_its_file_and_line(tmp_path, line):
    file = tmp_path / "a.txt"
    file.write_text(f"0 0.5 0.5 0.1 0.1\n{line}\n")
    with pytest.raises(DataError, match=BAD_LABELS[line]) as caught:
        read_labels(file, 2)
    assert f"{file}, line 2" in str(caught.value)


def test_labels_are_sorted_and_each_is_there_once(tmp_path):
    rows = np.random.default_rng(0).integers(0, 3, (200, 5)) / np.array([1, 4, 4, 4, 4], np.float32)
    file = tmp_path / "a.txt"
    file.write_text("".join(" ".join(map(str, row)) + "\n" for row in rows))
    np.testing.assert_array_equal(read_labels(file, 3), np.unique(rows.astype(np.float32), axis=0))


@pytest.mark.parametrize("slow", [60.0, 0.0])  # a disk that counts as fast: one after the other; slow: in threads
def test_unreadable_images_are_left_out_and_reported(tmp_path, caplog, monkeypatch, slow):
    monkeypatch.setattr(images_module, "FIRST", 2)
    monkeypatch.setattr(images_module, "SLOW", slow)
    write_set(tmp_path, 12)
    files = sorted((tmp_path / "images/val").iterdir())
    files[0].write_bytes(b"not an image")
    files[1].write_bytes(b"")
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    files[2].write_bytes(cv2.imencode(".png", noise)[1].tobytes()[:6000])  # only decoding can tell
    cv2.imwrite(str(files[3]), np.zeros((5, 40, 3), np.uint8))
    with caplog.at_level(logging.WARNING):
        dataset = ImageDataset([str(tmp_path / "images/val")], 3, 64)
    assert len(dataset) == 9
    assert [line.split(": ")[0] for line in dataset.left_out] == [str(files[i]) for i in (0, 1, 3)]
    assert "40x5 pixels, smaller than 10" in dataset.left_out[2]
    assert caplog.text.count("left out") == 3
    assert dataset[0][0] is None
    batch = collate([dataset[0], dataset[1], dataset[2]])
    images, labels, paths, shapes = batch.images, batch.labels, batch.paths, batch.shapes
    assert len(images) == len(paths) == len(shapes) == 2
    assert set(labels[:, 0].tolist()) <= {0.0, 1.0}
    assert collate([dataset[0]]).images.shape[0] == len(collate([dataset[0]])) == 0


def test_no_readable_image(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"x")
    with pytest.raises(DataError, match=r"none of 1 images can be read; the first: .*a\.jpg: not an image"):
        ImageDataset([str(tmp_path)], 1, 64)


def test_missing_images_of_a_list_are_left_out(tmp_path):
    write_set(tmp_path, 2)
    (tmp_path / "list.txt").write_text("images/val/000000000001.png\nimages/val/nowhere.png\n")
    dataset = ImageDataset([str(tmp_path / "list.txt")], 3, 64)
    assert dataset.left_out == [f"{tmp_path}/images/val/nowhere.png: No such file or directory"]


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif", "bmp"])
def test_exif_orientation_is_followed_where_opencv_follows_it(tmp_path, suffix):
    """It always does for JPEG, and from version 5 on for PNG and WebP."""
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20), (255, 0, 0)).save(tmp_path / f"a.{suffix}", exif=exif)
    decoded = decode(str(tmp_path / f"a.{suffix}")).shape[:2]
    assert suffix != "jpg" or decoded == (40, 20)
    dataset = ImageDataset([str(tmp_path)], 1, 64, stride=32, rect=True, pad=0)
    assert dataset.images[0].size == decoded[::-1]
    assert dataset[0][3][0] == decoded


# letterboxing


@pytest.mark.parametrize("size", [*MIXED, (640, 427), (333, 500)])
def test_letterbox_centres_the_image_on_grey(size):
    image = np.full((size[1], size[0], 3), 255, np.uint8)
    result, box = letterbox(image, (64, 64), (96, 64))
    assert result.shape == (96, 64, 3)
    rows, columns = np.where((result != 114).all(2))
    assert columns.max() - columns.min() + 1 == round(box.ratio[1] * size[0])
    assert rows.max() - rows.min() + 1 == round(box.ratio[0] * size[1])
    assert abs(columns.min() - box.pad[0]) <= 0.5
    assert abs(rows.min() - box.pad[1]) <= 0.5
    assert max(box.ratio[0] * size[1], box.ratio[1] * size[0]) == pytest.approx(64, abs=1)


def test_letterbox_keeps_the_pixels_of_a_image_that_fits():
    image = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    result, box = letterbox(image, (64, 64), (64, 64))
    np.testing.assert_array_equal(result[8:56], image)
    assert box.shapes == ((48, 64), ((1.0, 1.0), (0.0, 8.0)))


def test_letterbox_into_a_rectangle_that_the_network_prescribes():
    """A static 32×64 input: the height decides for this image, and not the longer side."""
    image = np.full((50, 60, 3), 255, np.uint8)
    result, box = letterbox(image, (32, 64), (32, 64))
    assert result.shape == (32, 64, 3)
    assert box.ratio == pytest.approx((0.64, 38 / 60))


def test_boxes_to_the_input_and_back():
    rng = np.random.default_rng(0)
    boxes, shapes, owner, expected = [], [], [], []
    for index, (width, height) in enumerate(MIXED):
        _, box = letterbox(np.zeros((height, width, 3), np.uint8), (64, 64), (64, 96))
        fractions = np.concatenate([rng.uniform(0.3, 0.7, (3, 2)), rng.uniform(0, 0.3, (3, 2))], 1).astype(np.float32)
        boxes.append(boxes_to_input(fractions, box))
        shapes.append(box.shapes)
        owner += [index] * 3
        middle, half = fractions[:, :2], fractions[:, 2:] / 2
        expected.append(np.concatenate([middle - half, middle + half], 1) * [width, height, width, height])
    found = boxes_to_image(torch.from_numpy(np.concatenate(boxes)), torch.tensor(owner), shapes)
    np.testing.assert_allclose(found.numpy(), np.concatenate(expected), atol=1e-3)


def test_boxes_are_clipped_to_the_image():
    shapes = [((20, 40), ((1.0, 1.0), (0.0, 10.0)))]
    found = boxes_to_image(torch.tensor([[-5.0, 0.0, 50.0, 100.0]]), torch.tensor([0]), shapes)
    assert found.tolist() == [[0, 0, 40, 20]]


def test_rectangular_shapes_are_the_smallest_that_hold_the_group():
    assert rectangular_shapes([(640, 480)] * 3, 640, 32, 0) == [(480, 640)] * 3
    assert rectangular_shapes([(320, 320)], 320, 32, 0.5) == [(352, 352)]  # val.py's border
    assert rectangular_shapes([(100, 50), (50, 100)], 64, 32, 0) == [(64, 64)] * 2  # wide and tall in one group
    wide, tall = [(100, 50)] * 32, [(50, 100)] * 32
    assert set(rectangular_shapes(tall + wide, 64, 32, 0)[:32]) == {(64, 32)}
    for (width, height), shape in zip(MIXED, rectangular_shapes(MIXED, 64, 32, 0.5), strict=True):
        assert shape[0] >= int(height * 64 / max(width, height))
        assert shape[1] >= int(width * 64 / max(width, height))


# batches


def test_items(folder):
    dataset = ImageDataset([str(folder / "images/val")], 3, 64, single_cls=True)
    image, labels, path, shapes, masks = dataset[0]
    assert masks is None
    assert image.shape == (3, 64, 64)
    assert image.dtype == torch.uint8
    entry = cv2.imread(path)[:, :, ::-1]
    np.testing.assert_array_equal(image.permute(1, 2, 0), entry)  # 64×64 needs no resizing
    assert (labels[:, 1] == 0).all()  # single class
    np.testing.assert_allclose(labels[:, 2:], dataset.images[0].labels[:, 1:], atol=1e-6)
    assert shapes[0] == (64, 64)


@pytest.mark.parametrize("batch_size", [1, 3, 8, 50])
@pytest.mark.parametrize("rect", [True, False])
def test_every_image_comes_once_and_batches_have_one_shape(folder, batch_size, rect):
    data = load_data(folder / "data.yaml")
    loader = make_loader(data, "val", imgsz=64, batch_size=batch_size, workers=0, rect=rect)
    seen = []
    for batch in loader:
        assert len(batch) == len(batch.images) == len(batch.paths) == len(batch.shapes) <= batch_size
        assert batch.labels[:, 0].tolist() == sorted(batch.labels[:, 0].tolist())
        seen += batch.paths
    assert sorted(seen) == sorted(str(path) for path in (folder / "images/val").iterdir())


def test_shuffling_is_fixed_by_the_seed(folder):
    data = load_data(folder / "data.yaml")

    def order(seed, state):
        random.seed(state)
        torch.manual_seed(state)
        loader = make_loader(data, "train", imgsz=64, batch_size=3, workers=0, shuffle=True, seed=seed)
        return [path for batch in loader for path in batch.paths]

    assert order(1, 0) == order(1, 99)
    assert order(1, 0) != order(2, 0)
    assert sorted(order(1, 0)) == sorted(order(2, 0))


def test_workers_give_the_same_batches(folder):
    data = load_data(folder / "data.yaml")
    loaders = [make_loader(data, "val", imgsz=64, batch_size=8, workers=workers, rect=True) for workers in (0, 2)]
    for alone, helped in zip(*loaders, strict=True):
        torch.testing.assert_close(alone.images, helped.images)
        torch.testing.assert_close(alone.labels, helped.labels)
        assert (alone.paths, alone.shapes) == (helped.paths, helped.shapes)


# What reads a batch goes away in the middle of the handing over; then the worker's main thread has an error of its own.
LEFT = """
import os, socket, sys, threading
from multiprocessing import resource_sharer
from utils.evaluation import dataset

def leave():
    noticed, hook = threading.Event(), sys.excepthook
    sys.excepthook = lambda *error: (hook(*error), noticed.set())
    with socket.socket(socket.AF_UNIX) as reader:
        reader.connect(resource_sharer.DupFd(os.dup(1))._id[0])
    assert noticed.wait(60)
    sys.excepthook = hook

leave()
dataset._start_worker(0)
print("now a worker", file=sys.stderr)
leave()
raise ConnectionResetError("in the main thread")
"""


def test_a_worker_says_nothing_when_the_main_process_has_gone():
    said = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, cwd=ROOT, check=False).stderr
    before, after = said.split("now a worker")
    assert "resource_sharer" in before  # as Python leaves it
    assert "resource_sharer" not in after
    assert "ConnectionResetError: in the main thread" in after


def test_ctrl_c_is_left_to_the_main_process(folder, monkeypatch):
    loader = make_loader(load_data(folder / "data.yaml"), "val", imgsz=64, batch_size=2, workers=2)
    batches = iter(loader)
    for worker in batches._workers:
        os.kill(worker.pid, signal.SIGINT)
    assert sum(map(len, batches)) == 20  # nobody died of it
    start, before = DataLoader.__iter__, signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(DataLoader, "__iter__", lambda self: (os.kill(os.getpid(), signal.SIGINT), start(self))[1])
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert signal.getsignal(signal.SIGINT) is before
    threaded = []  # signals go to the main thread
    thread = threading.Thread(target=lambda: threaded.append(sum(map(len, loader))))
    monkeypatch.undo()
    thread.start()
    thread.join()
    assert threaded == [20]


def test_limit_takes_images_evenly_spread(folder):
    dataset = ImageDataset([str(folder / "images/val")], 3, 64, limit=3)
    assert [Path(image.path).stem[-2:] for image in dataset.images] == ["01", "10", "20"]
    assert len(ImageDataset([str(folder / "images/val")], 3, 64, limit=99)) == 20


def test_keep_takes_only_the_images_that_it_holds_for(folder):
    files = find_images([str(folder / "images/val")])
    kept = files[1::3]
    dataset = ImageDataset([str(folder / "images/val")], 3, 64, keep=kept.__contains__)
    assert [one.path for one in dataset.images] == kept
    limited = ImageDataset([str(folder / "images/val")], 3, 64, keep=kept.__contains__, limit=2)
    assert [one.path for one in limited.images] == [kept[0], kept[-1]]
    loader = make_loader(
        load_data(folder / "data.yaml"), "val", imgsz=64, batch_size=3, workers=0, shuffle=True, keep=kept.__contains__
    )
    assert sorted(one for batch in loader for one in batch.paths) == kept
    with pytest.raises(DataError, match="none is left"):
        ImageDataset([str(folder / "images/val")], 3, 64, keep=lambda _: False)


def test_keep_reaches_upstreams_dataset(folder, monkeypatch):
    given = {}
    dataset = SimpleNamespace()
    monkeypatch.setattr(upstream, "make_dataset", lambda *_, **more: given.update(more) or dataset)
    monkeypatch.setattr(SeededImages, "__len__", lambda _: 1)
    make_loader(
        load_data(folder / "data.yaml"), "val", imgsz=64, batch_size=2, workers=0, augment=True, keep=str.isdigit
    )
    assert given["keep"] is str.isdigit


def test_rect_and_shuffle_exclude_each_other(folder):
    data = load_data(folder / "data.yaml")
    with pytest.raises(ValueError, match="cannot shuffle"):
        make_loader(data, "val", imgsz=64, batch_size=2, rect=True, shuffle=True)
    with pytest.raises(ValueError, match="square, not limited"):
        make_loader(data, "val", imgsz=64, batch_size=2, augment=True, limit=2)


def test_the_set_itself_is_what_it_says(folder):
    content = json.loads((folder / "annotations/instances_val.json").read_text())
    dataset = ImageDataset([str(folder / "images/val")], 3, 64)
    assert len(content["annotations"]) == sum(len(image.labels) for image in dataset.images) > 20


@pytest.mark.parametrize(("room", "workers"), [(2, 0), (3, 1), (100, 2)])
def test_a_loader_gives_the_same_with_little_shared_memory(folder, monkeypatch, room, workers):
    data, size = load_data(folder / "data.yaml"), 8 * 3 * 64 * 64
    wanted = [batch.images for batch in make_loader(data, "val", imgsz=64, batch_size=8, workers=0)]
    monkeypatch.setattr("utils.evaluation.dataset._cores", lambda: 2)
    monkeypatch.setattr("utils.core.shared_memory._free", lambda: math.ceil(room * size / 0.8))
    loader = make_loader(data, "val", imgsz=64, batch_size=8, workers=2)
    assert loader.num_workers == workers
    assert all((batch.images == images).all() for batch, images in zip(loader, wanted, strict=True))


@pytest.mark.parametrize("processes", [1, 2])
def test_room_is_asked_for_the_largest_batch_that_all_processes_share(folder, monkeypatch, processes):
    asked = []
    monkeypatch.setattr("utils.evaluation.dataset.loading_processes", lambda *words: asked.append(words[1:]) or (0, 0))
    monkeypatch.setattr("utils.core.distributed.world", lambda: World(0, processes))
    data, options = load_data(folder / "data.yaml"), {"imgsz": 64, "batch_size": 1, "together": 16, "share": True}
    images = max(len(indices) for indices in ShapeBatches([(64, 64)] * 20, 1, 16))
    make_loader(data, "val", **options)
    assert images > 1
    assert asked == [(images * 3 * 64 * 64, 1)]


def test_batches_that_are_given_together_come_after_a_first_one_alone():
    batches = ShapeBatches([(64, 64)] * 500, 8, 16)
    sizes = list(map(len, batches))
    assert list(itertools.chain(*batches)) == list(range(500))
    assert sizes == [8, *[56] * 8, 44]  # of 500 images an eighth at most: several workers have something to read
    assert (len(batches), batches.batch_size) == (10, 8)
    assert list(map(len, ShapeBatches([(64, 64)] * 1100, 8, 16))) == [8, *[128] * 8, 68]
    assert list(map(len, ShapeBatches([(64, 64)] * 20, 8, 16))) == list(map(len, ShapeBatches([(64, 64)] * 20, 8)))


@pytest.mark.parametrize("size", [(48, 64), (64, 48), (64, 64), (33, 61), (200, 90), (7, 11)])
@pytest.mark.parametrize("shape", [(64, 64), (64, 96)])
def test_planes_are_the_letterboxed_image(size, shape):
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    expected, box = letterbox(image, (64, 64), shape)
    planes, same = letterboxed_planes(image, (64, 64), shape)
    assert same == box
    assert planes.flags.c_contiguous
    np.testing.assert_array_equal(planes, expected[..., ::-1].transpose(2, 0, 1))
