"""gRPC, with tritonclient: `pip install "tritonclient[grpc]"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from utils.core.errors import DependencyError, InputError
from utils.serving.protocol import TIMEOUT, ServedModel, ServerError, datatype, no_answer, tensor


class GrpcConnection:
    """A connection to one server; see `protocol.Connection`."""

    def __init__(self, address: str) -> None:
        """Raises `DependencyError` where tritonclient is not installed."""
        try:
            import tritonclient.grpc as library
        except ImportError as error:
            raise DependencyError(
                'gRPC needs tritonclient: pip install "tritonclient[grpc]"; --protocol http needs nothing'
            ) from error
        self._library: Any = library
        self._address = address
        self._client: Any = library.InferenceServerClient(address)

    def model(self, name: str) -> ServedModel:
        """What a model takes and gives."""
        try:
            found = self._client.get_model_metadata(name, client_timeout=TIMEOUT)
            config = self._client.get_model_config(name, client_timeout=TIMEOUT).config
        except self._library.InferenceServerException as error:
            raise self._wrong(error, InputError(f"{self._address}: {error.message()}")) from error
        inputs, outputs = (
            tuple(tensor(one.name, one.datatype, list(one.shape)) for one in side)
            for side in (found.inputs, found.outputs)
        )
        said = {key: value.string_value for key, value in config.parameters.items()}
        return ServedModel(name, inputs, outputs, config.max_batch_size, said, found.platform)

    def infer(self, model: str, feeds: Mapping[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """Run a model once."""
        given = []
        for name, array in feeds.items():
            given.append(self._library.InferInput(name, array.shape, datatype(array)))
            given[-1].set_data_from_numpy(np.ascontiguousarray(array))
        asked = [self._library.InferRequestedOutput(name) for name in outputs]
        try:
            result = self._client.infer(model, given, outputs=asked, client_timeout=TIMEOUT)
        except self._library.InferenceServerException as error:
            failed = ServerError(f"{self._address} cannot run {model}: {error.message()}")
            raise self._wrong(error, failed) from error
        return {name: np.array(result.as_numpy(name)) for name in outputs}

    def close(self) -> None:
        """End it."""
        self._client.close()

    def _wrong(self, error: Any, otherwise: Exception) -> Exception:
        """What an exception of tritonclient's means: nobody answers, or else what the server says."""
        text = str(error.message())
        if "DEADLINE" in str(error.status()) or ("UNAVAILABLE" in str(error.status()) and "connect" in text):
            return no_answer(self._address, text)
        return otherwise
