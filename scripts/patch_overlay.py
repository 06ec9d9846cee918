#!/usr/bin/env python3
"""Copy the overlay into a YOLOv9 checkout, or take it out again. patch_yolov9.sh calls this; standard library only.

scripts/overlay_manifest.txt lists what is copied. The checkout remembers it in .yolov9_overlay/manifest.json (version,
and the SHA-256 of each file), which is how a later run tells the overlay's files from others. What is in the way is
renamed, and an exception or Ctrl-C renames it back. The record is written before the first file changes, so that after
a kill patching again or --revert works.
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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
STATE = ".yolov9_overlay"
RECORD = f"{STATE}/manifest.json"  # version, and of each file its SHA-256 and whether it replaced one in BACKUP
BACKUP = f"{STATE}/backup"  # files of others, under their own paths, until --revert
NEW, OLD = f"{STATE}/new", f"{STATE}/old"  # while files change: the overlay's files that come and go
KEPT = ".yolov9_overlay_kept"  # the overlay's files as the user changed them, when they were replaced or taken out
Record = dict[str, Any]
Files = dict[str, Path]  # path in the checkout → file of the overlay


class Refusal(Exception):
    """The request cannot be carried out; nothing was changed. Exit code 2."""


@dataclass
class Changes:
    """What a run changes: paths in the checkout."""

    add: list[str] = field(default_factory=list)
    update: list[str] = field(default_factory=list)
    backup: list[str] = field(default_factory=list)  # files of others that are replaced
    keep: list[str] = field(default_factory=list)  # files of the overlay that the user has changed
    remove: list[str] = field(default_factory=list)
    restore: list[str] = field(default_factory=list)  # files of others that come back


def patch(checkout: Path, root: Path, *, force: bool, revert: bool, dry_run: bool) -> None:
    """Copy the overlay in `root` into a checkout, or take out what an earlier run copied, and say so."""
    old = read_record(checkout)
    files = {} if revert else overlay_files(root)
    refuse_links(checkout, {"models/yolo.py", "utils/general.py", *files, *old["files"]})
    if not dry_run:
        tidy(checkout, set())  # what a run that was killed has left
    plan, rows = make_plan(checkout, files, old)
    new = {"version": (root / "VERSION").read_text(encoding="utf-8").strip(), "files": rows}
    for paths, words in ((plan.backup, "not from this overlay"), (plan.keep, "changed after they were copied")):
        if paths and not (force or revert):
            raise Refusal(
                f"{checkout} has files that are {words}: {first_names(paths)}; --force replaces them, with a copy"
            )
    if dry_run:
        print("".join(f"{action:8}{path}\n" for action, paths in vars(plan).items() for path in paths), end="")
        print(f"{checkout}: nothing was changed (--dry-run)")
    elif revert and not old["files"]:
        print(f"{checkout} is not patched: nothing to revert")
    elif new == old and not any(vars(plan).values()):
        print(f"{checkout} has overlay {new['version']} already: {len(files)} files, nothing to do")
    else:
        kept = f"{KEPT}/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        carry_out(checkout, plan, files, old, new, kept)
        if revert:
            print(f"{checkout} is as it was before overlay {old['version']}: {len(old['files'])} files taken out")
        else:
            replaced, removed = plan.update + plan.backup + plan.keep, plan.remove + plan.restore
            count = f"{len(plan.add)} added, {len(replaced)} replaced, {len(removed)} removed"
            print(f"{checkout} has overlay {new['version']} now: {len(files)} files ({count})")
        if plan.backup:
            print(f"files of that name were put aside; --revert brings them back: {first_names(plan.backup)}")
        if plan.keep:
            (checkout / kept / ".gitignore").write_text("*\n", encoding="utf-8")
            print(f"you had changed {first_names(plan.keep)}; your version is kept in {checkout / kept}")
    if not (dry_run or revert):
        print(f"next: cd {shlex.quote(str(checkout))} && python reparameterization.py --weights WEIGHTS.pt")
        print("or, for a GELAN, which has no auxiliary branch: python qat.py quantize --weights WEIGHTS.pt")


def read_record(checkout: Path) -> Record:
    """What a checkout remembers of the overlay. It may be a stranger's: no name is trusted to lie in the checkout."""
    model, path = checkout / "models/yolo.py", checkout / RECORD
    if not (model.is_file() and b"def parse_model" in model.read_bytes() and (checkout / "utils/general.py").is_file()):
        raise Refusal(
            f"{checkout} is no YOLOv9 checkout: models/yolo.py or utils/general.py is missing, or another file"
        )
    if not os.path.lexists(path):
        return {"version": "", "files": {}}
    try:
        if path.is_symlink():
            raise ValueError("it is a symbolic link")
        record = json.loads(path.read_text(encoding="utf-8"))
        for name in [record["version"], *record["files"]]:
            if not name.isprintable() or {"", ".", "..", ".git", STATE} & {*name.casefold().split("/")}:
                raise ValueError(f"{name[:80]!a} cannot be a file of the overlay")
        rows = {name: {key: row[key] for key in ("sha256", "backup")} for name, row in record["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"{path} is damaged ({error}); restore it, or start from a fresh checkout") from error
    return {"version": record["version"], "files": rows}


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


def refuse_links(checkout: Path, paths: set[str]) -> None:
    """Refuse to go through links, which could lead out of the checkout."""
    places = [Path(top, path) for top in ("", BACKUP, NEW, OLD, KEPT) for path in paths]
    for folder in sorted({checkout / parent for place in places for parent in place.parents[:-1]}):
        if folder.is_symlink() or folder.is_file():
            kind = "symbolic link" if folder.is_symlink() else "file"
            raise Refusal(f"{folder} is a {kind}, and a folder is needed there")


def make_plan(checkout: Path, files: Files, record: Record) -> tuple[Changes, dict[str, Any]]:
    """Compare what lies in the checkout with what is to lie there; also the rows of the record when that is done."""
    plan, rows = Changes(), {}
    for path in sorted({*files, *record["files"]}):
        row = record["files"].get(path)
        content = digest(checkout / path)
        wanted = digest(files[path]) if path in files else ""  # '': it is to be taken out
        has_backup = row is not None and os.path.lexists(checkout / BACKUP / path)
        if not content:
            plan.add += [path] if wanted else []
        elif row is not None and content in (row["sha256"], wanted):  # a run that was killed may have written it
            if content != wanted:
                (plan.update if wanted else plan.remove).append(path)
        elif row is None or (row["backup"] and not has_backup):  # which a run that was killed has not replaced yet
            plan.backup += [path] if wanted else []
        else:
            plan.keep.append(path)
        if wanted:
            rows[path] = {"sha256": wanted, "backup": has_backup or path in plan.backup}
        elif has_backup:
            plan.restore.append(path)
    return plan, rows


def carry_out(checkout: Path, plan: Changes, files: Files, old: Record, new: Record, kept: str) -> None:
    """Carry out a plan: copy the files into NEW, then rename. Whatever ends that early, everything is put back."""
    copies = [path for path in plan.add + plan.update + plan.backup + plan.keep if path in files]
    moves = [(path, f"{BACKUP}/{path}") for path in plan.backup]
    moves += [(path, f"{kept}/{path}") for path in plan.keep]
    moves += [(path, f"{OLD}/{path}") for path in plan.update + plan.remove]
    moves += [(f"{BACKUP}/{path}", path) for path in plan.restore]
    moves += [(f"{NEW}/{path}", path) for path in copies]
    done: list[tuple[str, str]] = []
    try:
        for path in copies:
            (checkout / NEW / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(files[path], checkout / NEW / path)
        write_record(checkout, {"version": new["version"], "files": {**new["files"], **old["files"]}})
        for source, target in moves:
            done.append((source, target))  # before it is done, since Ctrl-C may come between the two
            (checkout / target).parent.mkdir(parents=True, exist_ok=True)
            os.rename(checkout / source, checkout / target)
        write_record(checkout, new)
    except BaseException:
        for source, target in reversed(done):
            if not os.path.lexists(checkout / source):
                os.rename(checkout / target, checkout / source)
        write_record(checkout, old)
        tidy(checkout, {*copies})
        raise
    tidy(checkout, {*old["files"]} - {*files})


def write_record(checkout: Path, record: Record) -> None:
    """Replace the record; one without files is removed."""
    path, part = checkout / RECORD, checkout / NEW / "manifest.json"
    if not record["files"]:
        path.unlink(missing_ok=True)
        return
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(json.dumps({**record, "folders": []}, indent=1) + "\n", encoding="utf-8")  # 1.0 reads folders
    part.replace(path)


def tidy(checkout: Path, gone: set[str]) -> None:
    """Remove what a run needed and, where files are gone, bytecode (upstream's git ignores none) and empty folders."""
    caches = {(checkout / path).parent / "__pycache__" for path in gone}
    if gone:
        caches |= {path for top in ("models", "utils") for path in (checkout / top).rglob("__pycache__")}
    for folder in (checkout / NEW, checkout / OLD, *caches):
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
