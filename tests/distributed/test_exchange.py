"""Exchanges in the ranks' memory, with ranks as threads: by the host's kernels, and by the CUDA
kernels on the emulator."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.distributed import Group, exchange, local_groups, open_collectives
from ostinato.distributed.exchange import ExchangeCollectives, Layout
from ostinato.errors import (
    DisagreementError,
    DriverError,
    GroupError,
    InputError,
    NotAvailableError,
)
from ostinato.modules import CompileOptions
from tests.distributed import exchange_program
from tests.distributed.test_local import outcomes
from tests.emulator.emulator import Emulator

EMULATED = pytest.param(
    "emulator", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
)


@pytest.fixture(params=["host", EMULATED])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "emulator":
        emulate(monkeypatch)
    return str(request.param)


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA kernels in the place of the host's; the first exchange, the longest, is left out."""
    emulator, lock = Emulator(threads=True), threading.Lock()

    def made(collectives: ExchangeCollectives) -> dict[str, ost.HostKernel]:
        options = CompileOptions(defines=tuple(collectives.layout.macros.items()))
        with lock:  # built once
            source = exchange.kernels()
            found = {
                name: emulator.host_kernel(source, name, options) for name in source.signatures
            }
            for kernel in found.values():
                emulator.build(source, kernel.name, options)
        return found

    monkeypatch.setattr(exchange, "_host_kernels", made)
    monkeypatch.setattr(ExchangeCollectives, "_try_out", lambda _: None)


def on_ranks(
    size: int,
    work: Callable[[Group, ost.Device, Any], Any],
    *,
    hop_bytes: int = exchange.HOP_BYTES,
    **options: Any,
) -> Any:
    """What each rank gives."""

    def call(group: Group) -> Any:
        with ost.open_device("host") as device:
            beyond = open_collectives(group, device, "library")
            made = ExchangeCollectives(group, device, beyond, hop_bytes=hop_bytes)
            group.attach(made)
            try:
                with group.watching("the test"):
                    return work(group, device, made)
            finally:
                made.close()

    with local_groups(size, **{"deadline": 60, **options}) as groups:
        return groups.run(call)


def summed(parts: list[np.ndarray]) -> np.ndarray:
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def drawn(rank: int, turn: int, count: int) -> np.ndarray:
    return np.random.default_rng([rank, turn, count]).standard_normal(count).astype(np.float32)


COUNTS = [1, 2, 7, 255, 256, 257, 700, 1, 3000, 64]
WHOLE, IN_PARTS = 1 << 40, -1
"""`hop_bytes` with which sums go to every rank whole, or are computed in parts."""


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    "size", [1, 2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))]
)
def test_sums_and_gathers_of_every_length(size: int, mixed: bool) -> None:
    """One behind the other, so that later ones meet the words of earlier ones.  `mixed`: most sums
    are computed in parts."""

    def work(group: Group, device: ost.Device, made: ExchangeCollectives) -> list[bytes]:
        found = []
        with device.create_stream() as stream:
            for turn, count in enumerate(COUNTS):
                parts = [drawn(rank, turn, count) for rank in range(size)]
                start = drawn(99, turn, count)
                target, partial = device.array(start), device.array(parts[group.rank])
                out, lines = device.empty(count, np.float32), device.empty(count * size, np.float32)
                made._hop_bytes = IN_PARTS if mixed and turn % 4 else WHOLE
                for operation in (
                    *made.all_reduce(partial, out),
                    *made.all_gather(partial, lines),
                    *made.accumulate(target, partial),
                ):
                    stream.submit(operation)
                got = [one.to_numpy(stream) for one in (target, out, lines, partial)]
                assert (got[0] == start + summed(parts)).all()
                assert (got[1] == summed(parts)).all()
                assert (got[2] == np.concatenate(parts)).all()
                assert not got[3].any()
                found += [one.tobytes() for one in got]
            keys = device.array(np.arange(5, dtype=np.uint64)[:, None] + 10 * group.rank)
            out = device.empty((5, size), np.uint64)
            (operation,) = made.all_gather(keys, out)
            stream.submit(operation)
            wanted = np.arange(5)[:, None] + 10 * np.arange(size)
            assert (out.to_numpy(stream) == wanted).all()
        assert made.by_beyond == 0
        return found

    found = on_ranks(size, work)
    assert all(one == found[0] for one in found)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [2, 3])
def test_replays_and_loops_count_by_themselves(size: int) -> None:
    """Of one graph, between eager exchanges, and where ranks are slow in turns."""
    turns, count = 12, 300

    def work(group: Group, device: ost.Device, made: ExchangeCollectives) -> float:
        target, partial = device.zeros(count, np.float32), device.zeros(count, np.float32)
        ones = np.ones(count, np.float32)
        (operation,) = made.accumulate(target, partial)
        with device.create_stream() as stream:
            with ost.capture(stream) as under_way:
                for _ in range(3):
                    stream.submit(operation)
            with under_way.graph.instantiate() as executable:
                for turn in range(turns):
                    if (turn + group.rank) % 3 == 0:
                        time.sleep(0.002)
                    partial.set(ones * (group.rank + 1), stream)
                    executable.launch(stream)
                    partial.set(ones, stream)
                    stream.submit(operation)
                got = target.to_numpy(stream)
        assert (got == got[0]).all()
        return float(got[0])

    wanted = float(turns * (sum(range(1, size + 1)) + size))
    assert on_ranks(size, work) == [wanted] * size


@pytest.mark.usefixtures("kernels")
def test_a_rank_one_exchange_ahead_overwrites_nothing() -> None:
    """Rank 0 goes on at once, rank 1 waits before it reads; values tell the turns apart."""
    turns, count = 50, 64  # one warp: others would hold it back on the emulator

    def work(group: Group, device: ost.Device, made: ExchangeCollectives) -> bool:
        out = [device.empty(count, np.float32) for _ in range(turns)]
        source = [device.array(drawn(group.rank, turn, count)) for turn in range(turns)]
        with device.create_stream() as stream:
            for turn in range(turns):
                if group.rank:
                    stream.synchronize()
                    time.sleep(0.001)
                for operation in made.all_reduce(source[turn], out[turn]):
                    stream.submit(operation)
            got = [one.to_numpy(stream) for one in out]
        return all(
            (one == summed([drawn(rank, turn, count) for rank in range(2)])).all()
            for turn, one in enumerate(got)
        )

    assert on_ranks(2, work) == [True, True]


@pytest.mark.usefixtures("kernels")
def test_epochs_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 2^32 exchanges the counter is 0 again."""

    def work(group: Group, device: ost.Device, made: ExchangeCollectives) -> list[float]:
        window = made._window
        assert window is not None
        counters = window.view(0, made.layout.blocks, np.uint32)
        group.barrier()
        with device.create_stream() as stream:
            counters.set(np.full(made.layout.blocks, 2**32 - 3, np.uint32), stream)
            stream.synchronize()
            group.barrier()
            out, source = device.empty(600, np.float32), device.empty(600, np.float32)
            found = []
            for turn in range(6):
                source.set(np.full(600, turn + 10.0 * group.rank, np.float32), stream)
                for operation in made.all_reduce(source, out):
                    stream.submit(operation)
                got = out.to_numpy(stream)
                assert (got == got[0]).all()
                found.append(float(got[0]))
            assert (counters.to_numpy(stream)[:3] == 3).all()
        return found

    assert on_ranks(2, work) == [[2.0 * turn + 10 for turn in range(6)]] * 2


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("size", "hop_bytes"), [(2, WHOLE), (4, WHOLE), (3, IN_PARTS)])
def test_a_lost_rank_ends_the_waits_of_the_others(size: int, hop_bytes: int) -> None:
    """In a graph of exchanges, with a typed error and NaN, long before the deadline."""

    def work(group: Group) -> None:
        with ost.open_device("host") as device:
            made = open_collectives(group, device, "exchange")
            assert isinstance(made, ExchangeCollectives)
            made._hop_bytes = hop_bytes
            target, partial = device.zeros(300, np.float32), device.zeros(300, np.float32)
            operations = made.accumulate(target, partial)
            with device.create_stream() as stream:
                group.barrier()
                if group.rank == 1:
                    raise ValueError("broken")
                with ost.capture(stream) as under_way:
                    for _ in range(20):
                        for operation in operations:
                            stream.submit(operation)
                with under_way.graph.instantiate() as executable:
                    executable.launch(stream)
                    try:
                        with group.watching("the graph"):
                            stream.synchronize()
                    finally:
                        assert np.isnan(target.to_numpy(stream)).all()

    begin = time.monotonic()
    with local_groups(size, deadline=300) as groups:
        found = outcomes(groups, work)
    assert time.monotonic() - begin < 60
    for rank, error in enumerate(found):
        if rank == 1:
            assert isinstance(error, ValueError)
        else:
            assert isinstance(error, GroupError) and "rank 1 raised ValueError" in str(error)


@pytest.mark.usefixtures("kernels")
def test_a_rank_that_never_comes_is_an_error_at_the_deadline() -> None:
    over = threading.Event()

    def work(group: Group) -> None:
        with ost.open_device("host") as device:
            made = open_collectives(group, device, "exchange")
            buffer = device.zeros(8, np.float32)
            if group.rank == 1:
                over.wait(60)
                return
            with device.create_stream() as stream:
                for operation in made.all_reduce(buffer, buffer):
                    stream.submit(operation)
                try:
                    with group.watching("the sum"):
                        stream.synchronize()
                finally:
                    over.set()

    on_ranks(2, lambda *_: None)  # what is compiled first may take longer than the deadline
    with local_groups(2, deadline=3) as groups:
        found = outcomes(groups, work)
    assert isinstance(found[0], GroupError) and "waited 3 s for the sum" in str(found[0])


@pytest.mark.usefixtures("kernels")
def test_what_is_too_long_goes_another_way() -> None:
    def work(group: Group) -> tuple[str, ...]:
        with ost.open_device("host") as device:
            beyond = open_collectives(group, device, "library")
            made = ExchangeCollectives(group, device, beyond, limit=4096)
            group.attach(made)
            with device.create_stream() as stream:
                for count in (1024, 1025):
                    one = device.array(np.full((1, count), group.rank + 1.0, np.float32))
                    out = device.zeros((1, count), np.float32)
                    lines = device.zeros((1, 2 * count), np.float32)
                    for operation in (
                        *made.all_reduce(one, out),
                        *made.all_gather(one, lines),
                        *made.accumulate(out, one),
                        *made.broadcast(lines, 1),
                    ):
                        stream.submit(operation)
                    assert (out.to_numpy(stream) == 6).all()
                    wanted = np.repeat([1.0, 2.0], count)
                    assert (lines.to_numpy(stream)[0] == wanted).all()
                odd = device.array(np.full(3, group.rank, np.uint8))
                both = device.zeros(6, np.uint8)
                for operation in made.all_gather(odd, both):
                    stream.submit(operation)
                assert both.to_numpy(stream).tolist() == [0, 0, 0, 1, 1, 1]
            assert made.programmatic(4096) and not made.programmatic(4100)
            told = group.statistics().collectives
            made.close()
            beyond.close()
            return told

    with local_groups(2, deadline=60) as groups:
        one, other = groups.run(work)
    assert one == other
    assert isinstance(one, tuple)
    assert one[-1].endswith("beyond: 3 made in peer memory, 6 beyond")


@pytest.mark.usefixtures("kernels")
def test_memory_at_an_address_of_before_is_kept() -> None:
    def work(group: Group) -> None:
        with ost.open_device("host") as device:
            beyond = open_collectives(group, device, "library")
            made = ExchangeCollectives(group, device, beyond, limit=4096)
            group.attach(made)
            for _ in range(3):  # the memory of one turn is likely that of the next
                one, out = (device.array(np.ones(64, np.float32)) for _ in range(2))
                (operation,) = made.all_reduce(one, out)
                assert {one, out} <= set(operation.keep)
                one.close()
                out.close()
                device.synchronize()
            made.close()
            beyond.close()

    with local_groups(2, deadline=60) as groups:
        groups.run(work)


def test_a_rank_that_cannot_share_is_an_error_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.driver.host.driver import HostDriver

    real = HostDriver.memory_open_shared

    def refuses(self: HostDriver, handle: bytes) -> int:
        if threading.current_thread().name == "rank 1":
            raise DriverError(217, "memory_open_shared", "no peer access")
        return real(self, handle)

    monkeypatch.setattr(HostDriver, "memory_open_shared", refuses)

    def work(group: Group) -> str:
        with ost.open_device("host") as device:
            with pytest.raises(
                NotAvailableError, match=r"rank 1: memory_open_shared.*no peer access"
            ):
                open_collectives(group, device, "exchange")
            return open_collectives(group, device, "auto").name

    with local_groups(3, deadline=60) as groups:
        assert groups.run(work) == ["the group's channel"] * 3


def test_ways_are_asked_for_alike_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(group: Group) -> None:
        with ost.open_device("host") as device:
            open_collectives(group, device, "exchange" if group.rank else "library")

    with local_groups(2, deadline=60) as groups:
        assert all(isinstance(one, DisagreementError) for one in outcomes(groups, work))

    monkeypatch.setenv("OSTINATO_COLLECTIVES", "exchange")

    def by_setting(group: Group) -> str:
        with ost.open_device("host") as device:
            with pytest.raises(InputError, match="way is 'fast'"):
                open_collectives(group, device, "fast")
            return type(open_collectives(group, device)).__name__

    with local_groups(2, deadline=60) as groups:
        assert groups.run(by_setting) == ["ExchangeCollectives"] * 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("blocks", [1, 2, 73, 512])
def test_parts_of_a_window_do_not_overlap(ranks: int, blocks: int) -> None:
    layout = Layout(ranks, blocks, 132, 1000)
    assert layout.mark(0) >= 4 * (blocks + 132)
    assert layout.mark(ranks - 1) + 4 <= 8 * layout.header
    assert layout.header % 16 == 0  # 128 bytes
    assert layout.sums >= 8 * (layout.header + 2 * ranks * layout.words)
    assert layout.shared >= layout.sums + 8 * layout.sums_words
    assert layout.nbytes >= layout.shared + 1000


def test_ranks_have_a_room_if_all_ask_for_the_same() -> None:
    """At one place of all windows, which other ranks reach; none where sizes differ."""

    def work(group: Group, more: int) -> tuple[int, bool]:
        with ost.open_device("host") as device:
            made = open_collectives(group, device, "exchange", room=1000 + more * group.rank)
            assert (made.room is None) == (made.shared_sum() is None)
            if made.room is None:
                return 0, False
            place = made.room.address - made.windows.array[group.rank]  # type: ignore[union-attr]
            return int(place), made.room.nbytes == 1000

    with local_groups(3, deadline=60) as groups:
        found = groups.run(work, 0)
        assert len(set(found)) == 1 and found[0][1]  # type: ignore[index]
    with local_groups(3, deadline=60) as groups:
        assert groups.run(work, 1) == [(0, False)] * 3


def test_a_sum_is_computed_in_parts_where_that_sends_fewer_bytes() -> None:
    """The sums of 32 and 64 rows of 1B and 8B, at 2, 4 and 8 ranks; beyond the limits none."""
    sizes = [n << 10 for n in (16, 64, 128, 256, 512, 1024)]

    def work(group: Group, device: ost.Device, made: ExchangeCollectives) -> list[bool]:
        assert made.limit == 1 << 20 and made.layout.nbytes <= 16 << 20
        assert made.exchanged_sum((1 << 18) + 1) is None
        assert not made._fits(exchange.limit_for(group.size) // 4 * 4 + 4)
        for nbytes in sizes:
            how = made.exchanged_sum(nbytes // 4)
            assert how is not None and how.scattered == made.scatters(nbytes)
            assert how.blocks <= 528 and how.words >= 256 * how.blocks
            by_products = group.size <= 4 or nbytes <= 64 << 10
            assert (made.sums(nbytes // 4) is not None) == by_products
        assert made.sums(3) is None  # no whole pairs
        return [made.scatters(nbytes) for nbytes in sizes]

    found = {size: on_ranks(size, work)[0] for size in (2, 4, 8)}
    assert found[2] == [False] * 5 + [True]  # two ranks send as much either way
    assert found[4] == [False] * 2 + [True] * 4
    assert found[8] == [False] + [True] * 5


def test_what_the_gpus_are_compared_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """`exchange_program`, with ranks as threads."""
    monkeypatch.setattr(exchange_program, "COUNTS", exchange_program.COUNTS[:5])

    def work(group: Group, device: ost.Device, made: ExchangeCollectives) -> None:
        exchange_program.compare(group, device, made)

    on_ranks(2, work)
