"""Imports of a module, read from its syntax tree."""

from __future__ import annotations

import ast


def imported(tree: ast.Module) -> set[str]:
    """Dotted names that a module imports, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def imported_modules(tree: ast.Module) -> set[str]:
    """The same, and what each name stands in: `from a.b import c` may be a name of `a.b`, or a module."""
    names = imported(tree)
    return names | {name.rpartition(".")[0] for name in names}
