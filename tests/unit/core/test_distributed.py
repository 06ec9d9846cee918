"""Who am I among several processes: the environment, parts of a batch, devices, and programs that are one process.

What processes do together is in tests/unit/evaluation/test_shares.py and tests/unit/quantize/test_finetune.py.
"""

import logging
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from utils import cli
from utils.core import device, distributed
from utils.core.distributed import VARIABLES, World
from utils.core.errors import InputError
from utils.core.logging import setup_logging
from utils.core.options import Options


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


ENDING = """
import os, torch
from utils.core import distributed
distributed.launched = lambda: distributed.World(0, 2)  # while WORLD_SIZE, which torch reads, says one
distributed.gather = lambda _: None
with distributed.joined():
    import torch.distributed.nn
threads = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
print([name for name in threads if "gloo" in name])
"""


def test_no_thread_of_the_process_group_is_left(torchrun):
    torchrun(0, 1)
    run = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=100)
    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr


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
