"""PyTorch: adopts its graphs, makes ostinato's streams its current ones, wraps buffers as tensors.

A graph that draws random numbers reads the seed and the offset of each generator from two words of
device memory.  torch writes them before each of its own replays, and advances the generator by what
the whole graph draws (ATen's `CUDAGeneratorState::replay_prologue`).  An executable of ostinato
does the same (`Graph.before_launch`), in words of its own: up to 2.12, torch has one pair for all
graphs of a generator, which it also writes when any capture begins, each time on the stream of the
moment, while a graph under way on another stream still reads them.  torch does not expose how much
a graph draws, and from which generator: both are measured once, when the graph is adopted, by a
replay of torch's in which every node is switched off.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from ostinato import (
    Buffer,
    Device,
    Graph,
    LaunchConfig,
    MemoryRange,
    Node,
    NodeKind,
    Source,
    Stream,
    launch,
)
from ostinato.errors import GraphError, InputError, NotAvailableError
from ostinato.explain import KnownMemory, add_memory_source
from ostinato.interop.reading.library import cuda_index
from ostinato.interop.reading.moves import NAMES
from ostinato.lowlevel import every_node, new_lock, wait_for_streams

try:
    import torch
except ImportError as error:
    raise NotAvailableError(
        f"PyTorch is not installed ({error}); install torch with CUDA, as pytorch.org says"
    ) from error


def adopt_graph(
    device: Device, graph: torch.cuda.CUDAGraph, *, generators: Sequence[torch.Generator] = ()
) -> Graph:
    """Adopts the definition that torch captured, to read, compare, instantiate, patch and replay
    it.

    `graph` must have been made with `torch.cuda.CUDAGraph(keep_graph=True)`: otherwise torch
    destroys the definition when the capture ends, and InputError says so.  The CUDAGraph is kept
    alive, and with it torch's memory pool of the capture.

    A graph that draws random numbers draws new ones at each launch, the same that torch's own
    replay would draw, from the device's default generator and from those of `generators`: pass the
    generators that were registered with the graph.  Such a graph cannot be part of another one.  If
    it draws from a generator that was not given, or holds nodes that cannot be switched off, it can
    be read and compared, but not instantiated (GraphError).  Its launches run one after the other,
    and beside those of other graphs; what is returned is a copy of torch's definition.

    Not guaranteed: that another thread which draws eagerly from the same generator at the same
    moment draws other numbers; torch locks the generator against that, and Python cannot.
    Nor that cuBLAS's workspace, which products write, is still the graph's: graphs captured on one
    stream share it, and torch frees it (docs/torch.md, "Compared with torch").
    """
    adopted = definition_of(device, graph)
    nodes = adopted.nodes()
    found = list(drawing(nodes, device.driver.memory_range))
    if found:
        places = {place for _, place in found}
        try:
            return _apart(device, adopted, _measure(device, graph, nodes, places, generators))
        except GraphError as error:
            node = found[0][0]
            adopted.only_to_read = (
                f"node {node.index} ({node.name}) draws random numbers, and {error}; replay it "
                "with torch (graph.replay()), or draw the numbers outside of the graph"
            )
    return adopted


def definition_of(device: Device, graph: torch.cuda.CUDAGraph) -> Graph:
    """Returns the definition that torch captured, to read it.  Raises InputError as `adopt_graph`
    does."""
    try:
        handle = graph.raw_cuda_graph()
    except (RuntimeError, AttributeError) as error:
        raise InputError(
            "torch kept no definition of this graph: make it with "
            f"torch.cuda.CUDAGraph(keep_graph=True) ({error})"
        ) from error
    return Graph.adopt(device, handle, owner=graph)


def external_stream(stream: Stream) -> Any:
    """Returns a torch stream for an ostinato stream."""
    return torch.cuda.ExternalStream(stream.handle)


@contextmanager
def use_stream(stream: Stream) -> Iterator[Any]:
    """Makes an ostinato stream torch's current one, so that torch and Triton launch on it.

    torch's allocator does not notice a capture by ostinato: it may give the memory of temporaries
    to other tensors while the graph still points at it.  Use operations with `out=`, or capture
    with `torch.cuda.graph` and `adopt_graph`.  Products also use cuBLAS's workspace of the stream,
    in torch's common memory, which torch frees before captures of
    `torch.compile(mode="reduce-overhead")`: a process that has such functions must not capture
    products so.  `graphed` has workspaces of its own.
    """
    with torch.cuda.stream(external_stream(stream)) as current:
        yield current


def as_tensor(buffer: Buffer) -> torch.Tensor:
    """Returns a tensor over the buffer's memory, without a copy; it keeps the buffer alive.

    Raises InputError for memory of the host, which torch would copy to a GPU.
    """
    if not hasattr(buffer, "__cuda_array_interface__"):
        raise InputError(
            f"{buffer!r} is memory of the host; torch.from_numpy(buffer.array) takes it"
        )
    # The device is named, since torch would copy to its current GPU if that is another one.
    return torch.as_tensor(buffer, device=buffer.context.driver.name)


def known_memory(context: Any) -> Iterator[KnownMemory]:
    """Yields the blocks of torch's allocator on a device, for audits and black boxes.

    A block that is not given out counts as freed, except in the pool of a capture, whose graph goes
    on using what the capture gave back.
    """
    try:
        segments = torch.cuda.memory_snapshot() if torch.cuda.is_initialized() else []
    except RuntimeError:  # another allocator than torch's own
        return
    for segment in segments:
        if context.driver.name != f"cuda:{segment.get('device')}":
            continue
        captured = tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
        what = "a capture's pool of torch" if captured else "memory of torch"
        start = segment["address"]
        for block in segment["blocks"]:
            memory = MemoryRange(start, block["size"])
            live = captured or block["state"] == "active_allocated"
            yield KnownMemory(memory, what, live, "capture" if captured else "library")
            start += block["size"]


add_memory_source(known_memory)

# torch passes the state of a generator to kernels by value (ATen's PhiloxCudaState).  In a capture
# the state holds two addresses, of the seed and of the offset, each an int64 tensor of one element,
# then the offset inside the graph (a multiple of 4), then a flag that is 1.
_WORD = 8


def drawing(
    nodes: Iterable[Node], find: Callable[[int], MemoryRange | None]
) -> Iterator[tuple[Node, tuple[int, int]]]:
    """Yields the nodes with a generator's state among their arguments, also inside other nodes,
    each with the addresses of the seed and of the offset."""
    # Each asked once: most graphs have the same few numbers in many structs.
    find, is_scalar = cache(find), cache(_is_scalar)
    for node in every_node(nodes):
        # Arrays' addresses are no states, although some arrays are scalars of int64 too.
        if node.kind is not NodeKind.KERNEL or node.name in NAMES:
            continue
        # Not `node.arguments`, which asks the driver about each word of each struct.
        arguments = node.kernel.arguments
        data, slots = arguments.data, arguments.layout
        for at, size in [(slot.offset, slot.size) for slot in slots] or [(0, len(data))]:
            for seed, offset in _captured_states(data[at : at + size], at, find):
                if is_scalar(seed) and is_scalar(offset):
                    yield node, (seed, offset)


def _captured_states(
    raw: bytes, offset: int, find: Callable[[int], MemoryRange | None]
) -> Iterator[tuple[int, int]]:
    """Yields the two addresses of each part of an argument that looks like a captured state.

    `offset`: the position of the argument in the parameter buffer, in bytes.
    """
    first = -offset % _WORD
    if len(raw) - first <= 2 * _WORD:
        return
    words = struct.unpack_from(f"<{(len(raw) - first) // _WORD}Q", raw, first)
    flags = raw[first + 3 * _WORD :: _WORD]
    place = flags.find(1)
    while place >= 0:
        # A multiple of 4 bytes has its last two bits in the first byte.
        seed, counter, inside = words[place], words[place + 1], raw[first + _WORD * place + 16]
        drawn = inside % 4 == 0 and seed and counter and seed != counter
        if drawn and find(seed) and find(counter):
            yield seed, counter
        place = flags.find(1, place + 1)


def _is_scalar(address: int) -> bool:
    """True if torch's allocator has given out 8 bytes at an address, or cannot be inspected."""
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # another allocator than torch's own
        return True
    for segment in segments:
        start = segment["address"]
        if start <= address < start + segment["total_size"]:
            for block in segment["blocks"]:
                if start == address:
                    return bool(block.get("requested_size", _WORD) == _WORD)
                start += block["size"]
    return False


_SOURCE = Source(
    cuda="""
    extern "C" __global__ void set_generator(
        unsigned long long* seed, unsigned long long* offset,
        unsigned long long new_seed, unsigned long long new_offset) {
        *seed = new_seed;
        *offset = new_offset;
    }""",
    signatures={
        "set_generator": "seed: *out u64, offset: *out u64, new_seed: u64, new_offset: u64"
    },
    name="set_generator.cu",
)
_PAIR = struct.Struct("<2Q")
_ONE = LaunchConfig(grid=1, block=1)
_FIRST_SEED = 0x5EED_0000_0000
"""The first seed of a measurement; such numbers are in no memory by chance."""
_UNTOUCHED = _FIRST_SEED - 1
"""The content of words of which it is not known whether torch writes a seed there."""
_lock = new_lock()
"""Held from reading a generator's offset to setting it."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The numbers that a graph draws from one generator."""

    generator: torch.Generator
    """A generator of the state at the capture, even if that state is exchanged later."""
    places: tuple[tuple[int, int], ...]
    """Addresses at which the graph reads seed and offset."""
    increment: int

    def next(self) -> tuple[int, int]:
        """Returns seed and offset for the next launch, and advances the generator."""
        generator = self.generator
        with _lock:
            offset = generator.get_offset()
            generator.set_offset(offset + self.increment)
        return generator.initial_seed(), offset


class _Advance:
    """A callable that advances the generators before a launch, as torch does before its replay.

    `words`: the seed and the offset of each generator, which the graph reads."""

    def __init__(self, device: Device, drawn: Sequence[_Drawn], words: Buffer) -> None:
        self._drawn, self._words = tuple(drawn), words
        self._kernel = device.modules.get_or_compile(_SOURCE, "set_generator")
        self._last: Stream | None = None
        self.place = words.address
        """The address at which the definition reads the words."""
        self.nbytes = words.nbytes

    def __call__(self, stream: Stream) -> None:
        last, self._last = self._last, stream
        if last is not None and last is not stream:  # a launch there may still read the words
            wait_for_streams(stream, [last])
        for index, drawn in enumerate(self._drawn):
            place = self._words.address + 2 * _WORD * index
            launch(stream, self._kernel, _ONE, place, place + _WORD, *drawn.next())

    def next(self) -> bytes:
        """Returns the words of the next launch, and advances the generators."""
        return b"".join([_PAIR.pack(*drawn.next()) for drawn in self._drawn])

    def read_at(self, graph: Graph, address: int | None) -> None:
        """Makes a definition read its words at an address; at their own place for None."""
        place = self._words.address if address is None else address
        moved = {self.place + at: place + at for at in range(0, self.nbytes, _WORD)}
        point_elsewhere(graph, moved)
        self.place = place


def _apart(device: Device, adopted: Graph, drawn: Sequence[_Drawn]) -> Graph:
    """Returns a copy of an adopted graph that reads the states of generators from its own words.

    torch's definition stays as it is, for torch's own replays."""
    words = device.zeros((len(drawn), 2), "u64", name="the state of a generator")
    moved: dict[int, int] = {}
    for index, one in enumerate(drawn):
        place = words.address + 2 * _WORD * index
        for seed, offset in one.places:
            moved |= {seed: place, offset: place + _WORD}
    copy = adopted.clone()
    point_elsewhere(copy, moved)
    graph = Graph.adopt(device, int(copy.handle), owner=(adopted.owner, copy))
    graph.keep.append(words)
    graph.before_launch = _Advance(device, drawn, words)
    return graph


def point_elsewhere(graph: Graph, moved: Mapping[int, int]) -> None:
    """Replaces addresses in the kernel arguments and the copies of a graph."""
    driver, old = graph.context.driver, np.array([*moved], np.uint64)
    for node in graph.nodes():
        if node.kind is NodeKind.KERNEL:
            data = node.kernel.arguments.data
            whole = len(data) // _WORD * _WORD
            words = np.frombuffer(data[:whole], "<u8").copy()
            for at in np.flatnonzero(np.isin(words, old)):
                words[at] = moved[int(words[at])]
            if words.tobytes() != data[:whole]:
                changed = node.kernel.with_data(words.tobytes() + data[whole:])
                driver.node_set_params(node.handle, changed)
        elif node.kind is NodeKind.MEMCPY and node.memcpy.src in moved:
            driver.node_set_params(node.handle, replace(node.memcpy, src=moved[node.memcpy.src]))


def _measure(
    device: Device,
    owner: torch.cuda.CUDAGraph,
    nodes: tuple[Node, ...],
    places: Collection[tuple[int, int]],
    generators: Sequence[torch.Generator],
) -> list[_Drawn]:
    """Measures how much a graph draws, and from which generators.

    torch replays it with every node switched off, from known seeds: nothing is computed, the seeds
    show which words belong to which generator, and the offsets how far each generator was advanced.
    Raises GraphError.
    """
    switches = (NodeKind.KERNEL, NodeKind.MEMCPY, NodeKind.MEMSET)
    for node in nodes:
        if node.kind not in switches and node.kind is not NodeKind.EMPTY:
            raise GraphError(
                f"how many cannot be measured, because node {node.index} of kind "
                f"{node.kind.name} cannot be switched off"
            )
    index = cuda_index(device)
    default = torch.cuda.default_generators[index]
    states: list[torch.Generator] = []
    for generator in (default, *generators):
        if generator.device.type == "cuda":
            states.append(generator.graphsafe_get_state())
    driver = device.driver
    owner.instantiate()
    executable: Any = owner.raw_cuda_graph_exec()
    for node in nodes:
        if node.kind in switches:
            driver.exec_set_enabled(executable, node.handle, False)
    seeds = {seed: torch.as_tensor(_Words(seed), device="cuda") for seed, _ in places}
    torch.cuda.synchronize(index)  # torch's graphs under way read the same words
    with _lock:
        saved = [state.get_state() for state in states]
        contents = {seed: words.clone() for seed, words in seeds.items()}
        try:
            for words in seeds.values():
                words.fill_(_UNTOUCHED)
            for number, state in enumerate(states):
                state.manual_seed(_FIRST_SEED + number)
            owner.replay()
            torch.cuda.synchronize(index)
            increments = [state.get_offset() for state in states]
        finally:
            for state, before in zip(states, saved, strict=True):
                state.set_state(before)
            owner.instantiate()  # with every node switched on, for torch's own replays
    found: dict[int, list[tuple[int, int]]] = {}
    for seed, offset in sorted(places):
        value = int(seeds[seed].item())
        if value == _UNTOUCHED:  # a seed that attention keeps for its backward
            seeds[seed].copy_(contents[seed])
            continue
        number = value - _FIRST_SEED
        if not 0 <= number < len(states):
            raise GraphError(
                "it is not known from which generator: give it to adopt_graph (generators=), or "
                "to graphed, and register it with the graph before the capture"
            )
        found.setdefault(number, []).append((seed, offset))
    return [
        _Drawn(states[number], tuple(where), increments[number]) for number, where in found.items()
    ]


class _Words:
    """An int64 of device memory, from which torch makes a tensor."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (1,),
            "typestr": "<i8",
            "data": (address, False),
            "version": 3,
        }
