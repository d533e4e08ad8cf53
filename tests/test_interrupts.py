"""The guard against Ctrl-C (`driver.interrupts`): what it defers, and what it leaves alone."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from signal import SIGINT, default_int_handler, getsignal, raise_signal
from types import FrameType

import pytest

from ostinato.driver.interrupts import uninterrupted
from tests.interrupted import interrupt, lines


@pytest.fixture(autouse=True)
def the_handler_comes_back() -> Iterator[None]:
    before = getsignal(SIGINT)
    assert before is default_int_handler
    yield
    signal.signal(SIGINT, before)


def assert_outside() -> None:
    """No block is open: SIGINT is handled at once, and by Python's own handler."""
    assert getsignal(SIGINT) is default_int_handler
    with pytest.raises(KeyboardInterrupt):
        raise_signal(SIGINT)


def test_the_end_of_the_outermost_block_raises() -> None:
    done = []

    @uninterrupted
    def inner() -> str:
        raise_signal(SIGINT)
        done.append("inner")
        return "value"

    with pytest.raises(KeyboardInterrupt), uninterrupted:
        assert inner() == "value"
        with uninterrupted:
            raise_signal(SIGINT)  # twice is once
        done.append("outer")
    assert done == ["inner", "outer"]
    assert_outside()


def test_without_a_signal_nothing_is_raised_and_the_handler_is_back() -> None:
    with uninterrupted:
        assert getsignal(SIGINT) is not default_int_handler
    assert_outside()


def test_a_signal_before_a_block_is_not_raised_by_it() -> None:
    with pytest.raises(KeyboardInterrupt), uninterrupted:
        raise_signal(SIGINT)
    with uninterrupted:
        pass
    assert_outside()


def test_a_programs_own_handler_is_called_and_put_back() -> None:
    called: list[tuple[int, str | None]] = []

    def own(number: int, frame: FrameType | None) -> None:
        called.append((number, frame and frame.f_code.co_name))

    signal.signal(SIGINT, own)
    with uninterrupted:
        raise_signal(SIGINT)
        assert not called
    assert called == [(SIGINT, "test_a_programs_own_handler_is_called_and_put_back")]
    assert getsignal(SIGINT) is own
    raise_signal(SIGINT)
    assert len(called) == 2


def test_a_handler_that_is_set_inside_a_block_stays() -> None:
    called = []
    with uninterrupted:
        signal.signal(SIGINT, lambda number, frame: called.append(number))
        with uninterrupted:
            raise_signal(SIGINT)
        assert called == [SIGINT]
    assert getsignal(SIGINT) is not default_int_handler
    raise_signal(SIGINT)
    assert called == [SIGINT, SIGINT]


@pytest.mark.parametrize("kept", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_function_is_left_alone(kept: signal.Handlers) -> None:
    signal.signal(SIGINT, kept)
    with uninterrupted:
        assert getsignal(SIGINT) is kept
    assert getsignal(SIGINT) is kept


def test_a_threads_block_changes_nothing() -> None:
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def work() -> None:
        with uninterrupted:
            seen.append(getsignal(SIGINT))
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert inside.wait(20)
        assert seen == [default_int_handler]
        assert_outside()
        with pytest.raises(KeyboardInterrupt), uninterrupted:
            raise_signal(SIGINT)
            leave.set()  # its end is not this block's
            thread.join(20)
    finally:
        leave.set()
        thread.join(20)
    assert_outside()


def test_an_exception_of_the_block_becomes_the_context() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted:
        raise_signal(SIGINT)
        raise ValueError("of the block")
    assert isinstance(caught.value.__context__, ValueError)
    with pytest.raises(ValueError, match="of the block"), uninterrupted:
        raise ValueError("of the block")
    assert_outside()


@pytest.mark.parametrize("nested", [False, True])
def test_each_line_of_the_guard_itself_may_be_interrupted(nested: bool) -> None:
    at_end: list[bool] = []

    def work() -> None:
        with uninterrupted:
            if nested:
                with uninterrupted:
                    pass
            at_end.append(True)

    count = lines(work)
    assert count > 10
    for at in range(1, count + 1):
        at_end.clear()
        assert interrupt(work, at)
        assert_outside()
        # Inside or not at all: a block is not interrupted half way.
        assert at_end in ([], [True])


class _Cycle:
    """Its finaliser has a block of its own."""

    def __init__(self, seen: list[object]) -> None:
        self.itself, self.seen = self, seen

    def __del__(self) -> None:
        with uninterrupted:
            self.seen.append(getsignal(SIGINT))


def test_a_finaliser_with_a_block_may_run_between_any_two_lines_of_the_guard() -> None:
    seen: list[object] = []

    def collect_at(at: int) -> Callable[[FrameType, str, object], object]:
        left = [at]

        def line(frame: FrameType, event: str, argument: object) -> object:
            left[0] -= event == "line"
            if event == "line" and not left[0]:
                _Cycle(seen)
                gc.collect()
            return line

        return lambda frame, event, argument: (
            line if frame.f_globals["__name__"] == "ostinato.driver.interrupts" else None
        )

    def work() -> None:
        with uninterrupted:
            raise_signal(SIGINT)

    at = 0
    while len(seen) == at:
        at += 1
        sys.settrace(collect_at(at))
        try:
            with pytest.raises(KeyboardInterrupt):
                work()
        finally:
            sys.settrace(None)
        assert_outside()
    assert at > 20


def test_ctrl_c_still_cancels_what_asyncio_runs() -> None:
    ended = []

    async def work() -> None:
        with uninterrupted:
            raise_signal(SIGINT)
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(work())
    assert ended == ["cancelled"]
    assert_outside()


def test_an_import_installs_nothing() -> None:
    program = (
        "import signal; before = signal.getsignal(signal.SIGINT); import ostinato; "
        "assert signal.getsignal(signal.SIGINT) is before"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
