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

sys.path.insert(0, os.getcwd())  # the checkout: models/ and utils/ are upstream's and ours

from utils.jobs.cpu_speed import random_network

if __name__ == "__main__":
    folder, model = Path(sys.argv[2]).resolve(), random_network(Path(sys.argv[1]))
    noise = folder / "noise"
    for kind in ("images", "labels"):
        (noise / kind).mkdir(parents=True, exist_ok=True)
    image = np.random.default_rng(0).integers(0, 256, (320, 320, 3), dtype=np.uint8)
    cv2.imwrite(str(noise / "images/0.png"), image)
    (noise / "labels/0.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    content = {"path": str(noise), "train": "images", "val": "images", "names": model.names}
    (noise / "data.yaml").write_text(yaml.safe_dump(content))
    torch.save({"epoch": -1, "model": model, "ema": None}, folder / "float.pt")
