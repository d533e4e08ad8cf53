"""Bytes in words, measurements that are believed, and estimates."""

from __future__ import annotations

import pytest

import ostinato as ost
from ostinato.cache import FootprintSource, parse_bytes
from ostinato.cache.budget import BLOCK_BYTES, NODE_BYTES
from ostinato.device import Device
from ostinato.errors import InputError, Status, driver_error


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("1 B", 1),
        ("512 MiB", 512 << 20),
        ("512mib", 512 << 20),
        (" 1.5 GiB ", 3 << 29),
        ("2 GB", 2 * 10**9),
        ("3 kB", 3000),
        ("1TiB", 1 << 40),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_bytes_in_words(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("wrong", ["", "MiB", "12 parsecs", "-1 MiB", "1e9", 1.5, True, None, "٣"])
def test_bytes_that_cannot_be_read(wrong: object) -> None:
    with pytest.raises(InputError, match="512 MiB"):
        parse_bytes(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, -1, "0", "0.1 B"])
def test_a_budget_of_nothing_is_refused(wrong: int | str) -> None:
    with pytest.raises(InputError, match="None is for no limit"):
        parse_bytes(wrong)


def two_nodes(device: Device) -> ost.GraphExec:
    graph = ost.Graph.create(device.context)
    graph.add_empty(after=[graph.add_empty()])
    return graph.instantiate()


@pytest.mark.alone
def test_a_small_graph_is_estimated_by_its_nodes(device: Device) -> None:
    with ost.GraphCache(device) as cache:
        cache.get_or_capture("a", lambda: two_nodes(device))
        (key,) = cache.statistics().keys
        assert (key.nbytes, key.nbytes_source) == (2 * NODE_BYTES, FootprintSource.ESTIMATED)


def test_nodes_inside_others_count(device: Device) -> None:
    inner = ost.Graph.create(device.context)
    inner.add_empty(after=[inner.add_empty()])
    outer = ost.Graph.create(device.context)
    outer.add_child(inner)
    with ost.GraphCache(device) as cache:
        cache.install("a", outer.instantiate())
        assert cache.statistics().nbytes == 3 * NODE_BYTES


@pytest.mark.alone
def test_what_a_graph_brings_is_measured(device: Device) -> None:
    kept = []

    def make() -> ost.GraphExec:
        kept.append(device.empty(16 << 20))
        return two_nodes(device)

    with ost.GraphCache(device) as cache:
        cache.get_or_capture("a", make)
        (key,) = cache.statistics().keys
        assert key.nbytes_source is FootprintSource.MEASURED
        assert 16 << 20 <= key.nbytes <= (16 << 20) + 2 * BLOCK_BYTES


def test_a_number_given_wins(device: Device) -> None:
    with ost.GraphCache(device) as cache:
        cache.get_or_capture("a", lambda: two_nodes(device), nbytes=7)
        cache.install("b", two_nodes(device), nbytes=0)
        stats = cache.statistics()
        assert [k.nbytes for k in stats.keys] == [7, 0]
        assert {k.nbytes_source for k in stats.keys} == {FootprintSource.GIVEN}
        with pytest.raises(InputError, match="nbytes=-1"):
            cache.install("c", two_nodes(device), nbytes=-1)


def test_captures_at_the_same_time_are_not_measured(host_device: Device) -> None:
    """Neither of two makings knows which bytes were its own."""
    kept = []

    def make(cache: ost.GraphCache) -> ost.GraphExec:
        kept.append(host_device.empty(16 << 20))
        cache.get_or_capture("inner", lambda: two_nodes(host_device))
        return two_nodes(host_device)

    with ost.GraphCache(host_device) as cache:
        cache.get_or_capture("outer", lambda: make(cache))
        sources = {k.nbytes_source for k in cache.statistics().keys}
        assert sources == {FootprintSource.ESTIMATED}


def test_a_driver_that_cannot_measure(host_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> tuple[int, int]:
        raise driver_error(Status.NOT_PERMITTED, "memory_info")

    monkeypatch.setattr(host_device.driver, "memory_info", refuse)
    with ost.GraphCache(host_device) as cache:
        cache.get_or_capture("a", lambda: two_nodes(host_device))
        assert cache.statistics().nbytes == 2 * NODE_BYTES
