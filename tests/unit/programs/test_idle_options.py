"""Options that can have no effect where they are given: one line and exit code 2, before any work."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import pytest

import export_qat
import export_yoloV9
import qat
import val_trt
from utils.cli import run_program
from utils.core.arguments import given_flags
from utils.jobs.options import CalibrateOptions, SensitiveOptions

ROOT = Path(__file__).resolve().parents[3]


def script(name: str):
    """Runs a program of scripts/."""
    path = ROOT / "scripts" / name
    spec = importlib.util.spec_from_file_location(f"program_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        spec.loader.exec_module(module)
    return lambda words: run_program(module.make_parser(), module.main, words)


def val(words: list[str]) -> int:
    return run_program(val_trt.make_parser(), val_trt.main, words)


FILE, EXPORT = "--engine-file a.onnx", "--weights a.pt --imgsz 64"
CASES = [
    *((val, f"{FILE} --task speed", flag, "with --task speed")
      for flag in ("--conf-thres 0.1", "--iou-thres 0.5", "--rect", "--save-txt", "--save-json")),
    (val, f"{FILE} --task study", "--save-json", "with --task study"),
    (val, FILE, "--save-conf", "without --save-txt"),
    *((val, f"{FILE} --source a.png", flag, "with --source")
      for flag in ("--save-conf", "--verbose", "--task speed", "--batch-size 32", "--workers 1", "--limit 3")),
    *((export_qat.main, EXPORT, flag, "without --include onnx_end2end")
      for flag in ("--nms onnx", "--topk-all 50", "--iou-thres 0.5", "--conf-thres 0.5", "--class-agnostic",
                   "--mask-resolution 5", "--pooler-scale 0.25", "--sampling-ratio 0")),
    (export_qat.main, "--verify a.onnx", "--simplify", "with --verify"),
    (export_qat.main, "--verify a.onnx", "--weights a.pt", "with --verify"),
    (script("benchmark_trt.py"), "a.onnx --noDataTransfers", "--exposeDMA", "with --noDataTransfers"),
    *((script("make_report.py"), "runs/a", flag, "without --compare")
      for flag in ("--data a.yaml", "--samples 3", "--imgsz 640", "--conf-thres 0.1", "--device cpu")),
    *((script("make_report.py"), "--environment", flag, "with --environment")
      for flag in ("--title a", "--imgsz 640", "--device 0")),
    *((script("make_triton.py"), "--check a", flag, "with --check") for flag in ("--name a", "--output b", "--no-nms")),
    (script("make_triton.py"), "a.onnx", "--onnx b.onnx", "with an ONNX file"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "words", "idle", "why"), CASES, ids=[f"{c[1]} {c[2]}" for c in CASES])
def test_what_can_do_nothing_is_refused(program, words, idle, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("utils.jobs.dependencies.need_tensorrt", lambda *_: None)
    for name in ("a.onnx", "a.pt", "a.yaml", "a.png"):
        (tmp_path / name).touch()
    assert program([*words.split(), *idle.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {idle.split()[0]} does nothing {why}")
    assert error.endswith("; leave it out\n")
    assert error.count("\n") == 1


def test_a_record_of_layers_was_measured_at_its_batch_size(tmp_path, capsys):
    record = tmp_path / "a.layers.json"
    record.write_text("[]")
    assert script("inspect_engine.py")([str(record), "--batch-size", "8"]) == 2
    assert "--batch-size does nothing with a record" in capsys.readouterr().err


def test_overlaps_are_not_chosen_where_nothing_is_suppressed(tmp_path, capsys):
    (tmp_path / "a.pt").touch()
    words = ["--weights", str(tmp_path / "a.pt"), "--nms", "none", "--iou-thres", "0.5"]
    for main, more in ((export_qat.main, ["--include", "onnx_end2end"]), (export_yoloV9.main, [])):
        assert main([*words, *more]) == 2
        assert "--iou-thres does nothing with --nms none, which suppresses no boxes" in capsys.readouterr().err


def test_options_of_training_are_named_where_there_is_none(capsys):
    """`--ptq-only` is what one adds to a usual command, so they are not refused."""
    training = ["--hyp=a.yaml", "--epochs=1", "--iters=1", "--lr=1e-5", "--train=ranges", "--supervision=layers"]
    told = "--ptq-only ends before training; these do nothing: --hyp, --epochs, --iters, --lr, --train, --supervision, "
    words = ["quantize", "--weights", "none.pt", *training, "--supervision-stride=2", "--teacher=b.pt"]
    assert qat.main([*words, "--ptq-only"]) == 2  # there is no none.pt
    assert told + "--supervision-stride, --teacher\n" in capsys.readouterr().out
    assert qat.main(words) == 2
    assert "do nothing" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", [CalibrateOptions, SensitiveOptions])
def test_augmentation_is_only_for_qat(kind, tmp_path, caplog):
    """yolov9-qat's commands have --hyp, so it is not refused."""
    files = {name: str(tmp_path / f"a{end}") for name, end in (("weights", ".pt"), ("data", ".yaml"), ("hyp", ".yml"))}
    for file in files.values():
        Path(file).touch()
    qat._options(argparse.Namespace(**files), kind)
    assert caplog.messages == [f"--hyp {files['hyp']} is checked only: these images are not augmented"]


def test_two_timing_caches(capsys):
    with pytest.raises(SystemExit, match="2"):
        script("build_engine.py")(["a.onnx", "--timing-cache", "a", "--no-timing-cache"])
    assert "--no-timing-cache: not allowed with argument --timing-cache" in capsys.readouterr().err


def test_what_is_given_is_what_was_typed():
    """Also where it is the default, and abbreviated; what stands behind `--` or is a value is no option."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*")
    parser.add_argument("-s", "--size", "--imgsz", type=int, default=640)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--name")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction)
    words = ["--im=640", "--name", "limit", "--no-compile", "--", "--limit"]
    parser.parse_args(words)
    assert given_flags(parser, words) == {"size": "--imgsz", "name": "--name", "compile": "--no-compile"}
    assert given_flags(parser, ["-s", "3", "--limit", "-1"]) == {"size": "-s", "limit": "--limit"}
