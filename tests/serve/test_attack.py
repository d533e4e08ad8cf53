"""Clients that do harm, by intent or by accident: nobody else waits for them, nothing is computed
for them, and what is held for them has a bound."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import select
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# Where these are missing there are tests of other things; `make test` installs them
# (tests/test_packaging.py).
h11 = pytest.importorskip("h11")
pytest.importorskip("ostinato.serve.server")

from ostinato.models import SamplingOptions, TextGenerator
from ostinato.serve import app as app_module
from ostinato.serve import connection as connection_module
from ostinato.serve.app import HttpLimits
from ostinato.serve.engine import End
from ostinato.serve.log import Log
from ostinato.serve.protocol import read_request
from ostinato.serve.server import Server
from tests.cli import commands
from tests.serve.serving import MODEL, SECONDS, Reply, call, opened, running, until

CHAT = "/v1/chat/completions"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 3}
JSON = "content-type: application/json\r\n"
CHUNKED = f"{JSON}transfer-encoding: chunked\r\n"


@pytest.fixture(scope="module")
def generator(tiny_model: Path) -> Iterator[TextGenerator]:
    """For servers that a test starts."""
    with opened(tiny_model, ends=False) as generator:
        yield generator


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with opened(tiny_model, ends=False) as generator, running(generator) as started:
        yield started


@pytest.fixture(autouse=True)
def long_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what comes after an answer: so a test that is slow meets the limit of bytes alone."""
    monkeypatch.setattr(connection_module, "_DROP_SECONDS", SECONDS)


@contextmanager
def held(server: Server) -> Iterator[threading.Event]:
    """No prompt is read to its end until the event is set, or the block ends."""
    decoder = server.engine.generator.decoder
    read, free = decoder.prefill_batch, threading.Event()

    def waits(*arguments: Any, **options: Any) -> Any:
        assert free.wait(SECONDS)
        return read(*arguments, **options)

    decoder.prefill_batch = waits  # type: ignore[method-assign]
    try:
        yield free
    finally:
        free.set()
        until(lambda: not server.engine._entries)
        del decoder.prefill_batch


def watched(server: Server) -> bool:
    """Whether an answer is under way, and waits for its client to leave."""
    return any(one.cycle.message_event._waiters for one in connections(server) if one.cycle)


def ahead(server: Server) -> bool:
    """Whether more than the request under way has arrived."""
    return any(one.conn.trailing_data[0] for one in connections(server))


def received(raw: socket.socket) -> bytes:
    came = raw.recv(1 << 16)
    assert came, "the server has closed the connection"
    return came


def connections(server: Server) -> list[Any]:
    return [*server._uvicorn.server_state.connections]


def connect(server: Server) -> socket.socket:
    return socket.create_connection(server._listeners[0].getsockname(), SECONDS)


def head(headers: str, path: str = CHAT, method: str = "POST") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n".encode()


def whole(body: object, more: str = "") -> bytes:
    data = json.dumps(body).encode()
    return head(f"{JSON}{more}content-length: {len(data)}\r\n") + data


def to_the_end(raw: socket.socket) -> bytes:
    came = b""
    with suppress(ConnectionError):
        while piece := raw.recv(1 << 16):
            came += piece
    return came


def an_answer(raw: socket.socket) -> Reply:
    """The next answer on a connection, and not a byte more of it."""
    came, top = b"", b""
    while not top or (
        not came.endswith(b"\r\n0\r\n\r\n")
        if b"transfer-encoding: chunked" in top
        else len(came) - len(top) < int(re.findall(rb"content-length: (\d+)", top)[0])
    ):
        piece = raw.recv(1)
        assert piece, came
        came += piece
        top = top or (came.lower() if came.endswith(b"\r\n\r\n") else b"")
    status, *lines = top.decode().strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Reply(int(status.split()[1]), headers, came[len(top) :])


def counted(server: Server, path: str, status: int) -> float:
    text = call(server, "GET", "/metrics").body.decode()
    name = f'ostinato_http_requests_total{{path="{path}",status="{status}"}}'
    found = re.findall(rf"^{re.escape(name)} (\S+)$", text, flags=re.M)
    return float(found[0]) if found else 0.0


def cancelled(server: Server) -> int:
    return server.engine._ended_by[End.CANCELLED]


# --------------------------------------------------------------------------- clients that go away


@pytest.mark.parametrize("more", [b"G", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nG"])
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_after_the_beginning_of_a_further_request_is_noticed(
    server: Server, stream: bool, more: bytes
) -> None:
    before = cancelled(server)
    with held(server):
        with connect(server) as raw:
            raw.sendall(whole({**ASK, "max_tokens": 100, "stream": stream}))
            until(lambda: server.engine._entries and watched(server))
            raw.sendall(more)
            until(lambda: ahead(server))
        until(lambda: not server.engine._entries)
    assert cancelled(server) == before + 1


def test_who_sends_more_and_more_requests_ahead_is_cut_off(server: Server) -> None:
    """What is sent ahead of an answer is kept until its turn comes, so it has a bound."""
    before = cancelled(server)
    with held(server), connect(server) as raw:
        raw.sendall(whole(ASK))
        until(lambda: server.engine._entries)
        with suppress(ConnectionError):
            for _ in range(1000):
                raw.sendall(b"x" * (1 << 16))
            pytest.fail("64 MB were taken")
        until(lambda: not server.engine._entries)
    assert cancelled(server) == before + 1


def test_requests_that_are_sent_at_once_are_answered_in_turn(server: Server) -> None:
    with connect(server) as raw:
        raw.sendall(2 * whole(ASK) + head("connection: close\r\n", "/health", "GET"))
        answers = [an_answer(raw) for _ in range(3)]
        assert [answer.status for answer in answers] == [200] * 3
        assert "choices" in answers[1].json and answers[2].json == {"status": "ok"}
        assert to_the_end(raw) == b""


def test_bytes_after_the_last_request_of_a_connection_change_nothing(server: Server) -> None:
    with held(server) as free, connect(server) as raw:
        raw.sendall(whole(ASK, "connection: close\r\n"))
        until(lambda: server.engine._entries)
        raw.sendall(b"\r\n")
        free.set()
        assert an_answer(raw).status == 200


# ----------------------------------------------------------------------------------- early refusals


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each event that is read out of requests."""
    events: list[int] = []
    read = h11.Connection.next_event

    def counts(connection: Any) -> Any:
        if connection.our_role is h11.SERVER:
            events.append(1)
        return read(connection)

    monkeypatch.setattr(h11.Connection, "next_event", counts)
    return events


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        (CHAT, "POST", "transfer-encoding: chunked\r\n", 415),
        (CHAT, "POST", f"{CHUNKED}host: evil.example\r\n", 400),
        (CHAT, "PUT", CHUNKED, 405),
        ("/nothing", "POST", CHUNKED, 404),
        ("/health", "GET", CHUNKED, 200),
        ("/metrics", "GET", CHUNKED, 200),
    ],
)
def test_a_body_that_nobody_wants_is_not_read(
    server: Server, parsed: list[int], path: str, method: str, headers: str, status: int
) -> None:
    """The connection ends with the answer, and what comes after it is dropped as it is."""
    with connect(server) as raw:
        raw.sendall(head(headers, path, method))
        reply = an_answer(raw)
        assert reply.status == status and reply.headers["connection"] == "close"
        assert raw.recv(100) == b"", "the connection stays"
        raw.sendall(5000 * b"1\r\nx\r\n")
        raw.shutdown(socket.SHUT_WR)
        until(lambda: not connections(server))
    assert len(parsed) < 20


def test_a_body_of_tiny_chunks_ends(server: Server, parsed: list[int]) -> None:
    with connect(server) as raw:
        with suppress(ConnectionError):
            raw.sendall(head(CHUNKED) + 200_000 * b"1\r\n \r\n")
        raw.shutdown(socket.SHUT_WR)
        came = to_the_end(raw)
    assert came.startswith(b"HTTP/1.1 400") and b"too small" in came
    assert len(parsed) < 8000
    assert json.loads(came.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("size", "padding"), [(1, 0), (7, 3000), (1000, 3_000_000)])
def test_a_body_in_chunks_is_read(server: Server, size: int, padding: int) -> None:
    data = json.dumps({**ASK, "metadata": {"a": "x" * padding}}).encode()
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    with connect(server) as raw:
        body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        raw.sendall(head(CHUNKED) + body + b"0\r\n\r\n")
        assert an_answer(raw).status == 200


def test_who_never_stops_sending_after_a_refusal_is_cut_off(server: Server) -> None:
    piece, sent = b"x" * (1 << 20), 0
    with connect(server) as raw, suppress(ConnectionError):
        raw.sendall(head(f"{JSON}content-length: 9999999999\r\n"))
        while sent < 1 << 10:
            raw.sendall(piece)
            sent += 1
    assert sent < 200


def test_who_stays_after_a_refusal_is_cut_off(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_DROP_SECONDS", 0.1)
    with connect(server) as raw:
        raw.sendall(head(CHUNKED, "/nothing"))
        assert an_answer(raw).status == 404
        until(lambda: not connections(server))


# -------------------------------------------------------------------------------------- log lines


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("path", "status"), [(CHAT, "415"), ("/nothing", "404")])
def test_a_broken_chunk_after_a_refusal_is_nothing_to_log(
    server: Server, caplog: pytest.LogCaptureFixture, path: str, status: str, together: bool
) -> None:
    broken = b"zz\r\nno chunk\r\n"
    with connect(server) as raw:
        raw.sendall(head("transfer-encoding: chunked\r\n", path) + (broken if together else b""))
        first = raw.recv(12).decode()
        raw.sendall(broken)
        raw.shutdown(socket.SHUT_WR)
        to_the_end(raw)
    until(lambda: not connections(server))
    assert first == f"HTTP/1.1 {'400' if together else status}"
    assert not caplog.records, caplog.text


def test_what_is_no_http_is_counted_and_not_logged(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    before = counted(server, "", 400)
    for sent in (b"\x16\x03\x01 TLS\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"x\r\n\r\n"):
        with connect(server) as raw:
            raw.sendall(sent)
            raw.shutdown(socket.SHUT_WR)
            came = to_the_end(raw)
        assert came.startswith(b"HTTP/1.1 400") and b"connection: close" in came.lower()
        assert json.loads(came.partition(b"\r\n\r\n")[2])["error"]["message"]
    with connect(server) as raw:  # not supported, so it is answered as if it had not been wanted
        raw.sendall(head("connection: upgrade\r\nupgrade: websocket\r\n", "/health", "GET"))
        assert an_answer(raw).status == 200
    assert counted(server, "", 400) == before + 3
    assert not caplog.records, caplog.text


def fill(end: int) -> None:
    """So that the next write to a pipe would wait."""
    again = os.open(f"/proc/self/fd/{end}", os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(again, b"." * 512)
    os.close(again)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reads, writes = os.pipe()
    yield reads, writes
    os.close(reads)
    os.close(writes)


def drained(end: int) -> str:
    came = b""
    while select.select([end], [], [], 0)[0]:
        came += os.read(end, 1 << 16)
    return came.decode().lstrip(".")


def record(words: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.ERROR, "x.py", 1, words, (), None)


def test_a_log_that_nobody_reads_loses_lines_and_says_how_many(pipe: tuple[int, int]) -> None:
    reads, writes = pipe
    log = Log(writes, most=1000)
    fill(writes)
    for _ in range(5):
        log.handle(record("lost"))
    drained(reads)
    log.handle(record("found"))
    log.handle(record("a long one: " + "x" * 20_000))
    log.handle(record("too long: " + "x" * 1_000_000))
    came = drained(reads)
    assert came.startswith("5 log lines were lost\nfound\na long one: ")
    assert came.count("x" * 20_000 + "\n") == 1 and len(came) < 1_000_000
    log.handle(record("end"))
    assert drained(reads) == "1 log lines were lost\nend\n"


def test_a_flood_of_log_lines_is_cut_to_a_few(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    # The module's own name: other threads need the real `time.monotonic` for their timers.
    monkeypatch.setattr("ostinato.serve.log.time", SimpleNamespace(monotonic=lambda: now))
    log = Log(pipe[1], most=10)
    for number in range(50):
        log.handle(record(f"line {number}"))
    assert drained(pipe[0]).count("line ") == 10
    now += 60
    log.handle(record("line 50"))
    assert drained(pipe[0]) == "40 log lines were lost\nline 50\n"


def test_a_server_whose_errors_nobody_reads_answers_and_ends(
    tiny_model: Path, pipe: tuple[int, int]
) -> None:
    reads, writes = pipe
    options = ("--model", str(tiny_model), "--port", "0", "--device", "host")
    process = subprocess.Popen(
        [*commands.COMMAND, "serve", *options],
        env=commands.environment(),
        stdin=subprocess.DEVNULL,
        stderr=writes,
    )
    try:
        with os.fdopen(os.dup(reads), "rb", buffering=0) as end:
            line = end.readline().decode()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, line
        fill(writes)
        for sent in 20 * [b"GET / HTTP/1.1\r\n\r\n", head(CHUNKED, "/") + b"zz\r\nx"]:
            with socket.create_connection(("127.0.0.1", int(found[1])), 30) as raw:
                raw.sendall(sent)
                assert raw.recv(100)
        with socket.create_connection(("127.0.0.1", int(found[1])), 30) as raw:
            raw.sendall(head("", "/health", "GET"))
            assert raw.recv(100).startswith(b"HTTP/1.1 200")
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


# ----------------------------------------------------------------------------- the end of a server


def test_what_is_left_after_the_grace_is_told(
    generator: TextGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    """Everyone gets an error object: with status 503 where nothing was sent yet."""
    with ExitStack() as stack:
        server = stack.enter_context(running(generator, grace_seconds=0))
        raws = [stack.enter_context(connect(server)) for _ in range(3)]
        free = stack.enter_context(held(server))
        raws[0].sendall(whole({**ASK, "max_tokens": 50}))
        raws[1].sendall(whole({**ASK, "max_tokens": 50, "stream": True}))
        raws[2].sendall(head(f"{JSON}content-length: 500\r\n") + b"{")
        came = raws[1].recv(1 << 16)  # the head of the stream
        until(lambda: len(server.engine._entries) == 2)
        until(lambda: len(server.service._arriving) == 1)
        server.stop()
        until(lambda: not server.engine._entries)
        free.set()
        late, unfinished = an_answer(raws[0]), an_answer(raws[2])
        came += to_the_end(raws[1])
    for reply in (late, unfinished):
        assert reply.status == 503 and reply.headers["connection"] == "close"
        assert reply.error["code"] == "stopping"
    events = re.findall(rb"data: (.*)\n\n", came)
    assert json.loads(events[-1])["error"]["code"] == "stopping"
    assert came.startswith(b"HTTP/1.1 200") and came.endswith(b"\r\n0\r\n\r\n")
    assert not caplog.records, caplog.text
    assert not server.engine._entries


def test_who_reads_nothing_does_not_hold_the_end(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that are still there some seconds after the grace are cut."""
    monkeypatch.setattr("ostinato.serve.server._LAST_SECONDS", 0.1)
    with running(generator, grace_seconds=0, queue=50) as server:
        server._listeners[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect(server._listeners[0].getsockname())
            for _ in range(200):
                raw.sendall(head("", "/metrics", "GET"))
            until(lambda: any(one.flow.write_paused for one in connections(server)))
            server.stop()
            until(lambda: not connections(server))


def test_a_body_that_never_ends_does_not_hold_the_end(generator: TextGenerator) -> None:
    with running(generator, grace_seconds=600) as server, connect(server) as raw:
        raw.sendall(head(f"{JSON}content-length: 500\r\n") + b"{")
        until(lambda: server.service._arriving)
        server.stop()
        reply = an_answer(raw)
        assert reply.status == 503 and reply.headers["connection"] == "close"
        assert reply.error["code"] == "stopping"


@pytest.mark.parametrize("stream", [False, True])
def test_answers_under_way_at_the_end_tell_that_the_connection_ends(
    generator: TextGenerator, stream: bool
) -> None:
    """By their head; where that was sent before, the next request on the connection is told."""
    with running(generator) as server, connect(server) as raw:
        with held(server):
            raw.sendall(whole({**ASK, "stream": stream}))
            until(lambda: server.engine._entries)
            if stream:
                assert raw.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"
            server.stop()
            until(lambda: not server._uvicorn.servers[0].is_serving())
        first = an_answer(raw)
        assert first.status == 200
        if stream:
            assert b"data: [DONE]\n\n" in first.body and "connection" not in first.headers
            raw.sendall(whole(ASK))
            second = an_answer(raw)
            assert second.status == 503 and second.error["code"] == "stopping"
            assert second.headers["connection"] == "close"
        else:
            assert first.headers["connection"] == "close"
        assert to_the_end(raw) == b""


def test_a_connection_without_a_request_does_not_hold_the_end(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one whose stream said nothing of an end, nor one that was idle."""
    for name in ("_STOPPING_IDLE_SECONDS", "_LOOK_SECONDS"):
        monkeypatch.setattr(f"ostinato.serve.server.{name}", 0.1)
    with running(generator) as server, connect(server) as raw, connect(server) as idle:
        idle.sendall(head("", "/health", "GET"))
        assert an_answer(idle).status == 200
        with held(server):
            raw.sendall(whole({**ASK, "stream": True}))
            assert raw.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"
            server.stop()
            assert to_the_end(idle) == b""
        assert b"[DONE]" in an_answer(raw).body
        assert to_the_end(raw) == b""
        until(lambda: not connections(server))


# ------------------------------------------------------------------------------------------ bodies


def test_a_full_server_refuses_before_a_body_is_read(generator: TextGenerator) -> None:
    with running(generator, queue=0) as server, held(server), ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connect(server)).sendall(whole(ASK))
        until(lambda: server.engine._scheduler.under_way == 4)
        with connect(server) as raw:
            raw.sendall(head(f"{JSON}content-length: 3000000\r\n"))
            reply = an_answer(raw)
            assert reply.status == 429 and reply.headers["retry-after"] == "1"
            assert reply.headers["connection"] == "close"


def large(size: int) -> bytes:
    data = json.dumps({**ASK, "metadata": {"a": "x" * size}}).encode()
    return head(f"{JSON}content-length: {len(data)}\r\n") + data


def test_large_bodies_are_read_a_few_at_a_time(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held of them has a bound, those beyond it wait, and more that wait are refused."""
    size, count = 1 << 20, 8
    monkeypatch.setattr(app_module, "_LARGE_BYTES", 2 * size + 10_000)
    ends = threading.Event()

    def send(raw: socket.socket) -> None:
        sent = large(size)
        raw.sendall(sent[:-1])
        assert ends.wait(SECONDS)
        raw.sendall(sent[-1:])

    limits = HttpLimits(body_bytes=size + 1000)
    with running(generator, queue=2, limits=limits) as server, ExitStack() as stack:
        raws = [stack.enter_context(connect(server)) for _ in range(count)]
        room = server.service._large
        pool = stack.enter_context(ThreadPoolExecutor(count))
        stack.callback(ends.set)
        sent = [pool.submit(send, raw) for raw in raws]
        until(lambda: len(server.service._arriving) == count and room.waiting == count - 2)
        with connect(server) as raw:
            raw.sendall(large(size)[:1000])
            assert an_answer(raw).status == 429
        assert sum(len(one.cycle.body) for one in connections(server) if one.cycle) < count * (
            1 << 19
        )
        assert call(server, "POST", CHAT, ASK).status == 200
        ends.set()
        for one in sent:
            one.result(SECONDS)
        statuses = [an_answer(raw).status for raw in raws]
        # The engine's queue of two may be full again when one has been read.
        assert {*statuses} <= {200, 429} and statuses.count(200) >= 2
        assert room.free == room.size and not server.service._arriving


def test_small_bodies_that_never_end_have_a_bound_together(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "_SMALL_BYTES", 100_000)
    with running(generator) as server, ExitStack() as stack:
        raws = [stack.enter_context(connect(server)) for _ in range(3)]
        for raw in raws[:2]:
            raw.sendall(head(f"{JSON}content-length: 60000\r\n") + b" " * 45_000)
        until(lambda: server.service._small == 90_000)
        raws[2].sendall(head(f"{JSON}content-length: 60000\r\n") + b" " * 20_000)
        assert an_answer(raws[2]).status == 429
        assert server.service._small == 90_000
        assert call(server, "POST", CHAT, ASK).status == 200
        for raw in raws[:2]:
            raw.close()
        until(lambda: server.service._small == 0)


def test_small_requests_do_not_wait_for_large_ones(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many large ones are looked at: they take one of the threads."""
    free, at_it = threading.Event(), []

    def slow(given: Any, kind: Any, sampling: SamplingOptions) -> Any:
        if "metadata" in given:
            at_it.append(1)
            assert free.wait(SECONDS)
        return read_request(given, kind, sampling)

    monkeypatch.setattr(app_module, "read_request", slow)
    with running(generator, queue=100) as server, ExitStack() as stack:
        raws = [stack.enter_context(connect(server)) for _ in range(40)]
        try:
            for raw in raws:
                raw.sendall(large(1 << 17))
            until(lambda: at_it)
            assert call(server, "POST", CHAT, ASK).status == 200
            assert call(server, "GET", "/metrics").status == 200
            assert len(at_it) == 1
        finally:
            free.set()
        assert [an_answer(raw).status for raw in raws] == [200] * 40


def test_a_body_of_brackets_is_not_parsed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else runs meanwhile, so it has fewer than a parser takes a second for."""
    read = app_module.parse_json
    seen: list[int] = []
    monkeypatch.setattr(app_module, "parse_json", lambda body: seen.append(len(body)) or read(body))
    for text in (140_000 * "[5],", 70_000 * '{"a":[]},'):
        data = f'{{"model": "{MODEL}", "prompt": [{text}[5]]}}'.encode()
        reply = call(server, "POST", "/v1/completions", data)
        assert reply.status == 400 and "131072 opening brackets" in reply.error["message"]
    assert not seen
    text = 100_000 * "[] {} "
    asked = {**ASK, "messages": [{"role": "user", "content": text[: 1 << 17]}]}
    assert call(server, "POST", CHAT, asked).error["code"] == "context_length_exceeded"
    assert len(seen) == 1


def test_the_garbage_collector_works_after_a_large_body(server: Server) -> None:
    for sent in (large(1 << 17), head(f"{JSON}content-length: {1 << 17}\r\n") + bytes(1 << 17)):
        with connect(server) as raw:
            raw.sendall(sent)
            assert an_answer(raw).status in (200, 400)
        assert gc.isenabled()


# -------------------------------------------------------------------------- before the first token


def test_a_stream_begins_at_once_and_is_never_silent(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "_COMMENT_SECONDS", 0.01)
    with running(generator) as server, connect(server) as raw:
        with held(server):
            raw.sendall(whole({**ASK, "stream": True}))
            came = b""
            while came.count(b": waiting\n\n") < 3:
                came += received(raw)
            assert came.startswith(b"HTTP/1.1 200") and b"text/event-stream" in came
            assert b"data:" not in came
        while not came.endswith(b"\r\n0\r\n\r\n"):
            came += received(raw)
    assert came.count(b"data: [DONE]\n\n") == 1 and b'"finish_reason": "length"' in came
