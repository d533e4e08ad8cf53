"""Running ahead: the next steps are launched before the last tokens are read.

    launched   ■ ■ ■ ■ ■ ■ . .      steps launched: the one waited for, and `ahead` launches more
    taken      ■ ■ ■ . . . . .      tokens that the caller has

A step advances the state on the device, so a launch needs nothing from the host; and once all rows
of a step have stopped they are padding, so an extra step changes nothing.  Tokens come through the
ring: at most as many as the ring holds are launched and not taken, so none is overwritten unread.
A step that drafts gives each sequence one token or more; the ring says which is its last.  Its
tokens are taken as items of one token for each sequence that has more, before those of the next.

With masks, which depend on the tokens before, only a step's layers are launched ahead: its ending
follows once its masks are made, while the layers run.

When a run ends, tokens that were launched and not taken are dropped.  The next step then gets token
and position from the host (`Sequence.on_device` is False), and overwrites the cache behind them.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Generic, Self, TypeVar

from ostinato.driver.closeable import Closeable
from ostinato.errors import ClosedError, InputError, NotHeldError
from ostinato.models.arguments import whole
from ostinato.models.calls import Calls
from ostinato.models.sequences import Sequence
from ostinato.models.stepper import Stepper, TokenMasks
from ostinato.step import Action, Decision

T = TypeVar("T")

_AHEAD = 2
_HOST_STATE = "the host sets the state before each step (device_state is off)"
_NO_GRAPH_DRAFTS = "no drafts: steps have no graph"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a run.

    `count`: most tokens of each sequence; None for no limit.  `tokens_per_launch`: more than 1 uses
    a graph with a loop on the device, which ends when all rows have stopped.
    `ahead`: launches under way besides the one whose tokens the host waits for; None for 2, or
    fewer if the ring cannot hold so many tokens.
    """

    count: int | None = None
    tokens_per_launch: int = 1
    ahead: int | None = None

    def checked(self, ring: int) -> RunOptions:
        """Returns the options with `ahead` filled in.  Raises InputError for invalid numbers, or
        for numbers that need more entries than the `ring` has."""
        count = None if self.count is None else whole(self.count, "count", 1)
        tokens = whole(self.tokens_per_launch, "tokens_per_launch")
        if not 1 <= tokens <= ring:
            raise InputError(
                f"tokens_per_launch is {tokens}, must be 1 to {ring}, which is what the ring holds"
            )
        most = ring // tokens - 1
        ahead = min(_AHEAD, most) if self.ahead is None else whole(self.ahead, "ahead")
        if not 0 <= ahead <= most:
            raise InputError(
                f"ahead is {ahead}, must be 0 to {most}: the ring holds {ring} tokens, and "
                f"{tokens} come with each launch"
            )
        return RunOptions(count, tokens, ahead)


@dataclass(frozen=True, slots=True)
class _Launches:
    """A function `call` that launches `tokens` steps, and how often it may be called (`most`; None
    for no limit)."""

    call: Callable[[], object]
    tokens: int
    most: int | None = None


class Run(Closeable, Generic[T]):
    """An iterator over the next tokens of one or more sequences, made by `Decoder`.

    It ends where all its sequences have stopped, or after `count` tokens of each; or by `close()`
    or the end of a `with` block, which drop tokens that were computed and not taken.  Any other use
    of the decoder ends it too; its next step then raises ClosedError.  An exception ends it.
    """

    def __init__(
        self,
        stepper: Stepper,
        sequences: list[Sequence],
        options: RunOptions,
        calls: Calls,
        *,
        device_state: bool,
        drafts: bool = False,
        masks: TokenMasks | None = None,
    ) -> None:
        self._stepper = stepper
        self._calls = calls  # shared with the decoder
        self._live = sequences
        self._left = options.count
        """The most steps whose tokens are still to be taken; None for no limit."""
        self._ends = {
            one.index: len(one.tokens) + options.count
            for one in sequences
            if options.count is not None
        }
        """The tokens that each sequence has at the end, if there is a limit."""
        self._per_launch = options.tokens_per_launch
        self._ahead = options.ahead or 0
        self._device_state = device_state
        self._drafts = drafts
        self._masks = masks
        self._begun = False  # layers are launched whose tokens have no masks yet
        self._within: list[Sequence] = []  # those that have more tokens of the step taken last
        self._launched = self._taken = 0  # steps since `begin_ahead`
        self._stepped: list[Sequence] = []  # the sequences of these steps
        self._through: dict[int, int] = {}  # the steps taken of those that need no more tokens
        self._over = False
        self._ended_by: str | None = None
        self._work = self._steps()

    def __repr__(self) -> str:
        state = f"ended by {self._ended_by}" if self._ended_by else "over" if self._over else "open"
        return f"<{type(self).__name__} of {len(self._live)} sequences, {state}>"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """Returns the next tokens.  Raises StopIteration, ClosedError, InputError while another
        call of the decoder is under way, and the errors of a step.

        A LogitsError ends the run, and holds the tokens of the sequences that have one; a new run
        can continue these sequences.
        """
        if self._ended_by is not None:
            raise ClosedError(
                f"the run was ended by {self._ended_by}, and what was computed ahead is dropped; "
                "begin another"
            )
        if self._calls.lead is not None:
            for item in self._some(1):
                return item
            raise StopIteration
        calls, name = self._calls, "Run.__next__"  # `alone`, written out
        if calls.lock.locked():
            raise calls.overlap(name)
        with calls.lock:
            calls.name = name
            try:
                return next(self._work)
            except BaseException:  # StopIteration too
                self._over = True
                raise

    def take(self, count: int, each: Callable[[T], object]) -> int:
        """Calls `each` with every one of the next `count` items, as soon as it is there; returns
        their number, which is less once the run has ended.

        Of several ranks of which one leads, these are one call, so that the ranks exchange less
        (`models.leading`).  `each` must not change the decoder or the run.  Its first exception is
        raised once all of these items are taken, and the rest of them is dropped.  Raises the
        errors of `__next__`.
        """
        if self._ended_by is not None:
            next(self)
        failed: list[BaseException] = []

        def give(item: T) -> None:
            if not failed:
                try:
                    each(item)
                except BaseException as error:
                    failed.append(error)

        found = self._some(count, give)
        if failed:
            raise failed[0]
        return len(found)

    def _some(self, count: int, each: Callable[[T], object] = lambda item: None) -> list[T]:
        calls, name = self._calls, "Run.take"
        if calls.lock.locked():
            raise calls.overlap(name)
        with calls.lock:
            calls.name = name
            try:
                if calls.lead is None or self._over:
                    found = self.repeat(self._left, count, each)
                else:
                    given = (self._left, count)
                    found = calls.lead.call(name, self.repeat, given, {"each": each})
            except BaseException:
                self._over = True
                raise
            self._over = self._over or len(found) < count
            return found

    def repeat(
        self, left: int | None, count: int, each: Callable[[T], object] = lambda item: None
    ) -> list[T]:
        """Returns the next `count` items of a run that gives `left` more, fewer at its end: `take`
        of a rank that follows another (`models.leading`)."""
        self._left = left
        found = []
        for item in islice(self._work, count):
            each(item)
            found.append(item)
        return found

    @abstractmethod
    def _item(self, sequences: list[Sequence], chosen: list[int]) -> T:
        """Returns the item of one step, from its sequences and the tokens chosen for them."""

    # --- the end
    def close(self) -> None:
        """Ends the run; drops tokens that were computed and not taken.  Idempotent, does not wait.

        Raises InputError while another thread waits for the run's next tokens.
        """
        if inspect.getgeneratorstate(self._work) == inspect.GEN_RUNNING:
            raise InputError(f"close() was called while the next tokens of {self!r} are waited for")
        self._over = True
        self._work.close()

    def finish(self) -> None:
        """Stops launching: the run ends once all launched tokens are taken, and drops none, so the
        next step continues from the state on the device."""
        self._left = self._launched - self._taken + self._begun

    def end(self, by: str) -> None:
        """Ends the run because of the call `by`, which a later step's ClosedError names."""
        if not self._over and self._live and self._left != 0:
            self._ended_by = by
        self.close()

    @property
    def within_step(self) -> bool:
        """True if the next item holds more tokens of the step whose tokens the last one held."""
        return bool(self._within)

    def is_ahead(self, sequence: Sequence) -> bool:
        """True if launches of this run have computed, or will compute, tokens of the sequence that
        were not taken."""
        taken = self._taken
        if self._within and sequence not in self._within:
            taken += 1  # all that the step gives it
        taken = self._through.get(sequence.index, taken)
        return self._launched > taken and sequence in self._stepped and not sequence.stopped

    # --- the steps
    def _steps(self) -> Generator[T, None, None]:
        if not self._device_state:
            self._note(_HOST_STATE)
        while self._live and self._left != 0:
            live, masks = self._live, self._masks
            if masks is not None and self._from_device():
                yield from self._go_masked(masks)
                continue
            with ExitStack() as stack:
                launches = None if masks is not None else self._find(stack)
                if launches is not None:
                    yield from self._go_ahead(launches)
                    continue
            state = self._device_state
            chosen = self._stepper.together(live, device_state=state, masks=masks)
            yield self._hand(live, chosen)

    def _from_device(self) -> bool:
        """True if each sequence's next token and position are on the device."""
        return self._device_state and all(sequence.on_device for sequence in self._live)

    def _find(self, stack: ExitStack) -> _Launches | None:
        """Returns the launches to run ahead, whose graph `stack` holds; None for one step with a
        wait: the host must set a sequence's position first, or there is no graph (yet)."""
        steps, rows = self._stepper.steps, self._stepper.rows(self._live)
        drafts = self._drafts
        if not self._from_device():
            return None
        for tokens in dict.fromkeys((self._per_launch, 1)):
            if self._left is not None and self._left < tokens:
                continue
            try:
                held = stack.enter_context(steps.hold(rows, tokens=tokens, drafts=drafts))
            except NotHeldError as refused:
                call: Decision = refused.decision
                if (tokens > 1 or drafts) and call.action is not Action.EAGER:
                    # Built now, or checked against eager steps.
                    once = partial(steps, rows, tokens=tokens, drafts=drafts)
                    return _Launches(once, tokens, most=1)
                if tokens > 1:
                    self._note(call.reason.value)
                    self._per_launch = 1  # for the rest of this run
                elif drafts:
                    self._note(_NO_GRAPH_DRAFTS)
                    self._drafts = False
            else:
                return _Launches(held.launch, tokens)
        return None

    def _note(self, reason: str) -> None:
        """Counts a reason why the run does not go as asked."""
        self._stepper.phases.one_by_one[reason] += 1

    def _go_ahead(self, launches: _Launches) -> Generator[T, None, None]:
        room = max(sequence.room for sequence in self._live)
        with self._running_ahead():
            while self._live and self._left != 0:
                self._launch(launches, room)
                if self._launched == self._taken:
                    break  # fewer tokens are left than one more launch would give
                yield self._take()

    def _go_masked(self, masks: TokenMasks) -> Generator[T, None, None]:
        stepper, drafts = self._stepper, self._drafts
        rows = stepper.rows(self._live, masks)
        with self._running_ahead():
            while self._live and self._left != 0:
                if not self._begun:
                    stepper.steps(rows, sampled=False, drafts=drafts)
                stepper.choose(rows, masks, self._live, drafts=drafts)
                self._launched += 1
                self._begun = self._left != 1
                if self._begun:
                    stepper.steps(rows, sampled=False, drafts=drafts)
                yield self._take()
                while self._within:
                    yield self._take()

    @contextmanager
    def _running_ahead(self) -> Iterator[None]:
        """Steps of the live sequences are launched before their tokens are taken."""
        self._stepped = self._live
        self._launched = self._taken = 0
        self._within, self._through = [], {}
        self._stepper.begin_ahead(self._live, drafts=self._drafts, masks=self._masks)
        try:
            yield
        finally:
            self._begun = False
            self._stepper.end_ahead(self._stepped, self.is_ahead)

    def _take(self) -> T:
        """Takes the next tokens: what is left of a step, or the first tokens of the next one."""
        stepper, due, more = self._stepper, self._within or self._live, []
        chosen = stepper.take_next(due)
        if self._drafts:
            more = stepper.count_drafted(due, first=not self._within)
        item = self._hand(due, chosen, more)
        self._taken += not self._within
        return item

    def _launch(self, launches: _Launches, room: int) -> None:
        """Launches until `ahead` launches are under way besides the one that the host waits for,
        all sequences have stopped for certain, or all wanted tokens are launched."""
        tokens, most, left = launches.tokens, launches.most, self._left
        while (behind := self._launched - self._taken) <= self._ahead * tokens:
            if self._launched >= room or (left is not None and behind + tokens > left):
                return
            if most is not None and self._launched >= most * tokens:
                return
            self._launched += tokens  # before the call: an interruption must not hide a launch
            launches.call()

    def _hand(self, due: list[Sequence], chosen: list[int], more: Collection[Sequence] = ()) -> T:
        """Returns the item of the tokens chosen for the sequences `due`, after it has dropped the
        sequences that need none after them.  `more`: those with another token of this step."""
        ends = self._ends
        done = [s for s in due if s.stopped or (ends and len(s.tokens) >= ends[s.index])]
        if done:
            for one in done:
                self._through[one.index] = self._taken + (one not in more)
            self._live = [one for one in self._live if one not in done]
        self._within = [one for one in more if one not in done]
        if self._left is not None and not self._within:
            self._left -= 1
            if ends and self._drafts and self._live:  # a step may have given more than one token
                needed = max(ends[one.index] - len(one.tokens) for one in self._live)
                self._left = min(self._left, needed)
        return self._item(due, chosen)


class TokenRun(Run[int]):
    """A run of one sequence: its items are tokens."""

    def _item(self, sequences: list[Sequence], chosen: list[int]) -> int:
        return chosen[0]


class BatchRun(Run[dict[int, int]]):
    """A run of several sequences: its items are {sequence: token}, see `Decoder.run_batch`."""

    def _item(self, sequences: list[Sequence], chosen: list[int]) -> dict[int, int]:
        return {s.index: token for s, token in zip(sequences, chosen, strict=True)}
