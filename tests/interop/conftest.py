"""Graphed functions: of the library in `library`, which needs no GPU and no other library, and of
torch, on the CPU with captures that are tapes or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.interop.graphed import Graphed
from ostinato.interop.reading import records
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


@pytest.fixture
def where(device: Device) -> str:
    """torch's name of the device."""
    return "cpu" if device.driver.name == "host" else "cuda"


@pytest.fixture
def make_chained(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Graphed]]:
    """Makes graphed functions of torch, whose chains are kept, however long they take."""
    made: list[Graphed] = []
    monkeypatch.setattr(records, "_GAIN", float("inf"))

    def kept(function: Any, **options: Any) -> Any:
        if device.driver.name == "host":
            from tests.interop.tape import on_tape

            made.append(on_tape(device, function, chains=True, **options))
        else:
            from ostinato.interop import torch as interop

            made.append(interop.graphed(function, device=device, **options))
        return made[-1]

    yield kept
    for one in made:
        one.close()
