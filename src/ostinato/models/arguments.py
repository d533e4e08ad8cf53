"""Values from callers and files: how messages quote them, and which are numbers and tokens."""

from __future__ import annotations

import math
import numbers
import operator
import reprlib
from collections.abc import Iterable

from ostinato.errors import InputError

_LONGEST = 160
_quote = reprlib.Repr()
_quote.maxstring = _quote.maxother = _quote.maxlong = 80
_quote.maxlevel, _quote.maxlist, _quote.maxdict = 2, 4, 4


def quoted(value: object) -> str:
    """`repr(value)`, cut to 160 characters, however large the value is."""
    try:
        text = _quote.repr(value)
    except ValueError:  # Python does not write out whole numbers of more than 4,300 digits
        text = f"a {type(value).__name__} that is too long to be shown"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def counted(count: int, what: str, more: str = "s") -> str:
    """A count with its noun, in the plural unless it is one: "1 token", "2 tokens"."""
    return f"{count} {what}{'' if count == 1 else more}"


def shown(text: str, limit: int = 1000) -> str:
    """Text from outside, cut to `limit`, with control characters written as escapes."""
    cut = text[:limit]
    return "".join(c if c.isprintable() or c == "\n" else f"\\u{ord(c):04x}" for c in cut)


def whole(value: object, name: str, least: int | None = None, most: int | None = None) -> int:
    """`value` as an int from `least` to `most`: an int, or anything else with `__index__`, such as
    NumPy's integers.  A bool is not one, nor is 2.0.  Raises InputError that begins with `name`."""
    found = _index(value)
    if found is None:
        raise InputError(f"{name} is {quoted(value)}, must be a whole number")
    if (least is not None and found < least) or (most is not None and found > most):
        low = "at most" if least is None else f"{least} to"
        wanted = f"{least} or more" if most is None else f"{low} {most}"
        raise InputError(f"{name} is {quoted(found)}, must be {wanted}")
    return found


def number(value: object, name: str) -> float:
    """`value` as a finite float: any real number, NumPy's too, but no bool.

    Raises InputError that begins with `name`.
    """
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if math.isfinite(found):
            return found
    raise InputError(f"{name} is {quoted(value)}, must be a finite number")


def require_function(value: object, name: str) -> None:
    """Raises InputError that begins with `name` for what is neither a function nor None."""
    if value is not None and not callable(value):
        raise InputError(f"{name} is {quoted(value)}, must be a function")


def token_ids(tokens: Iterable[object], vocabulary: int, name: str) -> list[int]:
    """The tokens as ints.

    Raises InputError that says which one is no whole number or is outside `vocabulary`, and where
    it stands.
    """
    wrong = f"{name} is {quoted(tokens)}, must be a sequence of token ids"
    if isinstance(tokens, str | bytes | bytearray):  # bytes would pass for tokens below 256
        raise InputError(wrong)
    try:
        items = list(tokens)
    except TypeError:
        raise InputError(wrong) from None
    found = []
    for place, item in enumerate(items):
        token = _index(item)
        if token is None:
            raise InputError(f"{name}[{place}] is {quoted(item)}, must be a token id")
        if not 0 <= token < vocabulary:
            raise InputError(
                f"{name}[{place}]: token {quoted(token)} is outside the vocabulary of {vocabulary}"
            )
        found.append(token)
    return found


def _index(value: object) -> int | None:
    """The value as an int, or None if it is no whole number."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        # operator.index gives a subclass of int, an IntEnum's member say, as it is.
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        return None
