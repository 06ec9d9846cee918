"""The log: warnings begin with a word, have a colour on a terminal, are kept; and a run's folder has all lines."""

import io
import logging

import pytest

from utils.core.logging import log_file, setup_logging, warn_once, warnings_until_now
from utils.core.run_folder import LOG_FILE, held, new_run

logger = logging.getLogger("utils.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_warning_begins_with_a_word_and_is_kept_once(capsys):
    setup_logging()
    logger.info("as usual")
    logger.warning("odd: %s", "\x1b[31m")
    logger.warning("odd: %s", "\x1b[31m")
    assert capsys.readouterr().out.splitlines() == ["as usual", *[r"warning: odd: \x1b[31m"] * 2]
    assert warnings_until_now() == [r"odd: \x1b[31m"]
    setup_logging()
    assert warnings_until_now() == [], "each program has its own"


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_a_terminal_has_colours_unless_the_user_wants_none(variables, coloured, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    setup_logging()
    logger.warning("odd")
    logger.info("a block\nwarning: odd\nthe end")
    word = "\x1b[33mwarning:\x1b[0m" if coloured else "warning:"
    assert terminal.getvalue() == f"{word} odd\na block\n{word} odd\nthe end\n"


def test_what_every_evaluation_would_warn_of_is_said_once(capsys):
    setup_logging()
    warn_once(logger, "50 % of it")
    warn_once(logger, "50 % of it")
    assert capsys.readouterr().out == "warning: 50 % of it\n"
    setup_logging()
    warn_once(logger, "50 % of it")
    assert capsys.readouterr().out == "warning: 50 % of it\n"


def test_a_run_folder_has_the_log_from_the_first_line_on(tmp_path):
    setup_logging()
    logger.info("before there was a folder")
    with new_run(tmp_path, "exp") as folder:
        logger.warning("in between")
    logger.info("afterwards")
    assert (folder / LOG_FILE).read_text() == "before there was a folder\nwarning: in between\n"
    setup_logging()
    with held(folder, log=True):
        logger.info("continued")
    with held(folder):
        logger.info("by another program")
    assert (folder / LOG_FILE).read_text().splitlines()[2:] == ["continued"]


@pytest.mark.parametrize(
    ("error", "line"), [(ValueError("no\nway"), "error: no way"), (KeyboardInterrupt(), "interrupted")]
)
def test_the_log_ends_with_what_ended_the_run(error, line, tmp_path):
    setup_logging()
    with pytest.raises(type(error)), log_file(tmp_path / "a.log"):
        raise error
    assert (tmp_path / "a.log").read_text() == f"{line}\n"


def test_a_full_disk_costs_lines_of_the_log_and_not_the_run(tmp_path, capsys):
    setup_logging()
    (tmp_path / "a.log").symlink_to("/dev/full")
    with log_file(tmp_path / "a.log"):
        logger.info("told all the same")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("told all the same\n", "")
