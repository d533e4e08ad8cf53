"""The schedule's digest: equal in processes that make the same calls, and in no others."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ostinato as ost
from ostinato.device import Device, open_device
from ostinato.errors import CaptureError
from ostinato.step import StepKey
from ostinato.step.schedule import Event, Schedule, stable_text


class Colour(enum.Enum):
    RED = 1


class Mode(enum.IntFlag):
    FAST = 1


@dataclass(frozen=True, eq=False)
class Place:
    """Each is equal to itself alone."""

    x: int


@dataclass(frozen=True)
class Shape:
    rows: int
    note: str = field(default="", compare=False)


atoms = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.binary(max_size=4)
keys = st.recursive(
    atoms,
    lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)


@given(keys, keys)
def test_text_tells_keys_apart(one: object, other: object) -> None:
    assert stable_text(one) is not None
    # Python takes 1 and True for one key; their text is not.
    if one != other:
        assert stable_text(one) != stable_text(other)


def test_text_of_records() -> None:
    assert stable_text(Colour.RED) == stable_text(Colour.RED) != stable_text(1)
    assert stable_text(Shape(3, "a")) == stable_text(Shape(3, "b")) != stable_text(Shape(4))
    assert stable_text(object()) is None and stable_text((1, object())) is None
    assert stable_text(Place(1)) is None and stable_text((1, Place(1))) is None
    texts = {stable_text(Mode(bits)) for bits in (0, 1, 2, 3, 4, 8)}
    assert len(texts) == 6 and None not in texts
    steps = [StepKey("rows", number, (("rows", 8),)) for number in (1, 2)]
    assert stable_text(steps[0]) == stable_text(steps[1]), "the number is this process's own"
    assert stable_text(steps[0]) != stable_text(StepKey("rows", 1, (("rows", 4),)))
    shared = [StepKey("rows", share, (("rows", 8),)) for share in ("a", "b")]
    assert stable_text(shared[0]) != stable_text(shared[1])


def test_many_events_are_not_kept() -> None:
    schedule = Schedule()
    for _ in range(10_000):
        schedule.note("a", "used")
    assert len(schedule.trail) < 5000


def test_the_mark_of_the_latest_event_stands_for_no_other() -> None:
    noted, marked = Schedule(), Schedule()
    events: tuple[tuple[str, Event], ...] = (
        *(("a", "missed"), ("a", "missed"), ("a", "captured")),
        *(("b", "captured"), ("b", "missed")),
    )
    for key, event in events:
        noted.note(key, event)
        marked.trail.append((marked.mark(key, event), 1))
    assert noted.digest(b"", 0) == marked.digest(b"", 0)


def graph_of(device: Device) -> ost.GraphExec:
    graph = ost.Graph.create(device.context)
    graph.add_empty()
    return graph.instantiate()


def test_many_hits_of_keys_in_turn_are_not_kept(device: Device) -> None:
    with ost.GraphCache(device) as cache:
        for key in "ab":
            cache.install(key, graph_of(device))
        for _ in range(5_000):
            assert cache.get("a") and cache.get("b")
        assert len(cache._table._schedule.trail) < 5000


def played(device: Device, calls: str, *, unknown: bool = False, ask_at: int = -1) -> str:
    """The digest after calls: lower case captures or uses a key, upper case replays it, "!" is a
    capture of "a" that fails, "-" evicts "a", which is no event itself."""
    stream = device.create_stream()
    objects: dict[str, object] = {}

    def fail() -> ost.GraphExec:
        raise CaptureError("no")

    with ost.GraphCache(device) as cache:
        for number, call in enumerate(calls):
            if number == ask_at:
                cache.schedule_digest()
            name = call.lower()
            key = objects.setdefault(name, object()) if unknown else name
            if call == "!":
                with pytest.raises(CaptureError):
                    cache.get_or_capture("never", fail)
            elif call == "-":
                cache.evict("a")
            elif call.isupper():
                cache.replay(key, stream)
            else:
                cache.get_or_capture(key, lambda: graph_of(device))
        return cache.schedule_digest()


@given(st.text("aAbB-", max_size=20), st.integers(0, 20))
def test_where_a_digest_is_asked_for_changes_nothing(calls: str, at: int) -> None:
    with open_device("host") as device:
        asked, plain = played(device, calls, ask_at=at), played(device, calls)
        assert asked == plain != played(device, calls + "c")
        assert len({played(device, calls + more) for more in ("aA", "aAA", "aAAA", "aAbA")}) == 4


@pytest.mark.parametrize("unknown", [False, True])
def test_order_counts(device: Device, unknown: bool) -> None:
    def digest(calls: str) -> str:
        return played(device, calls, unknown=unknown)

    assert digest("abAB") == digest("abAB")
    others = ["abBA", "abA", "baAB", "abAB!", "AB"]
    if unknown:
        assert digest("baAB") == digest("abBA"), "only the order in which they came is known"
        del others[0]
    digests = [digest(calls) for calls in ("abAB", *others)]
    assert len(set(digests)) == len(digests)
    assert digest("a-") == digest("a") != digest("a-A")


def test_another_process_has_the_same_digest(host_device: Device) -> None:
    """Hashes of strings, addresses and the number of steps before differ between processes."""
    code = (
        "import ostinato as ost\n"
        "from tests.step.test_schedule import stepped\n"
        "device = ost.open_device('host')\n"
        "print(stepped(device, 2))\n"
    )
    found = []
    for seed in ("1", "2"):
        path = os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        )
        found.append(done.stdout.strip())
    assert found[0] == found[1] == stepped(host_device, 0)
    assert stepped(host_device, 0, rows=5) != found[0]


def stepped(device: ost.Device, before: int, rows: int = 3) -> str:
    """The digests of a cache that a step and a frozen set used, and of the step's graph."""
    from tests.sources import config, kernel

    stream, x = device.create_stream(), device.zeros(8, "float32")
    cache = ost.GraphCache(device)

    def run(stream: ost.Stream, rows: int) -> None:
        ost.launch(stream, kernel(device, "fill"), config(8), x, 1.0, rows)

    unused = [ost.GraphedStep(run, stream=stream, cache=cache) for _ in range(before)]
    step = ost.GraphedStep(run, stream=stream, cache=cache)
    for _ in range(3):
        step(rows=rows)
    cache.replay(frozenset({"b", "a", "c"}), stream)
    executable = cache.get(step.key(rows=rows))
    assert executable is not None and len(unused) == before
    return f"{cache.schedule_digest()} {executable.graph.digest()}"
