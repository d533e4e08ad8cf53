"""The pointer manifest: which memory a graph points into, as the next launch will use it.

Pure: from what nodes hold (`Shadow.settings`).  `GraphExec.manifest` and `GraphExec.touches` read
it each time, so it follows every patch and rebind.

A pointer is a parameter that the signature declares as one, an argument that was a buffer, an
address field of a memcpy, memset or memory node, or an aligned word whose value lies in an
allocation that `find` knows.  How far it is used is what the launch was given there, or all that a
copy or fill covers; where neither is known, up to the end of the allocation.  A number mistaken for
a pointer costs a capture; a missed pointer gives a wrong answer.  Not seen: what a host function or
a pointer in device memory leads to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ostinato.driver.api import KernelNodeParams, MemoryRange, NodeHandle
from ostinato.driver.signature import Access
from ostinato.errors import InputError
from ostinato.graph.changes import Place, Setting, is_whole
from ostinato.graph.launching import Inside
from ostinato.graph.node import Node, decode_arguments
from ostinato.graph.rebind import address_fields
from ostinato.memory.ranges import range_of

__all__ = ["Settings", "Touch", "dangling", "touches", "walk"]

_WORD = 8

Settings: TypeAlias = Iterable[tuple[tuple[Node, ...], Setting]]
Find: TypeAlias = Callable[[int], MemoryRange | None]


@dataclass(frozen=True, slots=True)
class Touch:
    """One pointer of a graph.

    `place` says where in the node: "argument 2", "argument 0 +16", "dst", "operation 1".
    `range` is from where it points, as many bytes as may be used; `written` is False only where it
    is known that the node does not write through it.  `handle` and `key` are the driver's node and
    the place for code: a byte offset in the parameter buffer, or the field's name.
    """

    node_index: int
    """Of the graph's own node; for nodes inside a child graph or a body, of the one around them."""
    node_name: str
    place: str
    range: MemoryRange
    written: bool
    handle: NodeHandle
    key: Place


def walk(settings: Settings, find: Find) -> Iterator[tuple[Setting, Touch]]:
    """Every pointer, in the order of the nodes.

    `find` gives the live allocation that holds an address; an unexplained word is a pointer if it
    gives one.
    """
    for outer, setting in settings:
        if isinstance(setting.params, KernelNodeParams):
            yield from _kernel(outer, setting, setting.params, find)
            continue
        for place, address, nbytes, written in address_fields(setting.params):
            if address:  # zero: the side of a copy that is an array, or memory not placed yet
                memory = MemoryRange(address, nbytes)
                yield setting, _touch(outer, setting.node, place, place, memory, written)


def touches(settings: Settings, target: MemoryRange, allocation: MemoryRange | None) -> bool:
    """Whether any pointer is used inside `target`.

    `allocation` is the live allocation around the target, if it is alive: a pointer in front of the
    target whose extent is not known may reach the target.
    """
    if not target.nbytes:
        return False
    start = target.address if allocation is None else min(allocation.address, target.address)
    around = MemoryRange(start, target.end - start)

    def find(address: int) -> MemoryRange | None:
        return around if around.holds(address) else None

    return any(touch.range.overlaps(target) for _, touch in walk(settings, find))


def dangling(
    settings: Settings, closed: MemoryRange, apart: Sequence[tuple[NodeHandle, range]] = ()
) -> Touch | None:
    """A pointer into memory that was given back, or None.

    A word whose owner is open does not count: it may be another buffer at the same address.  Nor do
    the words `apart`: at these offsets in the arguments of these nodes.
    """

    def find(address: int) -> MemoryRange | None:
        return closed if closed.holds(address) else None

    for setting, touch in walk(settings, find):
        if any(touch.handle == node and touch.key in places for node, places in apart):
            continue
        if touch.range.overlaps(closed) and not _has_open_owner(setting, touch):
            return touch
    return None


def _has_open_owner(setting: Setting, touch: Touch) -> bool:
    own = setting.owners.get(touch.key)
    if own is not None:
        return not _is_closed(own)
    # Not what other words were set to: it may be new memory at the address of the closed one.
    whole = [owner for place, owner in setting.owners.items() if is_whole(place)]
    for owner in (*whole, *setting.node.keep):
        if isinstance(owner, Inside):
            owner = owner.storage
        try:
            holds = range_of(owner).holds(touch.range.address)
        except InputError:  # the kernel itself, or an object without memory
            continue
        if holds and not _is_closed(owner):
            return True
    return False


def _is_closed(owner: object) -> bool:
    return getattr(owner, "closed", False) is True


def _touch(
    outer: tuple[Node, ...],
    node: Node,
    place: str,
    key: Place,
    memory: MemoryRange,
    written: bool,
) -> Touch:
    if not outer:
        return Touch(node.index, node.name, place, memory, written, node.handle, key)
    inside = " ".join([*(n.name for n in outer[1:]), node.name, place])
    return Touch(outer[0].index, outer[0].name, inside, memory, written, node.handle, key)


def _kernel(
    outer: tuple[Node, ...], setting: Setting, params: KernelNodeParams, find: Find
) -> Iterator[tuple[Setting, Touch]]:
    signature, data = setting.signature, params.arguments.data
    found: dict[int, int] = dict(setting.reach)
    for argument in decode_arguments(params, signature, find):
        for pointer in argument.pointers:
            if pointer.offset not in found:
                memory = pointer.allocation or _stored(setting, pointer.offset, pointer.address)
                end = pointer.address + 1 if memory is None else memory.end
                found[pointer.offset] = end - pointer.address
    typed = signature is not None and signature.layout == params.arguments.layout
    for offset, nbytes in sorted(found.items()):
        address = int.from_bytes(data[offset : offset + _WORD], "little")
        if not address:
            continue
        place, index = _place(params, offset)
        written = True
        if typed and index is not None:
            assert signature is not None
            parameter = signature.parameters[index]
            written = not parameter.pointer or Access.WRITE in parameter.access
        memory = MemoryRange(address, nbytes)
        yield setting, _touch(outer, setting.node, place, offset, memory, written)


def _stored(setting: Setting, offset: int, address: int) -> MemoryRange | None:
    """The allocation behind a word when the definition was read, if the word is still the same."""
    for argument in setting.node.arguments:
        for pointer in argument.pointers:
            if pointer.offset == offset and pointer.address == address:
                return pointer.allocation
    return None


def _place(params: KernelNodeParams, offset: int) -> tuple[str, int | None]:
    for index, slot in enumerate(params.arguments.layout):
        if slot.offset <= offset < slot.offset + slot.size:
            inside = offset - slot.offset
            return f"argument {index}" + (f" +{inside}" if inside else ""), index
    return f"packed arguments +{offset}", None
