"""Random lives: rules in random order, each with its oracle; a failing life is made short.

A world is a class whose methods are marked as rules.  A life draws one rule after the other by
weights that change from season to season, so that every rule meets every other both often and
seldom, and draws the rule's arguments, which are plain values.  So a life is a program that can be
run again, in part too: what fails is reduced to the steps that it takes, and printed as code.

Not Hypothesis' stateful tests: of 3,000 steps that they drew here none launched an executable and
four rebound one, since what they draw is close to the simplest, and their lives end after some
hundred steps.
"""

from __future__ import annotations

import contextlib
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Draw = Callable[[random.Random], Any]
Rule = TypeVar("Rule", bound=Callable[..., None])

SEASON = 150
"""Steps after which other rules are likely."""
PATIENCE = 60.0
"""Seconds that the reduction of a failing life may take."""


def BYTE(rng: random.Random) -> int:
    return rng.randrange(256)


def integers(low: int, high: int) -> Draw:
    return lambda rng: rng.randint(low, high)


def booleans() -> Draw:
    return lambda rng: rng.random() < 0.5


def sampled(*values: object) -> Draw:
    return lambda rng: rng.choice(values)


def tuples(*draws: Draw) -> Draw:
    return lambda rng: tuple(draw(rng) for draw in draws)


def lists(draw: Draw, least: int, most: int) -> Draw:
    return lambda rng: [draw(rng) for _ in range(rng.randint(least, most))]


@dataclass(frozen=True)
class _Marked:
    draws: dict[str, Draw]
    weight: float
    when: Callable[[Any], object]


def rule(
    weight: float = 1.0, when: Callable[[Any], object] = lambda world: True, **draws: Draw
) -> Callable[[Rule], Rule]:
    """Marks a method as a rule: how likely it is, when it can come, and its arguments."""

    def mark(method: Rule) -> Rule:
        method.__dict__["rule"] = _Marked(draws, weight, when)
        return method

    return mark


class World(Protocol):
    """What has rules.  `end` checks that all is as it was in the beginning; `abandon` only tidies
    up after a failure; `check` is called after each step.  `counts`: what it counts by itself."""

    counts: Counter[str]

    def begin(self) -> None: ...

    def check(self) -> None: ...

    def end(self) -> None: ...

    def abandon(self) -> None: ...


@dataclass(frozen=True)
class Step:
    """One call of a rule."""

    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"world.{self.name}({given})"


@dataclass(frozen=True)
class Failure:
    """What failed after which steps; the last one failed, or the end of the life if `at_end`."""

    error: BaseException
    steps: list[Step]
    at_end: bool

    @property
    def kind(self) -> str:
        """What it takes to be the same failure: the same error from the same line."""
        frames = traceback.extract_tb(self.error.__traceback__)
        return f"{type(self.error).__name__} at {frames[-1].filename}:{frames[-1].lineno}"


Kind = Callable[[Sequence[Step]], str | None]
"""Runs a program, and returns the kind of its failure; None if it went well."""


def rules_of(kind: type) -> dict[str, _Marked]:
    found = {name: getattr(getattr(kind, name), "rule", None) for name in dir(kind)}
    return {name: marked for name, marked in found.items() if isinstance(marked, _Marked)}


def find(
    kind: type[World],
    seed: int,
    steps: int,
    counts: Counter[str] | None = None,
    done: list[Step] | None = None,
) -> Failure | None:
    """How a life of so many steps fails, or None.

    `counts` is added to: steps by rule, and what the world counts.  `done` has the steps so far.
    """
    done = [] if done is None else done
    failure = _run(kind, _drawn(kind, random.Random(seed), steps), done, counts)
    if counts is not None:
        counts.update(step.name for step in done)
    return failure


def _drawn(kind: type[World], rng: random.Random, steps: int) -> Callable[[World], Iterator[Step]]:
    rules = rules_of(kind)

    def draw(world: World) -> Iterator[Step]:
        weights: dict[str, float] = {}
        for number in range(steps):
            if number % SEASON == 0:
                weights = {
                    name: one.weight * rng.choice((0.0, 0.2, 1.0, 1.0, 4.0))
                    for name, one in rules.items()
                }
            names = [name for name in rules if weights[name] and rules[name].when(world)]
            if names:
                (name,) = rng.choices(names, [weights[name] for name in names])
                drawn = {key: draw(rng) for key, draw in rules[name].draws.items()}
                yield Step(name, drawn)

    return draw


def _given(kind: type[World], steps: Sequence[Step]) -> Callable[[World], Iterator[Step]]:
    rules = rules_of(kind)
    return lambda world: (step for step in steps if rules[step.name].when(world))


def _run(
    kind: type[World],
    steps: Callable[[World], Iterator[Step]],
    done: list[Step],
    counts: Counter[str] | None = None,
) -> Failure | None:
    world = kind()
    at_end = False
    try:
        world.begin()
        for step in steps(world):
            done.append(step)
            getattr(world, step.name)(**step.arguments)
            world.check()
        at_end = True
        world.end()
    except Exception as error:
        with contextlib.suppress(Exception):
            world.abandon()
        return Failure(error, done, at_end)
    finally:
        if counts is not None:
            counts.update(getattr(world, "counts", {}))
    return None


def reduce(kind: type[World], failure: Failure) -> Failure:
    """The same failure by fewer steps, as far as there is patience."""
    found = [failure]

    def run(steps: Sequence[Step]) -> str | None:
        again = _run(kind, _given(kind, steps), [])
        if again is None:
            return None
        if again.kind == failure.kind:
            found.append(again)
        return again.kind

    shorter(failure.steps, failure.kind, run, PATIENCE)
    return found[-1]


def shorter(steps: Sequence[Step], kind: str, run: Kind, patience: float) -> list[Step]:
    """Fewer steps that fail in the same way: pieces are left out, large ones first, until nothing
    more can be, or for so many seconds."""
    until = time.monotonic() + patience
    steps = list(steps)
    piece = max(1, len(steps) // 2)
    while time.monotonic() < until:
        at, before = 0, len(steps)
        while at < len(steps) and time.monotonic() < until:
            fewer = steps[:at] + steps[at + piece :]
            if run(fewer) == kind:
                steps = fewer
            else:
                at += piece
        if piece == 1 and len(steps) == before:
            break
        piece = max(1, piece // 2)
    return steps


def replay(kind: type[World], programme: str) -> None:
    """Runs the steps of a failure as they were printed.  Raises what fails."""
    failure = run_again(kind, programme)
    if failure is not None:
        raise failure.error


def read(programme: str) -> list[Step]:
    """The steps that were printed."""
    steps: list[Step] = []

    class Noted:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda **arguments: steps.append(Step(name, arguments))

    for line in filter(None, map(str.strip, programme.splitlines())):
        eval(line, {"world": Noted()})
    return steps


def run_again(kind: type[World], programme: str) -> Failure | None:
    """How the printed steps fail, or None."""
    return _run(kind, _given(kind, read(programme)), [])
