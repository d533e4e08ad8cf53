"""The server's process: the socket, uvicorn, the engine, and the shutdown of each.

SIGTERM and Ctrl-C begin a graceful shutdown: no connection is accepted, requests whose body has not
arrived get 503, and answers under way are completed.  After `grace_seconds` the remaining answers
end with an error (503, or the last event of a stream).  Connections that do not read it are cut; a
second Ctrl-C cuts all.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from ostinato.errors import InputError
from ostinato.models import SamplingOptions, TextGenerator
from ostinato.serve.app import HttpLimits, RequestLog, Service, make_app
from ostinato.serve.connection import Connection
from ostinato.serve.engine import ServingEngine
from ostinato.serve.metrics import Metrics

_log = logging.getLogger(__name__)

LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")
"""Names and addresses of this machine."""

_SWITCH_SECONDS = 5e-4
"""Python's thread switch interval while the server runs: shorter than a step.  The default of 5 ms
is as long as three steps of a small model."""
_KEEP_ALIVE_SECONDS = 75
"""Limit for an idle connection, for a request's head to arrive, for last bytes to be read."""
_STOPPING_IDLE_SECONDS = 1.0
"""Limit for an idle connection while the server stops; a request within it gets 503."""
_LAST_SECONDS = 3.0
"""Time after the grace for clients to read the last messages."""
_SAY_SECONDS = 10.0
_LOOK_SECONDS = 1.0
"""Interval between two checks of the connections."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of a server.  `model`: the name by which clients request it.  `keys`: see `Service`.
    `sampling`: defaults for requests; None for the generator's own.  `queue`, `piece`, `reuse`,
    `seconds`: see `ServingEngine`.  `grace_seconds`: time to finish answers at shutdown.
    `origins`: see `make_app`.  `log`: see `Service`."""

    model: str
    keys: tuple[str, ...] = ()
    limits: HttpLimits = field(default_factory=HttpLimits)
    queue: int = 64
    piece: int = 256
    reuse: bool = True
    seconds: float | None = 600.0
    grace_seconds: int = 600
    sampling: SamplingOptions | None = None
    origins: tuple[str, ...] = ()
    log: RequestLog | None = None


class Server:
    """A server of one model, which runs until it is stopped.

    `listeners`: bound sockets (`Server.bind`).  The server uses `generator` exclusively while it
    runs; the caller closes it.  `local`: True if only this machine can reach the server.
    """

    def __init__(
        self,
        generator: TextGenerator,
        options: ServeOptions,
        listeners: Sequence[socket.socket],
    ) -> None:
        self.metrics = Metrics()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.engine = ServingEngine(
            generator,
            queue=options.queue,
            piece=options.piece,
            reuse=options.reuse,
            seconds=options.seconds,
            post=self._post,
            over=self.metrics.answer,
        )
        self.local = all(listener.getsockname()[0] in LOCAL for listener in listeners)
        self.service = Service(
            self.engine,
            self.metrics,
            options.model,
            generator.default_sampling if options.sampling is None else options.sampling,
            options.keys,
            LOCAL if self.local and not options.keys else (),
            options.limits,
            options.log,
        )
        self._listeners = tuple(listeners)
        self._ready: Callable[[], object] = lambda: None
        self._grace = options.grace_seconds
        config = uvicorn.Config(
            make_app(self.service, self._life, options.origins),
            http=partial(  # type: ignore[arg-type]  # uvicorn only calls it
                Connection,
                stopping=lambda: self.engine.stopping,
                refused=partial(self.metrics.request, ""),
            ),
            log_config=None,
            log_level="error",  # warnings concern what clients do, which the metrics count
            access_log=False,
            server_header=False,
            lifespan="on",
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        self._uvicorn = _Uvicorn(config, self.engine)

    @staticmethod
    def bind(host: str, port: int) -> tuple[socket.socket, ...]:
        """Returns sockets bound to the addresses of the host, all with the same port.

        A name such as "localhost" can have an address of IPv4 and one of IPv6; those that this
        machine does not have are left out.  Raises OSError if an address cannot be bound, and
        InputError for a bad host.
        """
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            raise InputError(f"host is {host!r}: {error}") from None
        addresses = dict.fromkeys((family, *address) for family, _, _, _, address in found)
        while True:
            try:
                return _bound(addresses, port)
            except OSError as error:
                if port == 0 and len(addresses) > 1 and error.errno == errno.EADDRINUSE:
                    continue  # a port that was free at one address is in use at another
                where = f"cannot listen at {host}, port {port}: {error.strerror}"
                what = "choose another port (0 for any that is free) or host"
                raise OSError(error.errno, f"{where}; {what}") from None

    @property
    def url(self) -> str:
        """The URL of the first listening socket."""
        host, port = self._listeners[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self, ready: Callable[[], object] = lambda: None) -> None:
        """Serves until a signal or `stop`.  `ready` is called once requests can be answered.

        Raises the error that ended the engine, if any.
        """
        self._ready = ready
        try:
            with _process(self.stop), ExitStack() as closing:
                for listener in self._listeners:
                    closing.enter_context(listener)
                self._uvicorn.run(sockets=[*self._listeners])
        finally:
            # The caller closes the decoder next, so no step may be in flight, whatever ended the
            # loop.
            self.engine.end_all()
            self.engine.close()
        if self.engine.failure is not None:
            raise self.engine.failure

    def summary(self) -> str:
        """Returns one line about the answers.  To be called after the server stopped."""
        numbers = self.engine.statistics().result()
        ends = ", ".join(f"{count} {end}" for end, count in numbers.ended.items() if count)
        refused = sum(numbers.refused.values())
        answers = "answer" if numbers.submitted == 1 else "answers"
        return (
            f"{numbers.submitted} {answers} begun ({ends or 'none'}), {refused} refused; "
            f"{numbers.answer_tokens} tokens given, {numbers.prompt_tokens} read, "
            f"{numbers.cached_tokens} of prompts were there"
        )

    def stop(self) -> None:
        """Begins a graceful shutdown; callable from any thread and from signal handlers."""
        self.engine.stopping = True
        self._uvicorn.should_exit = True

    @asynccontextmanager
    async def _life(self, app: object) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_Failures())
        self.engine.start()
        watcher = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watcher.cancel()
            # No connection is left to take the answers under way.
            self.engine.end_all()
            await asyncio.to_thread(self.engine.close)

    async def _watch(self) -> None:
        """Calls `ready` once, cuts idle connections, and carries out the shutdown.

        An engine that failed ends the process, so that a supervisor can start another.
        """
        connections: set[Any] = self._uvicorn.server_state.connections
        said, idle, looked = False, _Idle(), 0.0
        end: float | None = None  # when the grace ends, on the monotonic clock
        while True:
            now = time.monotonic()
            if self.engine.failure is not None:
                self.stop()
            elif self.engine.ready and self._uvicorn.started and not said:
                said = True
                self._ready()
            if self.engine.stopping:
                if end is None:
                    end = now + self._grace
                    self.service.take_no_more_bodies()
                if now >= end:
                    self.engine.end_all()
            if self._uvicorn.force_exit or (end is not None and now >= end + _LAST_SECONDS):
                # uvicorn's own wait for connections to close would block here (Python 3.12 and
                # later).
                for connection in [*connections]:
                    connection.transport.abort()
            elif now - looked >= _LOOK_SECONDS:
                looked = now
                idle.look([*connections], now, stopping=end is not None)
            await asyncio.sleep(0.05)

    def _post(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: no client is left
            self._loop.call_soon_threadsafe(call)


def _bound(addresses: Iterable[tuple[Any, ...]], port: int) -> tuple[socket.socket, ...]:
    """Binds a socket to each (family, host, port, …) that this machine has, all with one port."""
    made: list[socket.socket] = []
    missing: OSError | None = None
    with ExitStack() as closing:
        for family, host, _, *others in addresses:
            try:
                # With the protocol by its number: asyncio sets TCP_NODELAY only then, and without
                # it an answer's second piece waits for the client's acknowledgement, 40 ms.
                kind = family, socket.SOCK_STREAM, socket.IPPROTO_TCP
                one = closing.enter_context(socket.socket(*kind))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                one.bind((host, made[0].getsockname()[1] if made else port, *others))
            except OSError as error:
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
                missing = error
            else:
                made.append(one)
        if not made and missing is not None:
            raise missing
        closing.pop_all()
    return tuple(made)


class _Idle:
    """A monitor that cuts stalled connections, for which uvicorn has no limit: the head of a
    request does not arrive, or a closing connection waits for its client to read what was sent.

    A request under way has limits of its own (`app`).
    """

    def __init__(self) -> None:
        self._since: dict[Connection, tuple[object, float]] = {}

    def look(self, connections: Iterable[Connection], now: float, *, stopping: bool) -> None:
        """Checks the open connections; to be called about every second."""
        before, self._since = self._since, {}
        for connection in connections:
            cycle, transport = connection.cycle, connection.transport  # the latest request
            closing = transport.is_closing()
            if closing or cycle is None or cycle.response_complete:
                state = (closing, cycle)
                last, since = before.get(connection, (state, now))
                self._since[connection] = state, (since if last == state else now)
                soon = stopping and not closing
                most = _STOPPING_IDLE_SECONDS if soon else _KEEP_ALIVE_SECONDS
                if now - self._since[connection][1] > most:
                    transport.abort()


class _Failures:
    """asyncio's handler for errors in callbacks.

    With all file descriptors in use, asyncio fails to accept two thousand connections a second,
    each with a traceback; this handler logs one line instead.
    """

    def __init__(self) -> None:
        self._said = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, now = context.get("exception"), time.monotonic()
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif now - self._said >= _SAY_SECONDS:
            self._said = now
            _log.error("no connection can be accepted now: %s", error.strerror)


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, engine: ServingEngine) -> None:
        super().__init__(config)
        self._engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._engine.stopping = True  # no lock: this handler interrupts the main thread anywhere
        super().handle_exit(sig, frame)


@contextmanager
def _process(stop: Callable[[], object]) -> Iterator[None]:
    """Changes settings of the process while the block serves.

    After its shutdown uvicorn raises the signals that it received again, for the handlers set
    before it.  A graceful shutdown is not a failure, so these handlers only call `stop`; they also
    handle signals that arrive before uvicorn listens.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    handlers = {number: signal.signal(number, lambda *_: stop()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sys.setswitchinterval(before)
