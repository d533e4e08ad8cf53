"""The operations that a thread submits through this library, to find those missing in a capture.

Work of other libraries and of other threads is not included.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ostinato.driver.context import Context, Tap
from ostinato.driver.location import caller_line, describe_line
from ostinato.driver.stream import Operation, Stream


@dataclass(frozen=True, slots=True)
class Submission:
    """One operation that the driver accepted: its name, and the line that submitted it."""

    name: str
    line: tuple[str, int] | None

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name} at {describe_line(*self.line)}"


class _Noted(Tap):
    """A tap that passes the operations that one thread submits, to any stream, to `note`."""

    def __init__(self, note: Callable[[Operation], None], *, needs_access: bool) -> None:
        self.needs_access = needs_access
        self._note = note
        self._thread = threading.get_ident()

    def submitted(self, stream: Stream, operation: Operation) -> None:
        # A capture refuses an operation that no graph can hold, with an error of its own.
        if threading.get_ident() == self._thread and not operation.once:
            self._note(operation)


@contextmanager
def submissions(context: Context) -> Iterator[Sequence[Submission]]:
    """Lists, for a `with` block, this thread's operations on the context's streams, in order.  The
    list keeps no memory alive."""
    made: list[Submission] = []

    def note(operation: Operation) -> None:
        made.append(Submission(operation.name, caller_line()))

    with context.tapped(_Noted(note, needs_access=False)):
        yield made


@contextmanager
def operations(context: Context) -> Iterator[Sequence[Operation]]:
    """Lists the operations themselves, with the memory they read and write; see `submissions`."""
    made: list[Operation] = []
    with context.tapped(_Noted(made.append, needs_access=True)):
        yield made


def first_missing(wanted: Iterable[Submission], found: Iterable[Submission]) -> Submission | None:
    """Returns the first of the wanted operations whose name occurs more often among them than among
    the found ones, or None."""
    left = Counter(one.name for one in found)
    for one in wanted:
        left[one.name] -= 1
        if left[one.name] < 0:
            return one
    return None
