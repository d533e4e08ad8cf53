"""The content of a PyTorch module, read again at each call of a graphed function that uses it."""

from __future__ import annotations

import inspect
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.interop.reading.guards import Guarded
from ostinato.interop.reading.library import NotGraphable
from ostinato.interop.reading.objects import Missing, Watch, same, version_of
from ostinato.interop.reading.places import (
    acts,
    data_of,
    forget_methods,
    is_own,
    methods_of,
    names_in_method,
    own_bases,
)
from ostinato.interop.reading.recheck import Checks, Inexpressible
from ostinato.interop.reading.states import StateWatch
from ostinato.interop.reading.stored import Description, code_text
from ostinato.interop.reading.trees import Itself, is_plain, plain_token
from ostinato.interop.torch.counting import numbers_of, signs_of, tables_of_hooks
from ostinato.interop.torch.trees import PLAIN

SCRIPTED = (
    "{} is TorchScript (torch.jit.script), which keeps attributes in C++, where no guard reads "
    "them; give guard=False if none of them changes"
)
"""The reason why functions that use TorchScript run eagerly."""
_STEPS: dict[type, tuple[str, ...]] = {
    torch.optim.Optimizer: ("step",),
    torch.optim.lr_scheduler.LRScheduler: ("step",),
    torch.amp.GradScaler: ("unscale_", "step", "update"),
}
"""The classes whose objects are read whole, with the methods that change them."""
_STATEFUL = tuple(_STEPS)
_READING = frozenset(
    [
        *("param_groups", "state", "defaults", "state_dict", "load_state_dict", "add_param_group"),
        *("get_last_lr", "last_epoch", "base_lrs", "get_growth_factor", "get_backoff_factor"),
    ]
)
"""Attributes by which a function reads what these methods change, so that it needs guards."""
_TABLES = "_forward_hooks", "_forward_pre_hooks"
_all = itertools.chain.from_iterable
_values = dict.values


@dataclass(frozen=True, slots=True)
class _Attribute:
    """The place of an attribute of a module, or of its class."""

    path: str
    """The path from the watched module."""
    held: dict[str, Any]
    name: str
    kind: type | None = None
    """The class, for an attribute of a class; else None."""


def _value(attribute: _Attribute) -> Any:
    if attribute.kind is None:
        return attribute.held[attribute.name]
    return getattr(attribute.kind, attribute.name, Missing)


def _is_plain(value: Any) -> bool:
    """True if the value is compared here; guards look into functions and the like."""
    return is_plain(value, PLAIN) and not acts(value)


def _is_fixed(value: Any) -> bool:
    """True if the value of a class's attribute is compared here, as methods of packages are too."""
    return _is_plain(value) or (isinstance(value, types.FunctionType) and not is_own(value))


def _shared(kinds: Iterable[type]) -> Iterator[_Attribute]:
    """Yields what `forward` reads of the classes of modules: data, and methods of the user's
    classes, which may be replaced."""
    for kind in sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__)):
        names = names_in_method(kind, "forward")
        methods = methods_of(kind, names | {"forward"})
        found = sorted(data_of(kind, names))
        found += [name for name, each in methods.items() if not isinstance(each, Itself)]
        if "forward" not in found:  # a package's may be replaced as well
            found.append("forward")
        for name in found:
            yield _Attribute(f"{kind.__qualname__}.{name}", {}, name, kind)


_OF_EVERY = frozenset(vars(torch.nn.Module()))


def _private_names(kind: type, named: Collection[str]) -> frozenset[str]:
    """Returns the attributes whose names begin with _ that are read of modules of a class: those
    that `forward` names, since they may say whether an adapter is on, and of the user's classes
    those `named`.  Empty for torch's own classes, which never set any."""
    if kind.__module__.partition(".")[0] == "torch":
        return frozenset()
    more = named if own_bases(kind) else ()
    return names_in_method(kind, "forward").union(more) - _OF_EVERY


def stateful(value: Any) -> Any:
    """Returns the optimiser, scheduler or scaler that a value is or refers to: as a weak reference,
    or as the function that a scheduler sets as an optimiser's `step`.  None for all others."""
    if isinstance(value, types.FunctionType):
        if not hasattr(value, "_wrapped_by_lr_sched"):
            return None
        value = inspect.getclosurevars(value).nonlocals.get("opt_ref")
    if isinstance(value, weakref.ref):
        value = value()
    return value if isinstance(value, _STATEFUL) else None


def steps_of(value: object, named: Collection[str]) -> tuple[str, ...]:
    """Returns the methods of an object that a replay can call in Python; empty if there are none,
    or if code that names the attributes `named` may read what they change."""
    optimizer = torch.optim.Optimizer
    zeroes = isinstance(value, optimizer) and type(value).zero_grad is not optimizer.zero_grad
    if zeroes or not _READING.isdisjoint(named):
        return ()
    return next((names for kind, names in _STEPS.items() if isinstance(value, kind)), ())


class WholeWatch(StateWatch):
    """The whole of an optimiser, a scheduler or a scaler, with the hooks of `Optimizer.step`."""

    def hooks(self) -> Iterator[tuple[str, Any]]:
        for held in tables_of_hooks(self.object):
            yield "hooks", held


class _PartWatch(StateWatch):
    """A part of such an object, which `read` and `note` know."""

    def names(self) -> list[str]:
        return []

    def others(self) -> Iterator[tuple[str, Any]]:
        return iter(())

    def holders(self) -> Iterable[Any]:
        self._find()
        return super().holders()


class StepWatch(_PartWatch):
    """The part of an object whose steps a replay makes in Python that graphs use: the parameters of
    an optimiser, whose gradients `zero_grad` sets, and the scale of a scaler."""

    def _used(self) -> dict[str, Any]:
        held = vars(self.object)
        names = ("param_groups", "_enabled", *_SCALES)
        return {name: held[name] for name in names if name in held}

    def read(self, tokens: list[Hashable], arrays: list[Any]) -> None:
        used = self._used()
        groups = used.get("param_groups", ())
        found = [parameter for group in groups for parameter in group["params"]]
        found += [used[name] for name in _SCALES if used.get(name) is not None]
        tokens.append((StepWatch, type(self.object), len(found), used.get("_enabled")))
        arrays += found

    def note(self, checks: Checks, tokens: list[Hashable], arrays: list[Any]) -> None:
        self.read(tokens, arrays)
        used = self._used()
        checks.kind(self.object)
        checks.some_items(vars(self.object), used)
        groups = used.get("param_groups")
        if groups is None:
            return
        checks.sequence(groups, [*groups])
        for group in groups:
            checks.some_items(group, {"params": group["params"]})
            checks.sequence(group["params"], [*group["params"]])


_SCALES = "_scale", "_growth_tracker"
"""The tensors of a scaler."""


def arrays_beside(parameter: torch.Tensor, held: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors of a dict that are on the device of a parameter, but the count of an
    optimiser's steps.  With others no graph holds its step."""
    found = {k: v for k, v in held.items() if isinstance(v, torch.Tensor) and k != "step"}
    return {k: v for k, v in found.items() if v.device == parameter.device}


def _token(value: Any) -> Hashable:
    return plain_token(value) if is_plain(value, PLAIN) else Itself(value)


class CountingWatch(_PartWatch, WholeWatch):
    """An optimiser whose step may be in a graph (`counting`): all but the count of its steps; of
    its numbers the signs."""

    def _parts(self) -> tuple[list[Hashable], list[Any], list[dict[str, Any]]]:
        """Returns the tokens, the arrays, and what is in each group but numbers."""
        kind: Any = type(self.object)
        tokens: list[Hashable] = [kind]
        arrays: list[Any] = []
        settings = []
        for group in self.object.param_groups:
            numbers = numbers_of(group)
            rest = {k: v for k, v in group.items() if k not in numbers and k != "params"}
            settings.append(rest)
            tokens += [signs_of(group), tuple([(k, _token(v)) for k, v in rest.items()])]
            tokens.append(len(group["params"]))
            arrays += group["params"]
        for parameter, state in self.object.state.items():
            tokens.append((*state,))
            arrays += arrays_beside(parameter, state).values()
        return tokens, arrays, settings

    def read(self, tokens: list[Hashable], arrays: list[Any]) -> None:
        found, read, _ = self._parts()
        tokens.append((CountingWatch, len(read), *found))
        arrays += read

    def note(self, checks: Checks, tokens: list[Hashable], arrays: list[Any]) -> None:
        self.read(tokens, arrays)
        held = vars(self.object)
        checks.kind(self.object)
        checks.some_items(held, {name: held[name] for name in ("param_groups", "state")})
        groups, state = held["param_groups"], held["state"]
        checks.sequence(groups, [*groups])
        for group, rest in zip(groups, self._parts()[2], strict=True):
            checks.some_items(group, {**rest, "params": group["params"]})
            checks.reads(group, signs_of)
            checks.sequence(group["params"], [*group["params"]])
        checks.items(state, [*state.values()])
        for parameter, each in state.items():
            checks.size(each, len(each))
            checks.some_items(each, arrays_beside(parameter, each))


HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
"""Tables of hooks of a module."""
_OF_FORWARD = 2
"""The number of those that matter without gradients, which come first."""


def global_hooks() -> list[dict[int, Any]]:
    """Returns the tables of hooks of all modules."""
    every = vars(torch.nn.modules.module)
    return [every[f"_global{name}"] for name in HOOKS]


class ModuleWatch(Watch):
    """The content of a module and of those inside it, read again at each call: weights, buffers,
    and attributes.  Attributes are plain values, tensors, and others (`others`); those whose names
    begin with _ count only if `forward` names them.

    `learns`: tells whether gradients may be computed, which hooks of the backward change.
    `hooks_of`: as `WatchingLibrary.hooks`.  `whole`: the hooks of the module itself run elsewhere.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        learns: Callable[[], bool],
        hooks_of: Callable[[torch.Tensor], Iterable[Any]],
        *,
        whole: bool,
    ) -> None:
        self._module = weakref.ref(module)  # the caller keeps the module alive
        self._learns, self._hooks_of, self._whole = learns, hooks_of, whole
        self._of_kinds: list[tuple[_Attribute, Any]] = []
        """The attributes of classes that the watch reads, with their values."""
        self._find()

    def _find(self) -> None:
        """Finds the places to read, and the version of the content (`version_of`)."""
        if any(_value(each) is not value for each, value in self._of_kinds):
            forget_methods()
        self._read_for = len(self.named)
        named = dict(self._module().named_modules())  # type: ignore[union-attr]
        modules = [*named.values()]
        for path, module in named.items():
            if isinstance(module, torch.jit.ScriptModule):
                raise NotGraphable(SCRIPTED.format(path or "a module that it uses"))
        places = {id(module): place for place, module in enumerate(modules)}
        self._inside = [m._modules for m in modules if m._modules]
        self._children = [*_all(map(_values, self._inside))]
        self._tensors = [d for m in modules for d in (m._parameters, m._buffers) if d]
        self._hooks = global_hooks()
        self._hooks += [vars(m)[name] for m in modules for name in HOOKS]
        self._held = [m.__dict__ for m in modules]
        self._kinds = [*map(type, self._children)]
        inner = [d for m in modules for d in (m._modules, m._parameters, m._buffers)]
        self._sized = [*self._held, *inner]
        self._lengths = [*map(len, self._sized)]
        self._filled = self._filled_now()
        self._gets: list[tuple[Callable[[dict[str, Any]], tuple[Any, ...]], dict[str, Any]]] = []
        self._names: list[list[str]] = []
        self._loose: list[_Attribute] = []
        """Tensors that are neither parameters nor buffers."""
        self._others: list[_Attribute] = []
        for (path, module), held in zip(named.items(), self._held, strict=True):
            names, read = [], _private_names(type(module), self.named)
            for name, value in held.items():
                if name.startswith("_") and name not in read:
                    continue
                where = _Attribute(f"{path}.{name}" if path else name, held, name)
                if _is_plain(value):
                    names.append(name)
                elif isinstance(value, torch.Tensor):
                    self._loose.append(where)
                # A GraphedModule sets its own method as `forward` while hooks run.
                elif not (
                    isinstance(value, types.MethodType) and isinstance(value.__self__, Guarded)
                ):
                    self._others.append(where)
            self._names.append(names)
            self._gets.append((operator.itemgetter(*names, *_TABLES), held))
        self._shared = [*_shared({type(module) for module in modules})]
        self._others += [each for each in self._shared if not _is_fixed(_value(each))]
        self._shared = [each for each in self._shared if _is_fixed(_value(each))]
        self._of_kinds = [(e, _value(e)) for e in (*self._shared, *self._others) if e.kind]
        self._kind = type(modules[0])
        self._plain, self._found, self._hooked = self._state()
        found = [*map(id, self._found)]
        state = (
            tuple([(path, type(module)) for path, module in named.items()]),
            tuple([places.get(id(child)) for child in self._children]),
            tuple([tuple([n for n, v in d.items() if v is not None]) for d in inner]),
            tuple(map(tuple, self._names)),
            tuple([each.path for each in self._shared]),
            tuple([plain_token(v) for v in self._plain if not isinstance(v, dict)]),
            tuple([each.path for each in (*self._loose, *self._others)]),
            tuple([found.index(each) for each in found]),
            tuple(self._hooked),
        )
        self._version = version_of(state)

    def _filled_now(self) -> list[list[Any]]:
        """Returns the names of modules and tensors, and which tensors are None."""
        tensors = _all(map(_values, self._tensors))
        return [
            [*_all(self._inside + self._tensors)],
            [*map(operator.is_, tensors, itertools.repeat(None))],
        ]

    def _state(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns plain attributes and tables of hooks, other attributes, and hooks.

        Raises KeyError if an attribute is gone."""
        plain = [*_all([get(held) for get, held in self._gets])]
        if self._shared:
            plain += map(_value, self._shared)
        found = [*map(_value, self._others)]
        return plain, found, [*map(tuple, self._hooks)] if any(self._hooks) else []

    def _as_before(self) -> bool:
        """True if all places are unchanged and attributes are the same objects: 1, 1.0 and True are
        equal, and behave differently."""
        # Loops run in C where possible, since each call that goes by its key runs this.
        children = same([*_all(map(_values, self._inside))], self._children)
        if not children or [*map(len, self._sized)] != self._lengths:
            return False
        if len(self.named) != self._read_for:
            return False
        if self._filled_now() != self._filled:
            return False
        if type(self._module()) is not self._kind or [*map(type, self._children)] != self._kinds:
            return False
        try:
            plain, found, hooked = self._state()
            loose = all(isinstance(_value(each), torch.Tensor) for each in self._loose)
        except KeyError:
            return False
        alike = same(plain, self._plain) and same(found, self._found)
        return alike and loose and hooked == self._hooked

    def read(self, tokens: list[Hashable], arrays: list[Any]) -> None:
        if not self._as_before():
            self._find()
        tokens.append((ModuleWatch, self._version))
        arrays += self._arrays()

    def _arrays(self) -> list[Any]:
        found = [t for t in _all(map(_values, self._tensors)) if t is not None]
        return [*found, *map(_value, self._loose)]

    def others(self) -> Iterator[tuple[str, Any]]:
        """Yields attributes that are neither tensors nor plain values, each object once."""
        met: set[int] = set()
        for each, value in zip(self._others, self._found, strict=True):
            if id(value) not in met:
                met.add(id(value))
                yield each.path, value

    def hooks(self) -> Iterator[tuple[str, Any]]:
        learns = self._learns()
        for at, held in enumerate(self._hooks):
            own = self._whole and at // len(HOOKS) == 1  # after those of all modules
            if held and not own and (learns or at % len(HOOKS) < _OF_FORWARD):
                yield "hooks", held
        for tensor in self._arrays() if learns else ():
            for held in self._hooks_of(tensor):
                yield "hooks", held

    def methods(self) -> Iterator[tuple[type, str]]:
        module: Any = self._module()
        for kind in {type(each) for each in module.modules()}:
            yield kind, "forward"

    def holders(self) -> Iterable[Any]:
        return [*self._sized, *self._hooks]

    def describe(self, name: str, description: Description) -> None:
        """Adds the whole content by name, except `others`."""
        root: Any = self._module()
        for path, module in root.named_modules(prefix=name):
            forward = module.forward  # may be set on the module itself, not on its class
            description.add(path, type(module), code_text(type(module)), code_text(forward))
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is not None:
                        description.array(f"{path}.{key}", tensor)
            inside = ("_modules", "_parameters", "_buffers")
            description.settings({k: v for k, v in vars(module).items() if k not in inside})
        for held, names in zip(self._held, self._names, strict=True):
            for key in names:  # `settings` leaves out numbers with private names
                if key.startswith("_") and type(held[key]) in (int, float):
                    description.add(key, held[key])
        for each in self._loose:
            description.array(f"{name}.{each.path}", _value(each))
        for each in self._shared:
            description.add(each.path, _value(each))

    def note(self, checks: Checks, tokens: list[Hashable], arrays: list[Any]) -> None:
        """Reads the content, and notes the place of each value."""
        before = len(arrays)
        self.read(tokens, arrays)
        children = [[*held.values()] for held in self._inside]
        tensors = [[*held.values()] for held in self._tensors]
        for held, values in zip(self._inside + self._tensors, children + tensors, strict=True):
            checks.items(held, values)
        learns = self._learns()
        for at, hooks in enumerate(self._hooks):
            if at % len(HOOKS) >= _OF_FORWARD and not learns:
                continue
            if hooks:
                checks.reads(hooks, tuple)
            else:
                checks.size(hooks, 0)
        for held, length in zip(self._sized, self._lengths, strict=True):
            if not held or "_modules" in held:  # `items` compares the others
                checks.size(held, length)
        for held, names in zip(self._held, self._names, strict=True):
            checks.some_items(held, {name: held[name] for name in (*names, *_TABLES)})
        loose, found = [*map(_value, self._loose)], [*map(_value, self._others)]
        for each, value in zip(self._loose + self._others, loose + found, strict=True):
            if each.kind is None:
                checks.some_items(each.held, {each.name: value})
        for each in (*self._shared, *self._others):
            if each.kind is not None:
                checks.attributes(each.kind, {each.name: _value(each)})
        checks.types([self._module(), *self._children], [self._kind, *self._kinds])
        read = [t for t in _all(tensors) if t is not None] + loose
        if not (
            same([*_all(children)], self._children)
            and same(read, arrays[before:])
            and same(self._state()[0], self._plain)
            and same(found, self._found)
        ):
            raise Inexpressible
