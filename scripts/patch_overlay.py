#!/usr/bin/env python3
"""Copy the overlay into a YOLOv9 checkout, or take it out again. patch_yolov9.sh calls this; standard library only.

scripts/overlay_manifest.txt lists what is copied. The checkout remembers it in .yolov9_overlay/manifest.json (version,
and the SHA-256 of each file), which is how a later run tells the overlay's files from others. What is in the way is
renamed, and an exception or Ctrl-C renames it back. After a kill, patching again ends what was begun.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
STATE = ".yolov9_overlay"
RECORD = f"{STATE}/manifest.json"  # version, and of each file its SHA-256 and whether it replaced one in BACKUP
BACKUP = f"{STATE}/backup"  # files of others, under their own paths, until --revert
OLD = f"{STATE}/old"  # while files change: the overlay's files that go
KEPT = ".yolov9_overlay_kept"  # the overlay's files as the user changed them, when they were replaced or taken out
Record = dict[str, Any]
Files = dict[str, Path]  # path in the checkout → file of the overlay
# What a run does → paths in the checkout: add, update, remove; backup, which puts files of others aside, and restore,
# which brings them back; keep, which puts the overlay's files aside that the user has changed.
Plan = dict[str, list[str]]


class Refusal(Exception):
    """The request cannot be carried out; nothing was changed. Exit code 2."""


def patch(checkout: Path, root: Path, *, force: bool, revert: bool, dry_run: bool) -> None:
    """Copy the overlay in `root` into a checkout, or take out what an earlier run copied, and say so."""
    old = read_record(checkout)
    files = {} if revert else overlay_files(root)
    plan, rows = make_plan(checkout, files, old)
    new = {"version": (root / "VERSION").read_text(encoding="utf-8").strip(), "files": rows, "folders": []}
    for action, words in (("backup", "not from this overlay"), ("keep", "changed after they were copied")):
        if plan[action] and not (force or revert):
            names = first_names(plan[action])
            raise Refusal(f"{checkout} has files that are {words}: {names}; --force replaces them, with a copy")
    if dry_run:
        print("".join(f"{action:8}{path}\n" for action, paths in plan.items() for path in paths), end="")
        print(f"{checkout}: nothing was changed (--dry-run)")
        return
    tidy(checkout, set())  # what a run that was killed has left
    if not revert and new["version"] == old["version"] and rows == old["files"] and not any(plan.values()):
        print(f"{checkout} has overlay {new['version']} already: {len(files)} files, nothing to do")
        return
    kept = f"{KEPT}/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    carry_out(checkout, plan, files, new, kept)
    tidy(checkout, {*old["files"]} - {*files})
    if revert and not old["files"]:
        print(f"{checkout} is not patched: nothing to revert")
    elif revert:
        print(f"{checkout} is as it was before overlay {old['version']}: {len(old['files'])} files taken out")
    else:
        replaced, removed = plan["update"] + plan["backup"] + plan["keep"], plan["remove"] + plan["restore"]
        count = f"{len(plan['add'])} added, {len(replaced)} replaced, {len(removed)} removed"
        print(f"{checkout} has overlay {new['version']} now: {len(files)} files ({count})")
    if plan["backup"]:
        print(f"files of that name were put aside; --revert brings them back: {first_names(plan['backup'])}")
    if plan["keep"]:
        (checkout / kept / ".gitignore").write_text("*\n", encoding="utf-8")
        print(f"you had changed {first_names(plan['keep'])}; your version is kept in {checkout / kept}")
    if not revert:
        print(f"next: cd {shlex.quote(str(checkout))} && python reparameterization.py --weights WEIGHTS.pt")
        print("or, for a GELAN, which has no auxiliary branch: python qat.py quantize --weights WEIGHTS.pt")


def read_record(checkout: Path) -> Record:
    """What a checkout remembers of the overlay."""
    model, path = checkout / "models/yolo.py", checkout / RECORD
    if not (model.is_file() and b"def parse_model" in model.read_bytes() and (checkout / "utils/general.py").is_file()):
        raise Refusal(f"{checkout} is no YOLOv9 checkout: it lacks models/yolo.py or utils/general.py of upstream's")
    if not path.exists():
        return {"version": "", "files": {}}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        rows = {name: {key: row[key] for key in ("sha256", "backup")} for name, row in record["files"].items()}
        return {"version": record["version"], "files": rows}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"{path} is damaged ({error}); restore it, or start from a fresh checkout") from error


def overlay_files(root: Path) -> Files:
    """The files that the manifest lists."""
    files: Files = {}
    for line in (root / "scripts/overlay_manifest.txt").read_text(encoding="utf-8").splitlines():
        if pattern := line.split("#")[0].strip():
            matches = [path for path in root.glob(pattern) if path.is_file() and path.suffix != ".pyc"]
            if not matches:
                raise Refusal(f"overlay_manifest.txt lists {pattern}, which is not there; is this copy complete?")
            files.update((path.relative_to(root).as_posix(), path) for path in matches)
    return files


def make_plan(checkout: Path, files: Files, record: Record) -> tuple[Plan, dict[str, Any]]:
    """Compare what lies in the checkout with what is to lie there; also the rows of the record when that is done."""
    plan: Plan = defaultdict(list)
    rows = {}
    for path in sorted({*files, *record["files"]}):
        row = record["files"].get(path)
        content = digest(checkout / path)
        wanted = digest(files[path]) if path in files else ""  # '': it is to be taken out
        has_backup = os.path.lexists(checkout / BACKUP / path)
        if row is not None and content == row["sha256"] != wanted:
            plan["update" if wanted else "remove"].append(path)
        elif wanted and not content:
            plan["add"].append(path)
        elif content not in ("", wanted):
            others = row is None or (row["backup"] and not has_backup)  # the second: a kill came after it was restored
            if wanted or not others:
                plan["backup" if others else "keep"].append(path)
        if wanted:
            rows[path] = {"sha256": wanted, "backup": has_backup or path in plan["backup"]}
        elif has_backup:
            plan["restore"].append(path)
    return plan, rows


def carry_out(checkout: Path, plan: Plan, files: Files, new: Record, kept: str) -> None:
    """Rename and copy files, and write the record; whatever ends that early, everything is put back."""
    moves = [(path, f"{BACKUP}/{path}") for path in plan["backup"]]
    moves += [(path, f"{kept}/{path}") for path in plan["keep"]]
    moves += [(path, f"{OLD}/{path}") for path in plan["update"] + plan["remove"]]
    moves += [(f"{BACKUP}/{path}", path) for path in plan["restore"]]
    copies = [path for action in ("add", "update", "backup", "keep") for path in plan[action] if path in files]
    begun: list[tuple[str, str]] = []
    record = checkout / OLD / "manifest.json"
    try:
        for source, target in moves:
            (checkout / target).parent.mkdir(parents=True, exist_ok=True)
            begun.append((source, target))
            (checkout / source).rename(checkout / target)
        for path in copies:
            (checkout / path).parent.mkdir(parents=True, exist_ok=True)
            begun.append(("", path))
            shutil.copy(files[path], checkout / path)
        if new["files"]:
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
            record.replace(checkout / RECORD)
        else:
            (checkout / RECORD).unlink(missing_ok=True)
    except BaseException:
        for source, target in reversed(begun):
            if not source:
                (checkout / target).unlink(missing_ok=True)
            elif not os.path.lexists(checkout / source):
                (checkout / target).rename(checkout / source)
        tidy(checkout, {*copies})
        raise


def tidy(checkout: Path, gone: set[str]) -> None:
    """Remove what a run needed and, where files are gone, bytecode (upstream's git ignores none) and empty folders."""
    caches = {(checkout / path).parent / "__pycache__" for path in gone}
    if gone:
        caches |= {path for top in ("models", "utils") for path in (checkout / top).rglob("__pycache__")}
    for folder in (checkout / OLD, *caches):
        shutil.rmtree(folder, ignore_errors=True)  # which leaves a link alone
    folders = {parent for path in gone for parent in (checkout / path).parents if checkout in parent.parents}
    folders |= {path for top in (STATE, KEPT) for path in (checkout / top, *(checkout / top).rglob("*"))}
    for folder in sorted(folders, reverse=True):
        with suppress(OSError):  # a file, or a folder that holds something
            folder.rmdir()


def digest(path: Path) -> str:
    """SHA-256 of a file, '' where nothing is, and a word for anything else."""
    if path.is_symlink() or not path.is_file():
        return "no file" if os.path.lexists(path) else ""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def first_names(paths: list[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


class LineParser(argparse.ArgumentParser):
    """Says in one line what is wrong with the command line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} ({self.prog} -h lists the options)\n")


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Read the command line; returns the exit code."""
    parser = LineParser(
        "patch_yolov9.sh", description="Copy this overlay into a YOLOv9 checkout, or bring it up to date."
    )
    parser.add_argument("checkout", metavar="DIR", help="YOLOv9 checkout (scripts/get_yolov9.sh makes one)")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be done")
    parser.add_argument("--revert", action="store_true", help="take the overlay out again")
    parser.add_argument("--force", action="store_true", help="replace files that are not from here, and keep a copy")
    args = parser.parse_args(argv)
    if not args.checkout:
        parser.error("DIR is empty")
    checkout = Path(args.checkout).resolve()
    try:
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
