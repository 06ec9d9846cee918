"""A stand-in for cuda-python's runtime module, whose GPU is this machine's memory.

It holds what it was given: addresses are those of its own blocks, copies stay within them, and all is given back.
"""

from __future__ import annotations

import ctypes
import enum
import types

STREAM = 1234  # as fake_tensorrt has it


class Failure(enum.IntEnum):
    SUCCESS = 0
    INVALID = 1
    NO_MEMORY = 2
    NO_DEVICE = 100


def make(devices: int = 1, memory: int = 1 << 24) -> types.ModuleType:
    """The module; `calls` lists what was asked for, `blocks` is the memory that is in use."""
    cuda = types.ModuleType("cuda.bindings.runtime")
    cuda.calls, cuda.blocks = [], {}
    cuda.cudaMemcpyKind = enum.IntEnum("cudaMemcpyKind", {"cudaMemcpyHostToDevice": 1, "cudaMemcpyDeviceToHost": 2})
    about = types.SimpleNamespace(name=b"Fake GPU\0\0", major=8, minor=9)
    cuda.cudaGetDeviceCount = lambda: (Failure.SUCCESS, devices) if devices else (Failure.NO_DEVICE, None)
    cuda.cudaGetErrorString = lambda error: (Failure.SUCCESS, f"it says {error.name}".encode())
    cuda.cudaSetDevice = lambda device: (Failure.SUCCESS if device < devices else Failure.INVALID,)
    cuda.cudaGetDeviceProperties = lambda device: (Failure.SUCCESS, about)
    cuda.cudaMemGetInfo = lambda: (Failure.SUCCESS, memory, memory)
    cuda.cudaStreamCreate = lambda: (Failure.SUCCESS, STREAM)
    cuda.cudaStreamDestroy = lambda stream: cuda.calls.append("destroy") or (Failure.SUCCESS,)
    cuda.cudaStreamSynchronize = lambda stream: cuda.calls.append("synchronize") or (Failure.SUCCESS,)

    def allocate(count):
        if count > memory:
            return Failure.NO_MEMORY, None
        block = ctypes.create_string_buffer(b"\xff" * count, count)  # memory of a GPU is not empty
        cuda.blocks[ctypes.addressof(block)] = block
        return Failure.SUCCESS, ctypes.addressof(block)

    def free(address):
        return (Failure.SUCCESS if cuda.blocks.pop(address, None) else Failure.INVALID,)

    def fill(address, value, count, stream):
        ctypes.memset(address, value, count)
        return (Failure.SUCCESS if _holds(address, count) else Failure.INVALID,)

    def copy(to, source, count, kind, stream):
        assert stream == STREAM
        on_device = to if kind == cuda.cudaMemcpyKind.cudaMemcpyHostToDevice else source
        if not _holds(on_device, count):
            return (Failure.INVALID,)
        cuda.calls.append(kind.name)
        ctypes.memmove(to, source, count)
        return (Failure.SUCCESS,)

    def _holds(address, count):
        return address in cuda.blocks and count <= len(cuda.blocks[address])

    cuda.cudaMalloc, cuda.cudaFree, cuda.cudaMemsetAsync, cuda.cudaMemcpyAsync = allocate, free, fill, copy
    return cuda
