"""What a planted mistake is made of: a programme that can be right or have the mistake in it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import OstinatoError
from ostinato.step import Buckets, Cause, GraphCache, Multiples, PowersOfTwo
from tests.sources import config, kernel

__all__ = [
    "EXACT",
    "INPUT",
    "OUTPUT",
    "PLANTS",
    "STATE",
    "Caught",
    "Plant",
    "Played",
    "Programme",
    "Values",
    "plant",
    "play",
]

Values = npt.NDArray[np.generic]
INPUT: Final = "input"
OUTPUT: Final = "output"
STATE: Final = "state"
EXACT = Multiples(1, 64)
"""Buckets for sizes that say which of several things is done, not how many rows there are."""


class Programme:
    """Some calls of a graphed step, and what a user does around them.

    `planted` puts the mistake in; without it the same programme is right.  Subclasses say what
    memory there is (`make`), which of it are slots (`takes`: "x: input rows, out: output", by the
    names of attributes, with the size that measures them), what the step is (`run`), what one call
    of it takes (`sizes`, `call`), and by NumPy alone what must be in outputs and states after it
    (`wanted`).  `options` are of the step.
    """

    takes: ClassVar[str] = ""

    calls: ClassVar[int] = 5
    buckets: Buckets = PowersOfTwo(16)
    options: ClassVar[Mapping[str, object]] = {}

    def __init__(self, device: Device, *, planted: bool, **options: object) -> None:
        self.device, self.planted = device, planted
        self.stream = device.create_stream()
        self.one = self.array([1])
        self.everything = ost.DeviceScalar(device, np.uint32, initial=1 << 20, stream=self.stream)
        self.make()
        self.step = self.build(**{**self.options, **options})

    def build(self, **options: object) -> ost.GraphedStep | None:
        return ost.GraphedStep(
            self.run,
            stream=self.stream,
            cache=GraphCache(self.device, buckets=self.buckets),
            slots=self.slots(),
            **options,  # type: ignore[arg-type]
        )

    # --- what a subclass says
    def make(self) -> None:
        raise NotImplementedError

    def slots(self) -> list[ost.Slot]:
        return [
            ost.Slot(name, getattr(self, name), role, size=size)  # type: ignore[arg-type]
            for name, role, size in self._taken()
        ]

    def _taken(self) -> Iterator[tuple[str, str, str | None]]:
        """The name, the role and the size of each slot."""
        for part in self.takes.split(", "):
            name, role, *size = part.split()
            yield name.removesuffix(":"), role, size[0] if size else None

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        raise NotImplementedError

    def sizes(self, number: int) -> dict[str, int]:
        return {}

    def call(self, number: int) -> None:
        """Call number 0, 1, …, with what the user does before it."""
        assert self.step is not None
        self.step(**self.sizes(number))

    def answer(self) -> Values:
        left = [name for name, role, _ in self._taken() if role in (OUTPUT, STATE)]
        return self.read(*(getattr(self, name) for name in left))

    def wanted(self, number: int) -> Values | list[float]:
        raise NotImplementedError

    # --- short words
    def array(self, values: object, dtype: npt.DTypeLike = np.float32) -> ost.Buffer:
        return self.device.array(np.array(values, dtype))

    def zeros(self, n: int, dtype: npt.DTypeLike = np.float32) -> ost.Buffer:
        return self.device.zeros(n, dtype)

    def write(self, buffer: ost.Buffer, value: object) -> None:
        """Fills a buffer from the host, before anything that any stream is given later."""
        filled = np.broadcast_to(np.asarray(value, buffer.dtype), buffer.shape)
        buffer.set(filled, self.stream)
        self.device.synchronize()

    def read(self, *buffers: ost.Buffer) -> Values:
        return np.concatenate([buffer.to_numpy(self.stream).reshape(-1) for buffer in buffers])

    def launch(
        self, name: str, n: int, *arguments: object, stream: ost.Stream | None = None
    ) -> None:
        """A kernel of `tests.sources` with a grid for n elements."""
        where = stream or self.stream
        ost.launch(where, kernel(self.device, name), config(n), *arguments)

    def rows_of(self, sizes: ost.Sizes) -> ost.DeviceScalar:
        """The real size on the device; the mistake is to bound nothing by it."""
        return self.everything if self.planted else sizes.on_device("rows")


class Caught(enum.StrEnum):
    """What catches a mistake."""

    CHECK = "a check of the replay"
    BUILD = "making the graph fails, always"
    ERROR = "an error at the call, always"
    REMADE = "the graph is made again, always"


@dataclass(frozen=True, slots=True)
class Plant:
    """One mistake in the catalogue.

    `thread` is where it was made for real: "owner/repository#number", None if it is thought up.
    `says` is a pattern of what must be said.  `verify` is the least that finds it, where a check
    does, and `cause` what the check names.  `right_eagerly`: launch by launch the programme is
    right also with the mistake in it, so whoever finds it can go on; else only `strict` helps.
    """

    programme: type[Programme]
    caught: Caught
    thread: str | None
    says: str
    cause: Cause | None
    verify: Literal["first", 1]
    right_eagerly: bool

    @property
    def name(self) -> str:
        return self.programme.__name__

    @property
    def mistake(self) -> str:
        """One sentence."""
        return " ".join((self.programme.__doc__ or "").split("\n\n")[0].split())


PLANTS: list[Plant] = []
P = TypeVar("P", bound=type[Programme])


def plant(
    caught: Caught,
    says: str,
    *,
    thread: str | None = None,
    cause: Cause | None = None,
    verify: Literal["first", 1] = "first",
    right_eagerly: bool = True,
) -> Callable[[P], P]:
    """Puts a programme into the catalogue."""

    def register(programme: P) -> P:
        PLANTS.append(Plant(programme, caught, thread, says, cause, verify, right_eagerly))
        return programme

    return register


@dataclass(slots=True)
class Played:
    """What the calls of a programme gave, each beside what was wanted, up to the first error."""

    answers: list[tuple[Values, Values]] = field(default_factory=list)
    error: OstinatoError | None = None

    @property
    def right(self) -> bool:
        """Whether every answer that was handed out is right."""
        return all(np.array_equal(answer, wanted) for answer, wanted in self.answers)


def play(programme: Programme) -> Played:
    played = Played()
    for number in range(programme.calls):
        try:
            programme.call(number)
        except OstinatoError as error:
            played.error = error
            break
        programme.device.synchronize()
        wanted = np.asarray(programme.wanted(number))
        played.answers.append((programme.answer(), wanted))
    return played
