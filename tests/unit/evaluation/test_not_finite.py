"""A network that gives NaN or infinity: said in the log and the table, and its AP is compared with nothing."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn

from utils.evaluation.data_yaml import load_data
from utils.evaluation.loop import EvalConfig, evaluate
from utils.evaluation.results import result_table
from utils.jobs.evaluate import Measurer
from utils.reports.schema import Report
from utils.reports.tables import terminal_table
from utils.runners.pytorch import TorchRunner

CONFIG = EvalConfig(imgsz=32, batch_size=2, workers=0)


class Answers(nn.Module):
    """One certain box for each image, and in images brighter than half a value that is no number."""

    def __init__(self, bad: float) -> None:
        super().__init__()
        self.bad, self.names, self.stride = bad, {0: "cat"}, torch.tensor([32.0])

    def forward(self, x):
        rows = torch.tensor([16.0, 16, 8, 8, 0.9]).view(1, 5, 1).repeat(len(x), 1, 3)
        rows[x.mean((1, 2, 3)) > 0.5, :, 2] = self.bad
        return rows


@pytest.fixture
def data(tmp_path):
    from PIL import Image

    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    for index, brightness in enumerate([0, 255, 255, 0, 0]):
        Image.new("RGB", (32, 32), (brightness,) * 3).save(tmp_path / f"images/{index}.png")
        (tmp_path / f"labels/{index}.txt").write_text("0 0.5 0.5 0.25 0.25\n")
    (tmp_path / "data.yaml").write_text(f"path: {tmp_path}\ntrain: images\nval: images\nnames: {{0: cat}}\n")
    return load_data(tmp_path / "data.yaml")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_outputs_that_are_no_numbers_are_counted_and_marked(data, caplog, bad):
    with caplog.at_level(logging.WARNING), TorchRunner(Answers(bad), "cpu") as runner:
        result = evaluate(runner, data, CONFIG, progress=False, name="net")
    assert result.not_finite == 2
    assert result.mark == "NaN or infinity for 2 of 5 images"
    assert "the network net gives NaN or infinity for 2 of 5 images" in caplog.text
    assert any("NaN or infinity for 2 of 5 images" in line for line in result_table(result, per_class=False))


def test_a_report_marks_the_row_and_compares_it_with_nothing(data, tmp_path):
    file = tmp_path / "net.pt"
    file.write_bytes(b"x")
    measurer, report = Measurer(data, torch.device("cpu"), CONFIG), Report(command="command")
    for stage, bad in (("float", 0.0), ("PTQ", math.nan)):
        report.rows.append(measurer.row(stage, file, measurer.measure(Answers(bad), stage), 1.0))
    assert [row.ap_with for row in report.rows] == ["", "NaN or infinity for 2 of 5 images"]
    lines = terminal_table(report).splitlines()
    row = next(line for line in lines if line.startswith("PTQ"))
    assert " - " in row
    assert any("NaN or infinity for 2 of 5 images" in line for line in lines if line.startswith("[2]"))
