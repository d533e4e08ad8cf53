"""Which request does what next.  Pure: no clock, no decoder, no I/O, no threads.

    waiting  ─Admit─▶  reading  ─Read, Read, …─▶  decoding  ─Decode, Decode, …─▶  over
      (a queue, first       (one at a time, its prompt       (all of them in one step)
       come first served)    in pieces)

The caller asks for the `next` action, does it, and reports what it did.  One prompt is read at a
time, and its request gets a slot only then: so a request that begins as the one before it finds
those tokens in that one's slot.  A slot's tokens stay when its request is over, for the requests
that come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

_WORTH_A_COPY = 16
"""Tokens: fewer are read as fast as they are copied."""


@dataclass(frozen=True, slots=True)
class Admit:
    """A request gets a slot, whose cache is to keep the first `kept` tokens of its prompt: out of
    its own, or copied there from the slot `source`."""

    request: int
    slot: int
    kept: int
    source: int | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """The tokens from `start` to `end` of a request's prompt are put into its slot.  After the
    `last` ones its first token is chosen."""

    request: int
    slot: int
    start: int
    end: int
    last: bool


@dataclass(frozen=True, slots=True)
class Decode:
    """One more token for each of these slots, in one step.  `single`: one step only, since a prompt
    is being read; else as many as one likes, until the next action is another one."""

    slots: tuple[int, ...]
    single: bool


SchedulerAction: TypeAlias = Admit | Read | Decode


@dataclass(slots=True)
class _Request:
    """`tokens`: of the prompt.  `read`: how many of them are in the cache."""

    number: int
    tokens: tuple[int, ...]
    deadline: float | None
    slot: int | None = None
    read: int = 0


@dataclass(slots=True)
class _Slot:
    """`held`: the tokens that its cache holds.  `chosen`: the latest token, which it holds once the
    one after it is chosen.  `used`: when it was, as a count of uses."""

    index: int
    request: int | None = None
    held: list[int] = field(default_factory=list)
    chosen: int | None = None
    used: int = 0


class Scheduler:
    """Requests in, what the next step does out.

    `slots`: requests that are decoded at the same time.  `queue`: how many more may be under way,
    waiting.  `piece`: tokens of prompts that are read between two steps of those that decode.
    `reuse`: tokens that a cache holds are not read again.
    """

    def __init__(self, slots: int, queue: int, piece: int, *, reuse: bool = True) -> None:
        self._slots = tuple(_Slot(index) for index in range(slots))
        self._queue = queue
        self._piece = piece
        self._reuse = reuse
        self._requests: dict[int, _Request] = {}
        self._waiting: deque[int] = deque()
        self._reading: _Request | None = None
        self._left = piece  # tokens that may be read before the next step
        self._uses = 0
        self._numbers = 0

    # --- what is there
    @property
    def under_way(self) -> int:
        """Requests that are not over."""
        return len(self._requests)

    @property
    def most(self) -> int:
        """How many requests can be under way."""
        return len(self._slots) + self._queue

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def room(self) -> int:
        """How many requests more may come now."""
        return self.most - len(self._requests)

    def request_in(self, slot: int) -> int | None:
        """The request that a slot works for."""
        return self._slots[slot].request

    # --- what comes and goes
    def submit(self, tokens: Sequence[int], deadline: float | None = None) -> int | None:
        """Takes a request for an answer to these tokens, one at the least; its number, or None if
        there is no room."""
        assert tokens, "a prompt has one token at least"
        if self.room <= 0:
            return None
        self._numbers += 1
        request = _Request(self._numbers, tuple(tokens), deadline)
        self._requests[request.number] = request
        self._waiting.append(request.number)
        return request.number

    def end(self, number: int) -> None:
        """The request is over, whatever it was at; what its slot holds stays there.  Says nothing
        if it is over already."""
        request = self._requests.pop(number, None)
        if request is None:
            return
        if request.slot is None:
            self._waiting.remove(number)
            return
        slot = self._slots[request.slot]
        slot.request = slot.chosen = None
        if request is self._reading:
            self._reading = None

    def forget(self, slot: int) -> None:
        """What the slot holds is lost; it works for no request."""
        one = self._slots[slot]
        assert one.request is None, "its request is to be ended first"
        one.held.clear()
        one.used = 0

    def expired(self, now: float) -> list[int]:
        """The requests that are past their deadlines, for `end`."""
        return [
            number
            for number, request in self._requests.items()
            if request.deadline is not None and request.deadline <= now
        ]

    # --- what is to be done
    def next(self) -> SchedulerAction | None:
        """What is to be done now; None if there is nothing.  Changes nothing."""
        reader = self._reading
        if reader is None and self._waiting:
            idle = [slot for slot in self._slots if slot.request is None]
            if idle:
                return self._place(self._requests[self._waiting[0]], idle)
        decoding = tuple(slot.index for slot in self._slots if slot.chosen is not None)
        if reader is not None and reader.slot is not None:
            end = min(reader.read + self._piece, len(reader.tokens))
            if not decoding or end - reader.read <= self._left:
                last = end == len(reader.tokens)
                return Read(reader.number, reader.slot, reader.read, end, last)
        return Decode(decoding, single=reader is not None) if decoding else None

    def _place(self, request: _Request, idle: Sequence[_Slot]) -> Admit:
        """Where most of its prompt is; in place if that costs no other request much, else copied to
        the slot that was not used for the longest time."""
        oldest = min(idle, key=lambda slot: (slot.used, slot.index))
        if not self._reuse:
            return Admit(request.number, oldest.index, 0)
        wanted = request.tokens[:-1]  # one is left to be read, so that a token is chosen after it
        shared = {slot.index: common(wanted, slot.held) for slot in self._slots}
        best = max(idle, key=lambda slot: (shared[slot.index], -slot.used, -slot.index))
        # In place if what the slot loses is less than what it keeps.
        target = best if 2 * shared[best.index] > len(best.held) else oldest
        source = max(self._slots, key=lambda slot: (shared[slot.index], slot is target))
        kept = shared[target.index]
        if shared[source.index] >= kept + _WORTH_A_COPY:
            return Admit(request.number, target.index, shared[source.index], source.index)
        return Admit(request.number, target.index, kept)

    # --- what was done
    def done(self, action: Admit | Read) -> None:
        """The action was done.  Its request may be over by now: then its slot holds the tokens, and
        works for no one."""
        if isinstance(action, Admit):
            self._placed(action)
        else:
            self._was_read(action)

    def _placed(self, action: Admit) -> None:
        slot = self._slots[action.slot]
        if action.source is None:
            del slot.held[action.kept :]
        else:
            slot.held = self._slots[action.source].held[: action.kept]
        self._uses += 1
        slot.used = self._uses
        request = self._requests.get(action.request)
        if request is None:
            return
        assert self._waiting[0] == request.number and slot.request is None
        self._waiting.popleft()
        request.slot, request.read = action.slot, action.kept
        slot.request = request.number
        self._reading = request

    def _was_read(self, action: Read) -> None:
        slot, request = self._slots[action.slot], self._requests.get(action.request)
        size = action.end - action.start
        self._left = max(0, self._left - size)
        if request is None:
            return  # what was read is behind what `held` says, where the next request overwrites it
        slot.held += request.tokens[action.start : action.end]
        request.read = action.end
        if action.last:
            self._reading = None

    def stepped(self) -> None:
        """A step of those that decode was done: prompts may be read again."""
        self._left = self._piece

    def chosen(self, slot: int, token: int) -> None:
        """The next token of the request in a slot: after the end of its prompt, or by a step.  Not
        of interest if there is no request (any more)."""
        one = self._slots[slot]
        if one.request is None:
            return
        if one.chosen is not None:
            one.held.append(one.chosen)
        one.chosen = token


def common(tokens: Sequence[int], held: Iterable[int]) -> int:
    """How many tokens both begin with."""
    theirs = tuple(held)
    least, most = 0, min(len(tokens), len(theirs))
    # By halves: comparing slices is a hundred times faster than a loop over tokens.
    while least < most:
        middle = (least + most + 1) // 2
        if tokens[least:middle] == theirs[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
