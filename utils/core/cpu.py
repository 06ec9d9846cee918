"""The number of CPU cores that this process may use, and the settings of libraries that follow from it.

A container's limit is a cgroup's quota of CPU time: a process with a quota of one core still sees all cores, and its
threads then take turns, most of them waiting for one that has to pause.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

THREADS = ("OMP_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")
# Rounds that a waiting thread of GNU's OpenMP, which torch's wheels bring, spins before it sleeps: 300,000 by default.
# Spinning that long takes the core from the thread that it waits for when other processes are busy. GNU's OpenMP itself
# takes 1,000 where it has more threads than cores.
SPINS = "GOMP_SPINCOUNT"
FEW_SPINS = "1000"
WAITING = ("OMP_WAIT_POLICY", SPINS)  # either one of the user's decides


def cpu_cores() -> int:
    """Number of CPU cores in this process's affinity mask, capped by its cgroups' quota, rounded up."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cpu_quota()
    if quota is None:
        return cores
    return max(min(cores, math.ceil(quota)), 1)


def thread_limit() -> int | None:
    """`cpu_cores()` where that is less than the machine has, for libraries that would start a thread for each core."""
    cores = cpu_cores()
    return cores if cores < (os.cpu_count() or 1) else None


def prepare_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that OpenMP and OpenCV read when they are imported; those that the user has set stay.

    OpenMP's threads soon sleep where they wait, and a quota or an affinity bounds the number of threads.
    """
    if not any(name in environment for name in WAITING):
        environment[SPINS] = FEW_SPINS
    limit = thread_limit()
    if limit is None:
        return
    for name in THREADS:
        environment.setdefault(name, str(limit))


def cpu_quota(process: str | Path = "/proc/self") -> float | None:
    """The least quota of CPU time, in cores, of this process's cgroups and their parents; None without one.

    Args:
        process: the process's folder in /proc, with `cgroup` and `mountinfo`. A file that cannot be read sets no limit.
    """
    quotas = []
    for folder in _cgroup_folders(Path(process)):
        quota = _quota_v2(folder)
        if quota is None:
            quota = _quota_v1(folder)
        if quota is not None:
            quotas.append(quota)
    return min(quotas, default=None)


def _cgroup_folders(process: Path) -> Iterator[Path]:
    """The folders of this process's cgroups that may hold a CPU quota, each before its parent."""
    groups = {}
    for line in _text(process / "cgroup").splitlines():  # 4:cpu,cpuacct:/path, and of cgroup v2 0::/path
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if "cpu" in controllers.split(","):
            groups["cgroup"] = group or "/"
        elif not controllers:
            groups["cgroup2"] = group or "/"
    for line in _text(process / "mountinfo").splitlines():
        mount, _, file_system = line.partition(" - ")
        fields = mount.split()
        kind, *settings = file_system.split() or [""]
        controls_cpu = kind == "cgroup2" or "cpu" in ",".join(settings).split(",")
        if kind not in groups or not controls_cpu or len(fields) < 5:
            continue
        root, mounted_at = fields[3:5]
        yield from _upwards(Path(mounted_at), groups[kind], root)


def _upwards(top: Path, group: str, root: str) -> Iterator[Path]:
    """A cgroup's folder and its parents, up to `top`, where the cgroup `root` is mounted.

    If the group is not below `root`, as in a container that sees the host's name, only `top` is yielded.
    """
    below = os.path.relpath(group, root)
    folder = top if below.startswith("..") else top / below
    while folder != top:
        yield folder
        folder = folder.parent
    yield top


def _quota_v2(folder: Path) -> float | None:
    """Quota in cores by `cpu.max`: microseconds and period, such as `150000 100000`, or `max`; None without a limit."""
    return _cores(_text(folder / "cpu.max").split())


def _quota_v1(folder: Path) -> float | None:
    """Quota in cores by `cpu.cfs_quota_us`, which is -1 without a limit, and `cpu.cfs_period_us`; None without one."""
    return _cores([_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")])


def _cores(words: list[str]) -> float | None:
    """Quota and period as cores; None where they set no limit."""
    try:
        quota, period = map(int, words)
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
