"""Draw the images of the larger demo set, 640x640 pixels: what real sets have that the small one spares its networks.

Digits of 8 to 300 pixels, up to 40 in an image, that cover each other and are covered by other things; classes of which
some are thirteen times as frequent as others; blur, noise, and JPEG files of every quality. Digits and photographs come
from digit_images.py, so that no writer and no photograph is in both splits.

As in COCO, a box goes around what is seen of a digit, and a digit of which less than half is seen has no label.
"""

from __future__ import annotations

import cv2
import numpy as np
from digit_images import ImageFile, Sources, cover, draw_background, draw_digit, extent, paint

SCENE_SIZE = 640  # pixels, width and height
DIGIT_SIZE = (8, 300)  # pixels, the longer side of the box as drawn, both ends included
DIGITS_PER_IMAGE = (3, 40)
LEAST_SEEN = 0.5  # fraction of a digit's ink; a digit of which less is seen has no label
PLACES = 12  # tried for a digit, before it is left out
QUALITY = (35, 95)  # of JPEG

# 0.75 to the power of a rank: the most frequent class has 26 % of the digits, the rarest 2 %
_RANKS = np.array([3, 0, 7, 5, 9, 1, 6, 2, 8, 4])
CLASS_SHARES = 0.75**_RANKS / (0.75**_RANKS).sum()

Box = tuple[int, int, int, int]


def draw_scene(rng: np.random.Generator, sources: Sources) -> ImageFile:
    """Draw one image of up to 40 digits, with the boxes of what is seen of them."""
    image = draw_background(rng, sources.photographs, SCENE_SIZE)
    owner = np.full(image.shape[:2], -1, np.int16)  # the digit whose ink is seen at a pixel
    labels: list[int] = []
    boxes: list[Box] = []
    ink: list[int] = []  # pixels of each digit, seen or not
    low, high = np.log(DIGITS_PER_IMAGE[0]), np.log(DIGITS_PER_IMAGE[1] + 1)
    wanted = int(np.exp(rng.uniform(low, high)))
    for _ in range(wanted):
        label = int(rng.choice(10, p=CLASS_SHARES))
        scan = sources.scans[rng.choice(np.flatnonzero(sources.labels == label))]
        opacity = draw_digit(rng, scan, _draw_size(rng, wanted))
        box = _find_place(rng, boxes, opacity.shape)
        if box is None or not DIGIT_SIZE[0] <= max(opacity.shape) <= DIGIT_SIZE[1]:
            continue
        paint(rng, image, box, opacity, faintest=0.75)
        x1, y1, x2, y2 = box
        owner[y1:y2, x1:x2][opacity >= 0.5] = len(boxes)
        labels.append(label)
        boxes.append(box)
        ink.append(int((opacity >= 0.5).sum()))
    _cover_some(rng, image, owner, boxes, sources.photographs)
    kept, seen = _seen(owner, boxes, ink)
    quality = int(rng.integers(QUALITY[0], QUALITY[1] + 1))
    image = _worsen(rng, image)
    return ImageFile(image, np.array(labels, int)[kept], np.array(seen, int).reshape(-1, 4), quality=quality)


def _draw_size(rng: np.random.Generator, digits: int) -> float:
    """The longer side in pixels, evenly in the logarithm; many digits leave room for smaller ones only."""
    high = min(DIGIT_SIZE[1] - 4, 1.6 * SCENE_SIZE / np.sqrt(digits))
    return float(np.exp(rng.uniform(np.log(DIGIT_SIZE[0] + 0.5), np.log(high))))


def _find_place(rng: np.random.Generator, taken: list[Box], shape: tuple[int, ...]) -> Box | None:
    """Look for a place for a digit [h, w]; four in ten may cover a part of others, at most half of the smaller box."""
    height, width = shape
    limit = rng.uniform(0.05, 0.5) if rng.random() < 0.4 else 0.05
    for _ in range(PLACES):
        x1, y1 = int(rng.integers(SCENE_SIZE - width + 1)), int(rng.integers(SCENE_SIZE - height + 1))
        box = (x1, y1, x1 + width, y1 + height)
        if all(cover(box, other) <= limit for other in taken):
            return box
    return None


def _cover_some(
    rng: np.random.Generator,
    image: np.ndarray,
    owner: np.ndarray,
    boxes: list[Box],
    photographs: tuple[np.ndarray, ...],
) -> None:
    """Put up to four pieces of photographs or of one colour over parts of digits: in place, both arrays."""
    for _ in range(int(rng.integers(0, 5)) if boxes else 0):
        x1, y1, x2, y2 = boxes[rng.integers(len(boxes))]
        width, height = x2 - x1, y2 - y1
        share = rng.uniform(0.15, 0.7)
        side = int(rng.integers(4))  # the piece comes from the left, the right, above or below
        if side < 2:
            middle = x1 + share * width / 2 if side == 0 else x2 - share * width / 2
            left, right = middle - share * width / 2 - 2, middle + share * width / 2 + 2
            top, bottom = y1 - rng.uniform(0, 0.5) * height, y2 + rng.uniform(0, 0.5) * height
        else:
            middle = y1 + share * height / 2 if side == 2 else y2 - share * height / 2
            top, bottom = middle - share * height / 2 - 2, middle + share * height / 2 + 2
            left, right = x1 - rng.uniform(0, 0.5) * width, x2 + rng.uniform(0, 0.5) * width
        left, top = max(int(left), 0), max(int(top), 0)
        right, bottom = min(int(right), SCENE_SIZE), min(int(bottom), SCENE_SIZE)
        image[top:bottom, left:right] = _piece(rng, (bottom - top, right - left), photographs)
        owner[top:bottom, left:right] = -1


def _piece(rng: np.random.Generator, shape: tuple[int, int], photographs: tuple[np.ndarray, ...]) -> np.ndarray:
    """A piece [h, w, 3] of a photograph, or one colour [3]; float32."""
    if rng.random() < 0.4:
        return rng.uniform(0, 255, 3).astype(np.float32)
    photo = photographs[rng.integers(len(photographs))]
    height, width = min(shape[0], photo.shape[0]), min(shape[1], photo.shape[1])
    top, left = int(rng.integers(photo.shape[0] - height + 1)), int(rng.integers(photo.shape[1] - width + 1))
    piece = photo[top : top + height, left : left + width]
    return cv2.resize(piece, (shape[1], shape[0])).astype(np.float32)


def _seen(owner: np.ndarray, boxes: list[Box], ink: list[int]) -> tuple[list[int], list[Box]]:
    """The digits that keep their labels, and the box around what is seen of each."""
    kept, seen = [], []
    for number, (x1, y1, x2, y2) in enumerate(boxes):
        mask = owner[y1:y2, x1:x2] == number
        if mask.sum() < LEAST_SEEN * ink[number]:
            continue
        left, top, right, bottom = extent(mask)
        if max(right - left, bottom - top) < DIGIT_SIZE[0]:
            continue
        kept.append(number)
        seen.append((x1 + left, y1 + top, x1 + right, y1 + bottom))
    return kept, seen


def _worsen(rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
    """Blur some images, out of focus or by motion, and add noise; uint8."""
    kind = rng.random()
    if kind < 0.25:
        image = cv2.GaussianBlur(image, (0, 0), rng.uniform(0.5, 1.5))
    elif kind < 0.4:
        length, turn = int(rng.integers(3, 10)), rng.uniform(0, 180)
        line = np.zeros((length, length), np.float32)
        line[length // 2] = 1
        middle = (length - 1) / 2
        line = cv2.warpAffine(line, cv2.getRotationMatrix2D((middle, middle), turn, 1.0), (length, length))
        image = cv2.filter2D(image, -1, line / line.sum())
    noise = rng.standard_normal(image.shape[:2], np.float32) * np.float32(rng.uniform(0, 12))
    return np.clip(image + noise[..., None], 0, 255).astype(np.uint8)
