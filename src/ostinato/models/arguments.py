"""Checks of values that come from callers and files, and their form in error messages."""

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
    """Returns `repr(value)` cut to 160 characters; a large value is not written out in full."""
    try:
        text = _quote.repr(value)
    except ValueError:  # Python does not write out whole numbers of more than 4,300 digits
        text = f"a {type(value).__name__} that is too long to be shown"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def counted(count: int, what: str, more: str = "s") -> str:
    """Returns a count with its noun, in the plural unless the count is 1: "1 token", "2 tokens"."""
    return f"{count} {what}{'' if count == 1 else more}"


def shown(text: str, limit: int = 1000) -> str:
    """Returns untrusted text cut to `limit` characters, with control characters as escapes."""
    cut = text[:limit]
    return "".join(c if c.isprintable() or c == "\n" else f"\\u{ord(c):04x}" for c in cut)


def whole(value: object, name: str, least: int | None = None, most: int | None = None) -> int:
    """Returns `value` as an int from `least` to `most`.

    An int or any other value with `__index__`, such as NumPy's integers, is accepted; a bool or
    2.0 is not.  Raises InputError, whose message begins with `name`.
    """
    found = _index(value)
    if found is None:
        raise InputError(f"{name} is {quoted(value)}, must be a whole number")
    if (least is not None and found < least) or (most is not None and found > most):
        low = "at most" if least is None else f"{least} to"
        wanted = f"{least} or more" if most is None else f"{low} {most}"
        raise InputError(f"{name} is {quoted(found)}, must be {wanted}")
    return found


def number(value: object, name: str) -> float:
    """Returns `value`, any real number (NumPy's too) but no bool, as a finite float.

    Raises InputError, whose message begins with `name`.
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
    """Raises InputError, whose message begins with `name`, unless `value` is callable or None."""
    if value is not None and not callable(value):
        raise InputError(f"{name} is {quoted(value)}, must be a function")


def token_ids(tokens: Iterable[object], vocabulary: int, name: str) -> list[int]:
    """Returns the tokens as ints.

    Raises InputError for a token that is no whole number or not below `vocabulary`; the message
    names the token and its index.
    """
    wrong = f"{name} is {quoted(tokens)}, must be a sequence of token ids"
    if isinstance(tokens, str | bytes | bytearray):  # bytes are iterables of ints below 256
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
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        # operator.index returns an instance of a subclass of int (an IntEnum member) unchanged.
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        return None
