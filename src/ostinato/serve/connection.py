"""One client's connection: limits that uvicorn's HTTP/1.1 protocol does not have.

    a further request arrives during an answer   up to `_MOST_AHEAD` bytes are read, so that a
                                                 disconnect is noticed
    answer sent before the body has arrived      our side is closed; the rest is dropped, not parsed
    chunk framing outweighs chunk data           400, then closed in the same way
    malformed HTTP                               400, 431 or 501, closed so; counted, not logged
    another version than HTTP/1, two framings    505, 400, and closed
    a target with a scheme and a host            the host is this one, whatever the Host header says
    client reads nothing of an answer            the connection is cut after `_SEND_SECONDS`
    answers while the server stops               carry `connection: close`

The parser is always h11, so that the same bytes get the same answer whatever else is installed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ostinato.serve.protocol import ApiError

_SLICE = 4096
"""Bytes that are parsed between two checks of the limits."""
_MOST_AHEAD = 64 << 10
"""Bytes of further requests that are buffered while one is answered."""
_MOST_FRAMING = 16 << 10
"""Framing bytes that a chunked body may have, besides a sixteenth of its data: parsing a chunk
costs as much time as some hundred bytes."""
_MOST_DROPPED = 64 << 20
"""Bytes dropped after an early answer: most clients read none before they have sent the body."""
_DROP_SECONDS = 5.0
_STOPPING_DROP_SECONDS = 1.0
_SEND_SECONDS = 60.0
"""Time for a client to read what is sent, after which it is treated as disconnected."""
_CLOSE = (b"connection", b"close")


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with the limits above.  `stopping`: True while the server takes
    no more requests.  `refused`: called with the status for each request that is refused before it
    has a path."""

    def __init__(
        self, *, stopping: Callable[[], bool], refused: Callable[[int], object], **options: Any
    ) -> None:
        super().__init__(**options)
        self._inner, self.app = self.app, self._answer
        self._stopping, self._refused = stopping, refused
        self._framing = self._data = 0
        self._dropping, self._dropped = False, 0
        self._patience: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        left = memoryview(data)
        while left and not self.transport.is_closing():
            # After the last request of a connection, h11 treats any further byte as an error.
            if self._dropping or self.conn.their_state is h11.MUST_CLOSE:
                self._dropped += len(left)
                if self._dropped > _MOST_DROPPED:
                    self.transport.abort()
                return
            size = len(left) if self._is_plain_body() else _SLICE
            piece, left = left[:size], left[size:]
            if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
                # Some clients end a body with a line end more (RFC 9112, 2.2).
                piece = memoryview(bytes(piece).lstrip(b"\r\n"))
            cycle = self.cycle
            held = len(cycle.body) if cycle is not None else 0
            super().data_received(piece)  # type: ignore[arg-type]
            if self.cycle is not cycle or cycle is None:
                self._framing = self._data = 0
            elif cycle.more_body:
                data_bytes = len(cycle.body) - held
                self._data += data_bytes
                self._framing += len(piece) - data_bytes
                if self._framing > _MOST_FRAMING + self._data // 16:
                    self.send_400_response("the chunks of the body are too small")

    def _is_plain_body(self) -> bool:
        """True while a body of announced length arrives, which is passed on in one piece."""
        return self.conn.their_state is h11.SEND_BODY and not any(
            name == b"transfer-encoding" for name, _ in self.headers
        )

    def handle_events(self) -> None:
        super().handle_events()
        # uvicorn stops reading when a further request begins and would then miss a disconnect.
        if self.flow.read_paused and self.conn.their_state is h11.DONE:
            if len(self.conn.trailing_data[0]) > _MOST_AHEAD:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Answers 400 and closes the connection.  uvicorn calls this for malformed HTTP, while it
        handles h11's error, which may have another status."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.cycle is None or self.cycle.response_complete:
                self._refused(status)
            headers, body = _answer_parts(ApiError(status, msg))
            reason = HTTPStatus(status).phrase.encode()
            for event in (
                h11.Response(status_code=status, headers=headers, reason=reason),
                h11.Data(data=body),
            ):
                self.transport.write(self.conn.send(event))
        self._drop_the_rest()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        cycle, early = self.cycle, False

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal early
            if message["type"] == "http.response.start":
                early = cycle.more_body
                self._dropping |= early
                headers = [*message.get("headers", ())]
                if (early or self._stopping()) and _CLOSE not in headers:
                    message = {**message, "headers": [*headers, _CLOSE]}
            elif early and not message.get("more_body"):
                await send({**message, "more_body": True})
                self._drop_the_rest()
                return
            await send(message)

        unfit = _unfit(scope)
        if unfit is None:
            await self._inner(_with_own_target(scope), receive, sent)
            return
        self._refused(unfit.status)
        headers, body = _answer_parts(unfit)
        await sent({"type": "http.response.start", "status": unfit.status, "headers": headers})
        await sent({"type": "http.response.body", "body": body})

    def _drop_the_rest(self) -> None:
        """Closes our side of the connection; the other is closed by the client or after a timeout.

        Closing both while the client sends would make its system discard the answer (RFC 9112,
        9.6).
        """
        self._dropping = True
        if self.cycle is not None and not self.cycle.response_complete:
            # Tells uvicorn that the unfinished response is not an error.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        with suppress(OSError):  # the client has disconnected
            self.transport.write_eof()
        seconds = _STOPPING_DROP_SECONDS if self._stopping() else _DROP_SECONDS
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._patience = self.loop.call_later(_SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_waiting()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def shutdown(self) -> None:
        """Closes the connection as the server stops, unless an answer is under way: its head may
        lack `connection: close`, so the connection stays open until a later answer on it has that
        header."""
        if self._dropping:
            self.transport.close()
        elif self.cycle is None or self.cycle.response_complete:
            super().shutdown()


def _unfit(scope: Any) -> ApiError | None:
    """Returns the error for a request whose version or framing is not safe to go by."""
    if not scope["http_version"].startswith("1."):
        return ApiError(505, "this server speaks HTTP/1.1 alone")
    if {b"transfer-encoding", b"content-length"} <= {name for name, _ in scope["headers"]}:
        # A proxy in front may go by the other one, and take the rest for another request.
        return ApiError(400, "a request has transfer-encoding or content-length, not both")
    return None


def _with_own_target(scope: Any) -> Any:
    """Returns the scope with a target that begins with "/".  A target with a scheme and a host, as
    proxies get it, replaces the Host header (RFC 9112, 3.2.2)."""
    target = scope["raw_path"]
    if target[:7].lower() != b"http://":
        return scope
    host, _, path = target[7:].partition(b"/")
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    own = {"raw_path": b"/" + path, "path": "/" + unquote(path.decode("ascii"))}
    return {**scope, **own, "headers": [(b"host", host), *headers]}


def _answer_parts(error: ApiError) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Returns the headers and the body of the last answer on a connection."""
    body = json.dumps(error.body()).encode()
    sizes = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return [*sizes, _CLOSE], body
