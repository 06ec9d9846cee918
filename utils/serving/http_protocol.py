"""HTTP, with Triton's binary tensors (docs/protocol/extension_binary_data.md of triton-inference-server/server).

Python's own library speaks it, so that a client needs nothing of Triton's. One connection is kept and used again.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from email.message import Message
from typing import Any
from urllib.parse import quote

import numpy as np

from utils.core.errors import InputError
from utils.serving.protocol import TIMEOUT, TORCH_TYPES, ServedModel, ServerError, datatype, no_answer, tensor

LENGTH = "Inference-Header-Content-Length"  # bytes of JSON, behind which the tensors lie
MOST = 1 << 32  # bytes of an answer
Answer = tuple[int, Message, bytearray]


class HttpConnection:
    """A connection to one server; see `protocol.Connection`."""

    def __init__(self, host: str, port: int) -> None:
        self._address = f"{host}:{port}"
        self._connection = http.client.HTTPConnection(host.strip("[]"), port, timeout=TIMEOUT)

    def model(self, name: str) -> ServedModel:
        """What a model takes and gives."""
        found, config = (self._json(f"{_path(name)}{part}") for part in ("", "/config"))
        try:
            inputs, outputs = (
                tuple(tensor(one["name"], one["datatype"], list(map(int, one["shape"]))) for one in found[side])
                for side in ("inputs", "outputs")
            )
            said = {key: str(value.get("string_value", "")) for key, value in config.get("parameters", {}).items()}
            return ServedModel(name, inputs, outputs, int(config["max_batch_size"]), said, str(found["platform"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{self._address} describes {name} otherwise than Triton does: no {error}") from error

    def infer(self, model: str, feeds: Mapping[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """Run a model once."""
        length, parts = request(feeds, outputs)
        headers = {LENGTH: str(length), "Content-Type": "application/octet-stream"}
        status, answered, body = self._ask("POST", f"{_path(model)}/infer", headers, b"".join(parts))
        if status != http.client.OK:
            raise ServerError(f"{self._address} cannot run {model}: {_error(body)}")
        return response(body, answered.get(LENGTH))

    def close(self) -> None:
        """End it."""
        self._connection.close()

    def _json(self, path: str) -> Any:
        status, _, body = self._ask("GET", path, {}, None)
        if status != http.client.OK:
            raise InputError(f"{self._address}: {_error(body)}")
        try:
            return json.loads(bytes(body))
        except ValueError as error:
            raise InputError(
                f"{self._address} answers with something else than JSON; is it Triton's HTTP port?"
            ) from error

    def _ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        """Ask once more where the server has closed a connection that was kept."""
        for again in (True, False):
            kept = self._connection.sock is not None
            try:
                self._connection.request(method, path, body, dict(headers))
                answer = self._connection.getresponse()
                return answer.status, answer.headers, _body(answer)
            except (http.client.HTTPException, OSError) as error:
                self._connection.close()
                if not (again and kept and isinstance(error, (http.client.RemoteDisconnected, BrokenPipeError))):
                    raise no_answer(self._address, error or type(error).__name__) from error
        raise AssertionError("the second attempt ends the loop")


def _path(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}"


def request(feeds: Mapping[str, np.ndarray], outputs: Sequence[str]) -> tuple[int, list[bytes]]:
    """A request's bytes in parts, JSON first, and how long that is."""
    arrays = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
    header = {
        "inputs": [
            {"name": name, "shape": list(array.shape), "datatype": datatype(array),
             "parameters": {"binary_data_size": array.nbytes}}
            for name, array in arrays.items()
        ],
        "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
    }  # fmt: skip
    text = json.dumps(header).encode()
    return len(text), [text, *(array.tobytes() for array in arrays.values())]


def response(body: bytearray, length: str | None) -> dict[str, np.ndarray]:
    """The tensors of an answer, as views of it.

    Raises:
        ServerError: the answer is not as the protocol says.
    """
    try:
        end = len(body) if length is None else int(length)
        found: dict[str, np.ndarray] = {}
        for one in json.loads(bytes(body[:end]))["outputs"]:
            dtype, size = np.dtype(TORCH_TYPES[one["datatype"]]), one.get("parameters", {}).get("binary_data_size")
            if size is None:
                array = np.array(one["data"], dtype)
            else:
                array = np.frombuffer(memoryview(body)[end : end + size], dtype)
                end += size
            found[one["name"]] = array.reshape(one["shape"])
        return found
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(f"the server's answer is not as the protocol says: {error}") from error


def _body(answer: http.client.HTTPResponse) -> bytearray:
    """All bytes, in memory that can be written to."""
    if answer.length is None:
        return bytearray(answer.read())
    if answer.length > MOST:
        raise http.client.HTTPException(f"an answer of {answer.length:,} bytes")
    body = bytearray(answer.length)
    view, place = memoryview(body), 0
    while place < len(body):
        count = answer.readinto(view[place:])
        if not count:
            raise http.client.IncompleteRead(bytes(body[:place]), len(body) - place)
        place += count
    answer.read()  # says that it is whole, so that the connection can be used again
    return body


def _error(body: bytearray) -> str:
    try:
        return " ".join(str(json.loads(bytes(body))["error"]).split())[:500]
    except (ValueError, KeyError, TypeError):
        return f"it answers {bytes(body[:80])!r}"
