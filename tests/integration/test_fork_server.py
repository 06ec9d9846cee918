"""A program of ours that `fork_server` forks prints and writes what it does when it is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fork_server import ForkServer


def test_an_export_is_the_same_both_ways(fork_server: ForkServer, checkout: Path, demo_weights: Path, tmp_path: Path):
    """From upstream's pickle over torch's exporter and ONNX Runtime to the bytes of the file."""
    file, found, forked = tmp_path / "demo.onnx", [], fork_server.forked
    words = ["export_qat.py", "--weights", demo_weights, "--imgsz", 64, "--device", "cpu", "--output", file]
    theirs = [sys.executable, *map(str, words)]
    for run in (
        lambda: fork_server.run(words, checkout),
        lambda: subprocess.run(theirs, cwd=checkout, capture_output=True, text=True),
    ):
        done = run()
        found.append(
            (done.returncode, done.stdout, done.stderr, {one.name: one.read_bytes() for one in tmp_path.iterdir()})
        )
        file.unlink()
    assert fork_server.forked == forked + 1
    assert found[0] == found[1]
    assert found[0][0] == 0
    assert len(found[0][3]["demo.onnx"]) > 100_000


def test_mistakes_are_the_same_both_ways(fork_server: ForkServer, checkout: Path):
    words = ["val_trt.py", "--engine-file", "none.onnx"]
    ours = fork_server.run(words, checkout)
    theirs = subprocess.run([sys.executable, *words], cwd=checkout, capture_output=True, text=True)
    assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)
    assert ours.returncode == 2
