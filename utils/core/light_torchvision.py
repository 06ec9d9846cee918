"""torchvision, without torch's compiler: `from utils.core.light_torchvision import torchvision`.

torchvision takes one function from `torch._dynamo.utils` at its top, for `roi_align` alone, and that import takes as
long as torch's own: two seconds at the start of every program. Here the function imports it when it is called.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

DYNAMO = "torch._dynamo.utils"


class _Later(types.ModuleType):
    """Stands for `torch._dynamo.utils` while torchvision is imported."""

    def is_compile_supported(self, device: Any) -> bool:
        return bool(importlib.import_module(DYNAMO).is_compile_supported(device))

    def __getattr__(self, name: str) -> Any:  # anything else that a version of torchvision takes is imported at once
        if name.startswith("__"):  # `inspect` looks at all modules while torchvision registers its operators
            raise AttributeError(name)
        sys.modules.pop(DYNAMO, None)
        return getattr(importlib.import_module(DYNAMO), name)


if "torchvision" not in sys.modules and "torch._dynamo" not in sys.modules:
    importlib.import_module("torch")  # itself, before something stands for a part of it
    sys.modules[DYNAMO] = later = _Later(DYNAMO)
    torchvision = importlib.import_module("torchvision")
    if sys.modules.get(DYNAMO) is later:
        del sys.modules[DYNAMO]
else:
    torchvision = importlib.import_module("torchvision")

__all__ = ["torchvision"]
