"""Cores and quotas from made-up files of cgroup v1 and v2, and what is set before torch is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from utils.core import cpu

ROOT = Path(__file__).resolve().parents[3]
V2 = "30 23 0:26 {root} {mount} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 23 0:29 {root} {mount} rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
OTHER = "34 23 0:30 / {mount}/other rw - cgroup cgroup rw,cpuset\n35 23 0:31 / /proc rw - proc proc rw\n"


def process(folder, groups, mounts, files):
    """A process's folder of /proc, and the files of its cgroups (path → content) below `folder/mount`."""
    for path, text in files.items():
        file = folder / "mount" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text(mounts.replace("{mount}", str(folder / "mount")))
    return folder


def v2(folder, group, files, root="/"):
    return process(folder, f"0::{group}\n", V2.replace("{root}", root) + OTHER, files)


def v1(folder, group, quota, period="100000", root="/", place=""):
    files = {f"{place}cpu.cfs_quota_us": quota, f"{place}cpu.cfs_period_us": period}
    groups = f"5:cpuset:/elsewhere\n4:cpu,cpuacct:{group}\n0::/\n"
    return process(folder, groups, V1.replace("{root}", root) + OTHER, files)


@pytest.mark.parametrize(
    ("content", "cores"),
    [
        ("100000 100000\n", 1.0), ("150000 100000", 1.5), ("20000 50000", 0.4), ("max 100000\n", None), ("", None),
        ("max", None), ("-1 100000", None), ("100000 0", None), ("text 100000", None),
    ],
)  # fmt: skip
def test_quota_of_v2(tmp_path, content, cores):
    assert cpu.cpu_quota(v2(tmp_path, "/", {"cpu.max": content})) == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [("200000\n", "100000\n", 2.0), ("25000", "50000", 0.5), ("-1\n", "100000\n", None), ("50000", "", None)],
)
def test_quota_of_v1(tmp_path, quota, period, cores):
    assert cpu.cpu_quota(v1(tmp_path, "/", quota, period)) == cores


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"a/b/cpu.max": "300000 100000", "a/cpu.max": "150000 100000", "cpu.max": "max 100000"}, 1.5),
        ({"a/b/cpu.max": "100000 100000", "a/cpu.max": "150000 100000"}, 1.0),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "max 100000"}, None),
        ({"a/c/cpu.max": "100000 100000"}, None),  # another group's
    ],
)
def test_least_quota_of_nested_groups(tmp_path, files, cores):
    assert cpu.cpu_quota(v2(tmp_path, "/a/b", files)) == cores


def test_group_below_what_is_mounted(tmp_path):
    """A container of cgroup v1 sees its own group mounted, and its whole name in /proc/self/cgroup."""
    assert cpu.cpu_quota(v1(tmp_path, "/docker/1f/job", "150000", root="/docker/1f", place="job/")) == 1.5


@pytest.mark.parametrize("group", ["", "/docker/1f", "/../../system.slice"])
def test_group_that_is_not_below_what_is_mounted(tmp_path, group):
    assert cpu.cpu_quota(v2(tmp_path, group, {"cpu.max": "50000 100000"}, root="/docker/2e")) == 0.5


def test_both_versions_are_looked_at(tmp_path):
    folder = v1(tmp_path, "/", "150000")
    (tmp_path / "mount/unified").mkdir()
    with (folder / "mountinfo").open("a") as file:
        file.write(V2.format(root="/", mount=tmp_path / "mount/unified"))
    assert cpu.cpu_quota(folder) == 1.5
    (tmp_path / "mount/unified/cpu.max").write_text("100000 100000")
    assert cpu.cpu_quota(folder) == 1.0


def test_what_cannot_be_read_is_no_limit(tmp_path):
    assert cpu.cpu_quota(tmp_path / "none") is None
    folder = v2(tmp_path, "/", {})
    (tmp_path / "mount/cpu.max").mkdir(parents=True)
    assert cpu.cpu_quota(folder) is None
    (folder / "mountinfo").write_bytes(b"\xff 1 -\n- - -\n\n30 23 - cgroup2\n")
    assert cpu.cpu_quota(folder) is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 4), (0.4, 1), (1.0, 1), (1.5, 2), (3.01, 4), (9.0, 4)])
def test_cores_are_those_of_affinity_within_the_quota(monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(cpu, "cpu_quota", lambda: quota)
    assert cpu.cpu_cores() == cores
    assert cpu.thread_limit() == (cores if cores < 4 else None)


def test_environment(monkeypatch):
    monkeypatch.setattr(cpu, "thread_limit", lambda: None)
    environment: dict[str, str] = {}
    cpu.prepare_threads(environment)
    assert environment == {"GOMP_SPINCOUNT": "1000"}
    monkeypatch.setattr(cpu, "thread_limit", lambda: 1)
    cpu.prepare_threads(environment)
    assert environment == {"GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": "1", "OPENCV_FOR_THREADS_NUM": "1"}


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_has_set_stays(monkeypatch, name):
    monkeypatch.setattr(cpu, "thread_limit", lambda: 1)
    own = {name: "ACTIVE", "OMP_NUM_THREADS": "3", "OPENCV_FOR_THREADS_NUM": "2"}
    environment = dict(own)
    cpu.prepare_threads(environment)
    assert environment == own


CODE = """
import sys
from utils import cli
from utils.core import cpu
from utils.core.options import Options
cpu.cpu_quota = lambda: 1.0
def work(options):
    assert "torch" not in sys.modules
    import cv2, torch
    from utils.core.cpu import cpu_cores
    print(cpu_cores(), torch.get_num_threads(), cv2.getNumThreads())
sys.exit(cli.run_program("x.py", (Options, work), []))
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a quota of one core is no limit on a machine of one")
@pytest.mark.parametrize(("own", "threads"), [({}, "1 1 1"), ({"OMP_NUM_THREADS": "2"}, "1 2 1")])
def test_a_program_with_a_quota_of_one_core_has_one_thread(own, threads):
    names = ("OMP_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")
    environment = {name: value for name, value in os.environ.items() if name not in names} | own
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == threads
