"""One client's connection: the limits that uvicorn's HTTP/1.1 protocol does not have.

    request under way, a further one begins      read on, up to `_MOST_AHEAD`: so the end is seen
    answer before the body is there              the answer, an end of our side, then nothing is
                                                 parsed: what comes is dropped, within limits
    chunks whose frames outweigh what they hold  400, and the same end
    no HTTP                                      400, and the same end; counted, not logged
    nothing of an answer is taken                the connection is cut after `_SEND_SECONDS`
    answers while the server stops               `connection: close`

The parser is h11 whatever else is installed, so that the same bytes always get the same answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ostinato.serve.protocol import ApiError

_SLICE = 4096
"""Bytes that are parsed before it is looked at what they were."""
_MOST_AHEAD = 64 << 10
"""Bytes of further requests that are kept while one is answered."""
_MOST_FRAMING = 16 << 10
"""Bytes of a chunked body that are none of its data, besides a sixteenth of the data: a chunk costs
as much time as some hundred bytes."""
_MOST_DROPPED = 64 << 20
"""Bytes that are dropped after an answer: most clients read none before they have sent all."""
_DROP_SECONDS = 5.0
_STOPPING_DROP_SECONDS = 1.0
_SEND_SECONDS = 60.0
"""For a client to take what is sent: one that does not is as good as gone."""
_CLOSE = (b"connection", b"close")


class Connection(H11Protocol):
    """`stopping`: whether the server takes no more requests.  `refused` is called for each request
    that is refused here, before it has a path."""

    def __init__(
        self, *, stopping: Callable[[], bool], refused: Callable[[], object], **options: Any
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
            # After the last request of a connection h11 takes any byte for an error.
            if self._dropping or self.conn.their_state is h11.MUST_CLOSE:
                self._dropped += len(left)
                if self._dropped > _MOST_DROPPED:
                    self.transport.abort()
                return
            size = len(left) if self._is_plain_body() else _SLICE
            piece, left = left[:size], left[size:]
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
        """Whether a body of announced length arrives: however long, it is one piece."""
        return self.conn.their_state is h11.SEND_BODY and not any(
            name == b"transfer-encoding" for name, _ in self.headers
        )

    def handle_events(self) -> None:
        super().handle_events()
        # uvicorn reads no more once a further request begins, and then does not see the client go.
        if self.flow.read_paused and self.conn.their_state is h11.DONE:
            if len(self.conn.trailing_data[0]) > _MOST_AHEAD:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Ends the connection; uvicorn calls this for what is no HTTP."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.cycle is None or self.cycle.response_complete:
                self._refused()
            body = json.dumps(ApiError(400, msg).body()).encode()
            kind = (b"content-type", b"application/json")
            size = (b"content-length", str(len(body)).encode())
            for event in (
                h11.Response(status_code=400, headers=[kind, size, _CLOSE], reason=b"Bad Request"),
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

        await self._inner(scope, receive, sent)

    def _drop_the_rest(self) -> None:
        """Ends our side, and the connection when the client ends its own.

        To close while it still sends would make its system forget the answer (RFC 9112, 9.6).
        """
        self._dropping = True
        if self.cycle is not None and not self.cycle.response_complete:
            # For uvicorn: nothing more is sent, and that is no error.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        with suppress(OSError):  # the client is gone
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
        """The server stops.  An answer whose head was sent before does not say that the connection
        ends; so it does not, until the next request on it was told."""
        if self._dropping:
            self.transport.close()
        elif self.cycle is None or self.cycle.response_complete:
            super().shutdown()
