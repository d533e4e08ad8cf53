"""What a library does for `Graphed` (`Library`), and what is asked of it (`GraphedOptions`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ostinato import (
    Device,
    Graph,
    GraphCache,
    MemoryRange,
    PowersOfTwo,
    Stream,
    open_device,
)
from ostinato.errors import InputError
from ostinato.interop.reading.objects import WatchingLibrary
from ostinato.interop.reading.padding import Padding
from ostinato.lowlevel import new_lock
from ostinato.settings import graphs_enabled
from ostinato.step import Buckets, CaptureLimits

LIMITS = CaptureLimits(per_key=8, within=1000)
"""Of the cache that `graphed` makes: a key that is evicted all the time is run eagerly."""
_SHARE = 4
"""Which part of the device's memory the graphs of a function may hold."""


class NotGraphable(Exception):
    """Why a call cannot be a graph, in words that name the line."""


class CaptureDisturbed(NotGraphable):
    """A capture was broken, and not by the function: another one may succeed."""


class NoMemory(NotGraphable):
    """The device had no memory for a capture: another one may succeed later."""


class Library(WatchingLibrary, Protocol):
    """What a library does for `Graphed`."""

    device: Device
    array_type: type
    """Of plain arrays, which need no other check."""

    def capturing(self) -> bool:
        """Whether the caller's current stream captures."""
        ...

    def modes(self) -> Hashable:
        """The library's modes that decide what a function does."""
        ...

    def situation(self) -> tuple[Callable[[], Any], ...]:
        """Functions whose results tell all that `capturing`, `stream` and `modes` do, as long as
        none of them gives another one."""
        ...

    def names(self) -> Sequence[tuple[dict[str, Any], str]]:
        """Dicts and a key of each, whose values tell the rest of it: they are compared faster."""
        ...

    @property
    def reads(self) -> tuple[str | Callable[[Any], Any], ...]:
        """What `signature` reads of an array: attributes by name, and functions of it."""
        ...

    def signature(self, array: Any, /) -> tuple[Any, ...]:
        """Shape, type, and what else of an array decides which kernels run on it: strides first."""
        ...

    def address(self, array: Any, /) -> int: ...

    @property
    def reader(self) -> tuple[int, int] | None:
        """How C code reads `address`, if it can: the address of a C function, and where in an
        array's Python object that lies which it is given a pointer to (`Reader` in
        `_recheck.c`)."""
        ...

    def storage(self, array: Any, /) -> MemoryRange:
        """The whole memory that an array is a view of."""
        ...

    def memory(self, array: Any, /) -> Iterable[tuple[MemoryRange, object]]:
        """The whole memory of any array that there is, each piece with what keeps it, also without
        the array; none for one without memory of its own."""
        ...

    def offset(self, array: Any, /) -> int:
        """Where in its memory an array begins."""
        ...

    def refusal(self, array: Any, /) -> str:
        """Why an array cannot be an argument of a graph; empty if it can."""
        ...

    def hidden(self, array: Any, names: Collection[str], *, copied: bool = False) -> str:
        """Which attributes of an array, in words, hold something that no guard reads: those of
        these names, and if it is `copied` any that the user gave it."""
        ...

    def lost(self, array: Any, /) -> str:
        """What a copy of an array would not have, in words; empty if it has all."""
        ...

    def attached(self, arrays: Sequence[Any], /) -> list[tuple[Any, str, Any]]:
        """Of arrays that may have another one attached (a gradient), which functions replace: the
        array, the attribute, and what it is now."""
        ...

    def live(self) -> Callable[[Any], Hashable] | None:
        """What of the arrays that a function uses besides its arguments may change while they stay
        where they are, and decides now what a call does; None if nothing does."""
        ...

    def wants_gradient(self, result: Any, /) -> bool: ...

    def version(self, array: Any, /) -> int | None:
        """A number that changes when the array is written; None where that is not counted: it is
        taken for written then."""
        ...

    def stream(self) -> Stream:
        """The caller's current stream; the same object for the same stream."""
        ...

    def wait(self, stream: Stream, other: Stream) -> None:
        """Later work of a stream waits for what the other has now."""
        ...

    def run_beside(self, work: Callable[[], Any]) -> Any:
        """Runs work on the side stream on which captures are made, in the caller's order."""
        ...

    def capture(self, work: Callable[[Stream], Any]) -> tuple[Graph, Any]:
        """Captures work on a stream that it is given; the graph, which keeps its memory alive, and
        the result.

        Raises NotGraphable; CaptureDisturbed if another thread broke the capture, NoMemory.
        """
        ...

    def out_of_memory(self, error: BaseException, /) -> bool:
        """Whether an error says that the device has no memory left."""
        ...

    def trim(self, *, short: bool) -> None:
        """Gives the memory of captures back that no graph has; if memory is `short`, also what else
        the library keeps for later."""
        ...

    def buffer(self, array: Any, shape: Sequence[int] | None) -> Any:
        """Memory for a copy of an array, of a shape, or of its own in its own layout.

        Its writes are counted (`version`) where the library counts any."""
        ...

    def stager(self, buffers: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
        """A function that copies arrays of the buffers' shapes into them in one go."""
        ...

    def copy(self, into: Any, array: Any) -> None: ...

    def clone(self, array: Any, /) -> Any: ...

    def alias(self, array: Any, /) -> Any:
        """Another array of the same memory and layout."""
        ...

    def extent(self, array: Any, /) -> int | None:
        """How many bytes an array takes, if these in a row are its value; else None."""
        ...

    def recipe(self, array: Any, /) -> tuple[Any, ...]:
        """Arguments of `new` for arrays of the layout of one that has an `extent`; they keep no
        memory."""
        ...

    def new(self, *recipe: Any) -> Any:
        """A new array by a `recipe`."""
        ...

    def maker(self) -> Callable[..., Any]:
        """`new`, or a faster function that does the same wherever `situation` is as it is now."""
        ...

    def narrow(self, array: Any, axis: int, size: int) -> Any:
        """The front of an array along an axis."""
        ...

    def rest(self, array: Any, axis: int, size: int) -> Any:
        """What is behind the front."""
        ...

    def fill(self, array: Any, value: float) -> None: ...

    def poison(self, rest: Any, front: Any, axis: int) -> None:
        """Fills padding with what no answer may depend on: NaN, or other values of the front."""
        ...

    def difference(self, one: Any, other: Any, tolerance: tuple[float, float] | None) -> str:
        """How two arrays differ, in words; empty if they do not."""
        ...

    def save_random(self) -> Any:
        """The states of the generators."""
        ...

    def restore_random(self, state: Any) -> None: ...

    seeds: tuple[str, ...]
    """What the functions are called that give a generator a seed or a state."""

    def seeding(self) -> Callable[[Collection[str]], str]:
        """A function that tells which generator has a state that no replay gives it: it got another
        seed since now, or drew on the host.  In words; empty if there is none.

        It is given the attributes that the code names: other threads draw, too."""
        ...

    def same_random(self, state: Any) -> bool:
        """Whether the generators are in that state now."""
        ...


class Turns:
    """The streams of the calls of one function, whose graphs share memory: they must run one after
    the other, whatever the stream."""

    __slots__ = ("_library", "last")

    def __init__(self, library: Library) -> None:
        self._library = library
        self.last: Stream | None = None
        """Of the last call."""

    def take(self) -> Stream:
        """The caller's stream, whose later work comes behind all that was done so far."""
        stream = self._library.stream()
        if stream is not self.last:
            if self.last is not None:
                self._library.wait(stream, self.last)
            self.last = stream
        return stream


@dataclass(frozen=True, slots=True)
class GraphedOptions:
    """How a function is graphed; `graphed` of each library says what they mean."""

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
    def given(
        cls,
        *,
        static: str | Sequence[str],
        dynamic: Mapping[str, int] | None,
        buckets: Buckets | None,
        padding: Mapping[str, float] | None,
        **others: Any,
    ) -> GraphedOptions:
        """Of the arguments of `graphed`.  Raises InputError for those that do not fit together."""
        for what, names in (("buckets", buckets), ("padding", padding)):
            if names is not None and dynamic is None:
                raise InputError(f"{what} is for dynamic axes: give dynamic={{parameter: axis}}")
        return cls(
            static=tuple([static] if isinstance(static, str) else static),
            padding=None if dynamic is None else Padding(dynamic, buckets or PowersOfTwo()),
            fill=dict(padding or {}),
            **others,
        )

    def __post_init__(self) -> None:
        if self.results not in ("clone", "static"):
            raise InputError(f'results={self.results!r}: "clone" or "static"')
        if self.gradients not in ("refuse", "eager"):
            raise InputError(f'gradients={self.gradients!r}: "refuse" or "eager"')
        whole = isinstance(self.verify, int) and not isinstance(self.verify, bool)
        if not (self.verify in ("off", "first") or (whole and int(self.verify) >= 1)):
            raise InputError(
                f'verify={self.verify!r}: "off", "first", or N to check each Nth replay'
            )
        if not isinstance(self.static, tuple):
            raise InputError("static: a tuple of parameter names")


class Devices:
    """The devices that all graphed functions of a library share, one for each GPU."""

    def __init__(self, begin: Callable[[int], object]) -> None:
        """`begin`: makes the library open its own context of a GPU, which it does first, as it is
        used to."""
        self._begin = begin
        self._lock = new_lock()
        self._open: dict[int | None, Device] = {}

    def of(self, index: int | None) -> Device:
        """The device of a GPU; without one (None) the CPU's."""
        with self._lock:
            device = self._open.get(index)
            if device is None or device.context.closed:
                if index is not None:
                    self._begin(index)
                name = "host" if index is None else f"cuda:{index}"
                device = self._open[index] = open_device(name)
            return device


def own_cache(device: Device, budget: int | str | None) -> GraphCache:
    """The cache of one function that was given none.

    `budget`: the bytes that its graphs may hold; None for a part of the device's memory, since keys
    without end (a number that is another one at each call) would fill it otherwise.
    """
    if budget is None:
        budget = device.properties.total_memory // _SHARE or None
    return GraphCache(device, budget=budget, limits=LIMITS)


def cuda_index(device: Device) -> int:
    """Which GPU a device is.  Raises InputError for one that is none."""
    kind, _, number = device.name.partition(":")
    if kind != "cuda":
        raise InputError(f"device {device.name!r}: a CUDA device is needed")
    return int(number or 0)


def name_of(function: Callable[..., Any], number: int) -> str:
    """What a graphed function is called that was given no name: the first of a library plainly."""
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name}~{number}" if number else name
