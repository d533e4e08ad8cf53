"""Groups of threads: exchanges, agreement, failures, and collectives on host devices."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.distributed import Group, LocalGroups, local_groups, open_collectives
from ostinato.distributed.collectives import bytes_of
from ostinato.errors import (
    DeadlineError,
    DisagreementError,
    GroupError,
    InputError,
    RankLostError,
)

SIZES = [1, 2, 3, 4, 8]


def outcomes(groups: LocalGroups, work: Callable[[Group], object]) -> list[object]:
    """What each rank's thread returned or raised."""
    found: list[object] = [None] * len(groups)

    def call(group: Group) -> None:
        try:
            with group:
                found[group.rank] = work(group)
        except BaseException as error:
            found[group.rank] = error

    threads = [threading.Thread(target=call, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


# ------------------------------------------------------------------------------------- exchanges


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_what_every_rank_brought(size: int) -> None:
    def work(group: Group) -> list[bytes]:
        group.barrier()
        return group.exchange("names", f"rank {group.rank}".encode())

    with local_groups(size) as groups:
        wanted = [f"rank {rank}".encode() for rank in range(size)]
        assert groups.run(work) == [wanted] * size


def test_exchanges_keep_their_order_whoever_is_first() -> None:
    def work(group: Group) -> list[list[bytes]]:
        got = []
        for turn in range(50):
            if (turn + group.rank) % 3 == 0:
                time.sleep(0.0005)
            got.append(group.exchange(f"turn {turn}", bytes([turn, group.rank])))
        return got

    with local_groups(4) as groups:
        wanted = [[bytes([turn, rank]) for rank in range(4)] for turn in range(50)]
        assert groups.run(work) == [wanted] * 4


@pytest.mark.parametrize("root", [2, np.int64(2)])
def test_broadcast_gives_the_roots(root: int) -> None:
    with local_groups(3) as groups:
        got = groups.run(lambda group: group.broadcast("seed", bytes([group.rank]), root=root))
    assert got == [b"\2"] * 3


@pytest.mark.parametrize("root", [-1, 2, 1.0, True])
def test_a_root_that_is_no_rank_is_refused(root: Any) -> None:
    with local_groups(2) as groups, pytest.raises(InputError, match="root is"):
        groups.run(lambda group: group.broadcast("seed", b"1", root=root))


@pytest.mark.parametrize("payload", ["text", np.zeros(3, np.float32), bytearray(3)])
def test_a_payload_that_is_not_bytes_is_refused(payload: Any) -> None:
    with local_groups(2) as groups, pytest.raises(InputError, match="must be bytes"):
        groups.run(lambda group: group.exchange("values", payload))


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda g: g.broadcast("seed", b"1", root=g.rank), ("from rank 0", "from rank 1")),
        (lambda g: g.exchange("prefill" if g.rank else "decode"), ("'prefill'", "'decode'")),
        (
            lambda g: g.agree("key rows=1", ["embed", f"head of {g.rank // 2}", "end"]),
            ("key rows=1", "line 1 of 3", "'head of 0', rank 2 has 'head of 1'"),
        ),
        (lambda g: g.agree("key", ["a", "b"][: 2 - g.rank // 3]), ("nothing more",)),
    ],
    ids=["roots", "calls", "a line", "a missing line"],
)
def test_ranks_that_differ_all_raise(
    work: Callable[[Group], object], words: tuple[str, ...]
) -> None:
    with local_groups(4) as groups:
        got = outcomes(groups, work)
    for one in got:
        assert type(one) is DisagreementError and all(word in str(one) for word in words), one


# -------------------------------------------------------------------------------------- failures


def test_an_exception_of_one_rank_ends_the_others() -> None:
    def work(group: Group) -> None:
        if group.rank == 2:
            raise ValueError("the weights of rank 2 are gone")
        group.barrier()

    with local_groups(4, deadline=30) as groups:
        got = outcomes(groups, work)
    assert isinstance(got[2], ValueError)
    for rank in (0, 1, 3):
        error = got[rank]
        assert type(error) is RankLostError and error.rank == 2
        assert "rank 2 raised ValueError: the weights of rank 2 are gone" in str(error)


def test_a_rank_that_leaves_is_found_lost() -> None:
    with local_groups(3, deadline=30) as groups:
        got = outcomes(groups, lambda g: None if g.rank == 1 else g.barrier())
    assert got[1] is None
    assert type(got[0]) is RankLostError and "rank 1 has left" in str(got[0])


def test_a_rank_that_does_not_come_is_named_at_the_deadline() -> None:
    released = threading.Event()

    def work(group: Group) -> None:
        if group.rank == 1:
            released.wait(60)
        else:
            try:
                group.barrier("the first token")
            finally:
                released.set()

    with local_groups(3, deadline=0.2) as groups:
        got = outcomes(groups, work)
    assert type(got[0]) is DeadlineError and type(got[2]) is DeadlineError
    assert "'the first token'" in str(got[0]) and "did not come: 1" in str(got[0])


def test_a_failed_group_stays_failed() -> None:
    def work(group: Group) -> str:
        group.fail(RuntimeError("over"))
        with pytest.raises(GroupError, match="over"):
            group.exchange("anything")
        with pytest.raises(GroupError, match="over"):
            group.check()
        return "seen"

    with local_groups(2) as groups:
        assert groups.run(work) == ["seen", "seen"]


def test_a_wait_for_the_device_has_a_deadline() -> None:
    def work(group: Group) -> None:
        if group.rank == 0:
            with group.watching("a step"):
                while group.failure is None:  # as a stream that waits for an aborted collective
                    time.sleep(0.01)
        else:
            while group.failure is None:
                time.sleep(0.01)
            group.check()

    with local_groups(2, deadline=0.2) as groups:
        got = outcomes(groups, work)
    assert all(type(one) is DeadlineError and "a step" in str(one) for one in got)


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_sizes_that_are_none(size: object) -> None:
    with pytest.raises(InputError, match="size"):
        local_groups(size)  # type: ignore[arg-type]


def test_a_size_is_any_whole_number() -> None:
    with local_groups(np.int64(2)) as groups:  # type: ignore[arg-type]
        assert [type(group.size) for group in groups] == [int, int]


# ----------------------------------------------------------------------------------- collectives


def on_device(work: Callable[[Group, ost.Device], object]) -> Callable[[Group], object]:
    def call(group: Group) -> object:
        with ost.open_device("host") as device:
            return work(group, device)

    return call


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ["eager", "captured", "recorded"])
def test_collectives_give_every_rank_the_same(size: int, way: str) -> None:
    def work(group: Group, device: ost.Device) -> list[bytes]:
        rng = np.random.default_rng(group.rank)
        values = rng.standard_normal((3, 5)).astype(np.float32)
        part, total, target = (device.array(values) for _ in range(3))
        partial = device.array(values)
        gathered = device.zeros((3, 5 * size), np.float32)
        root = device.array(values)
        stream = device.create_stream()
        collectives = open_collectives(group, device)
        operations = (
            *collectives.all_reduce(part, total),
            *collectives.accumulate(target, partial),
            *collectives.all_gather(part, gathered),
            *collectives.broadcast(root, size - 1),
        )

        def run() -> None:
            for operation in operations:
                stream.submit(operation)

        times = 1
        if way == "eager":
            run()
        elif way == "captured":
            with ost.capture(stream) as under_way:
                run()
            graph = under_way.graph
        else:
            with ost.record(stream) as recording:
                run()
            graph = recording.build()
        if way != "eager":
            names = [node.name for node in graph.nodes()]
            assert names == ["all_reduce", "accumulate", "all_gather", "broadcast"]
            executable = graph.instantiate(upload=stream)
            partial.set(values, stream)
            executable.launch(stream)
            times = 1 if way == "captured" else 2
        every = [
            np.random.default_rng(r).standard_normal((3, 5)).astype(np.float32) for r in range(size)
        ]
        wanted = every[0].copy()
        for more in every[1:]:
            wanted += more
        assert total.to_numpy(stream).tobytes() == wanted.tobytes()
        grown = values.copy()
        for _ in range(times):
            grown += wanted
        np.testing.assert_array_equal(target.to_numpy(stream), grown)
        assert not partial.to_numpy(stream).any()
        np.testing.assert_array_equal(gathered.to_numpy(stream), np.concatenate(every, axis=1))
        np.testing.assert_array_equal(root.to_numpy(stream), every[-1])
        return [total.to_numpy(stream).tobytes(), gathered.to_numpy(stream).tobytes()]

    with local_groups(size) as groups:
        got = groups.run(on_device(work))
    assert all(one == got[0] for one in got)


def test_recorded_collectives_stay_in_order_in_a_shuffled_graph() -> None:
    """On different memory, so that nothing else orders them."""

    def work(group: Group) -> list[bytes]:
        from ostinato.driver.host.driver import HostDriver

        with ost.Device(HostDriver(shuffle=group.rank)) as device:
            stream = device.create_stream()
            buffers = [device.array(np.full(4, i + group.rank, np.float32)) for i in range(6)]
            collectives = open_collectives(group, device)
            with ost.record(stream) as recording:
                for buffer in buffers:
                    for operation in collectives.all_reduce(buffer, buffer):
                        stream.submit(operation)
            executable = recording.build().instantiate(upload=stream)
            for _ in range(3):
                executable.launch(stream)
            return [buffer.to_numpy(stream).tobytes() for buffer in buffers]

    with local_groups(3, deadline=20) as groups:
        got = groups.run(work)
    assert got[0] == got[1] == got[2]


FLOATS_AND_INTS = "12 bytes of float32", "12 bytes of int32"


@pytest.mark.parametrize(
    ("what", "buffers", "words"),
    [
        ("all_reduce", lambda r: 2 * [(4 + r, "f")], ("of 4 float32", "of 5 float32")),
        # As many bytes of other dtypes would be read as numbers that nobody sent.
        ("all_gather", lambda r: [(3, "fi"[r]), (6, "fi"[r])], FLOATS_AND_INTS),
        ("broadcast", lambda r: [(3, "fi"[r])], FLOATS_AND_INTS),
    ],
)
def test_collectives_that_differ_are_an_error_on_all_ranks(
    what: str, buffers: Callable[[int], list[tuple[int, str]]], words: tuple[str, str]
) -> None:
    def work(group: Group, device: ost.Device) -> None:
        stream = device.create_stream()
        arguments = [device.zeros(*one) for one in buffers(group.rank)]
        for operation in getattr(open_collectives(group, device), what)(*arguments):
            stream.submit(operation)
        with group.watching(what):
            stream.synchronize()

    with local_groups(2, deadline=20) as groups:
        got = outcomes(groups, on_device(work))
    for one in got:
        assert type(one) is DisagreementError and all(word in str(one) for word in words), one


def test_values_whose_letter_numpy_does_not_know_are_named_by_it() -> None:
    assert bytes_of(8, ord("f")) == "8 bytes of float32"
    assert bytes_of(8, ord("E")) == "8 bytes of E"  # bfloat16, with ml_dtypes


@pytest.mark.parametrize(
    ("what", "one", "other"),
    [
        ("accumulate", slice(0, 4), slice(0, 4)),
        ("accumulate", slice(0, 4), slice(3, 7)),
        ("all_reduce", slice(3, 7), slice(0, 4)),
    ],
)
def test_buffers_that_share_memory_are_refused(
    what: str, one: slice, other: slice, host_device: ost.Device
) -> None:
    with local_groups(1) as groups:
        collectives = open_collectives(groups[0], host_device)
        buffer = host_device.zeros(8, np.float32)
        with pytest.raises(InputError, match=f"{what}: the two buffers share memory"):
            getattr(collectives, what)(buffer[one], buffer[other])
        getattr(collectives, what)(buffer[:4], buffer[4:])  # behind each other


def test_a_collective_whose_rank_died_ends() -> None:
    def work(group: Group, device: ost.Device) -> None:
        stream = device.create_stream()
        buffer = device.zeros(4, np.float32)
        operations = open_collectives(group, device).all_reduce(buffer, buffer)
        if group.rank == 1:
            raise RuntimeError("out of luck")
        for operation in operations:
            stream.submit(operation)
        with group.watching("the sum"):
            stream.synchronize()

    with local_groups(3, deadline=30) as groups:
        got = outcomes(groups, on_device(work))
    assert type(got[0]) is RankLostError and type(got[2]) is RankLostError
    assert "out of luck" in str(got[0])


def test_a_group_keeps_nothing_of_collectives_that_are_closed() -> None:
    """It may live for long, and the devices that worked in it did not."""
    devices: list[weakref.ref[ost.Device]] = []

    def work(group: Group) -> None:
        for _ in range(3):
            with ost.open_device("host") as device:
                devices.append(weakref.ref(device))
                with open_collectives(group, device):
                    assert len(group.statistics().collectives) == 1
            del device
        gc.collect()
        assert group.statistics().collectives == ()

    with local_groups(2) as groups:
        groups.run(work)
        gc.collect()
        assert len(devices) == 6 and not any(device() for device in devices)


def test_a_failure_aborts_what_is_attached_then_or_later_and_no_more() -> None:
    class Worker:
        def __init__(self) -> None:
            self.aborted = 0

        def abort(self) -> None:
            self.aborted += 1

        def described(self) -> str:
            return ""

        def close(self) -> None:
            pass

    first, gone, second, late = (Worker() for _ in range(4))
    with local_groups(1) as groups:
        for worker in (first, gone, second):
            groups[0].attach(worker)
        groups[0].detach(gone)
        groups[0].fail(RuntimeError("over"))
        groups[0].attach(late)
        assert [one.aborted for one in (first, gone, second, late)] == [1, 0, 1, 1]


@pytest.mark.parametrize(
    "call",
    [
        lambda c, d: c.all_reduce(d.zeros(3, np.float32), d.zeros(4, np.float32)),
        lambda c, d: c.all_reduce(d.zeros(3, np.int32), d.zeros(3, np.int32)),
        lambda c, d: c.accumulate(d.zeros(0, np.float32), d.zeros(0, np.float32)),
        lambda c, d: c.all_gather(d.zeros((2, 3), np.float32), d.zeros((2, 4), np.float32)),
        lambda c, d: c.all_gather(d.zeros((2, 3), np.float32), d.zeros((2, 3), np.int32)),
        lambda c, d: c.broadcast(d.zeros(3, np.float32), 1),
        lambda c, d: c.broadcast(d.zeros(3, np.float32), -1),
    ],
)
def test_buffers_that_do_not_fit_are_refused(
    call: Callable[[object, ost.Device], object], host_device: ost.Device
) -> None:
    with local_groups(1) as groups, pytest.raises(InputError):
        call(open_collectives(groups[0], host_device), host_device)
