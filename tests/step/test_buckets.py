"""Buckets keep their rules for every size: total, large enough, monotone, idempotent."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ostinato.errors import InputError
from ostinato.step import Buckets, ExplicitBuckets, Multiples, PowersOfTwo, capacity_class

LARGEST = 2**32 - 1
SIZES = st.integers(0, LARGEST) | st.integers(0, 40).map(lambda n: min(2**n, LARGEST))


@st.composite
def powers(draw: st.DrawFn) -> PowersOfTwo:
    limit = draw(st.integers(1, LARGEST) | st.just(LARGEST) | st.integers(1, 100))
    return PowersOfTwo(limit, 2 ** draw(st.integers(0, limit.bit_length() - 1)))


@st.composite
def multiples(draw: st.DrawFn) -> Multiples:
    limit = draw(st.integers(1, LARGEST) | st.just(LARGEST) | st.integers(1, 100))
    return Multiples(draw(st.integers(1, limit)), limit)


EXPLICIT = st.lists(st.integers(1, LARGEST), min_size=1, max_size=20, unique=True)
SCHEMES = powers() | multiples() | EXPLICIT.map(ExplicitBuckets)


@given(SCHEMES, st.data())
def test_the_rules_of_every_scheme(scheme: Buckets, data: st.DataObject) -> None:
    sizes = st.integers(0, scheme.limit) | st.sampled_from([0, 1, scheme.limit])
    small, large = sorted((data.draw(sizes), data.draw(sizes)))
    bucket = scheme.bucket(large)
    assert max(1, large) <= bucket <= scheme.limit
    assert scheme.bucket(small) <= bucket
    assert scheme.bucket(bucket) == bucket
    assert isinstance(bucket, int)


@given(SCHEMES, st.integers())
def test_what_is_outside_is_refused_with_advice(scheme: Buckets, size: int) -> None:
    if 0 <= size <= scheme.limit:
        scheme.bucket(size)
        return
    with pytest.raises(InputError, match=str(size)) as caught:
        scheme.bucket(size)
    if size > scheme.limit:
        assert f"limit {scheme.limit}" in str(caught.value)
        assert "eagerly" in str(caught.value)


@given(SCHEMES, st.data())
def test_iteration_gives_every_bucket_once_rising(scheme: Buckets, data: st.DataObject) -> None:
    listed = list(itertools.islice(scheme, 200))
    assert all(a < b for a, b in itertools.pairwise(listed))
    assert all(scheme.bucket(b) == b for b in listed)
    size = data.draw(st.integers(0, listed[-1]))
    assert scheme.bucket(size) in listed
    if len(listed) < 200:
        assert listed[-1] == scheme.limit


@given(SIZES)
@example(0)
@example(1)
@example(2**31)
@example(2**31 + 1)
@example(LARGEST)
def test_capacity_class(size: int) -> None:
    """Row D5, told another way: the first of 1, 2, 4, … 2**31, 2**32 - 1 that holds the size."""
    classes = [2**n for n in range(32)] + [LARGEST]
    expected = next(c for c in classes if c >= size)
    assert capacity_class(size) == expected == PowersOfTwo().bucket(size)


def test_by_example() -> None:
    assert [PowersOfTwo(64).bucket(n) for n in (0, 1, 2, 3, 33, 64)] == [1, 1, 2, 4, 64, 64]
    assert list(PowersOfTwo(64)) == [1, 2, 4, 8, 16, 32, 64]
    assert list(PowersOfTwo(48, minimum=16)) == [16, 32, 48]
    assert [PowersOfTwo(48, minimum=16).bucket(n) for n in (0, 17, 33)] == [16, 32, 48]
    explicit = ExplicitBuckets([32, 1, 2, 4, 8, 16, 24])
    assert explicit.sizes == (1, 2, 4, 8, 16, 24, 32)
    assert [explicit.bucket(n) for n in (0, 3, 17, 25)] == [1, 4, 24, 32]
    assert [Multiples(8, 20).bucket(n) for n in (0, 8, 9, 17, 20)] == [8, 8, 16, 20, 20]
    assert list(Multiples(8, 20)) == [8, 16, 20]
    assert capacity_class(np.int32(3)) == 4


@pytest.mark.parametrize("wrong", [1.0, True, "4", None])
def test_only_whole_numbers_are_sizes(wrong: object) -> None:
    for scheme in (PowersOfTwo(), ExplicitBuckets([4]), Multiples(4)):
        with pytest.raises(InputError, match="whole number"):
            scheme.bucket(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PowersOfTwo(0), "limit=0"),
        (lambda: PowersOfTwo(2**32), "limit=4294967296"),
        (lambda: PowersOfTwo(8, minimum=16), "minimum=16"),
        (lambda: PowersOfTwo(8, minimum=3), "not a power of two"),
        (lambda: PowersOfTwo(8.0), "whole number"),
        (lambda: ExplicitBuckets([]), "one bucket"),
        (lambda: ExplicitBuckets([4, 8, 4]), "4 is listed twice"),
        (lambda: ExplicitBuckets([0, 8]), "bucket 0"),
        (lambda: ExplicitBuckets([8, 2**32]), "4294967296"),
        (lambda: Multiples(0), "of=0"),
        (lambda: Multiples(16, 8), "limit=8"),
    ],
)
def test_schemes_that_cannot_be(make: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()  # type: ignore[operator]


def test_schemes_are_values() -> None:
    assert PowersOfTwo(64) == PowersOfTwo(64) and hash(PowersOfTwo(64)) == hash(PowersOfTwo(64))
    assert ExplicitBuckets([2, 1]) == ExplicitBuckets((1, 2))
    with pytest.raises(AttributeError):
        PowersOfTwo(64).limit = 3  # type: ignore[misc]
