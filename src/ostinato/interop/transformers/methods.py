"""Replaces a method of a model, and finds hooks, for both ways to generate."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ostinato.errors import ClosedError, InputError

# Hooks of transformers itself, which do nothing unless outputs are requested.
_HARMLESS_HOOKS = "transformers.utils.output_capturing"


class Method:
    """A method that replaces one of a model's until `remove`; `ours` gets the model first.

    A copy of the model gets the method of its class again.  The model is held by a weak reference:
    a cycle would keep its memory until the collector runs.
    """

    def __init__(self, model: Any, name: str, ours: Callable[..., Any] | None = None) -> None:
        self._model, self._name, self._ours = weakref.ref(model), name, ours
        functools.update_wrapper(self, getattr(type(model), name))
        self.__signature__ = inspect.signature(types.MethodType(getattr(type(model), name), model))
        if ours is not None:
            setattr(model, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        if model is None:
            raise ClosedError(f"the model of this {self._name} is gone")
        return (self._ours or getattr(type(model), self._name))(model, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Method, (self._model(), self._name)

    @staticmethod
    def free(model: Any, name: str) -> bool:
        """True if the model has no such method of its own."""
        found = vars(model).get(name)
        return found is None or (type(found) is Method and found._ours is None)

    @staticmethod
    def require_free(model: Any, name: str, what: str) -> None:
        """Raises InputError if the model has such a method of its own."""
        if not Method.free(model, name):
            raise InputError(f"the model has a {name} of its own: is it {what} already?")

    def remove(self) -> None:
        """Gives the model its own method back, unless another method has replaced this one."""
        self._ours = None
        model = self._model()
        if model is not None and vars(model).get(self._name) is self:
            delattr(model, self._name)


def hooked(modules: Iterable[Any]) -> str:
    """Describes a hook of the user's on one of the modules; empty if there is none."""
    if torch.nn.modules.module._has_any_global_hook():
        return "hooks on all modules"
    for module in modules:
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(getattr(hook, "__module__", "") != _HARMLESS_HOOKS for hook in hooks):
            return f"a hook on a {type(module).__name__}"
    return ""
