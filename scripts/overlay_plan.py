"""What patching or reverting a YOLOv9 checkout would change: the overlay's files compared with what lies there.

The checkout may be a stranger's, and with it the folder .yolov9_overlay: git clones links and any manifest.json. So no
path is followed through a link, and no name in the record is believed to lie in the checkout before it was looked at.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
STATE = ".yolov9_overlay"
RECORD = f"{STATE}/manifest.json"
BACKUP = "backup"  # in STATE: files of others, under their own paths
NEW = f"{STATE}/new"  # what will be renamed into place


class Refusal(Exception):
    """The request cannot be carried out; nothing was changed. Exit code 2."""


@dataclass(frozen=True)
class Written:
    """A file that was copied into the checkout: its content, and whether a file of others lies in the backup.

    While a run is unfinished the file may also have one of the contents in `before`, which are ours as well.
    """

    sha256: str
    backup: bool
    before: tuple[str, ...] = ()

    def has(self, sha256: str) -> bool:
        """Is that a content which we wrote?"""
        return sha256 == self.sha256 or sha256 in self.before


@dataclass
class Record:
    """What the checkout remembers of the overlay."""

    version: str = ""
    files: dict[str, Written] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    unfinished: bool = False  # a run has begun to change files

    @classmethod
    def read(cls, checkout: Path) -> Record:
        """The record of a checkout, once it is sure that the folder and all its names lie in the checkout."""
        for inside in (RECORD, f"{NEW}/*", f"{STATE}/{BACKUP}/*"):
            check_way(checkout, inside)
        path = checkout / RECORD
        if not os.path.lexists(path):
            return cls()
        if path.is_symlink() or not path.is_file():
            raise Refusal(f"{path} is no regular file, and a record is needed there; start from a fresh checkout")
        try:
            return cls._of(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Refusal(f"{path} is damaged ({error}); restore it, or start from a fresh checkout") from error

    @classmethod
    def _of(cls, content: Any) -> Record:
        """What JSON holds as a record; raises ValueError, KeyError, TypeError or AttributeError where it is none."""
        files = {}
        for name, row in content["files"].items():
            if not _may_be_ours(name):
                raise ValueError(f"{name[:80]!a} cannot be a file of the overlay")
            before = _typed(list, row.get("before", []))
            hashes = [_typed(str, sha256) for sha256 in (row["sha256"], *before)]
            files[name] = Written(hashes[0], _typed(bool, row["backup"]), tuple(hashes[1:]))
        version = _typed(str, content["version"])
        if not version.isprintable():
            raise ValueError(f"{version[:80]!a} is no version")
        folders = [_typed(str, folder) for folder in _typed(list, content["folders"])]
        return cls(version, files, folders, _typed(bool, content.get("unfinished", False)))

    def text(self) -> str:
        """As it is written; what only an unfinished run has is left out otherwise."""
        files = {name: {k: v for k, v in vars(self.files[name]).items() if v != ()} for name in sorted(self.files)}
        content: dict[str, object] = {"version": self.version, "files": files, "folders": sorted(self.folders)}
        if self.unfinished:
            content["unfinished"] = True
        return json.dumps(content, indent=1) + "\n"

    def on_the_way_to(self, new: Record | None, folders: list[str]) -> Record:
        """The record while files change from this state to that of `new` (None: taken out)."""
        files = dict(self.files)
        for path, written in (new.files if new else {}).items():
            known = self.files.get(path)
            before = {*known.before, known.sha256} - {written.sha256} if known else set()
            files[path] = Written(written.sha256, written.backup, tuple(sorted(before)))
        return Record(new.version if new else self.version, files, folders, unfinished=True)


def _may_be_ours(name: str) -> bool:
    """Is that the path of a file in the checkout, outside of git's folder and of our own?"""
    return name.isprintable() and not {"", ".", "..", ".git", STATE} & {*name.casefold().split("/")}


def _typed(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} lies where a {kind.__name__} is expected")
    return value


@dataclass
class Plan:
    """What a run changes. Paths are relative to the checkout."""

    add: list[str] = field(default_factory=list)
    update: list[str] = field(default_factory=list)
    backup: list[str] = field(default_factory=list)  # files of others, put aside until --revert
    keep: list[str] = field(default_factory=list)  # our files that the user has changed: a copy stays
    remove: list[str] = field(default_factory=list)
    restore: list[str] = field(default_factory=list)  # files of others that come back

    def lines(self) -> Iterator[str]:
        for action, paths in vars(self).items():
            yield from (f"{action:8}{path}" for path in sorted(paths))


def overlay_files(root: Path) -> dict[str, Path]:
    """Path in the checkout → file of the overlay, for every line of the manifest."""
    found: dict[str, Path] = {}
    for line in (root / "scripts/overlay_manifest.txt").read_text(encoding="utf-8").splitlines():
        pattern = line.split("#")[0].strip()
        if not pattern:
            continue
        matches = {p.relative_to(root).as_posix(): p for p in root.glob(pattern) if p.is_file() and p.suffix != ".pyc"}
        if not matches:
            raise Refusal(f"scripts/overlay_manifest.txt lists {pattern}, which is not there; is this copy complete?")
        found.update(matches)
    return dict(sorted(found.items()))


def check_checkout(folder: Path) -> None:
    """Refuse what is not the root of a YOLOv9 checkout that can be written to."""
    if not folder.is_dir():
        raise Refusal(f"{folder} is no folder; give the folder of a YOLOv9 checkout (scripts/get_yolov9.sh makes one)")
    model, general = folder / "models/yolo.py", folder / "utils/general.py"
    if not (model.is_file() and b"def parse_model" in model.read_bytes() and general.is_file()):
        raise Refusal(f"{folder} is no YOLOv9 checkout: it lacks models/yolo.py with parse_model, or utils/general.py")
    for inside in ("models/yolo.py", "utils/general.py"):
        check_way(folder, inside)


def plan_patch(checkout: Path, files: dict[str, Path], record: Record, force: bool) -> Plan:
    """Compare the overlay with what lies in the checkout."""
    plan, begun = Plan(), []
    _check_ways(checkout, {*files, *record.files})
    _check_modules(checkout, files)
    for path, source in files.items():
        target = checkout / path
        known = record.files.get(path)
        if not os.path.lexists(target):
            plan.add.append(path)
        elif target.is_dir() and not target.is_symlink():
            raise Refusal(f"{target} is a folder, and a file of that name belongs there; move it away")
        elif known is None:
            plan.backup.append(path)
        elif _is_still_others(checkout, path, record):
            begun.append(path)
        elif (found := digest(target)) != digest(source):
            (plan.update if known.has(found) else plan.keep).append(path)
    _plan_removal(checkout, [path for path in record.files if path not in files], record, plan)
    for paths, words in ((plan.backup, "not from this overlay"), (plan.keep, "changed after they were copied")):
        if paths and not force:
            raise Refusal(
                f"{checkout} has files that are {words}: {some(paths)}; --force replaces them and keeps a copy"
            )
    plan.backup += begun  # an earlier run had --force
    return plan


def plan_revert(checkout: Path, record: Record) -> Plan:
    """List how to take out everything that was put in."""
    plan = Plan()
    _check_ways(checkout, {*record.files})
    _plan_removal(checkout, list(record.files), record, plan)
    return plan


def _plan_removal(checkout: Path, paths: list[str], record: Record, plan: Plan) -> None:
    for path in paths:
        known, target = record.files[path], checkout / path
        backup = known.backup and os.path.lexists(checkout / STATE / BACKUP / path)
        others = _is_still_others(checkout, path, record)
        if os.path.lexists(target) and not others and not known.has(digest(target)):
            plan.keep.append(path)
        if backup:
            plan.restore.append(path)
        elif not others:
            plan.remove.append(path)


def _is_still_others(checkout: Path, path: str, record: Record) -> bool:
    """Was a run killed before it replaced this file of others, or after it had put it back?"""
    target, backup = checkout / path, checkout / STATE / BACKUP / path
    if not (record.unfinished and record.files[path].backup and os.path.lexists(target)):
        return False
    return not os.path.lexists(backup) or digest(backup) == digest(target)  # a run makes all its backups at first


def _check_ways(checkout: Path, paths: set[str]) -> None:
    """Refuse where a file, or its backup, would be read, written or removed through a link."""
    for path in sorted(paths):
        check_way(checkout, path)
        check_way(checkout, f"{STATE}/{BACKUP}/{path}")


def _check_modules(checkout: Path, files: dict[str, Path]) -> None:
    """Refuse where a file of others has a module's name too: Python takes the folder, and who wants the file breaks."""
    for path in files:
        folder = Path(path).parent
        if Path(path).name == "__init__.py":
            other = f"{folder.as_posix()}.py"
        else:
            other = (folder / Path(path).stem / "__init__.py").as_posix()
        if path.endswith(".py") and other not in files and os.path.lexists(checkout / other):
            raise Refusal(
                f"{checkout / other} and the overlay's {path} are the same module to Python; move it away, or take a "
                "checkout without it (scripts/get_yolov9.sh makes one)"
            )


def check_way(checkout: Path, path: str) -> None:
    """Refuse to write through a link to somewhere else, or through a file."""
    for parent in Path(path).parents:
        way = checkout / parent
        if parent.parts and (way.is_symlink() or (way.exists() and not way.is_dir())):
            raise Refusal(f"{way} is a {'symbolic link' if way.is_symlink() else 'file'}, and a folder is needed there")
        if way.is_dir() and not os.access(way, os.W_OK | os.X_OK):
            raise Refusal(f"{way} cannot be written to; change its permissions, or copy the checkout")


def some(paths: list[str]) -> str:
    """The first three names, and how many more there are."""
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(sorted(paths)[:3]) + more


def digest(path: Path) -> str:
    """SHA-256 of a file; of a link, where it points (so that no link equals a file)."""
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if not path.is_file():
        raise Refusal(f"{path} is neither a file nor a link, and a file of that name belongs there; move it away")
    return hashlib.sha256(path.read_bytes()).hexdigest()
