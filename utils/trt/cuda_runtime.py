"""Device memory, one stream and copies by NVIDIA's cuda-python, where there is no torch: a Jetson, a small container.

Functions: https://nvidia.github.io/cuda-python/cuda-bindings/latest/module/runtime.html. Each returns a tuple that
begins with an error code.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np

from utils.core.errors import DependencyError, InputError, QatError
from utils.trt.tensorrt_api import Gpu

MODULES = ("cuda.bindings.runtime", "cuda.cudart")  # cuda-python from 12.6 on, and before
INSTALL = "pip install cuda-python (for CUDA 12: cuda-python==12.*), or install torch"


def installed() -> str | None:
    """Name of the module that is there; only the package that it lies in is imported."""
    for name in MODULES:
        try:
            if importlib.util.find_spec(name) is not None:
                return name
        except ImportError:  # the package above it is not there
            continue
    return None


class CudaRuntime:
    """A GPU with one stream, and the memory that was asked for.

    Attributes:
        gpu: what TensorRT's files are compared with.
        stream: as TensorRT takes it.
    """

    def __init__(self, device: int = 0) -> None:
        """Take a GPU.

        Raises:
            DependencyError: cuda-python is not installed, or does not load.
            InputError: there is no such GPU.
        """
        name = installed()
        if name is None:
            raise DependencyError(f"running an engine needs torch or cuda-python, and neither is installed: {INSTALL}")
        try:
            self._cuda: Any = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            raise DependencyError(f"{name} cannot be imported: {' '.join(str(error).split())}") from error
        code, count = self._cuda.cudaGetDeviceCount()
        if int(code) or not count:
            raise InputError(f"there is no NVIDIA GPU that CUDA can use ({self._reason(code)})")
        if device >= count:
            raise InputError(f"--device {device}: CUDA sees {count} GPUs, numbered from 0")
        self._call("cudaSetDevice", device)
        (about,) = self._call("cudaGetDeviceProperties", device)
        (free, _) = self._call("cudaMemGetInfo")
        label = about.name.decode() if isinstance(about.name, bytes) else str(about.name)
        self.gpu = Gpu(label.rstrip("\0"), f"SM{about.major}{about.minor}", int(free))
        (self._stream,) = self._call("cudaStreamCreate")
        self._addresses: set[int] = set()

    @property
    def stream(self) -> int:
        """The stream's handle."""
        return int(self._stream)

    def allocate(self, count: int) -> int:
        """The address of so many bytes on the GPU, all of them 0."""
        (address,) = self._call("cudaMalloc", max(count, 1))
        self._addresses.add(int(address))
        self._call("cudaMemsetAsync", int(address), 0, max(count, 1), self._stream)
        return int(address)

    def free(self, address: int) -> None:
        """Give memory back."""
        self._addresses.discard(address)
        self._call("cudaFree", address)

    def upload(self, values: np.ndarray, address: int) -> None:
        """Copy an array to the GPU, on the stream; done when this returns, since its memory is pageable."""
        if not values.flags.c_contiguous:
            raise ValueError("an array that is copied to a GPU must be contiguous")
        self._copy(address, values.ctypes.data, values.nbytes, "cudaMemcpyHostToDevice")

    def download(self, address: int, into: np.ndarray) -> None:
        """Copy from the GPU into an array, behind what is on the stream; `synchronize` waits for it."""
        self._copy(into.ctypes.data, address, into.nbytes, "cudaMemcpyDeviceToHost")

    def synchronize(self) -> None:
        """Wait for all that is on the stream."""
        self._call("cudaStreamSynchronize", self._stream)

    def close(self) -> None:
        """Give everything back."""
        for address in sorted(self._addresses):
            self.free(address)
        self._call("cudaStreamDestroy", self._stream)

    def _copy(self, to: int, source: int, count: int, kind: str) -> None:
        self._call("cudaMemcpyAsync", to, source, count, getattr(self._cuda.cudaMemcpyKind, kind), self._stream)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        code, *result = getattr(self._cuda, name)(*arguments)
        if int(code):
            raise QatError(f"CUDA's {name} failed: {self._reason(code)}")
        return tuple(result)

    def _reason(self, code: Any) -> str:
        _, text = self._cuda.cudaGetErrorString(code)
        return text.decode() if isinstance(text, bytes) else str(text)
