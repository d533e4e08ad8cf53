"""The fixtures that several files of this package use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ostinato as ost
from ostinato.device import Device
from tests.gpu.foreign import making


@pytest.fixture
def stream(cuda_device: Device) -> ost.Stream:
    return cuda_device.create_stream()


@pytest.fixture
def no_gradients() -> Iterator[None]:
    import torch

    with torch.no_grad():
        yield


@pytest.fixture
def make(cuda_device: Device) -> Iterator[Callable[..., Any]]:
    """`interop.torch.graphed`, whose functions end with the test."""
    from ostinato.interop.torch import graphed

    with making(graphed, cuda_device) as build:
        yield build
