"""What captures refuse, with which status, and that the stream works afterwards.

Statuses were measured on an H100 (driver 580.159, CUDA 13.0) with `cuda.bindings`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ostinato.driver.api import (
    CaptureMode,
    CaptureStatus,
    EventHandle,
    LaunchConfig,
    StreamHandle,
)
from ostinato.errors import DriverError, Status, StreamCaptureError
from ostinato.testing import HeldStream
from tests.contract.kernels import Rig, refused
from tests.threads import in_thread

LOCAL, GLOBAL, RELAXED = CaptureMode.THREAD_LOCAL, CaptureMode.GLOBAL, CaptureMode.RELAXED
UNSUPPORTED = Status.STREAM_CAPTURE_UNSUPPORTED
INVALIDATED = Status.STREAM_CAPTURE_INVALIDATED


class Things:
    """What forbidden calls are made on: all made before the capture."""

    def __init__(self, rig: Rig) -> None:
        driver = rig.driver
        self.driver = driver
        self.memory = driver.mem_alloc(256)
        self.pinned = driver.mem_alloc_pinned(256)
        self.graph = driver.graph_create()
        self.executable = driver.graph_instantiate(self.graph)
        self.other = driver.stream_create()
        self.event = driver.event_create()
        driver.event_record(self.event, self.other)
        driver.synchronize()


# Each would have to wait for, or to change, what a capture relies on.
FORBIDDEN: dict[str, Callable[[Things], object]] = {
    "mem_alloc": lambda t: t.driver.mem_alloc(16),
    "mem_free": lambda t: t.driver.mem_free(t.memory),
    "mem_alloc_pinned": lambda t: t.driver.mem_alloc_pinned(16),
    "mem_free_pinned": lambda t: t.driver.mem_free_pinned(t.pinned),
    "stream_synchronize": lambda t: t.driver.stream_synchronize(t.other),
    "stream_query": lambda t: t.driver.stream_query(t.other),
    "event_query": lambda t: t.driver.event_query(t.event),
    "event_synchronize": lambda t: t.driver.event_synchronize(t.event),
    "graph_instantiate": lambda t: t.driver.graph_instantiate(t.graph),
    "exec_destroy": lambda t: t.driver.exec_destroy(t.executable),
    "synchronize": lambda t: t.driver.synchronize(),
}

ALLOWED: dict[str, Callable[[Things], object]] = {
    "stream_create": lambda t: t.driver.stream_destroy(t.driver.stream_create()),
    "event_create": lambda t: t.driver.event_destroy(t.driver.event_create()),
    "event_record": lambda t: t.driver.event_record(t.event, t.other),
    "graph_create": lambda t: t.driver.graph_destroy(t.driver.graph_create()),
    "memory_info": lambda t: t.driver.memory_info(),
    "memory_range": lambda t: t.driver.memory_range(t.memory),
    "exec_upload": lambda t: t.driver.exec_upload(t.executable, t.other),
    "exec_launch": lambda t: t.driver.exec_launch(t.executable, t.other),
    "memset": lambda t: t.driver.memset(t.memory, 0, 1, 16, t.other),
    "memset_on_legacy": lambda t: t.driver.memset(t.memory, 0, 1, 16, StreamHandle(0)),
}


@pytest.fixture
def things(rig: Rig) -> Things:
    return Things(rig)


def assert_broken_then_sound(rig: Rig, stream: StreamHandle | None = None) -> None:
    """The capture is broken and must still be ended; then a capture on the stream works."""
    stream = rig.stream if stream is None else stream
    driver = rig.driver
    assert driver.stream_capture_info(stream).status == CaptureStatus.INVALIDATED
    with refused(INVALIDATED):
        driver.stream_end_capture(stream)
    assert_sound(rig, stream)


def assert_sound(rig: Rig, stream: StreamHandle | None = None) -> None:
    stream = rig.stream if stream is None else stream
    driver, x = rig.driver, rig.zeros(2)
    assert driver.stream_capture_info(stream).status == CaptureStatus.NONE
    driver.stream_begin_capture(stream, LOCAL)
    rig.launch("fill", x, 8.0, 2, stream=stream)
    graph = rig.end_capture(stream)
    rig.run(graph)
    assert rig.values(x, 2) == [8.0] * 2


def directly(call: Callable[[], object]) -> DriverError | None:
    """What a call raises on this thread, as `in_thread` tells it of another one."""
    try:
        call()
    except StreamCaptureError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("mode", "thread"),
    [(mode, thread) for mode in CaptureMode for thread in ("own", "other")],
)
@pytest.mark.parametrize("call", FORBIDDEN)
def test_forbidden_calls_break_the_captures_that_forbid_them(
    rig: Rig, things: Things, call: str, mode: CaptureMode, thread: str
) -> None:
    """Global captures forbid them to every thread, thread-local ones to their own, and relaxed ones
    to none; all forbid to wait for the device."""
    rig.driver.stream_begin_capture(rig.stream, mode)
    rig.launch("nothing")
    error = (directly if thread == "own" else in_thread)(lambda: FORBIDDEN[call](things))
    harmed = mode == GLOBAL or (mode == LOCAL and thread == "own") or call == "synchronize"
    assert (error and error.status) == (UNSUPPORTED if harmed else None)
    if harmed:
        assert_broken_then_sound(rig)
    else:
        rig.end_capture()


@pytest.mark.parametrize("mode", [LOCAL, GLOBAL])
@pytest.mark.parametrize("call", ALLOWED)
def test_harmless_calls_are_allowed(rig: Rig, things: Things, call: str, mode: CaptureMode) -> None:
    rig.driver.stream_begin_capture(rig.stream, mode)
    rig.launch("nothing")
    ALLOWED[call](things)
    rig.end_capture()


def test_unloading_a_module_breaks_the_capture(rig: Rig) -> None:
    from tests.contract.kernels import load_image

    module = rig.driver.module_load(load_image(rig.driver))
    rig.driver.stream_begin_capture(rig.stream, LOCAL)
    with refused(UNSUPPORTED):
        rig.driver.module_unload(module)
    assert_broken_then_sound(rig)


ON_THE_STREAM: dict[str, Callable[[Things, StreamHandle], object]] = {
    "stream_synchronize": lambda t, s: t.driver.stream_synchronize(s),
    "stream_query": lambda t, s: t.driver.stream_query(s),
    "exec_upload": lambda t, s: t.driver.exec_upload(t.executable, s),
    "memcpy_from_host": lambda t, s: t.driver.memcpy_from_host(
        t.memory, memoryview(b"12345678"), s
    ),
    "memcpy_to_host": lambda t, s: t.driver.memcpy_to_host(memoryview(bytearray(8)), t.memory, s),
}


@pytest.mark.parametrize("mode", [LOCAL, RELAXED])
@pytest.mark.parametrize("call", ON_THE_STREAM)
def test_a_capturing_stream_cannot(rig: Rig, things: Things, call: str, mode: CaptureMode) -> None:
    rig.driver.stream_begin_capture(rig.stream, mode)
    rig.launch("nothing")
    with refused(UNSUPPORTED):
        ON_THE_STREAM[call](things, rig.stream)
    assert_broken_then_sound(rig)


def test_a_broken_capture_refuses_work(rig: Rig, things: Things) -> None:
    driver, x = rig.driver, rig.zeros(2)
    event = rig.new_event()
    driver.stream_begin_capture(rig.stream, LOCAL)
    with refused(UNSUPPORTED):
        driver.mem_alloc(16)
    with refused(INVALIDATED):
        rig.launch("fill", x, 1.0, 2)
    with refused(INVALIDATED):
        driver.memset(x, 0, 4, 2, rig.stream)
    with refused(INVALIDATED):
        driver.event_record(event, rig.stream)
    with refused(INVALIDATED):
        driver.stream_wait_event(rig.stream, event)
    with refused(UNSUPPORTED):
        driver.mem_alloc(16)  # forbidden as long as it is not ended
    with refused(Status.ILLEGAL_STATE):
        driver.stream_begin_capture(rig.stream, LOCAL)
    assert_broken_then_sound(rig)


def test_work_that_is_refused_breaks_the_capture(rig: Rig) -> None:
    params = rig.params("nothing")
    too_large = LaunchConfig(1, 2 * rig.driver.properties.max_threads_per_block)
    rig.driver.stream_begin_capture(rig.stream, LOCAL)
    with refused(Status.INVALID_VALUE):
        rig.driver.launch_kernel(rig.stream, params.function, too_large, params.arguments)
    assert_broken_then_sound(rig)


def test_begin_and_end_in_the_wrong_state(rig: Rig) -> None:
    driver = rig.driver
    with refused(Status.ILLEGAL_STATE):
        driver.stream_end_capture(rig.stream)
    driver.stream_begin_capture(rig.stream, LOCAL)
    with refused(Status.ILLEGAL_STATE):
        driver.stream_begin_capture(rig.stream, LOCAL)
    rig.end_capture()  # that did it no harm
    with pytest.raises(StreamCaptureError):
        driver.stream_begin_capture(StreamHandle(0), LOCAL)


def test_capture_to_a_graph_after_nodes_of_another(rig: Rig) -> None:
    driver = rig.driver
    graph, other = rig.new_graph(), rig.new_graph()
    node = rig.add(other, (), "nothing")
    with refused(Status.INVALID_VALUE):
        driver.stream_begin_capture_to_graph(rig.stream, graph, [node], LOCAL)
    assert_sound(rig)


# --- events


def test_two_captures_cannot_merge(rig: Rig) -> None:
    driver = rig.driver
    other, event = rig.new_stream(), rig.new_event()
    driver.stream_begin_capture(rig.stream, LOCAL)
    driver.stream_begin_capture(other, LOCAL)
    rig.launch("nothing")
    rig.launch("nothing", stream=other)
    driver.event_record(event, other)
    with refused(Status.STREAM_CAPTURE_MERGE):
        driver.stream_wait_event(rig.stream, event)
    with refused(INVALIDATED):
        driver.stream_end_capture(rig.stream)
    assert driver.stream_capture_info(other).status == CaptureStatus.INVALIDATED
    with refused(INVALIDATED):
        driver.stream_end_capture(other)
    assert_sound(rig)
    assert_sound(rig, other)


def test_the_outside_cannot_be_waited_for(rig: Rig) -> None:
    driver = rig.driver
    other, event = rig.new_stream(), rig.new_event()
    driver.event_record(event, other)
    driver.stream_begin_capture(rig.stream, LOCAL)
    with refused(Status.STREAM_CAPTURE_ISOLATION):
        driver.stream_wait_event(rig.stream, event)
    assert_broken_then_sound(rig)


def _fork(rig: Rig, other: StreamHandle, event: EventHandle) -> None:
    rig.driver.stream_begin_capture(rig.stream, LOCAL)
    rig.launch("nothing")
    rig.driver.event_record(event, rig.stream)
    rig.driver.stream_wait_event(other, event)
    rig.launch("nothing", stream=other)


def test_a_fork_must_be_joined(rig: Rig) -> None:
    driver = rig.driver
    other, event = rig.new_stream(), rig.new_event()
    _fork(rig, other, event)
    with refused(Status.STREAM_CAPTURE_UNJOINED):
        driver.stream_end_capture(rig.stream)
    assert_sound(rig)
    assert_sound(rig, other)


def test_work_after_the_join_is_unjoined_again(rig: Rig) -> None:
    driver = rig.driver
    other, event = rig.new_stream(), rig.new_event()
    _fork(rig, other, event)
    driver.event_record(event, other)
    driver.stream_wait_event(rig.stream, event)
    rig.launch("nothing", stream=other)
    with refused(Status.STREAM_CAPTURE_UNJOINED):
        driver.stream_end_capture(rig.stream)
    assert_sound(rig)


def test_a_capture_ends_where_it_began(rig: Rig) -> None:
    driver = rig.driver
    other, event = rig.new_stream(), rig.new_event()
    _fork(rig, other, event)
    with refused(Status.STREAM_CAPTURE_UNMATCHED):
        driver.stream_end_capture(other)
    assert_broken_then_sound(rig)
    assert_sound(rig, other)


@pytest.mark.parametrize("mode", [LOCAL, GLOBAL])
def test_the_wrong_thread_cannot_end_it(rig: Rig, mode: CaptureMode) -> None:
    rig.driver.stream_begin_capture(rig.stream, mode)
    rig.launch("nothing")
    error = in_thread(lambda: rig.driver.stream_end_capture(rig.stream))
    assert error is not None
    assert error.status == Status.STREAM_CAPTURE_WRONG_THREAD
    assert_sound(rig)  # but it is over


def test_captured_events_have_no_state(rig: Rig) -> None:
    driver = rig.driver
    event, timed = rig.new_event(), rig.new_event(timing=True)
    for ask in (driver.event_query, driver.event_synchronize):
        driver.stream_begin_capture(rig.stream, LOCAL)
        rig.launch("nothing")
        driver.event_record(event, rig.stream)
        with refused(Status.CAPTURED_EVENT):
            ask(event)
        assert_broken_then_sound(rig)
    driver.event_record(timed, rig.stream)
    driver.stream_begin_capture(rig.stream, LOCAL)
    capturing = rig.new_event(timing=True)
    driver.event_record(capturing, rig.stream)
    with refused(Status.CAPTURED_EVENT):
        driver.event_elapsed(timed, capturing)
    rig.end_capture()


def test_events_of_captures_that_ended_are_of_no_use(rig: Rig) -> None:
    driver, event = rig.driver, rig.new_event()
    other = rig.new_stream()
    driver.stream_begin_capture(rig.stream, LOCAL)
    rig.launch("nothing")
    driver.event_record(event, rig.stream)
    rig.end_capture()
    with pytest.raises(DriverError):
        driver.event_query(event)
    with pytest.raises(DriverError):
        driver.event_synchronize(event)
    with pytest.raises(DriverError):
        driver.stream_wait_event(other, event)
    driver.event_record(event, other)  # until recorded again
    driver.event_synchronize(event)
    assert driver.event_query(event)


def test_the_legacy_stream_cannot_join(rig: Rig) -> None:
    driver, event = rig.driver, rig.new_event()
    driver.stream_begin_capture(rig.stream, LOCAL)
    rig.launch("nothing")
    driver.event_record(event, rig.stream)
    with refused(Status.STREAM_CAPTURE_IMPLICIT):
        driver.stream_wait_event(StreamHandle(0), event)
    assert_broken_then_sound(rig)


def test_destroying_streams_that_capture(rig: Rig) -> None:
    driver = rig.driver
    origin, forked, event = driver.stream_create(), driver.stream_create(), rig.new_event()
    driver.stream_begin_capture(origin, LOCAL)
    driver.event_record(event, origin)
    driver.stream_wait_event(forked, event)
    rig.launch("nothing", stream=forked)
    driver.stream_destroy(origin)  # the capture goes with it
    assert_sound(rig, forked)
    driver.mem_free(driver.mem_alloc(16))
    _fork(rig, forked, event)
    driver.stream_destroy(forked)
    with refused(Status.STREAM_CAPTURE_UNJOINED, INVALIDATED):  # CUDA says one or the other
        driver.stream_end_capture(rig.stream)
    assert_sound(rig)


# --- the legacy stream beside captures

LEGACY = StreamHandle(0)
ON_LEGACY: dict[str, Callable[[Rig, int, EventHandle], object]] = {
    "fill": lambda rig, x, event: rig.driver.memset(x, 0, 1, 16, LEGACY),
    "copy": lambda rig, x, event: rig.driver.memcpy(x + 16, x, 16, LEGACY),
    "kernel": lambda rig, x, event: rig.launch("fill", x, 0.0, 4, stream=LEGACY),
    "host": lambda rig, x, event: rig.driver.launch_host_function(LEGACY, lambda: None),
    "record": lambda rig, x, event: rig.driver.event_record(event, LEGACY),
    "wait": lambda rig, x, event: rig.driver.stream_wait_event(LEGACY, event),
}


@pytest.mark.parametrize("mode", list(CaptureMode))
@pytest.mark.parametrize("thread", ["own", "other"])
@pytest.mark.parametrize("what", ON_LEGACY)
def test_the_legacy_stream_breaks_a_blocking_streams_capture(
    rig: Rig, what: str, thread: str, mode: CaptureMode
) -> None:
    """Of any mode, whichever thread uses it; the stream works again afterwards."""
    driver, x, event = rig.driver, rig.zeros(8), rig.new_event()
    driver.event_record(event, rig.stream)
    driver.stream_synchronize(rig.stream)
    stream = rig.new_stream(blocking=True)
    driver.stream_begin_capture(stream, mode)
    rig.launch("fill", x, 1.0, 4, stream=stream)
    with refused(Status.STREAM_CAPTURE_IMPLICIT):
        if thread == "own":
            ON_LEGACY[what](rig, x, event)
        else:
            with ThreadPoolExecutor(1) as others:
                others.submit(ON_LEGACY[what], rig, x, event).result()
    with refused(Status.STREAM_CAPTURE_INVALIDATED):
        driver.stream_end_capture(stream)
    ON_LEGACY[what](rig, x, event)
    driver.stream_synchronize(LEGACY)
    driver.stream_begin_capture(stream, mode)
    rig.launch("fill", x, 2.0, 4, stream=stream)
    graph = rig.end_capture(stream)
    rig.run(graph)
    assert rig.values(x, 4) == [2.0] * 4


@pytest.mark.parametrize("thread", ["own", "other"])
@pytest.mark.parametrize("what", ON_LEGACY)
def test_the_legacy_stream_passes_by_another_streams_capture(
    rig: Rig, what: str, thread: str
) -> None:
    """The work runs at once, and the graph lacks it."""
    driver, x, event = rig.driver, rig.array([1.0] * 8), rig.new_event()
    driver.event_record(event, rig.stream)
    driver.stream_synchronize(rig.stream)
    driver.stream_begin_capture(rig.stream, CaptureMode.THREAD_LOCAL)
    rig.launch("scale", x, 3.0, 4)
    if thread == "own":
        ON_LEGACY[what](rig, x, event)
    else:
        with ThreadPoolExecutor(1) as others:
            others.submit(ON_LEGACY[what], rig, x, event).result()
    graph = rig.end_capture()
    assert len(driver.graph_nodes(graph)) == 1
    driver.stream_synchronize(LEGACY)
    expected = 0.0 if what in ("fill", "kernel") else 1.0
    assert rig.values(x, 4) == [expected] * 4
    rig.run(graph)
    assert rig.values(x, 4) == [3 * expected] * 4


def test_blocking_streams_and_the_legacy_stream_wait_for_each_other(rig: Rig) -> None:
    driver, x = rig.driver, rig.array([1.0] * 4)
    stream = rig.new_stream(blocking=True)
    with HeldStream(driver, LEGACY) as held:
        rig.launch("fill", x, 2.0, 4, stream=LEGACY)
        rig.launch("scale", x, 3.0, 4, stream=stream)
        rig.launch("add", x, x, x, 4, stream=LEGACY)
        assert not driver.stream_query(stream)
        held.release()
    driver.stream_synchronize(LEGACY)
    assert rig.values(x, 4) == [12.0] * 4
