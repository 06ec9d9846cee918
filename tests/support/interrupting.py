"""Programs that run for long enough to be interrupted, and the processes that they leave."""

from __future__ import annotations

from pathlib import Path


def programs(weights: Path, data: Path, folder: Path) -> list[list[str]]:
    """Command lines that run for longer than anybody waits here: imports, loaders' processes, training."""
    common = ["--data", str(data), "--device", "cpu", "--project", str(folder)]
    quantize = [
        "qat.py",
        "quantize",
        "--weights",
        str(weights),
        "--imgsz",
        "320",
        "--batch-size",
        "8",
        "--epochs",
        "40",
    ]
    return [
        [*quantize, "--workers", "2", "--no-eval-origin", *common],
        ["qat.py", "sensitive", "--weights", str(weights), "--imgsz", "320", "--workers", "2", *common],
        ["qat.py", "eval", "--weights", str(weights), "--imgsz", "640", "--batch-size", "4", "--workers", "1", *common],
        ["val_trt.py", "--engine-file", str(weights), "--imgsz", "640", "--batch-size", "4", "--workers", "2", *common],
    ]


def group_members(group: int) -> list[int]:
    """Processes of a group that live."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, member = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(member) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found
