"""Ranks that capture a function together, or not at all.

A graph that holds collectives is captured and launched by all ranks that take part in them, or by
none: NCCL asks for that.  So ranks compare what they do whenever a call of such a function is not a
replay: after the first run of a key, before and after a capture, and before an eager run of a key
that has a graph.  Replays compare nothing.

A rank that does something else raises DisagreementError, and so do the others; one that waits for a
rank that does not come, because that one replays or is gone, raises DeadlineError.  Both name the
rank.  What the ranks compare next would not be the same, so later comparisons raise too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ostinato import GraphExec
from ostinato.errors import ContextPoisonedError, DeadlineError, DisagreementError, GroupError

_CAPTURES, _CAPTURED, _FAILED = "captures it", "captured it", "could not capture it: "


class Store(Protocol):
    """Texts by name that all ranks see."""

    def set(self, name: str, text: str, /) -> None: ...

    def get(self, name: str, seconds: float, /) -> str | None:
        """Waits for a text; returns None if there is none after `seconds`."""
        ...


class Agreement:
    """The ranks with which a function communicates.

    `store`: for this object alone.  `ranks`: their numbers; `rank`: this process's place among
    them.  `name`: the function's.  `deadline`: seconds that a rank waits for the others.
    """

    def __init__(
        self, store: Store, rank: int, ranks: Sequence[int], *, name: str, deadline: float
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._name, self._deadline = name, deadline
        self._round = 0
        self._failed = ""

    def agree(self, what: str) -> None:
        """Compares what this rank does with what the others do.

        Raises DisagreementError, and DeadlineError if a rank does not come."""
        told = self._tell(what)
        for rank, other in zip(self._ranks, told, strict=True):
            if other != told[self._rank]:
                raise self._fail(DisagreementError, f"rank {rank} {_first_difference(other, what)}")

    def together(
        self,
        make: Callable[[], GraphExec],
        content: Callable[[GraphExec], str],
        refused: Callable[[str], Exception],
    ) -> GraphExec:
        """Returns the executable that `make` makes if every rank has made one with an equal
        `content`; otherwise it is closed.

        Raises the error that `refused` makes of a reason if a rank could not, and the errors of
        `agree`."""
        self.agree(_CAPTURES)
        try:
            made = make()
        except ContextPoisonedError as error:
            self.note(f"{_FAILED}{error}")
            raise
        except Exception as error:
            self._tell(f"{_FAILED}{error}")
            raise refused(str(error)) from error
        except BaseException as error:
            self.note(f"{_FAILED}{type(error).__name__}")
            raise
        try:
            self._compare(f"{_CAPTURED}\n{content(made)}", refused)
        except BaseException:
            made.close()
            raise
        return made

    def _compare(self, outcome: str, refused: Callable[[str], Exception]) -> None:
        """Compares the outcome of this rank's capture, which succeeded, with the others'."""
        told = self._tell(outcome)
        for rank, other in zip(self._ranks, told, strict=True):
            if other.startswith(_FAILED):
                raise refused(f"rank {rank} {other}")
        for rank, other in zip(self._ranks, told, strict=True):
            if other != outcome:
                raise self._fail(
                    DisagreementError,
                    f"rank {rank} {_CAPTURED} with other messages between ranks: "
                    f"{_first_difference(other, outcome)}",
                )

    def note(self, what: str) -> None:
        """Tells the others what this rank does and does not wait for them, since it goes on with
        an error."""
        if not self._failed:
            self._store.set(f"{self._round}/{self._rank}", what)
            self._failed = f"this rank {what}"

    def _tell(self, what: str) -> list[str]:
        """Returns what all ranks say in this round."""
        if self._failed:
            raise DisagreementError(
                f"graphed {self._name}: its ranks have not agreed before ({self._failed})",
                rank=self._ranks[self._rank],
            )
        number, self._round = self._round, self._round + 1
        self._store.set(f"{number}/{self._rank}", what)
        told = []
        for place, rank in enumerate(self._ranks):
            text = self._store.get(f"{number}/{place}", self._deadline)
            if text is None:
                raise self._fail(
                    DeadlineError,
                    f"rank {rank} did not come within {self._deadline:g} s, while this rank "
                    f"{what.partition(chr(10))[0]}. It replays, does something else, or is gone",
                )
            told.append(text)
        return told

    def _fail(self, kind: type[GroupError], what: str) -> GroupError:
        self._failed = what
        return kind(
            f"graphed {self._name}: {what}. All ranks must make the same calls; to capture again, "
            "let all of them call forget() at the same place",
            rank=self._ranks[self._rank],
        )


def _first_difference(other: str, mine: str) -> str:
    """Describes the first line in which two texts differ."""
    theirs, ours = other.splitlines(), mine.splitlines()
    for one, two in zip(theirs, ours, strict=False):
        if one != two:
            return f"{one}, this rank {two}"
    longer = (theirs if len(theirs) > len(ours) else ours)[min(len(theirs), len(ours)) :]
    return f"also {longer[0]}" if len(theirs) > len(ours) else f"not {longer[0]}"
