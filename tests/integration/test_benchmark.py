"""scripts/benchmark_trt.py with upstream's network on the CPU: the demo's ONNX file in ONNX Runtime."""

import json


def test_the_demo_s_onnx_file(start, demo_weights, tmp_path):
    words = ["--imgsz", "64", "--dynamic", "--check", "0", "--output", str(tmp_path / "demo.onnx")]
    assert start("export_qat.py", "--weights", demo_weights, *words).returncode == 0
    words = ["--device", "cpu", "--imgsz", "64", "--batch-size", "1", "--project", str(tmp_path / "runs")]
    times = ["--warmUp", "0", "--duration", "0.2", "--rounds", "1"]
    done = start("scripts/benchmark_trt.py", tmp_path / "demo.onnx", *words, *times)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "runs/exp/benchmark.json").read_text())["rows"]
    assert (row["runtime"], row["precision"]) == ("ONNX Runtime", "FP32")
    assert row["images_per_second"] > 0
