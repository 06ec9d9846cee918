"""Exported graphs, weakly typed: operators, attributes, constants, wiring, inputs and outputs, as 1.0 wrote them."""

import pytest
from golden_graphs import check_graphs
from known_networks import DEMO, DETECTORS


@pytest.mark.parametrize("name", [*DEMO, *DETECTORS])
def test_graphs_are_those_of_1_0(name, tmp_path, monkeypatch):
    check_graphs(name, "weak", tmp_path, monkeypatch)
