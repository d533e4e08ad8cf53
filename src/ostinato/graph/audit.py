"""The pointer audit: whether each pointer of a graph points into live memory, and where if not.

Known are the buffers of this library, the memory that other libraries tell of
(`add_memory_source`), and the driver's allocations as long as the context is sound.  An allocation
of the driver may be divided by another library: a pointer into a part that CuPy's pool, say, has
given back counts as live.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from ostinato.driver.api import KernelNodeParams, MemoryRange
from ostinato.driver.context import Context
from ostinato.driver.signature import dtype_name
from ostinato.errors import InputError
from ostinato.graph.node import Node, given_part
from ostinato.graph.show.outline import count_text
from ostinato.graph.words import Sort, Word, address_fields, words_of
from ostinato.memory import Buffer
from ostinato.memory.ranges import range_of

Liveness: TypeAlias = Literal["live", "freed", "moved", "unknown", "null"]
_FAR = 1 << 32
_ADDRESSES = range(1 << 32, 1 << 57)
"""Values of an argument of 8 bytes without a type that may be addresses."""


@dataclass(frozen=True, slots=True)
class KnownMemory:
    """An allocation, or a part of one, that is live or was freed.

    `what` names it: "'x' float32[16]".  `of`: a buffer of this library ("ours"), memory that
    another "library" told of, such memory in the pool of a "capture", where each capture may have
    its arrays elsewhere, or an allocation that only the "driver" knows.
    """

    range: MemoryRange
    what: str
    live: bool = True
    of: Literal["ours", "library", "capture", "driver"] = "library"

    def __str__(self) -> str:
        return f"{self.what} ({self.range.nbytes} bytes at {self.range.address:#x})"


@dataclass(frozen=True, slots=True)
class PointerReport:
    """One pointer of a node, and what is known of the memory there.

    `state`: "live"; "freed"; "moved" (its memory was freed, and other memory has the address now);
    "unknown" (in no known allocation); "null".  `memory` describes the allocation, or the nearest
    one within 4 GiB; `misses` is then the distance: bytes after its end (0: at its end), or, if
    negative, before its beginning.  `typed`: a signature declares the pointer; else it may be a
    number.
    """

    node: str
    """The index of the node; inside of others with theirs before it: "2/0/1" is node 1 of body, or
    child graph, 0 of node 2."""
    name: str
    place: str
    """The place in the node: "argument 2 (x)", "argument 0 +16", "dst"."""
    address: int
    state: Liveness
    memory: str = ""
    misses: int | None = None
    typed: bool = True

    def __str__(self) -> str:
        begin = f"{self.place} = {self.address:#x}: {self.state}"
        if self.state == "unknown" and not self.typed:
            begin += " (it may be a number)"
        if self.misses is None:
            return f"{begin}, {self.memory}" if self.memory else begin
        where = f"{self.misses} bytes after the end of"
        if self.misses < 0:
            where = f"{-self.misses} bytes before"
        return f"{begin}, {where} {self.memory}"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The pointers of a graph, in the order of its nodes."""

    pointers: tuple[PointerReport, ...]

    @property
    def suspects(self) -> tuple[PointerReport, ...]:
        """The pointers that are "freed" or "moved", and declared ones that are "unknown"."""
        return tuple(
            p
            for p in self.pointers
            if p.state in ("freed", "moved") or (p.state == "unknown" and p.typed)
        )

    def __str__(self) -> str:
        count = count_text(len(self.pointers), "pointer")
        lines = [f"{count}, {len(self.suspects)} suspect"]
        lines += [f"node {p.node} ({p.name}) {p}" for p in self.suspects]
        return "\n".join(lines)


MemorySource: TypeAlias = Callable[[Context], Iterable[KnownMemory]]
_sources: list[MemorySource] = []


def add_memory_source(source: MemorySource) -> None:
    """Asks this function, too, for the memory of a device that a library has, or has freed.

    It is called after faults as well, so it must not call the driver.  The interop packages add
    theirs when they are imported.
    """
    if source not in _sources:
        _sources.append(source)


def audit(context: Context, nodes: Iterable[Node]) -> AuditReport:
    """Does the work of `Graph.audit` and `GraphExec.audit`."""
    return AuditReport(tuple(pointers_of(nodes, MemoryMap(context, ask_driver=True))))


def pointers_of(
    nodes: Iterable[Node], memory: MemoryMap, above: str = ""
) -> Iterator[PointerReport]:
    """Yields the pointers of nodes, and of the nodes inside of them."""
    for node in nodes:
        yield from node_pointers(node, f"{above}{node.index}", memory)
        for number, body in enumerate(node.children):
            yield from pointers_of(body, memory, f"{above}{node.index}/{number}/")


def node_pointers(node: Node, path: str, memory: MemoryMap) -> Iterator[PointerReport]:
    """Yields the pointers of one node."""
    for word, address, single in possible_pointers(node):
        found = memory.at(address) if address else None
        typed = word.sort is not Sort.UNKNOWN
        if not typed and found is None and not (single and address in _ADDRESSES):
            continue
        part = None if found is None or not found.live else given_part(node, address)
        if part is not None:
            found = KnownMemory(part.range, describe(part), of="ours")
        report = PointerReport(path, node.name, word.label, address, "null", typed=typed)
        yield report if not address else memory.report(report, found, _closed_owner(node, address))


def possible_pointers(node: Node) -> Iterator[tuple[Word, int, bool]]:
    """Yields the words that may be pointers, their values, and whether each is a whole argument."""
    params = node.params
    if not isinstance(params, KernelNodeParams):
        for field_ in address_fields(params):
            if field_.address:
                yield Word(0, field_.place, Sort.FIELD), field_.address, True
        return
    data, layout = params.arguments.data, params.arguments.layout
    whole = {slot.offset for slot in layout if slot.size == 8}
    for word in words_of(node.signature, layout, len(data)):
        if word.sort is not Sort.SCALAR:
            value = int.from_bytes(data[word.offset : word.offset + 8], "little")
            yield word, value, word.offset in whole


def _closed_owner(node: Node, address: int) -> KnownMemory | None:
    """Returns the memory that the launch was given at an address, if it was closed since."""
    for owner in node.keep:
        storage = getattr(owner, "storage", owner)  # a closed view frees nothing
        if getattr(storage, "closed", False) is True:
            closed = owner if getattr(owner, "name", None) else storage
            try:
                memory = range_of(closed)
            except InputError:  # a module, say
                continue
            if memory.holds(address):
                return KnownMemory(memory, describe(closed), live=False, of="ours")
    return None


def describe(owner: object) -> str:
    """Returns name, type and shape of a buffer: "'x' float32[16]"; of a view also the name of the
    memory: "'x' float32[16] in 'weights'"."""
    if not isinstance(owner, Buffer):
        return type(owner).__name__
    name = f"{owner.name!r} " if owner.name else ""
    whole = owner.storage.name if owner.storage is not owner else None
    inside = f" in {whole!r}" if whole else ""
    return f"{name}{dtype_name(owner.dtype)}{list(owner.shape)}{inside}"


def buffers_of(context: Context) -> Iterator[KnownMemory]:
    """Yields the live buffers of this library; no driver is called."""
    for reference in context.owners.valuerefs():
        owner = reference()
        if isinstance(owner, Buffer) and not owner.closed:
            yield KnownMemory(owner.range, describe(owner), of="ours")


def of_driver(memory: MemoryRange) -> KnownMemory:
    """Returns an allocation of which only the driver knows."""
    return KnownMemory(memory, "an allocation of the driver", of="driver")


@dataclass
class MemoryMap:
    """The memory of a device that is known now.

    `noted`: what was known before; buffers among it that are not there any more were freed.
    `ask_driver`: the driver may be asked, since the context is sound.
    """

    context: Context
    ask_driver: bool
    noted: Iterable[KnownMemory] = ()
    known: tuple[KnownMemory, ...] = field(init=False)

    def __post_init__(self) -> None:
        live = [*buffers_of(self.context), *(m for s in _sources for m in s(self.context))]
        ranges = {memory.range for memory in live}
        before = [
            replace(m, live=m.live and m.of != "ours") for m in self.noted if m.range not in ranges
        ]
        self.known = tuple(sorted([*before, *live], key=lambda m: m.range.address))
        self._starts = [memory.range.address for memory in self.known]
        self._longest = max((memory.range.nbytes for memory in self.known), default=0)

    def at(self, address: int) -> KnownMemory | None:
        """Returns the memory that holds an address: what a library knows rather than the driver,
        live memory rather than freed, and of several the smallest."""
        held: list[KnownMemory] = []
        for place in range(bisect_right(self._starts, address) - 1, -1, -1):
            memory = self.known[place]
            if memory.range.address + self._longest <= address:
                break
            if memory.range.holds(address):
                held.append(memory)
        if held:
            return min(held, key=lambda m: (m.of == "driver", not m.live, m.range.nbytes))
        found = self.context.driver.memory_range(address) if self.ask_driver else None
        return None if found is None else of_driver(found)

    def report(
        self, report: PointerReport, found: KnownMemory | None, closed: KnownMemory | None
    ) -> PointerReport:
        """Completes a report with the memory at its address; `closed`: what it was given."""
        address = report.address
        if closed is not None:
            if (
                found is None
                or not found.live
                or (found.range == closed.range and found.of == "driver")
            ):
                return replace(report, state="freed", memory=_into(closed, address))
            now = f"{_into(closed, address)}, whose place is now that of {found}"
            return replace(report, state="moved", memory=now)
        if found is not None:
            state: Liveness = "live" if found.live else "freed"
            return replace(report, state=state, memory=_into(found, address))
        near = self._nearest(address)
        if near is None:
            return replace(report, state="unknown", memory="far from all known memory")
        after = address - near.range.end
        misses = after if after >= 0 else address - near.range.address
        text = str(near) if near.live else f"{near}, which was freed"
        return replace(report, state="unknown", memory=text, misses=misses)

    def _nearest(self, address: int) -> KnownMemory | None:
        def distance(memory: KnownMemory) -> int:
            start, end = memory.range.address, memory.range.end
            return start - address if address < start else address - end

        found = min(self.known, key=distance, default=None)
        return None if found is None or distance(found) > _FAR else found


def _into(memory: KnownMemory, address: int) -> str:
    into = address - memory.range.address
    left = memory.range.end - address
    return f"{into} bytes into {memory}, {left} bytes before its end" if into else str(memory)
