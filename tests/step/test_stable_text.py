"""The text of keys: equal for equal keys in all processes, and for no others."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, make_dataclass

from hypothesis import given
from hypothesis import strategies as st

import ostinato as ost
from ostinato.step import StepKey
from ostinato.step.work import stable_text, work_digest
from tests.processes import printed_by_all


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
    another = enum.Enum("Colour", ["RED"], module="another")  # modules may each have a Colour
    assert stable_text(another["RED"]) != stable_text(Colour.RED)
    record = make_dataclass("Shape", [("rows", int)], frozen=True)
    record.__module__ = "another"
    assert stable_text(record(3)) != stable_text(Shape(3))
    texts = {stable_text(Mode(bits)) for bits in (0, 1, 2, 3, 4, 8)}
    assert len(texts) == 6 and None not in texts
    steps = [StepKey("rows", number, (("rows", 8),)) for number in (1, 2)]
    assert stable_text(steps[0]) == stable_text(steps[1]), "the number is this process's own"
    assert stable_text(steps[0]) != stable_text(StepKey("rows", 1, (("rows", 4),)))
    shared = [StepKey("rows", share, (("rows", 8),)) for share in ("a", "b")]
    assert stable_text(shared[0]) != stable_text(shared[1])


def test_another_process_has_the_same_text_and_digest(host_device: ost.Device) -> None:
    """Hashes of strings, addresses and the number of steps before differ between processes."""
    found = printed_by_all(
        "import ostinato as ost\n"
        "from tests.step.test_stable_text import stepped\n"
        "device = ost.open_device('host')\n"
        "print(stepped(device, 2))\n"
    ).strip()
    assert found == stepped(host_device, 0)
    assert stepped(host_device, 0, rows=5) != found


def stepped(device: ost.Device, before: int, rows: int = 3) -> str:
    """The text of a step's key and of a frozen set, and digests of the step's graph and of work
    with a set of texts."""
    from tests.sources import config, kernel

    stream, x = device.create_stream(), device.zeros(8, "float32")
    cache = ost.GraphCache(device)

    def run(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "fill"), config(8), x, 1.0, sizes.rows)

    unused = [ost.GraphedStep(run, stream=stream, cache=cache) for _ in range(before)]
    step = ost.GraphedStep(run, stream=stream, cache=cache)
    for _ in range(3):
        step(rows=rows)
    executable = cache.get(step.key(rows=rows))
    assert executable is not None and len(unused) == before
    texts = {"b", "a", "c", (1, ...)}
    text = stable_text((step.key(rows=rows), frozenset({"b", "a", "c"})))
    assert text is not None
    return f"{text} {executable.graph.digest()} {work_digest(lambda: texts)}"
