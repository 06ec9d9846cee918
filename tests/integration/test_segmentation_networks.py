"""Upstream's gelan-c-dseg and gelan-c-seg at 160 pixels through `qat.py`, with random weights and few images.

With a quarter of their channels: every layer, and runs that take seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from known_images import SQUARE
from known_masks import write_outlined_set
from random_networks import narrow, random_network, save_float

import qat
from models.quantize import checkpoint
from utils.reports.schema import Report

IMAGES = 2
SIDE = 160  # pixels


@pytest.fixture(autouse=True)
def _without_denormals() -> Iterator[None]:
    """Random networks are full of them, and slow with them."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("name", ["gelan-c-dseg", "gelan-c-seg"])
def test_a_network_of_upstreams_goes_through(name: str, upstream_yaml, tmp_path: Path):
    write_outlined_set(tmp_path / "set", IMAGES, SQUARE, ("class 0", "class 1"))
    weights = save_float(
        tmp_path / f"{name}.pt", random_network(narrow(upstream_yaml(f"segment/{name}")), nc=2, seed=4)
    )
    where = ["--data", tmp_path / "set/data.yaml", "--imgsz", SIDE, "--batch-size", 2]
    where += ["--workers", 0, "--device", "cpu"]

    def run(command: str, file: Path, *words: object) -> Path:
        project = tmp_path / command
        words = ("--weights", file, *where, *words, "--project", project)
        assert qat.main([command, *map(str, words)]) == 0
        return project / "exp"

    done = run("quantize", weights, "--calib-batches", 1, "--epochs", 1, "--iters", 1)
    report = Report.load(done / "report.json")
    assert [row.stage for row in report.rows] == ["float", "PTQ", "QAT"]
    assert all(row.mask_ap is not None for row in report.rows)
    (epoch,) = report.history
    assert None not in (epoch.ap, epoch.mask_ap)
    (best,) = (done / "weights").glob("qat_best_*.pt")
    model = checkpoint.load_quantized(best).model
    convolutions = model.quantization_plan.convolutions
    assert set(convolutions.values()) == {"int8"}
    prefixes = tuple(f"model.{len(model.model) - 1}.{part}." for part in ("proto", "cv4"))
    assert sum(path.startswith(prefixes) for path in convolutions) == (10 if name == "gelan-c-dseg" else 12)
    (row,) = Report.load(run("eval", best) / "report.json").rows
    assert (row.ap, row.mask_ap) == pytest.approx((report.rows[2].ap, report.rows[2].mask_ap), abs=1e-6)
    done = run("sensitive", weights, "--calib-batches", 1, "--num-image", 1)
    summary = json.loads((done / "summary-sensitive-analysis.json").read_text())
    assert "every AP here is the mean of box and mask AP" in summary["notes"]
    units = {row["unit"] for row in summary["rows"]}
    assert len(units) > 15
    assert (done / "recipe.yaml").is_file()
