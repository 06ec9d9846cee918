"""What is sent over HTTP beside what tritonclient sends, and what is said of servers that answer otherwise."""

from __future__ import annotations

import http.server
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import pytest

from utils.core.errors import DependencyError, InputError
from utils.serving import http_protocol, protocol
from utils.serving.http_protocol import LENGTH, HttpConnection
from utils.serving.protocol import ServerError


@pytest.fixture
def tritons(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tritonclient.http, whose bytes are the reference; what it only needs for sockets is left out."""
    for name in ("gevent", "gevent.pool", "gevent.ssl", "geventhttpclient", "geventhttpclient.url"):
        module = ModuleType(name)
        module.HTTPClient = module.URL = module.pool = module.ssl = object()
        monkeypatch.setitem(sys.modules, name, module)
    for name in [name for name in sys.modules if name.startswith("tritonclient.http")]:
        monkeypatch.delitem(sys.modules, name)
    import tritonclient.http

    return tritonclient.http


@pytest.mark.parametrize("dtype", ["float32", "uint8", "int8"])
def test_a_request_is_tritonclients(tritons, dtype):
    feed = (np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5) % 100).astype(dtype)
    given = tritons.InferInput("images", feed.shape, protocol.datatype(feed))
    given.set_data_from_numpy(feed, binary_data=True)
    asked = [tritons.InferRequestedOutput(name, binary_data=True) for name in ("num_dets", "det_boxes")]
    expected, size = tritons.InferenceServerClient.generate_request_body([given], outputs=asked)
    length, parts = http_protocol.request({"images": feed}, ["num_dets", "det_boxes"])
    body = b"".join(parts)
    assert body[length:] == expected[size:] == feed.tobytes()
    assert json.loads(body[:length]) == json.loads(expected[:size])


def test_an_answer_is_read_as_tritonclient_reads_it(tritons):
    boxes, count = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32), np.array([[3], [1]], np.int32)
    head = json.dumps({"model_name": "m", "model_version": "1", "outputs": [
        {"name": "det_boxes", "datatype": "FP32", "shape": [2, 3, 4], "parameters": {"binary_data_size": boxes.nbytes}},
        {"name": "plain", "datatype": "INT64", "shape": [3], "data": [1, 2, 3]},
        {"name": "num_dets", "datatype": "INT32", "shape": [2, 1], "parameters": {"binary_data_size": count.nbytes}},
    ]}).encode()  # fmt: skip
    body = head + boxes.tobytes() + count.tobytes()
    theirs = tritons.InferenceServerClient.parse_response_body(body, header_length=len(head))
    ours = http_protocol.response(bytearray(body), str(len(head)))
    assert list(ours) == ["det_boxes", "plain", "num_dets"]
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs.as_numpy(name))
        assert array.dtype == theirs.as_numpy(name).dtype
        array += 1  # can be written to


@pytest.mark.parametrize(
    "head",
    [b"no", b"[]", b"{}", b'{"outputs": [{"name": "a"}]}',
     b'{"outputs": [{"name": "a", "datatype": "FP32", "shape": [9], "parameters": {"binary_data_size": 8}}]}',
     b'{"outputs": [{"name": "a", "datatype": "FP31", "shape": [1], "data": [1]}]}'],
)  # fmt: skip
def test_an_answer_that_is_none_is_said(head):
    with pytest.raises(ServerError, match="the server's answer is not as the protocol says"):
        http_protocol.response(bytearray(head + b"12345678"), str(len(head)))


Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


@contextmanager
def answering(answer: Answer) -> Iterator[int]:
    """A server of one behaviour; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words: object) -> None:
            pass

        def do_GET(self) -> None:
            answer(self)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer(self)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def saying(status: int, body: bytes, length: int | None = None) -> Answer:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("content-length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = length is not None

    return answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (saying(400, b'{"error": "Request for unknown model: \'m\' is not found"}'), "Request for unknown model: 'm'"),
        (saying(404, b"<html>"), "it answers b'<html>'"),
        (saying(200, b"<html>"), "answers with something else than JSON; is it Triton's HTTP port"),
        (saying(200, b"{}"), "describes m otherwise than Triton does: no 'inputs'"),
        (saying(200, b"[]"), "describes m otherwise than Triton does"),
        (saying(200, b"{}", 100), "no server answers at 127.0.0.1:.*IncompleteRead"),
        (lambda handler: handler.wfile.write(b"SSH-2.0\r\n"), "no server answers at 127.0.0.1:"),
    ],
)  # fmt: skip
def test_a_server_that_is_no_triton_is_said_in_one_line(answer, message):
    with answering(answer) as port, pytest.raises(InputError, match=message) as caught:
        HttpConnection("127.0.0.1", port).model("m")
    assert len(str(caught.value).splitlines()) == 1


def test_an_inference_that_fails_is_the_servers_fault():
    feeds = {"images": np.zeros((1, 2), np.float32)}
    with answering(saying(400, b'{"error": "unexpected shape"}')) as port, pytest.raises(ServerError) as caught:
        HttpConnection("127.0.0.1", port).infer("m", feeds, ["a"])
    assert str(caught.value) == f"127.0.0.1:{port} cannot run m: unexpected shape"
    assert caught.value.exit_code == 1


def test_a_kept_connection_that_the_server_has_closed_is_opened_again():
    """Servers end connections that were idle; the next request must not fail for that."""
    count = []

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        count.append(handler.headers[LENGTH])
        saying(200, b'{"outputs": []}')(handler)
        handler.close_connection = True  # without saying so

    with answering(answer) as port:
        connection = HttpConnection("127.0.0.1", port)
        for _ in range(3):
            assert connection.infer("m", {"a": np.zeros(1, np.float32)}, []) == {}
    assert len(count) == 3


def test_headers_may_be_written_in_any_case():
    """Proxies write them in lower case."""
    head = b'{"outputs": [{"name": "a", "datatype": "INT8", "shape": [2], "parameters": {"binary_data_size": 2}}]}'

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header(LENGTH.lower(), str(len(head)))
        handler.send_header("content-length", str(len(head) + 2))
        handler.end_headers()
        handler.wfile.write(head + b"\x01\xff")

    with answering(answer) as port:
        found = HttpConnection("127.0.0.1", port).infer("m", {"a": np.zeros(1, np.float32)}, ["a"])
    assert found["a"].tolist() == [1, -1]


def test_the_name_of_a_model_is_one_part_of_the_address():
    asked = []

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        saying(400, b'{"error": "no"}')(handler)

    with answering(answer) as port, pytest.raises(InputError, match="no"):
        HttpConnection("127.0.0.1", port).model("a/../b é?x")
    assert asked == ["/v2/models/a%2F..%2Fb%20%C3%A9%3Fx"]


@pytest.fixture
def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_nobody_answers(way, free_port):
    connection = protocol.connect(way, f"127.0.0.1:{free_port}")
    message = f"no server answers at 127.0.0.1:{free_port} .*; start tritonserver there, or give another --url"
    with pytest.raises(InputError, match=message) as caught:
        connection.model("m")
    connection.close()
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "address", ["localhost", "http://localhost:8000", "a:b", ":8000", "a:0", "a:70000", "a:8000/x", ""]
)
def test_an_address_is_a_host_and_a_port(address):
    with pytest.raises(InputError, match="is no address; expected HOST:PORT, such as localhost:8001"):
        protocol.connect("grpc", address)


def test_grpc_without_tritonclient_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tritonclient", None)
    monkeypatch.setitem(sys.modules, "tritonclient.grpc", None)
    with pytest.raises(DependencyError, match=r'pip install "tritonclient\[grpc\]"; --protocol http needs nothing'):
        protocol.connect("grpc", "localhost:8001")
    protocol.connect("http", "localhost:8000").close()
