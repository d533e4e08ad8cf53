"""`GraphCache`: executables by key, captured once, evicted safely.

A replay leases its entry: an evicted executable is closed when its last lease ends (`cache.table`).
It is destroyed after the graph's own last launch on the device (`driver.context.Context.retire`);
nothing waits for the whole device.

One lock guards the table, and nothing slow is done while it is held.  Captures, launches, closing
and reading of nodes are outside of it, so a long capture does not delay calls for other keys.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from types import TracebackType

from ostinato.cache.buckets import Buckets, PowersOfTwo
from ostinato.cache.budget import Footprint, MemoryMeter, footprint, parse_bytes
from ostinato.cache.flight import Flight, Flights
from ostinato.cache.limits import CaptureLimits, Refusal, Refused, refuse
from ostinato.cache.statistics import CacheStatistics, KeyStatistics
from ostinato.cache.table import Entry, Table
from ostinato.driver.closeable import Closeable
from ostinato.driver.context import Context, HasContext, context_of
from ostinato.driver.forking import new_lock
from ostinato.driver.stream import Stream
from ostinato.errors import CaptureLimitError, ClosedError, InputError
from ostinato.graph.executable import GraphExec
from ostinato.graph.manifest import Touch
from ostinato.memory.ranges import Target, range_of

__all__ = ["GraphCache"]


class _Hold:
    """A lease for the length of a `with` block (`GraphCache.hold`)."""

    __slots__ = ("_cache", "_entry", "_key")

    def __init__(self, cache: GraphCache, key: Hashable) -> None:
        self._cache = cache
        self._key = key
        self._entry: Entry | None = None

    def __enter__(self) -> GraphExec | None:
        self._entry = self._cache._lease(self._key)
        return None if self._entry is None else self._entry.executable

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._cache._release(entry)


class GraphCache(Closeable):
    """Executable graphs by key.

    A key is anything hashable: a bucket, a tuple of shapes, a name.  The cache owns what is put
    into it and closes it when it leaves; do not close what `get` returned.  Every call may come
    from any thread.

    `buckets` is the scheme by which steps that use this cache pad their sizes.  `budget` limits
    device bytes (4096, "512 MiB") and `max_graphs` the number of graphs: over either, the least
    recently used leave, but never the one that was just put in.  Bytes are given, measured or
    estimated: `cache.budget` says how, and how well.  Not guaranteed: that free device memory rises
    after an eviction; the driver keeps the memory for the next graphs, which is why a budget helps.
    `limits` are for captures: their time, and how often one key is captured.  Set the attribute
    anew to change them.

        cache = ost.GraphCache(device, buckets=ost.PowersOfTwo(64), budget="512 MiB")
        cache.get_or_capture("decode", make)
        cache.replay("decode", stream)
    """

    def __init__(
        self,
        device: Context | HasContext,
        *,
        buckets: Buckets | None = None,
        budget: int | str | None = None,
        max_graphs: int | None = None,
        limits: CaptureLimits | None = None,
    ) -> None:
        context = context_of(device)
        if max_graphs is not None and max_graphs < 1:
            raise InputError(f"max_graphs={max_graphs}: 1 or more, or None for no limit")
        self.context = context
        self.buckets: Buckets = PowersOfTwo() if buckets is None else buckets
        self.limits = CaptureLimits() if limits is None else limits
        # Reentrant, because the garbage collector may run a user's finaliser, which may use the
        # cache, between any two lines here.
        self._lock = new_lock()
        self._table = Table(None if budget is None else parse_bytes(budget), max_graphs)
        self._flights = Flights(self._lock)
        self._closed = False
        self._hits = self._misses = self._installed = 0
        self._captures = self._failures = self._joined = 0
        self._capture_seconds = 0.0
        self._refused: Counter[Refusal] = Counter()
        self._spent: deque[tuple[float, float]] = deque()
        """When each capture ended and how long it took: those inside the limits' window."""

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        name = self.context.driver.name
        return f"<GraphCache {len(self)} graphs, {self._table.nbytes} bytes on {name}{state}>"

    # --- looking
    def __len__(self) -> int:
        return len(self._table.entries)

    def __bool__(self) -> bool:
        """True, also while empty: `cache or GraphCache(device)` must not make a second one."""
        return True

    def __contains__(self, key: object) -> bool:
        """Whether there is a graph under the key.  Not a use of it."""
        with self._lock:
            return key in self._table.entries

    def keys(self) -> list[Hashable]:
        """The keys, from the least to the most recently used."""
        with self._lock:
            return list(self._table.entries)

    def get(self, key: Hashable) -> GraphExec | None:
        """The executable under a key, or None.  Counts as a use.

        For reading and changing it.  It may be evicted at any time by another thread, and is then
        closed: to launch it, use `replay`, or `hold` it.  Raises ClosedError.
        """
        entry = self._lease(key)
        if entry is None:
            return None
        self._release(entry)
        return entry.executable

    # --- running
    def replay(self, key: Hashable, stream: Stream) -> bool:
        """Launches the graph under a key once, in stream order; returns whether there was one.

        If there is none, nothing runs.  Raises ClosedError, and what `GraphExec.launch` raises.
        """
        entry = self._lease(key)
        if entry is None:
            return False
        try:
            entry.executable.launch(stream)
        finally:
            self._release(entry)
        return True

    def hold(self, key: Hashable) -> AbstractContextManager[GraphExec | None]:
        """For a `with` block: the executable under a key, or None; inside it is not closed.

        For several calls on one graph, such as a rebinding and its launch.  An eviction inside the
        block takes the key away at once, and closes the executable at the block's end.  Entering
        counts as a use, and raises ClosedError.
        """
        return _Hold(self, key)

    def _lease(self, key: Hashable) -> Entry | None:
        with self._lock:
            entry = self._table.use(key)
            if entry is None:
                self._require_open()
                self._misses += 1
                self._table.miss(key)
                return None
            self._hits += 1
            entry.leases += 1
            return entry

    def _release(self, entry: Entry) -> None:
        with self._lock:
            last = self._table.release(entry)
        if last:
            entry.executable.close()

    # --- putting in
    def install(self, key: Hashable, executable: GraphExec, *, nbytes: int | None = None) -> None:
        """Puts an executable under a key; the cache owns it from here on.

        One that was there before is replaced, and closed once no replay uses it.  `nbytes` are the
        bytes to charge; None for an estimate.  Raises InputError for an executable of another
        device, or one that is in the cache under another key; ClosedError.
        """
        self._put(key, executable, footprint(self._checked(executable), given=nbytes), None)

    def get_or_capture(
        self, key: Hashable, make: Callable[[], GraphExec], *, nbytes: int | None = None
    ) -> GraphExec:
        """The executable under a key; made by `make()`, uploaded or not, if there is none.

        If several threads ask at once, one calls `make`, with no lock held, and the others wait for
        it.  An exception of `make` is raised in all of them, and the next call tries again.
        `nbytes` are the bytes to charge; None measures around `make`, so warm up before it.

        Like `get`, this does not keep the executable from being evicted: launch it with `replay`.
        Not guaranteed: that an eviction during a capture also evicts the graph of that capture.
        Raises CaptureError, instead of waiting for ever, if `make` asks for the key that its own
        thread is capturing, directly or through other threads; CaptureLimitError, and calls `make`
        not at all, if the cache's limits refuse the capture; InputError, ClosedError.
        """
        entry = self._known(key)
        if entry is not None:
            return entry.executable
        flight = Flight(key, threading.get_ident())  # taken off again on every path
        other: Flight | None = None
        joined = False
        try:
            while True:
                with self._lock:
                    entry = self._known(key, hit=not joined)
                    if entry is not None:
                        return entry.executable
                    other = self._flights.board(flight)
                    self._joined += other is not None and not joined
                    if other is None:
                        self._begin_capture(key)
                if other is None:
                    return self._capture(flight, make, nbytes)
                joined = True
                self._flights.wait(other)
        finally:
            self._flights.land(flight)
            del flight, other  # they hold errors whose tracebacks hold this frame

    def _known(self, key: Hashable, *, hit: bool = True) -> Entry | None:
        """The entry under a key, which is a use if `hit`; None if there is none.

        Raises ClosedError."""
        with self._lock:
            entry = self._table.use(key) if hit else self._table.entries.get(key)
            if entry is None:
                self._require_open()
            else:
                self._hits += hit
            return entry

    def refusal(self, key: Hashable) -> Refused | None:
        """Why a capture of this key would be refused now; None if it would not.  Not a use."""
        limits = self.limits
        if limits.per_key is None and limits.seconds is None:
            return None
        with self._lock:
            return refuse(
                limits,
                spent=self._recent_seconds(),
                uses=self._table.uses(key),
                captured_at=self._table.captured_at(key),
            )

    def _recent_seconds(self) -> float:
        """How long captures took inside the limits' window."""
        window = self.limits.window
        if window is None:
            return self._capture_seconds
        since = time.monotonic() - window
        while self._spent and self._spent[0][0] <= since:
            self._spent.popleft()
        return sum(seconds for _, seconds in self._spent)

    def _begin_capture(self, key: Hashable) -> None:
        """Notes that a capture begins.  Raises CaptureLimitError.  Call under the lock."""
        refused, record = self.refusal(key), self._table.record(key)
        if refused is not None:
            record.refused[refused.reason] += 1
            self._refused[refused.reason] += 1
            self._table.miss(key)
            self._misses += 1
            raise CaptureLimitError(
                f"key {key!r} is not captured: {refused}. Run its work eagerly, or give the cache "
                "a larger budget or other limits"
            )
        if self.limits.per_key is not None:
            if record.captured_at.maxlen != self.limits.per_key:
                record.captured_at = deque(record.captured_at, self.limits.per_key)
            record.captured_at.append(self._table.uses(key))

    def _capture(
        self, flight: Flight, make: Callable[[], GraphExec], nbytes: int | None
    ) -> GraphExec:
        started, landed = time.perf_counter(), False
        try:
            with MemoryMeter(self.context) as meter:
                executable = self._checked(make())
            seconds = time.perf_counter() - started
            taken = meter.taken if flight.alone else None
            charge = footprint(executable, given=nbytes, taken=taken, free=meter.free)
            try:
                self._put(flight.key, executable, charge, 1e3 * seconds)
            except ClosedError:  # the cache was closed meanwhile: nothing else has the executable
                executable.close()
                raise
            landed = True
        except Exception as error:
            flight.error = error
            raise
        finally:
            with self._lock:
                self._end_capture(flight.key, landed, time.perf_counter() - started)
            del flight  # as above
        return executable

    def _end_capture(self, key: Hashable, landed: bool, seconds: float) -> None:
        """Counts a capture.  Call under the lock."""
        record = self._table.record(key)
        self._captures += landed
        self._failures += not landed
        self._capture_seconds += seconds
        record.captures += landed
        record.failures += not landed
        record.capture_seconds += seconds
        if self.limits.window is not None:
            self._spent.append((time.monotonic(), seconds))
        self._table.note(key, "captured" if landed else "failed")

    def _checked(self, executable: GraphExec) -> GraphExec:
        if not isinstance(executable, GraphExec):
            raise InputError(
                f"a GraphExec is needed, not {type(executable).__name__} (graph.instantiate())"
            )
        if executable.context is not self.context:
            raise InputError("the executable is of another device than this cache")
        if executable.closed:
            raise ClosedError("the executable graph is closed; instantiate it again")
        if executable.empty:
            raise InputError(
                "the executable has no nodes, so replaying it would do nothing; if it was "
                "captured, its work went to another stream"
            )
        return executable

    def _put(
        self,
        key: Hashable,
        executable: GraphExec,
        charge: Footprint,
        capture_ms: float | None,
    ) -> None:
        with self._lock:
            self._require_open()
            out = self._table.put(key, Entry(executable, charge, capture_ms))
            if capture_ms is None:
                self._installed += 1
                self._table.record(key).installed += 1
                self._table.note(key, "installed")
        self._close(out)

    # --- taking out
    def evict(self, key: Hashable) -> bool:
        """Takes one graph out; returns whether there was one.

        It is closed once no replay of this cache uses it, and destroyed once its own last launch
        is done; this call does not wait for either.
        """
        return self._evict([key]) == 1

    def evict_all(self) -> int:
        """Takes every graph out, as `evict` does; returns how many."""
        return self._evict(self.keys())

    def touching(self, target: Target) -> list[Hashable]:
        """The keys of the graphs that point into a buffer, as their next launches will use them.

        `target` is a Buffer (also a view, or a closed one), a device array, or a MemoryRange.
        `graph.manifest` defines what counts as pointing.  A graph whose definition was closed
        before it came into the cache counts as pointing everywhere.  Raises InputError.
        """
        return [key for key, _ in self._touching(target)]

    def evict_touching(self, target: Target) -> list[Hashable]:
        """Takes out every graph that points into a buffer; returns their keys.

        Afterwards no new replay of this cache uses the buffer; those under way finish in stream
        order, as with `evict`.
        """
        found = self._touching(target)
        with self._lock:
            entries = self._table.entries
            gone = [key for key, entry in found if entries.get(key) is entry]
            out = self._table.remove(gone, "touching")
        self._close(out)
        return gone

    def manifest(self, key: Hashable) -> tuple[Touch, ...]:
        """Every pointer of the graph under a key.  Raises InputError if there is none."""
        with self._lock:
            entry = self._table.entries.get(key)
        if entry is None:
            raise InputError(f"there is no graph under key {key!r}")
        return entry.executable.manifest()

    def _touching(self, target: Target) -> list[tuple[Hashable, Entry]]:
        wanted = range_of(target)
        with self._lock:
            entries = list(self._table.entries.items())
        return [item for item in entries if item[1].executable.touches(wanted)]

    def _evict(self, keys: list[Hashable]) -> int:
        with self._lock:
            gone = [key for key in keys if key in self._table.entries]
            out = self._table.remove(gone, "asked")
        self._close(out)
        return len(gone)

    @staticmethod
    def _close(entries: list[Entry]) -> None:
        # Outside of the lock: closing destroys retired objects, and that runs code of others.
        for entry in entries:
            entry.executable.close()

    # --- numbers and lifetime
    def statistics(self) -> CacheStatistics:
        """Counts, bytes, and a line for each key, taken at one moment."""
        with self._lock:
            table = self._table
            return CacheStatistics(
                graphs=len(table.entries),
                nbytes=table.nbytes,
                budget=table.budget,
                max_graphs=table.max_graphs,
                leaving=len(table.leaving),
                hits=self._hits,
                misses=self._misses,
                captures=self._captures,
                capture_failures=self._failures,
                joined=self._joined,
                capture_ms=1e3 * self._capture_seconds,
                installed=self._installed,
                replaced=table.replaced,
                evictions=table.evictions,
                over_budget=table.over_budget,
                keys=table.all_statistics(),
                limits=self.limits,
                refused={reason.value: count for reason, count in self._refused.items()},
                shared_growth=table.blocks.grown,
                gone=table.gone_statistics(),
                forgotten=table.records.forgotten,
            )

    def key_statistics(self, key: Hashable) -> KeyStatistics | None:
        """The line of one key, with or without a graph; None if nothing is known of it."""
        with self._lock:
            return self._table.key_statistics(key)

    def schedule_digest(self) -> str:
        """Which keys were used, missed, captured and installed until now, and in which order.

        64 hexadecimal digits, equal in all processes that made the same calls in the same order:
        for ranks to compare.  `cache.schedule` says how a key counts.  An eviction shows in the
        misses after it.  A graph that is held counts once, however often it is launched.  Calls of
        several threads at once come in any order, so their digests cannot be compared.
        """
        with self._lock:
            return self._table.schedule_digest()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the graph cache is closed; make another")

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Takes every graph out, and refuses new ones.  Idempotent; does not wait."""
        with self._lock:
            self._closed = True
            out = self._table.remove(list(self._table.entries), "closed")
        self._close(out)
