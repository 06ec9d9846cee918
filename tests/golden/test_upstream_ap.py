"""AP of the demo models is what upstream's own val.py and segment/val.py give on the same images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from qat_runs import write_small_set

from utils import upstream
from utils.evaluation.data_yaml import load_data
from utils.evaluation.loop import EvalConfig, evaluate
from utils.runners.pytorch import TorchRunner
from utils.upstream.checkout import import_upstream


def network(weights: Path) -> Any:
    return upstream.call_fused(upstream.fuse(upstream.load_float(weights).model))


def of_upstream(program: Any, create_dataloader: Any, model: Any, data: Any, rect: bool, **more: Any) -> list[float]:
    (path,) = data.paths("val")
    content = {"nc": data.nc, "names": dict(data.names), "val": path, "path": str(data.root)}
    loader = create_dataloader([path], 320, 32, 32, False, pad=0.5, rect=rect, workers=0)[0]
    with torch.inference_mode():
        return list(
            program.run(content, model=model, dataloader=loader, batch_size=32, imgsz=320, plots=False, **more)[0]
        )


@pytest.mark.parametrize("rect", [False, True])
def test_boxes(demo_data: Path, demo_weights: Path, tmp_path: Path, rect: bool) -> None:
    import_upstream()
    import val

    from utils.dataloaders import create_dataloader

    data, model = load_data(write_small_set(tmp_path, demo_data, val=60, spread=True)), network(demo_weights)
    precision, recall, ap50, ap, *_ = of_upstream(
        val, create_dataloader, model, data, rect, conf_thres=0.001, iou_thres=0.7
    )
    config = EvalConfig(imgsz=320, rect=rect, workers=0)
    found = evaluate(TorchRunner(model, "cpu"), data, config, progress=False)
    assert ap > 0.6
    assert [found.ap, found.ap50, found.precision, found.recall] == pytest.approx(
        [ap, ap50, precision, recall], abs=1e-6
    )


def test_masks(checkout: Path, start: Any, tmp_path: Path) -> None:
    import_upstream()
    import segment.val

    from utils.segment.dataloaders import create_dataloader

    assert start("data/demo/make_digits.py", "--segments", tmp_path / "set", "--train", 20, "--val", 40).returncode == 0
    data, model = load_data(tmp_path / "set/data.yaml"), network(checkout / "data/demo/gelan-digits-seg.pt")
    expected = of_upstream(segment.val, create_dataloader, model, data, False)[:8]
    found = evaluate(TorchRunner(model, "cpu"), data, EvalConfig(imgsz=320, workers=0), progress=False)
    ours = [value for part in (found, found.masks) for value in (part.precision, part.recall, part.ap50, part.ap)]
    assert expected[7] > 0.4
    assert ours == pytest.approx(expected, abs=1e-6)
