"""Captures of what PyTorch does: by this library into torch's memory, or by torch itself."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ostinato import (
    Device,
    Graph,
    MemoryRange,
    Node,
    NodeKind,
    Stream,
)
from ostinato.interop import captures
from ostinato.interop.captures import captured, disturbed, no_collection
from ostinato.interop.reading.library import CaptureDisturbed, NotGraphable
from ostinato.interop.torch.adopting import adopt_graph, drawing
from ostinato.lowlevel import every_node

_one_at_a_time = threading.RLock()
"""One capture at a time in the process: torch cannot make two, and what is set around one (the
collection of garbage, what transformers is told) counts for the whole process."""

_begin_pool: Any = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None)

_NOT_REGISTERED = "generator not in capture mode"
"""In torch's error for random numbers in a capture that is not its own."""


_NO_SEED = 0x6E6F_2073_6565_6421
"""A number that nobody gives a generator."""


class _Kept:
    """Something that a pool is kept for."""


@dataclass(slots=True)
class _Made:
    """What became of a capture: a graph and a result, or an error."""

    graph: Graph | None = None
    result: Any = None
    error: str = ""
    disturbed: bool = False
    """Whether something else than the function broke it."""
    asked: bool = False
    """Whether the function asked if it is captured, and was told that it is not."""


class Captures:
    """The captures of a graphed function, and its warm-ups: on a stream beside the caller's, and
    into a pool of torch's allocator that its graphs share."""

    def __init__(self, device: Device, index: int, generators: Sequence[Any]) -> None:
        """`generators`: those that the function draws from, besides the default one."""
        self._device, self._index, self._generators = device, index, generators
        self._side: tuple[Any, Stream] | None = None
        self._pool: Any = None
        self._keeper: Any = None
        """Keeps the pool: torch ends one whose last graph is destroyed, and refuses it from then
        on."""
        self._by_torch = bool(generators) or _begin_pool is None
        """Whether torch captures: where a capture of this library would not do (`_capture_here`),
        and in a torch that lets nobody else use its pools."""

    def _beside(self) -> tuple[Any, Stream]:
        """torch's stream and ours, which are one: that of warm-ups and captures.

        One of our own, since torch gives out the same few streams again and again: cuBLAS has a
        workspace for each stream, which a graph goes on using wherever it is replayed, and which
        nobody else may use at that time.
        """
        if self._side is None:
            stream = self._device.create_stream()
            self._side = torch.cuda.ExternalStream(stream.handle, device=self._index), stream
        return self._side

    def run_beside(self, work: Callable[[], Any]) -> Any:
        """As `Library.run_beside`."""
        (side, _), current = self._beside(), torch.cuda.current_stream(self._index)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                result = work()
        finally:
            current.wait_stream(side)
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(current)
        return result

    def capture(self, work: Callable[[Stream], Any]) -> tuple[Graph, Any]:
        """As `Library.capture`."""
        with _one_at_a_time, torch.cuda.device(self._index):
            made = self._captured(work, hidden=True)
            if made.error and made.asked and not made.disturbed:
                made = self._captured(work, hidden=False)
        if made.graph is None:
            raise CaptureDisturbed(made.error) if made.disturbed else NotGraphable(made.error)
        if made.graph.only_to_read:
            raise NotGraphable(f"the graph cannot be replayed here: {made.graph.only_to_read}")
        return made.graph, made.result

    def _captured(self, work: Callable[[Stream], Any], *, hidden: bool) -> _Made:
        self._open_pool()
        with _hidden_capture(hidden) as asked:
            made = None if self._by_torch else self._capture_here(work)
            if made is None:
                self._by_torch = True
                made = self._capture_by_torch(work)
        made.asked = bool(asked)
        return made

    def _open_pool(self) -> None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            if _begin_pool is None:
                self._keeper = self._trivial(self._pool)
            else:
                self._keeper = _Kept()
                with self._allocating(self._keeper):
                    pass

    @contextmanager
    def _allocating(self, owner: object) -> Iterator[None]:
        """This thread's tensors come out of the pool, which stays as long as the owner does."""
        _begin_pool(self._index, self._pool)
        release = weakref.finalize(owner, torch._C._cuda_releasePool, self._index, self._pool)
        release.atexit = False
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self._index, self._pool)

    def _capture_here(self, work: Callable[[Stream], Any]) -> _Made | None:
        """A capture by this library, into the pool of torch's allocator.

        torch's own captures take the default generator, so that other threads which draw random
        numbers meanwhile get an exception; this one leaves the generators alone.  None if torch
        must capture: the work draws random numbers, or copies from memory of the host, which torch
        keeps for a graph.
        """
        side, stream = self._beside()
        current, owner = torch.cuda.current_stream(self._index), _Kept()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side), _undisturbed(), self._allocating(owner):
                graph, result = captured(stream, work, explained)
        except NotGraphable as broken:
            drew = _NOT_REGISTERED in str(broken.__cause__)
            other = isinstance(broken, CaptureDisturbed)
            return None if drew else _Made(error=str(broken), disturbed=other)
        finally:
            current.wait_stream(side)
        nodes = graph.nodes
        if any(drawing(nodes, self._device.driver.memory_range)) or _copies_elsewhere(nodes):
            return None
        # Adopted: what torch's kernels point at is not known to this library.
        adopted = Graph.adopt(self._device, int(graph.handle), owner=(graph, owner))
        return _Made(adopted, result)

    def _capture_by_torch(self, work: Callable[[Stream], Any]) -> _Made:
        side, stream = self._beside()
        current = torch.cuda.current_stream(self._index)
        owner = torch.cuda.CUDAGraph(keep_graph=True)
        for generator in self._generators:
            owner.register_generator_state(generator)
        side.wait_stream(current)
        made = _Made()
        beside = torch.cuda.Stream(self._index)
        with torch.cuda.stream(side), _undisturbed():
            owner.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                with self._unseeded(beside):
                    made.result = work(stream)
            except Exception as raised:
                made.error, made.disturbed = explained(raised), disturbed(raised)
            except BaseException:
                self._end(owner)
                raise
            ended = self._end(owner)
        current.wait_stream(side)
        if not made.error and ended is not None:
            reason = str(ended).strip().partition("\n")[0]
            made.error, made.disturbed = f"the capture failed: {reason}", disturbed(ended)
        if not made.error:
            graph = adopt_graph(self._device, owner, generators=self._generators)
            if len(graph):
                made.graph = graph
            else:
                made.error = "the capture is empty: nothing ran on the caller's current stream"
        return made

    @contextmanager
    def _unseeded(self, beside: Any) -> Iterator[None]:
        """In a capture: the generators have a seed that nobody gives them.  torch takes no notice
        there of `manual_seed` with the seed that a generator has, and refuses another one; no graph
        holds a seed.  Other threads cannot draw meanwhile.

        `beside`: a stream that does not capture, where torch lets a generator be set."""
        generators = [torch.cuda.default_generators[self._index], *self._generators]
        with torch.cuda.stream(beside):
            # Others of the same states: cuDNN begins anew with a generator that is given a seed.
            states = [generator.graphsafe_get_state() for generator in generators]
            saved = [state.get_state() for state in states]
            for state in states:
                state.manual_seed(_NO_SEED)
        try:
            yield
        finally:
            with torch.cuda.stream(beside):
                for state, before in zip(states, saved, strict=True):
                    if state.initial_seed() == _NO_SEED:  # else another thread has given it one
                        state.set_state(before)

    def _end(self, owner: Any) -> RuntimeError | None:
        """Ends a capture; torch's error if it was broken, after mending what that leaves."""
        try:
            owner.capture_end()
        except RuntimeError as error:
            self._mend()
            return error
        return None

    def _mend(self) -> None:
        """torch ends a broken capture half: its allocator goes on filling the pool, and its
        generators take themselves for captured, so that the next eager draw raises.  A capture that
        works puts the generators right; the pool is left to the graphs that have it."""
        pool, self._pool = self._pool, None
        for call in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            try:
                call(self._index, pool)
            except RuntimeError:
                break  # this torch has done it
        if torch.cuda.is_current_stream_capturing():  # it still captures: leave it
            self._side = None
        self._trivial(torch.cuda.graph_pool_handle())
        self._beside()[0].synchronize()

    def _trivial(self, pool: Any) -> Any:
        """A graph that does next to nothing, of a pool."""
        with torch.cuda.stream(self._beside()[0]):
            nothing = torch.zeros(1, device=f"cuda:{self._index}")
            owner = torch.cuda.CUDAGraph(keep_graph=True)
            for generator in self._generators:
                owner.register_generator_state(generator)
            owner.capture_begin(pool=pool, capture_error_mode="thread_local")
            nothing.add_(1)
            owner.capture_end()
        return owner


@contextmanager
def _hidden_capture(hidden: bool) -> Iterator[list[bool]]:
    """Gives a list that is filled if transformers asks whether the stream captures.

    It asks before it looks at data (whether a mask masks anything), and runs other kernels than
    eagerly if it must not look.  While this is `hidden`, it is told that nothing captures, so that
    it does what it does eagerly: the capture has the same kernels, or fails where it does look.
    """
    asked: list[bool] = []
    module: Any = sys.modules.get("transformers.utils.import_utils")
    question = getattr(module, "is_cuda_stream_capturing", None)
    if not hidden or question is None:
        yield asked
        return
    thread = threading.get_ident()

    def answer() -> bool:
        if threading.get_ident() != thread:
            return bool(question())
        asked.append(True)
        return False

    module.is_cuda_stream_capturing = answer
    try:
        yield asked
    finally:
        module.is_cuda_stream_capturing = question


def _copies_elsewhere(nodes: Sequence[Node]) -> bool:
    """Whether a graph copies from or to memory that is not of torch's allocator on a device."""
    copies = [n.memcpy for n in every_node(nodes) if n.kind is NodeKind.MEMCPY]
    found = [address for copy in copies for address in (copy.src, copy.dst)]
    if not found:
        return False
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # another allocator than torch's own
        return True
    ranges = [MemoryRange(s["address"], s["total_size"]) for s in segments]
    return not all(any(r.holds(address) for r in ranges) for address in found)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection, which may destroy graphs, and no cache of autocast, whose tensors
    would be gone at the replay."""
    caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    if torch.is_autocast_enabled("cuda"):
        torch.clear_autocast_cache()
    try:
        with no_collection():
            yield
    finally:
        torch.set_autocast_cache_enabled(caching)


def explained(error: Exception) -> str:
    """What broke a capture, and the line of the caller's code where it did."""
    return captures.explained(
        error,
        torch,
        ".item(), a print, nonzero, a copy to the CPU, a generator that was not given, or one that "
        "is given a seed",
    )
