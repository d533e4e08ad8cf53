"""What a cache says of each key, with and without a graph."""

from __future__ import annotations

import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import CaptureError
from ostinato.step import Evictions
from ostinato.step import cache as cache_module
from tests.sources import empty_graph


def test_a_key_keeps_its_counts_when_its_graph_leaves(device: Device) -> None:
    stream = device.create_stream()

    def fail() -> ost.GraphExec:
        raise CaptureError("no")

    with ost.GraphCache(device, max_graphs=1) as cache:
        assert not cache.replay("a", stream)
        with pytest.raises(CaptureError):
            cache.get_or_capture("a", fail)
        cache.get_or_capture("a", lambda: empty_graph(device))
        assert cache.replay("a", stream) and cache.replay("a", stream)
        cache.get_or_capture("b", lambda: empty_graph(device))
        (gone,) = cache.statistics().gone
        assert gone.key == "a" and gone.evictions == Evictions(count=1)
        assert (gone.hits, gone.misses, gone.captures, gone.capture_failures) == (2, 1, 1, 1)
        assert gone.capture_seconds > 0
        cache.install("a", empty_graph(device))
        cache.install("a", empty_graph(device))
        assert cache.replay("a", stream)
        (a,) = cache.statistics().keys
        assert (a.hits, a.installed, a.replaced, a.left) == (3, 2, 1, 2)
        assert a.last_capture_seconds is None and a.capture_seconds == gone.capture_seconds
        assert cache.key_statistics("a") == a
        assert cache.key_statistics("c") is None


def test_keys_are_forgotten_before_they_fill_the_memory(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_REMEMBERED", 3)
    stream = device.create_stream()
    with ost.GraphCache(device) as cache:
        for key in range(10):
            assert not cache.replay(key, stream)
        stats = cache.statistics()
        assert [line.key for line in stats.gone] == [7, 8, 9]
        assert (stats.misses, stats.forgotten) == (10, 7)


def test_a_key_whose_hash_changes_is_forgotten_too(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call after it was the oldest raised KeyError."""

    class Name:
        hash = 10

        def __hash__(self) -> int:
            return self.hash

    monkeypatch.setattr(cache_module, "_REMEMBERED", 3)
    stream, name = device.create_stream(), Name()
    with ost.GraphCache(device) as cache:
        assert not cache.replay(name, stream)
        name.hash = 11
        for key in range(5):
            assert not cache.replay(key, stream)
        assert [line.key for line in cache.statistics().gone] == [2, 3, 4]
