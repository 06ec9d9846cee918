"""Images → what networks take, beside NumPy."""

import cv2
import numpy as np
import pytest
import torch

from utils.core.input_spec import FLOATS, InputSpec
from utils.runners.base import as_feed


def every_pixel() -> torch.Tensor:
    """Each value in each channel, `[2, 3, 16, 16]`, in another order."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(256, generator=generator) for _ in range(6)]).view(2, 3, 16, 16).byte()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_floats_are_fractions_of_255(dtype):
    images = every_pixel()
    expected = (images.numpy().astype(np.float64) / 255).astype(dtype)
    found = as_feed(images, FLOATS, dtype)
    np.testing.assert_allclose(found.numpy(), expected, rtol=2**-23 if dtype == "float32" else 2**-10)
    assert str(found.dtype) == f"torch.{dtype}"


def test_bytes_stay_bytes():
    images = every_pixel()
    assert as_feed(images, InputSpec("uint8"), "uint8") is images
    last = as_feed(images, InputSpec("uint8", "nhwc"), "uint8")
    np.testing.assert_array_equal(last.numpy(), images.numpy().transpose(0, 2, 3, 1))


@pytest.mark.parametrize("grey", [True, False])
def test_a_network_of_one_channel_gets_opencvs_grey(grey):
    """The same grey as OpenCV's to the last bit; grey pictures stay what they are."""
    images = every_pixel()[:, :1].repeat(1, 3, 1, 1) if grey else torch.randint(256, (2, 3, 256, 256)).byte()
    expected = np.stack([cv2.cvtColor(image.numpy().transpose(1, 2, 0), cv2.COLOR_RGB2GRAY) for image in images])
    found = as_feed(images, InputSpec("uint8", "nhwc", 1), "uint8")
    np.testing.assert_array_equal(found.numpy(), expected[..., None])
    floats = as_feed(images, InputSpec(channels=1), "float32")[:, 0]
    np.testing.assert_array_equal(floats.numpy(), expected / np.float32(255))
    if grey:
        assert torch.equal(found[..., 0], images[:, 0])
