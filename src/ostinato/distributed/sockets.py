"""The channel of ranks that are processes: a hub in one of them, and a connection from each.

Own sockets are needed because ranks must notice each other's death while NCCL, a GPU or Python's
interpreter does not respond, with any launcher and without other packages.  A launcher's own store
(torchrun's, PMI) does not report a peer that dies, and each is another library.

    hub          a thread in the process that made the group's id: collects the parts of exchanges,
                 sends all of them to all ranks, and passes on the first failure
    connection   one per rank, with two threads: one reads, one sends heartbeats

A rank that is silent for three quarters of the deadline is lost, whether stopped (SIGSTOP) or off
the network; so it is named before the ranks that wait for it give up.  A process that dies is
noticed at once, because the system closes its connection.  The hub's own process is watched
likewise.

A message is a length, a head in JSON and a payload of bytes; nothing is unpickled.  A connection is
accepted only with the token of the group's id, which is a secret if the id is.
"""

from __future__ import annotations

import hmac
import json
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ostinato.distributed.channel import Channel, Exchanges, Failure, FirstFailure, waited_text
from ostinato.errors import GroupError, InputError, RankLostError
from ostinato.lowlevel import new_lock

_LENGTHS = struct.Struct("!4sIQ")  # magic, bytes of the head, bytes of the payload
_MAGIC = b"ost1"
LOOPBACK = "127.0.0.1"
_MOST_HEAD = 1 << 16
_MOST_PAYLOAD = 1 << 31
_MOST_WHERE = 500  # characters
_SILENCE = 0.75  # of a deadline
_BEATS = 8  # heartbeats within a deadline
_SHORTEST_BEAT, _LONGEST_BEAT = 0.02, 2.0


@dataclass(frozen=True, slots=True)
class HubAddress:
    """The address of a hub, and the token that it requires."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}:{self.token}"

    @classmethod
    def parse(cls, text: str) -> HubAddress:
        """Parses host:port:token.  Raises InputError for other text."""
        host, _, rest = text.rpartition(":")
        host, _, port = host.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 1 << 16 and rest):
            raise InputError(f"{text!r} is no id of a group: host:port:token")
        return cls(host, int(port), rest)


def beat_of(deadline: float) -> float:
    """Returns the seconds between two heartbeats."""
    return min(_LONGEST_BEAT, max(_SHORTEST_BEAT, deadline / _BEATS))


# ------------------------------------------------------------------------------------- messages


def packed(head: dict[str, Any], payload: bytes = b"") -> bytes:
    """Returns a message as bytes."""
    text = json.dumps(head).encode()
    assert len(text) <= _MOST_HEAD and len(payload) <= _MOST_PAYLOAD
    return _LENGTHS.pack(_MAGIC, len(text), len(payload)) + text + payload


def _told(failure: Failure) -> dict[str, Any]:
    return {"kind": "fail", "what": failure.kind, "rank": failure.rank, "text": failure.text}


class Reader:
    """The received bytes, split into messages.  `most`: largest payload in bytes; the first message
    of a connection has none."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    def next(self) -> tuple[dict[str, Any], bytes] | None:
        """Returns the next message, or None until it is complete.  Raises ValueError for other
        data."""
        if len(self._data) < _LENGTHS.size:
            return None
        magic, head_bytes, payload_bytes = _LENGTHS.unpack_from(self._data)
        if magic != _MAGIC or head_bytes > _MOST_HEAD or payload_bytes > self.most:
            raise ValueError("not a message of a group")
        start = _LENGTHS.size + head_bytes
        if len(self._data) < start + payload_bytes:
            return None
        head = json.loads(self._data[_LENGTHS.size : start])
        payload = bytes(self._data[start : start + payload_bytes])
        del self._data[: start + payload_bytes]
        if not isinstance(head, dict):
            raise ValueError("a message's head must be an object")
        return head, payload


# ------------------------------------------------------------------------------------------ hub


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    reader: Reader = field(default_factory=Reader)
    out: bytearray = field(default_factory=bytearray)
    rank: int | None = None
    heard: float = 0.0
    where: str = ""


class Hub:
    """The meeting point of a group's ranks: one thread in the process that makes the group's id.

    `host`: the address of this machine at which the ranks reach it; only a loopback address keeps
    other machines out.
    Ends when all ranks have left, or with `close`.  After a failure, ends once the connected ranks
    have left and a deadline has passed, within which late ranks still get the failure.
    """

    def __init__(self, size: int, *, host: str, port: int, token: str, deadline: float) -> None:
        self.size, self._token, self._deadline = size, token, deadline
        self._silence = _SILENCE * deadline
        self._beat = beat_of(deadline)  # or the shortest of the ranks' own
        self._exchanges = Exchanges(size)
        self._ranks: dict[int, _Connection] = {}
        self._left: set[int] = set()
        self._failure: Failure | None = None
        self._failed = 0.0  # time of the failure
        self._selector = selectors.DefaultSelector()
        listen = LOOPBACK if host in (LOOPBACK, "localhost") else ""
        self._listening = socket.create_server((listen, port), backlog=max(16, size))
        self._listening.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._stop = False
        self.port: int = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._work, name="ostinato hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the hub; ranks that are still connected find it lost.  Idempotent."""
        self._stop = True
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def wait(self, seconds: float) -> None:
        """Waits until all ranks have left, at most `seconds`."""
        self._thread.join(seconds)

    # --- the hub's thread
    def _work(self) -> None:
        last = time.monotonic()
        try:
            while not self._stop and not self._over():
                beat = self._beat
                for key, events in self._selector.select(beat):
                    if key.data is None:
                        self._accept()
                    else:
                        self._serve(key.data, events)
                now = time.monotonic()
                if now - last > 3 * beat + 1:
                    # This process was stopped: the others' messages of that time are not read yet.
                    for connection in self._ranks.values():
                        connection.heard = now
                elif now - last >= beat:
                    self._look(now)
                if now - last >= beat:
                    last = now
                    self._send_all(packed({"kind": "beat"}))
        finally:
            for key in list(self._selector.get_map().values()):
                with suppress(OSError):
                    key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()

    def _over(self) -> bool:
        if len(self._left) == self.size:
            return not any(c.out for c in self._ranks.values())
        late = time.monotonic() - self._failed > self._deadline
        return self._failure is not None and not self._ranks and late

    def _accept(self) -> None:
        with suppress(OSError):
            accepted, _ = self._listening.accept()
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(accepted, heard=time.monotonic())
            self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ:
                data = connection.socket.recv(1 << 20)
                if not data:
                    self._lose(connection)
                    return
                connection.heard = time.monotonic()
                connection.reader.feed(data)
                while (message := connection.reader.next()) is not None:
                    self._take(connection, *message)
        except (BlockingIOError, InterruptedError):
            pass
        except Exception:  # a client's error must not end the hub, which the others need
            self._lose(connection)

    def _take(self, connection: _Connection, head: dict[str, Any], payload: bytes) -> None:
        kind = head["kind"]
        if connection.rank is None:
            self._welcome(connection, head)
        elif kind == "part":
            lane, number, label = str(head["lane"]), int(head["number"]), str(head["label"])
            found = self._exchanges.add(connection.rank, lane, number, label, payload)
            if isinstance(found, Failure):
                self._fail(found)
            elif found is not None and sum(map(len, found)) > _MOST_PAYLOAD:
                text = f"{label!r}: all ranks' parts have more than {_MOST_PAYLOAD} bytes together"
                self._fail(Failure("failed", connection.rank, text))
            elif found is not None:
                answer = {"kind": "parts", "lane": lane, "number": number}
                answer["sizes"] = [len(part) for part in found]
                self._send_all(packed(answer, b"".join(found)))
            else:
                self._look_for_left(self._exchanges.missing(lane, number))
        elif kind == "missing":
            missing = self._exchanges.missing(str(head["lane"]), int(head["number"]))
            where = {rank: self._ranks[rank].where for rank in missing if rank in self._ranks}
            self._send(connection, packed({**head, "ranks": missing, "where": where}))
        elif kind == "beat":
            connection.where = str(head.get("where", ""))[:_MOST_WHERE]
        elif kind == "fail":
            self._fail(Failure(str(head["what"]), int(head["rank"]), str(head["text"])))
        elif kind == "leave":
            self._left.add(connection.rank)
            self._drop(connection)
            if self._failure is None:
                self._look_for_left(self._exchanges.waited_for())

    def _welcome(self, connection: _Connection, head: dict[str, Any]) -> None:
        token, rank, size = str(head["token"]), int(head["rank"]), int(head["size"])
        if head["kind"] != "hello" or not hmac.compare_digest(token.encode(), self._token.encode()):
            self._drop(connection)  # not of this group
            return
        refused = ""
        if size != self.size or not 0 <= rank < size:
            refused = f"rank {rank} of {size} came to a group of {self.size} ranks"
        elif rank in self._ranks or rank in self._left:
            refused = f"there is a rank {rank} already"
        if refused:
            self._send(connection, packed({"kind": "refused", "text": refused}))
            return
        self._beat = min(self._beat, beat_of(float(head["deadline"])))
        connection.rank, connection.reader.most = rank, _MOST_PAYLOAD
        self._ranks[rank] = connection
        self._send(connection, packed({"kind": "welcome", "deadline": self._deadline}))
        if self._failure is not None:
            self._send(connection, packed(_told(self._failure)))

    def _look_for_left(self, missing: list[int]) -> None:
        gone = [rank for rank in missing if rank in self._left]
        if gone:
            self._fail(Failure("lost", gone[0], f"rank {gone[0]} has left the group"))

    def _look(self, now: float) -> None:
        """Fails the group for a silent rank; drops a silent connection that is no rank's."""
        for key in list(self._selector.get_map().values()):
            connection = key.data
            if connection is None or now - connection.heard <= self._silence:
                continue
            if connection.rank is None:
                self._drop(connection)
            else:
                text = (
                    f"rank {connection.rank} has not been heard of for {self._silence:g} s: it is "
                    f"stopped, or its host is not reached{_last_at(connection)}"
                )
                self._fail(Failure("lost", connection.rank, text))

    def _lose(self, connection: _Connection) -> None:
        rank = connection.rank
        self._drop(connection)
        if rank is not None and rank not in self._left:
            self._left.add(rank)
            text = f"rank {rank} died: its connection ended{_last_at(connection)}"
            self._fail(Failure("lost", rank, text))

    def _drop(self, connection: _Connection) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        with suppress(OSError):
            connection.socket.close()
        connection.out.clear()
        if connection.rank is not None and self._ranks.get(connection.rank) is connection:
            del self._ranks[connection.rank]

    def _fail(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure, self._failed = failure, time.monotonic()
            self._send_all(packed(_told(failure)))

    def _send_all(self, message: bytes) -> None:
        for connection in list(self._ranks.values()):
            self._send(connection, message)

    def _send(self, connection: _Connection, message: bytes) -> None:
        connection.out += message
        try:
            self._flush(connection)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._lose(connection)

    def _flush(self, connection: _Connection) -> None:
        try:
            while connection.out:
                sent = connection.socket.send(memoryview(connection.out)[: 1 << 20])
                del connection.out[:sent]
        finally:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.out else 0)
            with suppress(KeyError, ValueError):
                self._selector.modify(connection.socket, events, connection)


def _last_at(connection: _Connection) -> str:
    return f" (it was last at {connection.where!r})" if connection.where else ""


# ---------------------------------------------------------------------------------- connections


class SocketChannel(Channel):
    """A rank's connection to the hub.  Made by `connect`.  `reader` may hold messages already.
    `hub`: the hub that it owns, if any.  `hub_deadline` may differ from this rank's deadline."""

    def __init__(
        self,
        connection: socket.socket,
        reader: Reader,
        rank: int,
        size: int,
        deadline: float,
        hub_deadline: float,
        hub: Hub | None,
    ) -> None:
        self.rank, self.size = rank, size
        self._socket, self._reader, self._deadline, self._hub = connection, reader, deadline, hub
        self._beat_seconds = min(beat_of(deadline), beat_of(hub_deadline))
        self._sending = new_lock()
        self._first = FirstFailure()
        self._changed = self._first.changed
        self._counts: Counter[str] = Counter()
        self._results: dict[tuple[str, int], list[bytes]] = {}
        self._missing: dict[tuple[str, int], tuple[list[int], dict[str, str]]] = {}
        self._heard = time.monotonic()
        self._where = ""
        self._closed = threading.Event()
        # A hub that does not read must not block the sender; this time counts while nothing is
        # read.
        silence = struct.pack("@ll", *divmod(int(_SILENCE * deadline * 1e6) + 1, 1_000_000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, silence)
        for work, name in ((self._read, "reads"), (self._beat, "lives")):
            threading.Thread(target=work, name=f"ostinato rank {rank} {name}", daemon=True).start()

    @property
    def failure(self) -> Failure | None:
        return self._first.failure

    def say(self, where: str) -> None:
        self._where = where[:_MOST_WHERE]

    # --- exchanges
    def begin(self, lane: str, label: str, payload: bytes) -> int:
        """Implements `Channel.begin`.  Raises InputError for more bytes than a message holds."""
        if len(payload) > _MOST_PAYLOAD:
            raise InputError(f"{label!r}: {len(payload)} bytes, must be {_MOST_PAYLOAD} at most")
        with self._changed:
            number = self._counts[lane]
            self._counts[lane] += 1
        head = {"kind": "part", "lane": lane, "number": number, "label": label}
        self._send(head, payload)
        return number

    def finish(self, lane: str, number: int, label: str, seconds: float) -> list[bytes]:
        key = lane, number
        end = time.monotonic() + seconds
        with self._changed:
            while key not in self._results and self.failure is None:
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            if key in self._results:
                return self._results.pop(key)
        if self.failure is None:
            self._late(label, key, seconds)
        raise (self.failure or self._lost_hub()).error()

    def _late(self, label: str, key: tuple[str, int], seconds: float) -> None:
        """Requests the missing ranks from the hub, and ends the group."""
        self._send({"kind": "missing", "lane": key[0], "number": key[1]})
        with self._changed:
            self._changed.wait_for(lambda: key in self._missing or self.failure, timeout=1.0)
            missing, where = self._missing.pop(key, ([], {}))
        text = waited_text(self.rank, label, seconds, missing)
        told = "; ".join(f"rank {rank} was last at {at!r}" for rank, at in where.items() if at)
        self.fail(Failure("deadline", self.rank, f"{text}. {told}" if told else text))

    # --- failures
    def fail(self, failure: Failure) -> None:
        with suppress(OSError, GroupError):
            self._send(_told(failure))
        self._first.fail(failure)

    def on_failure(self, call: Callable[[Failure], None]) -> None:
        self._first.on_failure(call)

    def _silent_hub(self) -> Failure:
        text = (
            f"the group's hub has not been heard of for {_SILENCE * self._deadline:g} s: "
            "the process that made the group's id is stopped, or its host is not reached"
        )
        return Failure("lost", -1, text)

    def _lost_hub(self) -> Failure:
        text = "the group's hub is gone: the process that made the group's id has ended"
        return Failure("lost", -1, text)

    # --- messages
    def _send(self, head: dict[str, Any], payload: bytes = b"") -> None:
        try:
            with self._sending:
                self._socket.sendall(packed(head, payload))
        except BlockingIOError:
            self._first.fail(self._silent_hub())
            with suppress(OSError):  # a part of the message may be sent: no other can follow
                self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            if not self._closed.is_set():
                self._first.fail(self._lost_hub())

    def _read(self) -> None:
        reader = self._reader
        try:
            while True:
                while (message := reader.next()) is not None:
                    self._take(*message)
                data = self._socket.recv(1 << 20)
                if not data:
                    break
                self._heard = time.monotonic()
                reader.feed(data)
        except (OSError, ValueError):
            pass
        if not self._closed.is_set():
            self._first.fail(self._lost_hub())

    def _take(self, head: dict[str, Any], payload: bytes) -> None:
        kind = head["kind"]
        if kind == "parts":
            parts, start = [], 0
            for size in head["sizes"]:
                parts.append(payload[start : start + size])
                start += size
            with self._changed:
                self._results[head["lane"], head["number"]] = parts
                self._changed.notify_all()
        elif kind == "missing":
            with self._changed:
                self._missing[head["lane"], head["number"]] = head["ranks"], head["where"]
                self._changed.notify_all()
        elif kind == "fail":
            self._first.fail(Failure(head["what"], head["rank"], head["text"]))

    def _beat(self) -> None:
        beat, last = self._beat_seconds, time.monotonic()
        while not self._closed.wait(beat):
            now = time.monotonic()
            if now - last > 3 * beat + 1:
                self._heard = now  # this process itself was stopped
            last = now
            self._send({"kind": "beat", "where": self._where})
            if now - self._heard > _SILENCE * self._deadline:
                self._first.fail(self._silent_hub())

    def close(self) -> None:
        """Leaves the group.  The rank with the hub waits until the others have left too, at most
        for the deadline, unless the group failed.  Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()  # first: the hub may end at once, which is then no failure
        self._send({"kind": "leave"})
        if self._hub is not None:
            self._hub.wait(1.0 if self.failure is not None else self._deadline)
            self._hub.close()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(
    addresses: list[HubAddress], rank: int, size: int, *, deadline: float, hub: Hub | None = None
) -> SocketChannel:
    """Returns this rank's channel, to the first address at which the group's hub answers.

    Waits for the hub to appear.  Raises RankLostError if it does not within the deadline,
    InputError if it refuses this rank.  One of several addresses may be the hub of an earlier group
    of the same ranks, which already has this rank; then the others are tried.
    """
    end = time.monotonic() + deadline
    pause, last, refused = 0.01, "nothing answered", ""
    hello = {"kind": "hello", "rank": rank, "size": size, "deadline": deadline}
    while True:
        for address in addresses:
            left = max(0.1, min(5.0, end - time.monotonic()))
            try:
                found = socket.create_connection((address.host, address.port), timeout=left)
            except OSError as error:
                last = str(error)
                continue
            try:
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                found.sendall(packed({**hello, "token": address.token}))
                head, reader = _answered(found)
            except (OSError, ValueError) as error:
                last = f"{address.host}:{address.port} is no hub of this group ({error})"
                found.close()
                continue
            if head["kind"] == "refused":
                found.close()
                if len(addresses) == 1:
                    raise InputError(f"the group refused this rank: {head['text']}")
                refused = f"{address.host}:{address.port} refused it: {head['text']}"
                continue
            found.settimeout(None)
            return SocketChannel(found, reader, rank, size, deadline, head["deadline"], hub)
        if time.monotonic() > end:
            where = ", ".join(f"{one.host}:{one.port}" for one in addresses)
            raise RankLostError(
                f"rank {rank} found no hub of its group at {where} within {deadline:g} s: "
                f"{refused or last}",
                rank=rank,
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def _answered(connection: socket.socket) -> tuple[dict[str, Any], Reader]:
    """Reads the hub's answer; returns it with the reader, which may hold more than the answer.
    Raises OSError, and ValueError for the answer of another service."""
    reader = Reader()
    while (message := reader.next()) is None:
        data = connection.recv(1 << 16)
        if not data:
            raise ValueError("the connection ended")
        reader.feed(data)
    head, _ = message
    if head.get("kind") not in ("welcome", "refused"):
        raise ValueError("another service answered")
    reader.most = _MOST_PAYLOAD
    return head, reader
