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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from overlay_apply import Changes, clean
from overlay_plan import (
    Plan,
    Record,
    Refusal,
    Written,
    check_checkout,
    check_way,
    digest,
    overlay_files,
    plan_patch,
    plan_revert,
    some,
)

from utils.core import console

ROOT = Path(__file__).resolve().parents[1]
KEPT = ".yolov9_overlay_kept"


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
    folder = _kept_folder(checkout) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for path in paths:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(checkout / path, target, follow_symlinks=False)
    return folder


def _kept_folder(checkout: Path) -> Path:
    """In git's own folder, where there is one that can be written to; else in the checkout, with a word to git."""
    git = git_folder(checkout)
    if git is not None and os.access(git, os.W_OK | os.X_OK):
        return git / KEPT
    folder = checkout / KEPT
    ignore = folder / ".gitignore"
    check_way(checkout, f"{KEPT}/.gitignore")
    folder.mkdir(exist_ok=True)
    if not os.path.lexists(ignore):  # what lies there may be a link to somewhere else
        ignore.write_text("*\n", encoding="utf-8")
    return folder


def git_folder(checkout: Path) -> Path | None:
    """Where git keeps a checkout's history; of a worktree, whose .git is a file, that is with the main one's."""
    git = checkout / ".git"
    if git.is_file():
        kind, _, place = git.read_text(encoding="utf-8", errors="surrogateescape").strip().partition(": ")
        git = checkout / place if kind == "gitdir" else git
        common = git / "commondir"
        if common.is_file():
            git = git / common.read_text(encoding="utf-8", errors="surrogateescape").strip()
    return git.resolve() if git.is_dir() else None


def patch(checkout: Path, record: Record, root: Path, *, force: bool, dry_run: bool) -> None:
    """Copy the overlay in `root` into a checkout, or bring a patched checkout up to date."""
    files = overlay_files(root)
    plan = plan_patch(checkout, files, record, force)
    backups = {path for path, known in record.files.items() if known.backup} | set(plan.backup)
    written = {path: Written(digest(source), path in backups) for path, source in files.items()}
    new = Record((root / "VERSION").read_text(encoding="utf-8").strip(), written, record.folders)
    if dry_run:
        print("\n".join([*plan.lines(), f"{checkout}: nothing was changed (--dry-run)"]))
        return
    if new.text() == record.text() and not any(plan.lines()):
        print(f"{checkout} has overlay {new.version} already: {len(files)} files, nothing to do")
        return
    kept = keep_copies(checkout, plan.keep)
    _change(Changes(checkout, plan, record, new), files)
    replaced, removed = len(plan.update + plan.backup + plan.keep), len(plan.remove + plan.restore)
    count = f"{len(plan.add)} added, {replaced} replaced, {removed} removed"
    print(f"{checkout} has overlay {new.version} now: {len(files)} files ({count})")
    if plan.backup:
        print(f"files of that name were put aside; --revert brings them back: {some(plan.backup)}")
    _say_kept(plan, kept)


def revert(checkout: Path, record: Record, *, dry_run: bool) -> None:
    """Take the overlay out of a checkout."""
    if not record.files:
        print(f"{checkout} is not patched: nothing to revert")
        return
    plan = plan_revert(checkout, record)
    if dry_run:
        print("\n".join([*plan.lines(), f"{checkout}: nothing was changed (--dry-run)"]))
        return
    kept = keep_copies(checkout, plan.keep)
    remove_bytecode(checkout)
    _change(Changes(checkout, plan, record, None), {})
    print(f"{checkout} is as it was before overlay {record.version}: {len(record.files)} files taken out")
    _say_kept(plan, kept)


def _change(changes: Changes, files: dict[str, Path]) -> None:
    changes.stage(files)
    with interrupts.held():  # a few milliseconds, so that Ctrl-C means either all or nothing
        changes.carry_out()


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


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the command line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} ({self.prog} -h lists the options)\n")


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give the folder of a YOLOv9 checkout")
    return Path(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="patch_yolov9.sh",
        description="Copy this overlay into a YOLOv9 checkout. Running it again changes nothing.",
    )
    parser.add_argument(
        "checkout", metavar="DIR", type=_folder, help="YOLOv9 checkout (scripts/get_yolov9.sh makes one)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list what would be done")
    parser.add_argument("--revert", action="store_true", help="take the overlay out again")
    parser.add_argument(
        "--force", action="store_true", help="replace files of that name that are not from here, and keep a backup"
    )
    return parser


def run(args: argparse.Namespace, root: Path) -> int:
    """Patch or revert, with every refusal and failure as one line; returns the exit code."""
    checkout = args.checkout.resolve()
    try:
        check_checkout(checkout)
        with _only_one(checkout):
            record = Record.read(checkout)
            if record.unfinished:
                print("an earlier run was killed half way: this one goes on from there")
            if not args.dry_run:
                clean(checkout, record)
            if args.revert:
                revert(checkout, record, dry_run=args.dry_run)
            else:
                patch(checkout, record, root, force=args.force, dry_run=args.dry_run)
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        half = _half_changed(checkout)
        state = "is half changed; run this again, or with --revert" if half else "was left as it was"
        print(f"error: {error}; {checkout} {state}", file=sys.stderr)
        return 1
    return 0


def _half_changed(checkout: Path) -> bool:
    try:
        return Record.read(checkout).unfinished
    except (OSError, Refusal):
        return False


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    console.guard()
    args = _parser().parse_args(argv)
    try:
        return interrupts.job(lambda: run(args, root))
    except KeyboardInterrupt:  # only where no program runs; otherwise the process has ended
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
