"""Change many files of a folder, all or nothing, also when the process is killed in the middle.

New files are first copied into a work folder inside the folder that is to change. `commit` writes a journal, moves the
old files aside and the new ones into place, and deletes the journal: from that moment the change holds. Whoever finds a
journal (an exception here, or the next run after a kill) puts everything back with `undo`.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path


class Transaction:
    """Files to write into and to remove from `root`.

    Args:
        root: the folder to change.
        work: folder inside `root` for copies and the journal; made by `stage` and `commit`, and gone at the end.
    """

    def __init__(self, root: Path, work: Path) -> None:
        self.root = root
        self.new, self.old, self.journal = work / "new", work / "old", work / "journal.json"
        self.work = work
        self.writes: list[str] = []
        self.removals: list[str] = []

    def stage(self, path: str, source: Path, *, exact: bool = False) -> None:
        """Copy `source`, to be put at `root/path`; `exact` keeps links, times and permissions as they are."""
        target = self.new / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if exact:
            shutil.copy2(source, target, follow_symlinks=False)
        else:
            shutil.copyfile(source, target)
            if source.stat().st_mode & 0o100:
                mode = target.stat().st_mode
                target.chmod(mode | (mode & 0o444) >> 2)
        self.writes.append(path)

    def stage_text(self, path: str, text: str) -> None:
        """As `stage`, with a content."""
        target = self.new / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        self.writes.append(path)

    def remove(self, path: str) -> None:
        """Remove `root/path`, if it is there."""
        self.removals.append(path)

    def new_folders(self) -> list[str]:
        """The folders that `commit` has to make in `root`, outermost first."""
        parents = {parent for path in self.writes for parent in Path(path).parents}
        return sorted(p.as_posix() for p in parents if not (self.root / p).is_dir())

    def commit(self) -> None:
        """Make all changes; after any failure or interruption, `undo` restores what was there."""
        paths = [*self.writes, *self.removals]
        there = [path for path in paths if os.path.lexists(self.root / path)]
        folders = self.new_folders()
        self.work.mkdir(parents=True, exist_ok=True)
        half = self.journal.with_suffix(".part")
        half.write_text(json.dumps({"paths": paths, "there": there, "folders": folders}))
        half.replace(self.journal)
        for folder in folders:
            (self.root / folder).mkdir()
        for path in paths:
            if path in there:
                _move(self.root / path, self.old / path)
            if path in self.writes:
                _move(self.new / path, self.root / path)
        self.journal.unlink()
        self.clean()

    def pending(self) -> bool:
        """Was a `commit` in this work folder neither finished nor undone?"""
        return self.journal.is_file()

    def undo(self) -> None:
        """Put back what a failed or killed `commit` had changed, and remove the work folder."""
        if self.pending():
            journal = json.loads(self.journal.read_text())
            for path in journal["paths"]:
                if os.path.lexists(self.old / path):
                    _move(self.old / path, self.root / path)
                elif path not in journal["there"]:
                    (self.root / path).unlink(missing_ok=True)
            self.journal.unlink()
            remove_empty(self.root, journal["folders"])
        self.clean()

    def clean(self) -> None:
        """Remove the work folder, and the folder around it if that is empty then."""
        shutil.rmtree(self.work, ignore_errors=True)
        if self.work.parent != self.root:
            remove_empty(self.root, [self.work.parent.relative_to(self.root).as_posix()])


def remove_empty(root: Path, folders: list[str]) -> None:
    """Remove those folders that are empty, innermost first."""
    for folder in sorted(folders, reverse=True):
        path = root / folder
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)
