"""The demo models' numbers as 1.0 computed them: ranges, losses and AP of PTQ and QAT, detections and masks.

`UPDATE_GOLDEN=1` writes tests/golden/demo.json anew.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from golden import golden
from qat_runs import write_small_set

from utils.evaluation.data_yaml import load_data
from utils.evaluation.images import find_images

# As good as equal; on other processors than x86, or with another torch, kernels round in another order.
ALIKE = {"rel": 2e-5, "abs": 5e-7}
SIMILAR = {"rel": 0.05, "abs": 0.004}


def check(name: str, found: Any) -> None:
    """Compare with the golden numbers of that name."""
    version = golden("demo.json", "torch", torch.__version__).split("+")[0]
    exact = torch.__version__.split("+")[0] == version and hasattr(torch.backends, "mkldnn")
    limits = ALIKE if exact and torch.backends.mkldnn.is_available() else SIMILAR
    assert same(found, golden("demo.json", name, found), limits), found


def same(found: Any, known: Any, limits: dict[str, float]) -> bool:
    """Whether two nested values have the same fractions, within limits, and otherwise are equal."""
    if isinstance(known, dict):
        return found.keys() == known.keys() and all(same(found[key], known[key], limits) for key in known)
    if isinstance(known, list):
        return len(found) == len(known) and all(same(*pair, limits) for pair in zip(found, known, strict=True))
    return bool(found == (pytest.approx(known, **limits) if isinstance(known, float) else known))


def ranges_of(path: Path) -> dict[str, float]:
    """amax of every activation scale, by name; the largest of a weight's channels."""
    state = torch.load(path, weights_only=True)["quantized_state"]
    return {key: float(value.max()) for key, value in sorted(state.items()) if key.endswith("_amax")}


WORDS = ("--weights", "data/demo/gelan-digits.pt", "--imgsz", 320, "--workers", 0, "--device", "cpu",
         "--no-eval-origin", "--percentile", 99.999)  # fmt: skip


@pytest.mark.timeout(900)
def test_ptq_on_all_images(run, demo_data, tmp_path):
    """The ranges of one method, and AP with them."""
    run("qat.py", "quantize", *WORDS, "--data", demo_data, "--ptq-only", "--project", tmp_path)
    (row,) = json.loads((tmp_path / "exp/report.json").read_text())["rows"]
    (ptq,) = (tmp_path / "exp/weights").glob("ptq_ap_*.pt")
    check("ptq", {"ap": [row[key] for key in ("ap", "ap50", "precision", "recall")], "ranges": ranges_of(ptq)})


def test_twenty_steps_of_qat(run, demo_data, tmp_path):
    """Losses and ranges; what is evaluated is a few images."""
    few = load_data(demo_data)
    images = find_images(few.paths("val"))[:4]
    (tmp_path / "val.txt").write_text("\n".join(images))
    content = {"path": str(tmp_path), "train": few.paths("train"), "val": "val.txt", "names": dict(few.names)}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(content))
    run("qat.py", "quantize", *WORDS, "--data", tmp_path / "data.yaml", "--no-eval-ptq", "--epochs", 1, "--iters", 20,
        "--imgsz", 160, "--batch-size", 8, "--calib-images", 200, "--project", tmp_path)  # fmt: skip
    (epoch,) = json.loads((tmp_path / "exp/report.json").read_text())["history"]
    ranges = ranges_of(tmp_path / "exp/weights/qat_best_gelan-digits.pt")
    check("qat", {"loss": epoch["loss"], "held_out": epoch["held_out"], "ranges": ranges})


def found_in(file: Path) -> list[list[Any]]:
    """Image, class, score, box in pixels and size of the mask of each confident detection in a predictions file."""
    from pycocotools import mask

    rows = []
    for one in json.loads(file.read_text()):
        if one["score"] > 0.25:
            size = [float(np.sum(mask.decode(one["segmentation"])))] if "segmentation" in one else []
            rows.append([one["image_id"], one["category_id"], one["score"], *map(float, one["bbox"]), *size])
    return sorted(rows)


@pytest.mark.parametrize("kind", ["detections", "masks"])
def test_ten_images(run, demo_data, tmp_path, kind):
    if kind == "masks":
        run("data/demo/make_digits.py", "--segments", tmp_path / "set", "--train", 20, "--val", 10)
        weights, data = "data/demo/gelan-digits-seg.pt", tmp_path / "set/data.yaml"
    else:
        weights, data = WORDS[1], write_small_set(tmp_path / "set", demo_data, val=10)
    words = ("--weights", weights, "--data", data, "--imgsz", 320, "--workers", 0, "--device", "cpu")
    run("qat.py", "eval", *words, "--batch-size", 10, "--save-json", "--project", tmp_path)
    (row,) = json.loads((tmp_path / "exp/report.json").read_text())["rows"]
    (file,) = (tmp_path / "exp").glob("*predictions.json")
    ap = [row[key] for key in ("ap", "ap50", "mask_ap", "mask_ap50") if row.get(key) is not None]
    rows = found_in(file)
    assert (len(ap), len(rows) > 20) == (4 if kind == "masks" else 2, True)
    check(kind, {"ap": ap, "rows": rows})


def test_another_number_is_no_golden_number():
    assert same({"ap": [0.7 + 1e-7, 1]}, {"ap": [0.7, 1]}, ALIKE)
    for other in ({"ap": [0.7 + 1e-4, 1]}, {"ap": [0.7, 2]}, {"ap": [0.7]}, {"other": [0.7, 1]}):
        assert not same(other, {"ap": [0.7, 1]}, ALIKE)
