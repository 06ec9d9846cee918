"""Carry out a plan for a YOLOv9 checkout, so that a process that is killed at any moment leaves nothing unclear.

1. Everything that is to be written is copied into .yolov9_overlay/new. A full disk is noticed here, and nothing is
   changed then. Files of others that are in the way are copied into .yolov9_overlay/backup.
2. The record is replaced by one that is unfinished: it knows the hashes of the files as they were and as they will be,
   the backups, and the folders that will be made.
3. Files are renamed into place or removed, one by one; bytecode and empty folders go.
4. The finished record takes the unfinished one's place, or no record does.

Whoever finds an unfinished record plans anew from it: each file has a hash that is known, so both patching and
reverting come to the same end from any state in between.
"""

from __future__ import annotations

import glob
import os
import shutil
from pathlib import Path

from overlay_plan import BACKUP, NEW, RECORD, STATE, Plan, Record


class Changes:
    """What a plan changes in a checkout: `stage`, then `carry_out`.

    Args:
        checkout: its folder.
        plan: what is to be done.
        record: what the checkout remembers now.
        new: what it is to remember; None when everything is taken out.
    """

    def __init__(self, checkout: Path, plan: Plan, record: Record, new: Record | None) -> None:
        self._checkout, self._plan, self._record, self._new = checkout, plan, record, new
        self._writes: list[str] = []

    def stage(self, files: dict[str, Path]) -> None:
        """Copy what will be renamed into place; when that fails, everything is left as it was."""
        try:
            self._stage(files)
        except BaseException:
            clean(self._checkout, self._record)
            raise

    def _stage(self, files: dict[str, Path]) -> None:
        (self._checkout / NEW).mkdir(parents=True)  # fails if `clean` left anything there: it may be a link
        for path in self._plan.backup:
            target = self._staged(f"{BACKUP}/{path}")
            shutil.copy2(self._checkout / path, target, follow_symlinks=False)
        for path in sorted({*self._plan.add, *self._plan.update, *self._plan.backup, *self._plan.keep} & {*files}):
            target = self._staged(path)
            shutil.copyfile(files[path], target)
            if files[path].stat().st_mode & 0o100:
                mode = target.stat().st_mode
                target.chmod(mode | (mode & 0o444) >> 2)
            self._writes.append(path)
        parents = {parent.as_posix() for path in self._writes for parent in Path(path).parents if parent.parts}
        self._folders = sorted(folder for folder in parents if not (self._checkout / folder).is_dir())
        folders = sorted({*self._record.folders, *self._folders})
        self._staged("unfinished.json").write_text(self._record.on_the_way_to(self._new, folders).text(), "utf-8")
        if self._new is not None:
            self._new.folders = folders
            self._staged("finished.json").write_text(self._new.text(), "utf-8")

    def carry_out(self) -> None:
        """Make the changes; a few milliseconds of renaming."""
        root, plan = self._checkout, self._plan
        for path in plan.backup:
            _rename(root / NEW / BACKUP / path, root / STATE / BACKUP / path)
        (root / NEW / "unfinished.json").replace(root / RECORD)
        for path in self._writes:
            _rename(root / NEW / path, root / path)
        for path in plan.restore:
            _rename(root / STATE / BACKUP / path, root / path)
        for path in plan.remove:
            (root / path).unlink(missing_ok=True)
        self._tidy()
        if self._new is None:
            (root / RECORD).unlink()
        else:
            (root / NEW / "finished.json").replace(root / RECORD)
        clean(root, self._new or Record())

    def _staged(self, path: str) -> Path:
        target = self._checkout / NEW / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _tidy(self) -> None:
        """Remove bytecode of files that are gone, and folders that were made for them and are empty now."""
        root = self._checkout
        gone = [path for path in self._record.files if self._new is None or path not in self._new.files]
        for path in gone:
            source = root / path
            cache = source.parent / "__pycache__"
            for cached in [] if cache.is_symlink() else cache.glob(f"{glob.escape(source.stem)}.*.pyc"):
                cached.unlink()
        parents = {parent.as_posix() for path in gone for parent in Path(path).parents if parent.parts}
        _remove_empty(root, {f"{Path(path).parent.as_posix()}/__pycache__" for path in gone})
        _remove_empty(root, parents & {*self._record.folders})


def clean(checkout: Path, record: Record) -> None:
    """Remove what a run has prepared and not used, and folders of ours that are empty."""
    shutil.rmtree(checkout / NEW, ignore_errors=True)
    backups = checkout / STATE / BACKUP
    folders = {f"{STATE}/{BACKUP}", STATE}
    for path in backups.rglob("*"):
        known = record.files.get(path.relative_to(backups).as_posix())
        if path.is_dir() and not path.is_symlink():
            folders.add(path.relative_to(checkout).as_posix())
        elif known is None or not known.backup:
            path.unlink()
    _remove_empty(checkout, folders)


def _remove_empty(root: Path, folders: set[str]) -> None:
    """Remove those folders that are empty, innermost first."""
    for folder in sorted(folders, reverse=True):
        path = root / folder
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()


def _rename(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(source, target)
