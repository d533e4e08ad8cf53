"""The steps of optimisers that count on the CPU, inside of graphs.

`AdamW(parameters, lr)` counts its steps on the CPU and computes numbers in Python from the count
and its settings: `lr / (1 - beta1 ** step)`.  Its kernels get them as arguments.  So a graph can
hold the step if each replay computes these numbers anew, and sets these arguments: the kernels and
the numbers are then those of an eager step, bit for bit, and the count, the settings and
`state_dict()` are the optimiser's own.

How the numbers are computed is read from the optimiser itself.  Its step runs twice without its
work on the device (`_DryRun`): once with settings that note what is computed from them (`Number`),
as an expression, and once with other settings, for which the expressions must give the numbers that
the step passes on.  Everything else that it passes on must be the same in both.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import struct
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato import GraphExec, Node
from ostinato.errors import OstinatoError
from ostinato.interop.captures import kernels_of, replaced
from ostinato.lowlevel import NotLaunched

_leaves: Any = torch.utils._pytree.tree_leaves
_CHECKS = "_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"
"""Methods of optimisers that refuse captures."""
_REFUSED = "capturable", "fused", "differentiable"
_unseen: Any = torch._C._DisableTorchDispatch
"""A block of which no mode sees the operations."""
_SMALL = 64
"""The size up to which a kernel's argument is no list of tensors, in bytes."""
_IN_TABLES = 10752, 1536
"""The offsets of the numbers of up to three lists of tensors in a kernel's argument, in bytes:
after the addresses and sizes of 672, 448 or 336 tensors (torch 2.13 for CUDA 13), of 96, 64 or 48
in others (MultiTensorApply.cuh)."""


def countable(value: object) -> bool:
    """True for an optimiser of torch's whose settings are plain values, and whose state is on the
    device but for the count."""
    if not isinstance(value, torch.optim.Optimizer):
        return False
    if not type(value).__module__.startswith("torch.optim."):
        return False
    for group in value.param_groups:
        settings = [each for key, each in group.items() if key != "params"]
        if any(isinstance(each, torch.Tensor) for each in _leaves(settings)):
            return False
        if any(group.get(name) for name in _REFUSED):
            return False
    return True


def numbers_of(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a group that are numbers, or tuples of numbers."""

    def numeric(value: Any) -> bool:
        if type(value) is tuple:
            return bool(value) and all(map(numeric, value))
        return isinstance(value, int | float) and not isinstance(value, bool)

    return {key: value for key, value in group.items() if numeric(value)}


def signs_of(group: dict[str, Any]) -> tuple[Any, ...]:
    """Returns for the numbers of a group whether they are above and below zero: a step may decide
    by that."""
    found = numbers_of(group).items()
    return tuple([(key, *[(each > 0, each < 0) for each in _leaves(v)]) for key, v in found])


# ------------------------------------------------------------------------------- expressions
class _Decides(Exception):
    """An error: a step decides by a number, and not by its sign."""


class Number(float):
    """A number that notes how it is computed."""

    text: str
    table: dict[float, str]

    def __new__(cls, value: float, text: str, table: dict[float, str]) -> Number:
        made = super().__new__(cls, value)
        made.text, made.table = text, table
        table[value] = text
        return made

    def _made(self, value: Any, text: str) -> Any:
        return Number(value, text, self.table) if type(value) is float else value

    def __neg__(self) -> Any:
        return self._made(-float(self), f"(-{self.text})")

    __hash__ = float.__hash__


def _text(value: Any) -> str:
    return value.text if isinstance(value, Number) else repr(float(value))


def _operator(name: str, sign: str, reflected: bool) -> Callable[[Number, Any], Any]:
    plain = getattr(float, name)

    def method(self: Number, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        pair = (other, self) if reflected else (self, other)
        text = f"({_text(pair[0])} {sign} {_text(pair[1])})"
        return self._made(plain(float(self), float(other)), text)

    return method


def _comparison(name: str) -> Callable[[Number, Any], Any]:
    plain = getattr(float, name)

    def method(self: Number, other: Any) -> Any:
        if other != 0:
            raise _Decides("it decides by a number")
        return plain(float(self), 0.0)

    return method


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _comparison(f"__{_name}__"))
for _name, _sign in {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**"}.items():
    setattr(Number, f"__{_name}__", _operator(f"__{_name}__", _sign, False))
    setattr(Number, f"__r{_name}__", _operator(f"__r{_name}__", _sign, True))


# ---------------------------------------------------------------------------------- dry runs
class _DryRun(TorchDispatchMode):  # type: ignore[misc]  # torch has no type for it
    """Notes the operations of a step, with the numbers among their arguments; those of the device
    do not run."""

    def __init__(self, there: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._there = there
        self.found: list[tuple[Any, list[float]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = [*map(self._there, tensors_in((args, kwargs)))]
        if not any(there):
            with _unseen():
                result = func(*args, **kwargs)
            if any(map(self._there, tensors_in(result))):
                raise ValueError(f"{func} makes a tensor of the device")
            return result
        if not all(there):
            raise ValueError(f"{func} has a number in a tensor")
        self.found.append((func, plain_numbers((args, kwargs))))
        return args[0] if func._schema.returns else None


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _leaves(values) if isinstance(leaf, torch.Tensor)]


def plain_numbers(values: Any) -> list[float]:
    return [leaf for leaf in _leaves(values) if type(leaf) in (int, float)]


class CapturedStep:
    """The step of an optimiser inside of a graph.  Raises ValueError if it cannot be in one.

    `method`: the step.  `line`: the place of its call.  `of_device`: tells whether a tensor is one
    of the device.  `refuse`: called if it turns out later that no graph can hold it."""

    def __init__(
        self,
        optimizer: Any,
        method: Callable[[], object],
        line: str,
        of_device: Callable[[torch.Tensor], bool],
        refuse: Callable[[], object],
    ) -> None:
        self.objects, self.line, self.refuse = (optimizer,), line, refuse
        self._of_device = of_device
        learning = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if any(tables_of_hooks(optimizer)):
            raise ValueError("it has hooks")
        states = [optimizer.state.get(each, {}) for each in learning]
        self._counting = [p for p, state in zip(learning, states, strict=True) if "step" in state]
        """The parameters whose steps are counted."""
        self._counters = self._counters_now()
        self._hosted = {each.data_ptr() for each in self._counters}
        for state in states:
            for name, held in state.items():
                if name != "step" and held is not None and not self.there(held):
                    raise ValueError(f"its {name} is not on the device")
        if any(self.there(each) or each.numel() != 1 for each in self._counters):
            raise ValueError("it does not count on the CPU")
        with _unseen():
            counts = [each.item() for each in self._counters]
        kinds = [*dict.fromkeys(counts)]
        self._kinds = [kinds.index(count) for count in counts]
        """For each counter the index of its count among the different ones."""
        self._leaders = [counts.index(count) for count in kinds]
        """For each of these the index of the first counter that has it."""
        self._now = [count + 1 for count in kinds]
        self._one = torch.tensor(1.0)
        self._at = 0
        self._places: list[tuple[KernelNumbers, list[int]]] = []
        self._setters: list[tuple[Callable[[Sequence[float]], object], list[int]]] = []
        self._last: list[list[float] | None] = []
        self._learn(optimizer, method)

    # --- how its numbers are computed
    def there(self, tensor: torch.Tensor) -> bool:
        return self._of_device(tensor) and tensor.data_ptr() not in self._hosted

    def of_host(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True for an operation of counters, which runs at once."""
        return not any(map(self.there, tensors))

    def _learn(self, optimizer: Any, method: Callable[[], object]) -> None:
        table: dict[float, str] = {}
        first, _ = self._dry_run(optimizer, method, 1, table)
        second, known = self._dry_run(optimizer, method, 2, None)
        if [func for func, _ in first] != [func for func, _ in second]:
            raise ValueError("its operations depend on its settings")
        used = [table[value] for _, each in first for value in each if value in table]
        texts = [*dict.fromkeys(used)]
        self._code = _compiled(texts)
        expected = self._code(*known)
        self._expected: list[tuple[Any, list[float], list[int | None]]] = []
        for (func, one), (_, other) in zip(first, second, strict=True):
            which = [texts.index(table[value]) if value in table else None for value in one]
            for place, value, before in zip(which, other, one, strict=True):
                if value != (before if place is None else expected[place]):
                    raise ValueError(f"it is not known how a number of {func} is computed")
            self._expected.append((func, one, which))

    def _dry_run(
        self,
        optimizer: Any,
        method: Callable[[], object],
        turn: int,
        table: dict[float, str] | None,
    ) -> tuple[list[tuple[Any, list[float]]], tuple[Any, Any]]:
        """Runs the step with other settings; returns its operations, and the settings.  With a
        table, the numbers that are computed from settings are noted there."""
        counts = [float(3 * turn + 2 * kind + 1) for kind in range(len(self._leaders))]
        by_counter = dict(zip(map(id, self._counters), self._kinds, strict=True))
        settings = [dict(numbers_of(group)) for group in optimizer.param_groups]
        changed: list[dict[str, Any]] = []
        factor = 1.0
        for at, before in enumerate(settings):
            changed.append({})
            for name, value in before.items():
                each = []
                for index, number in enumerate(value if type(value) is tuple else (value,)):
                    factor -= 0.0078125 * turn
                    text = f"g[{at}][{name!r}]" + f"[{index}]" * (type(value) is tuple)
                    made = number * factor if number else number  # a zero may be no float
                    each.append(Number(made, text, table) if made and table is not None else made)
                changed[-1][name] = tuple(each) if type(value) is tuple else each[0]
        now = [count + 1 for count in counts]

        def get_value(tensor: Any) -> Any:
            kind = by_counter.get(id(tensor))
            value = tensor.item() if isinstance(tensor, torch.Tensor) else tensor
            if kind is None or table is None:
                return value
            if value != now[kind]:
                raise ValueError("it reads its count before it has counted")
            return Number(value, f"s[{kind}]", table)

        module = sys.modules[inspect.unwrap(type(optimizer).step).__module__]
        reading = {(module, "_get_value"): get_value} if hasattr(module, "_get_value") else {}
        dry = _DryRun(self.there)
        own = vars(optimizer).copy()
        state: dict[Any, dict[str, Any]] = optimizer.state
        held = {parameter: dict(each) for parameter, each in state.items()}
        try:
            self._set_counters(counts)
            for group, new in zip(optimizer.param_groups, changed, strict=True):
                group.update(new)
            with replaced(reading), unchecked(optimizer), dry:
                method()
            with _unseen():
                found = [each.item() for each in self._counters]
            if found != [now[kind] for kind in self._kinds]:
                raise ValueError("it does not count one step")
            if any(own.get(name) is not value for name, value in vars(optimizer).items()):
                raise ValueError("it changes attributes")
            if any(not same_items(held.get(p, {}), inner) for p, inner in state.items()):
                raise ValueError("it changes its state")
        finally:
            for parameter, inner in [*state.items()]:
                if parameter not in held:
                    del state[parameter]
                elif not same_items(held[parameter], inner):
                    inner.clear()
                    inner.update(held[parameter])
            for group, old in zip(optimizer.param_groups, settings, strict=True):
                group.update(old)
            self._set_counters([count - 1 for count in self._now])
        return dry.found, (changed, now)

    # --- its capture
    def numbers(self, func: Any, args: Any, kwargs: Any) -> tuple[list[float], list[int]]:
        """Returns the numbers of an operation of its capture that change, and which they are.

        Raises ValueError if the operation is not that of the dry runs."""
        if self._at >= len(self._expected) or self._expected[self._at][0] is not func:
            raise ValueError(f"{func} was not expected")
        _, constants, which = self._expected[self._at]
        self._at += 1
        found = plain_numbers((args, kwargs))
        computed = self._code(self.objects[0].param_groups, self._now)
        values, places = [], []
        meant: dict[float, int] = {}
        for value, constant, place in zip(found, constants, which, strict=True):
            if value != (constant if place is None else computed[place]):
                raise ValueError(f"a number of {func} was not expected")
            if place is not None:
                values.append(value)
                places.append(place)
                if meant.setdefault(_rounded(value), place) != place:
                    raise ValueError(f"two numbers of {func} are the same now")
        return values, places

    def undo(self) -> None:
        """Takes back that the capture has counted."""
        self._set_counters([count - 1 for count in self._now])

    def _set_counters(self, counts: Sequence[float]) -> None:
        with _unseen():
            for counter, kind in zip(self._counters, self._kinds, strict=True):
                counter.fill_(counts[kind])

    def finished(self) -> None:
        """Raises ValueError if operations are missing."""
        if self._at != len(self._expected):
            raise ValueError("its operations are not those of a dry run")

    def note(self, place: KernelNumbers, which: list[int]) -> None:
        """Notes the place of some numbers in the capture."""
        self._places.append((place, which))

    def found_in(self, executables: Sequence[GraphExec | None]) -> int:
        """Finds its numbers in the graphs of a chain; returns the index of the first graph that has
        some.  Raises ValueError if some are in none."""
        first = len(executables)
        kernels = [[] if each is None else kernels_of(each.graph.nodes()) for each in executables]
        for place, which in self._places:
            for index, executable in enumerate(executables):
                setter = None if executable is None else place.find(executable, kernels[index])
                if setter is not None:
                    self._setters.append((setter, which))
                    first = min(first, index)
                    break
            else:
                raise ValueError("its numbers are in no graph")
        if not self._setters:
            raise ValueError("it has no numbers")
        self._last = [None] * len(self._setters)
        return first

    # --- its replays
    def begin(self) -> None:
        """Counts, and sets the numbers of the next launch.  Raises NotLaunched."""
        counters = self._counters_now()
        self._add(counters, 1.0)
        try:
            counts = [each.item() for each in counters]
            now = [counts[index] for index in self._leaders]
            if counts != [now[kind] for kind in self._kinds]:
                raise ValueError("its counts are no longer equal")
            numbers = self._code(self.objects[0].param_groups, now)
            for index, (setter, which) in enumerate(self._setters):
                values = [numbers[place] for place in which]
                if values != self._last[index]:
                    self._last[index] = None
                    setter(values)
                    self._last[index] = values
        except BaseException as error:
            self.back()
            if not isinstance(error, OstinatoError | ArithmeticError | TypeError | ValueError):
                raise
            raise NotLaunched(f"the numbers of {self.line} cannot be set ({error})") from error

    def back(self) -> None:
        """Takes back the last count."""
        self._add(self._counters_now(), -1.0)

    def _counters_now(self) -> list[Any]:
        state = self.objects[0].state
        return [state[parameter]["step"] for parameter in self._counting]

    def _add(self, counters: list[torch.Tensor], count: float) -> None:
        if counters:
            with torch.no_grad():
                torch._foreach_add_(counters, self._one, alpha=count)


def _rounded(value: float) -> float:
    """Returns a number as kernels have it at least."""
    return ctypes.c_float(value).value


def same_items(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[key] is other[key] for key in one)


def _compiled(texts: Sequence[str]) -> Callable[[Any, Any], tuple[float, ...]]:
    source = f"lambda g, s: ({''.join([f'{text},' for text in texts])})"
    made: Callable[[Any, Any], tuple[float, ...]] = eval(source)  # of numbers and their operators
    return made


def tables_of_hooks(optimizer: Any) -> list[dict[Any, Any]]:
    """Returns the tables of the hooks that a step calls."""
    own, every = vars(optimizer), vars(sys.modules[torch.optim.Optimizer.__module__])
    found = []
    for when in ("pre", "post"):
        found.append(own.get(f"_optimizer_step_{when}_hooks"))
        found.append(every.get(f"_global_optimizer_{when}_hooks"))
    return [each for each in found if each is not None]


def unchecked(optimizer: Any) -> AbstractContextManager[None]:
    """Lets a step of an optimiser be captured, in a block, that torch holds for not capturable."""
    return replaced({(optimizer, name): _nothing for name in _CHECKS})


def _nothing() -> None:
    """There is nothing to check."""


# ------------------------------------------------------------------------- arguments of kernels
class KernelNumbers:
    """The numbers in the arguments of the kernels that one operation has launched.

    A number is an argument, or in a small one.  Numbers of a list of tensors are in the table of
    the list (`_IN_TABLES`); what else is there may be left from other launches.  `nodes`: the
    parameters of these nodes of the capture.  `wide`: the numbers have 64 bits.  Raises ValueError
    if they are not found there."""

    def __init__(self, nodes: Sequence[Any], values: Sequence[float], *, wide: bool) -> None:
        self._code, width = ("d", 8) if wide else ("f", 4)
        places = {struct.pack(self._code, value): at for at, value in enumerate(values)}
        self._found: list[tuple[Any, int, int, list[int]]] = []
        """Parameters of a node, an argument, an offset there, and which numbers come from it on."""
        for params in nodes:
            if not hasattr(params, "arguments"):
                raise ValueError("an operation does more than launching kernels")
            found: list[tuple[Any, int, int, list[Any]]] = []
            listed: list[tuple[Any, int, int, list[Any]]] = []
            for index in range(len(params.arguments)):
                raw = params.arguments.raw(index)
                words = [places.get(raw[at : at + width]) for at in range(0, len(raw), width)]
                if len(raw) > _SMALL:
                    start = next(each for each in (*_IN_TABLES, 0) if len(raw) > each)
                    which = [*itertools.takewhile(_is_number, words[start // width :])]
                    listed += [(params, index, start, which)] * bool(which)
                elif len(values) == 1:
                    at = [place * width for place, word in enumerate(words) if _is_number(word)]
                    found += [(params, index, each, [0]) for each in at]
            found = found or listed
            if len(found) != 1:
                raise ValueError(f"{len(found)} arguments of a kernel may have its numbers")
            self._found += found
        if sum(len(which) for *_, which in self._found) < len(values):
            raise ValueError("some numbers are in no argument of a kernel")

    def find(
        self, executable: GraphExec, kernels: Sequence[Node]
    ) -> Callable[[Sequence[float]], object] | None:
        """Returns a function of the numbers that sets them in an executable with these kernels;
        None if the place is not in this one."""
        setters = []
        for params, index, at, which in self._found:
            same = [node for node in kernels if _alike(node, params)]
            if not same:
                return None
            if len(same) > 1:
                raise ValueError("two kernels have the same arguments")
            setters.append(self._setter(executable, same[0], index, at, which))

        def set_all(values: Sequence[float]) -> None:
            for setter in setters:
                setter(values)

        return set_all

    def _setter(
        self, executable: GraphExec, node: Node, index: int, at: int, which: Sequence[int]
    ) -> Callable[[Sequence[float]], None]:
        buffer = bytearray(node.kernel.arguments.raw(index))
        pack, run = struct.Struct(f"{len(which)}{self._code}").pack_into, weakref.ref(executable)

        def setter(values: Sequence[float]) -> None:
            pack(buffer, at, *[values[place] for place in which])
            there = run()
            if there is not None:
                there.set(node, index, bytes(buffer))

        return setter


def _is_number(place: int | None) -> bool:
    return place is not None


def _alike(node: Node, params: Any) -> bool:
    mine = node.kernel
    return bool(mine.function == params.function and mine.arguments.data == params.arguments.data)


def launched_since(
    driver: Any, before: Iterable[Any], after: Iterable[Any], edges: Sequence[Any]
) -> list[Any]:
    """Returns the parameters of the kernels that a capture has got between two positions."""
    left, met, found = [*after], {*before}, []
    while left:
        handle = left.pop()
        if handle in met:
            continue
        met.add(handle)
        found.append(driver.node_params(handle))
        left += [edge.source for edge in edges if edge.target == handle]
    return found
