"""Finds where a function of CuPy waits for the device, while it runs as a chain of graphs.

CuPy has no mode that sees its operations.  But whatever the host reads of an array goes through
`ndarray.get`: `float(x)`, `if x.any():`, `x.item()`, `x.tolist()`, `asnumpy(x)`, and the count of a
mask, which decides the shape of `x[mask]`.  So this method is replaced while a chain is built: a
read ends the capture, whose graph is launched, runs, and is noted, and the next capture begins.

`synchronize()` of a stream, an event or the device is such a point too, which each replay repeats.
Since callers may rely on it, a replay then waits at its end as well.  Another call that waits
breaks the capture, of which the GPU has run nothing then.  What the graphs before it have written
is put back, and the call is made eagerly.

CuPy does not say what its kernels write.  So all memory that a graph points at counts as written,
but for the inputs of ufuncs.

It refuses to capture products and decompositions (cuBLAS, cuSOLVER).  These run between two graphs
too, in each replay again, which copies their results to where the next graph reads them.

Nor does it capture copies from the host: arrays that are made of lists and arrays of NumPy, these
as indices, `ndarray.set`.  They are made once, on another stream beside the capture; a graph uses
the copy, or copies from it.  A list has its content from the function's code and from what guards
and waits compare; an array of NumPy that outlives the call is compared in each replay as well.
"""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import cupy
import cupyx
import numpy as np

from ostinato import Capture, Graph, MemoryRange, Node, NodeKind, Stream
from ostinato.errors import ContextPoisonedError
from ostinato.interop import captures as rules
from ostinato.interop.reading.chains import ChainBuilder, Wait, as_value, error_value
from ostinato.interop.reading.conditions import Scalar
from ostinato.interop.reading.library import (
    NoMemory,
    NotGraphable,
    WaitsForDevice,
    living_objects,
)
from ostinato.interop.reading.moves import NAMES
from ostinato.interop.reading.slots import points_at, words_of_nodes
from ostinato.interop.reading.tails import ResultPlace
from ostinato.lowlevel import every_node

_DEFAULT = 2
"""The default streams have handles up to this (cudaStreamPerThread)."""
_ADDRESSES = np.array([1 << 32, 1 << 57], np.uint64)
"""Words that may be addresses lie between these."""
_PRODUCTS = "dot einsum inner kron matmul tensordot vdot"
_DECOMPOSITIONS = (
    "cholesky cond det eigh eigvalsh inv lstsq matmul matrix_power matrix_rank pinv qr slogdet "
    "solve svd tensorinv tensorsolve"
)
_METHODS = "__matmul__ __rmatmul__ dot"
"""Names of what CuPy refuses to do in a capture: of `cupy`, of `cupy.linalg`, of arrays."""
_TAKING = "__getitem__ __setitem__ set take"
"""Names of methods of arrays that copy their arguments from the host."""
_PLAIN = bool, int, float, complex, np.generic
_NUMBERS = {bool: "__bool__", complex: "__complex__", float: "__float__", int: "__int__"}
"""Types, each with the method of an array of the host that does what a call of the type does."""


class Surroundings:
    """The memory of the arrays that live now.  It stays allocated, so that no memory of a capture
    has its addresses.

    `own`: the memory that captures allocate from.  `allocation`: returns the driver's allocation at
    an address, or None."""

    def __init__(self, own: Iterable[Any], allocation: Callable[[int], MemoryRange | None]) -> None:
        self._own, self._allocation = own, allocation
        arrays = [each.data.mem for each in living_objects(cupy.ndarray) if each.data is not None]
        self._memory = {_range(each): each for each in arrays if each.size}
        self.constants: list[Any] = []
        """Memory that was allocated for captures, but not where they allocate."""
        every = [each for each in vars(cupy).values() if isinstance(each, cupy.ufunc)]
        self._ufuncs = {ufunc.name: ufunc for ufunc in every}

    def pointed_at(self, nodes: Sequence[Node], *, copies: bool = False) -> dict[int, Any]:
        """Returns the memory from before that nodes may write, by address.

        Raises NotGraphable if that may be memory that is neither from before nor of captures; with
        `copies` only if they copy from it or to it, as from memory of the host."""
        nodes = [node for node in every_node(nodes) if node.name not in NAMES]
        if copies:
            nodes = [node for node in nodes if node.kind is NodeKind.MEMCPY]
        pointers = [self._writing(node) for node in nodes]
        words = np.unique(np.concatenate([np.empty(0, np.uint64), *pointers]))
        found = {memory: each for memory, each in self._memory.items() if points_at(words, memory)}
        for memory in (*found, *map(_range, (*self._own, *self.constants))):
            words = words[(words < memory.address) | (words >= memory.end)]
        for node, pointed in zip(nodes, pointers, strict=True):
            copied = node.kind is NodeKind.MEMCPY
            for word in np.intersect1d(pointed, words).tolist():
                if copied or self._allocation(word) is not None:
                    what = "copies from or to memory" if copied else "points at memory"
                    raise NotGraphable(
                        f"node {node.index} ({node.name}) {what} that is of no array of CuPy"
                    )
        return {memory.address: each for memory, each in found.items()}

    def _writing(self, node: Node) -> Any:
        """Returns the words of a node that may be addresses of memory that it writes."""
        words = words_of_nodes([node])
        ufunc = self._ufuncs.get(node.name.partition("__")[0])
        if ufunc is not None and node.kind is NodeKind.KERNEL:
            data, layout = node.kernel.arguments.data, node.kernel.arguments.layout
            if len(layout) == ufunc.nin + ufunc.nout + 1:  # inputs, outputs, the indexer
                slots = layout[ufunc.nin : -1]
                outputs = [np.frombuffer(data, np.uint64, e.size // 8, e.offset) for e in slots]
                words = np.unique(np.concatenate(outputs))
        return words[slice(*np.searchsorted(words, _ADDRESSES))]


class SegmentedRun:
    """Cuts a run into captures on a stream.

    `current`: the caller's stream.  `outside`: a stream for work beside the captures.
    `finish`: makes the graph of a capture one that can be replayed; raises NotGraphable."""

    def __init__(
        self,
        side: Stream,
        current: Stream,
        outside: Any,
        parts: ChainBuilder,
        around: Surroundings,
        finish: Callable[[Graph], Graph],
        out_of_memory: Callable[[BaseException], bool],
    ) -> None:
        self._side, self._parts, self._around, self._finish = side, parts, around, finish
        self._outside, self._out_of_memory = outside, out_of_memory
        self._current = current
        self._use = StreamUse(side, self._is_own, lambda why: self._fail(NotGraphable(why)))
        self._thread = threading.get_ident()
        self._capture = Capture(side)
        self._between = False
        """True between two captures, and while work runs beside one."""
        self._failure: NotGraphable | None = None
        """The error that ends the run."""
        self._written: dict[int, tuple[Any, Any]] = {}
        """The memory from before the run that graphs point at, by address: an array of its bytes,
        and a copy from before."""

    def run(self, work: Callable[[], Any]) -> Any:
        """Runs work in captures.  If the work raises an error, all that it submitted before runs.

        Raises the errors of the work; NotGraphable for an error that a capture has caused, with all
        memory as before."""
        try:
            with self._noticed():
                self._start()
                try:
                    result = work()
                except Exception as error:
                    self._failure = self._failure or self._caused(error)
                    self._cut()
                    raise
                self._use.require_no_events()
                self._cut()
                return result
        except ContextPoisonedError:
            raise
        except BaseException as error:
            self._capture.abort()
            if self._failure is None and isinstance(error, Exception):
                raise
            for whole, before in reversed(self._written.values()):  # some may overlap
                cupy.copyto(whole, before)
            if self._failure is None or error is self._failure:
                raise
            raise self._failure from error
        finally:
            self._capture.abort()  # nothing to do if it has ended
            # The function may have kept one of the replaced methods.
            self._written, self._thread = {}, 0

    def _start(self) -> None:
        self._capture = Capture(self._side)
        self._capture.begin()
        self._parts.begun(self._side)

    def _caused(self, error: Exception) -> NotGraphable | None:
        """Returns the error that ends the run if a capture has caused `error`; else None."""
        text = rules.explained(error, cupy, "a synchronisation, a product, a copy from the host")
        if self._out_of_memory(error):
            return NoMemory(text)
        broken = self._side.capture_info().status.name == "INVALIDATED"
        return NotGraphable(text) if broken or rules.of_capture(error) else None

    def _cut(self) -> None:
        """Ends the capture, and launches its graph.  Raises the error that ends the run."""
        if self._failure is not None:
            raise self._failure
        info, driver = self._side.capture_info(), self._side.context.driver
        if info.status.name == "ACTIVE" and not driver.graph_nodes(info.graph):
            self._capture.abort()  # nothing was captured
            return
        try:
            graph = self._capture.end()
            # What is free in the pool of captures is free after this graph, which has not run yet.
            with _default_pool():
                for address, memory in self._around.pointed_at(graph.nodes()).items():
                    if address not in self._written:
                        place = cupy.cuda.MemoryPointer(memory, 0)
                        whole = cupy.ndarray(memory.size, np.uint8, memptr=place)
                        self._written[address] = whole, whole.copy()
            self._parts.submitted(self._finish(graph), self._side)
        except ContextPoisonedError:
            raise
        except Exception as error:
            short = self._out_of_memory(error)
            kind = NoMemory if short else NotGraphable
            self._fail(kind(f"a part of the call could not be a graph: {error}"))

    def _fail(self, error: NotGraphable) -> None:
        """Raises an error that ends the run.  If the work catches it, a capture takes what it still
        submits, and is dropped."""
        self._failure = error
        self._capture.abort()
        self._capture = Capture(self._side)
        self._capture.begin()
        raise error

    def _is_own(self) -> bool:
        return threading.get_ident() == self._thread and not self._between

    # --- what no graph holds
    def _noticed(self) -> AbstractContextManager[None]:
        """Replaces, in the block, what must run between two captures."""

        def between(
            handle: Callable[..., Any], fits: Callable[..., bool]
        ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            def wrap(operation: Callable[..., Any]) -> Callable[..., Any]:
                def run(*args: Any, **kwargs: Any) -> Any:
                    if not self._is_own() or not fits(*args, **kwargs):
                        return operation(*args, **kwargs)
                    return handle(operation, args, kwargs, sys._getframe(1))

                return run

            return wrap

        def always(*args: Any, **kwargs: Any) -> bool:
            return True

        refused = operations(
            between(self._read, always),
            between(self._run_apart, _makes_results),
            between(self._make, lambda value=None, *a, **k: _is_of_host(value)),
            between(self._take, always),
        )
        table = refused | synchronisations(between(self._synchronise, always))
        return rules.replaced(table | self._use.followed())

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Ends the capture before the block, and begins another one after it."""
        self._cut()
        self._between = True
        try:
            yield
        finally:
            self._between = False
            self._start()

    def _note(
        self,
        line: str,
        value: Any,
        again: Any,
        read: Any,
        place: ResultPlace | None = None,
        scalar: Scalar | None = None,
    ) -> None:
        reads = frozenset([int(each.data.mem.ptr) for each in read])
        written = frozenset(self._written)
        self._parts.waited(Wait(line, value, again, place, written, reads=reads, scalar=scalar))

    def _read(self, get: Callable[..., Any], args: Any, kwargs: Any, frame: Any) -> Any:
        """Reads an array (`ndarray.get`)."""
        line, place = rules.line_outside("cupy", "cupyx"), self._parts.place(frame, _gives)
        order = _plain_order(*args[1:], **kwargs)
        if not order:
            self._fail(
                NotGraphable(f"{line} reads into an array of the host, or on another stream")
            )
        if not args[0].size:
            return np.empty(args[0].shape, args[0].dtype)
        other = args[0].view()  # the shape of the array may be changed in place

        def seen(found: Any) -> Any:
            return found if place is not None else found.tobytes()

        def number(content: bytes) -> Any:
            return seen(np.frombuffer(content, other.dtype).reshape(other.shape).copy())

        with self._paused():
            found, scalar = get(other, None, order), None
            if other.size == 1 and other.itemsize <= 16:
                address, content = int(other.data.ptr), found.tobytes()
                scalar = Scalar(address, content, number, compared=place is None)
            again = lambda: seen(get(other, None, order))  # noqa: E731
            self._note(line, found.tobytes(), again, [other], place, scalar)
        return found

    def _synchronise(self, operation: Callable[..., Any], args: Any, kwargs: Any, _: Any) -> None:
        """Waits for a stream, an event or the device."""
        line = rules.line_outside("cupy", "cupyx")
        again: Callable[[], Any] = partial(operation, *args, **kwargs)
        streams = cupy.cuda.Stream | cupy.cuda.ExternalStream
        waited = args[0].ptr if args and isinstance(args[0], streams) else None
        if waited == int(self._side.handle):  # current in captures, as the caller's is in a replay
            again = _wait_for_current
        elif waited and waited != int(self._current.handle):
            self._fail(NotGraphable(f"{line} waits for a stream that is not the current one"))
        with self._paused():
            try:
                operation(*args, **kwargs)
            except Exception as error:
                failed: Exception | None = error
            else:
                failed = None
                # What it returns, nothing, is not compared.
                self._note(line, None, again, (), ResultPlace((), ()))
                self._parts.at_end = _wait_for_current
        if failed is not None:
            self._fail(NotGraphable(f"{line} raised {type(failed).__name__}: {failed}"))

    def _run_apart(self, operation: Callable[..., Any], args: Any, kwargs: Any, frame: Any) -> Any:
        """Runs an operation that CuPy refuses to capture; a replay copies what it gives then."""
        line = rules.line_outside("cupy", "cupyx")
        given = [*map(_alias, args)], {name: _alias(each) for name, each in kwargs.items()}

        def run() -> Any:
            with _checked():
                return operation(*given[0], **given[1])

        def again() -> Hashable:
            try:
                new = _flat(run())
            except Exception as error:
                return error_value(error)
            if _seen(new) == value:
                for into, one in zip(results, new, strict=True):
                    if _is_array(into):
                        cupy.copyto(into, one)
            return _seen(new)

        with self._paused():
            try:
                made = run()
            except Exception as error:
                failed: Exception | None = error
            else:
                failed, results = None, [*map(_alias, _flat(made))]
                value = _seen(results)
                read = [each for one in (*given[0], *given[1].values()) for each in _flat(one)]
                self._note(line, value, again, filter(_is_array, read))
        if failed is not None:
            self._fail(WaitsForDevice(f"{line} raised {type(failed).__name__}: {failed}"))
        return made

    def _make(self, operation: Callable[..., Any], args: Any, kwargs: Any, _: Any) -> Any:
        """Makes an array of what is on the host (`cupy.array`); a graph makes the call's own."""
        return self._constant(operation, *args, **kwargs).copy("K")

    def _constant(
        self, operation: Callable[..., Any], source: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Makes an array that graphs only read, beside the capture."""
        # The graphs before write in each replay what is free now in the pool of captures.
        self._between = True
        try:
            with self._side.context.relaxed(), self._outside, _default_pool():
                made = operation(source, *args, **kwargs)
                self._outside.synchronize()
        finally:
            self._between = False
        self._around.constants.append(made.data.mem)
        arrays = [*_arrays_of_host(source)]
        if arrays:
            again = _content(arrays)
            # In a replay it is compared before the graph of this capture runs.
            self._note(rules.line_outside("cupy", "cupyx"), again(), again, ())
        return made

    def _take(self, operation: Callable[..., Any], args: Any, kwargs: Any, _: Any) -> Any:
        """Runs a method of an array with copies of the arguments that are on the host."""
        array, name, given = args[0], operation.__name__, [*args]
        make = partial(self._constant, cupy._core.array)
        if len(args) == 1:  # by keyword
            return operation(*args, **kwargs)
        if name == "set":
            if _sets(*args, **kwargs):
                return cupy.copyto(array, make(args[1]))
        elif name == "take":
            if _is_of_host(args[1]):
                given[1] = make(args[1], dtype=int)
        else:
            key = args[1] if isinstance(args[1], tuple) else (args[1],)
            places = [make(each) if _is_of_host(each) else each for each in key]
            for index, (place, each) in enumerate(zip(places, key, strict=True)):
                if place is not each and not (place.size or isinstance(each, np.ndarray)):
                    places[index] = place.astype(np.int32)  # NumPy's type for no numbers is float
            if any(map(operator.is_not, places, key)):
                given[1] = tuple(places)
            if len(args) > 2 and any(map(_is_array, places)) and _is_of_host(args[2]):
                given[2] = make(args[2], dtype=array.dtype)
        return operation(*given, **kwargs)


def _makes_results(*args: Any, **kwargs: Any) -> bool:
    """True if an operation writes none of its arguments: a third array is where `dot` writes."""
    return "out" not in kwargs and not (len(args) == 3 and all(map(_is_array, args)))


def _plain_order(
    stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True
) -> str:
    """Returns the order for a new array of the host that is complete; "" for other reads."""
    return order if stream is None and out is None and blocking else ""


_Wrap: TypeAlias = Callable[[Any], Any]
_Table: TypeAlias = dict[tuple[Any, str], Any]
"""Functions, by the objects and the names of the attributes that they replace."""


def operations(read: _Wrap, apart: _Wrap, make: _Wrap, take: _Wrap) -> _Table:
    """Returns what CuPy refuses to do in a capture as functions make it of what it is: reads of
    arrays, operations of cuBLAS and cuSOLVER, and copies from the host."""
    return _wrapped(
        (cupy.ndarray, "get", read),
        (cupy.ndarray, _METHODS, apart),
        (cupy, _PRODUCTS, apart),
        (cupy.linalg, _DECOMPOSITIONS, apart),
        (cupy._core, "array", make),
        (cupy.ndarray, _TAKING, take),
    )


def synchronisations(wrap: _Wrap) -> _Table:
    """Does as `operations` with what waits and breaks a capture."""
    cuda, device = cupy.cuda, cupy.cuda.Device

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, device)

    # A method of the class itself cannot be replaced.
    its = Kind("Device", (device,), {"synchronize": wrap(device.synchronize)})
    return _wrapped(
        (cuda.Event, "synchronize", wrap),
        (cuda.Stream, "synchronize", wrap),
        (cuda.ExternalStream, "synchronize", wrap),
        (cuda.runtime, "deviceSynchronize", wrap),
    ) | {(cuda, "Device"): its}


class StreamUse:
    """The streams and events that a function uses while it is captured on the stream `side`.

    `mine`: true for a call of the function.  `refuse`: raises an error for a reason."""

    def __init__(
        self, side: Stream, mine: Callable[[], bool], refuse: Callable[[str], object]
    ) -> None:
        self._side, self._mine, self._refuse = int(side.handle), mine, refuse
        self._events: list[tuple[weakref.ref[Any], str]] = []

    def followed(self) -> _Table:
        """Does as `operations` with what makes a stream current, and what records an event."""
        streams = cupy.cuda.Stream, cupy.cuda.ExternalStream
        return _wrapped(
            *[(each, "__enter__ use", self._entering) for each in streams],
            *[(each, "record", self._recording) for each in (*streams, cupy.cuda.Event)],
        )

    def _entering(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(stream: Any, *args: Any, **kwargs: Any) -> Any:
            joins = stream.ptr == self._side or (stream.ptr > _DEFAULT and stream.is_capturing())
            if not joins and self._mine():  # work on it would run now, and in no replay
                line = rules.line_outside("cupy", "cupyx")
                self._refuse(
                    f"{line} makes a stream current that has not waited for the call's (wait_event)"
                )
            return operation(stream, *args, **kwargs)

        return run

    def _recording(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(recorder: Any, *args: Any, **kwargs: Any) -> Any:
            made = operation(recorder, *args, **kwargs)
            if self._mine():
                event = recorder if isinstance(recorder, cupy.cuda.Event) else made
                self._events.append((weakref.ref(event), rules.line_outside("cupy", "cupyx")))
            return made

        return run

    def require_no_events(self) -> None:
        """Refuses the call if an event that it has recorded still lives after it."""
        for event, line in self._events:
            if event() is not None:
                self._refuse(f"{line} records an event that outlives the call, and no replay would")


def _wrapped(*wraps: tuple[Any, str, _Wrap]) -> _Table:
    return {
        (owner, name): wrap(getattr(owner, name))
        for owner, names, wrap in wraps
        for name in names.split()
        if hasattr(owner, name)
    }


def _checked() -> Any:
    """A block in which operations raise errors that CuPy ignores by default, since it would wait
    for the device to see them: another key of the mode is not needed then."""
    return cupyx.errstate(linalg="raise")


def _default_pool() -> Any:
    return cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc)


def _range(memory: Any) -> MemoryRange:
    return MemoryRange(int(memory.ptr), int(memory.size))


def _is_array(value: object) -> bool:
    return isinstance(value, cupy.ndarray)


def _is_of_host(value: Any) -> bool:
    """True for an array of the host, and for numbers in lists."""
    if isinstance(value, list | tuple):
        return all(isinstance(each, _PLAIN) or _is_of_host(each) for each in value)
    return isinstance(value, np.ndarray | range)


def _sets(array: Any, given: Any, stream: Any = None) -> bool:
    """True for a call of `ndarray.set` that copies to the current stream; others raise, or run on
    another one."""
    fits = isinstance(given, np.ndarray) and given.dtype == array.dtype
    fits = fits and given.shape == array.shape
    dense = array.flags.c_contiguous or array.flags.f_contiguous
    return bool(fits and dense and (stream is None or stream == cupy.cuda.get_current_stream()))


def _arrays_of_host(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _arrays_of_host(each)
    elif isinstance(value, np.ndarray):
        yield value


def _content(arrays: Sequence[Any]) -> Callable[[], Hashable]:
    """Returns a function that returns the bytes of arrays of the host.  Those that are gone had no
    user but the call; of a view that is gone, the memory may be another's."""
    pairs: list[tuple[Callable[[], Any], bytes]] = []
    for each in arrays:
        alive = weakref.ref(each) if each.base is None else partial(_itself, each)
        pairs.append((alive, each.tobytes()))

    def again() -> Hashable:
        found = [(alive(), before) for alive, before in pairs]
        return tuple([before if array is None else array.tobytes() for array, before in found])

    return again


def _itself(value: Any) -> Any:
    return value


def _wait_for_current() -> None:
    cupy.cuda.get_current_stream().synchronize()


def _alias(value: Any) -> Any:
    """Returns an argument or a result as it is now."""
    if isinstance(value, list | tuple):
        return [*map(_alias, value)]
    return value.view() if _is_array(value) else value


def _flat(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [value]


def _seen(values: Sequence[Any]) -> Hashable:
    """Returns what the host sees of the results of an operation."""
    return tuple([(e.shape, str(e.dtype)) if _is_array(e) else as_value(e) for e in values])


def _gives(called: Any, count: int) -> Sequence[str] | None:
    """Returns the methods that make a call's result of an array of the host (`ResultPlace.of`)."""
    if isinstance(called, type):
        return (_NUMBERS[called],) if called in _NUMBERS and count == 1 else None
    if called == "get":
        return ()
    return (called,) if called in ("item", "tolist") and count == 0 else None
