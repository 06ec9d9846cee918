"""`--hyp`: numbers within bounds of what the augmentation reads; anything else is one line that names the key."""

import pytest

from utils.core.errors import InputError
from utils.jobs.inputs import Augmentation, read_hyp

GOOD = dict.fromkeys(Augmentation.model_fields, 0.0)


@pytest.mark.parametrize(
    "value", ["'half'", "[1]", "{a: 1}", "true", "null", ".nan", ".inf", "-1", "1000", "2020-01-01"]
)
@pytest.mark.parametrize("name", ["mosaic", "degrees", "perspective"])
def test_hyp_holds_numbers_within_bounds(tmp_path, name, value):
    path = tmp_path / "hyp.yaml"
    path.write_text("\n".join(f"{key}: {0.0 if key != name else value}" for key in GOOD) + "\nlr0: text\n")
    with pytest.raises(InputError) as caught:
        read_hyp(path)
    message = str(caught.value)
    assert message.startswith(f"--hyp {path}: {name} is ")
    assert "; expected " in message
    assert "\n" not in message


def test_hyp_gives_what_the_augmentation_reads(tmp_path):
    path = tmp_path / "hyp.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in GOOD.items()) + "\nlr0: 0.01\n")
    assert read_hyp(path) == GOOD
