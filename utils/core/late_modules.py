"""Modules that others import at their top and seldom use: imported for real when something of them is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any


class LateModule(types.ModuleType):
    """Stands in `sys.modules` for a module until an attribute is asked for that it has not been given.

    Args:
        name: the module's full name.
        answers: attributes that it has without an import; the real module takes their place later.
        package: there are modules below it. Python asks for its `__path__` before it imports one, and then it is real.
    """

    def __init__(self, name: str, answers: dict[str, Any], *, package: bool) -> None:
        super().__init__(name)
        self._answers, self._package = tuple(answers), package
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        # __file__ and others are asked for by whoever goes through all modules, such as `inspect`
        if name.startswith("__") and not (name == "__path__" and self._package):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._real(), name)

    def _real(self) -> types.ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        for name in self._answers:
            vars(self).pop(name, None)
        return importlib.import_module(self.__name__)


def import_late(name: str, **answers: Any) -> None:
    """Let the next `import` of a package be a late one; nothing happens if it is imported or not installed."""
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is not None:
        module = LateModule(name, answers, package=spec.submodule_search_locations is not None)
        module.__spec__ = spec  # importlib.util.find_spec reads it there
        sys.modules[name] = module
