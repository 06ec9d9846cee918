"""What is asked of a server, by either way (https://github.com/kserve/open-inference-protocol, Triton's extensions).

A `Connection` belongs to one thread. Arrays have the names and types that the protocol gives them, such as FP32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from utils.core.errors import InputError, QatError
from utils.serving.served_file import TYPES, Tensor

if TYPE_CHECKING:
    import numpy as np

Way = Literal["http", "grpc"]
WAYS: dict[str, str] = {"http": "localhost:8000", "grpc": "localhost:8001"}  # and the addresses that a server has
TIMEOUT = 60.0  # seconds
TORCH_TYPES = {name.removeprefix("TYPE_"): dtype for dtype, name in TYPES.items()}


class ServerError(QatError):
    """The server could not do what it was asked for."""


@dataclass(frozen=True)
class ServedModel:
    """A model of a server.

    Attributes:
        inputs, outputs: with the batch, where the model has one.
        max_batch: images in a request; 0 where the batch is a part of the shapes.
        parameters: of its configuration.
        platform: what runs it, in the server's words.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    max_batch: int = 0
    parameters: Mapping[str, str] = field(default_factory=dict)
    platform: str = ""


class Connection(Protocol):
    """A way to one server."""

    def model(self, name: str) -> ServedModel:
        """What a model takes and gives.

        Raises:
            InputError: no server answers there, or it has no such model.
        """

    def infer(self, model: str, feeds: Mapping[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """Run a model once; arrays that are given back can be written to.

        Raises:
            ServerError: the server says why it did not.
            InputError: no server answers.
        """

    def close(self) -> None:
        """End it."""


def connect(way: Way, address: str) -> Connection:
    """A connection; nothing is sent yet.

    Raises:
        InputError: the address is none.
        DependencyError: what speaks gRPC is not installed.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "/" in host:
        raise InputError(f"--url {address!r:.60} is no address; expected HOST:PORT, such as {WAYS[way]}")
    if way == "grpc":
        from utils.serving.grpc_protocol import GrpcConnection

        return GrpcConnection(address)
    from utils.serving.http_protocol import HttpConnection

    return HttpConnection(host, int(port))


def tensor(name: str, datatype: str, shape: Sequence[int]) -> Tensor:
    """An input or output as a server describes it."""
    return Tensor(
        name, TORCH_TYPES.get(datatype, datatype.lower()), tuple(None if size < 0 else size for size in shape)
    )


def datatype(array: np.ndarray) -> str:
    """The protocol's name of an array's type."""
    return TYPES[str(array.dtype)].removeprefix("TYPE_")


def no_answer(address: str, why: object) -> InputError:
    """The error for a server that is not there."""
    reason = " ".join(str(why).split())[:200]
    return InputError(f"no server answers at {address} ({reason}); start tritonserver there, or give another --url")
