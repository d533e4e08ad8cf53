"""Graphed functions of the library in `library`, which needs no GPU and no other library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.interop.graphed import Graphed
from ostinato.interop.reading.library import GraphedOptions
from tests.interop.library import Lib


@pytest.fixture
def lib(host_device: Device) -> Lib:
    return Lib(host_device)


@pytest.fixture
def make(lib: Lib) -> Iterator[Callable[..., Graphed]]:
    """Makes graphed functions, with a cache of their own unless one is given."""
    made: list[Graphed] = []

    def graphed(function: Any, cache: ost.GraphCache | None = None, **options: Any) -> Graphed:
        kept = cache or ost.GraphCache(lib.device)
        name = getattr(function, "__name__", "f")
        made.append(
            Graphed(
                function, lib, GraphedOptions(**options), kept, name=name, owns_cache=cache is None
            )
        )
        return made[-1]

    yield graphed
    for one in made:
        one.close()
