"""Keys and scan topologies: pure, so held by property tests over their whole range."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import InputError
from ostinato.relational import IndexKey, JoinKey, ScanTopology, scan_topology
from ostinato.step import PowersOfTwo, capacity_class

LARGEST = 2**32 - 1
CLASSES = list(PowersOfTwo())
KINDS: tuple[Literal["inner", "indexed inner"], ...] = ("inner", "indexed inner")


@pytest.mark.parametrize(
    ("rows", "kernels", "scratch"),
    [
        (0, 0, ()),
        (1, 1, ()),
        (256, 1, ()),
        (257, 3, (2,)),
        (65_536, 3, (256,)),
        (65_537, 5, (257, 2)),
        (2**24, 5, (65_536, 256)),
        (2**24 + 1, 7, (65_537, 257, 2)),
        (LARGEST, 7, (2**24, 65_536, 256)),
    ],
)
def test_topologies(rows: int, kernels: int, scratch: tuple[int, ...]) -> None:
    assert scan_topology(rows) == ScanTopology(kernels, scratch)


@pytest.mark.parametrize(
    "rows", [*CLASSES, *(c - 1 for c in CLASSES), *(c + 1 for c in CLASSES[:-1])]
)
def test_each_level_holds_the_sums_of_the_level_below(rows: int) -> None:
    topology = scan_topology(rows)
    below = rows
    for size in topology.scratch:
        assert size == -(-below // 256) > 1
        below = size
    assert below <= 256
    assert topology.kernels == (2 * len(topology.scratch) + 1 if rows else 0)


@pytest.mark.parametrize("rows", [-1, 2**32, 1.0, "256", None, True])
def test_no_topology(rows: object) -> None:
    with pytest.raises(InputError, match="rows"):
        scan_topology(rows)  # type: ignore[arg-type]


@st.composite
def keys(draw: st.DrawFn) -> JoinKey:
    arity = draw(st.integers(1, 255))
    key_bytes = 4 * draw(st.integers(arity, 2 * arity))
    rows, capacity, right = (draw(st.integers(0, LARGEST)) for _ in range(3))
    right %= draw(st.sampled_from([16_386, LARGEST + 1]))
    return JoinKey.of(draw(st.sampled_from(KINDS)), arity, key_bytes, rows, right, capacity)


@given(keys())
def test_a_key_says_all_it_is(key: JoinKey) -> None:
    classes = key.probe, key.output, key.build
    same = JoinKey(key.kind, key.arity, key.key_bytes, *classes, key.scan)
    assert same == key and hash(same) == hash(key) and str(same) == str(key)
    assert key.scan == scan_topology(key.probe)
    text = str(key)
    for value in (key.kind, key.arity, key.key_bytes, *classes):
        assert str(value) in text


@given(keys(), keys())
def test_equal_keys_have_equal_texts_and_no_others(one: JoinKey, other: JoinKey) -> None:
    assert (one == other) == (str(one) == str(other))


@given(keys())
def test_each_field_counts(key: JoinKey) -> None:
    builds = {"inner": (16_384, 262_144, LARGEST), "indexed inner": (0,)}
    others = [
        replace(key, kind=kind, build=build)
        for kind, classes in builds.items()
        for build in classes
        if (kind, build) != (key.kind, key.build)
    ]
    others += [replace(key, output=1 if key.output > 1 else 2)]
    wide = key.key_bytes + (4 if key.key_bytes < 8 * key.arity else -4)
    others += [replace(key, key_bytes=wide)]
    assert all(other != key for other in others)


@given(st.integers(0, LARGEST), st.integers(0, LARGEST))
def test_rows_of_a_class_share_a_key(rows: int, others: int) -> None:
    one, other = (JoinKey.of("inner", 1, 8, n, 1, 1) for n in (rows, others))
    assert (one == other) == (capacity_class(rows) == capacity_class(others))


@given(st.integers(0, LARGEST), st.integers(0, LARGEST))
def test_right_sides_of_a_class_share_a_key(rows: int, others: int) -> None:
    for kind in KINDS:
        one, other = (JoinKey.of(kind, 1, 8, 1, n, 1) for n in (rows, others))
        same = all((rows <= most) == (others <= most) for most in (16_384, 262_144))
        alike = kind == "indexed inner" or same
        assert (one == other) == alike


@pytest.mark.parametrize("arity", [0, 256, -1, True, 1.5])
@pytest.mark.parametrize("kind", [IndexKey, JoinKey])
def test_an_arity_out_of_bounds_says_the_bounds(kind: type, arity: int) -> None:
    rest = () if kind is IndexKey else (1, 1, LARGEST, scan_topology(1))
    before = () if kind is IndexKey else ("inner",)
    with pytest.raises(InputError, match=r"arity=.*1 to 255|arity is"):
        kind(*before, arity, 8, *rest)


@pytest.mark.parametrize(
    "wrong",
    [
        {"key_bytes": 3},
        {"key_bytes": 6},
        {"key_bytes": 12},
        {"probe": 3},
        {"output": 0},
        {"output": 2**32},
        {"scan": scan_topology(1000)},
        {"build": 0},
        {"build": 16_383},
        {"kind": "indexed inner"},
        {"kind": "inner", "build": 0},
    ],
)
def test_what_is_no_key(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        replace(JoinKey.of("inner", 1, 8, 5, 5, 5), **wrong)  # type: ignore[arg-type]
