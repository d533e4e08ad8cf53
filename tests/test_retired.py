"""What is closed or dropped is destroyed once, no later than the device was waited for.

On the host, with a driver that answers as a card does where that matters.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator

import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import EventHandle, ExecHandle, GraphHandle, InstantiateFlags, StreamHandle
from ostinato.driver.host.driver import HostDriver
from ostinato.testing import FaultyDriver


class Card(HostDriver):
    """Events are not done right after they were recorded, also where the stream has no work: on a
    card that takes microseconds.  `executables` are those that live; `asked` is called, once, when
    an event is."""

    def __init__(self) -> None:
        super().__init__()
        self.executables: set[ExecHandle] = set()
        self.asked: Callable[[], object] | None = None
        self._fresh: set[EventHandle] = set()

    def event_record(self, event: EventHandle, stream: StreamHandle) -> None:
        super().event_record(event, stream)
        self._fresh.add(event)

    def event_query(self, event: EventHandle) -> bool:
        asked, self.asked = self.asked, None
        if asked is not None:
            asked()
        return super().event_query(event) and event not in self._fresh

    def synchronize(self) -> None:
        super().synchronize()
        self._fresh.clear()

    def graph_instantiate(
        self, graph: GraphHandle, flags: InstantiateFlags = InstantiateFlags.NONE
    ) -> ExecHandle:
        made = super().graph_instantiate(graph, flags)
        self.executables.add(made)
        return made

    def exec_destroy(self, executable: ExecHandle) -> None:
        super().exec_destroy(executable)
        self.executables.remove(executable)


class Owner:
    """Whatever owns a graph elsewhere."""

    def __init__(self, graph: ost.Graph) -> None:
        self.graph = graph


@pytest.fixture
def card() -> Card:
    return Card()


@pytest.fixture
def faults(card: Card) -> FaultyDriver:
    return FaultyDriver(card)


@pytest.fixture
def device(faults: FaultyDriver) -> Iterator[Device]:
    with Device(faults) as opened:
        yield opened


def adopted(device: Device, stream: ost.Stream) -> tuple[ost.GraphExec, weakref.ref[Owner]]:
    """An executable that ran, of a graph that somebody else owns."""
    x = device.zeros(4, "bytes")
    owner = Owner(ost.capture_function(stream, lambda: ost.fill(stream, x, 1)))
    graph = ost.Graph.adopt(device, owner.graph.handle, owner=owner)
    run = graph.instantiate(upload=stream)
    run.launch(stream)
    return run, weakref.ref(owner)


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_waiting_for_the_device_lets_go(
    device: Device, card: Card, stream: ost.Stream, how: str
) -> None:
    run, owner = adopted(device, stream)
    if how == "closed":
        run.close()
    del run
    assert owner() is not None, "its marks cannot be reached yet"
    device.synchronize()
    assert owner() is None
    assert not card.executables


@pytest.mark.parametrize("call", ["event_record", "event_query", "exec_destroy"])
def test_a_log_that_is_kept_keeps_no_owner(
    device: Device,
    faults: FaultyDriver,
    stream: ost.Stream,
    call: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, owner = adopted(device, stream)
    device.synchronize()
    faults.fail(call)
    with caplog.at_level(logging.WARNING):
        run.close()
        del run
        device.synchronize()
        gc.collect()
    assert "failed" in caplog.text, "what went wrong is said"
    assert owner() is None


def test_a_finaliser_that_closes_something_while_others_are_looked_at(
    device: Device, card: Card, stream: ost.Stream, caplog: pytest.LogCaptureFixture
) -> None:
    """Garbage collection runs between any two lines, and anybody's finaliser may close things."""
    runs = [adopted(device, stream)[0] for _ in range(3)]
    other = device.zeros(4, "bytes")
    device.synchronize()
    with caplog.at_level(logging.WARNING):
        for run in runs:
            card.asked = other.close
            run.close()
        device.synchronize()
    assert not card.executables
    assert device.context.retired == 0
    assert caplog.records == [], "something was destroyed twice"


def test_what_another_capture_forbids_to_destroy_is_destroyed_later(
    device: Device, faults: FaultyDriver
) -> None:
    before = device.memory_info()[0]
    x = device.zeros(1000, "bytes")
    fault = faults.fail("mem_free", status=900, times=2)
    x.close()
    device.synchronize()
    assert fault.fired and device.context.retired == 1
    device.synchronize()
    device.synchronize()
    assert device.memory_info()[0] == before
    assert device.context.retired == 0
