#!/usr/bin/env python3
"""Write a page for each module of the libraries from its docstrings: build/site/api/, beside the site.

    pip install -r requirements/api.txt    # in an environment that install_dependencies.sh has made
    python docs/api.py                     # then open build/site/api/index.html

Modules are imported, for which neither upstream nor a GPU is needed.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TARGET = ROOT / "build/site/api"
ENTRY = re.compile(r"\w+(\.py|/) {2,}\S")  # of a map: a file or a folder, and what is in it
LIBRARIES = ("models.quantize", "utils.onnx_graph", "utils.evaluation", "utils.runners", "utils.trt")


def with_map(docstring: str) -> str:
    """Fence the map of files in a docstring, so that Markdown shows it as it stands."""
    parts = docstring.rstrip().split("\n\n")
    return "\n\n".join(f"```text\n{part}\n```" if ENTRY.match(part) else part for part in parts)


def expected_pages() -> set[str]:
    """Return the pages of all modules of the libraries, as paths below the target."""
    pages = set()
    for library in LIBRARIES:
        folder = ROOT / library.replace(".", "/")
        for path in folder.rglob("*.py"):
            page = path.parent if path.stem == "__init__" else path.with_suffix("")
            pages.add(f"{page.relative_to(ROOT).as_posix()}.html")
    return pages


def write(target: Path) -> int:
    """Write the pages into a folder, and return their number; `ImportError` names modules without a page."""
    import pdoc

    pdoc.render.configure(docformat="google")
    for library in LIBRARIES:
        module = importlib.import_module(library)
        module.__doc__ = with_map(module.__doc__ or "")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error parsing type annotation")  # types that are imported for mypy alone
        pdoc.pdoc(*LIBRARIES, output_directory=target)
    expected = expected_pages()
    missing = sorted(page for page in expected if not (target / page).is_file())
    if missing:
        raise ImportError(f"no page of {', '.join(missing)}; see the warnings above")
    return len(expected)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(__doc__)
        sys.exit(0 if {"-h", "--help"} & set(sys.argv) else 2)
    print(f"{write(TARGET)} pages in {TARGET.relative_to(ROOT)}")
