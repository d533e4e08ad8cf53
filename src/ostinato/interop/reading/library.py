"""The library protocol of `Graphed` (`Library`), and the options of a graphed function."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import compress
from typing import Any, Literal, Protocol, TypeAlias

from ostinato import Device, Graph, GraphCache, MemoryRange, PowersOfTwo, Stream, open_device
from ostinato.errors import InputError
from ostinato.interop.reading.chains import ChainBuilder, KeepingLibrary
from ostinato.interop.reading.objects import WatchingLibrary
from ostinato.interop.reading.padding import Padding
from ostinato.interop.reading.together import Agreement
from ostinato.lowlevel import new_lock
from ostinato.settings import blocking_captures, graphs_enabled
from ostinato.step import CaptureLimits

LIMITS = CaptureLimits(per_key=8, within=1000)
"""Limits of the cache that `graphed` makes: a key that is evicted again and again runs eagerly."""
_SHARE = 4
"""The part of the device's memory, as a divisor, that the graphs of a function may hold."""


class NotGraphable(Exception):
    """An error: why a call cannot be a graph, with the line."""


class CaptureDisturbed(NotGraphable):
    """An error: something else than the function broke a capture; a later one may succeed."""


class WaitsForDevice(NotGraphable):
    """An error: the call waits for the device.  A chain of graphs may serve it (`chains.py`)."""


class NoMemory(NotGraphable):
    """An error: the device had no memory for a capture; a later one may succeed."""


RunChain: TypeAlias = Callable[
    [Callable[[Stream], Any], ChainBuilder], tuple[Any, NotGraphable | None]
]


class Differentiable(Protocol):
    """The captures of a call and of its backward, in memory of their own."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function; returns its result without gradients."""
        ...

    def capture(self, work: Callable[[Stream], Any], /) -> tuple[Graph, Any]:
        """Does as `Library.capture`."""
        ...

    def backward(self, outputs: Sequence[Any], inputs: Sequence[Any], owner: object) -> Any:
        """Captures the backward of the last run; returns a `ReplayedBackward`.

        `outputs`: the arrays of the result that `run` returned; `inputs`: the copied arguments;
        `owner`: what keeps the memory of the first capture.  Raises NotGraphable."""
        ...


class Library(WatchingLibrary, KeepingLibrary, Protocol):
    """The operations of a library (torch, CuPy) that `Graphed` needs.

    Those with a body are for libraries without gradients, generators, chains and modes of many
    settings."""

    device: Device
    array_type: type
    """The type of plain arrays, which need no further check."""

    def capturing(self) -> bool:
        """True if the caller's current stream captures."""
        ...

    def modes(self) -> Hashable:
        """Returns the modes of the library that decide what a function does."""
        ...

    def situation(self) -> tuple[Callable[[], Any], ...]:
        """Returns functions.  While their results and the values of `names` are unchanged, so are
        `capturing`, `stream` and `modes`."""
        return self.capturing, self.stream, self.modes

    def names(self) -> Sequence[tuple[dict[str, Any], str]]:
        """Returns dicts, each with a key, whose values are compared with the results of
        `situation`: reading an item is faster than calling a function."""
        return ()

    @property
    def reads(self) -> tuple[str | Callable[[Any], Any], ...]:
        """The parts of an array that `signature` reads: names of attributes, or functions."""
        return (self.signature,)

    def signature(self, array: Any, /) -> tuple[Any, ...]:
        """Returns shape, dtype, strides, and all else that decides which kernels run on an
        array."""
        ...

    def address(self, array: Any, /) -> int: ...

    @property
    def reader(self) -> tuple[int, int] | None:
        """The address of a C function, and the offset in an array's Python object of the handle
        that this function takes, for C code that reads `address` (`Reader` in `_recheck.c`); None
        if there is none."""
        return None

    def storage(self, array: Any, /) -> MemoryRange:
        """Returns the whole memory that an array is a view of."""
        ...

    def memory(self, array: Any, /) -> Iterable[tuple[MemoryRange, object]]:
        """Returns the whole memory of an array of any kind, each piece with an object that keeps it
        alive without the array; empty for an array without memory of its own."""
        ...

    def offset(self, array: Any, /) -> int:
        """Returns the position of an array's first element in its memory."""
        ...

    def step_in_python(self, value: object, named: Collection[str], waits: bool, /) -> bool:
        """Makes each replay of a chain call the methods of an object that counts and decides in
        Python (an optimiser, a scheduler).  Guards then read of it only what graphs may use besides
        these calls.

        Returns False for other objects, for one that is called so already, if code that names the
        attributes `named` may read what these methods change, and, for `waits`, if they do not wait
        for the device."""
        return False

    def on_host(self, array: Any, /) -> bool:
        """True if an array is in the host's memory."""
        return False

    def refusal(self, array: Any, /) -> str:
        """Describes why an array cannot be an argument of a graph; empty if it can."""
        ...

    def hidden(self, array: Any, names: Collection[str], *, copied: bool = False) -> str:
        """Describes an attribute of an array that no guard reads; empty if there is none.

        `names`: the attributes that count; for a `copied` array all that the user has set count."""
        return ""

    def lost(self, array: Any, /) -> str:
        """Describes what a copy of an array would lack; empty if the copy is complete."""
        return ""

    def attached(self, arrays: Sequence[Any], /) -> list[tuple[Any, str, Any]]:
        """Returns the arrays whose attached array (the gradient) functions may replace: each as the
        array, the name of the attribute, and its value now."""
        return []

    def live(self, *, attached: bool = True) -> Callable[[Any], Hashable] | None:
        """Returns a function that reads a state of an array (whether it requires gradients and, if
        `attached`, has one) that decides what a call does and may change in place; None if no such
        state counts now."""
        return None

    def wants_gradient(self, result: Any, /) -> bool:
        return False

    def without_gradient(self, array: Any, /) -> Any:
        """Returns an array over the same memory that needs no gradient."""
        return array

    def differentiable(
        self, function: Callable[..., Any], state: Sequence[Any], /
    ) -> Differentiable | None:
        """Returns the captures of a call and its backward; None for a library without gradients.

        `state`: the arrays that the function uses besides its arguments."""
        return None

    def version(self, array: Any, /) -> int | None:
        """Returns a number that changes when the array is written; None if writes are not counted,
        and the array must be treated as written."""
        ...

    def stream(self) -> Stream:
        """Returns the caller's current stream; the same object for the same stream."""
        ...

    def wait(self, stream: Stream, other: Stream) -> None:
        """Makes later work of `stream` wait for the present work of `other`."""
        ...

    def run_beside(self, work: Callable[[], Any]) -> Any:
        """Runs work on the side stream of captures, between the caller's earlier and later work."""
        ...

    def capture(self, work: Callable[[Stream], Any]) -> tuple[Graph, Any]:
        """Captures work, which is given the capturing stream; returns the graph, which keeps its
        memory alive, and the result.

        Raises NotGraphable; CaptureDisturbed if another thread broke the capture, NoMemory.
        """
        ...

    @property
    def unseen(self) -> bool:
        """True if work on CUDA's legacy default stream may be missing from a capture that was
        made."""
        return not blocking_captures()

    @property
    def ranks(self) -> bool:
        """True if other processes may have to take part in a run."""
        return False

    def heard(self, function: Any, name: str) -> Callable[[], Agreement | None]:
        """Begins to note communication with other processes.  The returned function says with which
        ranks there was some since; None if there was none.  `function`: its graphs are dropped by
        `forget()` before these ranks part."""
        return lambda: None

    def messages(self, graph: Graph) -> Sequence[str]:
        """Returns the names of the nodes of a graph that communicate with other processes."""
        return ()

    @property
    def chain(self) -> RunChain | None:
        """A function that runs work once, for real, as graphs that are captured and launched one
        after the other, and gives these and the operations that wait between them to a
        `ChainBuilder`.  None for a library that cannot.

        Returns the result of the work, and an error if the graphs cannot be replayed:
        WaitsForDevice if the next run may give graphs that can.
        Raises the errors of the work; NotGraphable, in the middle of the work, for a wait that the
        library does not see before it breaks a capture, with all memory as before.
        """
        return None

    def out_of_memory(self, error: BaseException, /) -> bool:
        """True if an error means that the device has no memory left."""
        ...

    def trim(self, *, short: bool) -> None:
        """Frees the memory of captures that no graph uses; if memory is `short`, also other memory
        that the library caches."""
        ...

    def buffer(self, array: Any, shape: Sequence[int] | None) -> Any:
        """Allocates memory for a copy of an array, of `shape` or of the array's shape and layout.

        Writes to the buffer are counted (`version`) if the library counts any."""
        ...

    def stager(self, buffers: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
        """Returns a function that copies arrays of the buffers' shapes into them all at once."""
        ...

    def alias(self, array: Any, /) -> Any:
        """Returns another array object over the same memory, with the same layout."""
        ...

    def extent(self, array: Any, /) -> int | None:
        """Returns the bytes of an array whose value is one run of memory; None for other arrays."""
        ...

    def recipe(self, array: Any, /) -> tuple[Any, ...]:
        """Returns arguments of `new` for arrays of the layout of one that has an `extent`; they
        keep no memory alive."""
        ...

    def new(self, *recipe: Any) -> Any:
        """Allocates a new array from a `recipe`."""
        ...

    def maker(self) -> Callable[..., Any]:
        """Returns `new`, or a faster function that does the same while `situation` is unchanged."""
        return self.new

    def narrow(self, array: Any, axis: int, size: int) -> Any:
        """Returns a view of the first `size` elements along an axis."""
        ...

    def rest(self, array: Any, axis: int, size: int) -> Any:
        """Returns a view of the elements after the first `size` along an axis."""
        ...

    def fill(self, array: Any, value: float) -> None: ...

    def poison(self, rest: Any, front: Any, axis: int) -> None:
        """Fills padding with NaN, or for other dtypes with the last values of the front."""
        ...

    def difference(self, one: Any, other: Any, tolerance: tuple[float, float] | None) -> str:
        """Describes how two arrays differ; empty if they do not.  `tolerance`: relative,
        absolute."""
        ...

    seeds: tuple[str, ...] = ()
    """Names of the functions that give a generator a seed or a state."""

    def seeding(self) -> Callable[[Collection[str]], str]:
        """Returns a function that names a generator that got another seed, or drew on the host,
        since `seeding` was called, so that no replay reproduces its state; "" if there is none.

        The function takes the attributes that the code names, since other threads draw too."""
        return lambda named: ""

    def same_random(self, state: Any) -> bool:
        """True if the generators are in that state now."""
        return True


class Turns:
    """The order of the calls of one function: its graphs share memory, so they must run one after
    the other, whatever their streams."""

    __slots__ = ("_library", "last")

    def __init__(self, library: Library) -> None:
        self._library = library
        self.last: Stream | None = None
        """The stream of the last call."""

    def take(self) -> Stream:
        """Returns the caller's stream, and makes its later work wait for the earlier calls."""
        stream = self._library.stream()
        if stream is not self.last:
            if self.last is not None:
                self._library.wait(stream, self.last)
            self.last = stream
        return stream


@dataclass(frozen=True, slots=True)
class GraphedOptions:
    """The options of a graphed function; `graphed` of each library documents them."""

    static: tuple[str, ...] = ()
    padding: Padding | None = None
    fill: Mapping[str, float] = field(default_factory=dict)
    results: str = "clone"
    gradients: str = "refuse"
    verify: Literal["off", "first"] | int = "off"
    tolerance: tuple[float, float] | None = None
    strict: bool = False
    guard: bool = True
    graphs: bool = field(default_factory=graphs_enabled)
    profiling: bool = False
    warmups: int = 1
    preconditions: Mapping[str, Callable[[], bool]] = field(default_factory=dict)

    @classmethod
    def given(cls, arguments: Mapping[str, Any]) -> GraphedOptions:
        """Makes options from the arguments of `graphed`, of which others are no options.  Raises
        InputError for those that do not fit together."""
        static, dynamic, buckets = [arguments[name] for name in ("static", "dynamic", "buckets")]
        for what in ("buckets", "padding"):
            if arguments[what] is not None and dynamic is None:
                raise InputError(f"{what} is for dynamic axes: give dynamic={{parameter: axis}}")
        made = {each.name: arguments[each.name] for each in fields(cls) if each.name in arguments}
        made["static"] = tuple([static] if isinstance(static, str) else static)
        made["padding"] = None if dynamic is None else Padding(dynamic, buckets or PowersOfTwo())
        return cls(fill=dict(arguments["padding"] or {}), **made)

    def __post_init__(self) -> None:
        if self.results not in ("clone", "static"):
            raise InputError(f'results={self.results!r}: "clone" or "static"')
        if self.gradients not in ("refuse", "eager", "replay"):
            raise InputError(f'gradients={self.gradients!r}: "refuse", "eager" or "replay"')
        if self.gradients == "replay" and (self.results != "clone" or self.padding is not None):
            raise InputError('gradients="replay" needs results="clone", and no dynamic axes')
        whole = isinstance(self.verify, int) and not isinstance(self.verify, bool)
        if not (self.verify in ("off", "first") or (whole and int(self.verify) >= 1)):
            raise InputError(
                f'verify={self.verify!r}: "off", "first", or N to check each Nth replay'
            )


class Devices:
    """The devices that all graphed functions of a library share, one for each GPU."""

    def __init__(self, begin: Callable[[int], object]) -> None:
        """`begin`: makes the library initialise its own context of a GPU, which must come first."""
        self._begin = begin
        self._lock = new_lock()
        self._open: dict[int | None, Device] = {}

    def of(self, index: int | None) -> Device:
        """Returns the device of a GPU, or of the CPU if `index` is None."""
        with self._lock:
            device = self._open.get(index)
            if device is None or device.context.closed:
                if index is not None:
                    self._begin(index)
                name = "host" if index is None else f"cuda:{index}"
                device = self._open[index] = open_device(name)
            return device


def own_cache(device: Device, budget: int | str | None) -> GraphCache:
    """Makes the cache of a function that was given none.

    `budget`: the bytes that its graphs may hold; None for a part of the device's memory, because
    keys without end (a number that is another one at each call) would fill the memory otherwise.
    """
    if budget is None:
        budget = device.properties.total_memory // _SHARE or None
    return GraphCache(device, budget=budget, limits=LIMITS)


def cuda_index(device: Device) -> int:
    """Returns the index of a device's GPU.  Raises InputError for a device that is no GPU."""
    kind, _, number = device.name.partition(":")
    if kind != "cuda":
        raise InputError(f"device {device.name!r}: a CUDA device is needed")
    return int(number or 0)


def name_of(function: Callable[..., Any], number: int) -> str:
    """Returns the default name of a graphed function; the first of a library has no number."""
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name}~{number}" if number else name


def living_objects(*classes: type) -> Iterator[Any]:
    """Yields the objects of classes and their subclasses that the garbage collector tracks."""
    kinds, left = {*map(id, classes)}, [*classes]
    while left:
        found: list[type] = type.__subclasses__(left.pop())
        found = [each for each in found if id(each) not in kinds]
        kinds.update(map(id, found))
        left += found
    objects = gc.get_objects()  # some 100,000: no Python code for each
    return compress(objects, map(kinds.__contains__, map(id, map(type, objects))))
