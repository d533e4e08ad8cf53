"""`GraphCache`: executables by key, captured once, evicted safely.

A replay leases its entry: an evicted executable is closed when its last lease ends (`Table`).
It is destroyed after the graph's own last launch on the device (`driver.context.Context.retire`);
nothing waits for the whole device.

One lock guards the table, and is never held during slow work.  Captures, launches, closing and
reading of nodes happen outside it, so a long capture does not delay calls for other keys.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType

from ostinato.driver.api import whole_number
from ostinato.driver.closeable import Closeable
from ostinato.driver.context import Context, HasContext, context_of, members
from ostinato.driver.forking import new_lock
from ostinato.driver.interrupts import uninterrupted
from ostinato.driver.stream import Stream
from ostinato.errors import CaptureLimitError, ClosedError, InputError
from ostinato.explain.times import ReplayProfile, replay_as_set, resolved
from ostinato.graph.executable import GraphExec
from ostinato.graph.words import Touch
from ostinato.memory.ranges import Target, range_of
from ostinato.settings import ReplaySettings
from ostinato.step.buckets import Buckets, PowersOfTwo
from ostinato.step.budget import Footprint, MemoryMeter, SharedBlocks, footprint, parse_bytes
from ostinato.step.cache_statistics import CacheStatistics, KeyStatistics
from ostinato.step.flight import Flight, Flights
from ostinato.step.limits import CaptureLimits, Refused, Spent, refuse
from ostinato.step.records import KeyRecord, Reason, Records, evictions


@dataclass(slots=True, eq=False, weakref_slot=True)
class Entry:
    """A graph in the table, and how it is used."""

    executable: GraphExec
    footprint: Footprint
    capture_ms: float | None
    hits: int = 0
    at: int = 0
    """When it was last used or put in: a count of the table's.  Not its place in the dictionary,
    which would need the key's `__hash__` again."""
    leases: int = 0
    leaving: bool = False
    record: KeyRecord = field(default_factory=KeyRecord)
    changing: AbstractContextManager[bool] = field(default_factory=new_lock)
    """Held from a change of the executable to its launch."""


class Table:
    """Entries by key, in order of use.  Over `budget` (bytes) or `max_graphs`, the least recently
    used leave.

    It launches and closes nothing, and is not thread-safe; the cache calls it under its lock.
    States of an entry:

        put() -> KEPT -> removed, replaced or trimmed -> CLOSED by the cache
                         └─ LEAVING as long as a lease is out ─┘

    Calls that take entries out return those without a lease.  For the others the last `release`
    returns True.  In both cases the caller must close the executable.
    """

    def __init__(self, budget: int | None, max_graphs: int | None) -> None:
        self.budget = budget
        self.max_graphs = max_graphs
        # No OrderedDict here or in other tables with users' keys: an error in a key's own `__eq__`
        # tears it for ever, and in `__hash__` it becomes a KeyError.
        self.entries: dict[Hashable, Entry] = {}
        self.leaving: weakref.WeakSet[Entry] = weakref.WeakSet()
        """Weak: a lease that Ctrl-C in a replay lost must not keep a graph for ever."""
        self.over_budget = 0
        self.blocks = SharedBlocks()
        self.records = Records()
        self.total = KeyRecord()
        """The counts of all keys together, with the hits of the graphs that are there."""
        self.latest: Entry | None = None
        """The entry that was used or put in last, if it is here: a use of it changes no order."""
        self._uses = 0

    @property
    def nbytes(self) -> int:
        """The sum of the bytes that the entries are charged with."""
        return sum(self.charge(entry).nbytes for entry in self.entries.values())

    def charge(self, entry: Entry) -> Footprint:
        """The bytes that an entry is charged with, as of now."""
        return self.blocks.share(entry.footprint)

    def use(self, key: Hashable) -> Entry | None:
        """The entry under a key.  Counts a hit, and makes it the most recently used."""
        entry = self.entries.get(key)
        if entry is not None:
            if entry is not self.latest:
                self._make_latest(entry)
            entry.hits += 1
            self.total.hits += 1
        return entry

    def by_use(self) -> list[tuple[Hashable, Entry]]:
        """Keys and entries, from the least to the most recently used."""
        return sorted(self.entries.items(), key=_last_use)

    def _make_latest(self, entry: Entry) -> None:
        """Makes an entry the most recently used."""
        self._uses += 1
        entry.at = self._uses
        self.latest = entry

    def miss(self, key: Hashable) -> None:
        """Counts a use that found no entry."""
        for record in self.counting(key):
            record.misses += 1

    def counting(self, key: Hashable) -> tuple[KeyRecord, KeyRecord]:
        """The two records that count what happens to a key: its own, and that of all keys."""
        return self.record(key), self.total

    def record(self, key: Hashable) -> KeyRecord:
        """The record of a key, whether it has an entry or not."""
        entry = self.entries.get(key)
        return self.records.of(key) if entry is None else entry.record

    def look(self, key: Hashable) -> tuple[KeyRecord | None, Entry | None]:
        """The record and the entry of a key; None for each that there is not."""
        entry = self.entries.get(key)
        return self.records.gone.get(key) if entry is None else entry.record, entry

    def uses(self, key: Hashable) -> int:
        """Hits and misses of a key."""
        record, entry = self.look(key)
        hits = 0 if entry is None else entry.hits
        return hits if record is None else hits + record.hits + record.misses

    def release(self, entry: Entry) -> bool:
        """Ends one lease.  True if the entry has left and this was the last."""
        entry.leases -= 1
        last = entry.leaving and not entry.leases
        if last:
            self.leaving.discard(entry)
        return last

    def put(self, key: Hashable, entry: Entry) -> list[Entry]:
        """Puts an entry under a key, in place of another, and trims.

        An executable that is under this key already only gets its new footprint.  Raises
        InputError if it is elsewhere in the table: it would be closed twice.
        """
        self._require_free(key, entry.executable)
        before = self.entries.get(key)
        out: list[Entry] = []
        if before is not None and before.executable is entry.executable:
            before.footprint = entry.footprint
            entry = before
        else:
            if before is not None:
                out += self.remove([(key, before)], "replaced")
            entry.record = self.records.take(key)
            self.entries[key] = entry
        self._make_latest(entry)
        self._measure(entry)
        return out + self._trim()

    def _measure(self, entry: Entry) -> None:
        """Notes what the capture of an entry told about the blocks that entries share."""
        footprint = entry.footprint
        if footprint.grown is None or footprint.free is None:
            return
        if len(self.entries) == 1 and not self.leaving:
            self.blocks = SharedBlocks()
        others = [
            e.footprint for e in (*self.entries.values(), *members(self.leaving)) if e is not entry
        ]
        estimated = sum(each.nbytes for each in others if each.grown is not None)
        self.blocks.note(footprint.grown, footprint.free, estimated, footprint.nbytes)

    def _require_free(self, key: Hashable, executable: GraphExec) -> None:
        for other, entry in self.entries.items():
            if entry.executable is executable and self.entries.get(key) is not entry:
                raise InputError(
                    f"the executable for key {key!r} is in the cache under key {other!r} already; "
                    "use one key, or instantiate twice"
                )
        if any(entry.executable is executable for entry in members(self.leaving)):
            raise InputError(
                f"the executable for key {key!r} has just been evicted and will be closed; "
                "instantiate another"
            )

    def remove(self, items: Iterable[tuple[Hashable, Entry]], reason: Reason) -> list[Entry]:
        """Takes out entries of the table; returns those without a lease.

        A key whose hash has changed since it came in finds its entry no more.  If one of these is
        to leave, all entries that their keys do not find leave with it.
        """
        items = list(items)
        if any(self.entries.get(key) is not entry for key, entry in items):
            found = {key: e for key, e in self.entries.items() if self.entries.get(key) is e}
            lost = [item for item in self.entries.items() if found.get(item[0]) is not item[1]]
            items = lost + [item for item in items if found.get(item[0]) is item[1]]
            self.entries = found
        out = []
        for key, entry in items:
            if self.entries.get(key) is entry:
                del self.entries[key]
            self.total.left[reason] += 1
            entry.record.left[reason] += 1
            entry.record.hits += entry.hits
            self.records.keep(key, entry.record)
            if entry is self.latest:
                self.latest = None
            entry.leaving = True
            if entry.leases:
                self.leaving.add(entry)
            else:
                out.append(entry)
        return out

    def _trim(self) -> list[Entry]:
        """Takes out the least recently used until the limits hold, or only the newest is left."""
        out: list[Entry] = []
        while self.max_graphs is not None and len(self.entries) > self.max_graphs:
            out += self.remove([min(self.entries.items(), key=_last_use)], "count")
        if self.budget is not None:
            nbytes = self.nbytes
            while nbytes > self.budget and len(self.entries) > 1:
                oldest = min(self.entries.items(), key=_last_use)
                nbytes -= self.charge(oldest[1]).nbytes
                out += self.remove([oldest], "budget")
            self.over_budget += nbytes > self.budget
        return out

    # --- numbers
    def key_statistics(self, key: Hashable) -> KeyStatistics | None:
        """The line of one key; None if nothing is known of it."""
        record, entry = self.look(key)
        return None if record is None else self._line(key, record, entry)

    def all_statistics(self) -> tuple[KeyStatistics, ...]:
        """A line for each key with an entry, from the least to the most recently used."""
        return tuple(self._line(key, e.record, e) for key, e in self.by_use())

    def gone_statistics(self) -> tuple[KeyStatistics, ...]:
        """A line for each key that has no entry, the latest last."""
        return tuple(r.statistics(key) for key, r in self.records.gone.items())

    def _line(self, key: Hashable, record: KeyRecord, entry: Entry | None) -> KeyStatistics:
        if entry is None:
            return record.statistics(key)
        return record.statistics(key, entry.hits, self.charge(entry), entry.capture_ms)


def _last_use(item: tuple[Hashable, Entry]) -> int:
    return item[1].at


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

    `buckets` is the scheme by which steps that use this cache pad their sizes; without it, powers
    of two without a limit.  A bucket with more rows than a step's smallest slot runs eagerly: give
    that slot's rows as the limit.  `budget` limits device bytes (4096, "512 MiB") and `max_graphs`
    the number of graphs: over either, the least recently used are evicted, but never the newest
    one.  Bytes are given, measured or estimated: `cache.budget` says how, and how well.  Not
    guaranteed: that free device memory rises after an eviction; the driver keeps the memory for the
    next graphs, which is why a budget helps.  `limits` are for captures: their time, and how often
    one key is captured.  Assign the attribute to change them.

    `settings` and `profile` are of `replay` alone, and as for `GraphedStep`, which has its own:
    `settings` take precedence over the environment; giving a `profile` switches profiling on.

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
        self.buckets: Buckets = PowersOfTwo() if buckets is None else buckets
        self.limits = CaptureLimits() if limits is None else limits
        # Reentrant, because the garbage collector may run a user's finaliser, which may use the
        # cache, between any two lines here.
        self._lock = new_lock()
        self._table = Table(None if budget is None else parse_bytes(budget), max_graphs)
        self._flights = Flights(self._lock)
        self.settings, self.profile = resolved(settings, profile)
        self._plain = self.settings.plain
        self._closed = False
        self._joined = 0
        self._spent = Spent()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        name = self.context.driver.name
        with self._lock:
            graphs, nbytes = len(self), self._table.nbytes
        return f"<GraphCache {graphs} graphs, {nbytes} bytes on {name}{state}>"

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
            return [key for key, _ in self._table.by_use()]

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
    def replay(
        self,
        key: Hashable,
        stream: Stream,
        change: Callable[[GraphExec], object] | None = None,
    ) -> bool:
        """Launches the graph under a key once, in stream order; returns whether there was one.

        `change` is called with the executable before, and no other thread's `change` of it comes in
        between.  If there is none, nothing runs.  Raises ClosedError, and what `change` and
        `GraphExec.launch` raise.
        """
        lock, table = self._lock, self._table
        with lock:  # as `use`, `_lease` and `_release` do, without a frame for each
            entry = table.entries.get(key)
            if entry is None or entry is not table.latest:
                entry = table.use(key)
            else:
                entry.hits += 1
                table.total.hits += 1
            if entry is not None:
                entry.leases += 1
        if entry is None:
            entry = self._lease(key)
            if entry is None:
                return False
        try:
            executable = entry.executable
            if change is None and self._plain:
                executable.launch(stream)
            elif change is None:
                replay_as_set(key, executable, stream, self.settings, self.profile)
            else:
                with entry.changing:
                    change(executable)
                    replay_as_set(key, executable, stream, self.settings, self.profile)
        finally:
            with lock:
                last = False
                if entry.leaving:
                    last = table.release(entry)
                else:
                    entry.leases -= 1
            if last:
                entry.executable.close()
        return True

    def hold(self, key: Hashable) -> AbstractContextManager[GraphExec | None]:
        """For a `with` block: the executable under a key, or None; inside it is not closed.

        For several calls on one graph, such as a rebinding and its launch.  An eviction inside the
        block takes the key away at once, and closes the executable at the block's end.  Entering
        counts as a use, and raises ClosedError.  Not guaranteed: that no other thread changes the
        executable meanwhile.
        """
        return _Hold(self, key)

    def _lease(self, key: Hashable) -> Entry | None:
        with self._lock:
            entry = self._table.use(key)
            if entry is None:
                self._require_open()
                self._table.miss(key)
                return None
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
        thread is capturing, directly or through other threads; CaptureLimitError, without
        a call of `make`, if the cache's limits refuse the capture; InputError, ClosedError.
        """
        entry = self._known(key)
        if entry is not None:
            return entry.executable
        flight = Flight(key, threading.get_ident())  # `land` removes it, on every path
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
            return entry

    def refusal(self, key: Hashable) -> Refused | None:
        """Why a capture of this key would be refused now; None if it would not.  Not a use."""
        limits = self.limits
        if limits.per_key is None and limits.seconds is None:
            return None
        with self._lock:
            record, _ = self._table.look(key)
            return refuse(
                limits,
                spent=self._spent.within(limits.window),
                uses=self._table.uses(key),
                captured_at=() if record is None else record.captured_at,
            )

    def _begin_capture(self, key: Hashable) -> None:
        """Notes that a capture begins.  Raises CaptureLimitError.  Call under the lock."""
        refused, table = self.refusal(key), self._table
        if refused is not None:
            for record in table.counting(key):
                record.refused[refused.reason] += 1
            table.miss(key)
            raise CaptureLimitError(
                f"key {key!r} is not captured: {refused}. Run its work eagerly, or give the cache "
                "a larger budget or other limits"
            )
        if self.limits.per_key is not None:
            table.record(key).note_capture(table.uses(key), self.limits.per_key)

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
            del flight  # it holds errors whose tracebacks hold this frame
        return executable

    def _end_capture(self, key: Hashable, landed: bool, seconds: float) -> None:
        """Counts a capture.  Call under the lock."""
        for record in self._table.counting(key):
            record.captures += landed
            record.failures += not landed
            record.capture_seconds += seconds
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
        capture_ms: float | None,
    ) -> None:
        with uninterrupted, self._lock:
            self._require_open()
            out = self._table.put(key, Entry(executable, charge, capture_ms))
            if capture_ms is None:
                for record in self._table.counting(key):
                    record.installed += 1
        self._close(out)

    # --- taking out
    def evict(self, key: Hashable) -> bool:
        """Takes one graph out; returns whether there was one.

        It is closed once no replay of this cache uses it, and destroyed once its own last launch
        is done; this call does not wait for either.
        """
        with uninterrupted, self._lock:
            entry = self._table.entries.get(key)
            out = [] if entry is None else self._table.remove([(key, entry)], "asked")
        self._close(out)
        return entry is not None

    def evict_all(self) -> int:
        """Takes every graph out, as `evict` does; returns how many."""
        with uninterrupted, self._lock:
            items = list(self._table.entries.items())
            out = self._table.remove(items, "asked")
        self._close(out)
        return len(items)

    def touching(self, target: Target) -> list[Hashable]:
        """The keys of the graphs that point into a buffer, as their next launches will use them.

        `target` is a Buffer (also a view, or a closed one), a device array, or a MemoryRange.
        `graph.words` defines what counts as pointing.  A graph whose definition was closed
        before it came into the cache counts as pointing everywhere.  Raises InputError.
        """
        return [key for key, _ in self._touching(target)]

    def evict_touching(self, target: Target) -> list[Hashable]:
        """Takes out every graph that points into a buffer; returns their keys.

        Afterwards no new replay of this cache uses the buffer; those under way finish in stream
        order, as with `evict`.
        """
        found = self._touching(target)
        with uninterrupted, self._lock:
            gone = [(key, entry) for key, entry in found if not entry.leaving]
            out = self._table.remove(gone, "touching")
        self._close(out)
        return [key for key, _ in gone]

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

    @staticmethod
    def _close(entries: list[Entry]) -> None:
        # Outside of the lock: closing destroys retired objects, and that runs code of others.
        for entry in entries:
            entry.executable.close()

    # --- numbers and lifetime
    def statistics(self) -> CacheStatistics:
        """Counts, bytes, and a line for each key, taken at one moment."""
        with self._lock:
            table, total = self._table, self._table.total
            return CacheStatistics(
                graphs=len(table.entries),
                nbytes=table.nbytes,
                budget=table.budget,
                max_graphs=table.max_graphs,
                leaving=len(table.leaving),
                hits=total.hits,
                misses=total.misses,
                captures=total.captures,
                capture_failures=total.failures,
                joined=self._joined,
                capture_ms=1e3 * total.capture_seconds,
                installed=total.installed,
                replaced=total.left["replaced"],
                evictions=evictions(total.left),
                over_budget=table.over_budget,
                keys=table.all_statistics(),
                limits=self.limits,
                refused=total.refusals,
                shared_growth=table.blocks.grown,
                gone=table.gone_statistics(),
                forgotten=table.records.forgotten,
            )

    def key_statistics(self, key: Hashable) -> KeyStatistics | None:
        """The line of one key, with or without a graph; None if nothing is known of it."""
        with self._lock:
            return self._table.key_statistics(key)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the graph cache is closed; make another")

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Takes every graph out, and refuses new ones.  Idempotent; does not wait."""
        with uninterrupted, self._lock:
            self._closed = True
            out = self._table.remove(self._table.entries.items(), "closed")
        self._close(out)
