"""Finds where a function of CuPy waits for the device, while it runs as a chain of graphs.

CuPy has no mode that sees its operations.  But whatever the host reads of an array goes through
`ndarray.get`: `float(x)`, `if x.any():`, `x.item()`, `x.tolist()`, `asnumpy(x)`, and the count of a
mask, which decides the shape of `x[mask]`.  So this method is replaced while a chain is built: a
read ends the capture, whose graph is launched, runs, and is noted, and the next capture begins.

Another call that waits (`stream.synchronize()`) breaks the capture, of which the GPU has run
nothing then.  What the graphs before it have written is put back, and the call is made eagerly.

CuPy does not say what its kernels write.  So all memory that a graph points at counts as written,
but for the inputs of ufuncs.

It refuses to capture products and decompositions (cuBLAS, cuSOLVER).  These run between two graphs
too, in each replay again, which copies their results to where the next graph reads them.  Nor does
it capture copies from the host, which are made once.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import cupy
import cupyx
import numpy as np

from ostinato import Capture, Graph, MemoryRange, Node, NodeKind, Stream
from ostinato.errors import ContextPoisonedError
from ostinato.interop import captures as rules
from ostinato.interop.reading.chains import ChainBuilder, Wait, as_value, error_value
from ostinato.interop.reading.library import (
    NoMemory,
    NotGraphable,
    WaitsForDevice,
    living_objects,
)
from ostinato.interop.reading.moves import NAMES
from ostinato.interop.reading.slots import points_at, words_of_nodes
from ostinato.lowlevel import every_node

_ADDRESSES = np.array([1 << 32, 1 << 57], np.uint64)
"""Words that may be addresses lie between these."""
_PRODUCTS = "dot einsum inner kron matmul tensordot vdot"
_DECOMPOSITIONS = (
    "cholesky cond det eigh eigvalsh inv lstsq matmul matrix_power matrix_rank pinv qr slogdet "
    "solve svd tensorinv tensorsolve"
)
_METHODS = "__matmul__ __rmatmul__ dot"
_MAKING = "array asanyarray asarray ascontiguousarray asfortranarray"
"""Names of what CuPy refuses to do in a capture: of `cupy`, of `cupy.linalg`, of arrays; and of
functions that copy from the host."""
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

    `finish`: makes the graph of a capture one that can be replayed; raises NotGraphable."""

    def __init__(
        self,
        side: Stream,
        parts: ChainBuilder,
        around: Surroundings,
        finish: Callable[[Graph], Graph],
        out_of_memory: Callable[[BaseException], bool],
    ) -> None:
        self._side, self._parts, self._around, self._finish = side, parts, around, finish
        self._out_of_memory = out_of_memory
        self._thread = threading.get_ident()
        self._capture = Capture(side)
        self._between = False
        """True between two captures."""
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
            self._written = {}

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

    # --- what no graph holds
    def _noticed(self) -> AbstractContextManager[None]:
        """Replaces, in the block, what must run between two captures."""

        def between(
            handle: Callable[..., Any], fits: Callable[..., bool]
        ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            def wrap(operation: Callable[..., Any]) -> Callable[..., Any]:
                def run(*args: Any, **kwargs: Any) -> Any:
                    elsewhere = threading.get_ident() != self._thread or self._between
                    if elsewhere or not fits(*args, **kwargs):
                        return operation(*args, **kwargs)
                    return handle(operation, args, kwargs, sys._getframe(1))

                return run

            return wrap

        return replaced(
            operations(
                between(self._read, lambda *args, **kwargs: True),
                between(self._run_apart, _makes_results),
                between(self._make_constant, lambda value=None, *a, **k: _is_of_host(value)),
            )
        )

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

    def _note(self, line: str, value: Any, again: Any, read: Any, place: Any = None) -> None:
        reads = frozenset([int(each.data.mem.ptr) for each in read])
        written = frozenset(self._written)
        self._parts.waited(Wait(line, value, again, place, written, reads=reads))

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

        def again() -> Any:
            seen = get(other, None, order)
            return seen if place is not None else seen.tobytes()

        with self._paused():
            found = get(other, None, order)
            self._note(line, found.tobytes(), again, [other], place)
        return found

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

    def _make_constant(
        self, operation: Callable[..., Any], args: Any, kwargs: Any, frame: Any
    ) -> Any:
        """Copies an array of the host once; a graph copies from that copy.  A replay compares the
        array: the call may not have made it."""
        line, source = rules.line_outside("cupy", "cupyx"), args[0]
        # The graphs before write in each replay what is free now in the pool of captures.
        with self._paused(), _default_pool():
            made = operation(*args, **kwargs)
            self._around.constants.append(made.data.mem)
            again = functools.partial(_content, source, made)  # which keeps the copy
            self._note(line, again(), again, [made])
        return made.copy("K")


def _makes_results(*args: Any, **kwargs: Any) -> bool:
    """True if an operation writes none of its arguments: a third array is where `dot` writes."""
    return "out" not in kwargs and not (len(args) == 3 and all(map(_is_array, args)))


def _plain_order(
    stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True
) -> str:
    """Returns the order for a new array of the host that is complete; "" for other reads."""
    return order if stream is None and out is None and blocking else ""


def operations(
    read: Callable[[Any], Any], apart: Callable[[Any], Any], constant: Callable[[Any], Any]
) -> dict[tuple[Any, str], Any]:
    """Returns what CuPy refuses to do in a capture, by owner and name, as functions make it of what
    it is: reads of arrays, operations of cuBLAS and cuSOLVER, and copies from the host."""
    wraps = (
        (cupy.ndarray, "get", read),
        (cupy.ndarray, _METHODS, apart),
        (cupy, _PRODUCTS, apart),
        (cupy.linalg, _DECOMPOSITIONS, apart),
        (cupy, _MAKING, constant),
    )
    return {
        (owner, name): wrap(getattr(owner, name))
        for owner, names, wrap in wraps
        for name in names.split()
        if hasattr(owner, name)
    }


@contextmanager
def replaced(functions: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Replaces attributes in a block, also for CuPy's own compiled code that calls methods."""
    before = {(owner, name): vars(owner).get(name) for owner, name in functions}
    try:
        for (owner, name), function in functions.items():
            setattr(owner, name, function)
        yield
    finally:
        for (owner, name), function in before.items():
            if function is not None:
                setattr(owner, name, function)
            elif name in vars(owner):  # it is inherited
                delattr(owner, name)


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
    return type(value) is np.ndarray and value.ndim > 0


def _content(source: Any, made: Any) -> Hashable:
    return source.tobytes() if isinstance(source, np.ndarray) else None


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
