"""Ranks that capture a function together, or not at all: `Agreement`, with ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ostinato.errors import DeadlineError, DisagreementError
from ostinato.interop.reading.together import Agreement


class Texts:
    """A store in this process."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.changed = threading.Condition()

    def set(self, name: str, text: str, /) -> None:
        with self.changed:
            assert name not in self.texts  # a rank says one thing in a round
            self.texts[name] = text
            self.changed.notify_all()

    def get(self, name: str, seconds: float, /) -> str | None:
        with self.changed:
            self.changed.wait_for(lambda: name in self.texts, seconds)
            return self.texts.get(name)


class Executable:
    def __init__(self, text: str) -> None:
        self.text, self.closed = text, False

    def close(self) -> None:
        self.closed = True


class CannotError(Exception):
    pass


def on_ranks(
    work: Callable[[int, Agreement], Any], size: int = 3, deadline: float = 60
) -> list[Any]:
    """What each rank returns or raises; the ranks have the numbers 4, 5 and 6."""
    store = Texts()

    def rank(place: int) -> Any:
        ranks = range(4, 4 + size)
        one = Agreement(store, place, ranks, name="f", deadline=deadline)
        try:
            return work(place, one)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def together(one: Agreement, make: Callable[[], Executable]) -> Any:
    return one.together(make, lambda made: made.text, CannotError)  # type: ignore[arg-type,type-var,attr-defined,return-value]


def test_ranks_that_do_the_same_go_on() -> None:
    def work(place: int, one: Agreement) -> Any:
        for turn in range(5):
            one.agree(f"runs {turn}")
        return together(one, lambda: Executable("sum\nsum")).closed

    assert on_ranks(work) == [False] * 3


def test_a_rank_that_does_something_else_is_named() -> None:
    def work(place: int, one: Agreement) -> None:
        one.agree("runs it")
        one.agree("runs it again" if place == 1 else "captures it")

    found = on_ranks(work)
    assert all(isinstance(one, DisagreementError) for one in found)
    assert "rank 5 runs it again, this rank captures it" in str(found[0])
    assert "rank 4 captures it, this rank runs it again" in str(found[1])
    assert [one.rank for one in found] == [4, 5, 6]


def test_a_rank_that_does_not_come_is_named_at_the_deadline() -> None:
    def work(place: int, one: Agreement) -> None:
        if place != 2:
            one.agree("captures it")

    found = on_ranks(work, deadline=0.2)
    assert found[2] is None
    for one in found[:2]:
        assert isinstance(one, DeadlineError)
        assert "rank 6 did not come within 0.2 s, while this rank captures it" in str(one)


@pytest.mark.parametrize("failing", [(1,), (0, 2), (0, 1, 2)])
def test_none_has_a_graph_if_one_could_not_capture(failing: tuple[int, ...]) -> None:
    made: list[Executable] = []

    def work(place: int, one: Agreement) -> None:
        def make() -> Executable:
            if place in failing:
                raise ValueError(f"no graph at {place}")
            made.append(Executable("sum"))
            return made[-1]

        try:
            together(one, make)
        finally:
            one.agree("runs it eagerly")  # the ranks still agree

    found = on_ranks(work)
    assert len(made) == 3 - len(failing) and all(one.closed for one in made)
    for place, error in enumerate(found):
        assert isinstance(error, CannotError)
        if place in failing:
            assert str(error) == f"no graph at {place}"
        else:
            assert f"rank {4 + failing[0]} could not capture it: no graph at" in str(error)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("sum\nsum\nsum", "rank 5 captured it with other messages between ranks: also sum"),
        ("sum", "rank 5 captured it with other messages between ranks: not sum"),
        ("sum\ngather", "other messages between ranks: gather, this rank sum"),
    ],
)
def test_graphs_with_other_messages_are_named_and_closed(other: str, words: str) -> None:
    made = [Executable("sum\nsum"), Executable(other), Executable("sum\nsum")]
    found = on_ranks(lambda place, one: together(one, lambda: made[place]))
    assert all(isinstance(one, DisagreementError) for one in found)
    assert words in str(found[0])
    assert all(one.closed for one in made)


def test_an_interrupted_capture_ends_the_others_at_once() -> None:
    def work(place: int, one: Agreement) -> Any:
        def make() -> Executable:
            if place == 0:
                raise KeyboardInterrupt
            return Executable("")

        try:
            return together(one, make)
        except KeyboardInterrupt:
            return "interrupted"

    found = on_ranks(work)
    assert found[0] == "interrupted"
    assert all("rank 4 could not capture it: KeyboardInterrupt" in str(one) for one in found[1:])


def test_ranks_that_did_not_agree_never_compare_again() -> None:
    def work(place: int, one: Agreement) -> None:
        with pytest.raises(DisagreementError, match=f"rank {5 - place}"):
            one.agree(f"runs {place}")
        one.agree("runs the same")

    found = on_ranks(work, size=2)
    assert all("have not agreed before (rank" in str(one) for one in found)
