"""The environment that results depend on: the machine, Python and the libraries.

Reports hold it, since times are those of a machine, and AP may differ between versions of a library. Nothing slow is
imported for it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from utils.core.device import cpu_cores

SECONDS = 20  # that a program which is asked for a version may take

# What is shown for each library, and the distributions that can bring it (the first one found is reported).
_LIBRARIES = {
    "torch": ("torch",),
    "numpy": ("numpy",),
    "onnx": ("onnx",),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-rtx"),
}


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that results depend on, read from package metadata (nothing is imported).

    A library that is not installed has no entry.
    """
    versions = {"python": platform.python_version()}
    for name, distributions in _LIBRARIES.items():
        for distribution in distributions:
            try:
                versions[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return versions


def hardware() -> dict[str, str]:
    """The machine in words: `system`, `cpu`, `cores` (those this process may use) and `memory`, as far as it tells."""
    cpu = platform.processor() or platform.machine() or "unknown"
    with contextlib.suppress(OSError):  # Linux has the name
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        fields = [line.partition(":") for line in lines]
        names = [value.strip() for key, _, value in fields if key.strip() in {"model name", "Model"}]
        cpu = next(filter(None, names), cpu)
    machine = {"system": f"{platform.system()} {platform.machine()}", "cpu": cpu, "cores": str(cpu_cores())}
    with contextlib.suppress(ValueError, OSError, AttributeError):  # some systems do not tell
        machine["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    return machine


def output_of(*command: str) -> str:
    """What a program prints; '' where there is none, it fails, or it does not end."""
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
