"""Buckets: the capacity class of a size.  Pure; no driver, no I/O.

A graph freezes its sizes, so exact sizes would need a graph each, without end.  A step pads its
size up to a bucket instead, and keys its graph by the bucket: `PowersOfTwo(64)` needs 7 graphs for
batches of 0 to 64.  Never key by an exact length that grows with every step.

The rules of every scheme, held by property tests:

* total: every size from 0 to `limit` has a bucket; anything else raises InputError, which says what
  to do;
* `size <= bucket(size) <= limit`, and `bucket(size) >= 1`;
* monotone: a larger size never has a smaller bucket;
* idempotent: a bucket is its own bucket, so a padded size is not padded again.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, SupportsIndex

from ostinato.driver.api import whole_number
from ostinato.errors import InputError

LARGEST = 2**32 - 1
"""The largest size that any scheme takes: the largest 32-bit count of a kernel."""


class Buckets(Protocol):
    """A scheme of capacity classes.  Implementations keep the rules at the top of this file."""

    @property
    def limit(self) -> int:
        """The largest size that has a bucket, and the largest bucket."""
        ...

    def bucket(self, size: SupportsIndex, /) -> int:
        """Returns the capacity class of a size.  Raises InputError unless 0 <= size <= limit."""
        ...

    def __iter__(self) -> Iterator[int]:
        """Yields all buckets, from the smallest to `limit`: those that a warm-up captures."""
        ...


@dataclass(frozen=True, slots=True)
class _Powers:
    """The fields of `PowersOfTwo`."""

    limit: int
    minimum: int


class PowersOfTwo(_Powers):
    """Powers of two from `minimum` up to `limit`; the last bucket is `limit` itself.

    Sizes up to `minimum` share the first bucket.  Where the next power of two is over the limit,
    the bucket is the limit: `PowersOfTwo(48)` ends 16, 32, 48, and with no limit given the last
    bucket saturates at 2**32 - 1.  So at most half of a padded size is padding, or minimum - 1.
    Raises InputError unless 1 <= minimum <= limit <= 2**32 - 1 and minimum is a power of two.
    """

    __slots__ = ()

    def __init__(self, limit: SupportsIndex = LARGEST, minimum: SupportsIndex = 1) -> None:
        limit, minimum = _whole(limit, "limit"), _whole(minimum, "minimum")
        if not 1 <= minimum <= limit <= LARGEST:
            raise InputError(
                f"limit={limit}, minimum={minimum}: 1 <= minimum <= limit <= {LARGEST} is needed"
            )
        if minimum & (minimum - 1):
            raise InputError(f"minimum={minimum} is not a power of two")
        super().__init__(limit, minimum)

    def bucket(self, size: SupportsIndex, /) -> int:
        """Returns the next power of two, at least `minimum` and at most `limit`."""
        count = _checked(size, self.limit)
        return min(max(self.minimum, _next_power(count)), self.limit)

    def __iter__(self) -> Iterator[int]:
        power = self.minimum
        while power < self.limit:
            yield power
            power *= 2
        yield self.limit


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The fields of `ExplicitBuckets`."""

    sizes: tuple[int, ...]
    """The buckets in ascending order."""


class ExplicitBuckets(_Sizes):
    """The buckets that are listed, in any order; the largest is the limit.

    Sizes up to the smallest share it.  Raises InputError for an empty list, a bucket listed twice,
    or one outside 1 to 2**32 - 1.
    """

    __slots__ = ()

    def __init__(self, sizes: Iterable[SupportsIndex]) -> None:
        listed = sorted(_whole(size, "a bucket") for size in sizes)
        if not listed:
            raise InputError("a list of buckets needs one bucket at least")
        if listed[0] < 1 or listed[-1] > LARGEST:
            wrong = listed[0] if listed[0] < 1 else listed[-1]
            raise InputError(f"bucket {wrong} is outside 1 to {LARGEST}")
        twice = [a for a, b in itertools.pairwise(listed) if a == b]
        if twice:
            raise InputError(f"bucket {twice[0]} is listed twice")
        super().__init__(tuple(listed))

    @property
    def limit(self) -> int:
        return self.sizes[-1]

    def bucket(self, size: SupportsIndex, /) -> int:
        """Returns the smallest listed bucket that holds the size."""
        return self.sizes[bisect.bisect_left(self.sizes, _checked(size, self.limit))]

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)


@dataclass(frozen=True, slots=True)
class _Multiples:
    """The fields of `Multiples`."""

    of: int
    limit: int


class Multiples(_Multiples):
    """Multiples of `of` up to `limit`; the last bucket is `limit` itself.

    At most of - 1 of a padded size is padding, for limit / of buckets: keep the limit small.
    Raises InputError unless 1 <= of <= limit <= 2**32 - 1.
    """

    __slots__ = ()

    def __init__(self, of: SupportsIndex, limit: SupportsIndex = LARGEST) -> None:
        of, limit = _whole(of, "of"), _whole(limit, "limit")
        if not 1 <= of <= limit <= LARGEST:
            raise InputError(f"of={of}, limit={limit}: 1 <= of <= limit <= {LARGEST} is needed")
        super().__init__(of, limit)

    def bucket(self, size: SupportsIndex, /) -> int:
        """Returns the next multiple, at least `of` and at most `limit`."""
        count = _checked(size, self.limit)
        return min(max(self.of, -(-count // self.of) * self.of), self.limit)

    def __iter__(self) -> Iterator[int]:
        yield from range(self.of, self.limit, self.of)
        yield self.limit


def capacity_class(size: SupportsIndex) -> int:
    """Returns the capacity class of a size: 1 for 0 and 1, else the next power of two.

    Saturates at 2**32 - 1.  Raises InputError for a size outside 0 to 2**32 - 1.
    """
    return min(_next_power(_checked(size, LARGEST)), LARGEST)


def _next_power(count: int) -> int:
    return 1 << (count - 1).bit_length() if count > 1 else 1


def _whole(value: SupportsIndex, what: str) -> int:
    number = whole_number(value)
    if number is None:
        raise InputError(f"{what} is {value!r}; a whole number is needed")
    return number


def _checked(size: SupportsIndex, limit: int) -> int:
    count = _whole(size, "the size")
    if count < 0:
        raise InputError(f"size {count}: a size cannot be negative")
    if count > limit:
        raise InputError(
            f"size {count} is over the limit {limit} of these buckets: raise the limit, split the "
            "work, or run this size eagerly"
        )
    return count
