"""Graphed functions of the library in `library`, which needs no GPU and no other library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.interop.graphed import Graphed
from tests.interop.library import Lib, graphed


@pytest.fixture
def lib(host_device: Device) -> Lib:
    return Lib(host_device)


@pytest.fixture
def make(lib: Lib) -> Iterator[Callable[..., Graphed]]:
    """Makes graphed functions, with a cache of their own unless one is given."""
    made: list[Graphed] = []

    def kept(function: Any, cache: ost.GraphCache | None = None, **options: Any) -> Graphed:
        made.append(graphed(function, lib, cache, **options))
        return made[-1]

    yield kept
    for one in made:
        one.close()
