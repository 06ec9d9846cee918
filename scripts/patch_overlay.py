#!/usr/bin/env python3
"""Copy the overlay into a YOLOv9 checkout, or take it out again. patch_yolov9.sh calls this; standard library only.

scripts/overlay_manifest.txt lists what is copied. The checkout remembers it in .yolov9_overlay/manifest.json (version,
and the SHA-256 of each file), which is how a later run tells the overlay's files from others. What is in the way is
renamed, and an exception or Ctrl-C renames it back. After a kill, patching again ends what was begun.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import signal
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
STATE = ".yolov9_overlay"
RECORD = f"{STATE}/manifest.json"  # version, and the SHA-256 of each file
BACKUP = f"{STATE}/backup"  # files of others and changed ones, under their own paths, until --revert
OLD = f"{STATE}/old"  # while files change: the overlay's files that go
Digests = dict[str, str]  # path in the checkout → SHA-256
# What a run does, and the paths in the checkout: add, update, remove; backup, which puts a file that is not ours as it
# is aside; restore, which brings it back; leave, a file that the user has changed and the overlay no longer has.
ACTIONS = ("add", "update", "remove", "backup", "restore", "leave")
Plan = dict[str, list[str]]


class Refusal(Exception):
    """The request cannot be carried out; nothing was changed. Exit code 2."""


def patch(checkout: Path, root: Path, *, force: bool, revert: bool, dry_run: bool) -> None:
    """Copy the overlay in `root` into a checkout, or take out what an earlier run copied, and say so."""
    old_version, old = read_record(checkout)
    files = {} if revert else overlay_files(root)
    new = {path: digest(file) for path, file in files.items()}
    version = (root / "VERSION").read_text(encoding="utf-8").strip()
    plan = make_plan(checkout, new, old)
    if plan["backup"] and not (force or revert):
        names = first_names(plan["backup"])
        raise Refusal(f"{checkout} has files that are not the overlay's, or changed: {names}; --force puts them aside")
    if dry_run:
        for action, paths in plan.items():
            for path in paths:
                print(f"{action:8}{path}")
        print(f"{checkout}: nothing was changed (--dry-run)")
        return
    record: dict[str, object] = {
        "version": version,
        "files": {path: {"sha256": sha256} for path, sha256 in new.items()},
    }
    carry_out(checkout, plan, files, record)
    tidy(checkout, {*old} - {*new})
    result = reverted(plan, old_version, old) if revert else patched(plan, old_version, version)
    counts = ", ".join(f"{action} {len(paths)}" for action, paths in plan.items() if paths)
    print(f"{checkout} {result} ({counts})" if counts else f"{checkout} {result}")
    if plan["backup"]:
        print(f"put aside in {checkout / BACKUP}: {first_names(plan['backup'])}; --revert brings them back")
    if plan["leave"]:
        print(f"not removed, since you had changed them: {first_names(plan['leave'])}")
    if not revert:
        print(f"next: cd {shlex.quote(str(checkout))} && python reparameterization.py --weights WEIGHTS.pt")
        print("or, for a GELAN, which has no auxiliary branch: python qat.py quantize --weights WEIGHTS.pt")


def patched(plan: Plan, old_version: str, version: str) -> str:
    """Return what a run of the overlay came to, in words."""
    if any(plan.values()) or version != old_version:
        return f"has overlay {version} now"
    return f"has overlay {version} already: nothing to do"


def reverted(plan: Plan, old_version: str, old: Digests) -> str:
    """Return what taking the overlay out came to, in words."""
    if not old:
        return "is not patched: nothing to revert"
    if plan["leave"]:
        return f"is as it was before overlay {old_version}, except for files that you had changed"
    return f"is as it was before overlay {old_version}"


def read_record(checkout: Path) -> tuple[str, Digests]:
    """Return the version and the files that a checkout remembers of the overlay."""
    model, path = checkout / "models/yolo.py", checkout / RECORD
    if not (model.is_file() and b"def parse_model" in model.read_bytes() and (checkout / "utils/general.py").is_file()):
        raise Refusal(f"{checkout} is not a YOLOv9 checkout: it lacks models/yolo.py or utils/general.py of upstream's")
    if not path.exists():
        return "", {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record["version"], {name: row["sha256"] for name, row in record["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"{path} is damaged ({error}); restore it, or start from a fresh checkout") from error


def overlay_files(root: Path) -> dict[str, Path]:
    """Return the files that the manifest lists: path in the checkout → file."""
    files: dict[str, Path] = {}
    for line in (root / "scripts/overlay_manifest.txt").read_text(encoding="utf-8").splitlines():
        pattern = line.split("#")[0].strip()
        if not pattern:
            continue
        matches = [path for path in root.glob(pattern) if path.is_file() and path.suffix != ".pyc"]
        if not matches:
            raise Refusal(f"overlay_manifest.txt lists {pattern}, which is not there; is this copy complete?")
        for path in matches:
            files[path.relative_to(root).as_posix()] = path
    return files


def make_plan(checkout: Path, new: Digests, old: Digests) -> Plan:
    """Compare what lies in the checkout with what was copied and with what is to lie there."""
    plan: Plan = {action: [] for action in ACTIONS}
    for path in sorted({*new, *old}):
        has_backup = os.path.lexists(checkout / BACKUP / path)
        action = action_for(digest(checkout / path), new.get(path, ""), old.get(path), has_backup)
        if action:
            plan[action].append(path)
        if has_backup and path not in new:
            plan["restore"].append(path)
    return plan


def action_for(content: str, new: str, old: str | None, has_backup: bool) -> str:
    """Return the action for a file, '' for none.

    Args:
        content: the digest of what lies in the checkout, '' for nothing.
        new: of what is to lie there, '' for nothing.
        old: of what an earlier run copied; None if it copied no such file.
    """
    if content == new:
        return ""
    if not content:
        return "add"
    if content == old:
        return "update" if new else "remove"
    return "backup" if new or has_backup else "leave"


def carry_out(checkout: Path, plan: Plan, files: dict[str, Path], record: dict[str, object]) -> None:
    """Rename and copy files, and write the record; whatever ends that early, everything is put back."""
    moves = [(path, f"{BACKUP}/{path}") for path in plan["backup"]]
    moves += [(path, f"{OLD}/{path}") for path in plan["update"] + plan["remove"]]
    moves += [(f"{BACKUP}/{path}", path) for path in plan["restore"]]
    copies = [path for action in ("add", "update", "backup") for path in plan[action] if path in files]
    begun: list[tuple[str, str]] = []  # (source, target) of renames, ('', target) of copies
    written = checkout / OLD / "new"  # a kill leaves no half file under its name
    try:
        for source, target in moves:
            while os.path.lexists(checkout / target):  # changed again after an earlier backup
                target += "~"
            (checkout / target).parent.mkdir(parents=True, exist_ok=True)
            begun.append((source, target))
            (checkout / source).rename(checkout / target)
        written.parent.mkdir(parents=True, exist_ok=True)
        for path in copies:
            (checkout / path).parent.mkdir(parents=True, exist_ok=True)
            begun.append(("", path))
            shutil.copy(files[path], written)
            written.replace(checkout / path)
        if files:
            written.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            written.replace(checkout / RECORD)
        else:
            (checkout / RECORD).unlink(missing_ok=True)
    except BaseException:
        put_back(checkout, begun)
        tidy(checkout, {*copies})
        raise


def put_back(checkout: Path, begun: list[tuple[str, str]]) -> None:
    """Undo renames and copies, the last one first."""
    for source, target in reversed(begun):
        if not source:
            (checkout / target).unlink(missing_ok=True)
        elif not os.path.lexists(checkout / source):
            (checkout / target).rename(checkout / source)


def tidy(checkout: Path, gone: set[str]) -> None:
    """Remove what a run needed and, where files are gone, bytecode (upstream's git ignores none) and empty folders."""
    caches = {(checkout / path).parent / "__pycache__" for path in gone}
    if gone:
        caches |= {path for top in ("models", "utils") for path in (checkout / top).rglob("__pycache__")}
    for folder in (checkout / OLD, *caches):
        shutil.rmtree(folder, ignore_errors=True)
    folders = {parent for path in gone for parent in (checkout / path).parents if checkout in parent.parents}
    for folder in sorted({*folders, checkout / STATE, *(checkout / STATE).rglob("*")}, reverse=True):
        with suppress(OSError):  # a file, or a folder that holds something
            folder.rmdir()


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, '' where nothing is, and a word for anything else."""
    if path.is_symlink() or not path.is_file():
        return "no file" if os.path.lexists(path) else ""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def first_names(paths: list[str]) -> str:
    """Return the first three names, and how many more there are."""
    names = ", ".join(paths[:3])
    return f"{names} and {len(paths) - 3} more" if len(paths) > 3 else names


class LineParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} ({self.prog} -h lists the options)\n")


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Read the command line, and return the exit code."""
    parser = LineParser(
        "patch_yolov9.sh", description="Copy this overlay into a YOLOv9 checkout, or bring it up to date."
    )
    parser.add_argument("checkout", metavar="DIR", help="YOLOv9 checkout (scripts/get_yolov9.sh makes one)")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be done")
    parser.add_argument("--revert", action="store_true", help="take the overlay out again")
    parser.add_argument("--force", action="store_true", help="replace files that are not from here, and keep a copy")
    args = parser.parse_args(argv)
    checkout = Path(args.checkout or "/nowhere").resolve()
    try:
        with ExitStack() as stack:
            if checkout.is_dir():  # of two runs at once the second waits for the first
                lock = os.open(checkout, os.O_RDONLY)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX)
            patch(checkout, root, force=args.force, revert=args.revert, dry_run=args.dry_run)
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}; {checkout} is as it was before", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a closed output ends it quietly: it prints when all is done
    sys.exit(main())
