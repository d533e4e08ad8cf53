"""`graphed`: a function of CuPy that replays a graph of itself.

`interop.reading` makes keys, captures and replays; this file does CuPy's part.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal

import cupy
import numpy as np

from ostinato import Device, Graph, GraphCache, MemoryRange, Node, NodeKind, Stream
from ostinato.errors import InputError, Status
from ostinato.interop.captures import (
    captured,
    explained,
    keep_programs,
    no_collection,
    of_capture,
    replaced,
)
from ostinato.interop.cupy.adopting import external_stream
from ostinato.interop.cupy.waits import (
    SegmentedRun,
    StreamUse,
    Surroundings,
    operations,
)
from ostinato.interop.graphed import Graphed
from ostinato.interop.reading.chains import ChainBuilder
from ostinato.interop.reading.library import (
    CaptureDisturbed,
    Devices,
    GraphedOptions,
    Library,
    NotGraphable,
    RunChain,
    WaitsForDevice,
    cuda_index,
    living_objects,
    name_of,
    own_cache,
)
from ostinato.interop.reading.moves import dense
from ostinato.lowlevel import every_node
from ostinato.step import Buckets

_names = itertools.count()
_devices = Devices(lambda index: cupy.cuda.runtime.free(0))
_captures = threading.RLock()


def graphed(
    function: Callable[..., Any] | None = None,
    /,
    *,
    static: Sequence[str] = (),
    dynamic: Mapping[str, int] | None = None,
    buckets: Buckets | None = None,
    padding: Mapping[str, float] | None = None,
    results: str = "clone",
    writes: bool = True,
    verify: Literal["off", "first"] | int = "off",
    tolerance: tuple[float, float] | None = None,
    strict: bool = False,
    guard: bool = True,
    cache: GraphCache | None = None,
    budget: int | str | None = None,
    device: Device | None = None,
    name: str | None = None,
) -> Any:
    """Wraps a function so that it replays a graph of itself; called like the original.

        step = graphed(function)
        y = step(x)

    The options are those of `interop.torch.graphed`, but for:

    * `writes`: whether the function may write arrays that it is given.  CuPy does not count writes,
      so all arguments are copied back after each replay; False saves that.
    * Random numbers of cuRAND (`cupy.random.rand` and others of the legacy interface) would be the
      same in each replay: such a function runs eagerly, with the reason.

    Raises InputError for options that do not fit the function.
    """
    given = {name: value for name, value in locals().items() if name != "function"}
    if function is None:
        return lambda f: graphed(f, **given)
    if isinstance(function, Graphed):
        raise InputError(f"{function!r} is graphed already")
    index = None if device is None else cuda_index(device)
    unavailable = ""
    try:
        current = int(cupy.cuda.runtime.getDevice())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        unavailable = f"CuPy has no CUDA device here ({error}), so there is nothing to capture"
        device = device or _devices.of(None)
    else:
        index = current if index is None else index
        device = device or _devices.of(index)
    options = GraphedOptions.given(given)
    if name is None:
        name = name_of(function, next(_names))
    kept = cache or own_cache(device, budget)
    library = CuPy(device, index or 0, writes=writes)
    rest: dict[str, Any] = {"owns_cache": cache is None, "unavailable": unavailable}
    return Graphed(function, library, options, kept, name=name, **rest)


class _Piece(cupy.cuda.Memory):  # type: ignore[misc]  # CuPy has no types
    """Memory of the pool; unlike CuPy's own class it can be referenced weakly."""


class CuPy(Library):
    """CuPy's operations for `Graphed`.  Arrays take no attributes of the user's.  Functions that
    draw random numbers run eagerly, so no states of generators are kept."""

    array_type = cupy.ndarray
    plain: tuple[type, ...] = (np.dtype, np.generic)

    def __init__(self, device: Device, index: int, *, writes: bool) -> None:
        self.device, self.index = device, index
        self._writes = writes
        self._streams: dict[int, Stream] = {}
        self._side: Stream | None = None
        self._outside: Any = None
        self._pool = cupy.cuda.MemoryPool(self._allocate)
        """The pool of all memory that is allocated in captures.  Only graphs use it, so the memory
        that a graph points at is never given to other arrays."""
        self._pieces: weakref.WeakSet[_Piece] = weakref.WeakSet()
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        """The graphs that use the pool."""

    def _allocate(self, nbytes: int) -> Any:
        """Allocates memory for the pool, also while this thread captures."""
        with self.device.context.relaxed():
            piece = _Piece(nbytes)
        self._pieces.add(piece)
        return cupy.cuda.MemoryPointer(piece, 0)

    # --- values
    def is_array(self, value: object, /) -> bool:
        return isinstance(value, cupy.ndarray)

    def signature(self, array: Any, /) -> tuple[Any, ...]:
        return array.shape, array.dtype, array.strides, array.data.device_id

    def address(self, array: Any, /) -> int:
        return int(array.data.ptr)

    def storage(self, array: Any, /) -> MemoryRange:
        memory = array.data.mem
        return MemoryRange(int(memory.ptr), int(memory.size))

    def memory(self, array: Any, /) -> list[tuple[MemoryRange, object]]:
        # None while another thread is making the array.
        memory = None if array.data is None else array.data.mem
        if memory is None:
            return []
        return [(MemoryRange(int(memory.ptr), int(memory.size)), memory)]

    def offset(self, array: Any, /) -> int:
        return int(array.data.ptr) - int(array.data.mem.ptr)

    def refusal(self, array: Any, /) -> str:
        kind = type(array)
        if kind is not cupy.ndarray:
            return f"an array of the subclass {kind.__module__}.{kind.__qualname__}"
        if array.data.device_id != self.index:
            return f"an array on device {array.data.device_id}; the graphs are of {self.index}"
        return ""

    def version(self, array: Any, /) -> int | None:
        return None if self._writes else 0

    def modes(self) -> Hashable:
        return int(cupy.cuda.runtime.getDevice())

    # --- streams
    def capturing(self) -> bool:
        stream = cupy.cuda.get_current_stream()
        return bool(stream.ptr) and bool(stream.is_capturing())

    def stream(self) -> Stream:
        theirs = cupy.cuda.get_current_stream()
        known = self._streams.get(theirs.ptr)
        if known is None:
            known = self._streams[theirs.ptr] = self.device.adopt_stream(theirs)
        return known

    def wait(self, stream: Stream, other: Stream) -> None:
        stream.wait(other.record())

    def _beside(self) -> Stream:
        if self._side is None:
            self._side = self.device.create_stream()
        return self._side

    def run_beside(self, work: Callable[[], Any]) -> Any:
        # On another stream, work of the function on blocking streams would not wait for the rest.
        return work()

    # --- captures
    @contextmanager
    def _capturing(self) -> Iterator[tuple[Stream, Surroundings]]:
        """Makes the side stream current, whose work may be captured in the block."""
        side, current = self._beside(), self.stream()
        side.wait(current.record())
        with (
            _captures,
            no_collection(),
            external_stream(side),
            cupy.cuda.using_allocator(self._pool.malloc),
        ):
            yield side, Surroundings(self._pieces, self.device.driver.memory_range)

    def capture(self, work: Callable[[Stream], Any]) -> tuple[Graph, Any]:
        refused: list[Exception] = []

        def noted(operation: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    return operation(*args, **kwargs)
                except Exception as error:
                    if of_capture(error):
                        refused.append(error)
                    raise

            return run

        def refuse(why: str) -> None:
            refused.append(NotGraphable(why))
            raise refused[-1]

        thread = threading.get_ident()
        with self._capturing() as (side, around):
            use = StreamUse(side, lambda: threading.get_ident() == thread, refuse)
            try:
                with replaced(operations(noted, noted, noted, noted) | use.followed()):
                    graph, result = captured(side, work, _explained)
            except NotGraphable as error:
                _settle(error)
                if not (isinstance(error, CaptureDisturbed) and refused):
                    raise
                # Before a copy from the host CuPy makes calls that break the capture.
                raise WaitsForDevice(_explained(refused[0])) from error
        use.require_no_events()
        if refused:  # and the function went on in another way than it does eagerly
            raise WaitsForDevice(_explained(refused[0]))
        around.pointed_at(graph.nodes(), copies=True)
        return self._finished(graph, around), result

    def _finished(self, graph: Graph, around: Surroundings) -> Graph:
        """Returns a captured graph as one that keeps what its nodes use.  Raises NotGraphable."""
        nodes = graph.nodes()
        kinds = {node.kind for node in every_node(nodes)}
        if NodeKind.HOST in kinds:
            raise NotGraphable(
                "it calls a function of the host (launch_host_func), which CuPy does not keep for "
                "a graph"
            )
        if NodeKind.MEM_ALLOC in kinds:
            raise NotGraphable("it allocates with an asynchronous allocator of its own")
        drawing = _drawing(nodes)
        if drawing is not None:
            raise NotGraphable(
                f"node {drawing.index} ({drawing.name}) draws random numbers with cuRAND, which "
                "would be the same in each replay; draw them outside, and give them as an argument"
            )
        # A plan of cuFFT that ends takes what its kernels use with it; CuPy keeps the last 16.
        cufft: Any = sys.modules.get("cupy.cuda.cufft")
        plans = [*living_objects(cufft.Plan1d, cufft.PlanNd)] if cufft else []
        # Adopted, since ostinato cannot read what CuPy's kernels point at.
        owner = graph, self._pool, plans, around.constants
        adopted = Graph.adopt(self.device, int(graph.handle), owner=owner)
        self._graphs.add(graph)  # which the owner keeps
        keep_programs([(adopted, nodes)])
        return adopted

    @property
    def chain(self) -> RunChain:
        return self._chain

    def _chain(self, work: Callable[[Stream], Any], parts: ChainBuilder) -> tuple[Any, None]:
        current = self.stream()
        try:
            with self._capturing() as (side, around):
                finish = partial(self._finished, around=around)
                if self._outside is None:
                    self._outside = cupy.cuda.Stream(non_blocking=True)
                how = side, current, self._outside, parts, around, finish, self.out_of_memory
                return SegmentedRun(*how).run(lambda: work(side)), None
        except NotGraphable as error:
            _settle(error)
            raise
        finally:
            current.wait(self._beside().record())

    def out_of_memory(self, error: BaseException, /) -> bool:
        return isinstance(error, MemoryError) or (
            isinstance(error, cupy.cuda.runtime.CUDARuntimeError)
            and error.status == Status.OUT_OF_MEMORY
        )

    def trim(self, *, short: bool) -> None:
        with _captures, self.device.context.relaxed():
            if not self._graphs:  # what is free in the pool is free between replays only
                self._pool.free_all_blocks()
            if short:
                cupy.get_default_memory_pool().free_all_blocks()

    # --- memory
    def buffer(self, array: Any, shape: Sequence[int] | None) -> Any:
        return cupy.empty_like(array) if shape is None else cupy.zeros(tuple(shape), array.dtype)

    def stager(self, buffers: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
        into, copy = list(buffers), cupy.copyto

        def stage(arrays: Sequence[Any]) -> None:
            for buffer, array in zip(into, arrays, strict=True):
                copy(buffer, array)

        return stage

    def copy(self, into: Any, array: Any) -> None:
        cupy.copyto(into, array)

    def clone(self, array: Any, /) -> Any:
        return array.copy("K")

    def alias(self, array: Any, /) -> Any:
        return array.view()

    def extent(self, array: Any, /) -> int | None:
        whole = dense(array.shape, array.strides, array.itemsize)
        return int(array.nbytes) if whole else None

    def recipe(self, array: Any, /) -> tuple[Any, ...]:
        axes = sorted(range(array.ndim), key=lambda i: -array.strides[i])  # equal strides: in order
        shape = tuple([array.shape[i] for i in axes])
        places = None if axes == [*range(array.ndim)] else tuple(map(axes.index, range(array.ndim)))
        return shape, array.dtype, places

    def new(self, *recipe: Any) -> Any:
        shape, dtype, places = recipe
        made = cupy.empty(shape, dtype)
        return made if places is None else made.transpose(places)

    def narrow(self, array: Any, axis: int, size: int) -> Any:
        return array[(slice(None),) * axis + (slice(size),)]

    def rest(self, array: Any, axis: int, size: int) -> Any:
        return array[(slice(None),) * axis + (slice(size, None),)]

    def fill(self, array: Any, value: float) -> None:
        array.fill(value)

    def poison(self, rest: Any, front: Any, axis: int) -> None:
        if not rest.size:
            return
        if rest.dtype.kind in "fc":
            rest.fill(float("nan"))
        elif front.size:
            cupy.copyto(rest, self.rest(front, axis, front.shape[axis] - 1))

    def difference(self, one: Any, other: Any, tolerance: tuple[float, float] | None) -> str:
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{one.dtype} of shape {one.shape} against {other.dtype} of shape {other.shape}"
        if not one.size:
            return ""
        if tolerance is not None and one.dtype.kind in "fc":
            relative, absolute = tolerance
            same = cupy.isclose(one, other, rtol=relative, atol=absolute, equal_nan=True)
        else:
            bits = [cupy.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (one, other)]
            same = (bits[0] == bits[1]).reshape(-1, one.dtype.itemsize).all(axis=1)
            same = same.reshape(one.shape)
        wrong = int((~same).sum())
        if not wrong:
            return ""
        where = np.unravel_index(int(same.argmin()), one.shape)
        return (
            f"{wrong} of {one.size} elements, the first at {[*map(int, where)]}: "
            f"{one[where].item()} against {other[where].item()}"
        )


def _explained(error: Exception) -> str:
    return explained(error, cupy, ".item(), .get(), a print, nonzero, a copy to the host")


def _settle(error: NotGraphable) -> None:
    """Clears errors that calls in a broken capture have left pending, which a library would raise
    in its next call.  cuRAND has a CUDA runtime of its own, with errors of its own."""
    runtime = cupy.cuda.runtime
    with suppress(runtime.CUDARuntimeError):
        runtime.deviceGetAttribute(-1, -1)  # CuPy clears the error that it raises
    if "curand" in str(error).lower():
        with suppress(Exception):
            cupy.random.RandomState(0).rand(1)


def _drawing(nodes: Sequence[Node]) -> Node | None:
    """Returns a node of cuRAND, or None. cuRAND's generators count on the host what they have
    drawn."""
    parts = "curand", "gen_sequenced", "generate_seed"
    return next((n for n in every_node(nodes) if any(part in n.name for part in parts)), None)
