"""Draw the images of the demo set: handwritten digits on crops of real photographs.

Everything here is pure: arrays in, arrays out, all randomness from the generator that is passed in.
The digits are scikit-learn's ``load_digits`` (UCI "Optical Recognition of Handwritten Digits", test part: 1,797 scans
of 8x8 pixels with 17 grey levels). The photographs lie inside the wheels of scikit-learn and scikit-image, so that
nothing is downloaded; each is checked by its SHA-256.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from utils.core.errors import DependencyError

IMAGE_SIZE = 320  # pixels, width and height
DIGIT_SIZE = (12, 96)  # pixels, the longer side of the box, both ends included
DIGITS_PER_IMAGE = (3, 12)
MAX_COVER = 0.05  # at most this fraction of the smaller of two boxes is shared

# 1,797 scans come writer after writer: the dictated sequence of labels starts again at samples 0, 130, 256, 386, 516,
# 646, 776, 905, 1029, 1157, ... Cutting at such a start keeps every writer on one side.
FIRST_VALIDATION_SAMPLE = 1157
DIGITS = ("datasets/data/digits.csv.gz", "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22")

# (package, file in it, SHA-256 of the file). Different photographs in each split, so that a validation image shows
# neither a digit nor a background that was trained on.
PHOTOGRAPHS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "train": (
        ("sklearn", "datasets/images/china.jpg", "8378025ad2519d649d02e32bd98990db4ab572357d9f09841c2fbfbb4fefad29"),
        ("skimage", "data/astronaut.png", "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5"),
        ("skimage", "data/coffee.png", "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7"),
        ("skimage", "data/camera.png", "b0793d2adda0fa6ae899c03989482bff9a42d3d5690fc7e3648f2795d730c23a"),
        ("skimage", "data/grass.png", "b6b6022426b38936c43a4ac09635cd78af074e90f42ffa8227ac8b7452d39f89"),
        ("skimage", "data/moon.png", "78739619d11f7eb9c165bb5d2efd4772cee557812ec847532dbb1d92ef71f577"),
        ("skimage", "data/motorcycle_left.png", "db18e9c4157617403c3537a6ba355dfeafe9a7eabb6b9b94cb33f6525dd49179"),
        ("skimage", "data/hubble_deep_field.jpg", "3a19c5dd8a927a9334bb1229a6d63711b1c0c767fb27e2286e7c84a3e2c2f5f4"),
    ),
    "val": (
        ("sklearn", "datasets/images/flower.jpg", "a77f6ec41e353afdf8bdff2ea981b2955535d8d83294f8cfa49cf4e423dd5638"),
        ("skimage", "data/chelsea.png", "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb"),
        ("skimage", "data/rocket.jpg", "c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c"),
        ("skimage", "data/brick.png", "7966caf324f6ba843118d98f7a07746d22f6a343430add0233eca5f6eaaa8fcf"),
        ("skimage", "data/gravel.png", "c48615b451bf1e606fbd72c0aa9f8cc0f068ab7111ef7d93bb9b0f2586440c12"),
    ),
}


@dataclass(frozen=True)
class ImageFile:
    """One drawn image.

    image: uint8 [size, size, 3], BGR. labels: int [n]. boxes: int [n, 4], x1 y1 x2 y2 in pixels, x2 and y2 exclusive.
    ink: the mask of each digit as drawn, n arrays of bool [size, size]; empty unless asked for.
    quality: of the JPEG file, up to 100.
    """

    image: np.ndarray
    labels: np.ndarray
    boxes: np.ndarray
    ink: tuple[np.ndarray, ...] = ()
    quality: int = 85


@dataclass(frozen=True)
class Sources:
    """What one split is drawn from: scans float32 [n, 8, 8] in 0..1, labels int [n], photographs uint8 [h, w, 3]."""

    scans: np.ndarray
    labels: np.ndarray
    photographs: tuple[np.ndarray, ...]


def _package_file(package: str, name: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        project = {"sklearn": "scikit-learn", "skimage": "scikit-image"}[package]
        raise DependencyError(f"{project} is not installed; the demo set is drawn from it: pip install {project}")
    return Path(next(iter(spec.submodule_search_locations))) / name


def _checked_bytes(package: str, name: str, sha256: str) -> bytes:
    """Read a file out of an installed package. Raises DependencyError when it is missing or is another one."""
    path = _package_file(package, name)
    if not path.is_file():
        raise DependencyError(
            f"{package} is installed without {name}; install its wheel from PyPI, or another version of it"
        )
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise DependencyError(
            f"{path} is not the file expected: SHA-256 {found[:12]}..., expected {sha256[:12]}...; "
            f"install another version of {package}"
        )
    return data


def read_photograph(package: str, name: str, sha256: str) -> np.ndarray:
    """Read a photograph out of an installed package, as uint8 [h, w, 3] BGR. Raises DependencyError."""
    data = np.frombuffer(_checked_bytes(package, name, sha256), np.uint8)
    return cv2.imdecode(data, cv2.IMREAD_COLOR)


def read_scans() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits: scans float32 [1797, 8, 8] in 0..1 and labels int [1797].

    Reads the file that ``load_digits`` reads: importing scikit-learn takes seconds.
    Raises DependencyError when scikit-learn is missing or holds other digits.
    """
    data = gzip.decompress(_checked_bytes("sklearn", *DIGITS))
    table = np.loadtxt(io.BytesIO(data), delimiter=",", dtype=np.float32)
    return table[:, :64].reshape(-1, 8, 8) / 16, table[:, 64].astype(np.int64)


def read_sources(split: str) -> Sources:
    """Read the digits and the photographs of one split, ``train`` or ``val``. Raises DependencyError."""
    scans, labels = read_scans()
    part = slice(None, FIRST_VALIDATION_SAMPLE) if split == "train" else slice(FIRST_VALIDATION_SAMPLE, None)
    return Sources(scans[part], labels[part], tuple(read_photograph(*item) for item in PHOTOGRAPHS[split]))


def draw_background(
    rng: np.random.Generator, photographs: tuple[np.ndarray, ...], size: int = IMAGE_SIZE
) -> np.ndarray:
    """Cut a square out of a photograph and bring it to float32 [size, size, 3], with its contrast and light changed."""
    photo = photographs[rng.integers(len(photographs))]
    height, width = photo.shape[:2]
    side = int(rng.integers(200, min(height, width) + 1))
    top, left = (int(rng.integers(height - side + 1)), int(rng.integers(width - side + 1)))
    crop = photo[top : top + side, left : left + side]
    if rng.random() < 0.5:
        crop = crop[:, ::-1]
    image = cv2.resize(np.ascontiguousarray(crop), (size, size), interpolation=cv2.INTER_LINEAR)
    image = image.astype(np.float32)
    mean = image.mean(axis=(0, 1))
    return np.clip((image - mean) * rng.uniform(0.4, 1.0) + mean + rng.uniform(-25, 25), 0, 255)


def _warp(scan: np.ndarray, scale: float, turn: float, aspect: float, slant: float, side: int) -> np.ndarray:
    """Scale, slant and turn a scan [8, 8] about its middle onto a canvas [side, side]; values stay in about 0..1."""
    cos, sin = np.cos(turn), np.sin(turn)
    matrix = np.array([[cos, -sin], [sin, cos]]) @ np.array([[aspect, slant], [0.0, 1.0]]) * scale
    padded = np.pad(scan, 2)
    middle_in, middle_out = (padded.shape[0] - 1) / 2, (side - 1) / 2
    shift = middle_out - matrix @ np.full(2, middle_in)
    return cv2.warpAffine(padded, np.column_stack([matrix, shift]), (side, side), flags=cv2.INTER_CUBIC)


def extent(ink: np.ndarray) -> tuple[int, int, int, int]:
    """The box x1, y1, x2, y2 (exclusive) of what is set in a mask [h, w]."""
    columns, rows = np.flatnonzero(ink.any(axis=0)), np.flatnonzero(ink.any(axis=1))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def draw_digit(rng: np.random.Generator, scan: np.ndarray, size: float) -> np.ndarray:
    """Draw one scan [8, 8] with the longer side of its box at about ``size`` pixels.

    Returns its opacity, float32 [h, w] in 0..1, cut to the box of its ink (opacity of at least one half).
    """
    shape = (float(np.radians(rng.uniform(-15, 15))), float(rng.uniform(0.8, 1.2)), float(rng.uniform(-0.15, 0.15)))
    level, sharpness = rng.uniform(0.36, 0.5), rng.uniform(2.5, 5.0)
    x1, y1, x2, y2 = extent(_warp(scan, 6.0, *shape, side=88) >= level)
    scale = 6.0 * size / max(x2 - x1, y2 - y1)
    values = _warp(scan, scale, *shape, side=int(14 * scale) + 4)
    opacity = np.clip((values - level) * sharpness + 0.5, 0, 1)
    x1, y1, x2, y2 = extent(opacity >= 0.5)
    return opacity[y1:y2, x1:x2].astype(np.float32)


def _draw_size(rng: np.random.Generator) -> float:
    """Most digits are 20 to 94 pixels high, evenly in the logarithm; one in eight is smaller."""
    low, high = (13, 20) if rng.random() < 0.125 else (20, 94)
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _luminance(colour: np.ndarray) -> float:
    return float(colour @ np.array([0.114, 0.587, 0.299]))


def _draw_colour(rng: np.random.Generator, behind: np.ndarray) -> np.ndarray:
    """Choose a BGR colour that differs from the mean colour ``behind`` by a contrast drawn from 35 to 130 levels."""
    contrast, light = rng.uniform(35, 130), _luminance(behind)
    for _ in range(20):
        colour = rng.uniform(0, 255, 3)
        if abs(abs(_luminance(colour) - light) - contrast) < 15:
            return colour
    return np.full(3, light + contrast if light < 128 else light - contrast)


def paint(
    rng: np.random.Generator, image: np.ndarray, box: tuple[int, int, int, int], opacity: np.ndarray, faintest: float
) -> None:
    """Put a digit's ink into its box of the image, in place, in a colour that differs from what is there.

    opacity: float [h, w] in 0..1. faintest: the least that the ink covers where its opacity is 1; drawn up to 1.
    """
    x1, y1, x2, y2 = box
    place = image[y1:y2, x1:x2]
    colour = _draw_colour(rng, place.mean(axis=(0, 1))).astype(np.float32)
    weight = opacity[..., None] * np.float32(rng.uniform(faintest, 1.0))
    image[y1:y2, x1:x2] = place * (1 - weight) + colour * weight


def _find_place(
    rng: np.random.Generator, taken: list[tuple[int, int, int, int]], shape: tuple[int, ...]
) -> tuple[int, int, int, int] | None:
    """Look for a free place for a digit [h, w]: 40 tries; None when each would cover too much of another digit."""
    height, width = shape
    for _ in range(40):
        x1, y1 = (int(rng.integers(IMAGE_SIZE - width + 1)), int(rng.integers(IMAGE_SIZE - height + 1)))
        box = (x1, y1, x1 + width, y1 + height)
        if all(cover(box, other) <= MAX_COVER for other in taken):
            return box
    return None


def cover(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> float:
    """Shared area as a fraction of the smaller box."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    return width * height / min((a[2] - a[0]) * (a[3] - a[1]), (b[2] - b[0]) * (b[3] - b[1]))


def draw_image(rng: np.random.Generator, sources: Sources, keep_ink: bool = False) -> ImageFile:
    """Draw one image of 3 to 12 digits; ``keep_ink`` adds the masks of what was drawn."""
    image = draw_background(rng, sources.photographs)
    labels: list[int] = []
    boxes: list[tuple[int, int, int, int]] = []
    masks: list[np.ndarray] = []
    wanted = int(rng.integers(DIGITS_PER_IMAGE[0], DIGITS_PER_IMAGE[1] + 1))
    while len(boxes) < wanted:
        label = int(rng.integers(10))
        scan = sources.scans[rng.choice(np.flatnonzero(sources.labels == label))]
        opacity = draw_digit(rng, scan, _draw_size(rng))
        box = _find_place(rng, boxes, opacity.shape)
        if box is None or not DIGIT_SIZE[0] <= max(opacity.shape) <= DIGIT_SIZE[1]:
            continue
        paint(rng, image, box, opacity, faintest=0.8)
        labels.append(label)
        boxes.append(box)
        if keep_ink:
            x1, y1, x2, y2 = box
            mask = np.zeros((IMAGE_SIZE, IMAGE_SIZE), bool)
            mask[y1:y2, x1:x2] = opacity >= 0.5
            masks.append(mask)
    image += rng.uniform(0, 10) * rng.standard_normal(image.shape, np.float32)
    return ImageFile(np.clip(image, 0, 255).astype(np.uint8), np.array(labels), np.array(boxes), tuple(masks))
