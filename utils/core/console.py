"""Standard output and error of a program: a closed end stops it quietly, and any character can be printed.

`python qat.py quantize ... | head -1` closes the pipe while the program writes: print, logging, argparse, tqdm and the
interpreter's last flush would each fail in a way of their own. All of them write through `_Output`, which ends the
process as SIGPIPE would (exit code 141, what a shell expects), with its temporary files removed. SIGPIPE itself stays
ignored: other pipes, to a worker or to graphviz, may break without ending the program.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import TextIO

import interrupts

CLOSED = (errno.EPIPE, errno.EIO)  # EIO: the terminal is gone


class _Output(io.FileIO):
    """A file descriptor whose other end may close."""

    def write(self, data: object) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if not interrupts.watching():  # a worker process: its parent finds out
                return len(data)  # type: ignore[arg-type]
            if error.errno not in CLOSED:
                with contextlib.suppress(OSError):
                    where = "standard output" if self.fileno() == 1 else "standard error"
                    os.write(2, f"error: cannot write to {where}: {error.strerror}\n".encode())
                interrupts.end(1)
            interrupts.end(141)
            raise


def guard() -> None:
    r"""Make a program's standard streams such outputs; a stream that the caller closed (`>&-`) leads nowhere.

    What the locale's encoding lacks is printed as an escape: with `LC_ALL=C`, → is \u2192. Does nothing where no
    program runs, so that a test's captured streams stay.
    """
    if not interrupts.watching():
        return
    sys.stdout, sys.stderr = _guarded(sys.stdout, 1), _guarded(sys.stderr, 2)


def _guarded(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.fstat(descriptor)
        except OSError:  # else the next file that is opened gets this number, and what libraries in C print
            os.dup2(nowhere, descriptor)
        return open(nowhere, "w", encoding="utf-8", errors="backslashreplace")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    raw = _Output(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # as `python -u` has it
        encoding=stream.encoding, errors="backslashreplace", line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )  # fmt: skip
