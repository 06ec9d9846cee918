"""The Runner of a model on a Triton server, so that code for any network runs a served one, too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tritonclient import grpc
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from utils.core.errors import InputError, QatError
from utils.core.input_spec import LARGEST_SIDE
from utils.runners.base import Runner, TensorSpec
from utils.serving.config import LIMITS

ADDRESS = "localhost:8001"  # Triton's default for gRPC
TIMEOUT = 60.0  # seconds for an answer


class TritonRunner(Runner):
    """A served model. Its metadata are the parameters of its configuration, which make_triton.py wrote."""

    def __init__(self, model: str, address: str = "") -> None:
        """Ask the server for the inputs and outputs of the model.

        Args:
            address: HOST:PORT; Triton's default port on this machine if it is empty.

        Raises:
            InputError: no Triton server answers there, or it does not serve this model.
        """
        self._model, self._address = model, address or ADDRESS
        if not re.fullmatch(r"[^/]+:\d{1,5}", self._address):
            raise InputError(f"--url is {address!r:.60}; expected HOST:PORT, such as {ADDRESS}")
        self._client = grpc.InferenceServerClient(self._address)
        try:
            described = self._client.get_model_metadata(model, client_timeout=TIMEOUT)
            config = self._client.get_model_config(model, client_timeout=TIMEOUT).config
        except Exception as error:  # of tritonclient, and of the sockets and parsers below it
            self._client.close()
            raise InputError(
                f"no answer about model {model} from {self._address} ({_one_line(error)}); start tritonserver there, "
                "or give another model or --url"
            ) from error
        metadata = {key: value.string_value for key, value in config.parameters.items()}
        super().__init__(
            inputs=_specs(described.inputs),
            outputs=_specs(described.outputs),
            metadata=metadata,
            device=torch.device("cpu"),
            description=f"Triton at {self._address}, {described.platform}, answers on the CPU",
        )
        if config.max_batch_size:
            self._set_limits(config.max_batch_size)

    def _set_limits(self, max_batch_size: int) -> None:
        """Set the least and the largest shape of the images: those of an engine's profile, or any size."""
        spec = self.inputs[0]
        least = [size or 1 for size in spec.shape]
        most = [size or LARGEST_SIDE for size in spec.shape]
        if LIMITS in self.metadata:
            least, most = json.loads(self.metadata[LIMITS])
        self.limits[spec.name] = (1, *least[1:]), (max_batch_size, *most[1:])

    def _infer(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = []
        for name, feed in feeds.items():
            array = feed.detach().contiguous().numpy()
            tensor = grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        outputs = [grpc.InferRequestedOutput(spec.name) for spec in self.outputs]
        try:
            result = self._client.infer(self._model, inputs, outputs=outputs, client_timeout=TIMEOUT)
        except Exception as error:  # as above
            raise QatError(f"{self._address} cannot run {self._model}: {_one_line(error)}") from error
        arrays = {spec.name: np.array(result.as_numpy(spec.name)) for spec in self.outputs}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _close(self) -> None:
        self._client.close()


def _specs(tensors: Iterable[Any]) -> list[TensorSpec]:
    """Inputs or outputs as a server describes them."""
    specs = []
    for tensor in tensors:
        shape = tuple(None if size < 0 else size for size in tensor.shape)
        dtype = np.dtype(triton_to_np_dtype(tensor.datatype)).name
        specs.append(TensorSpec(tensor.name, shape, dtype))
    return specs


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
