"""HTTP itself: which versions, framings, targets and methods get which status, and whether the
connection stays open (RFC 9110 and 9112; the table in docs/serve.md)."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

# Where this is missing there are tests of other things; `make test` installs it
# (tests/test_packaging.py).
pytest.importorskip("ostinato.serve.server")

from ostinato.serve.server import Server
from tests.serve.serving import MODEL, SECONDS, opened, running

PATH = "/v1/completions"
BODY = json.dumps({"model": MODEL, "prompt": [5], "max_tokens": 2}).encode()
SIZE = len(BODY)
HOST = "host: localhost\r\n"
JSON = "content-type: application/json\r\n"
CHUNKED = "transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (SIZE, BODY)


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with opened(tiny_model, ends=False) as generator, running(generator) as started:
        yield started


def get(
    target: str = "/health", headers: str = HOST, *, method: str = "GET", version: str = "HTTP/1.1"
) -> bytes:
    return f"{method} {target} {version}\r\n{headers}\r\n".encode("latin-1")


def post(headers: str, body: bytes = BODY, *, version: str = "HTTP/1.1") -> bytes:
    return get(PATH, f"{HOST}{JSON}{headers}", method="POST", version=version) + body


def answers(server: Server, sent: bytes) -> tuple[list[int], bool, bytes]:
    """The statuses that come back, whether the connection then still answers, and all bytes."""
    came = b""
    more = get("/v1/nothing-more", f"{HOST}connection: close\r\n")
    address = server._listeners[0].getsockname()
    with socket.create_connection(address, SECONDS) as raw, suppress(ConnectionError):
        raw.sendall(sent + more)
        while piece := raw.recv(1 << 16):
            came += piece
    found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d\d\d) ", came)]
    stays = b"/v1/nothing-more" in came
    return found[:-1] if stays else found, stays, came


CASES: dict[str, tuple[bytes, int, bool]] = {
    # Versions.
    "HTTP/1.1": (get(), 200, True),
    "HTTP/1.0": (get(version="HTTP/1.0"), 200, False),
    "a later HTTP/1": (get(version="HTTP/1.2"), 200, True),
    "HTTP/2": (get(version="HTTP/2.0"), 505, False),
    "HTTP/2 without asking": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, False),
    "HTTP/2 by upgrade": (get(headers=f"{HOST}connection: upgrade\r\nupgrade: h2c\r\n"), 200, True),
    "WebSocket": (get(headers=f"{HOST}connection: upgrade\r\nupgrade: websocket\r\n"), 200, True),
    "HTTP/0.9": (b"GET /health\r\n\r\n", 400, False),
    "no version of HTTP": (get(version="HTTP/3"), 400, False),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00" + bytes(50) + b"\r\n\r\n", 400, False),
    # Heads.
    "no host": (get(headers=""), 400, False),
    "two hosts": (get(headers=2 * HOST), 400, False),
    "an empty host": (get(headers="host:\r\n"), 403, True),
    "line ends without CR": (b"GET /health HTTP/1.1\nhost: localhost\n\n", 200, True),
    "empty lines before it": (b"\r\n\r\n" + get(), 200, True),
    "a folded line": (get(headers=f"{HOST}x: a\r\n b\r\n"), 200, True),
    "a space before the colon": (get(headers="host : localhost\r\n"), 400, False),
    "no colon": (get(headers=f"{HOST}x\r\n"), 400, False),
    "no name": (get(headers=f"{HOST}: x\r\n"), 400, False),
    "NUL in a value": (get(headers=f"{HOST}x: \x00\r\n"), 400, False),
    "CR in a value": (get(headers=f"{HOST}x: a\rb\r\n"), 400, False),
    "no ASCII in a value": (get(headers=f"{HOST}x: é\r\n"), 200, True),
    "70 KB of lines": (get(headers=HOST + 12_000 * "x: y\r\n"), 431, False),
    "70 KB of target": (get("/" + 70_000 * "y"), 431, False),
    # Targets.
    "a query": (get("/health?x=1"), 200, True),
    "escapes": (get("/%68ealth"), 200, True),
    "a whole address": (get("http://localhost:80/health?x"), 200, True),
    "a whole address of another": (get("HTTP://evil.example/health"), 403, True),
    "a whole address, another host": (get("http://localhost/health", "host: evil\r\n"), 200, True),
    "an address without a path": (get("http://localhost"), 200, True),
    "dots": (get("/v1/../health"), 404, True),
    "two slashes": (get("//health"), 404, True),
    "a slash at the end": (get("/health/"), 404, True),
    "an unknown path": (get("/v2/models"), 404, True),
    "an escape that is none": (get("/%zz"), 404, True),
    "no ASCII": (get("/é"), 400, False),
    "a space": (get("/a b"), 400, False),
    "all of the server": (get("*", method="OPTIONS"), 404, True),
    # Methods.
    "HEAD": (get(method="HEAD"), 200, True),
    "OPTIONS": (get(method="OPTIONS"), 405, True),
    "TRACE": (get(method="TRACE"), 405, True),
    "DELETE": (get(method="DELETE"), 405, True),
    "an unknown method": (get(method="BREW"), 405, True),
    "CONNECT": (get("localhost:80", method="CONNECT"), 404, True),
    # Framings.
    "content-length": (post(f"content-length: {SIZE}\r\n"), 200, True),
    "the same length twice": (post(2 * f"content-length: {SIZE}\r\n"), 200, True),
    "two lengths": (post(f"content-length: {SIZE}\r\ncontent-length: 1\r\n"), 400, False),
    "a negative length": (post("content-length: -1\r\n"), 400, False),
    "a length with a sign": (post(f"content-length: +{SIZE}\r\n"), 400, False),
    "a length of 23 digits": (post(f"content-length: {23 * '9'}\r\n"), 400, False),
    "no length": (post("", b""), 400, True),
    "chunks": (post(CHUNKED, CHUNKS), 200, True),
    "chunks, in capitals": (post(CHUNKED.upper(), CHUNKS), 200, True),
    "chunks to HTTP/1.0": (post(CHUNKED, CHUNKS, version="HTTP/1.0"), 200, False),
    "chunks with extensions": (post(CHUNKED, CHUNKS.replace(b"\r\n", b";a=b\r\n", 1)), 200, True),
    "chunks with a trailer": (post(CHUNKED, CHUNKS[:-2] + b"x: y\r\n\r\n"), 200, True),
    "chunks and a length": (post(f"{CHUNKED}content-length: {SIZE}\r\n", CHUNKS), 400, False),
    "a size that is none": (post(CHUNKED, b"0x10\r\n"), 400, False),
    "a negative size": (post(CHUNKED, b"-1\r\n"), 400, False),
    "a coding that is not read": (post("transfer-encoding: gzip, chunked\r\n", CHUNKS), 501, False),
    "chunks that are not last": (post("transfer-encoding: chunked, gzip\r\n", CHUNKS), 501, False),
    "a body that GET has not": (get(headers=f"{HOST}content-length: 3\r\n") + b"abc", 200, True),
}  # fmt: skip


@pytest.mark.parametrize(("sent", "status", "stays"), CASES.values(), ids=CASES)
def test_what_http_gets(server: Server, sent: bytes, status: int, stays: bool) -> None:
    found, still, came = answers(server, sent)
    assert (found, still) == ([status], stays), came[:500]
    if status >= 400:
        first = came.partition(b"\r\n\r\n")[2]
        body, _ = json.JSONDecoder().raw_decode(first.decode())
        assert set(body["error"]) == {"message", "type", "param", "code"}
    if status == 405:
        assert re.search(rb"\r\nallow: (GET, HEAD|HEAD, GET)\r\n", came)


def test_a_head_has_the_answers_size_and_no_body(server: Server) -> None:
    _, _, came = answers(server, get(method="HEAD"))
    head, rest = came.split(b"\r\n\r\n", 1)
    assert b"content-length: 15" in head and rest.startswith(b"HTTP/1.1 404")


def test_a_client_that_waits_before_its_body_is_told_to_go_on(server: Server) -> None:
    waits = f"content-length: {SIZE}\r\nexpect: 100-continue\r\n"
    with socket.create_connection(server._listeners[0].getsockname(), SECONDS) as raw:
        raw.sendall(post(waits, b""))
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        raw.sendall(BODY)
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    refused = get("/nothing", f"{HOST}{waits}", method="POST")
    with socket.create_connection(server._listeners[0].getsockname(), SECONDS) as raw:
        raw.sendall(refused)
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 404 ")


def test_a_stream_to_http_1_0_ends_with_its_connection(server: Server) -> None:
    body = json.dumps({"model": MODEL, "prompt": [5], "max_tokens": 2, "stream": True}).encode()
    sent = post(f"content-length: {len(body)}\r\n", body, version="HTTP/1.0")
    _, stays, came = answers(server, sent)
    assert not stays and b"transfer-encoding" not in came.lower()
    assert came.endswith(b"data: [DONE]\n\n")
