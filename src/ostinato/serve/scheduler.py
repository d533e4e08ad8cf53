"""Decides which request does what next.  Pure: no clock, no decoder, no I/O, no threads.

    waiting  ─Admit─▶  reading  ─Read, Read, …─▶  decoding  ─Decode, Decode, …─▶  over
      (a queue, first       (one at a time, its prompt       (all of them in one step)
       come first served)    in pieces)

The caller gets the `next` action, performs it, and reports it.  Prompts are read one at a time, and
a request gets a slot only when its prompt is next: so a prompt that shares a prefix with the one
before finds those tokens in that one's slot.  A slot keeps its tokens after its request is over,
for reuse by later requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

_WORTH_A_COPY = 16
"""Fewest tokens worth copying; fewer are computed as fast as copied."""


@dataclass(frozen=True, slots=True)
class Admit:
    """The action that gives a slot to a request.  The slot's KV cache is to hold the first `kept`
    tokens of the prompt: already there, or to be copied from the slot `source`."""

    request: int
    slot: int
    kept: int
    source: int | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """The action that computes the prompt tokens from `start` to `end` in the request's slot.  If
    `last`, the first token of the answer is chosen afterwards."""

    request: int
    slot: int
    start: int
    end: int
    last: bool


@dataclass(frozen=True, slots=True)
class Decode:
    """The action that decodes one more token for each slot, in one step.  `single`: only one step,
    since a prompt is being read; otherwise the caller may repeat it until `next` returns another
    action."""

    slots: tuple[int, ...]
    single: bool


SchedulerAction: TypeAlias = Admit | Read | Decode


@dataclass(slots=True)
class _Request:
    """A request under way.  `tokens`: the prompt.  `read`: number of its tokens in the KV cache."""

    number: int
    tokens: tuple[int, ...]
    deadline: float | None
    slot: int | None = None
    read: int = 0


@dataclass(slots=True)
class _Slot:
    """A sequence of the decoder.  `held`: tokens in its KV cache.  `chosen`: the latest token,
    which the cache holds only after the next step.  `used`: value of the use counter at its last
    use."""

    index: int
    request: int | None = None
    held: list[int] = field(default_factory=list)
    chosen: int | None = None
    used: int = 0


class Scheduler:
    """The requests under way, and the decision which action comes next.

    `slots`: requests decoded at the same time.  `queue`: further requests that may wait.  `piece`:
    prompt tokens that may be read between two decode steps.  `reuse`: whether tokens that a KV
    cache holds are kept rather than computed again.
    """

    def __init__(self, slots: int, queue: int, piece: int, *, reuse: bool = True) -> None:
        self._slots = tuple(_Slot(index) for index in range(slots))
        self._queue = queue
        self._piece = piece
        self._reuse = reuse
        self._requests: dict[int, _Request] = {}
        self._waiting: deque[int] = deque()
        self._reading: _Request | None = None
        self._left = piece  # prompt tokens that may be read before the next step
        self._uses = 0
        self._numbers = 0

    # --- state
    @property
    def under_way(self) -> int:
        """Number of requests that are not over."""
        return len(self._requests)

    @property
    def most(self) -> int:
        """Largest number of requests under way."""
        return len(self._slots) + self._queue

    @property
    def waiting(self) -> int:
        """Number of requests without a slot."""
        return len(self._waiting)

    @property
    def room(self) -> int:
        """Number of further requests that fit now."""
        return self.most - len(self._requests)

    def request_in(self, slot: int) -> int | None:
        """Returns the request that uses a slot, or None."""
        return self._slots[slot].request

    # --- requests
    def submit(self, tokens: Sequence[int], deadline: float | None = None) -> int | None:
        """Adds a request to answer these tokens (at least one); returns its number, or None if
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
        """Ends a request in any state; its slot keeps its tokens.  Does nothing if the request is
        over."""
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
        """Drops the tokens of a slot whose contents are lost; no request may use the slot."""
        one = self._slots[slot]
        assert one.request is None, "its request is to be ended first"
        one.held.clear()
        one.used = 0

    def expired(self, now: float) -> list[int]:
        """Returns the requests past their deadlines, for `end`."""
        return [
            number
            for number, request in self._requests.items()
            if request.deadline is not None and request.deadline <= now
        ]

    # --- actions
    def next(self) -> SchedulerAction | None:
        """Returns the action to perform now, or None.  Changes nothing."""
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
        """Chooses the slot of a request: the one with the longest common prefix if keeping it there
        loses few other tokens, else the least recently used one, with a copy of that prefix."""
        oldest = min(idle, key=lambda slot: (slot.used, slot.index))
        if not self._reuse:
            return Admit(request.number, oldest.index, 0)
        wanted = request.tokens[:-1]  # one token must be computed, to choose the answer's first one
        shared = {slot.index: common(wanted, slot.held) for slot in self._slots}
        best = max(idle, key=lambda slot: (shared[slot.index], -slot.used, -slot.index))
        # In place if the slot loses fewer tokens than it keeps.
        target = best if 2 * shared[best.index] > len(best.held) else oldest
        source = max(self._slots, key=lambda slot: (shared[slot.index], slot is target))
        kept = shared[target.index]
        if shared[source.index] >= kept + _WORTH_A_COPY:
            return Admit(request.number, target.index, shared[source.index], source.index)
        return Admit(request.number, target.index, kept)

    # --- reports
    def placed(self, action: Admit) -> None:
        """Reports an action as performed.  If its request is over by now, the slot keeps the tokens
        and stays free."""
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

    def was_read(self, action: Read) -> None:
        """Reports an action as performed; see `placed`."""
        slot, request = self._slots[action.slot], self._requests.get(action.request)
        size = action.end - action.start
        self._left = max(0, self._left - size)
        if request is None:
            return  # those tokens are beyond `held`: the next request overwrites them
        slot.held += request.tokens[action.start : action.end]
        request.read = action.end
        if action.last:
            self._reading = None

    def stepped(self) -> None:
        """Reports a decode step: prompts may be read again."""
        self._left = self._piece

    def chosen(self, slot: int, token: int) -> None:
        """Reports the next token of the request in a slot, after its prompt or after a step.
        Ignored if the slot has no request."""
        one = self._slots[slot]
        if one.request is None:
            return
        if one.chosen is not None:
            one.held.append(one.chosen)
        one.chosen = token


def common(tokens: Sequence[int], held: Iterable[int]) -> int:
    """Returns the length of the common prefix."""
    theirs = tuple(held)
    least, most = 0, min(len(tokens), len(theirs))
    # Binary search: comparing slices is a hundred times faster than a loop over tokens.
    while least < most:
        middle = (least + most + 1) // 2
        if tokens[least:middle] == theirs[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
