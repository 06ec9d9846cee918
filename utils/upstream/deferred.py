"""Libraries that upstream imports and our programs do not use: they are imported when something of them is used.

They are for plots (matplotlib, seaborn with SciPy, pandas) and classification (torchvision, which imports torch's
compiler), and take half of the time in which a program starts. `scripts/run_upstream.py` imports them beforehand.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for a function that changes how plots look."""


DEFERRED: dict[str, dict[str, Any]] = {  # module → what upstream touches of it while it is imported
    "matplotlib": {"rc": _nothing, "use": _nothing},
    "matplotlib.pyplot": {},
    "pandas": {"options": SimpleNamespace(display=SimpleNamespace())},  # how tables are printed
    "seaborn": {},
    "thop": {},  # counts operations; it imports setuptools
    "torchvision": {"datasets": SimpleNamespace(ImageFolder=object)},  # base of a class for classification
    "torchvision.transforms": {},
    "torchvision.transforms.functional": {},
}


class DeferredModule(ModuleType):
    """A module that is imported when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        _remove()
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let `import` give a `DeferredModule` for each of `DEFERRED`, within the block.

    A library that is imported already, or not installed, is left as it is. Modules that were imported within the block
    keep their `DeferredModule`; later imports give the library.
    """
    packages = {_package_of(name) for name in DEFERRED}
    free = {name for name in packages if name not in sys.modules and importlib.util.find_spec(name) is not None}
    for name, attributes in DEFERRED.items():
        if _package_of(name) not in free:
            continue
        module = DeferredModule(name)
        vars(module).update(attributes)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield
    finally:
        _remove()


def import_all() -> None:
    """Import all of `DEFERRED` that is installed; upstream can do without some of them."""
    for name in DEFERRED:
        if importlib.util.find_spec(_package_of(name)) is not None:
            importlib.import_module(name)


def _package_of(name: str) -> str:
    return name.partition(".")[0]


def _remove() -> None:
    """Remove all `DeferredModule`s, and the attributes that stood for real ones."""
    for name, attributes in DEFERRED.items():
        module = sys.modules.get(name)
        if isinstance(module, DeferredModule):
            for attribute in attributes:  # the real ones take their place
                vars(module).pop(attribute, None)
            del sys.modules[name]
