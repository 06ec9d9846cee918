"""The Runner on a model of a Triton server, so that whatever takes networks takes served ones, too."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from utils.core.errors import InputError, QatError
from utils.core.input_spec import LARGEST_SIDE
from utils.runners.base import Runner, TensorSpec
from utils.serving.config import LIMITS

Protocol = Literal["http", "grpc"]
ADDRESSES = {"http": "localhost:8000", "grpc": "localhost:8001"}  # Triton's defaults
TIMEOUT = 60.0  # seconds for an answer; of tritonclient.http it is the default


class TritonRunner(Runner):
    """A served model. Its metadata are the parameters of its configuration, which make_triton.py wrote."""

    def __init__(self, model: str, protocol: Protocol = "http", address: str = "") -> None:
        """Ask the server what the model takes and gives.

        Args:
            address: HOST:PORT; Triton's default port on this machine if it is empty.

        Raises:
            InputError: no Triton server answers there, or it does not serve this model.
        """
        self._model = model
        self._address = address or ADDRESSES[protocol]
        if not re.fullmatch(r"[^/]+:\d{1,5}", self._address):
            raise InputError(f"--url is {address!r:.60}; expected HOST:PORT, such as {ADDRESSES[protocol]}")
        self._library = importlib.import_module(f"tritonclient.{protocol}")
        self._timeout = {"client_timeout": TIMEOUT} if protocol == "grpc" else {}
        as_json = {"as_json": True, **self._timeout} if protocol == "grpc" else {}
        self._client = self._library.InferenceServerClient(self._address)
        try:
            described = self._client.get_model_metadata(model, **as_json)
            config = self._client.get_model_config(model, **as_json)
        except Exception as error:  # of tritonclient, and of the sockets and parsers below it
            self._client.close()
            raise InputError(
                f"no answer about model {model} from {self._address} ({_one_line(error)}); start tritonserver there, "
                "or give another model or --url"
            ) from error
        config = config.get("config", config)
        super().__init__(
            inputs=_specs(described.get("inputs", [])),
            outputs=_specs(described.get("outputs", [])),
            metadata={key: value.get("string_value", "") for key, value in config.get("parameters", {}).items()},
            device=torch.device("cpu"),
            description=f"Triton at {self._address}, {protocol}, {described.get('platform', '')}, answers on the CPU",
        )
        if most := config.get("max_batch_size", 0):
            spec = self.inputs[0]
            low = tuple(size or 1 for size in spec.shape)
            high = tuple(size or LARGEST_SIDE for size in spec.shape)
            if LIMITS in self.metadata:  # those of an engine's profile
                low, high = json.loads(self.metadata[LIMITS])
            self.limits[spec.name] = (1, *low[1:]), (most, *high[1:])

    def _infer(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = []
        for name, feed in feeds.items():
            array = feed.detach().contiguous().numpy()
            inputs.append(self._library.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
        outputs = [self._library.InferRequestedOutput(spec.name) for spec in self.outputs]
        try:
            result = self._client.infer(self._model, inputs, outputs=outputs, **self._timeout)
        except Exception as error:  # as above
            raise QatError(f"{self._address} cannot run {self._model}: {_one_line(error)}") from error
        return {spec.name: torch.from_numpy(np.array(result.as_numpy(spec.name))) for spec in self.outputs}

    def _close(self) -> None:
        self._client.close()


def _specs(tensors: Sequence[dict[str, Any]]) -> list[TensorSpec]:
    """Inputs or outputs by a server's JSON, where integers may be texts."""
    specs = []
    for tensor in tensors:
        shape = tuple(None if int(size) < 0 else int(size) for size in tensor["shape"])
        specs.append(TensorSpec(tensor["name"], shape, np.dtype(triton_to_np_dtype(tensor["datatype"])).name))
    return specs


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
