"""The schedule of a cache: which keys were used and captured, in which order, as a digest.

Processes that must make the same calls, such as the ranks of one model, compare digests: the first
call that differs changes every digest after it.

A key is digested as text, because Python's hash of it differs between processes.  A key has a text
if it is None, a number, a string, bytes, an enumeration, a tuple, frozen set or dataclass of these,
or if it has a method `stable_key()` that returns such a key.  Other keys are numbered in the order
in which they first came, which is the same in processes that make the same calls.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Hashable
from typing import Literal, TypeAlias

__all__ = ["FOLDED", "Event", "Schedule", "stable_text"]

Event: TypeAlias = Literal["used", "missed", "captured", "failed", "installed"]

FOLDED = 4096
"""So many events are kept before they go into the digest."""
_MARK_BYTES = 16
_NUMBERED = 4096
"""So many keys without text keep their numbers; the oldest are numbered anew."""


def stable_text(value: object) -> str | None:
    """The same text for equal keys in every process; None if there is none."""
    stable = getattr(type(value), "stable_key", None)
    if callable(stable):
        return _listed(_type_name(value), [stable(value)])
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, enum.Enum):
        name: str | None = value.name
        if name is None:  # flags without a name of their own
            return _listed(_type_name(value), [value.value])
        return f"{_type_name(value)}.{name}"
    if isinstance(value, tuple):
        return _listed(_type_name(value), value)
    if type(value) is frozenset:
        return _listed("frozenset", value, ordered=False)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value).__eq__ is object.__eq__:  # equal to nothing but itself
            return None
        compared = [f.name for f in dataclasses.fields(value) if f.compare]
        return _listed(_type_name(value), [getattr(value, name) for name in compared])
    return None


def _type_name(value: object) -> str:
    """With the module: two modules may have types of one name."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _listed(
    name: str, values: tuple[object, ...] | list[object] | frozenset[object], ordered: bool = True
) -> str | None:
    texts = [stable_text(value) for value in values]
    known = [text for text in texts if text is not None]
    if len(known) < len(texts):
        return None
    # Each with its length, so that no two lists run into the same text.
    parts = ",".join(f"{len(t)}={t}" for t in (known if ordered else sorted(known)))
    return f"{name}({parts})"


class Schedule:
    """The events of one cache in order.  Not thread-safe; the cache's lock guards it."""

    def __init__(self) -> None:
        self.trail: list[tuple[bytes, int]] = []
        """The latest events, not yet in the digest: the mark of each, and how many times in a row
        it happened.  Who appends to it calls `fold` once there are `FOLDED`."""
        self._state = hashlib.blake2b(digest_size=32, person=b"ostinato-order")
        self._numbers: dict[Hashable, int] = {}
        self._numbered = 0
        self._latest: tuple[Hashable, Event, bytes] = (None, "used", b"")
        """The latest event of `note`, and its mark."""

    def mark(self, key: Hashable, event: Event) -> bytes:
        """A digest of one event of a key, the same in every process."""
        text = stable_text(key)
        if text is None:
            text = f"number {self._number(key)}"
        # surrogatepass: text of any characters can be a key
        raw = f"{event} {text}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(raw, digest_size=_MARK_BYTES).digest()

    def _number(self, key: Hashable) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._numbered
            self._numbered += 1
            if len(self._numbers) > _NUMBERED:
                del self._numbers[next(iter(self._numbers))]
        return number

    def note(self, key: Hashable, event: Event) -> None:
        """Adds an event."""
        latest, same, mark = self._latest
        if latest is not key or same != event or not mark:  # as eager calls miss again and again
            mark = self.mark(key, event)
            self._latest = (key, event, mark)
        self.trail.append((mark, 1))
        if len(self.trail) >= FOLDED:
            self.fold()

    def fold(self) -> None:
        """Puts the events of the trail into the digest."""
        self._state.update(b"".join(_packed(*each) for each in self.trail))
        self.trail.clear()

    def digest(self, mark: bytes, times: int) -> str:
        """The digest of all events so far, as 64 hexadecimal digits.

        An event that may still be repeated is not noted yet: its mark is given, and how many times
        it has happened (0: there is none).
        """
        self.fold()
        state = self._state.copy()
        if times:
            state.update(_packed(mark, times))
        return state.hexdigest()


def _packed(mark: bytes, times: int) -> bytes:
    return mark + times.to_bytes(8, "little")
