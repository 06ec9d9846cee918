"""A stand-in for cuda-python's runtime module, whose GPU is this machine's memory: copies stay within its blocks."""

from __future__ import annotations

import ctypes
import enum
import types

STREAM = 1234


class Failure(enum.IntEnum):
    SUCCESS = 0
    INVALID = 1
    NO_MEMORY = 2


def make() -> types.ModuleType:
    """What `examples/detect.py` uses of the module."""
    cuda, blocks = types.ModuleType("cuda.bindings.runtime"), {}
    cuda.cudaMemcpyKind = enum.IntEnum("cudaMemcpyKind", {"cudaMemcpyHostToDevice": 1, "cudaMemcpyDeviceToHost": 2})
    cuda.cudaGetErrorString = lambda error: (Failure.SUCCESS, error.name.encode())
    cuda.cudaSetDevice = lambda device: (Failure.INVALID if device else Failure.SUCCESS,)
    cuda.cudaStreamCreate = lambda: (Failure.SUCCESS, STREAM)
    cuda.cudaStreamSynchronize = lambda stream: (Failure.SUCCESS,)

    def allocate(count):
        block = ctypes.create_string_buffer(b"\xff" * count, count)  # memory of a GPU is not empty
        blocks[ctypes.addressof(block)] = block
        return Failure.SUCCESS, ctypes.addressof(block)

    def copy(to, source, count, kind, stream):
        assert stream == STREAM
        on_device = to if kind == cuda.cudaMemcpyKind.cudaMemcpyHostToDevice else source
        if on_device not in blocks or count > len(blocks[on_device]):
            return (Failure.INVALID,)
        ctypes.memmove(to, source, count)
        return (Failure.SUCCESS,)

    cuda.cudaMalloc, cuda.cudaMemcpyAsync = allocate, copy
    return cuda
