"""`--hyp`: numbers within bounds of what the augmentation reads; anything else is one line that names the key."""

import pytest

from utils.core.errors import InputError
from utils.jobs.inputs import Augmentation, read_hyp

GOOD = dict.fromkeys(Augmentation.model_fields, 0.0)


def written(path, **changes):
    path.write_text("".join(f"{key}: {value}\n" for key, value in {**GOOD, "lr0": "text", **changes}.items()))
    return path


@pytest.mark.parametrize(
    "value", ["'half'", "[1]", "{a: 1}", "true", "null", ".nan", ".inf", "-1", "1000", "2020-01-01"]
)
@pytest.mark.parametrize("name", ["mosaic", "degrees", "perspective"])
def test_hyp_holds_numbers_within_bounds(tmp_path, name, value):
    with pytest.raises(InputError, match=f"--hyp .*hyp.yaml: {name} is .*; expected ") as caught:
        read_hyp(written(tmp_path / "hyp.yaml", **{name: value}))
    assert "\n" not in str(caught.value)


def test_hyp_gives_what_the_augmentation_reads(tmp_path):
    assert read_hyp(written(tmp_path / "hyp.yaml")) == GOOD
