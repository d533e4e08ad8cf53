"""`graphed`: a function or a module of PyTorch that replays a graph of itself.

`interop.reading` makes keys, captures and replays; `library.py` does torch's part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from ostinato import Device, GraphCache
from ostinato.errors import InputError
from ostinato.interop.graphed import Graphed
from ostinato.interop.reading.library import Devices, GraphedOptions, cuda_index, name_of, own_cache
from ostinato.interop.reading.moves import MOST
from ostinato.interop.reading.places import Current
from ostinato.interop.reading.recheck import Checks, Inexpressible
from ostinato.interop.reading.stored import Stored, code_text
from ostinato.interop.torch.library import Torch, TorchWithoutCuda
from ostinato.interop.torch.watching import HOOKS, global_hooks
from ostinato.step import Buckets

_names = itertools.count()
devices = Devices(lambda index: torch.cuda.current_stream(index))


def graphed(
    function: Callable[..., Any] | None = None,
    /,
    *,
    static: Sequence[str] = (),
    dynamic: Mapping[str, int] | None = None,
    buckets: Buckets | None = None,
    padding: Mapping[str, float] | None = None,
    results: str = "clone",
    gradients: str = "refuse",
    verify: Literal["off", "first"] | int = "off",
    tolerance: tuple[float, float] | None = None,
    strict: bool = False,
    guard: bool = True,
    generators: Sequence[Any] = (),
    cache: GraphCache | None = None,
    budget: int | str | None = None,
    device: Device | None = None,
    name: str | None = None,
    store: str | Path | None = None,
) -> Any:
    """Wraps a function or a module so that it replays a graph of itself; called like the original.

        step = graphed(model)
        with torch.inference_mode():
            y = step(x)

    The first call of a key runs eagerly.  The second one is captured and replayed, and all later
    ones are replays.  The key: nesting, shapes, strides, dtypes and devices of the tensors in the
    arguments, plain Python values, torch's modes (gradients, inference, autocast, determinism,
    default dtype, precision of products, kernels), and what the function uses besides its
    arguments, as far as guards can read that (`interop.reading.guards`).  A function that cannot be
    captured runs eagerly, with a reason in `explain()`; so does every function where torch has no
    CUDA device.

    * `static`: names of parameters whose tensors are not copied (weights, key-value caches).  The
      graph works on their memory, and is bound anew when it has moved.  The argument may be any
      object: its tensors are watched, and what guards read is compared, unless its class is a
      package's.
    * `dynamic`: for a parameter, the axis that is padded to a bucket of `buckets` (powers of two);
      results are cut back.  `padding`: the value of a parameter's padding, if the answer depends on
      it.  Without it no answer may depend on the padding, which a check tests.
    * `results`: "clone", or "static": tensors that the next call overwrites, without a copy.
    * `gradients`: "refuse" raises InputError for a call that needs them, "eager" runs it eagerly,
      "replay" gives it a backward that replays a graph of its own.
    * `verify`: "off", "first" (each graph once), or N for each Nth replay: the call runs eagerly
      too, and the answers are compared bit by bit, or within `tolerance` (relative, absolute).
    * `strict`: an unexpected eager run raises EagerRunError.
    * `guard`: False if nothing that the function uses besides its arguments ever changes or moves:
      then calls do not read it again.
    * `generators`: those that the function draws from, besides the default one.
    * `store`: a folder of graphs.  A key that was saved there (`step.save()`, in a process that
      collects machine code: `graphfile.collect_modules`) is restored when it is first called,
      bound to the tensors of this process, without a warm-up and a capture.  Keys that do not fit
      are captured as usual; `statistics().not_restored` has the reasons.
    * `cache`, or `budget` for the bytes of a cache of its own (a quarter of the device's memory if
      neither is given); `device`: torch's current one by default.

    Raises InputError for options that do not fit the function.
    """
    given = {name: value for name, value in locals().items() if name != "function"}
    if function is None:
        return lambda f: graphed(f, **given)
    if isinstance(function, Graphed):
        raise InputError(f"{function!r} is graphed already")
    index = None if device is None else cuda_index(device)
    unavailable = ""
    if not torch.cuda.is_available():
        unavailable = "torch has no CUDA device here, so there is nothing to capture"
    elif (allocator := torch.cuda.get_allocator_backend()) != "native":
        unavailable = (
            f"torch allocates with {allocator} here, and only its native allocator keeps the "
            "memory of a capture for its graph (backend:native in PYTORCH_CUDA_ALLOC_CONF)"
        )
    if unavailable:
        library: Torch = TorchWithoutCuda(device or devices.of(None))
    else:
        index = torch.cuda.current_device() if index is None else index
        library = Torch(device or devices.of(index), index, generators)
        library.hooks_apart = gradients == "replay"
    options = GraphedOptions.given(given)
    kept = cache or own_cache(library.device, budget)
    owns = cache is None
    module = function if isinstance(function, torch.nn.Module) else None
    called = function if module is None else module.forward
    if name is None:
        name = name_of(function, next(_names))
    rest: dict[str, Any] = {"name": name, "owns_cache": owns, "unavailable": unavailable}
    if store is not None and not unavailable:
        rest["stored"] = Stored(library, store, (code_text(called), options.results, MOST))
    if module is not None:
        return GraphedModule(module, called, library, options, kept, **rest)
    return Graphed(called, library, options, kept, **rest)


class GraphedModule(Graphed):
    """A module whose calls replay graphs of its `forward`.

    Everything else is the module's: `state_dict`, `parameters`, attributes, `to`.  Hooks of the
    module itself, and a `__call__` of its class, run in Python at each call, around the replay.
    Hooks of modules inside it are captured with it: their work on tensors is replayed, their Python
    does not run again.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        library: Torch,
        options: GraphedOptions,
        *args: Any,
        **others: Any,
    ) -> None:
        self.module = module
        """The module itself, whose calls run eagerly."""
        self._forward = _Forward(module, forward)
        library.whole = module
        super().__init__(self._forward, library, options, *args, **others)
        self.__wrapped__, self._original = forward, module  # a module's call runs its hooks
        self._made = True

    def _long(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module  # short ways compare its hooks too
        if not (any(map(vars(module).get, HOOKS)) or any(global_hooks()) or _own_call(module)):
            return super()._long(*args, **kwargs)
        with self._lock, self._forward.replayed(super()._long):
            return module(*args, **kwargs)

    def _note(self, checks: Checks) -> None:
        if _own_call(self.module):
            raise Inexpressible
        held = self.module.__dict__
        hooks = {name: held[name] for name in HOOKS}
        checks.some_items(held, hooks)
        for each in (*hooks.values(), *global_hooks()):
            checks.size(each, 0)
        if "forward" not in held:
            checks.attributes(type(self.module), {"forward": type(self.module).forward})

    def _owns(self, name: str) -> bool:
        held = vars(self)
        return "_made" not in held or name in held or hasattr(type(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._owns(name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if self._owns(name):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # read before it is set
            raise AttributeError(name)
        value = getattr(self.module, name)
        if name in _RETURNING_SELF and callable(value):

            def call(*args: Any, **kwargs: Any) -> Any:
                result = value(*args, **kwargs)
                return self if result is self.module else result

            return call
        return value


class _Forward(Current):
    """A module's `forward`, which may be replaced between calls."""

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__(forward)
        self.module = self._module = module
        self._own: Any = None
        self._replayed: Any = None
        """The stand-in for `forward` that replays while module hooks run."""

    def now(self) -> Any:
        found = vars(self._module).get("forward")
        if found is not None and found is self._replayed:
            found = self._own
        return type(self._module).forward if found is None else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        found = vars(module).get("forward")
        if found is None:
            return module.forward(*args, **kwargs)
        if found is self._replayed:
            found = self._own
        if found is None:
            found = type(module).forward.__get__(module)
        return found(*args, **kwargs)

    @contextmanager
    def replayed(self, replay: Callable[..., Any]) -> Iterator[None]:
        """Makes the module's own calls replay in the block, between its hooks."""
        held = vars(self._module)
        before = held.get("forward")
        if before is not None and before is self._replayed:  # a hook called the module again
            yield
            return
        self._own, self._replayed = before, replay
        held["forward"] = replay
        try:
            yield
        finally:
            if before is None:
                held.pop("forward", None)
            else:
                held["forward"] = before
            self._own = self._replayed = None


_RETURNING_SELF = frozenset(
    [
        *("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type"),
        *("train", "eval", "requires_grad_", "apply"),
    ]
)


def _own_call(module: torch.nn.Module) -> bool:
    """True if the module's class has a `__call__` of its own."""
    return type(module).__call__ is not torch.nn.Module.__call__
