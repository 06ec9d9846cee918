"""The quantizers of all libraries, as parameters of tests.

In the environment of requirements/dev.txt all libraries are installed, and one that is missing fails its tests. Only
nvidia-modelopt beside an older torch, where it cannot be installed, is skipped; nothing else is.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from packaging.version import Version

from models.quantize.recipe import QUANTIZERS

MODELOPT_NEEDS = Version("2.8")  # of torch, see requirements/modelopt.txt


def out_of_reach(torch_version: str, installed: bool) -> bool:
    """Whether nvidia-modelopt is not there and cannot be."""
    return not installed and Version(torch_version).release < MODELOPT_NEEDS.release


needs_modelopt = pytest.mark.skipif(
    out_of_reach(torch.__version__, find_spec("modelopt") is not None),
    reason=f"nvidia-modelopt is not installed: it needs torch {MODELOPT_NEEDS}, this is torch {torch.__version__}",
)
LIBRARIES = [pytest.param(name, marks=[needs_modelopt] if name == "modelopt" else []) for name in QUANTIZERS]
