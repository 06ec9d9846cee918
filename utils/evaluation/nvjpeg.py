"""JPEGs that a GPU decodes, by torchvision with NVIDIA's nvJPEG.

A loading process reads the file and looks at its header. What nvJPEG does not take, or would see otherwise, OpenCV
decodes there as ever: files that are turned by EXIF, grey, CMYK, RGB without conversion, or cut off. Colour is stored
in fewer pixels than brightness; nvJPEG spreads it over them otherwise than OpenCV, so that AP is not exactly that of
upstream's pixels.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from utils.core.errors import InputError
from utils.core.light_torchvision import torchvision
from utils.evaluation.batch import Batch, EncodedImage
from utils.evaluation.device_letterbox import place
from utils.evaluation.images import BROKEN, orientation
from utils.evaluation.letterbox import FILL, placed

logger = logging.getLogger(__name__)

END = b"\xff\xd9"  # of a JPEG
CONVERTED = 1  # Adobe's mark of colours in YCbCr
RGB_LETTERS = tuple(b"RGB")  # names of components that are not in YCbCr


def read_jpeg(path: str, fit: tuple[int, int], shape: tuple[int, int]) -> EncodedImage | None:
    """A JPEG that nvJPEG decodes as OpenCV does but for rounding; None for any other file.

    Args:
        fit, shape: see `letterbox.placed`.
    """
    try:
        content = np.fromfile(path, np.uint8)
        with Image.open(io.BytesIO(content)) as image:  # reads the header only
            if not _is_usual(image) or content[-len(END) :].tobytes() != END:
                return None
            width, height = image.size
    except BROKEN:
        return None
    return EncodedImage(torch.from_numpy(content), placed((height, width), fit, shape), shape)


def _is_usual(image: Image.Image) -> bool:
    """Three components in YCbCr, shown as they are stored."""
    if image.format != "JPEG" or image.mode != "RGB":
        return False
    letters = tuple(component[0] for component in getattr(image, "layer", ()))
    converted = image.info.get("adobe_transform", CONVERTED) == CONVERTED and letters != RGB_LETTERS
    return converted and orientation(image) in (None, 1)


def check_nvjpeg(device: torch.device) -> None:
    """Decode one image.

    Raises:
        InputError: the device is no GPU, or the installed torchvision cannot do it.
    """
    if device.type != "cuda":
        raise InputError(f"--nvjpeg decodes images on a GPU, and the network runs on the {device.type}; leave it out")
    content = io.BytesIO()
    Image.new("RGB", (16, 16)).save(content, "JPEG")
    try:
        decode([torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)], device)
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputError(
            f"--nvjpeg needs a torchvision that decodes lists of JPEGs by nvJPEG, as 0.20 to 0.29 do; "
            f"{torchvision.__version__} says: {reason}"
        ) from error


def decode(files: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The contents of JPEG files, uint8 `[bytes]` on the CPU → RGB, uint8 `[3, H, W]` on `device`."""
    mode = torchvision.io.ImageReadMode.RGB
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # whose stream waits for the images
        found: list[Tensor] = torchvision.io.decode_jpeg(list(files), mode=mode, device=device)
    return found


@dataclass
class JpegDecoder:
    """Makes of batches with encoded images such with letterboxed ones, on the network's device.

    Attributes:
        by_opencv: gives the batch of these paths, decoded by OpenCV: where nvJPEG fails.
    """

    device: torch.device
    by_opencv: Callable[[Sequence[str]], Batch]
    told: bool = False

    def decode(self, batch: Batch) -> tuple[Batch, list[Tensor]]:
        """A batch on the device, and the pixels of its encoded images, uint8 `[3, H, W]`, in their order."""
        pixels: list[Tensor] = []
        if batch.jpegs is not None:
            try:
                pixels = decode(batch.jpegs.files, self.device)
                if [one.shape[1:] for one in pixels] != [box.original for box in batch.jpegs.boxes]:
                    raise RuntimeError("an image has another size than its header says")
            except RuntimeError as error:
                self._tell(batch, str(error))
                batch, pixels = self.by_opencv(batch.paths), []
        return replace(batch, images=batch.images.to(self.device, non_blocking=True)), pixels

    def letterboxed(self, batch: Batch, pixels: Sequence[Tensor]) -> Batch:
        """What `decode` gives, with all images in one tensor."""
        if batch.jpegs is None:
            return batch
        shape = (len(batch), *batch.images.shape[1:])
        images = torch.full(shape, FILL[0], dtype=torch.uint8, device=self.device)
        if len(batch.images):
            images[[n for n in range(len(batch)) if n not in batch.jpegs.positions]] = batch.images
        for position, one, box in zip(batch.jpegs.positions, pixels, batch.jpegs.boxes, strict=True):
            place(one, box, images[position])
        return batch.with_images(images)

    def _tell(self, batch: Batch, reason: str) -> None:
        if not self.told:
            logger.warning(
                "nvJPEG fails in a batch of %d images from %s on (%s); OpenCV decodes this batch, and others in which "
                "it fails", len(batch), batch.paths[0], reason.strip().partition("\n")[0],
            )  # fmt: skip
        self.told = True
