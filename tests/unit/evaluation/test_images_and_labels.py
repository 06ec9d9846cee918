"""Finding and reading images and their labels."""

from __future__ import annotations

import logging
from pathlib import Path

import cv2
import numpy as np
import pytest
from known_images import write_set

from utils.core.errors import DataError
from utils.evaluation import images as images_module
from utils.evaluation.batch import collate
from utils.evaluation.dataset import ImageDataset
from utils.evaluation.images import decode, find_images, label_file, read_labels


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
    np.testing.assert_allclose(read_labels(file, 2)[0], expected, atol=1e-6)
    file.write_text("\n")
    assert read_labels(file, 2)[0].shape == (0, 5)


@pytest.mark.parametrize(
    "line",
    ["1 0.5 0.5 0.1", "2 0.5 0.5 0.1 0.1", "-1 0.5 0.5 0.1 0.1", "0.5 0.5 0.5 0.1 0.1", "nan 0.5 0.5 0.1 0.1",
     "1 0.5 1.5 0.1 0.1", "1 0.5 nan 0.1 0.1", "1 0.5 -0.5 0.1 0.1", "cat 0.5 0.5 0.1 0.1"],
)  # fmt: skip
def test_a_bad_label_names_its_file_and_line(tmp_path, line):
    file = tmp_path / "a.txt"
    file.write_text(f"0 0.5 0.5 0.1 0.1\n{line}\n")
    with pytest.raises(DataError) as caught:
        read_labels(file, 2)
    assert f"{file}, line 2" in str(caught.value)


def test_labels_are_sorted_and_each_is_there_once(tmp_path):
    rows = np.random.default_rng(0).integers(0, 3, (200, 5)) / np.array([1, 4, 4, 4, 4], np.float32)
    file = tmp_path / "a.txt"
    file.write_text("".join(" ".join(map(str, row)) + "\n" for row in rows))
    np.testing.assert_array_equal(read_labels(file, 3)[0], np.unique(rows.astype(np.float32), axis=0))


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
    with pytest.raises(DataError, match=r"none of 1 image can be read; the first: .*a\.jpg: not an image"):
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
