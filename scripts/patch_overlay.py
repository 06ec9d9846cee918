#!/usr/bin/env python3
"""Copy the overlay into a YOLOv9 checkout, or take it out again. patch_yolov9.sh calls this; standard library only.

What is copied is what scripts/overlay_manifest.txt lists. The checkout remembers it in .yolov9_overlay/manifest.json
(version, and the SHA-256 of each file), which is how a later run tells its own files from those of others.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
import fcntl
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from file_transaction import Transaction, remove_empty
from overlay_plan import (
    RECORD,
    STATE,
    Plan,
    Record,
    Refusal,
    Written,
    check_checkout,
    digest,
    overlay_files,
    plan_patch,
    plan_revert,
    some,
)

ROOT = Path(__file__).resolve().parents[1]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked the program to end."""


def apply(checkout: Path, files: dict[str, Path], plan: Plan, record: Record, new: Record | None) -> None:
    """Carry out a plan; `new` is what the checkout remembers afterwards (None: nothing)."""
    change = _transaction(checkout)
    try:
        for path in plan.backup:
            change.stage(f"{STATE}/backup/{path}", checkout / path, exact=True)
        for path in files:
            if path in {*plan.add, *plan.update, *plan.backup, *plan.keep}:
                change.stage(path, files[path])
        for path in plan.restore:
            change.stage(path, checkout / STATE / "backup" / path, exact=True)
            change.remove(f"{STATE}/backup/{path}")
        for path in plan.remove:
            change.remove(path)
        if new is None:
            change.remove(RECORD)
        else:
            ours = [folder for folder in change.new_folders() if folder != STATE and not folder.startswith(f"{STATE}/")]
            new.folders = sorted({*record.folders, *ours})
            change.stage_text(RECORD, new.text())
        with _signals_ignored():  # a few milliseconds, so that a signal means either all or nothing
            change.commit()
            tidy(checkout, record, [path for path in record.files if new is None or path not in new.files])
    except BaseException:
        with _signals_ignored():
            change.undo()
        raise


def _transaction(checkout: Path) -> Transaction:
    return Transaction(checkout, checkout / STATE / "transaction")


def tidy(checkout: Path, record: Record, gone: list[str]) -> None:
    """Remove bytecode of files that are gone, and folders that were made for them and are empty now."""
    for path in gone:
        source = checkout / path
        for cached in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"):
            cached.unlink()
    parents = {parent.as_posix() for path in gone for parent in Path(path).parents if parent.parts}
    caches = [f"{Path(path).parent.as_posix()}/__pycache__" for path in gone]
    backups = [f"{STATE}/backup/{parent}" for parent in parents] + [f"{STATE}/backup", STATE]
    remove_empty(checkout, caches)
    remove_empty(checkout, [*(folder for folder in record.folders if folder in parents), *backups])


def remove_bytecode(checkout: Path) -> None:
    """Remove what Python wrote beside upstream's modules when our programs imported them: upstream ignores nothing."""
    folders = [checkout / "__pycache__"]
    folders += [folder for name in ("models", "utils") for folder in (checkout / name).rglob("__pycache__")]
    for folder in folders:
        if not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


def keep_copies(checkout: Path, paths: list[str]) -> Path | None:
    """Copy files that the user has changed to where neither patching nor git will touch them; returns that folder."""
    if not paths:
        return None
    inside = checkout / ".git" if (checkout / ".git").is_dir() else checkout
    folder = inside / ".yolov9_overlay_kept" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for path in paths:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(checkout / path, target, follow_symlinks=False)
    return folder


def patch(checkout: Path, root: Path, *, force: bool, dry_run: bool) -> None:
    """Copy the overlay in `root` into a checkout, or bring a patched checkout up to date."""
    files, record = overlay_files(root), Record.read(checkout)
    plan = plan_patch(checkout, files, record, force)
    backups = {path for path, known in record.files.items() if known.backup} | set(plan.backup)
    written = {path: Written(digest(source), path in backups) for path, source in files.items()}
    new = Record((root / "VERSION").read_text().strip(), written, record.folders)
    if dry_run:
        print("\n".join([*plan.lines(), f"{checkout}: nothing was changed (--dry-run)"]))
        return
    if new.text() == record.text() and not any(plan.lines()):
        print(f"{checkout} has overlay {new.version} already: {len(files)} files, nothing to do")
        return
    kept = keep_copies(checkout, plan.keep)
    apply(checkout, files, plan, record, new)
    replaced, removed = len(plan.update + plan.backup + plan.keep), len(plan.remove + plan.restore)
    count = f"{len(plan.add)} added, {replaced} replaced, {removed} removed"
    print(f"{checkout} has overlay {new.version} now: {len(files)} files ({count})")
    if plan.backup:
        print(f"files of that name were put aside; --revert brings them back: {some(plan.backup)}")
    _say_kept(plan, kept)


def revert(checkout: Path, *, dry_run: bool) -> None:
    """Take the overlay out of a checkout."""
    record = Record.read(checkout)
    if not record.files:
        print(f"{checkout} is not patched: nothing to revert")
        return
    plan = plan_revert(checkout, record)
    if dry_run:
        print("\n".join([*plan.lines(), f"{checkout}: nothing was changed (--dry-run)"]))
        return
    kept = keep_copies(checkout, plan.keep)
    remove_bytecode(checkout)
    apply(checkout, {}, plan, record, None)
    print(f"{checkout} is as it was before overlay {record.version}: {len(record.files)} files taken out")
    _say_kept(plan, kept)


def _say_kept(plan: Plan, kept: Path | None) -> None:
    if kept is not None:
        print(f"you had changed {some(plan.keep)}; your version is kept in {kept}")


@contextmanager
def _only_one(checkout: Path) -> Iterator[None]:
    """Hold a lock on the folder itself, which leaves no file behind."""
    descriptor = os.open(checkout, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise Refusal(f"{checkout} is being patched by another process; try again when it has ended") from None
    finally:
        os.close(descriptor)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="patch_yolov9.sh",
        description="Copy this overlay into a YOLOv9 checkout. Running it again changes nothing.",
    )
    parser.add_argument("checkout", metavar="DIR", type=Path, help="YOLOv9 checkout (scripts/get_yolov9.sh makes one)")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be done")
    parser.add_argument("--revert", action="store_true", help="take the overlay out again")
    parser.add_argument(
        "--force", action="store_true", help="replace files of that name that are not from here, and keep a backup"
    )
    return parser


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    args = _parser().parse_args(argv)
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    checkout = args.checkout.resolve()
    try:
        check_checkout(checkout)
        with _only_one(checkout):
            if _transaction(checkout).pending():
                print("an earlier run was killed half way: what it had changed is put back first")
                if args.dry_run:
                    return 0
            if not args.dry_run:
                _transaction(checkout).undo()
            if args.revert:
                revert(checkout, dry_run=args.dry_run)
            else:
                patch(checkout, root, force=args.force, dry_run=args.dry_run)
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        half = _transaction(checkout).pending()
        state = "is half changed; run this again, which puts it back first" if half else "was left as it was"
        print(f"error: {error}; {checkout} {state}", file=sys.stderr)
        return 1
    except Interrupted as error:
        print(f"interrupted; {checkout} was left as it was", file=sys.stderr)
        return 128 + int(error.args[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
