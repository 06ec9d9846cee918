#!/usr/bin/env python3
"""Copy what the site is built from into one folder: build/site-source/, with the layout of the repository.

    python docs/stage.py && mkdocs serve

README.md is the home page. Links between pages and to files are the same as on GitHub, since everything lies where it
lies in the repository; files that a page links to are copied, too. It needs nothing but Python.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "build/site-source"
PAGES = ("*.md", "docs/**/*.md")
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)|(?:src|href)=\"([^\"#]+)")
ITEM = re.compile(r"^( *)([-*]|\d+\.) ")


def linked_files(page: Path) -> set[Path]:
    """Return the files of the repository that a page links to; mkdocs names links that lead nowhere."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [match[1] or match[2] for match in LINK.finditer(text)]
    files = {(page.parent / target).resolve() for target in targets if "://" not in target}
    return {file for file in files if file.is_file() and file.is_relative_to(ROOT)}


def for_mkdocs(text: str) -> str:
    """Return a page that Python-Markdown reads as GitHub does: an empty line before lists, items indented by four."""
    lines: list[str] = []
    fenced = in_list = False
    shift = 0  # of a block of code: spaces by which all of its lines move
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip(" "))
        is_fence = line.lstrip().startswith("```")
        if is_fence and not fenced:
            in_list = in_list and indent > 0
            shift = max(4 - indent, 0) if in_list else 0
        if is_fence or fenced:
            fenced = fenced != is_fence
            lines.append(" " * shift + line if line.strip() else line)
            continue
        is_item = bool(ITEM.match(line))
        if is_item and lines and lines[-1].strip() and not in_list:
            lines.append("")
        in_list = is_item or (in_list and (not line.strip() or line.startswith("  ")))
        if in_list and 0 < indent < 4:
            line = "    " + line.lstrip(" ")
        lines.append(line)
    return "\n".join(lines) + "\n"


def stage(target: Path) -> list[Path]:
    """Write the folder anew, and return the pages in it."""
    pages = [path for pattern in PAGES for path in ROOT.glob(pattern)]
    others = set().union(*map(linked_files, pages)) - set(pages)
    shutil.rmtree(target, ignore_errors=True)
    for path in [*pages, *others]:
        copy = target / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path in others:
            shutil.copyfile(path, copy)
        else:
            copy.write_text(for_mkdocs(path.read_text(encoding="utf-8")), encoding="utf-8")
    return sorted(target / path.relative_to(ROOT) for path in pages)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(__doc__)
        sys.exit(0 if {"-h", "--help"} & set(sys.argv) else 2)
    print(f"{len(stage(TARGET))} pages in {TARGET.relative_to(ROOT)}")
