"""Finding and reading images and their labels: as upstream does, and where they are links, folders, damaged or odd."""

import json
import logging
import os
import struct
from pathlib import Path

import cv2
import numpy as np
import pytest
from known_images import SQUARE, damaged_png, write_set
from PIL import Image

from utils.core.errors import DataError
from utils.evaluation.batch import collate
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import ImageDataset, make_loader
from utils.evaluation.image_files import decode, find_images, read_header
from utils.evaluation.labels import label_file, read_labels
from utils.evaluation.split import images_in_both, read_images
from utils.jobs.inputs import image_batches


@pytest.fixture
def folder(tmp_path):
    write_set(tmp_path, 4, SQUARE)
    return tmp_path


def images_of(folder):
    return sorted(map(str, (folder / "images/val").glob("*.png")))


# finding


def test_find_images_in_folders_and_lists(tmp_path, monkeypatch):
    for name in ("b/2.JPG", "b/deep/1.png", "b/notes.md", "a.bmp", "b/.git/a.jpg", "b/.b.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    absolute = str(tmp_path / "a.bmp")
    expected = [absolute, str(tmp_path / "b/2.JPG"), str(tmp_path / "b/deep/1.png")]
    assert find_images([str(tmp_path / "b"), absolute]) == expected
    (tmp_path / "list.txt").write_text(f"./b/2.JPG\r\n\nb/deep/1.png\n{absolute}\n{absolute}\n")
    assert find_images([str(tmp_path / "list.txt"), absolute]) == expected  # each once
    monkeypatch.chdir(tmp_path)  # lists that count from the working folder
    (tmp_path / "b" / "list.txt").write_text("b/2.JPG\n")
    assert find_images([str(tmp_path / "b" / "list.txt")]) == [str(tmp_path / "b/2.JPG")]
    (tmp_path / "empty").mkdir()
    for path, message in (("empty", "no images in"), ("nowhere", "does not exist")):
        with pytest.raises(DataError, match=message):
            find_images([str(tmp_path / path)])


# images of val that are training images, too


@pytest.fixture
def split(folder):
    """A set whose four images of val are, in order: the training image itself, a link, a copy, and another image."""
    training = folder / "images/train"
    training.mkdir()
    for number, path in enumerate(images_of(folder)[:3]):
        Path(path).rename(training / f"t{number}.png")
    Path(images_of(folder)[0]).rename(folder / "images/val/d.png")
    (folder / "images/val/b.png").symlink_to(training / "t1.png")
    (folder / "images/val/c.png").write_bytes((training / "t2.png").read_bytes())
    names = ("train/t0", "val/b", "val/c", "val/d")
    (folder / "val.txt").write_text("".join(f"./images/{name}.png\n" for name in names))
    content = {"path": str(folder), "train": "images/train", "val": "val.txt", "names": ["cat", "dog", "owl"]}
    (folder / "data.yaml").write_text(json.dumps(content))
    return folder


def test_val_images_that_are_training_images_are_counted_and_named(split, caplog):
    data = load_data(split / "data.yaml")
    part = data.read("val")
    assert {Path(path).name for path in part.in_train} == {"t0.png", "b.png", "c.png"}
    counts = part.counts(split)
    assert (counts.also_in_train, counts.is_all_in_train) == (3, False)
    assert counts.first["also_in_train"] == "images/train/t0.png"
    (warning,) = [message for message in caplog.messages if "training images" in message]
    assert warning.startswith("3 of 4 images of val are training images, too (first: images/train/t0.png)")
    assert data.read("train").in_train == set()


def test_a_part_of_a_split_counts_as_the_whole_without_another_search(split, monkeypatch):
    apart, together = load_data(split / "data.yaml"), load_data(split / "data.yaml")
    together.read("val")
    searched = apart.read("val", 2).counts(split)
    monkeypatch.setattr("utils.evaluation.data_yaml.images_in_both", pytest.fail)
    assert together.read("val", 2).counts(split) == searched
    assert searched.also_in_train > 0


def test_images_of_one_length_with_other_content_are_not_training_images(split):
    one, other = split / "images/train/t0.png", split / "other.png"
    content = bytearray(one.read_bytes())
    content[-20] ^= 1
    other.write_bytes(content)
    assert images_in_both([str(other)], [str(one)]) == set()
    assert images_in_both([str(one)], [str(one), str(split / "gone.png")]) == {str(one)}
    assert images_in_both([str(split / "gone.png")], [str(one)]) == set()


def test_files_of_other_lengths_are_not_read(split, monkeypatch):
    monkeypatch.setattr("utils.evaluation.split.file_hash", pytest.fail)
    longer = split / "longer.png"
    longer.write_bytes((split / "images/train/t0.png").read_bytes() + b"\n")
    assert images_in_both([str(longer)], find_images([str(split / "images/train")])) == set()


def test_a_linked_folder_and_linked_images_are_found_and_where_labels_lie(folder):
    (folder / "store").mkdir()
    (folder / "store/far.png").write_bytes(Path(images_of(folder)[0]).read_bytes())
    more = folder / "images/more"
    more.mkdir()
    (more / "linked").symlink_to(folder / "store")
    (more / "one.png").symlink_to(images_of(folder)[1])
    assert find_images([str(more)]) == [str(more / "linked/far.png"), str(more / "one.png")]
    assert label_file("/x/images/a/images/b/c.d.jpg") == Path("/x/images/a/labels/b/c.d.txt")
    assert label_file("/x/y/c.jpg") == Path("/x/y/c.txt")


# labels


def test_labels(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("1 0.5 0.5 0.25 1\n\n0 0.1 0.2 0.5 0.2 0.5 0.6 0.1 0.6\n1 0.5 0.5 0.25 1\n")
    labels = read_labels(file, 2)
    np.testing.assert_allclose(labels.rows, [[0, 0.3, 0.4, 0.4, 0.4], [1, 0.5, 0.5, 0.25, 1]], atol=1e-6)
    assert (labels.bad, labels.clipped, labels.boxes) == ((), (), 2)
    file.write_text("1 0.5 0.5 0.7 0.5 0.6 0.9\n\n0 0.1 0.1 0.3 0.1 0.3 0.4 0.1 0.4\n1 0.6 0.9 0.7 0.5 0.5 0.5\n")
    labels, polygons, *_ = read_labels(file, 2)
    np.testing.assert_allclose(labels, [[0, 0.2, 0.25, 0.2, 0.3], [1, 0.6, 0.7, 0.2, 0.4]], atol=1e-6)
    outlines = [0.1, 0.1, 0.3, 0.1, 0.3, 0.4, 0.1, 0.4], [0.5, 0.5, 0.7, 0.5, 0.6, 0.9]  # of one box the first stays
    for one, other in zip(polygons, outlines, strict=True):
        np.testing.assert_array_equal(one.flatten(), np.float32(other))
    file.write_text("\n")
    assert read_labels(file, 2).rows.shape == (0, 5)
    assert read_labels(tmp_path / "none.txt", 2) is None


@pytest.mark.parametrize(
    "line",
    ["1 0.5 0.5 0.1", " ", "1 0.5 0.5 0.1 0.1 0.93", "1 0.5 1.011 0.1 0.1", "1 0.5 0.5 -0.001 0.1",
     "1 1.009 0.5 0.002 0.1", "1 0.1 0.1 1.2 0.1 1.2 0.5 2 0.5"],
)  # fmt: skip
def test_bad_labels_are_counted_and_leave_their_image_out_or_are_an_error(tmp_path, line, caplog):
    write_set(tmp_path, 8, names=("cat", "dog"))
    files = sorted((tmp_path / "labels/val").iterdir())
    for file in files[:6]:
        file.write_text(f"0 0.5 0.5 0.1 0.1\n{line}\n{line}\n1 0.5 0.5 0.1 0.1\n")
    with caplog.at_level(logging.INFO):
        data = load_data(tmp_path / "data.yaml")
        split = data.read("val")
        data.read("val"), data.read("val", 3)
    (counts,) = data.counts()
    assert (counts.images, counts.left_out, counts.bad_label_lines) == (2, 6, 12)
    assert counts.first["left_out"].startswith(f"labels/val/{files[0].name}, line 2: ")
    assert split.left_out[5].startswith(f"{files[5]}, line 2: ")
    assert caplog.messages[0] == str(counts)
    shown = [message.split(",")[0].strip() for message in caplog.messages[1:]]
    assert shown == [f"labels/val/{file.name}" for file in files[:5]]
    assert ("confidence" in counts.first["left_out"]) == (line.count(" ") == 5)


@pytest.mark.parametrize(
    ("line", "box"),
    [("0 1.005 0.5 0.1 0.2", (0.9775, 0.5, 0.045, 0.2)), ("0 0.5 0.5 1.02 1", (0.5, 0.5, 1, 1)),
     ("0 -0.01 -0.004 0.1 0.1", (0.02, 0.023, 0.04, 0.046)),
     ("0 -0.01 0.1 1.01 0.1 1.01 0.5", (0.5, 0.3, 1, 0.4))],
)  # fmt: skip
def test_a_label_a_little_outside_is_clipped_and_counted(folder, line, box):
    file = folder / "labels/val/000000000002.txt"
    file.write_text(f"{line}\n")
    data = load_data(folder / "data.yaml")
    labels = data.read("val").images[1].labels
    np.testing.assert_allclose(labels.rows[0, 1:], box, atol=1e-6)
    for polygon in labels.polygons:
        low, high = polygon.min(0), polygon.max(0)
        np.testing.assert_allclose([*(low + high) / 2, *high - low], box, atol=1e-6)
    assert (data.counts()[0].clipped_labels, data.counts()[0].left_out) == (1, 0)


def test_what_upstream_accepts_is_not_clipped_here(tmp_path):
    """Corners may lie outside where the box itself is made of fractions; the evaluation clips them, as upstream's."""
    (tmp_path / "a.txt").write_text("0 0.9 0.5 0.6 0.2\n1 0.4 0.1 1.2 0.1 1.2 0.5\n0 0.5 0.5 0.1 0.1\n")
    labels = read_labels(tmp_path / "a.txt", 2)
    np.testing.assert_allclose(labels.rows[1:, 1:], [(0.9, 0.5, 0.6, 0.2), (0.8, 0.3, 0.8, 0.4)], atol=1e-6)
    assert (labels.bad, labels.clipped, labels.boxes, labels.polygons[2].max()) == ((), (), 2, np.float32(1.2))
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((40, 80, 3), np.uint8))
    boxes = ImageDataset(read_images([str(tmp_path / "a.png")], 2), 64)[0].labels
    np.testing.assert_allclose(boxes[1:, 1:], [(48, 16, 80, 24), (32, 4, 80, 20)], atol=1e-4)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_labels_and_lists_of_windows_programs(folder, encoding):
    expected = load_data(folder / "data.yaml").read("val").images
    for file in (folder / "labels/val").iterdir():
        file.write_bytes(file.read_text().encode(encoding))
    names = [f"images\\val\\{Path(image.path).name}" for image in expected]
    (folder / "list.txt").write_bytes("\r\n".join(names).encode(encoding))
    data = folder / "data.yaml"
    data.write_text(data.read_text().replace('"val": "images/val"', '"val": ".\\\\list.txt"'))
    images = load_data(data).read("val").images
    assert [image.path for image in images] == [image.path for image in expected]
    for one, other in zip(images, expected, strict=True):
        np.testing.assert_array_equal(one.labels.rows, other.labels.rows)


def test_what_a_split_holds_is_one_line_with_first_names(tmp_path, caplog):
    samples = write_set(tmp_path, 9)
    files = [tmp_path / f"labels/val/00000000000{number}.txt" for number in range(1, 10)]
    files[3].unlink(), files[5].unlink(), files[6].write_text("")
    (tmp_path / "images/val/b.gif").write_bytes(b"GIF89a")
    with caplog.at_level(logging.INFO):
        data = load_data(tmp_path / "data.yaml")
        data.read("val"), data.read("val")
    objects = [len(sample.labels) for index, sample in enumerate(samples) if index not in (3, 5, 6)]
    (counts,) = data.counts()
    assert (counts.images, counts.objects, counts.backgrounds) == (9, sum(objects), 3 + objects.count(0))
    assert (counts.without_a_label_file, counts.left_out) == (2, 1)
    assert (caplog.messages[0], len(caplog.messages)) == (str(counts), 2)
    assert "2 of 9 images have no label file (first: labels/val/000000000004.txt)" in caplog.messages[1]
    for text in (f"objects {sum(objects)}", "(first: labels/val/000000000004.txt)", "(first: images/val/b.gif: "):
        assert text in str(counts)


def test_labels_are_sorted_and_each_is_there_once(tmp_path):
    rows = np.random.default_rng(0).integers(0, 3, (200, 5)) / np.array([1, 4, 4, 4, 4], np.float32)
    file = tmp_path / "a.txt"
    file.write_text("".join(" ".join(map(str, row)) + "\n" for row in rows))
    labels = read_labels(file, 3)
    np.testing.assert_array_equal(labels.rows, np.unique(rows.astype(np.float32), axis=0))
    assert (labels.boxes, labels.polygons) == (0, ())


@pytest.mark.parametrize("make", [os.mkdir, lambda path: os.symlink("nowhere", path), lambda p: os.symlink(p, p)])
@pytest.mark.parametrize("place", ["labels/val/000000000002.txt", "labels/val"])
def test_labels_that_cannot_be_read_are_not_taken_for_none(folder, make, place):
    (folder / place).rename(folder / "away")
    make(folder / place) if place.endswith("txt") else (folder / place).symlink_to(folder / place)
    with pytest.raises(DataError, match=place):
        load_data(folder / "data.yaml").read("val")


# images that cannot be used


def test_images_that_cannot_be_used_are_left_out_and_reported(tmp_path):
    write_set(tmp_path, 14)
    files = sorted((tmp_path / "images/val").iterdir())
    files[0].write_bytes(b"not an image")
    files[1].write_bytes(b"")
    files[2].write_bytes(damaged_png())
    cv2.imwrite(str(files[3]), np.zeros((9, 40, 3), np.uint8))
    cv2.imwrite(str(files[8]), np.zeros((10, 40, 3), np.uint8))  # is large enough
    files[4].write_bytes(files[4].read_bytes()[:-9])
    Image.new("RGB", (40, 20)).save(files[5], "GIF")
    for path, make in zip(files[6:8], (os.mkdir, lambda path: os.symlink(path, path)), strict=True):
        path.unlink()
        make(path)
    (tmp_path / "list.txt").write_text("".join(f"{path}\n" for path in [*files, tmp_path / "nowhere.png"]))
    split = read_images(find_images([str(tmp_path / "list.txt")]), 3)
    dataset = ImageDataset(split, 64)
    assert len(dataset) == 7
    left_out = [str(files[index]) for index in (0, 1, 3, 4, 5, 6, 7)]
    assert [line.split(": ")[0] for line in split.left_out] == [*left_out, str(tmp_path / "nowhere.png")]
    for index, reason in {0: "not an image", 2: "40x9 pixels, smaller than 10", 4: "GIF", 7: "No such file"}.items():
        assert reason in split.left_out[index]
    assert dataset[0].image is None
    batch = collate([dataset[0], dataset[1], dataset[2]])
    assert len(batch) == len(batch.images) == len(batch.letterboxes) == len(batch.labels) == 2
    assert collate([dataset[0]]).images.shape[0] == len(collate([dataset[0]])) == 0
    with pytest.raises(DataError, match=r"any of 2 images; the first: .*not an image"):
        read_images([str(path) for path in files[:2]], 1)


@pytest.mark.parametrize("shuffle", [False, True])
def test_images_that_cannot_be_decoded_are_counted_once_or_are_an_error_if_all_are_such(folder, caplog, shuffle):
    Path(images_of(folder)[0]).write_bytes(damaged_png())
    data = load_data(folder / "data.yaml")
    loader = make_loader(data, "val", imgsz=64, batch_size=3, workers=0, shuffle=shuffle)
    caplog.clear()
    for _ in range(2):
        assert sum(map(len, image_batches(loader))) == 3
    assert [message.startswith("1 of 4 images") for message in caplog.messages] == [True]
    for path in images_of(folder):
        Path(path).write_bytes(damaged_png())
    with pytest.raises(DataError, match=r"cannot decode any of the 4 images, although .*; the first: .*000\d\.png"):
        list(image_batches(loader))


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif", "bmp"])
def test_exif_orientation_is_followed_where_opencv_follows_it(tmp_path, suffix):
    """It always does for JPEG, and from version 5 on for PNG and WebP."""
    exif = Image.Exif()
    exif[0x0112] = 8 if suffix == "jpg" else 6
    Image.new("RGB", (40, 20), (255, 0, 0)).save(tmp_path / f"a.{suffix}", exif=exif)
    decoded = decode(str(tmp_path / f"a.{suffix}")).shape[:2]
    assert suffix != "jpg" or decoded == (40, 20)
    dataset = ImageDataset(read_images(find_images([str(tmp_path)]), 1), 64, rect=True)
    assert dataset.images[0].size == decoded[::-1]
    assert dataset[0].letterbox.original == decoded


@pytest.mark.parametrize("missing", [1, 2, 600])
def test_a_jpeg_without_its_last_bytes_is_decoded_as_imread_does(tmp_path, missing):
    noise = cv2.resize(np.random.default_rng(0).integers(0, 255, (9, 9, 3), np.uint8), (120, 80))
    file = tmp_path / "a.jpg"
    file.write_bytes(cv2.imencode(".jpg", noise)[1].tobytes()[:-missing])
    np.testing.assert_array_equal(decode(str(file)), cv2.imread(str(file)))


@pytest.mark.parametrize("others", ["", "val: images/none\n", "train: images/none\nval: images/none\n"])
def test_images_of_test_need_no_other_split(tmp_path, others):
    (tmp_path / "images/test").mkdir(parents=True)
    Image.new("RGB", (16, 16)).save(tmp_path / "images/test/a.png")
    (tmp_path / "data.yaml").write_text(f"{others}test: images/test\nnames: [x]\n")
    assert len(load_data(tmp_path / "data.yaml", "test").read("test").images) == 1
    with pytest.raises(DataError, match="val"):
        load_data(tmp_path / "data.yaml").read("val")


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data", "ignore:Truncated File Read")
@pytest.mark.parametrize("order", ["MM", "II"])
@pytest.mark.parametrize(("kind", "letter"), [(3, "H"), (4, "I"), (1, "B"), (6, "b"), (9, "i"), (11, "f"), (None, "")])
@pytest.mark.parametrize("count", [1, 2])
def test_a_header_has_the_size_that_opencv_decodes_whatever_type_its_orientation_has(
    tmp_path, order, kind, letter, count
):
    sign = {"MM": ">", "II": "<"}[order]
    value = struct.pack(sign + letter, 6).ljust(4, b"\0") if kind else b""  # None: an EXIF block that ends early
    entry = struct.pack(f"{sign}HHHI", 1, 0x0112, kind or 3, count)
    exif = b"Exif\0\0" + order.encode() + struct.pack(f"{sign}HI", 42, 8) + entry + value
    jpeg = cv2.imencode(".jpg", np.zeros((20, 40, 3), np.uint8))[1].tobytes()
    file = tmp_path / "a.jpg"
    file.write_bytes(jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + jpeg[2:])
    assert read_header(str(file)) == decode(str(file)).shape[1::-1]


@pytest.mark.parametrize("size", [(20, 40), (64, 20), (300, 200), (1, 700), (64, 64)])
@pytest.mark.parametrize("shape", ["rect", "square"])
def test_an_image_of_another_size_than_its_header_said_is_fitted(folder, size, shape):
    """As one that is replaced after its labels were read; the label's half of the image is white, the rest black."""
    for number, path in enumerate(images_of(folder)):
        cv2.imwrite(path, np.zeros((40, 20 + 100 * (number > 0), 3), np.uint8))
        label_file(path).write_text("0 0.25 0.5 0.5 1\n")
    split = load_data(folder / "data.yaml").read("val")
    dataset = ImageDataset(split, 64, rect=shape == "rect")
    picture = np.zeros((size[1], size[0], 3), np.uint8)
    picture[:, : max(size[0] // 2, 1)] = 255
    cv2.imwrite(split.images[0].path, picture)
    pixels, _, box, labels, _ = dataset[0]
    assert tuple(pixels.shape[1:]) == dataset.shapes[0]
    assert box.original == picture.shape[:2]
    left, top, right, bottom = labels[0, 1:].numpy() * np.tile(box.ratio[::-1], 2) + np.tile(box.pad, 2)
    rows, columns = np.nonzero((pixels > 200).all(0).numpy())
    seen = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    if min(size) > 1:
        np.testing.assert_allclose([left, top, right, bottom], seen, atol=1.6)


def test_a_rectangle_for_a_header_that_lies_does_not_stop_the_others(folder):
    """One of four wide images is a tall one when it is decoded."""
    paths = images_of(folder)
    for path in paths:
        cv2.imwrite(path, np.zeros((20, 160, 3), np.uint8))
    data = load_data(folder / "data.yaml")
    data.read("val")
    cv2.imwrite(paths[2], np.zeros((160, 20, 3), np.uint8))
    loader = make_loader(data, "val", imgsz=64, batch_size=4, rect=True, workers=0)
    (batch,) = loader
    assert len(batch) == 4
    assert [box.original for box in batch.letterboxes] == [(20, 160), (20, 160), (160, 20), (20, 160)]


@pytest.mark.parametrize(
    "lines",
    [["a.png 1,2,3,4,0"], ["'a.png'", '"b.png"'], ["a.jpg,0"], ["# images", "folder/"], ["a.gif"]],
)
def test_lines_of_a_list_that_name_no_image_are_counted(folder, lines):
    names = [f"images/val/{Path(path).name}" for path in images_of(folder)]
    (folder / "list.txt").write_text("\n".join([*names, *lines]))
    content = json.loads((folder / "data.yaml").read_text()) | {"val": "list.txt"}
    (folder / "data.yaml").write_text(json.dumps(content))
    data = load_data(folder / "data.yaml")
    data.read("val")
    (counts,) = data.counts()
    assert (counts.images, counts.left_out) == (4, len(lines))
    assert "list" in counts.first["left_out"]


@pytest.mark.parametrize("target", ["..", ".", "../.."])
def test_a_link_to_a_folder_that_it_lies_in_counts_its_images_once(folder, target):
    (folder / "images/val/loop").symlink_to(target)
    data = load_data(folder / "data.yaml")
    images = data.read("val").images
    assert [image.path for image in images] == images_of(folder)
    (counts,) = data.counts()
    assert counts.left_out == 1
    assert "loop" in counts.first["left_out"]


def test_boxes_without_an_area_are_counted(folder):
    (folder / "labels/val/000000000002.txt").write_text("0 0.5 0.5 0 0.2\n0 0.5 0.5 0.1 0.2\n1 0.2 0.2 0 0\n")
    data = load_data(folder / "data.yaml")
    data.read("val")
    (counts,) = data.counts()
    assert (counts.boxes_without_area, counts.left_out) == (2, 0)
    assert "boxes without area 2 (first: labels/val/000000000002.txt)" in str(counts)


@pytest.mark.parametrize(
    ("line", "is_pose"),
    [
        ("0 0.5 0.5 0.4 0.4 0.4 0.4 1 0.6 0.6 1", True),
        ("0 0.5 0.5 0.4 0.4 0.4 0.4 1 0 0 0", True),
        ("0 0.5 0.5 0.4 0.4 0.4 0.4 1 0.5 0.5 1 0.6 0.6 1 0.6 0.4 1", True),
        ("0 0.5 0.5 0.4 0.4 0.1 0.4 1 0.6 0.6 1", False),  # a keypoint outside of the box: a polygon
        ("0 0.5 0.5 0.1 0.4 0.35 0.4 1 0.5 0.6 1", False),  # beside a narrow box
        ("0 0.5 0.5 0.4 0.1 0.4 0.35 1 0.6 0.5 1", False),  # above a flat one
        ("0 0 0 1 0 1 0.5 1 1 0 1", False),  # a polygon along the border
        ("0 0 0 0 1 0.5 1 1 1 1 0", False),
        ("0 0.1 0.1 0.5 0.2 0.5 0.6 0.3 0.6 0.1 0.6", False),
    ],
)
def test_a_pose_is_not_taken_for_a_polygon(tmp_path, line, is_pose):
    (tmp_path / "a.txt").write_text(line)
    labels = read_labels(tmp_path / "a.txt", 1)
    assert (len(labels.bad), len(labels.rows)) == ((1, 0) if is_pose else (0, 1))
    assert all("pose" in text for text in labels.bad)
