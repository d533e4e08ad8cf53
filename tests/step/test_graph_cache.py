"""The keyed cache: install, replay, evict; what leaves, when, and what is never pulled away."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device, open_device
from ostinato.driver.api import ExecHandle
from ostinato.errors import (
    ClosedError,
    InputError,
    NotHeldError,
    OutOfMemoryError,
    Status,
)
from ostinato.step import Evictions
from ostinato.testing import FaultyDriver, HeldStream
from tests.sources import config, kernel


class Counter:
    """A number on the device, and graphs that add to it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = device.create_stream()
        self.memory = device.zeros(1, np.int32)
        self._increment = kernel(device, "increment")

    def adding(self, by: int) -> ost.GraphExec:
        with ost.capture(self.stream) as capture:
            ost.launch(self.stream, self._increment, config(1), self.memory, by)
        return capture.graph.instantiate(upload=self.stream)

    @property
    def value(self) -> int:
        return int(self.memory.to_numpy(self.stream)[0])


@pytest.fixture
def counter(device: Device) -> Counter:
    return Counter(device)


@pytest.fixture
def cache(device: Device) -> Iterator[ost.GraphCache]:
    with ost.GraphCache(device) as opened:
        yield opened


def test_a_miss_says_so_and_runs_nothing(cache: ost.GraphCache, counter: Counter) -> None:
    assert cache.replay("unknown", counter.stream) is False
    assert cache.get("unknown") is None
    with pytest.raises(NotHeldError, match="under key 'unknown'"), cache.hold("unknown"):
        raise AssertionError("the block runs")
    with pytest.raises(TypeError, match="unhashable"):
        cache.replay([], counter.stream)
    assert counter.value == 0
    assert cache.statistics().misses == 3


@pytest.mark.parametrize("key", ["name", 8, ("step", 8, 16), None, frozenset({1}), 2.5])
def test_any_hashable_key(cache: ost.GraphCache, counter: Counter, key: object) -> None:
    cache.install(key, counter.adding(3))
    assert key in cache and len(cache) == 1 and cache.keys() == [key]
    assert cache.replay(key, counter.stream)
    assert counter.value == 3


class Name:
    """A key whose hash changes.  By numbers: a small table may find a key by another hash of it,
    if both have the same place, and hashes of texts are random."""

    hash = 4

    def __hash__(self) -> int:
        return self.hash


@pytest.mark.parametrize("limit", [{"max_graphs": 2}, {"budget": 200}])
def test_a_key_whose_hash_changes_stops_nothing(
    device: Device, counter: Counter, limit: dict[str, int]
) -> None:
    """The cache could not take it out, and tried for ever, with its lock held."""
    name, cache = Name(), ost.GraphCache(device, **limit)
    cache.install(name, counter.adding(1), nbytes=100)
    name.hash = 5
    for key in range(4):
        cache.install(key, counter.adding(1), nbytes=100)
    assert cache.keys() == [2, 3]
    assert cache.replay(3, counter.stream) and counter.value == 1


@pytest.mark.parametrize("way", ["limit", "evict_all", "evict_touching", "close"])
def test_a_key_whose_hash_changes_loses_no_graph(
    device: Device, counter: Counter, way: str
) -> None:
    """Its second graph took the place of the first in the table, and neither was closed."""
    name, cache = Name(), ost.GraphCache(device, max_graphs=4)
    old, older = counter.adding(1), counter.adding(1)
    for name.hash, run in ((4, older), (5, old), (6, new := counter.adding(1))):
        cache.install(name, run)
    with pytest.raises(InputError, match="is in the cache under key"):
        cache.install(name, old)
    match way:
        case "limit":
            cache.install(1, counter.adding(1))
            cache.install(2, counter.adding(1))
            assert cache.keys() == [name, 1, 2] and cache.get(name) is new and not new.closed
        case "evict_all":
            assert cache.evict_all() == 3
        case "evict_touching":
            assert cache.evict_touching(counter.memory) == [name] * 3
        case "close":
            cache.close()
    assert (older.closed, old.closed, new.closed) == (True, True, way != "limit")


def test_a_graph_is_captured_on_the_first_ask_only(cache: ost.GraphCache, counter: Counter) -> None:
    began = time.perf_counter()
    made = [cache.get_or_capture("a", lambda: counter.adding(2)) for _ in range(3)]
    spent = time.perf_counter() - began
    assert made[0] is made[1] is made[2] is cache.get("a")
    assert cache.replay("a", counter.stream) and counter.value == 2
    stats = cache.statistics()
    assert (stats.captures, stats.hits, stats.misses, stats.installed) == (1, 4, 0, 0)
    (line,) = stats.keys
    assert spent >= stats.capture_seconds == line.capture_seconds > 0
    assert line.capture_seconds >= (line.last_capture_seconds or 0) > 0
    assert stats.keys[0].hits == 4


def test_installing_the_same_one_again_keeps_it(cache: ost.GraphCache, counter: Counter) -> None:
    run = counter.adding(1)
    cache.install("a", run, nbytes=5)
    cache.install("a", run, nbytes=7)
    assert not run.closed and cache.statistics().nbytes == 7 and cache.statistics().replaced == 0


def test_what_cannot_be_installed(cache: ost.GraphCache, counter: Counter) -> None:
    run, closed = counter.adding(1), counter.adding(1)
    closed.close()
    cache.install("a", run)
    with pytest.raises(InputError, match="under key 'a' already"):
        cache.install("b", run)
    with pytest.raises(ClosedError):
        cache.install("b", closed)
    with pytest.raises(InputError, match="instantiate"):
        cache.install("b", run.graph)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="instantiate"):
        cache.get_or_capture("b", lambda: None)  # type: ignore[arg-type, return-value]
    with open_device("host") as elsewhere, pytest.raises(InputError, match="another device"):
        cache.install("b", Counter(elsewhere).adding(1))
    with cache.hold("a"):
        cache.evict("a")
        with pytest.raises(InputError, match="just been evicted"):
            cache.install("a", run)
    assert "b" not in cache and cache.statistics().capture_failures == 1


def test_what_a_cache_is_made_of(device: Device) -> None:
    with ost.GraphCache(device) as cache:
        assert cache.buckets == ost.PowersOfTwo()
    with ost.GraphCache(device, buckets=ost.PowersOfTwo(64), budget="512 MiB") as cache:
        assert cache.buckets.bucket(3) == 4
        assert cache.statistics().budget == 512 << 20
        assert "0 graphs" in repr(cache)
    with pytest.raises(InputError, match="device"):
        ost.GraphCache(object())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="max_graphs=0"):
        ost.GraphCache(device, max_graphs=0)
    with pytest.raises(InputError, match="512 MiB"):
        ost.GraphCache(device, budget="much")
    with pytest.raises(InputError, match="a CaptureLimits is needed"):
        ost.GraphCache(device, limits={"seconds": 1})  # type: ignore[arg-type]


def test_a_closed_cache(device: Device, counter: Counter) -> None:
    cache, run = ost.GraphCache(device), counter.adding(1)
    cache.install("a", run)
    cache.close()
    cache.close()
    assert run.closed and len(cache) == 0 and cache.closed and "closed" in repr(cache)
    assert not cache.evict("a") and cache.evict_all() == 0
    assert cache.evict_touching(counter.memory) == []
    late = counter.adding(1)
    for call in (
        lambda: cache.replay("a", counter.stream),
        lambda: cache.get("a"),
        lambda: cache.get_or_capture("a", lambda: counter.adding(1)),
        lambda: cache.install("a", late),
    ):
        with pytest.raises(ClosedError, match="cache is closed"):
            call()
    assert not late.closed
    assert cache.statistics().evictions == Evictions()


def test_a_cache_that_is_closed_during_a_capture(device: Device, counter: Counter) -> None:
    cache, made = ost.GraphCache(device), []

    def make() -> ost.GraphExec:
        made.append(counter.adding(1))
        cache.close()
        return made[0]

    with pytest.raises(ClosedError, match="cache is closed"):
        cache.get_or_capture("a", make)
    assert made[0].closed


# --- nothing is pulled from under a replay


@pytest.fixture
def destroyed(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The executables that the driver has been told to destroy."""
    gc.collect()
    device.synchronize()  # what other tests left is destroyed now
    handles: list[int] = []
    destroy = device.driver.exec_destroy

    def noted(executable: ExecHandle) -> None:
        handles.append(executable)
        destroy(executable)

    monkeypatch.setattr(device.driver, "exec_destroy", noted)
    return handles


def copying(device: Device, stream: ost.Stream, out: ost.Buffer, source: ost.Buffer) -> ost.Graph:
    """out = source"""
    with ost.capture(stream) as capture:
        ost.copy(stream, out, source)
    return capture.graph


@pytest.mark.parametrize("how", ["replace", "evict", "evict_all", "budget", "touching", "close"])
def test_a_replay_under_way_is_not_disturbed(
    device: Device, destroyed: list[int], how: str
) -> None:
    stream, other = device.create_stream(), device.create_stream()
    out, seven, nine = (device.array(np.full(1000, v, np.float32)) for v in (0, 7, 9))
    cache = ost.GraphCache(device, budget=10)
    cache.install("a", copying(device, stream, out, seven).instantiate(upload=stream), nbytes=6)
    device.synchronize()  # freeing what others left would wait for the held stream
    with HeldStream(stream):
        assert cache.replay("a", stream)
        if how == "replace":
            cache.install("a", copying(device, other, out, nine).instantiate(), nbytes=6)
        elif how == "evict":
            cache.evict("a")
        elif how == "evict_all":
            cache.evict_all()
        elif how == "budget":
            cache.install("b", copying(device, other, out, nine).instantiate(), nbytes=6)
        elif how == "touching":
            cache.evict_touching(out)
        else:
            cache.close()
        other.synchronize()  # which gives the context every chance to destroy too much
        assert destroyed == []
    np.testing.assert_array_equal(out.to_numpy(stream), np.full(1000, 7.0, np.float32))
    device.synchronize()
    assert len(destroyed) == 1
    cache.close()


def test_what_a_replay_under_way_points_at_lives_until_it_is_done(device: Device) -> None:
    """Memory that another library frees without waiting, such as a tensor, is not freed early."""

    class Tensor:
        pass

    stream, out = device.create_stream(), device.zeros(4, np.float32)
    tensor = Tensor()
    alive = weakref.ref(tensor)
    graph = copying(device, stream, out, device.array(np.ones(4, np.float32)))
    graph.keep.append(tensor)
    cache = ost.GraphCache(device)
    cache.install("a", graph.instantiate(upload=stream))
    del tensor, graph
    device.synchronize()
    with HeldStream(stream):
        cache.replay("a", stream)
        cache.evict("a")
        assert alive() is not None
    device.synchronize()
    assert alive() is None
    np.testing.assert_array_equal(out.to_numpy(stream), np.ones(4, np.float32))


def test_an_eviction_waits_for_its_own_work_only(
    device: Device, counter: Counter, destroyed: list[int]
) -> None:
    """Row A7: another stream that is busy keeps nothing from being destroyed."""
    with ost.GraphCache(device) as cache:
        cache.install("a", counter.adding(1))
        cache.replay("a", counter.stream)
        counter.stream.synchronize()
        busy = device.create_stream()
        with HeldStream(busy):
            cache.evict("a")
            assert len(destroyed) == 1


def test_held_graphs_are_closed_at_the_end(cache: ost.GraphCache, counter: Counter) -> None:
    run = counter.adding(1)
    cache.install("a", run)
    with cache.hold("a") as outer, cache.hold("a") as inner:
        assert outer is inner is run
        assert cache.evict("a") and "a" not in cache
        assert not run.closed and cache.statistics().leaving == 1
        run.launch(counter.stream)
    assert run.closed and cache.statistics().leaving == 0
    assert counter.value == 1


def test_an_eviction_in_the_middle_of_a_launch(
    cache: ost.GraphCache, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handle is not destroyed between the lookup and the driver's call."""
    run, launch = counter.adding(1), ost.GraphExec.launch
    inside, go_on = threading.Event(), threading.Event()

    def slow(self: ost.GraphExec, stream: ost.Stream) -> None:
        inside.set()
        go_on.wait(30)
        launch(self, stream)

    monkeypatch.setattr(ost.GraphExec, "launch", slow)
    cache.install("a", run)
    thread = threading.Thread(target=cache.replay, args=("a", counter.stream))
    thread.start()
    try:
        assert inside.wait(30)
        assert cache.evict("a")  # at once
        assert not run.closed
    finally:
        go_on.set()
        thread.join()
    assert run.closed and counter.value == 1


def test_a_failed_launch_gives_its_lease_back(
    cache: ost.GraphCache, counter: Counter, device: Device
) -> None:
    run, stream = counter.adding(1), device.create_stream()
    cache.install("a", run)
    stream.close()
    with pytest.raises(ClosedError, match="stream"):
        cache.replay("a", stream)
    cache.evict("a")
    assert run.closed


class Word:
    """A key with Python of its own, which a Ctrl-C may come into."""

    left = 0
    """Calls until one is interrupted; 0 for none."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    def _call(self) -> None:
        Word.left -= 1
        if not Word.left:
            raise KeyboardInterrupt

    def __hash__(self) -> int:
        self._call()
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        self._call()
        return isinstance(other, Word) and self.text == other.text


@pytest.mark.parametrize("call", ["get", "install", "evict", "get_or_capture", "statistics"])
def test_an_interruption_in_a_key_leaves_the_cache_whole(
    device: Device, counter: Counter, call: str
) -> None:
    calls: dict[str, Callable[[ost.GraphCache], object]] = {
        "get": lambda cache: cache.get(Word("a")),
        "install": lambda cache: cache.install(Word("a"), counter.adding(1)),
        "evict": lambda cache: cache.evict(Word("a")),
        "get_or_capture": lambda cache: cache.get_or_capture(Word("d"), lambda: counter.adding(1)),
        "statistics": lambda cache: cache.statistics(),
    }
    for at in range(1, 200):
        with ost.GraphCache(device, max_graphs=3) as cache:
            for text in "abc":
                cache.install(Word(text), counter.adding(1))
            Word.left = at
            with contextlib.suppress(KeyboardInterrupt):
                calls[call](cache)
            over, Word.left = Word.left > 0, 0
            kept = cache.keys()
            assert len(kept) == len(cache) == cache.statistics().graphs
            if call in ("get", "statistics"):
                assert {str(key) for key in kept} == {*"abc"}  # looking loses no graph
            for text in "defg":
                cache.install(Word(text), counter.adding(1))
            kept = cache.keys()
            assert [str(key) for key in kept] == ["e", "f", "g"]
            assert len(cache) == 3
        if over:
            return
    raise AssertionError("it was never called without an interruption")


# --- what is done around a replay
def test_a_replay_does_what_the_settings_say(host_device: Device) -> None:
    """The order of the driver's calls, and what is raised is the driver's error as it is."""
    faults = FaultyDriver(host_device.driver)
    device, seen = Device(faults), []
    stream, x = device.create_stream(), device.zeros(4, "u1")
    graph = ost.capture_function(stream, lambda: ost.fill(stream, x, 1))
    calls = ("exec_upload", "exec_launch", "stream_synchronize")

    def made(
        settings: ost.settings.ReplaySettings | None,
        profile: ost.explain.ReplayProfile | None = None,
    ) -> list[str]:
        cache = ost.GraphCache(device, settings=settings, profile=profile)
        cache.install("x", graph.instantiate())
        faults.clear()
        for change in (None, lambda run: None):
            assert cache.replay("x", stream, change)
        found = [call for call in faults.calls if call in calls]
        faults.fail("exec_launch", Status.OUT_OF_MEMORY)
        with pytest.raises(OutOfMemoryError):
            cache.replay("x", stream)
        return found

    upload, launch, wait = calls
    assert made(None) == [launch] * 2
    assert made(ost.settings.ReplaySettings(upload=True)) == [upload, launch] * 2
    assert made(ost.settings.ReplaySettings(synchronize=True)) == [launch, wait] * 2
    profile = ost.explain.ReplayProfile(sinks=(seen.append,))
    assert made(None, profile) == [upload, launch, wait] * 2
    assert [event.number for event in seen] == [1, 2] and {event.key for event in seen} == {"x"}
    assert (
        made(ost.settings.ReplaySettings(profile=False), profile) == [launch] * 2 and len(seen) == 2
    )
    for wrong in ({"settings": True}, {"profile": "yes"}):
        with pytest.raises(InputError, match=r"is needed, not"):
            ost.GraphCache(device, **wrong)
