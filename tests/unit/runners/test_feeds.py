"""Images → what networks take, beside NumPy."""

from __future__ import annotations

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
