"""Bytes in words, measurements that are believed, and estimates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ostinato as ost
from ostinato.device import Device, open_device
from ostinato.errors import InputError, Status, driver_error
from ostinato.lowlevel import parse_bytes
from ostinato.step import FootprintSource
from ostinato.step.budget import BLOCK_BYTES, NODE_BYTES, Footprint, SharedBlocks


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
        (np.int64(4096), 4096),
    ],
)
def test_bytes_in_words(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text, "budget") == nbytes


@pytest.mark.parametrize(
    "wrong",
    ["", "MiB", "12 parsecs", "-1 MiB", "1e9", 1.5, True, None, "٣", "9" * 5000, "9" * 400 + ".5"],
)
def test_bytes_that_cannot_be_read(wrong: object) -> None:
    with pytest.raises(InputError, match=r"^budget=.*512 MiB"):
        parse_bytes(wrong, "budget")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, -1, "0", "0.1 B"])
def test_a_budget_of_nothing_is_refused(host_device: Device, wrong: int | str) -> None:
    with pytest.raises(InputError, match=r"^budget=.*of 1 or more"):
        ost.GraphCache(host_device, budget=wrong)


def two_nodes(device: Device) -> ost.GraphExec:
    graph = ost.Graph.create(device)
    graph.add_empty(after=[graph.add_empty()])
    return graph.instantiate()


@pytest.mark.alone
def test_a_small_graph_is_estimated_by_its_nodes(device: Device) -> None:
    with ost.GraphCache(device) as cache:
        cache.get_or_capture("a", lambda: two_nodes(device))
        (key,) = cache.statistics().keys
        assert (key.nbytes, key.nbytes_source) == (2 * NODE_BYTES, FootprintSource.ESTIMATED)


def test_nodes_inside_others_count(device: Device) -> None:
    inner = ost.Graph.create(device)
    inner.add_empty(after=[inner.add_empty()])
    outer = ost.Graph.create(device)
    outer.add_child(inner)
    with ost.GraphCache(device) as cache:
        cache.install("a", outer.instantiate())
        assert cache.statistics().nbytes == 3 * NODE_BYTES


@pytest.mark.alone
def test_what_a_graph_brings_is_measured(device: Device) -> None:
    kept = []

    def make() -> ost.GraphExec:
        kept.append(device.empty(16 << 20, "bytes"))
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
        kept.append(host_device.empty(16 << 20, "bytes"))
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


class Blocks:
    """A driver's memory for graphs, in blocks.

    `keeps`: what a graph leaves is kept for a graph of at most that size.  Else a block is given
    back once all graphs in it have left, as memory that the graphs brought themselves.
    """

    def __init__(self, keeps: bool) -> None:
        self._sizes: list[int] = []
        self._keeps = keeps
        self._made: list[tuple[int, int, ost.GraphExec]] = []  # block, bytes, graph
        self._rooms: list[int] = []

    @property
    def taken(self) -> int:
        if self._keeps:
            return sum(self._sizes)
        used = {block for block, _, run in self._made if not run.closed}
        return sum(self._sizes[block] for block in used)

    def put(self, nbytes: int, run: ost.GraphExec) -> None:
        if self._keeps:
            gone = [made for made in self._made if made[2].closed]
            self._made = [made for made in self._made if not made[2].closed]
            self._rooms += [size for _, size, _ in gone]
            fitting = [room for room in self._rooms if room >= nbytes]
            if fitting:
                self._rooms.remove(min(fitting))
                self._made.append((0, min(fitting), run))
                return
        last = len(self._sizes) - 1
        there = sum(size for block, size, _ in self._made if block == last)
        if last < 0 or there + nbytes > self._sizes[last]:
            last += 1
            self._sizes.append(-(-nbytes // BLOCK_BYTES) * BLOCK_BYTES)
        self._made.append((last, nbytes, run))


@given(
    keys=st.lists(st.integers(0, 30), min_size=1, max_size=90),
    nodes=st.integers(1, 300),
    nbytes=st.integers(1, BLOCK_BYTES),
    budget=st.integers(2, 12),
    keeps=st.booleans(),
)
@settings(max_examples=60)
def test_small_graphs_share_the_blocks_that_they_took(
    keys: list[int], nodes: int, nbytes: int, budget: int, keeps: bool
) -> None:
    """Whatever a graph takes beside its estimate, the memory stays under the budget."""
    blocks, total = Blocks(keeps), 1 << 40
    estimate = nodes * NODE_BYTES
    with open_device("host") as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(device.driver, "memory_info", lambda: (total - blocks.taken, total))
        patch.setattr("ostinato.step.budget.NODE_BYTES", estimate)

        def make() -> ost.GraphExec:
            graph = ost.Graph.create(device)
            graph.add_empty()
            run = graph.instantiate()
            blocks.put(nbytes, run)
            return run

        with ost.GraphCache(device, budget=budget * BLOCK_BYTES) as cache:
            for number, key in enumerate(keys):
                cache.get_or_capture(key, make)
                stats = cache.statistics()
                assert stats.nbytes >= stats.graphs * estimate
                if not stats.evictions.total:
                    assert stats.nbytes >= blocks.taken - 2 * BLOCK_BYTES
                    assert stats.nbytes <= max(stats.graphs * (estimate + 1), blocks.taken)
                else:
                    # A block that is not full, one that is begun, and the graph that is kept.
                    assert blocks.taken <= (budget + 3) * BLOCK_BYTES + nbytes
                # However much was taken by others meanwhile, no graph counts over a block more.
                fit = max(1, budget * BLOCK_BYTES // (estimate + BLOCK_BYTES))
                assert stats.graphs >= min(len(set(keys[: number + 1])), fit)


def test_a_block_counts_once_another_is_begun() -> None:
    """The first graphs of a device take a block each now and then, whatever their size."""
    blocks, one = SharedBlocks(), Footprint(NODE_BYTES, FootprintSource.ESTIMATED)
    blocks.note(BLOCK_BYTES, 9 * BLOCK_BYTES, 0, NODE_BYTES)
    assert blocks.share(one) == one
    blocks.note(BLOCK_BYTES, 8 * BLOCK_BYTES, NODE_BYTES, NODE_BYTES)
    shared = blocks.share(one)
    assert (shared.nbytes, shared.source) == (BLOCK_BYTES // 2, FootprintSource.SHARED)
    blocks.note(0, 8 * BLOCK_BYTES, 2 * NODE_BYTES, 2 * NODE_BYTES)
    assert blocks.share(one).nbytes == BLOCK_BYTES // 4, "those that took none share it too"
    for source in (FootprintSource.GIVEN, FootprintSource.MEASURED):
        assert blocks.share(Footprint(7, source)).nbytes == 7


@pytest.mark.parametrize("keeps", [True, False])
def test_graphs_in_one_block_are_charged_with_their_share(
    host_device: Device, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """Four graphs fill a block: each is charged with a quarter, not with 4608 bytes or a whole
    one, and a cache that is full for a long time goes on so."""
    blocks, total = Blocks(keeps), 1 << 40
    monkeypatch.setattr(host_device.driver, "memory_info", lambda: (total - blocks.taken, total))

    def make() -> ost.GraphExec:
        run = two_nodes(host_device)
        blocks.put(BLOCK_BYTES // 4, run)
        return run

    with ost.GraphCache(host_device, budget="20 MiB") as cache:
        for key in range(33):
            cache.get_or_capture(key, make)
        stats = cache.statistics()
        assert {line.nbytes_source for line in stats.keys} == {FootprintSource.SHARED}
        assert cache.table.blocks.grown == 9 * BLOCK_BYTES == blocks.taken
        assert 8 * BLOCK_BYTES <= stats.nbytes <= 9 * BLOCK_BYTES
        assert stats.evictions.total == 0
        for key in range(33, 240):
            cache.get_or_capture(key, make)
            stats = cache.statistics()
            assert stats.nbytes <= 20 << 20 and stats.graphs >= 30
            assert blocks.taken <= (20 << 20) + 2 * BLOCK_BYTES
        cache.evict_all()
        cache.get_or_capture("new", lambda: two_nodes(host_device))
        (line,) = cache.statistics().keys
        assert line.nbytes_source is FootprintSource.ESTIMATED, "an empty cache begins anew"


@pytest.mark.alone
def test_memory_that_is_given_back_in_a_capture_hides_nothing(device: Device) -> None:
    """A capture that takes 16 MiB while 16 MiB of a closed buffer are given back took 16 MiB."""
    stream = device.create_stream()
    old = [device.empty(16 << 20, "bytes")]
    kept = []

    def make() -> ost.GraphExec:
        old.pop().close()
        stream.synchronize()
        device.context.collect()
        kept.append(device.empty(16 << 20, "bytes"))
        return two_nodes(device)

    with ost.GraphCache(device) as cache:
        cache.get_or_capture("a", make)
        (key,) = cache.statistics().keys
        assert key.nbytes_source is FootprintSource.MEASURED
        assert 16 << 20 <= key.nbytes <= (16 << 20) + 2 * BLOCK_BYTES
