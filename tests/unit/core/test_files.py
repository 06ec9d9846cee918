"""Files that programs write."""

from __future__ import annotations

import json

import torch

from utils.core.files import save_torch


def test_equal_content_gives_equal_bytes(tmp_path):
    content = {"head": "int8", "kinds": ["int8", "float", ("int8", 2)], "rates": {0: 1e-6}, "weight": torch.ones(3)}
    for number, texts in enumerate((content["kinds"], json.loads(json.dumps(["int8", "float"])))):
        same = {**content, "kinds": [*texts[:2], ("".join(["in", "t8"]), 2)]}
        save_torch(same, tmp_path / f"{number}.pt")
    assert (tmp_path / "0.pt").read_bytes() == (tmp_path / "1.pt").read_bytes()
    found = torch.load(tmp_path / "1.pt", weights_only=True)
    assert found.pop("weight").tolist() == [1, 1, 1]
    assert found == {key: value for key, value in content.items() if key != "weight"}
