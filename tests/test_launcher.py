"""The hot path of a replay, compiled and in Python, on C functions of our own: no GPU needed."""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver import launcher as driver_launcher
from ostinato.driver.launcher import prepare

Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

HANDLE = 0x7F12_3456_789A_BCD0
"""As wide as real handles are: cut to 32 bits it would be another."""


class Seen:
    """A C function that notes its arguments and gives the statuses that it is told to."""

    def __init__(self, *statuses: int) -> None:
        self.calls: list[tuple[int | None, int | None]] = []
        self._statuses = list(statuses)
        self.function = Function(self._called)

    def _called(self, executable: int | None, stream: int | None) -> int:
        self.calls.append((executable, stream))
        return self._statuses.pop(0) if self._statuses else 0


@pytest.fixture
def thing(launcher: str) -> Thing:
    return Thing()


class Thing(driver_launcher.Launcher):
    """Something to launch, that notes which way each launch went."""

    def __init__(self) -> None:
        self.slow: list[object] = []
        self.checked: list[object] = []
        self.error: Exception | None = None

    def _launch_slowly(self, stream: object) -> None:
        self.slow.append(stream)

    def _launch_checked(self, stream: object) -> None:
        self.checked.append(stream)
        if self.error is not None:
            raise self.error


class Named:
    """Stands for a stream: compared by identity alone, so equality must never be asked."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("streams are compared by identity")

    __hash__ = object.__hash__


def test_a_prepared_call_passes_both_handles_and_gives_the_status(launcher: str) -> None:
    seen = Seen(0, 700, -1)
    call = prepare(seen.function, HANDLE, HANDLE + 8)
    assert [call() for _ in range(3)] == [0, 700, -1]
    assert seen.calls == [(HANDLE, HANDLE + 8)] * 3


def test_a_prepared_call_keeps_to_its_own_handles(launcher: str) -> None:
    seen = Seen()
    first, second = (prepare(seen.function, handle, 2) for handle in (HANDLE, HANDLE + 1))
    second(), first()
    assert seen.calls == [(HANDLE + 1, 2), (HANDLE, 2)]


def test_a_call_on_the_legacy_stream_is_made_in_its_own_context_only(launcher: str) -> None:
    """The legacy stream is that of the context that is current."""
    seen, current, statuses = Seen(), [HANDLE], [0]

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
    def get_current(found: ctypes._Pointer[ctypes.c_void_p]) -> int:
        found[0] = ctypes.c_void_p(current[0])
        return statuses[0]

    call = prepare(seen.function, 5, 0, (get_current, HANDLE))
    assert (call(), seen.calls) == (0, [(5, None)])
    current[0] += 1
    assert call() == 201
    current[0], statuses[0] = HANDLE, 4
    assert (call(), len(seen.calls)) == (201, 1)
    statuses[0] = 0
    assert (call(), len(seen.calls)) == (0, 2)


def test_only_the_hot_stream_takes_the_short_way(thing: Thing) -> None:
    seen, hot, other = Seen(), Named(), Named()
    thing.launch(hot)
    assert (thing.slow, seen.calls) == ([hot], [])
    thing._heat(hot, prepare(seen.function, HANDLE, 1))
    thing.launch(hot)
    assert (len(thing.slow), seen.calls) == (1, [(HANDLE, 1)])
    thing.launch(other)
    assert thing.slow[1] is other
    thing.cool()
    thing.launch(hot)
    assert thing.slow[2] is hot
    assert len(seen.calls) == 1
    assert thing.checked == []


def test_what_is_no_stream_is_not_taken_for_the_hot_one(thing: Thing) -> None:
    thing.launch(None)
    thing._heat(Named(), int)
    thing.cool()
    thing.launch(None)
    assert thing.slow == [None, None]


def test_a_new_hot_stream_replaces_the_old(thing: Thing) -> None:
    seen, first, second = Seen(), Named(), Named()
    thing._heat(first, prepare(seen.function, HANDLE, 1))
    thing._heat(second, prepare(seen.function, HANDLE, 2))
    thing.launch(second)
    thing.launch(first)
    assert seen.calls == [(HANDLE, 2)]
    assert thing.slow[0] is first


def test_a_status_goes_to_the_checked_launch_and_its_error_comes_out(thing: Thing) -> None:
    seen, hot = Seen(719, 0, 900), Named()
    thing._heat(hot, prepare(seen.function, HANDLE, 1))
    thing.launch(hot)  # as if only the thread had lacked the context: the checked one succeeds
    assert thing.checked[0] is hot
    thing.launch(hot)
    assert len(thing.checked) == 1
    thing.error = RuntimeError("900 in words")
    with pytest.raises(RuntimeError, match="900 in words"):
        thing.launch(hot)


def test_any_callable_can_be_hot(thing: Thing) -> None:
    """The host driver's call and a wrapped one are Python, and may raise by themselves."""
    statuses: list[int | Exception] = [0, 1, ValueError("by itself")]
    hot = Named()

    def call() -> int:
        status = statuses.pop(0)
        if isinstance(status, Exception):
            raise status
        return status

    thing._heat(hot, call)
    thing.launch(hot)
    assert thing.checked == []
    thing.launch(hot)
    assert len(thing.checked) == 1
    with pytest.raises(ValueError, match="by itself"):
        thing.launch(hot)


def test_a_call_may_cool_what_it_is_called_from(thing: Thing) -> None:
    """As another thread may while the driver is called: the call under way must stay whole."""
    hot, gone = Named(), threading.Event()

    class Call:
        def __call__(self) -> int:
            thing.cool()
            gc.collect()
            return 0

        def __del__(self) -> None:
            gone.set()

    thing._heat(hot, Call())
    thing.launch(hot)
    gc.collect()
    assert gone.is_set()
    thing.launch(hot)
    assert thing.slow == [hot]


def test_another_thread_runs_while_the_driver_is_called(thing: Thing) -> None:
    """The C function blocks inside C until another thread of Python has come by.

    With the GIL held that thread could not, and the function would give up with a status.
    """
    library = ctypes.CDLL(None)  # the C library's semaphores know nothing of Python
    gate, until = ctypes.create_string_buffer(64), (ctypes.c_long * 2)()
    assert library.sem_init(gate, 0, 0) == 0
    library.clock_gettime(0, until)
    until[0] += 100  # seconds
    hot, ready = Named(), threading.Event()
    addresses = ctypes.addressof(gate), ctypes.addressof(until)
    thing._heat(hot, prepare(library["sem_timedwait"], *addresses))

    def open_gate() -> None:
        ready.wait()
        time.sleep(0.05)  # the other one is in C by then
        library.sem_post(gate)

    thread = threading.Thread(target=open_gate)
    thread.start()
    ready.set()
    thing.launch(hot)
    thread.join()
    assert thing.checked == [], "it gave up: the GIL was held"


def test_what_is_hot_is_kept_and_what_is_cold_is_let_go(thing: Thing) -> None:
    stream = Named()
    ref = weakref.ref(stream)
    thing._heat(stream, lambda: 0)
    del stream
    assert ref() is not None
    thing.cool()
    assert ref() is None


def test_a_cycle_through_the_hot_pair_is_collected(launcher: str) -> None:
    thing = Thing()
    ref = weakref.ref(thing)
    thing._heat(thing, thing.cool)
    del thing
    gc.collect()
    assert ref() is None


def test_threads_that_heat_and_launch_never_mix_streams_and_calls(thing: Thing) -> None:
    streams = [Named(), Named()]
    wrong: list[object] = []
    local = threading.local()

    def call_of(stream: object) -> Callable[[], int]:
        def call() -> int:
            if local.stream is not stream:
                wrong.append(stream)
            return 0

        return call

    calls = [call_of(stream) for stream in streams]

    def work(mine: int) -> None:
        local.stream = streams[mine]
        for _ in range(3000):
            thing._heat(streams[mine], calls[mine])
            thing.launch(streams[mine])

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert wrong == []


def test_launches_leave_no_references(thing: Thing) -> None:
    seen, hot = Seen(), Named()
    call = prepare(seen.function, HANDLE, 1)

    def launches(count: int) -> None:
        for _ in range(count):
            thing._heat(hot, call)
            thing.launch(hot)
            thing._heat(hot, int)  # a callable that is no prepared call
            thing.launch(hot)
            thing.cool()

    def references() -> list[int]:
        return [sys.getrefcount(one) for one in (thing, hot, call, int)]

    launches(10)
    before = references()
    launches(1000)
    assert references() == before


@pytest.mark.parametrize("launcher", ["compiled"], indirect=True)
@pytest.mark.parametrize(
    "arguments",
    [
        (0, 1, 2),
        (1, "2", 3),
        (1, 2, -1 << 80),
        (1, 2),
        (1, 2, 3, 4),
        (1, 2, 3, (4,)),
        (1, 2, 3, (0, 4)),
    ],
)
def test_nonsense_is_refused_and_not_called(launcher: str, arguments: tuple[object, ...]) -> None:
    extension = importlib.import_module("ostinato.driver._launch")
    with pytest.raises((TypeError, ValueError, OverflowError)):
        extension.Prepared(*arguments)
    with pytest.raises(TypeError):
        extension.Prepared(1, 2, 3)(1)
    with pytest.raises(TypeError):
        Thing()._heat(1)


def test_an_executable_is_launched_by_position(launcher: str, host_device: Device) -> None:
    stream = host_device.create_stream()
    x = host_device.zeros(4, "bytes")
    run = ost.capture_function(stream, lambda: ost.fill(stream, x, 1)).instantiate()
    with pytest.raises(TypeError):
        run.launch()
    with pytest.raises(TypeError):
        run.launch(stream, stream)
    run.launch(stream)
    stream.synchronize()
    assert (x.to_numpy(stream) == 1).all()


@pytest.mark.parametrize("launcher", ["compiled"], indirect=True)
def test_both_say_the_same_of_themselves(launcher: str) -> None:
    ours, python = driver_launcher.Launcher, driver_launcher.PythonLauncher
    assert ours is not python
    assert inspect.getdoc(ours.launch) == inspect.getdoc(python.launch)
    assert list(inspect.signature(ours.launch).parameters) == ["self", "stream"]


def test_without_the_extension_everything_still_imports() -> None:
    code = (
        "import sys; sys.modules['ostinato.driver._launch'] = None\n"
        "import ostinato as ost\n"
        "from ostinato.driver import launcher\n"
        "assert not launcher.compiled() and 'ctypes' in launcher.description()\n"
        "device = ost.open_device('host'); stream = device.create_stream()\n"
        "x = device.zeros(4, 'bytes')\n"
        "run = ost.capture_function(stream, lambda: ost.fill(stream, x, 3)).instantiate()\n"
        "run.launch(stream); run.launch(stream)\n"
        "assert (x.to_numpy(stream).view('u1') == 3).all()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- a call that is repeated, which only the extension does
repeats = pytest.mark.parametrize("launcher", ["compiled"], indirect=True)


class Cache:
    """What a repeated call is guarded by."""

    def __init__(self) -> None:
        self.epoch = 1000
        self.latest: object = None
        self.let_go: list[object] = []

    def touch(self, seat: object) -> None:
        self.latest = seat


class Repeated:
    """A repeat of `rows=3`, and what it needs."""

    def __init__(self, thing: Thing, *statuses: int) -> None:
        self.seen, self.stream, self.cache = Seen(*statuses), Named(), Cache()
        self.seat = driver_launcher.Seat()
        self.lock, self.thing = threading.RLock(), thing
        guarded = ((self.cache, "epoch"),)
        self.repeat = driver_launcher.repeat(
            self.lock, "replayed", guarded, self.cache, self.cache.touch, self.cache.let_go.append
        )
        thing._heat(self.stream, prepare(self.seen.function, HANDLE, 1))
        self.arm()

    def arm(self, left: int = 10, **sizes: int) -> None:
        wanted = (self.cache.epoch,)
        given = sizes or {"rows": 3}
        self.repeat.arm(given, wanted, self.seat, self.thing, self.stream, left)

    def calls(self, **sizes: object) -> bool:
        """Whether a call with these sizes was repeated."""
        before = len(self.seen.calls)
        answer = self.repeat.again(sizes)
        assert (answer == "replayed") == (len(self.seen.calls) == before + 1)
        assert answer in ("replayed", None) and self.seat.leases == 0
        return answer is not None


@repeats
def test_a_call_like_the_one_before_is_repeated(thing: Thing) -> None:
    case = Repeated(thing)
    assert case.calls(rows=3) and case.calls(rows=3)
    assert (case.repeat.taken(), case.repeat.taken(), case.seat.uses) == (2, 0, 2)
    assert case.cache.latest is case.seat


@repeats
@pytest.mark.parametrize(
    "sizes", [{"rows": 4}, {"rows": True}, {"rows": 3.0}, {"cols": 3}, {"rows": 3, "cols": 1}, {}]
)
def test_a_call_of_other_sizes_is_not_repeated(thing: Thing, sizes: dict[str, object]) -> None:
    case = Repeated(thing)
    assert not case.calls(**sizes) and case.calls(rows=3)


@repeats
def test_equal_sizes_that_are_other_objects_are_the_same(thing: Thing) -> None:
    case = Repeated(thing)
    case.arm(rows=10**6)
    assert case.calls(rows=int("1000000"))
    case.arm(rows=1)
    assert not case.calls(rows=True) and case.calls(rows=1)


CHANGES: dict[str, Callable[[Repeated], object]] = {
    "epoch": lambda case: setattr(case.cache, "epoch", case.cache.epoch + 1),
    "evicted": lambda case: case.seat.leave(),
    "cooled": lambda case: case.repeat.cool(),
    "tap": lambda case: case.thing.cool(),
    "other stream": lambda case: case.thing._heat(Named(), int),
    "none left": lambda case: case.arm(left=0),
}


@repeats
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_repeated_after_a_change(thing: Thing, change: str) -> None:
    case = Repeated(thing)
    assert case.calls(rows=3)
    CHANGES[change](case)
    assert not case.calls(rows=3) and not thing.slow


@repeats
def test_so_many_calls_are_repeated_and_no_more(thing: Thing) -> None:
    case = Repeated(thing)
    case.arm(left=2)
    assert [case.calls(rows=3) for _ in range(4)] == [True, True, False, False]


@repeats
def test_a_repeated_launch_that_fails_raises_and_is_not_counted(thing: Thing) -> None:
    case = Repeated(thing, 719)
    thing.error = RuntimeError("719 in words")
    with pytest.raises(RuntimeError, match="719 in words"):
        case.repeat.again({"rows": 3})
    assert (case.repeat.taken(), case.seat.leases) == (0, 0)
    with ThreadPoolExecutor(1) as other:  # the lock is free
        assert other.submit(case.lock.acquire, timeout=20).result()


@repeats
def test_an_eviction_under_a_repeated_launch_waits_for_it(thing: Thing) -> None:
    case = Repeated(thing)
    left: list[bool] = []

    def launch() -> int:
        left.append(case.seat.leave())
        case.repeat.cool()
        return 0

    thing._heat(case.stream, launch)
    assert case.repeat.again({"rows": 3}) == "replayed"
    assert left == [False], "a lease was out"
    assert case.cache.let_go == [case.seat]
    assert not case.seat.lease()


@repeats
def test_a_repeat_waits_for_its_lock_and_looks_again(thing: Thing) -> None:
    case, done = Repeated(thing), threading.Event()

    def call() -> object:
        done.set()
        return case.repeat.again({"rows": 3})

    with ThreadPoolExecutor(1) as other:
        with case.lock:
            waiting = other.submit(call)
            done.wait(20)
            case.cache.epoch += 1
        assert waiting.result() is None


@repeats
def test_what_was_armed_is_kept_until_it_is_cooled(thing: Thing) -> None:
    case = Repeated(thing)
    stream = weakref.ref(case.stream)
    thing.cool()
    case.stream = Named()
    assert stream() is not None
    case.repeat.cool()
    gc.collect()
    assert stream() is None
