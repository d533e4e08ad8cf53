"""The scheduler against a decoder of lists: nothing is lost, first come is first, limits hold."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.serve.scheduler import Admit, Decode, Read, Scheduler, common

LONGEST = 90


@dataclass
class Wanted:
    """A request as its client knows it; `answer`: tokens that are wanted of it."""

    prompt: list[int]
    answer: int
    deadline: float | None
    got: list[int] = field(default_factory=list)


def next_token(held: list[int]) -> int:
    """What the model says after these tokens: a function of all of them."""
    return 1000 + hash(tuple(held)) % 1000


@dataclass
class World:
    """A scheduler, what a decoder's slots really hold, and what is checked at each step."""

    slots: int
    queue: int
    piece: int
    reuse: bool = True
    clock: float = 0.0
    read_since_step: int = 0
    tokens_read: int = 0
    order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.slots, self.queue, self.piece, reuse=self.reuse)
        self.caches: list[list[int]] = [[] for _ in range(self.slots)]
        self.live: dict[int, Wanted] = {}
        self.over: dict[int, Wanted] = {}
        self.waiting: deque[int] = deque()
        self.skipped: dict[int, int] = {}

    def submit(self, wanted: Wanted) -> int | None:
        room = self.slots + self.queue - len(self.live)
        assert self.scheduler.room == room and self.scheduler.under_way == len(self.live)
        number = self.scheduler.submit(wanted.prompt, wanted.deadline)
        assert (number is None) == (room == 0), "refused exactly where there is no room"
        if number is not None:
            self.live[number] = wanted
            self.waiting.append(number)
        assert self.scheduler.waiting == len(self.waiting)
        return number

    def end(self, number: int) -> None:
        self.scheduler.end(number)
        self.over[number] = self.live.pop(number)
        if number in self.waiting:
            self.waiting.remove(number)
        self.skipped.pop(number, None)

    def act(self, cancelled: int | None = None) -> bool:
        """One action; a request may be cancelled while it is done.  False if there is none."""
        action = self.scheduler.next()
        assert action == self.scheduler.next(), "asking changes nothing"
        if action is None:
            assert not self.live, "something is under way, and nothing is to be done"
            return False
        if isinstance(action, Admit):
            self.place(action)
        elif isinstance(action, Read):
            self.read(action)
        if cancelled is not None and cancelled in self.live:
            self.end(cancelled)
        if isinstance(action, Admit):
            self.scheduler.placed(action)
        elif isinstance(action, Read):
            self.scheduler.was_read(action)
            if action.last and action.request in self.live:
                self.choose(action.slot, action.request)
        else:
            self.decode(action)
        return True

    def place(self, action: Admit) -> None:
        assert action.request == self.waiting.popleft(), "first come, first served"
        self.order.append(action.request)
        prompt = self.live[action.request].prompt
        assert self.scheduler.request_in(action.slot) is None
        assert 0 <= action.kept < len(prompt), "one token at least is left to be read"
        assert self.reuse or action.kept == 0
        held = self.caches[action.slot if action.source is None else action.source]
        assert held[: action.kept] == prompt[: action.kept], "those tokens are not there"
        self.caches[action.slot] = held[: action.kept]

    def read(self, action: Read) -> None:
        prompt, cache = self.live[action.request].prompt, self.caches[action.slot]
        assert self.scheduler.request_in(action.slot) == action.request
        assert cache[: action.start] == prompt[: action.start]
        assert 0 < action.end - action.start <= self.piece
        assert action.last == (action.end == len(prompt))
        cache[action.start :] = prompt[action.start : action.end]
        size = action.end - action.start
        self.tokens_read += size
        self.read_since_step += size
        if any(w.got for w in self.live.values()):
            assert self.read_since_step <= self.piece, "those that decode wait for too long"

    def decode(self, action: Decode) -> None:
        assert 0 < len(set(action.slots)) == len(action.slots) <= self.slots
        decoding = {n for n, w in self.live.items() if w.got}
        stepped = {self.scheduler.request_in(slot) for slot in action.slots} - {None}
        assert stepped == decoding, "each of them gets its token in each step"
        for slot in action.slots:
            number = self.scheduler.request_in(slot)
            if number is not None:
                self.caches[slot].append(self.live[number].got[-1])
                self.choose(slot, number)
        self.scheduler.stepped()
        self.read_since_step = 0

    def choose(self, slot: int, number: int) -> None:
        token, wanted = next_token(self.caches[slot]), self.live[number]
        assert self.caches[slot] == wanted.prompt + wanted.got
        wanted.got.append(token)
        self.scheduler.chosen(slot, token)
        if len(wanted.got) == wanted.answer:
            self.end(number)

    def check_end(self) -> None:
        for _ in range(10_000):
            if not self.act():
                break
        assert not self.live and self.scheduler.under_way == 0
        assert self.scheduler.room == self.slots + self.queue
        for wanted in self.over.values():
            held = list(wanted.prompt)
            for token in wanted.got:  # each request's own answer, whatever was beside it
                assert token == next_token(held)
                held.append(token)


prompts = st.one_of(  # few, so that the same one comes again
    st.sampled_from([[1], [1, 2], [*range(20)], [*range(20), 7], [*range(60)]]),
    st.builds(
        lambda shared, own: [*range(shared), *own],
        st.integers(0, 60),
        st.lists(st.integers(100, 103), min_size=1, max_size=LONGEST - 60),
    ),
)
wanted = st.builds(Wanted, prompts, st.integers(1, 12), st.none() | st.floats(0, 40))
steps = st.lists(
    st.one_of(
        wanted,
        st.lists(wanted, min_size=2, max_size=8),
        st.tuples(st.just("act"), st.none() | st.integers(0, 200)),
        st.tuples(st.just("cancel"), st.integers(0, 200)),
        st.tuples(st.just("later"), st.floats(0, 5)),
    ),
    max_size=120,
)


@given(
    slots=st.integers(1, 5),
    queue=st.integers(0, 6),
    piece=st.integers(1, 64),
    reuse=st.booleans(),
    steps=steps,
)
def test_nothing_is_lost_whatever_comes_and_goes(
    slots: int, queue: int, piece: int, reuse: bool, steps: list[object]
) -> None:
    world = World(slots, queue, piece, reuse)
    submitted: list[int] = []
    for step in steps:
        match step:
            case Wanted() | [Wanted(), *_]:
                for one in [step] if isinstance(step, Wanted) else step:
                    number = world.submit(replace(one, got=[]))
                    if number is not None:
                        submitted.append(number)
            case ("act", chosen):
                numbers = [*world.live]
                world.act(None if chosen is None or not numbers else numbers[chosen % len(numbers)])
            case ("cancel", chosen):
                numbers = [*world.live]
                if numbers:
                    world.end(numbers[chosen % len(numbers)])
            case ("later", seconds):
                world.clock += seconds
                late = {
                    number
                    for number, wanted in world.live.items()
                    if wanted.deadline is not None and wanted.deadline <= world.clock
                }
                assert set(world.scheduler.expired(world.clock)) == late
                for number in late:
                    world.end(number)
    world.check_end()
    assert sorted(submitted) == sorted(world.over), "each is over, once"
    assert world.order == sorted(world.order), "in the order in which they came"


def test_the_same_prompt_again_is_read_but_for_one_token() -> None:
    world = World(slots=1, queue=0, piece=64)
    for read in (30, 31):
        world.submit(Wanted([*range(30)], 2, None))
        world.check_end()
        assert world.tokens_read == read


def test_a_request_of_a_thousand_is_not_overtaken() -> None:
    """A flood of short requests does not keep a long prompt from being read."""
    world = World(slots=2, queue=50, piece=8)
    long = world.submit(Wanted([*range(400)], 5, None))
    for number in range(40):
        world.submit(Wanted([number + 500, 7], 3, None))
    assert long is not None
    actions = 0
    while long in world.live:
        assert world.act()
        actions += 1
        if world.scheduler.room:
            world.submit(Wanted([900, actions], 1, None))
    assert actions < 2 * 400 / 8 + 40


def test_prompts_that_begin_alike_are_read_once() -> None:
    """Also by requests that come at the same time, and while the first one is still decoded."""
    shared = [*range(64)]
    world = World(slots=4, queue=8, piece=16)
    for number in range(8):
        world.submit(Wanted([*shared, 100 + number, 7], 30, None))
    world.check_end()
    assert world.tokens_read == len(shared) + 8 * 2
    without = World(slots=4, queue=8, piece=16, reuse=False)
    for number in range(8):
        without.submit(Wanted([*shared, 100 + number, 7], 30, None))
    without.check_end()
    assert without.tokens_read == 8 * (len(shared) + 2)


def test_a_conversation_goes_on_in_its_slot_and_others_keep_theirs() -> None:
    world = World(slots=3, queue=0, piece=64)
    first, second = Wanted([*range(40)], 3, None), Wanted([*range(200, 240)], 3, None)
    for wanted in (first, second):
        world.submit(wanted)
        world.check_end()
    read = world.tokens_read
    world.submit(Wanted([*first.prompt, *first.got[:-1], 9, 8], 2, None))
    world.check_end()
    assert world.tokens_read == read + 2, "the answer's tokens are in the cache, too"
    world.submit(Wanted([5, 6, 7], 2, None))  # nothing in common: it takes the third slot
    world.submit(Wanted([*second.prompt, *second.got[:-1], 9], 2, None))
    world.check_end()
    assert world.tokens_read == read + 2 + 3 + 1


@pytest.mark.parametrize(("shared", "kept"), [(5, 1), (20, 0)])
def test_a_slot_is_taken_over_only_by_what_shares_most_of_it(shared: int, kept: int) -> None:
    """Little in common with the slot used last: the other one is taken.  Much: that one itself."""
    world = World(slots=2, queue=0, piece=64)
    prompts = [*range(30)], [*range(100, 130)]
    for prompt in (*prompts, [*prompts[1][:shared], 9, 8, 7]):
        world.submit(Wanted(prompt, 2, None))
        world.check_end()
    read = world.tokens_read
    world.submit(Wanted(prompts[kept], 2, None))
    world.check_end()
    assert world.tokens_read == read + 1


def test_a_copy_holds_what_was_copied_and_no_more() -> None:
    world = World(slots=2, queue=2, piece=64)
    first = Wanted([*range(40), *range(100, 120)], 50, None)
    world.submit(first)
    while not first.got:
        world.act()
    second = world.submit(Wanted([*range(40), 7], 1, None))
    while second in world.live:
        world.act()
    assert world.caches[1] == [*range(40), 7] and world.tokens_read == 61
    world.submit(Wanted(first.prompt, 2, None))  # all of it is in the other's slot alone
    world.check_end()
    assert world.tokens_read == 62


def test_what_a_slot_lost_is_read_again() -> None:
    world = World(slots=1, queue=0, piece=64)
    world.submit(Wanted([*range(30)], 2, None))
    world.check_end()
    world.scheduler.forget(0)
    world.caches[0].clear()
    world.submit(Wanted([*range(30)], 2, None))
    world.check_end()
    assert world.tokens_read == 60


def test_those_that_decode_step_between_the_pieces_of_a_prompt() -> None:
    world = World(slots=2, queue=0, piece=10)
    world.submit(Wanted([1, 2, 3], 30, None))
    world.act()
    world.act()
    world.submit(Wanted([*range(100, 135)], 1, None))
    seen = []
    for _ in range(9):
        seen.append(type(world.scheduler.next()))
        if seen[-1] is Decode:
            assert world.scheduler.next() == Decode((0,), single=True)
        world.act()
    assert seen == [Admit, *[Decode, Read] * 4]
    assert world.scheduler.next() == Decode((0,), single=False)


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_common_is_the_longest(one: list[int], other: list[int]) -> None:
    count = common(tuple(one), other)
    assert one[:count] == other[:count]
    assert count == min(len(one), len(other)) or one[count] != other[count]
