"""A process of its own for strangers' programs: limits, deadlines, and that nothing is left."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import (
    InputError,
    ModelError,
    ModelFormatError,
    NotAvailableError,
    UnsupportedModelError,
)
from ostinato.models.text.child import Child
from tests.processes import python

pytest.importorskip("resource")
MEMORY = 256 << 20
ROOT = Path(__file__).resolve().parents[2]


def make(seconds: float = 30.0, **options: Any) -> Child:
    options = {"memory": MEMORY, **options}
    return Child("tests.models.child_answers", seconds=seconds, **options)


@pytest.fixture
def child() -> Iterator[Child]:
    made = make()
    yield made
    made.close()


def ask(child: Child, request: str, **options: Any) -> str:
    return child.ask(request.encode("utf-8", "surrogatepass"), "the test", **options)


def is_gone(pid: int) -> bool:
    """Whether there is no such process, nor what is left of one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def has_ended(pid: int) -> bool:
    """Like `is_gone`, but also true for a zombie, which the process that adopts it may leave."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return is_gone(pid)


def eventually(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


def test_one_process_answers_many_requests(child: Child) -> None:
    assert ask(child, "echo é🎉") == "é🎉"
    pid = ask(child, "pid")
    assert int(pid) != os.getpid()
    assert ask(child, "echo " + "x" * (1 << 20)) == "x" * (1 << 20)
    assert ask(child, "pid") == pid


def test_start_does_not_wait_and_is_done_once(child: Child) -> None:
    child.start()
    child.start()
    assert json.loads(ask(child, "seen")) == ["seen"]


def test_every_new_process_gets_the_opening_first() -> None:
    child = make(opening=b"echo hello")
    assert child.ask(None, "the test") == "hello"
    assert json.loads(ask(child, "seen")) == ["echo", "seen"]
    with pytest.raises(ModelError):
        ask(child, "exit 3")
    assert json.loads(ask(child, "seen")) == ["echo", "seen"]
    child.close()
    refused = make(opening=b"raise ModelFormatError")
    for _ in range(2):
        with pytest.raises(ModelFormatError, match="the test is wrong!"):
            ask(refused, "seen")


@pytest.mark.parametrize("error", [InputError, ModelError, ModelFormatError, UnsupportedModelError])
def test_its_errors_are_raised_here_and_are_short(child: Child, error: type[Exception]) -> None:
    pid = ask(child, "pid")
    with pytest.raises(error, match="the test is wrong!") as caught:
        ask(child, f"raise {error.__name__}")
    assert type(caught.value) is error
    assert len(str(caught.value)) < 1100
    assert ask(child, "pid") == pid, "an answer like any other"


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ("memory 900000000", "it needs more than 256 MiB of memory"),
        ("abort", "its process ended with SIGABRT: first line last words"),
        ("exit 3", r"its process ended with status 3: \(no message\)"),
        ("bug", "its process ended with status 1: .*KeyError: 'a bug'"),
        ("scribble 8", "its answer has 18446744073709551615 bytes, more than 268435456"),
        ("long 200000000", "it needs more than 256 MiB of memory"),
    ],
)
def test_what_ends_the_process_is_an_error_and_the_next_one_is_new(
    child: Child, request_: str, reason: str
) -> None:
    pid = int(ask(child, "pid"))
    with pytest.raises(ModelError, match=f"the test was stopped: .*({reason})"):
        ask(child, request_)
    assert is_gone(pid)
    assert int(ask(child, "pid")) != pid


def test_a_request_that_does_not_fit_its_memory() -> None:
    child = make(memory=96 << 20)
    with pytest.raises(ModelError, match="it needs more than 96 MiB of memory"):
        ask(child, "echo " + "x" * (96 << 20))
    assert ask(child, "echo x") == "x"
    child.close()


def test_an_answer_has_the_length_that_was_asked_for(child: Child) -> None:
    assert len(ask(child, "long 99", longest=100)) == 99
    with pytest.raises(ModelError, match="its answer has 101 bytes, more than 100"):
        ask(child, "long 100", longest=100)


@pytest.mark.parametrize("request_", ["sleep", "spin", "scribble 4"])
def test_the_deadline_kills(request_: str) -> None:
    child = make(seconds=30.0)
    pid = int(ask(child, "pid"))
    child._seconds = 0.2
    with pytest.raises(ModelError, match=r"the test was stopped: it takes longer than 0\.2 s"):
        ask(child, request_)
    assert is_gone(pid)


def test_what_it_may_not_do(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    try:
        for request in ("file", "socket", *(["process"] if os.geteuid() else [])):
            assert ask(child, request).startswith("refused")
        assert json.loads(ask(child, "descriptors")) == [0, 1, 2]
    finally:
        os.close(reading)
        os.close(writing)
    memory, files, size, core, seconds = json.loads(ask(child, "limits"))
    assert (files, size, core) == (0, 0, 0)
    assert memory == MEMORY or sys.platform != "linux"
    assert 30 <= seconds <= 40
    assert "HF_TOKEN" not in json.loads(ask(child, "environment"))


def test_ctrl_c_reaches_the_caller_and_leaves_no_process(child: Child) -> None:
    pid = int(ask(child, "pid"))
    assert int(ask(child, "group")) != os.getpgid(0), "or Ctrl-C would end it, too"
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ask(child, "sleep")
    timer.join()
    assert is_gone(pid)
    assert ask(child, "echo again") == "again"


def test_one_that_was_killed_is_replaced(child: Child) -> None:
    pid = int(ask(child, "pid"))
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: child._process is not None and child._process.poll() is not None)
    assert int(ask(child, "pid")) != pid
    assert is_gone(pid)


def test_nothing_is_left_of_one_that_is_closed_or_forgotten() -> None:
    for end in (Child.close, lambda child: None):
        child = make()
        pid = int(ask(child, "pid"))
        end(child)
        del child
        assert is_gone(pid)


def test_threads_take_turns(child: Child) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: ask(child, f"echo {i}"), range(200)))
    assert answers == [str(i) for i in range(200)]


def run(code: str) -> str:
    """Runs code that has `ask` and a `child` in a Python of its own."""
    head = (
        "import os, signal, sys, threading\nfrom tests.models.test_child import *\nchild = make()\n"
    )
    done = python("-W", "error", "-c", head + textwrap.dedent(code))
    assert not done.stderr, done.stderr
    return done.stdout


def test_a_fork_has_a_process_of_its_own() -> None:
    out = run("""
        before = ask(child, "pid")
        if os.fork() == 0:
            assert ask(child, "pid") not in (before, "")
            sys.exit(0)  # with exit handlers, which must not touch the parent's process
        assert os.wait()[1] == 0
        assert ask(child, "pid") == before
        print("sound")
    """)
    assert out == "sound\n"


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "pass"])
def test_it_ends_with_its_parent(end: str) -> None:
    pid = int(run(f'print(ask(child, "pid"), flush=True)\n{end}'))
    assert eventually(lambda: has_ended(pid))


def test_a_parent_that_is_killed_during_a_request() -> None:
    """The limit on processor time ends it, or its answer, which has no reader."""
    pid = int(
        run("""
        child._seconds = 0.5
        print(ask(child, "pid"), flush=True)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        ask(child, "spin")
        """)
    )
    assert eventually(lambda: has_ended(pid))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("executable", "", "no Python"),
        ("frozen", True, "no Python"),
        ("executable", "/nowhere/python", "cannot be started"),
        ("executable", "/bin/false", "does not start: .*status 1"),
    ],
)
def test_where_no_process_can_be_started(
    child: Child, monkeypatch: pytest.MonkeyPatch, name: str, value: object, words: str
) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)
    child.start()  # leaves it to the request to say
    with pytest.raises(NotAvailableError, match=words):
        ask(child, "pid")


def test_a_platform_without_limits(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "resource" else real(name)
    )
    with pytest.raises(NotAvailableError, match="has no limits for processes"):
        ask(child, "pid")


def test_a_module_that_is_missing() -> None:
    child = Child("tests.models.no_such_module", seconds=1.0, memory=MEMORY)
    with pytest.raises(NotAvailableError, match=r"the test needs .*no_such_module"):
        ask(child, "pid")
