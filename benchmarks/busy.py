#!/usr/bin/env python3
"""Time a forward of a quantized network on a CPU that others use, too, and the start of a program.

    python benchmarks/busy.py --weights qat.pt --checkout yolov9 --data few.yaml --output busy.json

Idle, beside one and two processes that each keep a core busy, and with a quota of one core: each with OpenMP's default
("before"), with what the programs set ("after"), with threads that sleep at once, and with one thread, in turns.
With `--data`: CPU seconds of `qat.py eval`, which on 12 images are those of the start.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils import cli
from utils.core.errors import InputError, QatError
from utils.core.files import write_text
from utils.core.options import Field, ImageSize, Options, option
from utils.reports.schema import hardware

OPENMP_VARIANTS = {
    "before": {"GOMP_SPINCOUNT": "300000", "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))},
    "after": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
OPENMP_SETTINGS = ("GOMP_SPINCOUNT", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OPENCV_FOR_THREADS_NUM")
FORWARD = """
import json, sys, time
sys.path.insert(0, "")
from utils.core.cpu import prepare_threads
prepare_threads()
import torch
from utils.jobs.open import load_network
weights, batch, height, width, repetitions = sys.argv[1], *map(int, sys.argv[2:])
model = load_network(weights).model.eval()
images = torch.rand(batch, 3, height, width)
seconds = []
with torch.inference_mode():
    for _ in range(3):
        model(images)
    for _ in range(repetitions):
        began = time.perf_counter()
        model(images)
        seconds.append(time.perf_counter() - began)
print(json.dumps({"threads": torch.get_num_threads(), "seconds": seconds}))
"""
V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
GROUP = f"yolov9-busy-{os.getpid()}"
JOIN = ["sh", "-c", 'echo $$ > "$0" && exec "$@"']  # the group's list of processes, then a command
BusyCount = Annotated[int, Field(ge=1, le=100)]


class BusyOptions(Options):
    """Time a forward on a CPU that others use, too."""

    weights: str = option("", "a quantized checkpoint", metavar="FILE")
    checkout: str = option("", "the patched checkout (default: the variable YOLOV9_CHECKOUT)", metavar="DIR")
    data: str = option("", "a dataset's YAML: time the start of qat.py eval on it", metavar="FILE")
    imgsz: ImageSize = option(160, "input size in pixels", "--imgsz", "--img", metavar="PX")
    batch_size: BusyCount = option(4, "images of a forward", metavar="N")
    rounds: BusyCount = option(3, "processes of each kind, in turns", metavar="N")
    repetitions: BusyCount = option(20, "forwards of a process", metavar="N")
    output: str = option("busy.json", "the result", metavar="FILE")


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` cores busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def quota_of_one_core() -> Iterator[tuple[str, list[str]]]:
    """Grant one core, by a cgroup's quota or else the affinity: that in words, and the words before a command."""
    affinity = "affinity", ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    folder = V1 if (V1 / "cpu.cfs_quota_us").is_file() else V2
    file, content = ("cpu.cfs_quota_us", "100000") if folder == V1 else ("cpu.max", "100000 100000")
    group = folder / GROUP
    try:
        group.mkdir()
    except OSError:  # no cgroups that this user may make
        yield affinity
        return
    try:
        if can_write(group / file, content):
            yield f"{file} of a cgroup", [*JOIN, str(group / "cgroup.procs")]
        else:
            yield affinity
    finally:
        group.rmdir()


def can_write(file: Path, content: str) -> bool:
    """Write a setting of a cgroup; False where it cannot be, as in cgroup v2 without the controller."""
    try:
        file.write_text(content, encoding="utf-8")
    except OSError:
        return False
    return True


def variant_environment(variant: str) -> dict[str, str]:
    """This process's environment with the settings of a variant alone."""
    own = {name: value for name, value in os.environ.items() if name not in OPENMP_SETTINGS}
    return own | OPENMP_VARIANTS[variant]


def timed_forward(options: BusyOptions, checkout: Path, variant: str, before: Sequence[str] = ()) -> dict[str, Any]:
    """Run a process: its number of threads, and the seconds of each forward."""
    height, width = (options.imgsz,) * 2 if isinstance(options.imgsz, int) else options.imgsz
    numbers = [options.batch_size, height, width, options.repetitions]
    words = [*before, sys.executable, "-c", FORWARD, str(Path(options.weights).resolve()), *map(str, numbers)]
    done = subprocess.run(
        words, cwd=checkout, env=variant_environment(variant), capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode:
        raise QatError(f"the forward failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def variants_in_turns(options: BusyOptions, checkout: Path, before: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A row for each variant: its threads, the median of the forwards of all processes, and each process's median."""
    processes: dict[str, list[dict[str, Any]]] = {variant: [] for variant in OPENMP_VARIANTS}
    for _ in range(options.rounds):
        for variant, results in processes.items():
            results.append(timed_forward(options, checkout, variant, before))
    rows = []
    for variant, results in processes.items():
        seconds = [second for result in results for second in result["seconds"]]
        medians = [round(statistics.median(result["seconds"]), 5) for result in results]
        rows.append(
            {
                "variant": variant,
                "threads": results[0]["threads"],
                "median_s": round(statistics.median(seconds), 5),
                "median_s_of_processes": medians,
            }
        )
    return rows


def start_seconds(options: BusyOptions, checkout: Path) -> list[float]:
    """CPU seconds, user's and system's, of `qat.py eval`, once for each round after one that fills the caches."""
    out = Path(options.output).resolve().with_suffix("")
    words = [sys.executable, "qat.py", "eval", "--weights", str(Path(options.weights).resolve())]
    words += ["--data", str(Path(options.data).resolve()), "--device", "cpu", "--imgsz", str(options.imgsz)]
    words += ["--project", str(out), "--name", "start", "--exist-ok"]
    totals = []
    for _ in range(options.rounds + 1):
        done = subprocess.run(words, cwd=checkout, env=variant_environment("after"), capture_output=True, check=False)
        if done.returncode:
            raise QatError(f"{shlex.join(words)} ended with exit code {done.returncode}")
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        totals.append(usage.ru_utime + usage.ru_stime)
    return [round(after - before, 2) for before, after in itertools.pairwise(totals)]


def run(options: BusyOptions) -> None:
    """Time all, and write the result."""
    checkout = Path(options.checkout or os.environ.get("YOLOV9_CHECKOUT", "")).resolve()
    if not (checkout / "utils/core/cpu.py").is_file():
        raise InputError(f"--checkout {checkout} is not a checkout that patch_yolov9.sh has patched")
    if not Path(options.weights).is_file():
        raise InputError(f"--weights {options.weights} does not exist; give a quantized checkpoint")
    result: dict[str, Any] = {"hardware": hardware(), "images": options.batch_size, "imgsz": options.imgsz}
    if options.data:
        result["start_cpu_s"] = start_seconds(options, checkout)
    for count in (0, 1, 2):
        with busy_processes(count):
            result[f"beside {count}"] = variants_in_turns(options, checkout)
    with quota_of_one_core() as (way, before):
        result["quota of one core"] = {"by": way, "rows": variants_in_turns(options, checkout, before)}
    write_text(Path(options.output), json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    sys.exit(cli.run_program("busy.py", (BusyOptions, run), about=__doc__))
