"""The form in which a file takes images: what it says, what is read of it, what cannot be."""

import pytest
from torch import nn

from utils.core.errors import InputError
from utils.core.input_spec import FLOATS, InputSpec, channels_of


@pytest.mark.parametrize(
    ("form", "dtype"),
    [(FLOATS, "float32"), (FLOATS, "float16"), (InputSpec("uint8"), "uint8"), (InputSpec("uint8", "nhwc", 1), "uint8")],
)
def test_a_file_says_its_form(form, dtype):
    shape = (1, form.channels, 64, 96)
    assert InputSpec.of_file(form.metadata(), dtype, form.own(shape)) == form
    assert form.nchw(form.own(shape)) == shape
    assert form.own(shape)[-1] == (form.channels if form.layout == "nhwc" else 96)
    assert form.metadata()["channels"] == str(form.channels)


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("float32", (None, 3, None, None), FLOATS),
        ("uint8", (1, 3, 64, 96), InputSpec("uint8")),
        ("uint8", (None, None, None, 3), InputSpec("uint8", "nhwc")),
        ("uint8", (None, 3, 64, 3), InputSpec("uint8")),
        ("float16", (None, 1, None, None), InputSpec(channels=1)),
        ("uint8", (1, 64, 96, 1), InputSpec("uint8", "nhwc", 1)),
        ("int64", (1, 10), FLOATS),  # no images: refused where images are wanted
    ],
)
def test_files_of_others_are_what_their_type_and_shape_are(dtype, shape, expected):
    assert InputSpec.of_file({}, dtype, shape) == expected


@pytest.mark.parametrize("entries", [{"input_form": "int8", "input_scale": "0.0079"}, {}])  # of 1.0, and of others
def test_files_that_take_int8(entries):
    with pytest.raises(InputError, match="use --input uint8, and export it again"):
        InputSpec.of_file(entries, "int8")


def test_channels_are_those_of_the_first_convolution():
    networks = [nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(channels, 8, 1), nn.Conv2d(8, 3, 1)) for channels in (1, 3, 4)]
    assert [channels_of(network) for network in networks[:2]] == [1, 3]
    with pytest.raises(InputError, match="4 channels"):
        channels_of(networks[2])
