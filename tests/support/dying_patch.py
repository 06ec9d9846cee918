"""scripts/patch_overlay.py in a process that dies before its n-th change to the file system: ROOT NUMBER ARGUMENTS...

`ROOT` is the overlay that is copied. Exit code 9 means that it has died. `ForkServer` starts it: a fork of the process
that runs tests would copy the tables of all the memory that torch takes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import patch_overlay

# What changes files, as Python's audit events name it; `open` only when it writes.
CHANGES = {"os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.symlink", "os.chmod", "os.utime"}
kill_at, count = int(sys.argv[2]), 0


def die(event: str, details: tuple[object, ...]) -> None:
    global count
    writes = event == "open" and isinstance(details[2], int) and details[2] & (os.O_WRONLY | os.O_RDWR)
    if event in CHANGES or writes:
        count += 1
        if count == kill_at:
            os._exit(9)


sys.addaudithook(die)
os._exit(patch_overlay.main(sys.argv[3:], root=Path(sys.argv[1])))
