"""torchvision, without torch's compiler: `from utils.core.light_torchvision import torchvision`.

torchvision takes one function from `torch._dynamo.utils` at its top, for `roi_align` alone, and that import takes
longer than torch's own. Here the function imports it when it is called. Anything else that a version of torchvision
takes from there imports it at once, as ever.
"""

from __future__ import annotations

import sys
from typing import Any

from utils.core.late_modules import LateModule

DYNAMO = "torch._dynamo.utils"


def _is_compile_supported(device: Any) -> bool:
    from torch._dynamo.utils import is_compile_supported

    return bool(is_compile_supported(device))


if "torch._dynamo" in sys.modules or "torchvision" in sys.modules:
    import torchvision
else:
    import torch  # noqa: F401  # itself, before something stands in for a part of it

    late = sys.modules[DYNAMO] = LateModule(DYNAMO, {"is_compile_supported": _is_compile_supported}, package=False)
    try:
        import torchvision
    finally:
        if sys.modules.get(DYNAMO) is late:
            del sys.modules[DYNAMO]

__all__ = ["torchvision"]
