"""The arguments of a call: their part of the key, and the arrays that are copied."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

from ostinato.errors import InputError
from ostinato.interop.reading.guards import Guards
from ostinato.interop.reading.kept import HostSnapshot
from ostinato.interop.reading.library import GraphedOptions, Library, NotGraphable
from ostinato.interop.reading.objects import InsideObject, holders_of, same
from ostinato.interop.reading.places import of_package
from ostinato.interop.reading.records import Dynamic, ReadCall
from ostinato.interop.reading.trees import (
    Tree,
    Unknown,
    children_of,
    flatten,
    is_plain,
    joiner,
    plain_token,
    tree_of,
)


class Arguments:
    """The arguments of one function: takes them apart, and puts them together again.

    Raises InputError for options that name a parameter which the function does not have."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        library: Library,
        options: GraphedOptions,
        guards: Guards,
    ) -> None:
        self._library, self._options, self._guards = library, options, guards
        self._array_types = {library.array_type}
        self.names, rest = _parameters(function)
        """The names of the positional parameters."""
        axes = options.padding.axes if options.padding else {}
        self._special = {*options.static, *axes}
        for given in (*self._special, *options.fill):
            if given not in self.names and not rest:
                raise InputError(f"{name} has no parameter {given!r} (it has {self.names})")

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yields the arguments with the names of their parameters; "*" for those without a name."""
        names = itertools.chain(self.names, itertools.repeat("*"))
        return itertools.chain(zip(names, args, strict=False), kwargs.items())

    # --- taking apart
    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Hashable], ReadCall]:
        """Returns the tokens that must be equal for a graph to serve a call, and the call taken
        apart.  Raises Unknown, NotGraphable."""
        call = ReadCall(args, kwargs)
        tokens: list[Hashable] = []
        if not (self._special or kwargs) and {*map(type, args)} <= self._array_types:
            tokens += map(self._library.signature, args)
            call.leaves += args
        else:
            if self._special:
                given = self.named(args, {})
            else:
                given = zip(itertools.repeat("an argument"), args, strict=False)
            for name, value in given:
                self._add(name, value, tokens, call)
            for name, value in kwargs.items():
                tokens.append(name)
                self._add(name, value, tokens, call)
            if call.sizes:  # equal sizes count as one size, also of different arrays
                tokens.append(tuple(map(call.sizes.index, call.sizes)))
        leaves = [*map(id, call.leaves)]
        if len({*leaves}) < len(leaves):  # the function may compare them (`key is value`)
            tokens.append(("the same", *map(leaves.index, leaves)))
        return tokens, call

    def changed(self, call: ReadCall, tokens: list[Hashable]) -> bool:
        """True if the arguments have changed since a call was taken apart: a list has other items,
        an attribute another array."""
        try:
            again, now = self.key(call.args, call.kwargs)
        except (Unknown, NotGraphable):
            return True
        arrays = now.leaves + now.statics
        return again != tokens or not same(arrays, call.leaves + call.statics)

    def _add(self, name: str, value: Any, tokens: list[Hashable], call: ReadCall) -> None:
        """Adds the tokens of one argument."""
        library = self._library
        if name in self._options.static:
            self._add_static(value, tokens, call)
            return
        if type(value) is not library.array_type and is_plain(value, library.plain):
            tokens.append(plain_token(value))
            return
        before = len(call.leaves)
        flatten(value, name, library, tokens, call.leaves)
        padding = self._options.padding
        for leaf in call.leaves[before:]:
            signature = library.signature(leaf)
            if type(leaf) is not library.array_type:
                kind: Any = type(leaf)
                tokens.append(kind)
            if padding is None or name not in padding.axes:
                call.dynamic.append(None)
                tokens.append(signature)
                continue
            try:
                shape, axis = padding.padded(name, signature[0])
            except InputError as error:
                raise NotGraphable(str(error)) from error
            size, fill = signature[0][axis], self._options.fill.get(name)
            call.dynamic.append(Dynamic(axis, size, shape[axis], len(call.sizes), fill))
            call.sizes.append(size)
            # Without strides: the array is copied into memory of its own layout.
            tokens.append((shape, axis, signature[1], *signature[3:]))

    def _add_static(self, value: Any, tokens: list[Hashable], call: ReadCall) -> None:
        library, before = self._library, len(call.statics)
        if library.is_array(value):
            call.statics.append(value)
        elif is_plain(value, library.plain):
            tokens.append(plain_token(value))
        else:
            found = children_of(value, library)
            if found is not None:
                tokens.append(found[0])
                for child in found[1]:
                    self._add_static(child, tokens, call)
                return
            self.inside(value).read(tokens, call.statics)
            guards = self.guards_of(value)
            if guards is not None:
                arrays = call.statics[before:]
                tokens += guards.read_given(value, arrays)
                call.statics[before:] = arrays
        for array in call.statics[before:]:
            tokens.append(
                (type(array).__qualname__, library.signature(array), library.offset(array))
            )

    def keep(self, call: ReadCall, kept: HostSnapshot) -> None:
        """Notes in `kept` the content of the static arguments, which are passed as they are."""
        for name, value in self.named(call.args, call.kwargs):
            if name in self._options.static:
                self._keep(value, kept)

    def _keep(self, value: Any, kept: HostSnapshot) -> None:
        library = self._library
        if library.is_array(value) or is_plain(value, library.plain):
            return
        found = children_of(value, library)
        if found is not None:
            for child in found[1]:
                self._keep(child, kept)
            for held in holders_of(value):
                kept.hold(held)
            return
        inside, guards = self.inside(value), self.guards_of(value)
        for held, _ in inside.holders:
            kept.hold(held)
        for each in inside.watches:
            kept.watch(each)
        if guards is not None:
            guards.walk_given(kept, value)

    def guards_of(self, value: Any) -> Guards | None:
        """Returns the guards, which read a static object as all else that the function uses; None
        for an object of a package, of which only arrays are read."""
        return None if of_package(value) or not self._options.guard else self._guards

    def inside(self, value: Any) -> InsideObject:
        """Returns what is inside of a static object."""
        return InsideObject(value, self._library, self._guards.watch, own=not of_package(value))

    # --- putting together
    def replaced(
        self, call: ReadCall, leaves: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with `leaves` in the places of the arrays that are copied."""
        rest = iter(leaves)
        library, static = self._library, self._options.static

        def visit(value: Any) -> Any:
            if library.is_array(value):
                return next(rest)
            if is_plain(value, library.plain):
                return value
            found = children_of(value, library)
            assert found is not None
            return joiner(value, library)([visit(child) for child in found[1]])

        args = [v if n in static else visit(v) for n, v in self.named(call.args, {})]
        kwargs = {n: v if n in static else visit(v) for n, v in call.kwargs.items()}
        return tuple(args), kwargs

    def tree(self, result: Any, call: ReadCall, marks: Sequence[object] = ()) -> Tree:
        """Takes a result apart, except for these marks, and objects that were given as static
        arguments, which follow them among what `Tree.build` is given.

        Raises Unknown."""
        given = [*marks, *self.static_objects(call)]
        return tree_of(result, "result", self._library, given)

    def static_objects(self, call: ReadCall) -> list[Any]:
        """Returns the static arguments that are neither arrays nor plain values nor containers."""
        library = self._library
        return [
            value
            for name, value in self.named(call.args, call.kwargs)
            if name in self._options.static
            and not library.is_array(value)
            and not is_plain(value, library.plain)
            and children_of(value, library) is None
        ]

    # --- in words
    def words(self, call: ReadCall, changing: Collection[str] = ()) -> str:
        """Formats the arguments for tables, with "…" for the value of those in `changing`."""
        given = self.named(call.args, call.kwargs)
        return ", ".join(
            [f"{n}={'…' if n in changing else self._word(n, value)}" for n, value in given]
        )

    def owners(self, call: ReadCall) -> list[str]:
        """Returns the name of each token's argument; not for calls of plain arrays alone."""
        owners: list[str] = []
        tokens: list[Hashable] = []
        again = ReadCall(call.args, call.kwargs)
        for place, (name, value) in enumerate(self.named(call.args, call.kwargs)):
            if place >= len(call.args):
                tokens.append(name)
            self._add(name, value, tokens, again)
            owners += [name] * (len(tokens) - len(owners))
        return owners

    def _word(self, name: str, value: Any) -> str:
        library = self._library
        if library.is_array(value):
            shape = [*library.signature(value)[0]]
            padding = self._options.padding
            if padding is not None and name in padding.axes:
                with contextlib.suppress(InputError):
                    shape = [*padding.padded(name, shape)[0]]
            return f"{library.signature(value)[1]}{shape}".replace("torch.", "")
        if is_plain(value, library.plain):
            return repr(value)[:40]
        return type(value).__name__


def _parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Returns the names of the positional parameters, and whether there are other parameters."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return [], True
    names, rest = [], False
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        else:
            rest = True
    return names, rest
