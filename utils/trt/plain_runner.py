"""Runs a TensorRT engine on NumPy arrays, with CUDA by cuda-python: where there is no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from utils.core.errors import InputError, QatError
from utils.runners.base import Runner, TensorSpec
from utils.trt import engine_shapes, tensorrt_api
from utils.trt.cuda_runtime import CudaRuntime
from utils.trt.engine_file import EngineNote, load_engine
from utils.trt.tensorrt_api import Api


class PlainRunner(Runner):
    """As `TensorRTRunner`, for NumPy arrays in pageable memory, one run after the other and without CUDA graphs."""

    def __init__(self, path: str | Path, device: int = 0, api: Api | None = None) -> None:
        """Load the engine.

        Raises:
            InputError: the file is missing, damaged, or of another TensorRT or GPU; there is no GPU; or its tensors
                are in host memory, in a format that packs channels, or of a type that NumPy does not have.
            DependencyError: TensorRT or cuda-python is not installed.
        """
        api = api or tensorrt_api.load()
        self._path, self._log = Path(path), api.log()
        self._cuda = CudaRuntime(device)
        self._engine: Any = load_engine(path, api, self._log, self._cuda.gpu)
        self._context: Any = self._engine.create_execution_context()
        if self._context is None:
            raise QatError(f"{path} does not start: {self._log.reason('not enough GPU memory?')}")
        modes, host = api.module.TensorIOMode, api.module.TensorLocation.HOST
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        for name in names:
            kind = self._engine.get_tensor_format(name).name
            if self._engine.get_tensor_location(name) == host or kind != "LINEAR":
                raise InputError(f"{path} has {name} in host memory, or in format {kind}; that needs torch")
        specs = {name: self._spec(api, name) for name in names}
        note = EngineNote.load(self._path)
        super().__init__(
            inputs=[specs[name] for name in names if self._engine.get_tensor_mode(name) == modes.INPUT],
            outputs=[specs[name] for name in names if self._engine.get_tensor_mode(name) == modes.OUTPUT],
            metadata=note.metadata,
            device=f"cuda:{device}",
            description=f"{api.name}, {self._cuda.gpu.name}, NumPy",
        )
        self.limits = {spec.name: engine_shapes.limits(self._engine, spec.name) for spec in self.inputs}
        self._memory: dict[str, tuple[int, int]] = {}  # address and bytes

    def _to_device(self, name: str, feed: np.ndarray) -> np.ndarray:
        """The feed stays where it is: it is copied to the engine's own memory."""
        return np.ascontiguousarray(feed)

    def _infer(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name, feed in feeds.items():
            engine_shapes.set_input_shape(self._path, self._context, name, feed.shape, self.limits[name])
            self._cuda.upload(feed, self._address(name, feed.nbytes))
        results: dict[str, np.ndarray] = {}
        for spec in self.outputs:
            shape = engine_shapes.shape_now(self._path, self._context, spec.name)
            results[spec.name] = np.empty(shape, spec.dtype)
            self._address(spec.name, results[spec.name].nbytes)
        if not self._context.execute_async_v3(self._cuda.stream):
            raise QatError(f"{self._path} failed to run: {self._log.reason('it gives no reason')}")
        for name, result in results.items():
            self._cuda.download(self._memory[name][0], result)
        self._cuda.synchronize()
        return results

    def _close(self) -> None:
        self._context = self._engine = None
        self._cuda.close()

    def _address(self, name: str, count: int) -> int:
        """The engine's memory for a tensor, which grows where it is too small."""
        address, size = self._memory.get(name, (0, -1))
        if size < count:
            if address:
                self._cuda.free(address)
            address = self._cuda.allocate(count)
            self._memory[name] = (address, count)
        self._context.set_tensor_address(name, address)
        return address

    def _spec(self, api: Api, name: str) -> TensorSpec:
        shape = tuple(size if size >= 0 else None for size in self._engine.get_tensor_shape(name))
        dtype = api.torch_type(self._engine.get_tensor_dtype(name))
        if dtype == "bfloat16":
            raise InputError(f"{self._path} has {name} in bfloat16, which NumPy does not have; that needs torch")
        return TensorSpec(name, shape, dtype)
