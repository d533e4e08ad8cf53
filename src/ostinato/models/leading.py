"""Ranks of which one leads: rank 0 decides what to do, and the others repeat its decoder's calls.

    rank 0     Decoder(…, group=group, leads=True)     used as any decoder, by a server, say
    others     Decoder(…, group=group).follow()        returns once rank 0 closes its decoder

Each call that launches a step is one exchange of the group: rank 0 brings the call, and those since
the exchange before it that launch none; every rank brings the results of the calls of the exchange
before.  So ranks whose tokens, errors or notes of calls differ raise at the next exchange.
Rank 0 does not wait for the exchange, but begins with the call at once; it looks at the exchange
before its next one, so at most one later than the others.  Between two exchanges the ranks that
follow wait without a deadline; a rank that dies, is silent or leaves still ends the group.

An exchange takes rank 0's process about as long as it takes to handle the tokens of a step of 32
rows (each change of its threads waits for the interpreter's lock), so a program with much to do
for each token takes several items of a run with each call (`Run.take`).

What crosses is the decoder's own API: methods that change state or run a step, and the next tokens
of a run.  What only reads the host's state (`tokens`, `stopped`, `statistics`) does not cross, and
neither does the end of a run: the next call ends it on all ranks.

An error that all ranks have alike (a wrong argument, logits with NaN) leaves the group as it is.
Any other one fails it at once, since the other ranks may wait for this one on their devices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ostinato.errors import (
    ClosedError,
    DisagreementError,
    GroupError,
    InputError,
    LogitsError,
)
from ostinato.lowlevel import uninterrupted, whole_number
from ostinato.models.arguments import quoted
from ostinato.models.ranks import Ranks
from ostinato.models.run import Run
from ostinato.models.sampling import SamplingOptions
from ostinato.models.stepper import TokenMasks

T = TypeVar("T")

_LABEL = "the next call of the decoder that leads"
_END, _TAKE = "Decoder.close", "Run.take"
_LOCAL = (_END, "Decoder.graph")
_LATER = {
    f"Decoder.{name}"
    for name in (
        *("set_sampling", "set_stop_tokens", "reset", "truncate", "keep_common", "copy_prefix"),
        *("run", "run_batch"),
    )
}
"""Calls that launch no step, so that no other rank can wait for them on its device."""
_MOST_LATER = 256
_SHARED = (InputError, LogitsError)


class _Side:
    """One rank's side of the calls."""

    def __init__(self, ranks: Ranks) -> None:
        self.group = ranks.group
        self._ranks = ranks
        self._results: list[str] = []
        self._result = ""
        """The results of the calls of the latest exchange."""
        ranks.led = True

    def bring(self, calls: Sequence[str] = ()) -> Callable[[], list[str]]:
        """Brings rank 0's calls, or on another rank none, and returns a function that waits for the
        others and returns the calls; it raises GroupError, also if earlier results differ.  A rank
        without calls waits without a deadline."""
        mine = {"calls": calls, "result": self._result}
        wait = self.group.begin_exchange(_LABEL, json.dumps(mine).encode(), endless=not calls)
        return lambda: self._compared(wait())

    def done(self) -> None:
        """Notes that all calls of an exchange are made."""
        self._result = f"{', '.join(self._results)}, after calls {self._ranks.digest}"
        self._results.clear()

    def _compared(self, parts: Sequence[bytes]) -> list[str]:
        first, *others = map(json.loads, parts)
        for rank, other in enumerate(others, 1):
            if other["result"] != first["result"]:
                error = DisagreementError(
                    f"rank {rank} got {other['result'][:400]} where rank 0 got "
                    f"{first['result'][:400]}: all ranks must run the same build and settings",
                    rank=rank,
                )
                self.group.fail(error)
                raise error
        return list(first["calls"])

    def do(self, work: Callable[[], T]) -> T:
        """Returns `work()`, and keeps its result for the comparison.  An error that the other ranks
        need not have fails the group."""
        try:
            result = work()
        except _SHARED as error:
            self._results.append(f"{type(error).__name__} ({error})")
            raise
        except BaseException as error:
            self.group.fail(error)
            raise
        self._results.append(repr(result))
        return result


class Lead(_Side):
    """The side of rank 0."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._before: Callable[[], object] = str
        """Waits for the exchange before."""
        self._calls: list[str] = []
        """The calls that the other ranks do not have yet."""

    def call(
        self,
        name: str,
        method: Callable[..., T],
        args: tuple[object, ...],
        options: dict[str, Any],
    ) -> T:
        """Calls `method`, after it has told the other ranks to do the same if the call launches a
        step; else they do it with the next one that does.

        Ctrl-C waits for the end of the call, which all ranks make whole.  Raises GroupError, the
        errors of `method`, and InputError for arguments that cannot be sent.
        """
        if name in _LOCAL:
            return method(*args, **options)
        here: dict[str, Any] = {
            own: options.pop(own) for own in ("progress", "each") if own in options
        }
        if options.get("masks") is not None:
            here["masks"] = options["masks"]  # the others get its words as they are made
        told = json.dumps([name, _sendable(args), _sendable(options)])
        _, args, options = _read(told)  # the very values that the others get
        work = partial(method, *args, **(options | here))
        with uninterrupted:
            self.group.check()
            self._calls.append(told)
            if name in _LATER and len(self._calls) < _MOST_LATER:
                return self.do(work)
            self._tell()
            try:
                return self.do(work)
            finally:
                self.done()

    def _tell(self) -> None:
        self._before()
        calls, self._calls = self._calls, []
        self._before = self.bring(calls)

    def end(self) -> None:
        """Ends `follow` on the other ranks, unless the group has ended."""
        with suppress(GroupError, ClosedError):
            self._calls.append(json.dumps([_END, [], {}]))
            self._tell()
            self._before()


def follow(decoder: object, ranks: Ranks) -> None:
    """Repeats rank 0's calls on this rank's `Decoder` until rank 0 closes its own.

    Raises GroupError, and the errors that fail the group.
    """
    side = _Side(ranks)
    run: Run[Any] | None = None
    while True:
        for name, args, options in map(_read, side.bring()()):
            if name == _END:
                return
            method = run.repeat if run is not None and name == _TAKE else _method(decoder, name)
            with suppress(*_SHARED):
                result = side.do(partial(method, *args, **options))
                run = result if isinstance(result, Run) else run
        side.done()


def _method(decoder: object, name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(decoder, name.removeprefix("Decoder."))
    return method


def _read(told: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    name, args, options = json.loads(told, object_hook=_read_object)
    return name, tuple(args), options


def _sendable(value: object) -> Any:
    """Returns a call's argument as data that JSON can hold and `_read` turns back."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case SamplingOptions():
            return {"sampling": asdict(value)}
        case TokenMasks():
            return {"masked": _sendable(value.sequences)}
        case dict() if all(type(key) is str for key in value):
            return {key: _sendable(one) for key, one in value.items()}
        case Mapping():
            return {"items": [[_sendable(key), _sendable(one)] for key, one in value.items()]}
        case Iterable() if not isinstance(value, bytes | bytearray):
            return [one if type(one) is int else _sendable(one) for one in value]
    found = whole_number(value)
    if found is None:
        raise InputError(f"{quoted(value)} cannot be sent to the other ranks")
    return found


def _read_object(found: dict[str, Any]) -> Any:
    if "sampling" in found:
        return SamplingOptions(**found["sampling"])
    if "masked" in found:
        return TokenMasks(tuple(found["masked"]), _not_called)
    return dict(found["items"]) if "items" in found else found


def _not_called(words: npt.NDArray[np.uint32]) -> None:
    raise AssertionError("rank 0 makes the masks")
