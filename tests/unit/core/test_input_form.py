"""The form in which a file takes images: what it says, what is read of it, what cannot be."""

from __future__ import annotations

import pytest

from utils.core.errors import InputError
from utils.core.input_form import FLOATS, InputForm


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (FLOATS, "float32"),
        (FLOATS, "float16"),
        (InputForm("uint8"), "uint8"),
        (InputForm("uint8", "nhwc"), "uint8"),
        (InputForm("int8", scale=129 / 2**14), "int8"),
    ],
)
def test_a_file_says_its_form(form, dtype):
    assert InputForm.of_file(form.metadata(), dtype, form.own((1, 3, 64, 96))) == form


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("float32", (None, 3, None, None), FLOATS),
        ("uint8", (1, 3, 64, 96), InputForm("uint8")),
        ("uint8", (None, None, None, 3), InputForm("uint8", "nhwc")),
        ("uint8", (None, 3, 64, 3), InputForm("uint8")),
        ("int8", (1, 3, 64, 96), InputForm("int8")),  # of an unknown scale
        ("int64", (1, 10), FLOATS),  # no images: refused where images are wanted
    ],
)
def test_files_of_others_are_what_their_type_and_shape_are(dtype, shape, expected):
    assert InputForm.of_file({}, dtype, shape) == expected


@pytest.mark.parametrize(
    ("entries", "dtype", "message"),
    [
        ({"input_form": "int4"}, "uint8", "metadata say that its input is int4, and it is uint8"),
        ({"input_form": "uint8"}, "float32", "metadata say that its input is uint8, and it is float32"),
        ({"input_form": "float"}, "int8", "metadata say that its input is float, and it is int8"),
        (
            {"input_form": "half"},
            "float16",
            "an input of 'half' in 'nchw' is unknown; there is float, uint8, int8 in nchw",
        ),
        ({"input_form": "uint8", "input_layout": "chwn"}, "uint8", "an input of 'uint8' in 'chwn' is unknown"),
        ({"input_form": "int8", "input_layout": "nhwc"}, "int8", "metadata say that its input is int8 in nhwc"),
        ({"input_layout": "nhwc"}, "float16", "metadata say that its input is float in nhwc"),
        *[
            (
                {"input_form": "int8", "input_scale": scale},
                "int8",
                f"input_scale is '{scale}'; expected a positive number",
            )
            for scale in ("much", "-0.1", "nan", "inf")
        ],
    ],
)
def test_files_that_contradict_themselves(entries, dtype, message):
    with pytest.raises(InputError, match=message.replace("(", "\\(")) as caught:
        InputForm.of_file(entries, dtype)
    assert "\n" not in str(caught.value)


def test_shapes_in_either_order():
    bytes_last = InputForm("uint8", "nhwc")
    assert bytes_last.own((8, 3, 64, 96)) == (8, 64, 96, 3)
    assert bytes_last.nchw((8, 64, 96, 3)) == (8, 3, 64, 96)
    assert FLOATS.own((8, 3, 64, 96)) == FLOATS.nchw((8, 3, 64, 96)) == (8, 3, 64, 96)


def test_forms_in_words():
    assert str(FLOATS) == "FP32 or FP16 in 0..1"
    assert str(InputForm("int8", scale=0.0078125)) == "INT8 values, round(pixel / 255 / 0.0078125)"
