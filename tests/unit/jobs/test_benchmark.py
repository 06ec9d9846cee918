"""Which networks take part, which rows they have, and what is said of those that cannot run."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from one_conv import METADATA, write_onnx
from tensorrt_stand_in import stand_in
from timed_networks import Detector

from utils.core.errors import InputError
from utils.core.text import aligned
from utils.jobs import benchmark
from utils.trt.benchmark import BenchmarkRow, Entry, compared
from utils.trt.engine_file import EngineNote
from utils.trt.timing import Figures, TimeStatistics

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))
import benchmark_trt

CPU = torch.device("cpu")


def row(model="c", batch=8, ms=4.0, **more):
    one = TimeStatistics(ms, ms, ms, ms, ms, ms, ms, 10)
    parts = {"latency": one, "compute": one}
    return BenchmarkRow(model, batch, more.pop("baseline", False), figures=Figures(1000 / ms, parts), **more)


def pytorch(precision="FP32", runtime="PyTorch", **more):
    return row(runtime=runtime, precision=precision, **more)


# PyTorch


def opened(model, shape=(2, 32, 64)):
    return benchmark.open_checkpoint(Path("a.pt"), model, shape, CPU)


def test_a_checkpoint_has_two_rows():
    model, calls = Detector(), []
    model.register_forward_pre_hook(lambda module, images: calls.append(images[0].dtype))
    found = opened(model)
    assert [(one.row.runtime, one.row.precision, one.row.error) for one in found] == [
        ("PyTorch", "FP32", ""), ("PyTorch", "FP16", "")
    ]  # fmt: skip
    assert calls == [torch.float32, torch.float16]
    assert model.model[0].weight.dtype == torch.float32
    execution = found[1].running[0]
    assert execution.buffers["images"].shape == (2, 3, 32, 64)
    assert execution.buffers["output0"].dtype == torch.float16
    assert [spec.name for spec in execution.outputs] == ["output0"]
    execution.buffers["images"].fill_(0.5)
    execution.run()
    half = execution.buffers["output0"]
    expected = model(torch.full((2, 3, 32, 64), 0.5))[0]
    torch.testing.assert_close(half.float(), expected, atol=0.01, rtol=0.01)


# rows


def test_speed_against_pytorch_in_fp32_eager():
    rows = [
        pytorch(ms=20.0), pytorch("FP16", ms=8.0),
        row("seg", ms=5.0, masks=True, precision="INT8"),
        row("c-int8", ms=2.0, precision="INT8"), row("c-int8", ms=1.6, contexts=2, precision="INT8"),
        BenchmarkRow("d", 8, False, error="no memory"),
    ]  # fmt: skip
    found = compared(rows)
    assert [one.speedup for one in found] == [1.0, 2.5, None, 10.0, 12.5, None]
    lines = aligned(*benchmark.benchmark_table(found))
    assert lines[0].split("  ")[0] == "model"
    assert "against PyTorch" in lines[0]
    assert [line.rsplit("  ", 1)[-1].strip() for line in lines[1:3]] == ["1.00x", "2.50x"]
    assert lines[-1].endswith("no memory")
    assert benchmark.fastest_lines(found)[-1] == "most images/s: c-int8, batch 8, 2 contexts: 5,000 at 1.600 ms"
    assert compared([row("c-int8", ms=2.0)])[0].speedup is None


def test_each_checkpoint_is_compared_with_itself_and_engines_with_the_first_of_their_kind():
    rows = [pytorch(model="a", ms=8.0), pytorch("FP16", model="b", ms=3.0), pytorch(model="b", ms=6.0),
            pytorch(model="m", ms=9.0, masks=True), row("e", ms=2.0), row("s", ms=3.0, masks=True)]  # fmt: skip
    assert [one.speedup for one in compared(rows)] == pytest.approx([1.0, 2.0, 1.0, 1.0, 4.0, 3.0])


def test_contexts_are_compared_with_as_many_of_the_baseline():
    rows = [row("f", ms=4.0, baseline=True), row("f", ms=3.0, baseline=True, contexts=2), row("q", ms=2.0),
            row("q", ms=1.0, contexts=2)]  # fmt: skip
    assert [one.gain for one in compared(rows)] == [None, None, pytest.approx(1.0), pytest.approx(2.0)]


def test_fastest_of_batches_and_contexts():
    rows = [
        row("a", 8, 2.0),
        row("a", 16, 3.0),
        row("a", 16, 2.8, contexts=2),
        row("b", 1, 1.0),
        BenchmarkRow("a", 64, False),
    ]
    assert benchmark.fastest_lines(rows) == [
        "most images/s: a, batch 16, 2 contexts: 5,714 at 2.800 ms", "most images/s: b, batch 1: 1,000 at 1.000 ms"
    ]  # fmt: skip
    assert benchmark.fastest_lines([row("a", 8)]) == []


@pytest.mark.parametrize(
    ("given", "sweep", "expected"),
    [(None, None, [1, 4, 8, 12]), ([3], None, [3]), (None, 64, [1, 2, 4, 8, 16, 32, 64]), (None, 1, [1]),
     (None, 12, [1, 2, 4, 8, 12]), ([8, 8, 4], None, [8, 4])],
)  # fmt: skip
def test_batch_sizes(given, sweep, expected):
    assert benchmark.batch_sizes(given, sweep) == expected


# the program


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """The program in `tmp_path`; `.pt` files are a network of a few channels. Returns (code, output, errors)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark_trt, "_trtexec", lambda: pytest.fail("a .pt takes part, or no GPU"))
    monkeypatch.setattr(benchmark.checkpoint, "kind", lambda file: "quantized" if "qat" in file.name else "float")
    monkeypatch.setattr(benchmark.upstream, "load_float", lambda file: SimpleNamespace(model=Detector(), imgsz=None))
    for name in ("fuse", "call_fused"):
        monkeypatch.setattr(benchmark.upstream, name, lambda model: model)

    def run(*words, size=("--imgsz", 32)):
        timing = ["--warmUp", 0, "--duration", 0.02, "--rounds", 2, *size]
        try:
            code = benchmark_trt.run([*map(str, [*words, *timing])])
        except SystemExit as ended:  # argparse's
            code = ended.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def rows_of(folder):
    return json.loads((folder / "runs/benchmark_trt/exp/benchmark.json").read_text())["rows"]


def test_on_a_cpu_onnx_files_run_in_onnx_runtime_beside_a_checkpoint(program, tmp_path):
    write_onnx(tmp_path / "int8.onnx", ("b", 3, "h", "w"), quantized=True)
    write_onnx(tmp_path / "float.onnx", ("b", 3, "h", "w"))
    write_onnx(tmp_path / "static.onnx", (2, 3, 32, 32))
    words = ("int8.onnx", "static.onnx", "a.pt", "--baseline", "float.onnx", "--device", "cpu", "--batch-size", 1, 2)
    code, out, err = program(*words)
    assert (code, err) == (1, "")  # of a static batch size, the other
    rows = rows_of(tmp_path)
    assert [(one["model"], one["runtime"], one["precision"]) for one in rows[:5]] == [
        ("a", "PyTorch", "FP32"), ("a", "PyTorch", "FP16"), ("float", "ONNX Runtime", "FP32"),
        ("int8", "ONNX Runtime", "INT8 in FP32"), ("static", "ONNX Runtime", "FP32"),
    ]  # fmt: skip
    assert [bool(one["error"]) for one in rows] == [False] * 4 + [True] + [False] * 5
    assert all(one["speedup"] > 0 for one in rows if not one["error"])
    assert rows[3]["gain"] is not None
    assert "against the baseline" in out
    assert out.count("int8.onnx: the file holds INT8, and ONNX Runtime computes its convolutions in FP32 on this") == 1
    assert "ONNX Runtime" in (tmp_path / "runs/benchmark_trt/exp/benchmark.md").read_text()
    assert list((tmp_path).glob("*.engine")) == []


def test_a_checkpoint_is_timed_at_the_size_of_the_files_beside_it(program, tmp_path, monkeypatch):
    seen, forward = set(), Detector.forward
    monkeypatch.setattr(Detector, "forward", lambda self, x: seen.add(tuple(x.shape[2:])) or forward(self, x))
    write_onnx(tmp_path / "static.onnx", (1, 3, 32, 64))
    write_onnx(tmp_path / "dynamic.onnx", metadata={**METADATA, "imgsz": "[32, 64]"})
    words = ("a.pt", "--device", "cpu", "--batch-size", 1)
    for files in (("static.onnx",), ("dynamic.onnx",), ("dynamic.onnx", "static.onnx")):
        assert program(*files, *words, size=())[0] == 0
        assert seen == {(32, 64)}
        seen.clear()
    assert json.loads((tmp_path / "runs/benchmark_trt/exp3/benchmark.json").read_text())["imgsz"] == [32, 64]
    assert program(*words, size=())[0] == 0
    assert seen == {(640, 640)}
    seen.clear()
    monkeypatch.setattr(benchmark.upstream, "load_float", lambda file: SimpleNamespace(model=Detector(), imgsz=96))
    assert program(*words, size=())[0] == 0
    assert seen == {(96, 96)}  # that of its training


def test_files_of_different_sizes_are_not_compared(tmp_path):
    for name, shape in (("a", (1, 3, 32, 64)), ("b", ("b", 3, 32, 64)), ("c", (1, 3, 64, 64))):
        write_onnx(tmp_path / f"{name}.onnx", shape)
    dynamic = EngineNote(profile={"images": [[1, 3, 32, 32], [1, 3, 32, 32], [8, 3, 32, 64]]}, metadata=METADATA)
    for name, note in (("static", EngineNote(metadata=METADATA)), ("d", dynamic)):
        note.save(tmp_path / f"{name}.engine")
    a, b, c, d, static, foreign = (
        Entry(tmp_path / name) for name in ("a.onnx", "b.onnx", "c.onnx", "d.engine", "static.engine", "foreign.engine")
    )
    assert benchmark.common_size([a, b, d], [Path("a.pt")]) == (32, 64)
    assert benchmark.common_size([static], []) == (64, 96)  # as its note says
    assert benchmark.common_size([foreign], []) is None
    with pytest.raises(InputError, match=r"a.onnx is of 32x64, and .*c.onnx of 64x64; give --imgsz, or files of one"):
        benchmark.common_size([a, c], [])
    with pytest.raises(InputError, match=r"d.engine is of 32x64, and .*static.engine of 64x96; give --imgsz"):
        benchmark.common_size([d, static], [])
    for entries, checkpoints in (([foreign], [Path("a.pt")]), ([a, foreign], [])):
        with pytest.raises(InputError, match=r"foreign.engine does not say its image size, .*; give --imgsz"):
            benchmark.common_size(entries, checkpoints)


def test_a_checkpoint_alone_needs_neither_tensorrt_nor_a_gpu(program, tmp_path):
    code, out, _ = program("a.pt", "--sweep", 2)
    assert code == 0
    assert [(one["batch"], one["precision"]) for one in rows_of(tmp_path)] == [
        (1, "FP32"), (1, "FP16"), (2, "FP32"), (2, "FP16"),
    ]  # fmt: skip
    assert "Selected Device: CPU" in out
    assert "most images/s: a, PyTorch FP32" in out


def test_checkpoint_and_contexts_beside_engines(program, tmp_path, monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr(benchmark, "device_information", lambda index=None: {"Selected Device": "Fake GPU"})
    write_onnx(tmp_path / "int8.onnx", ("b", 3, 32, 32), quantized=True)
    write_onnx(tmp_path / "float.onnx", (4, 3, 32, 32))
    words = ("int8.onnx", "a.pt", "--baseline", "float.onnx", "--batch-size", 4, 4)
    words += ("--infStreams", 1, 3, 1, "--useCudaGraph")
    code, out, _ = program(*words)
    assert code == 0
    rows = rows_of(tmp_path)
    assert [(one["model"], one["runtime"], one["contexts"]) for one in rows] == [
        ("a", "PyTorch", 1), ("a", "PyTorch", 1), ("float", "TensorRT", 1), ("float", "TensorRT", 3),
        ("int8", "TensorRT", 1), ("int8", "TensorRT", 3),
    ]  # fmt: skip
    assert [one["gain"] is None for one in rows] == [True] * 4 + [False] * 2
    assert all(one["speedup"] > 0 for one in rows)
    assert all({"h2d", "d2h"} <= set(one["figures"]) for one in rows[2:])
    header = next(line for line in out.splitlines() if line.startswith("model "))
    assert header.split()[:3] == ["model", "in", "precision"]
    assert all(title in header for title in ("contexts", "H2D", "compute", "D2H", "against PyTorch", "against FP16"))
    assert "int8, batch 4, 3 contexts" in out
