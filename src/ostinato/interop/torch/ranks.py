"""torch.distributed: which ranks a function communicates with, and when their group ends."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from ostinato import Graph
from ostinato.interop.captures import kernels_of
from ostinato.interop.reading.together import Agreement
from ostinato.settings import group_deadline

_users: defaultdict[str, weakref.WeakSet[Any]] = defaultdict(weakref.WeakSet)
"""The functions whose graphs may hold messages of a process group, by its name."""
_contexts: defaultdict[str, weakref.WeakSet[Any]] = defaultdict(weakref.WeakSet)
"""The contexts of graphs that may hold messages of a process group, where they may wait for their
end without their function."""
_SOON = 1.0
"""Seconds in which the launches of a sound group have ended."""
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""Numbers of agreements, by the name of a process group: a group made again may have the store of
the one before."""


class _Texts:
    """Texts in a store of torch.distributed."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, name: str, text: str, /) -> None:
        self._store.set(name, text)

    def get(self, name: str, seconds: float, /) -> str | None:
        try:
            self._store.wait([name], timedelta(seconds=seconds))
        except torch.distributed.DistError:
            return None
        found: bytes = self._store.get(name)
        return found.decode()


def heard(function: Any, name: str) -> Callable[[], Agreement | None]:
    """Begins to note which process groups communicate.  The returned function returns an agreement
    of their ranks, or None if none did: of the one group, or of all ranks if several did.

    `function`: what forgets its graphs, by `forget()`, before the group ends."""
    before = _sequence_numbers()

    def found() -> Agreement | None:
        groups = [group for group, n in _sequence_numbers().items() if before.get(group, 0) != n]
        for each in groups or _world().pg_map:  # messages to single ranks are not counted
            _contexts[each.group_name].add(function.cache.context)
        _watch_ends()
        if not groups:
            return None
        distributed = torch.distributed
        group = groups[0] if len(groups) == 1 else distributed.group.WORLD
        for each in groups:
            _users[each.group_name].add(function)
        number = next(_numbers[group.group_name])
        store = distributed.PrefixStore(f"ostinato/{number}", _world().pg_map[group][1])
        return Agreement(
            _Texts(store),
            distributed.get_rank(group),
            distributed.get_process_group_ranks(group),
            name=name,
            deadline=group_deadline(),
        )

    return found


def messages(graph: Graph) -> list[str]:
    """Returns the names of the kernels of NCCL in a graph, in order."""
    return [node.name for node in kernels_of(graph.nodes()) if "nccl" in node.name]


def _world() -> Any:
    return torch.distributed.distributed_c10d._world


def _sequence_numbers() -> dict[Any, int]:
    """Returns the number of collectives of each process group of this rank so far."""
    found: dict[Any, int] = {}
    for group in _world().pg_map:
        found[group] = 0
        for kind in group._device_types:
            with suppress(RuntimeError):  # of a backend that does not count
                found[group] += group._get_backend(kind)._get_sequence_number_for_group()
    return found


@functools.cache
def _watch_ends() -> None:
    """Lets process groups drop the graphs that hold their messages before they end: NCCL waits for
    ever until the last of these graphs is destroyed."""
    kind: Any = torch.distributed.ProcessGroup
    for name in ("shutdown", "abort"):
        if hasattr(kind, name):
            setattr(kind, name, _dropping(getattr(kind, name)))


def _dropping(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def dropping(group: Any, *args: Any, **kwargs: Any) -> Any:
        contexts = [*_contexts.pop(group.group_name, ())]
        if not contexts:
            return method(group, *args, **kwargs)
        for function in [*_users.pop(group.group_name, ())]:
            function.forget()
            del function
        gc.collect()  # torch's graphs
        over = threading.Event()

        def destroyed(seconds: float) -> bool:
            """Destroys graphs as their last launches end."""
            end = time.monotonic() + seconds
            while sum([context.collect() for context in contexts]):
                if over.wait(0.001) or time.monotonic() > end:
                    return False
            return True

        if not destroyed(_SOON):  # kernels that wait for a lost rank end with their group
            threading.Thread(target=destroyed, args=(math.inf,), daemon=True).start()
        try:
            return method(group, *args, **kwargs)
        finally:
            over.set()

    return dropping
