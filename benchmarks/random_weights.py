#!/usr/bin/env python3
"""Write a checkpoint of one of upstream's networks with random weights, and a dataset of noise: for speed alone.

python benchmarks/random_weights.py models/detect/gelan-c.yaml runs/placement/gelan-c    # in a patched checkout
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import cv2
import numpy as np
import torch
import yaml
from torch import nn

sys.path.insert(0, os.getcwd())  # the checkout: models/ and utils/ are upstream's and ours

from utils import upstream


def network(config: Path) -> nn.Module:
    """Upstream's network; its batch norms look as if they had seen data, so that activations keep their magnitude."""
    torch.manual_seed(0)
    model = upstream.build_model(config)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    model.names = {index: f"class {index}" for index in range(model.model[-1].nc)}
    return model


if __name__ == "__main__":
    folder, model = Path(sys.argv[2]).resolve(), network(Path(sys.argv[1]))
    noise = folder / "noise"
    for kind in ("images", "labels"):
        (noise / kind).mkdir(parents=True, exist_ok=True)
    image = np.random.default_rng(0).integers(0, 256, (320, 320, 3), dtype=np.uint8)
    cv2.imwrite(str(noise / "images/0.png"), image)
    (noise / "labels/0.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    content = {"path": str(noise), "train": "images", "val": "images", "names": model.names}
    (noise / "data.yaml").write_text(yaml.safe_dump(content))
    torch.save({"epoch": -1, "model": model, "ema": None}, folder / "float.pt")
