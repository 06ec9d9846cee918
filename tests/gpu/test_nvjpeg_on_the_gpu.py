"""JPEGs decoded by nvJPEG: the loop's batches beside OpenCV's, while the GPU is busy, and of damaged files."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from utils.core.errors import InputError
from utils.evaluation.arrivals import ahead
from utils.evaluation.dataset import load_data, make_loader
from utils.evaluation.nvjpeg import JpegDecoder, check_nvjpeg

DEVICE = torch.device("cuda:0")
SIZES = [(640, 480), (480, 640), (500, 333), (1280, 960), (97, 61), (640, 427)]  # (width, height)


def why_not() -> str:
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    try:
        check_nvjpeg(DEVICE)
    except InputError as error:
        return str(error)
    return ""


def picture(seed, size):
    """Soft colours and hard edges."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (6, 8, 3), np.uint8)
    image = cv2.resize(small, size, interpolation=cv2.INTER_CUBIC)
    for _ in range(5):
        corner, colour = generator.integers(0, min(size), 2), generator.integers(0, 256, 3)
        cv2.rectangle(image, corner.tolist(), (corner + min(size) // 4).tolist(), colour.tolist(), -1)
    return image


def written(folder, count):
    """Images of several sizes: JPEGs, of which some are progressive, turned or grey, and PNGs."""
    for kind in ("images", "labels"):
        (folder / kind).mkdir()
    for number in range(count):
        image, path = picture(number, SIZES[number % len(SIZES)]), folder / f"images/{number:03d}.jpg"
        exif = Image.Exif()
        if number % 11 == 0:
            exif[0x0112] = 6
        rgb = Image.fromarray(image[..., ::-1])
        if number % 5 == 0:
            rgb.save(path.with_suffix(".png"))
        else:
            rgb = rgb.convert("L") if number % 13 == 0 else rgb
            rgb.save(path, quality=90, progressive=number % 7 == 0, subsampling=number % 3, exif=exif)
        (folder / f"labels/{number:03d}.txt").write_text(f"0 0.5 0.5 0.{number % 4 + 1} 0.2\n")
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images\nval: images\nnames: [thing]\n")
    return load_data(folder / "data.yaml")


def batches(data, **options):
    loader = make_loader(data, "val", imgsz=640, batch_size=8, workers=4, nvjpeg=True, **options)
    return ahead(loader, DEVICE, JpegDecoder(DEVICE, loader.dataset.by_opencv))


@pytest.mark.parametrize("rect", [False, True])
def test_batches_are_opencvs_but_for_colour_between_pixels(tmp_path, rect):
    """While the GPU is kept busy with each batch, so that memory that came back too soon would be seen."""
    data = written(tmp_path, 120)
    expected = list(make_loader(data, "val", imgsz=640, batch_size=8, workers=4, rect=rect))
    load = torch.rand(4096, 4096, device=DEVICE)
    apart = []
    for _ in range(3):
        found = []
        for batch in batches(data, rect=rect):
            for _ in range(8):
                load = (load @ load).clamp(0, 1)
            found.append((batch, batch.images.clone()))
        for (batch, images), other in zip(found, expected, strict=True):
            assert (batch.paths, batch.shapes, batch.jpegs) == (other.paths, other.shapes, None)
            assert torch.equal(batch.labels, other.labels)
            difference = (images.cpu().int() - other.images.int()).abs().float()
            apart += difference.mean((1, 2, 3)).tolist()
    print(f"mean distance of pixels: {np.mean(apart):.3f} of 255, in the image with the largest {np.max(apart):.3f}")
    assert np.max(apart) < 2
    assert np.mean(apart) > 0  # nvJPEG decoded them, and not OpenCV


def test_damaged_files_do_not_harm_others(tmp_path, caplog):
    data = written(tmp_path, 24)
    expected = {}
    for batch in make_loader(data, "val", imgsz=640, batch_size=8, workers=0):
        expected |= dict(zip(batch.paths, batch.images, strict=True))
    generator = np.random.default_rng(0)
    damaged = []
    for number in (4, 9, 14, 19, 22):  # each usual, and in several batches
        path = tmp_path / f"images/{number:03d}.jpg"
        content = bytearray(path.read_bytes())
        middle = len(content) // 2
        if number in (4, 14):
            content[middle : middle + 400] = generator.integers(0, 255, 400, np.uint8).tobytes()
        elif number == 9:
            del content[middle:-2]
        else:
            start = content.index(b"\xff\xc4") + 5
            content[start : start + 16] = b"\xff" * 16
        path.write_bytes(content)
        damaged.append(str(path))
    found = {}
    for batch in batches(data):
        found |= dict(zip(batch.paths, batch.images.clone(), strict=True))
    print(sorted(set(expected) - set(found)), [record.getMessage()[-200:] for record in caplog.records])
    assert set(expected) - set(found) <= set(damaged)
    for path in set(expected) - set(damaged):
        assert (found[path].cpu().int() - expected[path].int()).abs().float().mean() < 2
