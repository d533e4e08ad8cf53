"""`GraphCache`: executables by key, captured once, evicted safely.

A replay leases its graph: an evicted executable is closed when its last lease ends (`Table`).
The driver's object is destroyed after its own last launch has finished on the device
(`driver.context.Context.retire`); no call waits for the whole device.

One lock guards the table, and is never held during slow work.  Captures, launches, closing and
reading of nodes happen outside it, so a long capture does not delay calls for other keys.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext

from ostinato.device import Device
from ostinato.driver.api import parse_bytes, whole_number
from ostinato.driver.closeable import Closeable
from ostinato.driver.context import context_of, members
from ostinato.driver.forking import new_lock
from ostinato.driver.interrupts import uninterrupted
from ostinato.driver.stream import Stream
from ostinato.errors import CaptureLimitError, ClosedError, InputError, NotHeldError
from ostinato.explain.times import ReplayProfile, replay_as_set, resolved
from ostinato.graph.executable import GraphExec
from ostinato.graph.words import Touch
from ostinato.memory.ranges import Target, range_of
from ostinato.settings import ReplaySettings
from ostinato.step.buckets import Buckets, PowersOfTwo
from ostinato.step.budget import Footprint, MemoryMeter, SharedBlocks, footprint
from ostinato.step.entry import CachedGraph, Entry, Left
from ostinato.step.flight import Flight, Flights
from ostinato.step.limits import CaptureLimits, Refused, Spent, refuse
from ostinato.step.statistics import CacheStatistics, KeyStatistics, key_text

_REMEMBERED = 4096
"""The largest number of remembered keys without a graph; over it, the oldest are forgotten."""


class Table:
    """Entries by key; those with a graph are ordered by use.  Over `budget` bytes or `max_graphs`,
    the least recently used graphs leave.

    The table launches and closes nothing, and is not thread-safe; the cache calls it locked.
    States of a graph (`CachedGraph`):

        put() -> KEPT -> removed, replaced or trimmed -> CLOSED by the cache
                         └─ LEAVING as long as a lease is out ─┘

    Calls that take graphs out return the graphs without a lease.  For the others the last `release`
    returns True.  In both cases the caller must close the executable.
    """

    def __init__(self, budget: int | None, max_graphs: int | None) -> None:
        self.budget = budget
        self.max_graphs = max_graphs
        # No OrderedDict here or in other tables with users' keys: an error in a key's own `__eq__`
        # corrupts it for good, and one in `__hash__` becomes a KeyError.
        self.entries: dict[Hashable, Entry] = {}
        """The entries with a graph."""
        self.gone: dict[Hashable, Entry] = {}
        """The entries without a graph, the latest last."""
        self.forgotten = 0
        self.leaving: weakref.WeakSet[CachedGraph] = weakref.WeakSet()
        """Weak: a lease that Ctrl-C in a replay lost must not keep a graph for ever."""
        self.over_budget = 0
        self.blocks = SharedBlocks()
        self.total = Entry(None)
        """The counts of all keys together; its `hits` are those of the forgotten entries alone."""
        self.latest: CachedGraph | None = None
        """The graph that was used or put in last, or None; a use of it changes no order."""
        self._uses = 0

    @property
    def graphs(self) -> list[CachedGraph]:
        """The graphs in the table."""
        return [entry.graph for entry in self.entries.values() if entry.graph is not None]

    @property
    def nbytes(self) -> int:
        """The sum of the bytes that the graphs are charged with."""
        return sum(self.charge(kept).nbytes for kept in self.graphs)

    def charge(self, kept: CachedGraph) -> Footprint:
        """Returns the bytes that a graph is charged with at present."""
        return self.blocks.share(kept.footprint)

    def find(self, key: Hashable) -> Entry | None:
        """Returns the entry of a key, with or without a graph; None if there is no entry."""
        return self.entries.get(key) or self.gone.get(key)

    def entry(self, key: Hashable) -> Entry:
        """Returns the entry of a key; makes it if there is none."""
        entry = self.find(key)
        if entry is None:
            entry = Entry(key)
            self._remember(entry)
        return entry

    def _remember(self, entry: Entry) -> None:
        """Keeps an entry without a graph; over the limit, forgets the oldest."""
        self.gone[entry.key] = entry
        if len(self.gone) > _REMEMBERED:
            oldest = next(iter(self.gone.values()))
            if self.gone.pop(oldest.key, None) is not oldest:  # the key's hash has changed
                self.gone = {k: e for k, e in [*self.gone.items()] if e is not oldest}
            oldest.forgotten = True
            self.forgotten += 1
            self.total.hits_before += oldest.hits

    def by_use(self) -> list[Entry]:
        """Returns the entries with a graph, from the least to the most recently used."""
        return sorted(self.entries.values(), key=_last_use)

    def make_latest(self, kept: CachedGraph) -> None:
        """Makes a graph the most recently used, if it is in the table."""
        if not kept.leaving:
            self._uses += 1
            kept.at = self._uses
            self.latest = kept

    def counting(self, key: Hashable) -> tuple[Entry, Entry]:
        """Returns the entries that count events of a key: its own, and the one for all keys."""
        return self.entry(key), self.total

    def put(
        self,
        key: Hashable,
        executable: GraphExec,
        footprint: Footprint,
        capture_seconds: float | None,
    ) -> list[CachedGraph]:
        """Puts a graph under a key, in place of the one there, and trims.

        An executable that is already under this key only gets its new footprint.  Raises InputError
        if it is under another key or leaving: it would be closed twice.
        """
        self._require_free(key, executable)
        entry = self.entry(key)
        out: list[CachedGraph] = []
        kept = before = entry.graph
        if kept is not None and kept.executable is executable:
            kept.footprint = footprint
        else:
            if before is not None:
                out += self.remove([entry], "replaced")
            kept = CachedGraph(executable, footprint, capture_seconds)
            entry.graph = kept
            self.gone.pop(key, None)
            self.entries[key] = entry
        self.make_latest(kept)
        self._measure(kept)
        return out + self._trim()

    def _measure(self, kept: CachedGraph) -> None:
        """Passes the memory that a graph's capture took on to `SharedBlocks`."""
        footprint = kept.footprint
        if footprint.grown is None or footprint.free is None:
            return
        if len(self.entries) == 1 and not self.leaving:
            self.blocks = SharedBlocks()
        others = [k.footprint for k in (*self.graphs, *members(self.leaving)) if k is not kept]
        estimated = sum(each.nbytes for each in others if each.grown is not None)
        self.blocks.note(footprint.grown, footprint.free, estimated, footprint.nbytes)

    def _require_free(self, key: Hashable, executable: GraphExec) -> None:
        for other, entry in self.entries.items():
            kept = entry.graph
            here = kept is not None and kept.executable is executable
            if here and self.entries.get(key) is not entry:
                raise InputError(
                    f"the executable for key {key!r} is in the cache under key {other!r} already; "
                    "use one key, or instantiate twice"
                )
        if any(kept.executable is executable for kept in members(self.leaving)):
            raise InputError(
                f"the executable for key {key!r} has just been evicted and will be closed; "
                "instantiate another"
            )

    def remove(self, entries: Iterable[Entry], reason: Left) -> list[CachedGraph]:
        """Takes the graphs of entries out of the table; returns the graphs without a lease.

        A key whose hash has changed since it came in does not find its entry any more.  If such an
        entry is to leave, all entries that their keys do not find leave with it.
        """
        entries = list(entries)
        if any(self.entries.get(entry.key) is not entry for entry in entries):
            found = {key: e for key, e in self.entries.items() if self.entries.get(key) is e}
            lost = [e for key, e in self.entries.items() if found.get(key) is not e]
            entries = lost + [entry for entry in entries if found.get(entry.key) is entry]
            self.entries = found
        out = []
        for entry in entries:
            if self.entries.get(entry.key) is entry:
                del self.entries[entry.key]
            kept, entry.graph = entry.graph, None
            self.total.left[reason] += 1
            entry.left[reason] += 1
            if kept is not None:
                if kept.leave():
                    out.append(kept)
                else:
                    self.leaving.add(kept)
                entry.hits_before += kept.uses
                kept.cool()
                if kept is self.latest:
                    self.latest = None
            self._remember(entry)
        return out

    def _trim(self) -> list[CachedGraph]:
        """Takes out the least recently used graphs until the limits hold or one graph is left."""
        out: list[CachedGraph] = []
        while self.max_graphs is not None and len(self.entries) > self.max_graphs:
            out += self.remove([min(self.entries.values(), key=_last_use)], "count")
        if self.budget is not None:
            nbytes = self.nbytes
            while nbytes > self.budget and len(self.entries) > 1:
                oldest = min(self.entries.values(), key=_last_use)
                assert oldest.graph is not None
                nbytes -= self.charge(oldest.graph).nbytes
                out += self.remove([oldest], "budget")
            self.over_budget += nbytes > self.budget
        return out

    # --- numbers
    @property
    def hits(self) -> int:
        """The hits of all keys together."""
        return sum(e.hits for e in (*self.entries.values(), *self.gone.values(), self.total))

    def statistics(self, entry: Entry) -> KeyStatistics:
        """Returns the counts of one key."""
        return entry.statistics(None if entry.graph is None else self.charge(entry.graph))


def _last_use(entry: Entry) -> int:
    assert entry.graph is not None
    return entry.graph.at


class _Hold:
    """A lease for the length of a `with` block (`GraphCache.hold`).  A class, because a generator
    would take twice as long."""

    __slots__ = ("_cache", "_kept", "_key")

    def __init__(self, cache: GraphCache, key: Hashable) -> None:
        self._cache = cache
        self._key = key
        self._kept: CachedGraph | None = None

    def __enter__(self) -> GraphExec:
        self._kept = self._cache._leased(self._key)
        if self._kept is None:
            raise NotHeldError(f"the cache has no graph under key {self._key!r} to hold")
        return self._kept.executable

    def __exit__(self, *_: object) -> None:
        kept, self._kept = self._kept, None
        if kept is not None and kept.release():
            self._cache.let_go(kept)


class GraphCache(Closeable):
    """Executable graphs by key.

    A key is anything hashable: a bucket, a tuple of shapes, a name.  The cache owns the executables
    that are put into it and closes them when they leave; do not close one that `get` returned.
    Every call may come from any thread.

    `buckets` is the scheme by which steps that use this cache pad their sizes; without it, powers
    of two without a limit.  A bucket with more rows than a step's smallest slot is cut to that
    slot's rows.  `budget` limits device bytes (4096, "512 MiB") and `max_graphs` the number of
    graphs: over either, the least recently used are evicted, but never the newest one.  Bytes are
    given, measured or estimated: `step.budget` has the method and its limits.  Not guaranteed:
    that free device memory rises after an eviction; the driver keeps the memory for the next
    graphs, which is why a budget helps.  `limits` limit the time of captures, and how often one
    key is captured.  To change `buckets` or `limits`, assign the attribute.

    `settings` and `profile` apply to `replay` alone and mean the same as for `GraphedStep`, which
    has its own: `settings` override the environment; giving a `profile` switches profiling on.

        cache = ost.GraphCache(device, buckets=ost.PowersOfTwo(64), budget="512 MiB")
        cache.get_or_capture("decode", make)
        cache.replay("decode", stream)
    """

    def __init__(
        self,
        device: Device,
        *,
        buckets: Buckets | None = None,
        budget: int | str | None = None,
        max_graphs: int | None = None,
        limits: CaptureLimits | None = None,
        settings: ReplaySettings | None = None,
        profile: ReplayProfile | None = None,
    ) -> None:
        context = context_of(device)
        if max_graphs is not None and (whole_number(max_graphs) or 0) < 1:
            raise InputError(f"max_graphs={max_graphs!r}: 1 or more, or None for no limit")
        if not (buckets is None or hasattr(buckets, "bucket")):
            raise InputError(
                f"buckets={buckets!r}: a scheme is needed, such as PowersOfTwo(64) or "
                "ExplicitBuckets([1, 2, 4])"
            )
        if not isinstance(limits, CaptureLimits | None):
            raise InputError(f"limits={limits!r}: a CaptureLimits is needed")
        self.context = context
        self.epoch = 0
        """A number that changes with each event that could forbid a replay.  While it stays the
        same, steps keep their decisions for a graph; after a change they decide again."""
        self._buckets: Buckets = PowersOfTwo() if buckets is None else buckets
        self.limits = CaptureLimits() if limits is None else limits
        # Reentrant: the garbage collector may run a user's finaliser between any two lines here,
        # and the finaliser may use the cache.
        self.lock = new_lock()
        self.table = Table(None if budget is None else parse_bytes(budget, "budget", 1), max_graphs)
        self._flights = Flights(self.lock)
        self.settings, self.profile = resolved(settings, profile)
        self._plain = self.settings.plain
        self._closed = False
        self._joined = 0
        self._spent = Spent()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        name = self.context.driver.name
        with self.lock:
            graphs, nbytes = len(self), self.table.nbytes
        return f"<GraphCache {graphs} graphs, {nbytes} bytes on {name}{state}>"

    @property
    def buckets(self) -> Buckets:
        """The scheme of the steps that use this cache."""
        return self._buckets

    @buckets.setter
    def buckets(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self.epoch += 1

    # --- look-up
    def __len__(self) -> int:
        return len(self.table.entries)

    def __bool__(self) -> bool:
        """True, also while empty: `cache or GraphCache(device)` must not make a second cache."""
        return True

    def __contains__(self, key: object) -> bool:
        """True if there is a graph under the key.  Does not count as a use."""
        with self.lock:
            return key in self.table.entries

    def keys(self) -> list[Hashable]:
        """Returns the keys with a graph, from the least to the most recently used."""
        with self.lock:
            return [entry.key for entry in self.table.by_use()]

    def get(self, key: Hashable) -> GraphExec | None:
        """Returns the executable under a key, or None.  Counts as a use.

        For reading and changing it.  Another thread may evict the executable at any time, which
        closes it: to launch it, use `replay`, or `hold` it.  Raises ClosedError.
        """
        kept = self._leased(key)
        if kept is None:
            return None
        if kept.release():
            self.let_go(kept)
        return kept.executable

    # --- running
    def replay(
        self,
        key: Hashable,
        stream: Stream,
        change: Callable[[GraphExec], object] | None = None,
    ) -> bool:
        """Launches the graph under a key once, in stream order; returns whether there was one.

        `change` is called with the executable just before the launch; no other thread's `change` of
        the same executable runs in between.  Without a graph, neither runs.  Raises ClosedError,
        and the errors of `change` and `GraphExec.launch`.
        """
        table = self.table
        entry = table.entries.get(key)
        kept = None if entry is None else entry.graph
        if kept is None or kept is not table.latest or not kept.lease():  # the common way first
            kept = self._leased(key)
        if kept is None:
            return False
        try:
            executable = kept.executable
            if self._plain and change is None:
                executable.launch(stream)
                return True
            with kept.changing if change is not None else nullcontext():
                if change is not None:
                    change(executable)
                if self._plain:
                    executable.launch(stream)
                else:
                    replay_as_set(key, executable, stream, self.settings, self.profile)
        finally:
            if kept.release():
                self.let_go(kept)
        return True

    def hold(self, key: Hashable) -> AbstractContextManager[GraphExec]:
        """Returns a context manager that yields the executable under a key.

        For several calls on one graph, such as a rebinding and its launch.  An eviction inside the
        block takes the key away at once, and closes the executable at the block's end.  Entering
        counts as a use, and raises NotHeldError if there is none, ClosedError.  Not guaranteed:
        that no other thread changes the executable meanwhile.
        """
        return _Hold(self, key)

    def _leased(self, key: Hashable) -> CachedGraph | None:
        """Leases and returns the graph under a key; None, and a miss, if there is none.

        Raises ClosedError.
        """
        entry = self.table.entries.get(key)
        if entry is None:
            with self.lock:
                entry = self.table.entries.get(key)
                if entry is None:
                    self._require_open()
                    for each in self.table.counting(key):
                        each.misses += 1
                    return None
        return self.lease(entry)

    def entry(self, key: Hashable) -> Entry:
        """Returns the entry of a key; makes it if there is none.  Raises ClosedError."""
        with self.lock:
            self._require_open()
            return self.table.entry(key)

    def lease(self, entry: Entry) -> CachedGraph | None:
        """Leases and returns the graph of an entry, which stays open until its `release`; None, and
        a miss, if the entry has none.  Raises ClosedError."""
        kept = entry.graph
        if kept is None or not kept.lease():
            with self.lock:
                self._require_open()
                for each in (entry, self.table.total):
                    each.misses += 1
            return None
        if kept is not self.table.latest:
            self.touch(kept)
        return kept

    def touch(self, kept: CachedGraph) -> None:
        """Makes a graph the most recently used."""
        with self.lock:
            self.table.make_latest(kept)

    def let_go(self, kept: CachedGraph) -> None:
        """Closes a graph that has left the table and whose last lease has ended."""
        with self.lock:
            self.table.leaving.discard(kept)
        kept.executable.close()

    # --- putting in
    def install(
        self, key: Hashable, executable: GraphExec, *, nbytes: int | str | None = None
    ) -> None:
        """Puts an executable under a key; from here on the cache owns it.

        An executable that was there before is replaced, and closed once no replay uses it.
        `nbytes` are the bytes to charge; None for an estimate.  Raises InputError for an executable
        of another device, or one that is in the cache under another key; ClosedError.
        """
        self._put(key, executable, footprint(self._checked(executable), given=nbytes), None)

    def get_or_capture(
        self, key: Hashable, make: Callable[[], GraphExec], *, nbytes: int | str | None = None
    ) -> GraphExec:
        """Returns the executable under a key; calls `make()` for it if there is none.

        `make` may upload the executable or not.  If several threads need a key at once, one calls
        `make`, with no lock held, and the others wait.  An exception of `make` is raised in all of
        them, and the next call tries again.  `nbytes` are the bytes to charge; None measures around
        `make`, so warm up before.

        As with `get`, the executable may be evicted at any time: launch it with `replay`.  Not
        guaranteed: that an eviction during a capture also evicts the graph of that capture.  Raises
        CaptureError, instead of waiting for ever, if `make` requests the key that its own thread is
        capturing, directly or through other threads; CaptureLimitError, without a call of `make`,
        if the cache's limits refuse the capture; InputError, ClosedError.
        """
        executable = self._known(key)
        if executable is not None:
            return executable
        flight = Flight(key, threading.get_ident())  # `land` removes it, on every path
        other: Flight | None = None
        joined = False
        try:
            while True:
                with self.lock:
                    executable = self._known(key, hit=not joined)
                    if executable is not None:
                        return executable
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

    def _known(self, key: Hashable, *, hit: bool = True) -> GraphExec | None:
        """Returns the executable under a key, which is a use if `hit`; None if there is none.

        Raises ClosedError.
        """
        with self.lock:
            entry = self.table.entries.get(key)
            if entry is None or entry.graph is None:
                self._require_open()
                return None
            kept = entry.graph
            if hit and self.lease(entry) is not None and kept.release():
                self.let_go(kept)
            return kept.executable

    def refusal(self, key: Hashable) -> Refused | None:
        """Returns why a capture of this key would be refused now, or None.  Not a use."""
        limits = self.limits
        if limits.per_key is None and limits.seconds is None:
            return None
        with self.lock:
            entry = self.table.find(key)
            return refuse(
                limits,
                spent=self._spent.within(limits.window),
                uses=0 if entry is None else entry.hits + entry.misses,
                captured_at=() if entry is None else entry.captured_at,
            )

    def _begin_capture(self, key: Hashable) -> None:
        """Notes that a capture begins.  The caller holds the lock.  Raises CaptureLimitError."""
        refused = self.refusal(key)
        if refused is not None:
            for entry in self.table.counting(key):
                entry.refused[refused.reason] += 1
                entry.misses += 1
            raise CaptureLimitError(
                f"key {key!r} is not captured: {refused}. Run its work eagerly, or give the cache "
                "a larger budget or other limits"
            )
        if self.limits.per_key is not None:
            self.table.entry(key).note_capture(self.limits.per_key)

    def _capture(
        self, flight: Flight, make: Callable[[], GraphExec], nbytes: int | str | None
    ) -> GraphExec:
        started, landed = time.perf_counter(), False
        try:
            with MemoryMeter(self.context) as meter:
                executable = self._checked(make())
            seconds = time.perf_counter() - started
            taken = meter.taken if flight.alone else None
            charge = footprint(executable, given=nbytes, taken=taken, free=meter.free)
            try:
                self._put(flight.key, executable, charge, seconds)
            except ClosedError:  # the cache was closed meanwhile: nothing else has the executable
                executable.close()
                raise
            landed = True
        except Exception as error:
            flight.error = error
            raise
        finally:
            with self.lock:
                self._end_capture(flight.key, landed, time.perf_counter() - started)
            del flight  # it holds errors whose tracebacks hold this frame
        return executable

    def _end_capture(self, key: Hashable, landed: bool, seconds: float) -> None:
        """Counts a capture.  The caller holds the lock."""
        for entry in self.table.counting(key):
            entry.captures += landed
            entry.failures += not landed
            entry.capture_seconds += seconds
        self._spent.add(seconds, self.limits.window)

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
        capture_seconds: float | None,
    ) -> None:
        with uninterrupted, self.lock:
            self._require_open()
            out = self.table.put(key, executable, charge, capture_seconds)
            executable.graph.origin = executable.graph.origin or f"of {key_text(key)}"
            if capture_seconds is None:
                for entry in self.table.counting(key):
                    entry.installed += 1
        self._close(out)

    # --- taking out
    def evict(self, key: Hashable) -> bool:
        """Takes one graph out; returns whether there was one.

        The executable is closed once no replay of this cache uses it, and destroyed once its own
        last launch has finished; this call does not wait for either.
        """
        with uninterrupted, self.lock:
            entry = self.table.entries.get(key)
            out = [] if entry is None else self.table.remove([entry], "asked")
        self._close(out)
        return entry is not None

    def evict_all(self) -> int:
        """Takes every graph out, as `evict` does; returns their number."""
        with uninterrupted, self.lock:
            entries = list(self.table.entries.values())
            out = self.table.remove(entries, "asked")
        self._close(out)
        return len(entries)

    def evict_idle(self) -> int:
        """Takes the less recently used half of the graphs without a lease out, to free memory;
        returns the number of graphs taken out."""
        with uninterrupted, self.lock:
            idle = [e for e in self.table.by_use() if e.graph is not None and not e.graph.leases]
            idle = idle[: (len(idle) + 1) // 2]
            out = self.table.remove(idle, "memory")
        self._close(out)
        return len(idle)

    def touching(self, target: Target) -> list[Hashable]:
        """Returns the keys of the graphs whose next launches will point into a buffer, from the
        least to the most recently used.

        `target` is a Buffer (also a view, or a closed one), a device array, or a MemoryRange.
        `graph.words` defines what counts as pointing.  A graph whose definition was closed
        before it came into the cache counts as pointing everywhere.  Raises InputError.
        """
        return [entry.key for entry, _ in self._touching(target)]

    def evict_touching(self, target: Target) -> list[Hashable]:
        """Takes out every graph that points into a buffer; returns their keys.

        Afterwards no new replay of this cache uses the buffer; replays under way finish in stream
        order, as with `evict`.
        """
        found = self._touching(target)
        with uninterrupted, self.lock:
            gone = [entry for entry, kept in found if entry.graph is kept]
            out = self.table.remove(gone, "touching")
        self._close(out)
        return [entry.key for entry in gone]

    def manifest(self, key: Hashable) -> tuple[Touch, ...]:
        """Returns every pointer of the graph under a key.  Raises InputError if there is none."""
        with self.lock:
            entry = self.table.entries.get(key)
            kept = None if entry is None else entry.graph
        if kept is None:
            raise InputError(f"there is no graph under key {key!r}")
        return kept.executable.manifest()

    def _touching(self, target: Target) -> list[tuple[Entry, CachedGraph]]:
        wanted = range_of(target)
        with self.lock:
            entries = [(e, e.graph) for e in self.table.by_use()]
        return [(e, kept) for e, kept in entries if kept and kept.executable.touches(wanted)]

    @staticmethod
    def _close(graphs: list[CachedGraph]) -> None:
        # Outside of the lock: closing destroys retired objects, which runs finalisers of users.
        for kept in graphs:
            kept.executable.close()

    # --- numbers and lifetime
    def statistics(self) -> CacheStatistics:
        """Returns counts, bytes, and the record of each key, taken at one moment."""
        with self.lock:
            table = self.table
            return CacheStatistics(
                **table.total.counts(),
                graphs=len(table.entries),
                nbytes=table.nbytes,
                budget=table.budget,
                max_graphs=table.max_graphs,
                leaving=len(table.leaving),
                hits=table.hits,
                joined=self._joined,
                over_budget=table.over_budget,
                keys=tuple(table.statistics(entry) for entry in table.by_use()),
                limits=self.limits,
                gone=tuple(table.statistics(entry) for entry in table.gone.values()),
                forgotten=table.forgotten,
            )

    def key_statistics(self, key: Hashable) -> KeyStatistics | None:
        """Returns the record of one key, with or without a graph; None for an unknown key."""
        with self.lock:
            entry = self.table.find(key)
            return None if entry is None else self.table.statistics(entry)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the graph cache is closed; make another")

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Takes every graph out, and refuses new ones.  Idempotent; does not wait."""
        with uninterrupted, self.lock:
            self._closed = True
            self.epoch += 1  # a decision to run eagerly must not outlast it
            out = self.table.remove([*self.table.entries.values()], "closed")
        self._close(out)
