"""The Runner on a model of a Triton server, so that all that takes networks takes this one too."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from utils.core.bounds import BOUNDS
from utils.core.errors import InputError
from utils.runners.base import Runner, TensorSpec
from utils.serving import protocol
from utils.serving.config import LIMITS
from utils.serving.protocol import ServedModel, Way


class TritonRunner(Runner):
    """A model of a server. Its metadata are the parameters of its configuration, where make_triton.py wrote them."""

    def __init__(self, model: str, way: Way = "http", address: str = "") -> None:
        """Ask the server what the model takes.

        Args:
            address: HOST:PORT; Triton's own port on this machine if it is empty.

        Raises:
            InputError: no server answers, or it has no such model, or one that takes something else than images.
            DependencyError: gRPC is asked for, and tritonclient is not installed.
        """
        self.address = address or protocol.WAYS[way]
        self._connection = protocol.connect(way, self.address)
        try:
            self._model = self._connection.model(model)
            if not self._model.inputs:
                raise InputError(f"{model} takes no inputs")
        except BaseException:
            self._connection.close()
            raise
        super().__init__(
            inputs=[TensorSpec(one.name, one.shape, one.dtype) for one in self._model.inputs],
            outputs=[TensorSpec(one.name, one.shape, one.dtype) for one in self._model.outputs],
            metadata=self._model.parameters,
            device=torch.device("cpu"),
            description=f"Triton at {self.address}, {way}, {self._model.platform or 'ensemble'}, answers on the CPU",
        )
        self.limits = self._limits()

    def _limits(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """What the batch may be, and the sizes that an engine's profile allows where the model says them."""
        if not self._model.max_batch:
            return {}
        spec, most = self.inputs[0], self._model.max_batch
        least, largest = _said(self._model) or (
            tuple(size or 1 for size in spec.shape),
            tuple(size or int(BOUNDS["imgsz"].most) for size in spec.shape),
        )
        return {spec.name: ((1, *least[1:]), (most, *largest[1:]))}

    def _infer(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        arrays = {name: feed.detach().contiguous().numpy() for name, feed in feeds.items()}
        names = [spec.name for spec in self.outputs]
        results: Mapping[str, object] = self._connection.infer(self._model.name, arrays, names)
        missing = [name for name in names if name not in results]
        if missing:
            raise protocol.ServerError(f"{self.address} gives no {missing[0]} of {self._model.name}")
        return {name: torch.from_numpy(results[name]) for name in names}

    def _close(self) -> None:
        self._connection.close()


def _said(model: ServedModel) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The least and largest shape of the input in the parameters, if they are there and are shapes of it."""
    axes = len(model.inputs[0].shape)
    try:
        least, largest = (tuple(map(int, shape)) for shape in json.loads(model.parameters[LIMITS]))
    except (KeyError, ValueError, TypeError):
        return None
    return (least, largest) if len(least) == len(largest) == axes else None
