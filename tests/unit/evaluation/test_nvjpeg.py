"""JPEGs that a GPU decodes. torchvision's decoder for CPUs stands in for it, whose pixels are OpenCV's, bit for bit."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torchvision
from known_images import MIXED, KnowingModel, numbers, write_set
from packaging.version import Version
from PIL import Image

from utils.core.errors import InputError
from utils.evaluation import nvjpeg
from utils.evaluation.arrivals import ahead
from utils.evaluation.batch import Batch
from utils.evaluation.dataset import ImageDataset, load_data, make_loader
from utils.evaluation.loop import EvalConfig, evaluate
from utils.evaluation.nvjpeg import JpegDecoder, check_nvjpeg, read_jpeg
from utils.jobs.report_rows import ap_with
from utils.runners.pytorch import TorchRunner

CPU = torch.device("cpu")
NAMES = ("cat", "dog", "owl")


@pytest.fixture(autouse=True)
def _one_by_one_before_torchvision_0_20(monkeypatch):
    """Which takes no lists, so that `--nvjpeg` is refused there."""
    if Version(torchvision.__version__) < Version("0.20"):

        def alone(files, device):
            return [torchvision.io.decode_jpeg(one, torchvision.io.ImageReadMode.RGB) for one in files]

        monkeypatch.setattr(nvjpeg, "decode", alone)


def picture(width=64, height=48):
    """Soft colours with an edge, as OpenCV has them."""
    rows, columns = np.mgrid[:height, :width]
    image = np.stack([rows * 255 // height, columns * 255 // width, (rows + columns) % 256], -1).astype(np.uint8)
    image[:, : width // 3] //= 2
    return image


def saved(path, **options):
    Image.fromarray(picture()).save(path, "JPEG", **options)
    return str(path)


def read(path):
    return read_jpeg(str(path), (64, 64), (64, 96))


@pytest.mark.parametrize(
    "options",
    [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 20, "comment": "taken by nobody"}, {"exif": b""}],
)
def test_usual_jpegs_stay_encoded(tmp_path, options):
    file = saved(tmp_path / "a.jpg", **options)
    found = read(file)
    assert found is not None
    assert bytes(found.content.numpy()) == Path(file).read_bytes()
    assert (found.box.original, found.box.resized, found.box.corner, found.shape) == (
        (48, 64),
        (48, 64),
        (8, 16),
        (64, 96),
    )
    pixels = nvjpeg.decode([found.content], CPU)[0]
    np.testing.assert_array_equal(pixels.permute(1, 2, 0).numpy()[..., ::-1], cv2.imread(file))


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def test_what_nvjpeg_would_see_otherwise_is_left_to_opencv(tmp_path):
    assert read(saved(tmp_path / "upright.jpg", exif=turned(1))) is not None
    assert read(saved(tmp_path / "turned.jpg", exif=turned(6))) is None
    assert read(saved(tmp_path / "mirrored.jpg", exif=turned(2))) is None
    assert read(saved(tmp_path / "letters.jpg", keep_rgb=True)) is None  # components R, G and B
    content = Path(saved(tmp_path / "whole.jpg")).read_bytes()
    for name, part in {"cut": content[:-40], "header": content[:30], "more": content + b"\0", "empty": b""}.items():
        (tmp_path / f"{name}.jpg").write_bytes(part)
        assert read(tmp_path / f"{name}.jpg") is None
    for mode in ("L", "CMYK"):
        Image.fromarray(picture()).convert(mode).save(tmp_path / f"{mode}.jpg", "JPEG")
        assert read(tmp_path / f"{mode}.jpg") is None
    adobe = b"\xff\xee\x00\x0eAdobe" + bytes([0, 100, 0, 0, 0, 0, 0])  # Adobe's mark, with colours not converted
    (tmp_path / "adobe.jpg").write_bytes(content[:2] + adobe + content[2:])
    assert read(tmp_path / "adobe.jpg") is None
    (tmp_path / "adobe.jpg").write_bytes(content[:2] + adobe[:-1] + b"\x01" + content[2:])
    assert read(tmp_path / "adobe.jpg") is not None
    cv2.imwrite(str(tmp_path / "a.png"), picture())
    assert read(tmp_path / "a.png") is None
    assert read(tmp_path) is None
    assert read(tmp_path / "nowhere.jpg") is None


class Mixed:
    """Images of several sizes; every third is a PNG, the others are JPEGs; and a network that knows them."""

    def __init__(self, folder):
        samples = write_set(folder, 20, MIXED)
        for number, sample in enumerate(samples):
            if number % 3:
                brighter = cv2.imread(str(sample.path)) + 4  # so that the network knows it by rounded colours too
                cv2.imwrite(str(sample.path.with_suffix(".jpg")), brighter)
                sample.path.unlink()
        self.data, self.model = load_data(folder / "data.yaml"), KnowingModel(samples, NAMES, 64)
        self.folder = folder

    def loader(self, **options):
        return make_loader(self.data, "val", imgsz=64, batch_size=8, **{"workers": 0, **options})


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return Mixed(tmp_path_factory.mktemp("mixed"))


def decoded(loader):
    return list(ahead(loader, CPU, JpegDecoder(CPU, loader.dataset.by_opencv)))


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.paths, one.shapes, one.jpegs) == (other.paths, other.shapes, None)
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.truth.flat, other.truth.flat)
        assert one.images.shape == other.images.shape
        assert (one.images.int() - other.images.int()).abs().max() <= 1  # weights of 11 bits in OpenCV's resizing


@pytest.mark.parametrize("rect", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_opencv(mixed, monkeypatch, rect, workers):
    monkeypatch.setattr("utils.evaluation.dataset._cores", lambda: 2)
    loader = mixed.loader(nvjpeg=True, workers=workers, rect=rect)
    encoded = [batch.jpegs for batch in loader]
    assert sum(len(jpegs.files) for jpegs in encoded if jpegs is not None) == 13  # of 20; the others are PNGs
    assert_same(decoded(loader), list(mixed.loader(rect=rect)))


def test_a_batch_of_nothing_but_jpegs_and_one_without(tmp_path):
    write_set(tmp_path, 2, [(64, 48)])
    for number, sizes in enumerate([(64, 48), (30, 20)]):
        cv2.imwrite(str(tmp_path / f"images/val/x{number}.jpg"), picture(*sizes))
    data = load_data(tmp_path / "data.yaml")
    plain, loader = (make_loader(data, "val", imgsz=64, batch_size=2, workers=0, nvjpeg=on) for on in (False, True))
    first, second = loader
    assert first.jpegs is None
    assert (len(second.images), second.images.shape[1:], second.jpegs.positions) == (0, (3, 64, 64), (0, 1))
    assert_same(decoded(loader), list(plain))


def test_where_nvjpeg_fails_opencv_decodes(mixed, monkeypatch, caplog):
    def failing(files, device):
        raise RuntimeError("Error while decoding JPEG images: status 4\nand more")

    monkeypatch.setattr(nvjpeg, "decode", failing)
    with caplog.at_level(logging.WARNING):
        assert_same(decoded(mixed.loader(nvjpeg=True)), list(mixed.loader()))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "nvJPEG fails in a batch of 8 images from" in line
    assert "(Error while decoding JPEG images: status 4); OpenCV decodes this batch, and others in which it" in line


def test_an_image_of_another_size_than_its_header_says(mixed, monkeypatch, caplog):
    decode = nvjpeg.decode
    monkeypatch.setattr(nvjpeg, "decode", lambda *words: [one[:, 1:] for one in decode(*words)])
    assert_same(decoded(mixed.loader(nvjpeg=True)), list(mixed.loader()))
    assert "an image has another size than its header says" in caplog.text


def test_what_neither_decodes_is_left_out(tmp_path):
    """Of a usual header and a usual end with nothing between them OpenCV makes an image, and of a wrong table none."""
    write_set(tmp_path, 1, [(64, 64)])
    good, bad = (Path(saved(tmp_path / f"images/val/{name}.jpg")) for name in ("good", "wrong"))
    content = bytearray(bad.read_bytes())
    content[content.index(b"\xff\xc4") + 4 : content.index(b"\xff\xc4") + 20] = b"\xff" * 16  # lengths of codes
    bad.write_bytes(content)
    assert read(bad) is not None
    assert cv2.imread(str(bad)) is None
    data = load_data(tmp_path / "data.yaml")
    (batch,) = decoded(make_loader(data, "val", imgsz=64, batch_size=8, workers=0, nvjpeg=True))
    assert [Path(path).name for path in batch.paths] == ["000000000001.png", good.name]
    assert len(batch.images) == 2


@pytest.mark.parametrize("batch_size", [3, 32])
def test_the_evaluation_finds_the_same(mixed, monkeypatch, batch_size):
    monkeypatch.setattr("utils.evaluation.loop.check_nvjpeg", lambda device: None)
    config = EvalConfig(imgsz=64, batch_size=batch_size, workers=0)
    plain, found = (
        evaluate(TorchRunner(mixed.model, "cpu"), mixed.data, replace(config, nvjpeg=on), progress=False)
        for on in (False, True)
    )
    assert 0.2 < plain.ap < 1
    assert numbers(found) == numbers(plain)
    assert found.images == plain.images == 20
    assert ap_with(replace(config, nvjpeg=True), found) == "JPEGs decoded by nvJPEG"
    assert ap_with(config, plain) == ""


def test_it_needs_a_gpu_and_a_torchvision_that_can(monkeypatch):
    with pytest.raises(InputError, match="--nvjpeg decodes images on a GPU, and the network runs on the cpu; leave it"):
        check_nvjpeg(CPU)
    seen = []
    monkeypatch.setattr(nvjpeg, "decode", lambda files, device: seen.append((files[0][:2].tolist(), device)))
    check_nvjpeg(torch.device("cuda:1"))
    assert seen == [([0xFF, 0xD8], torch.device("cuda:1"))]
    for error in (RuntimeError("not compiled with nvJPEG support\nat"), AttributeError("'list' object"), TypeError()):

        def failing(files, device, error=error):
            raise error

        monkeypatch.setattr(nvjpeg, "decode", failing)
        reason = str(error).partition("\n")[0] or "TypeError"
        with pytest.raises(InputError, match=f"by nvJPEG, as 0.20 to 0.29 do; .* says: {reason}$"):
            check_nvjpeg(torch.device("cuda:0"))


def test_masks_and_single_classes_are_kept(tmp_path):
    write_set(tmp_path, 1, [(64, 64)])
    file = Path(saved(tmp_path / "images/val/a.jpg"))
    (tmp_path / f"labels/val/{file.stem}.txt").write_text("2 0.1 0.1 0.6 0.1 0.6 0.7\n")
    (tmp_path / "labels/val/000000000001.txt").unlink()
    options = {"single_cls": True, "mask_stride": 4}
    items = [
        ImageDataset([str(tmp_path / "images/val")], 3, 64, nvjpeg=on, **options)[1] for on in (False, True)
    ]  # of the JPEG
    assert [one.path for one in items] == [str(file)] * 2
    assert torch.equal(items[0].labels, items[1].labels)
    assert items[1].labels[0, 1] == 0
    assert torch.equal(items[0].masks.bits, items[1].masks.bits)
    assert items[0].masks.bits.any()


def test_an_empty_batch_stays_empty():
    assert len(JpegDecoder(CPU, list).letterboxed(*JpegDecoder(CPU, list).decode(Batch.empty()))) == 0
