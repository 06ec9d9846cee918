"""Items that are made before they are asked for."""

from __future__ import annotations

import pytest

from utils.core.made_ahead import made_ahead


@pytest.mark.parametrize("ahead", [0, 1, 3, 9])
def test_items_come_in_order_when_so_many_more_were_made(ahead):
    made = []
    items = (made.append(number) or number for number in range(5))
    for number, item in enumerate(made_ahead(items, ahead)):
        assert item == number
        assert len(made) == min(number + 1 + ahead, 5)
    assert made == list(range(5))
    assert list(made_ahead([], ahead)) == []
