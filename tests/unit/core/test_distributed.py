"""Who am I among several processes: the environment, parts of a batch, devices, and programs that are one process.

What processes do together is in tests/unit/evaluation/test_shares.py and tests/unit/quantize/test_finetune.py.
"""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from utils import cli
from utils.core import device, distributed
from utils.core.distributed import VARIABLES, World
from utils.core.errors import InputError, QatError
from utils.core.logging import setup_logging
from utils.core.options import Options

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def torchrun(monkeypatch):
    """Set what torchrun sets."""

    def launch(rank, size, local=0):
        for name, value in zip(VARIABLES, (rank, size, local, "localhost", 0), strict=True):
            monkeypatch.setenv(name, str(value))

    return launch


def test_without_torchrun_there_is_one_process_and_nothing_changes(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")  # as other launchers leave it behind
    with distributed.joined() as world:
        assert world == World(0, 1, 0)
    assert distributed.is_main()
    values = torch.rand(3)
    assert distributed.all_sum(values) is values
    assert (distributed.gather("thing"), distributed.from_main(lambda: 3)) == (["thing"], 3)
    assert not torch.distributed.is_initialized()


@pytest.fixture
def port():
    """A port that nothing listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


# One process of a run of two or, with `both`, the two: the other is a fork, for torch takes seconds to import.
PROGRAM = """
import os, signal, sys, torch
from contextlib import suppress
sys.path.insert(0, sys.argv.pop(1))
from utils.cli import run_program
from utils.core import distributed
from utils.core.options import Options, option

distributed.PATIENCE = 0.5
if "both" in sys.argv:
    os.environ["RANK"] = str(int(os.fork() == 0))

class Few(Options):
    what: str = option("", "", positional=True)
    who: str = option("one", "", positional=True)

def work(options):
    distributed.all_sum(torch.ones(3))
    if hasattr(signal, options.what) and distributed.world().rank:
        os.kill(os.getpid(), getattr(signal, options.what))
    distributed.all_sum(torch.ones(3))
    if options.what == "threads":
        distributed.gather(None)

code = run_program("p", (Few, work), together=[""])
if "threads" in sys.argv:
    threads = []
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            threads.append(open(f"/proc/self/task/{task}/comm").read())
    os.write(1, f"{[name for name in threads if 'gloo' in name]}\\n".encode())
sys.exit(code)
"""


@contextmanager
def started(port, what, who="one", rank=0):
    """The program as a process of a run of two, in a group of its own that is killed at the end."""
    numbers = dict(zip(VARIABLES, map(str, (rank, 2, rank, "127.0.0.1", port)), strict=True))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(ROOT), what, who], env={**os.environ, **numbers},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def seconds_to_end(process, number):
    """Send a signal and wait for the end of the process."""
    began = time.monotonic()
    process.send_signal(number)
    process.wait(timeout=60)
    return time.monotonic() - began


def test_no_thread_of_the_process_group_is_left(port):
    with started(port, "threads", "both") as process:
        out, errors = process.communicate(timeout=100)
    assert (out, process.returncode) == ("[]\n[]\n", 0), errors


def test_a_port_that_is_in_use_is_named_with_the_option_for_another():
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        with started(port, "nothing") as process:
            out, errors = process.communicate(timeout=100)
    assert (process.returncode, out, errors.count("\n")) == (2, "", 1), errors
    assert f"port {port} is in use" in errors
    assert "--master-port" in errors


@pytest.mark.parametrize(
    ("rank", "number", "code", "word"), [(0, signal.SIGTERM, 143, "terminated"), (1, signal.SIGINT, 130, "interrupted")]
)
def test_the_wait_for_a_missing_process_is_said_and_ended_by_a_signal(port, rank, number, code, word):
    with started(port, "nothing", rank=rank) as process:
        line = process.stdout.readline()
        missing = r"process 0 \(Connection refused\)" if rank else "1 of 2 processes"
        assert re.search(rf"waiting for {missing} at 127\.0\.0\.1:{port}$", line)
        assert seconds_to_end(process, number) < 3
        assert (process.returncode, process.communicate()) == (code, ("", f"{word}\n"))


@pytest.mark.parametrize(("number", "code", "word"), [(signal.SIGTERM, 143, "terminated"),
                                                      (signal.SIGINT, 130, "interrupted")])  # fmt: skip
def test_a_signal_ends_a_collective_that_waits_outside_python(port, number, code, word):
    with started(port, "SIGSTOP", "both") as process:
        stopped = lambda: " T " in Path(f"/proc/{child(process.pid)}/stat").read_text()  # noqa: E731
        deadline = time.monotonic() + 100
        while not (child(process.pid) and stopped()) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # so that this one waits for the other
        assert seconds_to_end(process, number) < 4
        assert (process.returncode, process.stderr.readline()) == (code, f"{word}\n")


def child(pid):
    """The process that the program has forked, '' before that."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()


def test_a_process_that_dies_ends_the_other_in_one_line(port):
    with started(port, "SIGKILL", "both") as process:
        out, errors = process.communicate(timeout=100)
    assert (process.returncode, out) == (1, "")
    assert errors.startswith("error: another process of this run has ended")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"RANK": "first"}, "RANK='first'"), ({"WORLD_SIZE": ""}, "WORLD_SIZE=''"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
        ({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2"), ({"MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0"), ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
    ],
)  # fmt: skip
def test_an_environment_that_cannot_be_is_named_in_one_line(torchrun, monkeypatch, capsys, changes, named):
    torchrun(0, 2)
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with suppress(SystemExit):
        assert cli.run_program("qat.py", (Options, lambda options: None), [], together=[""]) == 2
    errors = capsys.readouterr().err
    assert named in errors
    assert errors.count("\n") == 1


def test_processes_that_do_not_come_are_counted_at_the_end_of_the_wait(torchrun, port, monkeypatch):
    torchrun(0, 3)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(distributed, "TIMEOUT", timedelta(seconds=0.3))
    with pytest.raises(QatError, match=rf"2 of 3 processes did not come to localhost:{port}"), distributed.joined():
        pass
    torchrun(1, 3)
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(QatError, match=r"process 0 \(Connection refused\) did not come"), distributed.joined():
        pass


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (
            RuntimeError("[/gloo/pair.cc:538] Connection closed by peer [::1]:9"),
            "another process of this run has ended",
        ),
        (torch.distributed.DistBackendError("NCCL: ncclRemoteError: a call failed"), "another process of this run"),
        (
            torch.distributed.DistBackendError("NCCL: ncclInvalidUsage: Duplicate GPU"),
            "cannot work together .*Duplicate",
        ),
        (RuntimeError("[/gloo/device.cc:1] Unable to find interface eth7"), "cannot work together .*eth7"),
        (RuntimeError("shapes cannot be multiplied"), None),
    ],
)
def test_only_what_tells_of_another_process_is_said_to_be_its_end(torchrun, port, monkeypatch, error, kind):
    torchrun(0, 2)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(distributed._Meeting, "store", lambda self: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    with pytest.raises(QatError if kind else RuntimeError, match=kind or "multiplied"), distributed.joined():
        raise error
    assert distributed.world() == World()


@pytest.mark.parametrize(("size", "count"), [(1, 7), (3, 0), (3, 7), (8, 7), (8, 10)])
def test_parts_are_neighbours_in_order_and_of_almost_one_size(size, count):
    parts = [list(range(count))[World(rank, size).share(count)] for rank in range(size)]
    assert [index for part in parts for index in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_every_process_takes_the_gpu_of_its_own_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(device, "local_rank", 1)
    assert [device.select_device(text) for text in ("", "cuda")] == [torch.device("cuda:1")] * 2
    assert device.select_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="GPU of its own number"):
        device.select_device("0")
    monkeypatch.setattr(device, "local_rank", 2)
    with pytest.raises(InputError, match="sees 2 CUDA devices"):
        device.select_device("")


@pytest.mark.parametrize("rank", [0, 1])
def test_other_programs_are_one_process_and_one_of_them_says_so(torchrun, capsys, rank):
    torchrun(rank, 2, rank)
    with pytest.raises(SystemExit) as end:
        cli.run_program("export_qat.py", (Options, lambda options: None), [])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("export_qat.py") == 1 - rank


def test_other_ranks_say_their_number_and_only_what_is_wrong(torchrun, capsys, monkeypatch):
    torchrun(1, 2, 1)
    monkeypatch.setattr(distributed, "joined", nullcontext)  # the other process is not there

    def work(_: Options) -> None:
        logging.getLogger("utils.somewhere").info("told by rank 0")
        logging.getLogger("utils.somewhere").warning("odd")
        raise InputError("cannot be used")

    assert cli.run_program("qat.py", (Options, work), [], together=[""]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("rank 1: warning: odd\n", "rank 1: error: cannot be used\n")
    setup_logging()
