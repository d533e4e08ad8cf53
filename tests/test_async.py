"""Waiting in asyncio: the loop goes on, several wait, some are cancelled, and errors come out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver import waiting
from ostinato.errors import CaptureBrokenError, ClosedError, DriverError, Status
from ostinato.testing import HeldStream
from tests.sources import config, kernel

Wait = Callable[[ost.Stream, Device], Awaitable[None]]


async def of_event(stream: ost.Stream, device: Device) -> None:
    await stream.record(device.create_event(blocking=True)).wait_async()


async def of_stream(stream: ost.Stream, device: Device) -> None:
    await stream.wait_async()


both = pytest.mark.parametrize("wait", [of_stream, of_event])


@both
def test_the_loop_goes_on_until_the_work_is_done(
    device: Device, stream: ost.Stream, wait: Wait
) -> None:
    x = device.zeros(4, "f4")

    async def main() -> None:
        with HeldStream(stream) as held:
            ost.fill(stream, x, 3)
            tasks = [asyncio.ensure_future(wait(stream, device)) for _ in range(3)]
            for _ in range(50):
                await asyncio.sleep(0)
            assert not any(task.done() for task in tasks)
            tasks[1].cancel()
            held.release()
            done = await asyncio.gather(*tasks, return_exceptions=True)
        assert done[::2] == [None, None] and isinstance(done[1], asyncio.CancelledError)
        assert stream.done()

    asyncio.run(main())
    assert x.to_numpy(stream).tolist() == [3] * 4


def test_what_is_done_needs_no_thread(stream: ost.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    stream.synchronize()
    event = stream.record()
    event.synchronize()
    monkeypatch.setattr(waiting.threading, "Thread", None)  # type: ignore[attr-defined]

    async def main() -> None:
        await stream.wait_async()
        await event.wait_async()

    asyncio.run(main())


@both
def test_a_loop_that_is_closed_early_is_no_error(
    device: Device, stream: ost.Stream, wait: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    before = {*threading.enumerate()}
    loop = asyncio.new_event_loop()
    with HeldStream(stream) as held:
        task = loop.create_task(wait(stream, device))
        loop.run_until_complete(asyncio.sleep(0))
        started = {t for t in threading.enumerate() if t not in before and "wait_async" in t.name}
        assert started
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()
        held.release()
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()
    assert failed == []


def test_an_event_that_is_closed_meanwhile_is_still_waited_for(
    device: Device, stream: ost.Stream
) -> None:
    async def main() -> None:
        with HeldStream(stream) as held:
            event = stream.record()
            task = asyncio.ensure_future(event.wait_async())
            await asyncio.sleep(0)
            event.close()
            held.release()
            await task
        with pytest.raises(ClosedError):
            await event.wait_async()

    asyncio.run(main())


@both
def test_a_fault_of_the_work_is_raised_where_it_is_awaited(host_device: Device, wait: Wait) -> None:
    @ost.host_kernel("x: *f32")
    def beyond(launch: object, x: Any) -> None:
        x[len(x)] = 1

    stream, x = host_device.create_stream(), host_device.zeros(4, "f4")
    loaded = host_device.kernel(beyond)

    async def main(*, held: bool) -> None:
        if not held:
            await wait(stream, host_device)
            return
        with HeldStream(stream) as gate:
            ost.launch(stream, loaded, ost.LaunchConfig(1, 1), x)
            task = asyncio.ensure_future(wait(stream, host_device))
            await asyncio.sleep(0)
            gate.release()
            await task

    for held in (True, False):  # while it is awaited, and long before
        with pytest.raises(DriverError) as caught:
            asyncio.run(main(held=held))
        assert caught.value.status == Status.ILLEGAL_ADDRESS


def test_a_capture_cannot_be_awaited(device: Device, stream: ost.Stream) -> None:
    x = device.zeros(4, "f4")
    add = kernel(device, "add")

    async def main() -> None:
        await stream.wait_async()

    with (
        pytest.raises(CaptureBrokenError, match=r"await stream.wait_async\(\)"),
        ost.capture(stream),
    ):
        ost.launch(stream, add, config(4), x, x, x, 4)
        asyncio.run(main())
    asyncio.run(main())
