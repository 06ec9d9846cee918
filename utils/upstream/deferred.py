"""Libraries that upstream imports and our programs do not use: imported when something of them is asked for.

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
    "torchvision": {"datasets": SimpleNamespace(ImageFolder=object)},  # of which it makes a class for classification
    "torchvision.transforms": {},
    "torchvision.transforms.functional": {},
}


class DeferredModule(ModuleType):
    """A module that is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        _remove()
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Within it `import` gives a `DeferredModule` for each of `DEFERRED`; afterwards only who has imported it then.

    A library that is imported already, or not installed, is left as it is.
    """
    packages = {name.partition(".")[0] for name in DEFERRED}
    free = {name for name in packages if name not in sys.modules and importlib.util.find_spec(name) is not None}
    for name, attributes in DEFERRED.items():
        package, _, child = name.rpartition(".")
        if name.partition(".")[0] not in free:
            continue
        module = sys.modules[name] = DeferredModule(name)
        vars(module).update(attributes)
        if package:
            setattr(sys.modules[package], child, module)
    try:
        yield
    finally:
        _remove()


def import_all() -> None:
    """Import all of `DEFERRED`; what is not installed is left to upstream, which can do without some of it."""
    for name in DEFERRED:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


def _remove() -> None:
    for name, attributes in DEFERRED.items():
        module = sys.modules.get(name)
        if isinstance(module, DeferredModule):
            for attribute in attributes:  # from now on the real ones
                vars(module).pop(attribute, None)
            del sys.modules[name]
