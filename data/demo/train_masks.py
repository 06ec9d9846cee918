#!/usr/bin/env python3
"""Run upstream's segment/train.py for the demo model. data/demo/train_demo.sh --segments calls this.

    python scripts/run_upstream.py data/demo/train_masks.py DETECTOR.pt START.pt --cfg FILE [options of train.py]

Two things differ from running segment/train.py itself:

- It starts from START.pt, written here: the network of --cfg with the weights of a detector, its head included.
  Upstream matches weights by name, and the head's number is another one: it would find the other layers only.
- A pixel of the grid of masks belongs to a digit where at least three of the four image pixels in its middle do. So
  upstream's segment/val.py decides, but in training two are enough. Strokes are a few pixels wide: on the demo set,
  masks that are right by the second rule have a mean IoU of 0.85 with the truth of the first.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


def grid_mask(
    size: tuple[int, int], polygons: list[np.ndarray], color: int = 1, downsample_ratio: int = 1
) -> np.ndarray:
    """Fill a polygon as upstream's ``polygon2mask`` does, and take it to the grid as its ``segment/val.py`` does.

    Args:
        size: height and width of the image, multiples of the ratio.
        polygons: one, x1, y1, x2, y2, ... in pixels, [2 n].
        downsample_ratio: image pixels per pixel of the grid and axis, 1 or 4.

    Returns:
        uint8 [h, w], ``color`` where it is set.
    """
    from utils.evaluation.batch import filled, on_grid

    (points,) = (np.asarray(polygon).reshape(-1, 2) for polygon in polygons)
    mask = filled(points, size)
    return (mask if downsample_ratio == 1 else on_grid(mask)).astype(np.uint8) * np.uint8(color)


def write_start(detector: Path, description: Path, start: Path) -> None:
    """Write a segmentation network with a detector's weights, layer by layer, and head to head.

    Raises:
        InputError: a file cannot be read, or a layer of the detector has no counterpart.
    """
    from dataclasses import replace

    from models import reparam
    from utils import upstream
    from utils.core.errors import InputError

    source = upstream.load_float(detector)
    model = upstream.build_model(description, source.nc)
    before, head = (f"model.{len(network.model) - 1}." for network in (source.model, model))
    state = {name.replace(before, head, 1) if name.startswith(before) else name: value
             for name, value in source.model.state_dict().items()}  # fmt: skip
    if unknown := model.load_state_dict(state, strict=False).unexpected_keys:
        raise InputError(f"{description} has no {unknown[0]}, which {detector} has; take the description made for it")
    model.names = source.names
    reparam.save_converted(start, replace(source, model=model))


def main() -> None:
    from utils.core.errors import InputError

    if len(sys.argv) < 5 or "--cfg" not in sys.argv[3:-1]:
        raise InputError("name DETECTOR.pt, START.pt and --cfg FILE; data/demo/train_demo.sh --segments does")
    detector, start, *options = sys.argv[1:]
    write_start(Path(detector), Path(options[options.index("--cfg") + 1]), Path(start))
    import utils.segment.dataloaders as dataloaders

    dataloaders.polygon2mask = grid_mask
    script = ROOT / "segment" / "train.py"
    sys.argv = [str(script), "--weights", start, *options]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
