"""Dropout between recurrent layers.  cuDNN draws it from a state of its own in device memory.  An
eager run starts that state anew after a seed was given, and no replay does."""

from __future__ import annotations

import functools
from typing import Any

import torch

_draws = 0
"""The number of runs of such layers since `watch`."""


def watch() -> None:
    """Counts such runs from now on.  Lasts as long as the process; what torch does is not
    changed."""
    functions: Any = torch._VF
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        if name not in vars(functions):
            setattr(functions, name, _counted(getattr(functions, name)))


def draws() -> int:
    return _draws


def _counted(function: Any) -> Any:
    @functools.wraps(function)
    def counted(*args: Any) -> Any:
        global _draws
        _draws += by_cudnn(args[0]) and draws_dropout(args)
        return function(*args)

    return counted


def by_cudnn(x: Any) -> bool:
    return bool(x.is_cuda and torch.backends.cudnn.enabled)


def draws_dropout(args: tuple[Any, ...]) -> bool:
    """True if arguments of such a function ask for dropout in training: (x, state, weights, bias,
    number of layers, dropout, training, …), where packed sequences have one more before."""
    after = args[next(at for at, one in enumerate(args) if isinstance(one, list)) + 1 :]
    return bool(after[2] and after[3])
