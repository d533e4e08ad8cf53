"""The first difference between two runs of the same work.

`first_difference` launches the nodes of two graphs one by one, in an order that both have, and
compares what each node writes.  `first_drift` compares the launches alone, and runs nothing.

Memory is compared by digests of pieces, computed on the device before and after each node; so a
run costs two launches a node and keeps 16 bytes for each 64 KiB that a node can reach.  Only pieces
in which a node wrote other bytes are read, by running both sides again up to that node.  What a
node writes need not be known: a byte counts if the node changed it in one of the runs, and it is
another one in the other.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, islice, pairwise, zip_longest
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ostinato.driver.api import (
    KernelNodeParams,
    LaunchConfig,
    MemcpyNodeParams,
    MemoryRange,
    MemsetNodeParams,
    NodeKind,
    ParameterSlot,
    parse_bytes,
)
from ostinato.driver.context import Context
from ostinato.driver.signature import Signature, numpys_dtype
from ostinato.driver.stream import Operation, Stream, require_stream
from ostinato.errors import CaptureError, DriverError, InputError
from ostinato.graph import Graph, GraphExec, Node, Touch, capture_function, launch
from ostinato.graph.audit import MemoryMap
from ostinato.graph.flat import FlatNode
from ostinato.graph.frozen import Nodes
from ostinato.graph.node import decode_arguments
from ostinato.graph.probes import PIECE, probe
from ostinato.graph.shadow import frozen_of
from ostinato.graph.show.demangle import demangled
from ostinato.graph.show.diff import SameCode, code_comparison, common_subsequence, numbered
from ostinato.graph.show.outline import details, launch_text, line_text, named_places
from ostinato.graph.words import Sort, Word, WordIndex, WordPlace, words_of
from ostinato.memory import Buffer
from ostinato.memory.buffer import allocate
from ostinato.memory.ranges import KnownRanges, merged
from ostinato.memory.restoring import put_back

_Run: TypeAlias = Graph | GraphExec | Callable[[], object]
"""A run: a graph, an executable with the changes made to it, or a function whose work is captured,
in the order in which it is submitted."""

_Bytes: TypeAlias = npt.NDArray[np.uint8]
_BATCH = 64
"""Pieces that are read at once."""
_MOST_TRIALS = 256
_LEAST_ADDRESS = 1 << 16
_MOST_INPUT = 64 << 20
_THREADS = 256


class DifferenceCause(enum.StrEnum):
    """The cause of a difference, as far as the two graphs and more runs of them show it."""

    OTHER_KERNEL = "another kernel"
    OTHER_CONFIG = "another launch configuration"
    OTHER_ARGUMENT = "another argument"
    STALE_POINTER = "a stale pointer"
    MISSING_NODE = "a node that only one run has"
    OTHER_ORDER = "another order"
    MISSING_EDGE = "a missing edge"
    READ_BEFORE_WRITTEN = "memory that is read before the run has written it"
    UNREPEATABLE = "a node that does not repeat its own answer"
    UNKNOWN = (
        "unknown: kernel, arguments, and the memory at which they point are the same, so it reads "
        "something else (an address in device memory, a constant of its module, the clock)"
    )


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first node whose written memory differs, of run `a` and run `b`; `str()` explains it.

    A run without such a node has None; `.node` is the node with its present arguments, and `.path`
    "3", or "3.child.0" in a child graph.  `argument` is "argument 2 (out)" or "dst"; `index` counts
    elements from there, in the axes of its buffer if that is known; `values` are those of `a` and
    `b`, numbers of the argument's type, or whole numbers of 32 bits if the type is unknown.  For a
    missing edge they are of one graph, in the other's order and in another order that its edges
    allow.  `argument` is "" and `values` None if a node was not run, or not twice with one answer.
    """

    a: FlatNode | None
    b: FlatNode | None
    cause: DifferenceCause
    why: str
    argument: str = ""
    index: tuple[int, ...] = ()
    values: tuple[Any, Any] | None = None
    names: tuple[str, str] = ("a", "b")

    def line(self) -> str:
        """Returns one line: the node, its argument, index and values."""
        nodes = [str(node) for node in (self.a, self.b) if node is not None]
        text = " / ".join(dict.fromkeys(nodes))
        if self.values is not None:
            words = tuple(f"in {name}" for name in self.names)
            if self.cause is DifferenceCause.MISSING_EDGE:
                words = "if ordered", "if not"
            told = [f"{_text(v)} {w}" for v, w in zip(self.values, words, strict=True)]
            text += f", {self.argument} at {list(self.index)}: {', '.join(told)}"
        return text

    def __str__(self) -> str:
        why = f": {self.why}" if self.why else ""
        lines = [f"first difference: {self.line()}", f"  cause: {self.cause}{why}"]
        for name, node in zip(self.names, (self.a, self.b), strict=True):
            lines.append(f"  {name}: {'no such node' if node is None else _launch_text(node)}")
        return "\n".join(lines)


def _launch_text(one: FlatNode) -> str:
    parts = [details(one.node, 96), line_text(one.node.location)]
    if isinstance(one.node.params, KernelNodeParams):
        parts.insert(0, launch_text(one.node.params.config))
    return f"{one}: {'; '.join(filter(None, parts))}"


def _text(value: Any) -> str:
    if isinstance(value, np.uint32):  # of unknown type: as it is, and as the commonest type
        return f"{int(value):#010x} (as f32 {value.view(np.float32):g})"
    return str(value)


def first_difference(
    stream: Stream,
    a: _Run,
    b: _Run,
    *,
    limit: int | str | None = None,
    names: tuple[str, str] = ("a", "b"),
) -> FirstDifference | None:
    """Returns the first node whose written memory differs between two runs of the same work; None
    if none differs.

        difference = ost.first_difference(stream, lambda: step(stream), run)
        print(difference)

    Both run on `stream` from the present content of memory, node by node, several times; then all
    memory is as before.  Each is a graph (also an adopted one, or one of a graph file), an
    executable, or a function without arguments, which is captured on `stream`.  They may use the
    same memory or each its own: then what their arguments point at is compared place by place.
    If no node differs, each pair of nodes that only one graph orders, and that use the same memory,
    is run in both orders; then both run once more from zeros in memory that a node, by its
    signature, writes and does not read.  `names` stand for the runs in texts.

    `limit`: the most bytes of memory to save, which the nodes can reach by pointers that are not
    known to be read only; None: half of the free memory of the device.

    Nodes are paired before they run; of two neighbours that look the same, of which only one has a
    partner, either may be named.

    Not found: a node without a signature that does not write an answer which its memory has already
    (clear the results before).  Not compared: memory behind addresses in device memory.  Not put
    back: such memory, what host functions do, and random numbers that torch draws (both runs draw
    the same).  A kernel that waits for another node of the same graph waits for ever.  At most 256
    pairs are run for missing edges.  No other stream may write the memory meanwhile.

    Two captures by PyTorch are compared too: arrays in the pools of captures are matched by the
    arguments at which they stand.  So it is not found that a node writes its result to another
    place of a pool, if no node reads it.

    Raises GraphError for a node that runs in no other graph (a conditional node, alloc and free
    nodes), InputError if more than `limit` bytes would have to be saved, CaptureError if the stream
    captures or the function cannot be captured, StateLostError if memory cannot be put back, and
    the errors of launches.
    """
    require_stream(stream, "first_difference(stream, a, b)")
    if stream.is_capturing():
        raise CaptureError("first_difference: the stream is capturing (the capture goes on)")
    with ExitStack() as held:
        runs: list[Graph | GraphExec] = []
        for run in (a, b):
            if not isinstance(run, Graph | GraphExec):
                if not callable(run):
                    raise InputError(
                        "first_difference: a Graph, a GraphExec or a function without arguments "
                        f"is needed, not {type(run).__name__}"
                    )
                run = held.enter_context(capture_function(stream, run))
            stream.context.require_same(run.context, "first_difference: a run", "the stream is of")
            runs.append(run)
        return _Comparison(runs[0], runs[1], stream, limit, names).find()


class _Side:
    """One run: its nodes in an order that its edges allow, and the memory that each can reach."""

    def __init__(self, run: Graph | GraphExec, find: KnownRanges, known: _Known) -> None:
        self.pooled = known.pooled
        self.nodes = run.flat_nodes()
        if isinstance(run, GraphExec):
            touches: Sequence[Touch] = run.manifest()
        else:
            frozen = frozen_of(run)
            nodes = Nodes(run, run.reader, frozen, frozen, find)
            touches = tuple(WordIndex(nodes.parts(), {}).manifest(find))
        by_node: dict[int, dict[WordPlace, Touch]] = {}
        for touch in touches:
            by_node.setdefault(touch.handle, {})[touch.key] = touch
        self.touches = [{} if one.idle else by_node.get(one.node.handle, {}) for one in self.nodes]
        self.before: list[int] = []
        """By node, the nodes that its edges put before it, as bits."""
        for one in self.nodes:
            bits = 0
            for at in one.after:
                bits |= self.before[at] | 1 << at
            self.before.append(bits)


class _Known:
    """The memory of other libraries on a device, as they tell of it."""

    def __init__(self, context: Context) -> None:
        self._driver = context.driver
        self._at = cache(MemoryMap(context, ask_driver=False).at)

    def find(self, address: int) -> MemoryRange | None:
        """Returns the array, or else the allocation of the driver, that holds an address; None if
        it was freed."""
        found = self._at(address)
        if found is None or found.of == "ours":
            return self._driver.memory_range(address)
        return found.range if found.live else None

    def pooled(self, address: int) -> bool:
        """True for memory in the pool of a capture."""
        found = self._at(address)
        return found is not None and found.of == "capture"


class _Way(NamedTuple):
    """Nodes of one side that are looked at, and those that run before them."""

    side: int
    before: Sequence[int]
    nodes: Sequence[int]
    zeros: Sequence[MemoryRange] = ()
    """Memory that is filled with zeros in between."""


class _Span(NamedTuple):
    """Memory of both sides that is compared: two addresses, and the bytes from there on."""

    addresses: tuple[int, int]
    nbytes: int


class _Found(NamedTuple):
    """A byte that differs, in a piece of memory as it is on both sides."""

    piece: _Span
    at: int
    contents: tuple[_Bytes, _Bytes]


_Pair: TypeAlias = tuple[int | None, int | None]
_Addresses: TypeAlias = tuple[tuple[WordPlace, int], ...]
_Looks: TypeAlias = tuple[tuple[NodeKind, str], object, _Addresses, _Addresses, bytes]
_Partners: TypeAlias = tuple[dict[int, Counter[int]], dict[int, Counter[int]]]


class _Comparison:
    def __init__(
        self,
        a: Graph | GraphExec,
        b: Graph | GraphExec,
        stream: Stream,
        limit: int | str | None,
        names: tuple[str, str],
    ) -> None:
        self._stream, self._driver, self._names = stream, stream.context.driver, names
        self._known = _Known(stream.context)
        self._find = KnownRanges(self._known.find)
        # With the driver's allocations: a pointer to memory that a library has taken back is one.
        find = KnownRanges(self._driver.memory_range)
        self._sides = _Side(a, find, self._known), _Side(b, find, self._known)
        self._same_code: SameCode = code_comparison(stream.context, stream.context)
        self._pairs = _pairs(*self._sides, {})
        self._partners = self._partners_of(self._pairs)
        """By an address that an argument of one side has, those of the same argument in the
        other."""
        to_b, to_a = (
            {x: given.most_common(1)[0][0] for x, given in of.items()} for of in self._partners
        )
        stands = {y: x for y, x in to_a.items() if y not in to_b and to_b[x] == y}
        if stands:  # once more, now that it is known what stands for what
            self._pairs = _pairs(*self._sides, stands)
            self._partners = self._partners_of(self._pairs)
        order = [j for _, j in self._pairs if j is not None]
        done = [0, *accumulate(1 << j for j in order)]
        self._aligned = not any(
            self._sides[1].before[j] & ~d for j, d in zip(order, done[:-1], strict=True)
        )
        """True if the edges of the second run allow the order of the first."""
        self._order = range(len(self._sides[0].nodes)), order if self._aligned else sorted(order)
        same = [x in self._partners[1] for x in self._partners[0]]
        self._shared = 2 * sum(same) >= len(same)
        """True if both use the same memory, but for a minority of addresses."""
        # Before anything is allocated here, perhaps where memory was freed.
        stales = ((k, why) for k, pair in enumerate(self._pairs) if (why := self._stale(*pair)))
        self._stop = next(stales, None)
        """The first pair with a node that must not run, and why; or None."""
        self._spans = [self._spans_of(i, j) for i, j in self._pairs]
        self._saved = self._save(limit)
        self._results = merged(m for side in (0, 1) for m in self._only_written(side))
        self._blank: Sequence[MemoryRange] = ()
        """Memory that is filled with zeros before each run."""
        most = max((_count(spans) for spans in self._spans), default=0)
        self._out = allocate(stream.context, 2 * max(most, 1), np.uint64)
        self._digest_kernel = probe(stream.context, "ostinato_digest")

    # --- memory
    def _partners_of(self, pairs: Sequence[_Pair]) -> _Partners:
        found: _Partners = {}, {}
        for i, j in pairs:
            for one, two in self._both(i, j):
                for partners, x, y in zip(found, (one, two), (two, one), strict=True):
                    partners.setdefault(x.range.address, Counter())[y.range.address] += 1
        return found

    def _both(self, i: int | None, j: int | None) -> Iterator[tuple[Touch, Touch]]:
        """Yields the pointers at the same places of two nodes."""
        if i is not None and j is not None:
            one, two = self._sides[0].touches[i], self._sides[1].touches[j]
            yield from ((one[key], two[key]) for key in one if key in two)

    def _across(self, side: int, address: int, given: int | None = None) -> int | None:
        """Returns the address that stands in the other side for one of this side, or None.

        It is the same address if the other side has it too; else the one that is most often at the
        same places, except between buffers of this library in runs that else use the same memory.
        In the pools of captures, where addresses are used again, it is `given`, the one at the same
        place of the node in question.
        """
        if given is not None and self._known.pooled(address) and self._known.pooled(given):
            return given
        if address in self._partners[1 - side]:
            return address
        partners = self._partners[side].get(address)
        if partners is None:
            return address if self._shared else None
        other = max(partners, key=partners.__getitem__)
        owner = self._stream.context.owner_of
        known = self._shared and owner(address) is not None and owner(other) is not None
        return address if known else other

    def _spans_of(self, i: int | None, j: int | None) -> list[_Span]:
        pairs = [(one.range.address, two.range.address) for one, two in self._both(i, j)]
        given = dict(pairs), {y: x for x, y in pairs}
        written = [[] if at is None else self._written(side, at) for side, at in enumerate((i, j))]
        starts: list[list[tuple[int, int | None]]] = []
        """By side: the addresses that the node may write from, and those that stand for them."""
        for side, touches in enumerate(written):
            addresses = [touch.range.address for touch in touches]
            stand = [(x, self._across(side, x, given[side].get(x))) for x in addresses]
            # What a node without a partner writes, and nothing stands for, is compared with itself.
            alone = None in (i, j)
            starts.append([(x, x if alone and y is None else y) for x, y in stand])
        found: dict[tuple[int, int], int] = {}
        same: list[MemoryRange] = []
        for side, touches in enumerate(written):
            for touch, (address, other) in zip(touches, starts[side], strict=True):
                if other is None:
                    continue
                nbytes = touch.range.nbytes
                if other != address:
                    there = self._live(replace(touch, range=MemoryRange(other, nbytes)))
                    nbytes = min(nbytes, there)
                # Up to the next array that the node writes, if that lies elsewhere in the other.
                for of, begin, end in ((side, address, other), (1 - side, other, address)):
                    for x, y in starts[of]:
                        if 0 < x - begin < nbytes and y != end + x - begin:
                            nbytes = x - begin
                if other == address:
                    same.append(MemoryRange(address, nbytes))
                else:
                    key = (other, address) if side else (address, other)
                    found[key] = max(found.get(key, 0), nbytes)
        spans = [_Span((memory.address, memory.address), memory.nbytes) for memory in merged(same)]
        return spans + [_Span(addresses, nbytes) for addresses, nbytes in found.items()]

    def _live(self, touch: Touch) -> int:
        """Returns the bytes of a pointer's memory that are in its live allocation."""
        memory = self._find(touch.range.address)
        return 0 if memory is None else min(touch.range.end, memory.end) - touch.range.address

    def _written(self, side: int, at: int) -> list[Touch]:
        touches = self._sides[side].touches[at].values()
        return [
            replace(t, range=MemoryRange(t.range.address, self._live(t)))
            for t in touches
            if t.written and self._live(t)
        ]

    def _save(self, limit: int | str | None) -> list[tuple[MemoryRange, Buffer]]:
        ranges = merged(
            touch.range
            for side, of in enumerate(self._sides)
            for at in range(len(of.nodes))
            for touch in self._written(side, at)
        )
        wanted, free = sum(memory.nbytes for memory in ranges), self._driver.memory_info()[0]
        most = free // 2 if limit is None else parse_bytes(limit, "limit")
        if wanted > most:
            raise InputError(
                f"first_difference: the nodes can reach {wanted} bytes by pointers that are not "
                f"known to be read only, and may save {most}: give a larger limit, or signatures "
                "to the kernels (a pointer to const is not saved)"
            )
        saved = []
        for memory in ranges:
            copy = allocate(self._stream.context, memory.nbytes, np.uint8)
            self._driver.memcpy(copy.address, memory.address, memory.nbytes, self._stream.handle)
            saved.append((memory, copy))
        return saved

    def _only_written(self, side: int) -> Iterator[MemoryRange]:
        """Yields memory that a node writes and does not read, as far as signatures say, and what
        stands for it in the other run; not if that is an input there, which no node writes."""
        for at, one in enumerate(self._sides[side].nodes):
            for touch in self._written(side, at):
                kernel = isinstance(one.node.params, KernelNodeParams)
                if kernel and not _word_of(one.node, touch).only_written:
                    continue
                other = self._across(side, touch.range.address)
                there = touch.range if other is None else MemoryRange(other, touch.range.nbytes)
                if any(memory.holds(there.address, there.nbytes) for memory, _ in self._saved):
                    yield from (touch.range, there)

    def _restore(self) -> None:
        for memory, copy in self._saved:
            self._driver.memcpy(memory.address, copy.address, memory.nbytes, self._stream.handle)
        for memory in self._blank:
            self._driver.memset(memory.address, 0, 1, memory.nbytes, self._stream.handle)

    def _read(self, address: int, nbytes: int) -> _Bytes:
        out = np.empty(nbytes, np.uint8)
        self._driver.memcpy_to_host(out.data, address, self._stream.handle)
        return out

    def _digests(self, side: int, spans: Sequence[_Span]) -> npt.NDArray[np.uint64]:
        """Returns the digests of all pieces of these spans, in order."""
        count = 0
        for span in spans:
            pieces = _count([span])
            if pieces:
                config = LaunchConfig(pieces, _THREADS)
                given = span.addresses[side], span.nbytes, PIECE, self._out[count:]
                launch(self._stream, self._digest_kernel, config, *given)
                count += pieces
        return self._out[:count].to_numpy(self._stream)

    # --- running
    def _run(self, side: int, places: Sequence[int]) -> None:
        for at in places:
            one = self._sides[side].nodes[at]
            if not one.idle:
                self._stream.submit_as_graph(Operation(one.alone, one.node.name))

    def _begin(self, way: _Way) -> None:
        """Runs what comes before the nodes that are looked at, from the saved content on."""
        self._restore()
        self._run(way.side, way.before)
        for memory in way.zeros:
            self._driver.memset(memory.address, 0, 1, memory.nbytes, self._stream.handle)

    def _marked(self, way: _Way, spans: Sequence[_Span]) -> list[npt.NDArray[np.uint64]]:
        """Runs nodes, and returns the digests before and after."""
        before = self._digests(way.side, spans)
        self._run(way.side, way.nodes)
        return [before, self._digests(way.side, spans)]

    def _observed(self, way: _Way, pieces: Sequence[_Span]) -> list[tuple[_Bytes, _Bytes]]:
        """Begins and runs nodes, and returns the content of each piece before and after."""
        self._begin(way)
        before = [self._read(p.addresses[way.side], p.nbytes) for p in pieces]
        self._run(way.side, way.nodes)
        after = [self._read(p.addresses[way.side], p.nbytes) for p in pieces]
        return list(zip(before, after, strict=True))

    def _differ(
        self,
        ways: tuple[_Way, _Way],
        spans: Sequence[_Span],
        marks: tuple[list[npt.NDArray[np.uint64]], list[npt.NDArray[np.uint64]]],
    ) -> _Found | None:
        """Returns the first byte that the nodes of one way changed and that differs after both."""
        (one, after_one), (two, after_two) = marks
        suspects = np.flatnonzero(
            (after_one != after_two) & ((one != after_one) | (two != after_two))
        )
        pieces = list(_pieces(spans)) if suspects.size else []
        for begin in range(0, len(suspects), _BATCH):
            batch = [pieces[at] for at in suspects[begin : begin + _BATCH]]
            seen = [self._observed(way, batch) for way in ways]
            for piece, (was, a), (had, b) in zip(batch, *seen, strict=True):
                different = np.flatnonzero((a != b) & ((was != a) | (had != b)))
                if different.size:
                    return _Found(piece, int(different[0]), (a, b))
        return None

    # --- the first difference
    def find(self) -> FirstDifference | None:
        def lost(refused: DriverError) -> str:
            return (
                f"first_difference could not put back memory that the runs wrote ({refused}): "
                "write the inputs and the state of the work again"
            )

        def write() -> None:
            self._restore()
            self._stream.synchronize()

        try:
            found = self._in_order() or self._out_of_order()
            if found is None and self._results:
                # An earlier run may have left an answer that one of the two does not write.
                self._blank = self._results
                self._restore()
                found = self._in_order()
            return found
        finally:
            self._blank = ()
            put_back(write, lost)

    def _in_order(self) -> FirstDifference | None:
        pairs = self._pairs[: None if self._stop is None else self._stop[0]]
        marks: list[list[npt.NDArray[np.uint64]]] = []
        for (i, _), spans in zip(pairs, self._spans, strict=False):
            marks.append(self._marked(_Way(0, (), () if i is None else (i,)), spans))
        self._restore()
        for k, (pair, spans) in enumerate(zip(pairs, self._spans, strict=False)):
            if self._aligned:  # what comes before has run
                mark = self._marked(_Way(1, (), () if pair[1] is None else (pair[1],)), spans)
            else:
                mark = self._again(self._way(1, k), spans)
            if np.array_equal(marks[k][1], mark[1]):
                continue
            ways = self._way(0, k), self._way(1, k)
            found = self._differ(ways, spans, (marks[k], mark))
            # Both were run again, the second one last.
            again = [self._again(way, spans) for way in ways]
            for side, (first, second) in enumerate(zip((marks[k], mark), again, strict=True)):
                if not np.array_equal(first[1], second[1]):
                    why = f"two runs of {self._names[side]} from the same memory differ here"
                    return self._report(pair, DifferenceCause.UNREPEATABLE, why, found)
            if found is not None:
                return self._report(pair, *self._cause(k, found), found)
        if self._stop is None:
            return None
        k, why_not = self._stop
        return self._report(self._pairs[k], *why_not)

    def _again(self, way: _Way, spans: Sequence[_Span]) -> list[npt.NDArray[np.uint64]]:
        self._begin(way)
        return self._marked(way, spans)

    def _way(self, side: int, k: int) -> _Way:
        """Returns the node of one side in pair `k`, after those of all pairs before it, and those
        that these wait for."""
        bits, at = 0, self._pairs[k][side]
        for one in (*(pair[side] for pair in self._pairs[:k]), at):
            bits |= 0 if one is None else self._sides[side].before[one] | 1 << one
        nodes = () if at is None else (at,)
        return _Way(side, [n for n in self._order[side] if bits >> n & 1 and n != at], nodes)

    def _out_of_order(self) -> FirstDifference | None:
        """Runs pairs of nodes that only the other side orders in both orders."""
        for side, earlier, later in islice(self._unordered(), _MOST_TRIALS):
            one, two = (self._pairs[k][side] for k in (earlier, later))
            assert one is not None and two is not None
            mine = self._sides[side]
            spans = [
                _Span((m.address, m.address), m.nbytes)
                for m in merged(t.range for at in (one, two) for t in self._written(side, at))
            ]
            common = [
                memory
                for x in self._written(side, one)
                for y in mine.touches[two].values()
                if (memory := _common(x.range, y.range)) is not None
            ]
            bits = mine.before[one] | mine.before[two]
            before = [at for at in self._way(side, later).before if bits >> at & 1]
            for zeros in ((), merged(common)):
                ways = _Way(side, before, (one, two), zeros), _Way(side, before, (two, one), zeros)
                found = self._differ(
                    ways, spans, (self._again(ways[0], spans), self._again(ways[1], spans))
                )
                if found is not None:
                    first, second = mine.nodes[one], mine.nodes[two]
                    why = f"nothing orders {first} and {second} in {self._names[side]}"
                    pair = self._pairs[later if self._holding(side, two, found) else earlier]
                    return self._report(pair, DifferenceCause.MISSING_EDGE, why, found)
        return None

    def _unordered(self) -> Iterator[tuple[int, int, int]]:
        """Yields a side and two pairs, the nodes of which only the other side orders, and use the
        same memory."""
        for later in range(len(self._pairs)):
            for side in (1, 0):
                mine, other = self._sides[side], self._sides[1 - side]
                two, theirs = self._pairs[later][side], self._pairs[later][1 - side]
                if two is None or theirs is None:
                    continue
                for earlier in reversed(range(later)):  # the nearest one first
                    one, their = self._pairs[earlier][side], self._pairs[earlier][1 - side]
                    if one is None or their is None or not other.before[theirs] >> their & 1:
                        continue
                    if not mine.before[two] >> one & 1 and self._conflict(mine, one, two):
                        yield side, earlier, later

    def _conflict(self, side: _Side, one: int, two: int) -> bool:
        return any(
            (x.written or y.written) and x.range.overlaps(y.range)
            for x in side.touches[one].values()
            for y in side.touches[two].values()
        )

    # --- causes
    def _cause(self, k: int, found: _Found) -> tuple[DifferenceCause, str]:
        i, j = self._pairs[k]
        a, b = self._names
        if i is None or j is None:
            return DifferenceCause.MISSING_NODE, f"only {b if i is None else a} has it"
        one, two = self._sides[0].nodes[i], self._sides[1].nodes[j]
        if one.off != two.off:
            name = a if one.off else b
            return DifferenceCause.MISSING_NODE, f"it is switched off in {name}"
        nodes = one.node, two.node
        known = self._other(*nodes) or self._moved(k) or self._input(k, found)
        return known or self._other(*nodes, unsure=True) or (DifferenceCause.UNKNOWN, "")

    def _moved(self, k: int) -> tuple[DifferenceCause, str] | None:
        """Returns a node that comes before a node only in the second run, and uses its memory."""
        before = {i for i, _ in self._pairs[:k]}
        at, way = self._pairs[k][1], {*self._way(1, k).before}
        for i, j in self._pairs:
            if at is None or i is None or j is None or i in before or j not in way:
                continue
            if self._conflict(self._sides[1], j, at):
                a, b = self._names
                why = f"{self._sides[1].nodes[j]} comes before it in {b} and after it in {a}"
                return DifferenceCause.OTHER_ORDER, why
        return None

    def _other(
        self, one: Node, two: Node, *, unsure: bool = False
    ) -> tuple[DifferenceCause, str] | None:
        """Returns how two nodes differ; by bytes that may never have been set only if `unsure`."""
        a, b = self._names
        x, y = one.params, two.params
        if not (isinstance(x, KernelNodeParams) and isinstance(y, KernelNodeParams)):
            if one.kind is not two.kind:
                kinds = f"{one.name} in {a}, {two.name} in {b}"
                return DifferenceCause.OTHER_KERNEL, kinds
            fields = getattr(type(x), "__dataclass_fields__", ())
            for field in fields:
                was, is_ = getattr(x, field), getattr(y, field)
                if field in ("dst", "src"):
                    cause = self._pointer(was, is_)
                else:
                    cause = None if was == is_ else DifferenceCause.OTHER_ARGUMENT
                if cause is not None:
                    texts = [f"{v:#x}" if field in ("dst", "src") else str(v) for v in (was, is_)]
                    return cause, f"{field} is {texts[0]} in {a} and {texts[1]} in {b}"
            return None
        if one.name != two.name or not self._same_code(x.function, y.function):
            names = f"{_name(one)} in {a}, {_name(two)} in {b}"
            return DifferenceCause.OTHER_KERNEL, names
        if x.config != y.config:
            for name in ("grid", "block", "shared", "cluster", "cooperative"):
                was, is_ = getattr(x.config, name), getattr(y.config, name)
                if was != is_:
                    return DifferenceCause.OTHER_CONFIG, f"{name} {was} in {a}, {is_} in {b}"
        held = [self._shown(node).arguments for node in (one, two)]
        for was_, is__ in zip_longest(*held):
            if was_ is None or is__ is None:
                return DifferenceCause.OTHER_ARGUMENT, "they have different numbers of arguments"
            sure = unsure or one.signature is not None or len(was_.raw) <= 8
            cause = self._argument(was_.raw, is__.raw, was_.offset, sure)
            if cause is not None:
                place = f"argument {was_.index}" + (f" ({was_.name})" if was_.name else "")
                texts = [
                    argument.text(self._shown(node).places).removeprefix(f"{argument.name}=")
                    for node, argument in zip((one, two), (was_, is__), strict=True)
                ]
                return cause, f"{place} is {texts[0]} in {a} and {texts[1]} in {b}"
        return None

    def _argument(self, was: bytes, is_: bytes, offset: int, sure: bool) -> DifferenceCause | None:
        """Compares the bytes of an argument, word by word where they may be addresses, and the
        others if they are `sure` to have been set."""
        begin = -offset % 8
        for at in range(begin, min(len(was), len(is_)) - 7, 8):
            x, y = (int.from_bytes(raw[at : at + 8], "little") for raw in (was, is_))
            if x and self._find(x) is not None:
                cause = self._pointer(x, y)
                if cause is not None:
                    return cause
                was, is_ = (raw[:at] + bytes(8) + raw[at + 8 :] for raw in (was, is_))
        return DifferenceCause.OTHER_ARGUMENT if sure and was != is_ else None

    def _pointer(self, x: int, y: int) -> DifferenceCause | None:
        """Compares two addresses: None if the second stands for the first."""
        expected = self._across(0, x, y)
        if y == expected or (expected is None and x == y):
            return None
        memory = self._find(y) if y else None
        # Memory that no node of the first run stands for, or that is gone.
        uses = {
            self._across(0, t.range.address) for of in self._sides[0].touches for t in of.values()
        }
        if memory is None or not any(u is not None and memory.holds(u) for u in uses):
            return DifferenceCause.STALE_POINTER
        return DifferenceCause.OTHER_ARGUMENT

    def _stale(self, i: int | None, j: int | None) -> tuple[DifferenceCause, str] | None:
        """Returns why a node must not run: it points at memory that was freed."""
        for side, at, partner in ((0, i, j), (1, j, i)):
            if at is None or self._sides[side].nodes[at].off:
                continue
            node, touches = self._sides[side].nodes[at].node, self._sides[side].touches[at]
            closed = _closed(node.keep)
            theirs = {} if partner is None else self._sides[1 - side].touches[partner]
            for key, touch in {**theirs, **touches}.items():
                address = touch.range.address
                if isinstance(key, int) and isinstance(node.params, KernelNodeParams):
                    raw = node.params.arguments.data[key : key + 8]
                    address = int.from_bytes(raw, "little")
                pointer = key in touches and node.signature is not None
                if address >= _LEAST_ADDRESS:  # a smaller one is a number, or padding
                    pointer |= key in theirs and self._live(theirs[key]) > 0
                lost = address and pointer and self._find(address) is None
                if lost or any(memory.holds(address) for memory in closed):
                    why = (
                        f"{touch.place} of {self._names[side]} is {address:#x}, where no memory is"
                    )
                    return DifferenceCause.STALE_POINTER, f"{why} any more; the node was not run"
        return None

    def _input(self, k: int, found: _Found) -> tuple[DifferenceCause, str] | None:
        """Returns the argument that makes the difference by what its memory held before the node:
        with the content of the first run the second gives the first one's answer."""
        ways = self._way(0, k), self._way(1, k)
        for one, two in self._both(*self._pairs[k]):
            nbytes = min(self._live(one), self._live(two))
            if one.range.address == two.range.address or not 0 < nbytes <= _MOST_INPUT:
                continue
            self._begin(ways[0])
            given = self._read(one.range.address, nbytes)
            self._begin(ways[1])
            own, to = self._read(two.range.address, nbytes), two.range.address
            if np.array_equal(given, own):
                continue
            write = partial(self._driver.memcpy_from_host, to, stream=self._stream.handle)
            try:
                write(given.data)
                self._run(1, ways[1].nodes)
                seen = self._read(found.piece.addresses[1] + found.at, 1)
            finally:
                write(own.data)  # it may be read only, and so not be saved
            if seen[0] == found.contents[0][found.at]:
                place = _word_of(self._node(1, k), two).label
                why = f"when the node began, the memory of {place} held other bytes"
                return DifferenceCause.READ_BEFORE_WRITTEN, why
        return None

    # --- the report
    def _node(self, side: int, k: int) -> Node:
        at = self._pairs[k][side]
        assert at is not None
        return self._sides[side].nodes[at].node

    def _shown(self, node: Node) -> Node:
        """Returns a node with its present arguments, and names in place of addresses."""
        if isinstance(node.params, KernelNodeParams):
            held = decode_arguments(node.params, node.signature, self._find)
            node = replace(node, held=held, name=demangled(node.name))
        return replace(node, places=named_places(self._stream.context, node))

    def _report(
        self, pair: _Pair, cause: DifferenceCause, why: str, found: _Found | None = None
    ) -> FirstDifference:
        a, b = (
            None if at is None else replace(of.nodes[at], node=self._shown(of.nodes[at].node))
            for of, at in zip(self._sides, pair, strict=True)
        )
        if found is None:
            return FirstDifference(a, b, cause, why, names=self._names)
        # Of the first run that wrote there, by the nearest pointer below.
        node, touch, side = next(
            (self._sides[side].nodes[at].node, max(holding, key=lambda t: t.range.address), side)
            for side, at in enumerate(pair)
            if at is not None and (holding := self._holding(side, at, found))
        )
        address = found.piece.addresses[side] + found.at
        dtype, shape = self._type(node, touch)
        element = (address - touch.range.address) // dtype.itemsize
        begin = touch.range.address + element * dtype.itemsize - found.piece.addresses[side]
        values = []
        for content in found.contents:
            raw = content[max(begin, 0) : begin + dtype.itemsize].tobytes()
            # An element across two pieces: its bytes in this one.
            values.append(np.frombuffer(raw, dtype)[0] if len(raw) == dtype.itemsize else raw)
        index: tuple[int, ...] = (element,)
        if shape and element < np.prod(shape):
            index = tuple(int(n) for n in np.unravel_index(element, shape))
        told = _word_of(node, touch).label, index, (values[0], values[1])
        return FirstDifference(a, b, cause, why, *told, self._names)

    def _holding(self, side: int, at: int, found: _Found) -> list[Touch]:
        """Returns the written pointers of a node whose memory holds a byte that differs."""
        address = found.piece.addresses[side] + found.at
        return [t for t in self._written(side, at) if t.range.holds(address)]

    def _type(self, node: Node, touch: Touch) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Returns the type of the memory behind a pointer, and its axes if it is a whole buffer."""
        address, held = touch.range.address, _word_of(node, touch).holds
        owners = (*node.keep, self._stream.context.owner_of(address))
        for owner in (one for one in owners if isinstance(one, Buffer)):
            size = owner.dtype.itemsize if held is None else held.itemsize
            if owner.range.address == address and owner.dtype.itemsize == size:
                return numpys_dtype(held or owner.dtype), owner.shape
        return np.dtype(np.uint32) if held is None else numpys_dtype(held), ()


def _pairs(a: _Side, b: _Side, stands: Mapping[int, int]) -> list[_Pair]:
    """Pairs the nodes of two runs, in the order of the first; None for a node without a partner.
    `stands`: addresses of the first run by those of the second that stand for them.

    First nodes that are alike, then those alike but for addresses, then those of one name: each
    time those that both runs have in the same order, as many as there are, and then the others.
    So a node that is changed, or missing, leaves alone those of its name that come after it.  Bytes
    that may never have been set only decide between pairings with as many pairs.
    """
    looks = [
        [_looks(side, at, names) for at in range(len(side.nodes))]
        for side, names in ((a, {}), (b, stands))
    ]
    whole = numbered(looks)
    rather = [numbered([[one[:4] for one in of] for of in looks]), whole]
    order: dict[int, int] = {}
    taken: set[int] = set()
    anchors = [(-1, -1), (len(a.nodes), len(b.nodes))]
    """Pairs in the order of both runs."""

    def free(side: int, begin: int, end: int) -> list[int]:
        return [at for at in range(begin, end) if at not in (taken if side else order)]

    def pair(i: int, j: int) -> None:
        order[i] = j
        taken.add(j)

    def displaced(i: int, j: int) -> bool:
        """False if both wait for nodes that are pairs."""
        return {order.get(at) for at in a.nodes[i].after} != {*b.nodes[j].after}

    def align(keys: Sequence[Sequence[int]]) -> None:
        for begin, end in pairwise(tuple(anchors)):
            mine, theirs = (free(side, begin[side] + 1, end[side]) for side in (0, 1))
            levels = [([x[i] for i in mine], [y[j] for j in theirs]) for x, y in (keys, *rather)]
            for m, n in common_subsequence(*levels):
                pair(mine[m], theirs[n])
                anchors.append((mine[m], theirs[n]))
        anchors.sort()

    def pair_others(keys: Sequence[Sequence[int]], *, moved: bool) -> None:
        left: dict[int, list[int]] = {}
        for j in free(1, 0, len(b.nodes)):
            left.setdefault(keys[1][j], []).append(j)
        for i in free(0, 0, len(a.nodes)):
            able = left.get(keys[0][i], [])
            first = able[0] if able and moved else None
            other = next((j for j in able if not displaced(i, j)), first)
            if other is not None:
                able.remove(other)
                pair(i, other)

    for depth in (3, 2, 1):
        keys = numbered([[one[:depth] for one in of] for of in looks])
        align(keys)
        # What is changed as well as moved is rather one that is missing and one that is new.
        for each in (whole, keys) if depth == 3 else (keys,):
            pair_others(each, moved=depth == 3)
    rest = free(1, 0, len(b.nodes))
    for i in free(0, 0, len(a.nodes)):  # another kernel in the same place
        alike = (j for j in rest if looks[0][i][0][0] == looks[1][j][0][0] and not displaced(i, j))
        if (found := next(alike, None)) is not None:
            pair(i, found)
            rest.remove(found)
    pairs: list[_Pair] = [(i, order.get(i)) for i in range(len(a.nodes))]
    for j in rest:  # after all it waits for
        waits = [
            k
            for k, (_, other) in enumerate(pairs)
            if other is not None and b.before[j] >> other & 1
        ]
        pairs.insert(max(waits, default=-1) + 1, (None, j))
    return pairs


def _looks(side: _Side, at: int, stands: Mapping[int, int]) -> _Looks:
    """Returns kind and name of a node; its parameters but for addresses; its addresses, but for
    those in the pools of captures, which are used again.  Then the same of structs without a
    signature, of which nobody knows the bytes that were never set: addresses, and the others."""
    one = side.nodes[at]
    sure: list[tuple[WordPlace, int]] = []
    unsure: list[tuple[WordPlace, int]] = []
    params: object = None
    structs = b""
    parts: list[range] = []
    if isinstance(one.node.params, KernelNodeParams):
        arguments = one.node.params.arguments
        data = bytearray(arguments.data)
        for key in side.touches[at]:
            if isinstance(key, int):
                data[key : key + 8] = bytes(8)
        if one.node.signature is None:
            slots = arguments.layout or [ParameterSlot(0, len(data))]
            parts = [range(s.offset, s.offset + s.size) for s in slots if s.size > 8]
            structs = b"".join(data[part.start : part.stop] for part in parts)
            for part in parts:
                data[part.start : part.stop] = bytes(len(part))
        params = one.node.params.config, bytes(data)
    elif isinstance(one.node.params, MemcpyNodeParams):
        params = replace(one.node.params, dst=0, src=0)
    elif isinstance(one.node.params, MemsetNodeParams):
        params = replace(one.node.params, dst=0)
    for key, touch in side.touches[at].items():
        if not side.pooled(address := touch.range.address):
            of = unsure if any(key in part for part in parts) else sure
            of.append((key, stands.get(address, address)))
    return (one.node.kind, one.node.name), params, tuple(sure), tuple(unsure), structs


def _count(spans: Sequence[_Span]) -> int:
    return sum(-(-span.nbytes // PIECE) for span in spans)


def _pieces(spans: Sequence[_Span]) -> Iterator[_Span]:
    for (one, two), nbytes in spans:
        for at in range(0, nbytes, PIECE):
            yield _Span((one + at, two + at), min(PIECE, nbytes - at))


def _common(one: MemoryRange, other: MemoryRange) -> MemoryRange | None:
    begin, end = max(one.address, other.address), min(one.end, other.end)
    return MemoryRange(begin, end - begin) if begin < end else None


def _closed(owners: Sequence[Any]) -> list[MemoryRange]:
    """Returns the memory of those owners that are closed."""
    found = [one for one in owners if getattr(one, "closed", False) is True]
    return [one.range for one in found if hasattr(one, "range")]


def _word_of(node: Node, touch: Touch) -> Word:
    """Returns the word of a node that is a pointer: its name and the type of its memory."""
    if isinstance(node.params, KernelNodeParams):
        arguments = node.params.arguments
        for word in words_of(node.signature, arguments.layout, len(arguments.data)):
            if word.key == touch.key:
                return word
    return Word(0, touch.place, Sort.FIELD)


# --- launches alone
_Launch: TypeAlias = Node | Operation


def first_drift(
    before: Sequence[Node | Operation],
    now: Sequence[Node | Operation],
    words: tuple[str, str],
) -> str | None:
    """Describes the first difference between the launches of two runs; None if they are the same.

    Both are in the order of submission.  `words` name the two runs ("in the graph", "now").
    Returns None also if the graph holds child graphs: no run submits their launches one by one.
    """
    if any(isinstance(one, Node) and one.children for one in before):
        return None
    launches = zip_longest(_launches(before), _launches(now))
    for index, (one, other) in enumerate(launches):
        difference = _difference(index, one, other)
        if difference is not None:
            what, was, is_ = difference
            return f"{what} is {was} {words[0]} and {is_} {words[1]}"
    return None


def _launches(items: Sequence[_Launch]) -> list[_Launch]:
    kinds = KernelNodeParams | MemcpyNodeParams | MemsetNodeParams
    return [item for item in items if isinstance(item.params, kinds)]


def _name(launch: _Launch | None) -> str:
    if launch is None:
        return "nothing"
    if isinstance(launch.params, KernelNodeParams):
        return launch.name
    return "copy" if isinstance(launch.params, MemcpyNodeParams) else "fill"


def _difference(
    index: int, one: _Launch | None, other: _Launch | None
) -> tuple[str, str, str] | None:
    """Returns the part that differs, and its two values."""
    if one is None or other is None or _name(one) != _name(other):
        return f"operation {index}", _name(one), _name(other)
    where = f"of operation {index} ({_name(one)})"
    a, b = one.params, other.params
    if isinstance(a, KernelNodeParams) and isinstance(b, KernelNodeParams):
        if a.function != b.function:
            return f"the function {where}", f"{a.function:#x}", f"{b.function:#x}"
        if a.config.grid != b.config.grid:
            return f"the grid {where}", str(a.config.grid), str(b.config.grid)
        return _argument(where, a, b, other.signature or one.signature)
    # Not the extents: a driver may describe the same copy in another way.
    for name in ("dst", "src", "value"):
        was, is_ = getattr(a, name, None), getattr(b, name, None)
        if was != is_:
            return f"{name} {where}", f"{was:#x}", f"{is_:#x}"
    return None


def _argument(
    where: str, a: KernelNodeParams, b: KernelNodeParams, signature: Signature | None
) -> tuple[str, str, str] | None:
    # Addresses show as numbers: the memory may have been freed since.
    held, given = (decode_arguments(params, signature, lambda _: None) for params in (a, b))
    for one, other in zip(held, given, strict=False):
        if one.raw != other.raw:
            return f"argument {one.index} {where}", str(one), str(other)
    return None
