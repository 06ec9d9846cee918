"""The log: plain lines on standard output and in a run's folder, and the levels of the program's parts.

A warning begins with `warning:`, in colour on a terminal, and is kept for the block above a program's final table.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from utils.core.text import printable

PREFIX = "warning: "
YELLOW, PLAIN = "\x1b[33m", "\x1b[0m"
OURS = ("models.quantize", "utils", "__main__")  # loggers whose information is for the user


class _Formatter(logging.Formatter):
    """A record as a line; a warning begins with `warning:`."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__("%(message)s")
        self._rank = f"rank {rank}: " if rank else ""

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        prefix = PREFIX if record.levelno >= logging.WARNING else ""
        return self._rank + prefix + super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


if TYPE_CHECKING:
    StreamHandler = logging.StreamHandler[TextIO]
else:
    StreamHandler = logging.StreamHandler  # Python 3.10 cannot subscript it


class _Console(StreamHandler):
    """Standard output, on a terminal with `warning:` in colour."""

    def handleError(self, record: logging.LogRecord) -> None:  # logging's name
        """Raise what writing a line raised: a closed pipe ends the program, and is not described on standard error."""
        raise

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not _has_colours(self.stream):
            return text
        return re.sub(r"^(rank \d+: )?warning:", rf"\1{YELLOW}warning:{PLAIN}", text, flags=re.MULTILINE)


class _Memory(logging.Handler):
    """The log until now: all lines, for a run's log file that begins later, and the warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.warnings: dict[str, None] = {}  # each once, in order
        self.said_once: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        if record.levelno >= logging.WARNING:
            self.warnings[printable(record.getMessage())] = None


class _File(logging.FileHandler):
    """A file beside a run's results. A disk that is full costs lines of it, and not the run."""

    def handleError(self, record: logging.LogRecord) -> None:  # logging's name
        """Stay silent: if the run itself cannot write, it has its own error."""

    def write_line(self, line: str) -> None:
        """Write a line as it is."""
        with suppress(OSError):
            if self.stream:
                self.stream.write(f"{line}\n")
            self.flush()

    def close(self) -> None:
        with suppress(OSError):
            super().close()


_memory = _Memory()


def _has_colours(stream: object) -> bool:
    """True for a stream that is a terminal with colours (https://no-color.org)."""
    is_terminal = getattr(stream, "isatty", lambda: False)()
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def setup_logging(verbose: bool = False, rank: int = 0) -> None:
    """Send the log to standard output as plain lines; processes other than the main one only warn, by number."""
    global _memory
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be text; a locale may lack →
    console, _memory = _Console(sys.stdout), _Memory()
    root = logging.getLogger()
    root.handlers[:] = [console, _memory]
    for handler in root.handlers:
        handler.setFormatter(_Formatter(rank))
    root.setLevel(logging.WARNING)
    information = logging.DEBUG if verbose else logging.INFO
    for name in OURS:
        logging.getLogger(name).setLevel(logging.WARNING if rank else information)


def warnings_until_now() -> list[str]:
    """Warnings of this program, each text once, in order; among several processes those of the main one."""
    return list(_memory.warnings)


def warn_once(logger: logging.Logger, message: str, what: str = "") -> None:
    """Warn once of something that each evaluation of a program would warn of again.

    Args:
        what: a key, equal for messages with the same meaning; by default the message.
    """
    what = what or message
    if what not in _memory.said_once:
        _memory.said_once.add(what)
        logger.warning("%s", message)


@contextmanager
def log_file(path: Path, *, append: bool = False) -> Iterator[None]:
    """Write the log to a file, too, within this context, from the program's first line on; an error is its last line.

    Args:
        append: keep what the file holds, as where a run is continued.
    """
    handler = _File(path, "a" if append else "w", encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_Formatter())
    for line in _memory.lines:
        handler.write_line(line)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    except KeyboardInterrupt:
        handler.write_line("interrupted")
        raise
    except Exception as error:
        handler.write_line(f"error: {printable(' '.join(str(error).split()))}")
        raise
    finally:
        root.removeHandler(handler)
        handler.close()


@contextmanager
def log_level(name: str, level: int) -> Iterator[None]:
    """Silence the logger `name` below `level`, within this context."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)
