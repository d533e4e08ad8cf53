"""Plain values of PyTorch, and the containers that its pytree registry takes apart."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ostinato.interop.reading.guards import contents_of
from ostinato.interop.reading.objects import same
from ostinato.interop.reading.trees import Join, Unknown, is_plain, made_in_python, plain_token

PLAIN: tuple[type, ...] = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Generator,
)


def parts(value: object) -> tuple[Hashable, list[Any]] | None:
    """Takes a registered container apart: a token of it, and its children; None for other
    values."""
    node = torch.utils._pytree.SUPPORTED_NODES.get(type(value))
    if node is None or type(value) is torch.Size:  # the registry makes a plain tuple of a Size
        return None
    children, context = node.flatten_fn(value)
    children = [*children]
    try:
        token = _token(context)
    except Unknown:
        return None
    held = getattr(value, "__dict__", None)
    if not held:
        return token, children
    rest = _others(held, children)
    return (token, *[(name, plain_token(v)) for name, v in rest if is_plain(v, PLAIN)]), children


def _others(held: dict[str, Any], children: list[Any]) -> list[tuple[str, Any]]:
    """Returns the attributes that are not children."""
    known = {*map(id, children)}
    return [(name, value) for name, value in held.items() if id(value) not in known]


def _token(context: Any) -> Hashable:
    """Returns the token of a container's context: all but its children.  Raises Unknown."""
    kind = type(context)
    if is_plain(context, PLAIN):
        return plain_token(context)
    if isinstance(context, list | tuple):
        return kind, *map(_token, context)
    if isinstance(context, dict):
        return kind, *[(_token(key), _token(value)) for key, value in context.items()]
    if isinstance(context, set | frozenset):
        return kind, frozenset(map(_token, context))
    contents = contents_of(context)
    if contents is not None:
        return contents
    if not isinstance(context, torch.Tensor):
        try:
            hash(context)
        except TypeError:
            pass
        else:
            token: Hashable = context
            return token
    raise Unknown("the context of a container", context)


def joiner(like: Any) -> Join:
    """Returns a function that makes containers like one, with other children in place.

    Raises Unknown if torch's registry cannot make one."""
    node = torch.utils._pytree.SUPPORTED_NODES[type(like)]
    children, context = node.flatten_fn(like)
    children = [*children]
    copy = _dict_copier(like, children)
    if copy is not None and _alike(copy([*children]), like):
        return copy
    held = getattr(like, "__dict__", {})
    another = node.unflatten_fn([*children], context)
    if type(another) is not type(like):
        raise Unknown("a container of which torch's registry makes one of another class", like)
    made = getattr(another, "__dict__", {})
    lost = {name: v for name, v in _others(held, children) if not _has(made, name, v)}
    if not all(is_plain(v, PLAIN) for v in lost.values()) or any(
        name not in made for name, value in held.items() if name not in lost
    ):
        raise Unknown("a container whose attributes torch's registry does not know", like)

    def join(others: Sequence[Any]) -> Any:
        made = node.unflatten_fn([*others], context)  # it may keep the list
        if lost:
            made.__dict__.update(lost)
        return made

    return join


def _has(held: dict[str, Any], name: str, value: Any) -> bool:
    """True if an attribute is unchanged, as far as its value can be compared."""
    if name not in held or not is_plain(value, PLAIN):
        return name in held
    found = held[name]
    return is_plain(found, PLAIN) and plain_token(found) == plain_token(value)


def _dict_copier(like: Any, children: list[Any]) -> Join | None:
    """Returns a function that copies a dict of a class in Python, such as transformers' results,
    whose constructors take 10 µs: the items and the attributes of `like`, with other children in
    place.

    None unless the dict is only that, and each value is a child or a plain value."""
    kind: Any = type(like)
    bases = [base for base in kind.__mro__ if base not in (OrderedDict, dict, object)]
    if (
        not isinstance(like, OrderedDict)
        or type(kind).__call__ is not type.__call__  # it may do more than call the constructor
        or any(not made_in_python(base) or vars(base).get("__slots__") for base in bases)
    ):
        return None
    keys, held = tuple(like), vars(like)
    if not same([*like.values()], children) or not all(is_plain(key) for key in keys):
        return None
    places = {}
    for name, value in held.items():
        if keys.count(name) == 1 and like[name] is value:
            places[name] = keys.index(name)
        elif not is_plain(value, PLAIN):
            return None
    rest = {name: None if name in places else value for name, value in held.items()}
    # Without loops, which take a third of the time: each replay calls this function.
    lines = ["def copy(others):", "made = new(kind)", "held = made.__dict__", "held.update(rest)"]
    lines += [f"put(made, keys[{i}], others[{i}])" for i in range(len(keys))]
    lines += [f"held[keys[{i}]] = others[{i}]" for i in places.values()]
    names = {"kind": kind, "new": kind.__new__, "put": OrderedDict.__setitem__}
    names |= {"keys": keys, "rest": rest}
    exec("\n ".join([*lines, "return made"]), names)
    copy: Join = names["copy"]
    return copy


def _alike(one: Any, other: Any) -> bool:
    """True if two dicts with attributes hold the same objects, in the same order."""
    return type(one) is type(other) and all(
        [*a] == [*b] and same([*a.values()], [*b.values()])
        for a, b in ((one, other), (vars(one), vars(other)))
    )
