"""Joins: right answers on both drivers and by the CUDA kernels on the emulator."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings

import ostinato as ost
from ostinato.device import Device, open_device
from ostinato.driver.api import CaptureMode
from ostinato.driver.host.driver import HostDriver
from ostinato.errors import (
    CaptureError,
    ClosedError,
    DriverError,
    GraphError,
    InputError,
    OutOfMemoryError,
    Status,
)
from ostinato.relational import Joiner, JoinKey, build_index, hash_join
from ostinato.relational import joiner as joiner_module
from ostinato.relational.block import RING_DEPTH
from ostinato.relational.ring import RingTurn
from ostinato.step import Reason
from ostinato.testing import FaultyDriver, HeldStream
from tests import interrupted
from tests.relational.tables import (
    BORDERS,
    FAR_BORDERS,
    Shape,
    check,
    expected,
    in_order,
    pairs,
    shapes,
)
from tests.threads import in_threads

ONE_JOINER = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # for all examples


def column(values: Any, kind: Any = np.int64) -> dict[str, np.ndarray]:
    return {"k": np.asarray(values, kind)}


# ---------------------------------------------------------------------------------------- answers


@pytest.mark.sanitize
def test_a_small_join(joiner: Joiner) -> None:
    result = joiner.join(column([3, -1, 7, 3]), column([7, 3, 3, 9]), on="k")
    assert pairs(result).tolist() == [[0, 1], [0, 2], [2, 0], [3, 1], [3, 2]]
    assert len(result) == len(result.left_rows) == len(result.right_rows) == 5
    assert result.left_rows.dtype == result.right_rows.dtype == np.uint32


@settings(max_examples=settings().max_examples // 2, suppress_health_check=ONE_JOINER)
@given(shape=shapes())
@example(shape=Shape(257, 256, (np.int64, np.int32), 2, 6.0, 3, True))
def test_random_joins(joiner: Joiner, shape: Shape) -> None:
    check(joiner, *shape.tables())


@pytest.mark.sanitize
@pytest.mark.parametrize("right", BORDERS)
@pytest.mark.parametrize("left", BORDERS)
def test_at_borders(joiner: Joiner, left: int, right: int) -> None:
    check(joiner, *Shape(left, right, (np.int64,), 300, 0.0, left + right, False).tables())


@pytest.mark.parametrize("rows", FAR_BORDERS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_at_far_borders(joiner: Joiner, side: str, rows: int) -> None:
    shape = (rows, 300) if side == "left" else (300, rows)
    check(joiner, *Shape(*shape, (np.int32,), 30_000, 0.0, rows, False).tables())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("rows", "kernels"), [(2**24, 5), (2**24 + 1, 7)])
def test_four_levels_of_the_scan(
    request: pytest.FixtureRequest, way: str, rows: int, kernels: int
) -> None:
    joiner: Joiner = request.getfixturevalue(f"{way}_joiner")
    left = np.full(rows, -1, np.int32)
    left[[0, 256, 65_536, rows - 1]] = 5, 6, 5, 6
    result = joiner.join(column(left, np.int32), column([5, 6, 6], np.int32), on="k")
    assert result.key.scan.kernels == kernels
    assert pairs(result).tolist() == [
        *([0, 0], [256, 1], [256, 2], [65_536, 0], [rows - 1, 1], [rows - 1, 2])
    ]


@pytest.mark.sanitize
@pytest.mark.parametrize(("left", "right"), [(300, 1), (1, 3000), (40, 50), (257, 300)])
def test_all_keys_equal(joiner: Joiner, left: int, right: int) -> None:
    result = check(joiner, column(np.full(left, -7)), column(np.full(right, -7)))
    assert len(result) == left * right
    assert result.retries <= 1


def test_many_equal_keys_are_no_long_chain(host_joiner: Joiner) -> None:
    rows = 300_000
    result = host_joiner.join(column([4, 5]), column(np.full(rows, 5)), on="k")
    left, right = result.to_numpy()
    assert (left == 1).all()
    np.testing.assert_array_equal(np.sort(right), np.arange(rows))


@pytest.mark.sanitize
@pytest.mark.parametrize("times", [1, 700])
def test_matches_that_are_few_and_far_between(joiner: Joiner, times: int) -> None:
    """One tile of the output spans more left rows than `materialize` keeps at hand."""
    left = np.arange(9000)
    right = np.repeat([0, 3, 2500, 2501, 4999, 4999, 8999, 10_000], times)
    check(joiner, column(left), column(right))


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.int64, np.uint64])
def test_every_bit_pattern_is_a_key(joiner: Joiner, kind: type) -> None:
    bits = np.dtype(kind).itemsize * 8
    patterns = {0, 1, 2**bits - 1, 2**bits - 2, 2 ** (bits - 1), 2 ** (bits - 1) - 1}
    patterns |= {0xFFFFFFFF, 0xFFFFFFFE, 0xA5A5A5A5} | (
        {0xA5A5A5A5A5A5A5A5} if bits > 32 else set()
    )
    if bits > 32:
        patterns |= {p << 32 for p in (1, 0xFFFFFFFF)}
    keys = np.array(sorted(patterns), f"u{bits // 8}").view(kind)
    result = check(joiner, column(keys, kind), column(keys[::-1], kind))
    assert len(result) == len(keys)


def test_halves_of_a_composite_key_do_not_mix(joiner: Joiner) -> None:
    left = {"a": np.array([1, 2, 1]), "b": np.array([2, 1, 1], np.int32)}
    right = {"a": np.array([2, 1, 2]), "b": np.array([1, 2, 2], np.int32)}
    assert pairs(joiner.join(left, right, on=["a", "b"])).tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("arity", [1, 4, 255])
def test_many_key_columns(joiner: Joiner, arity: int) -> None:
    types = tuple((np.int64, np.uint32)[i % 2] for i in range(arity))
    left, right = Shape(40, 40, types, 2, 6.0, arity, True).tables()
    for name in left:  # so that some rows match
        right[name][:20] = left[name][:20]
    check(joiner, left, right)


def test_names_may_differ(joiner: Joiner) -> None:
    left, right = {"to": np.array([1, 2])}, {"from": np.array([2, 2, 3])}
    assert pairs(joiner.join(left, right, on=[("to", "from")])).tolist() == [[1, 0], [1, 1]]
    index = joiner.build_index(right, on="from")
    assert pairs(joiner.join(left, index, on="to")).tolist() == [[1, 0], [1, 1]]
    assert pairs(joiner.join(left, index, on=[("to", "from")])).tolist() == [[1, 0], [1, 1]]
    with pytest.raises(InputError, match="key columns are from, and other are asked for"):
        joiner.join(left, index, on=[("to", "other")])


# --------------------------------------------------------------------------------- graphs and keys


def test_a_key_is_captured_once_and_replayed_with_other_tables(joiner: Joiner) -> None:
    rng = np.random.default_rng(5)
    before = joiner.statistics()
    sizes = [int(n) for n in rng.integers(1, 2000, 60)]
    for rows in sizes:
        left, right = (column(rng.integers(0, 3000, n)) for n in (rows, int(rng.integers(0, 900))))
        result = joiner.join(left, right, on="k", capacity=4096)
        np.testing.assert_array_equal(pairs(result), expected(left, right))
    after = joiner.statistics()
    classes = {1 << (n - 1).bit_length() for n in sizes}
    assert after.cache.captures - before.cache.captures == len(classes)
    assert after.replays - before.replays == after.joins - before.joins == 60
    assert after.kernels_compiled == before.kernels_compiled
    assert after.retries == 0


@pytest.mark.parametrize(
    "joiner",
    [
        "host",
        pytest.param("emulated", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
    indirect=True,
)
def test_right_sides_have_three_classes(joiner: Joiner) -> None:
    def keys(*rows: int) -> set[JoinKey]:
        tables = [column(np.arange(n)) for n in rows]
        return {
            check(joiner, column([5, n - 1, n]), t).key for n, t in zip(rows, tables, strict=True)
        }

    assert len(keys(0, 1, 100, 5000)) == len(keys(16_384)) == len(keys(16_385, 20_000)) == 1
    assert len(keys(1, 16_384)) == 1
    assert len(keys(16_384, 16_385)) == len(keys(262_144, 262_145)) == 2


def test_eager_gives_the_same(joiner: Joiner) -> None:
    with Joiner(joiner.device, graphs=False) as eager:
        left, right = Shape(700, 300, (np.int64,), 500, 1.0, 9, False).tables()
        check(eager, left, right)
        statistics = eager.statistics()
        assert statistics.eager == 3 and statistics.replays == statistics.cache.captures == 0


def test_the_environment_switches_graphs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_NO_GRAPHS", "1")
    with open_device("host") as device, Joiner(device) as joiner:
        check(joiner, column([1, 2]), column([2]))
        assert joiner.statistics().replays == 0


def test_graphs_leave_over_the_limit_and_come_again() -> None:
    with open_device("host") as device, Joiner(device, max_graphs=1) as joiner:
        for rows in (10, 1000, 10):
            check(joiner, column(np.arange(rows)), column([3]))
        assert joiner.statistics().cache.graphs == 1


# ------------------------------------------------------------------------ graphs that are not there


@pytest.fixture
def faulty() -> Iterator[tuple[FaultyDriver, Joiner]]:
    """A joiner without graphs yet, on a driver whose calls can be made to fail."""
    faults = FaultyDriver(HostDriver())
    with Device(faults) as device, Joiner(device) as joiner:
        yield faults, joiner


def replayed(joiner: Joiner, joins: int) -> list[int]:
    """Makes joins of one key, each with the right answer; which of them, from 1, were replays."""
    found = []
    for number in range(1, joins + 1):
        left, right = column([number, 3, 3]), column([3, number + 1, number])
        before = joiner.statistics()
        result = joiner.join(left, right, "k", capacity=64)
        np.testing.assert_array_equal(pairs(result), expected(left, right))
        after = joiner.statistics()
        assert after.replays + after.eager == before.replays + before.eager + 1
        if after.replays > before.replays:
            found.append(number)
    assert joiner.statistics().recoveries == 0
    return found


@pytest.mark.parametrize(
    ("call", "status", "times", "replays"),
    [
        ("graph_instantiate", Status.OUT_OF_MEMORY, 2, [6, 7, 8]),
        ("exec_upload", Status.OUT_OF_MEMORY, 2, [6, 7, 8]),
        ("launch_kernel", Status.STREAM_CAPTURE_INVALIDATED, 1, [2, 3]),
    ],
)
def test_a_graph_that_could_not_be_made_for_now_is_made_later(
    faulty: tuple[FaultyDriver, Joiner], call: str, status: Status, times: int, replays: list[int]
) -> None:
    """After 1 and 4 calls, which run launch by launch: such a join raised OutOfMemoryError."""
    faults, joiner = faulty
    faults.fail(call, status, times=times)
    assert replayed(joiner, replays[-1]) == replays
    assert joiner.statistics().cache.capture_failures == times


def test_a_key_that_cannot_be_captured_is_joined_launch_by_launch(
    faulty: tuple[FaultyDriver, Joiner],
) -> None:
    faults, joiner = faulty
    faults.fail("graph_instantiate", Status.NOT_SUPPORTED)
    assert replayed(joiner, 8) == []
    assert len(joiner.join(column(np.arange(300)), column([7]), "k")) == 1
    statistics = joiner.statistics()
    assert statistics.cache.capture_failures == statistics.replays == 1, "one key of two"
    assert sum(statistics.eager_reasons.values()) == statistics.eager == 8
    joiner.forget()
    assert replayed(joiner, 2) == [1, 2]


@pytest.mark.parametrize("before", [0, 3], ids=["first", "repeated"])
@pytest.mark.parametrize("status", [Status.LAUNCH_OUT_OF_RESOURCES, Status.OUT_OF_MEMORY])
def test_a_replay_that_is_refused_is_made_launch_by_launch(
    faulty: tuple[FaultyDriver, Joiner], before: int, status: Status
) -> None:
    faults, joiner = faulty
    assert replayed(joiner, before) == [*range(1, before + 1)]
    faults.fail("exec_launch", status)
    assert replayed(joiner, 4) == [2, 3, 4]
    assert joiner.statistics().eager_reasons == {Reason.REFUSED.value: 1}


def test_a_capture_of_another_library_refuses_joins_and_keeps_their_graph(joiner: Joiner) -> None:
    device, stream = joiner.device, joiner.stream
    left, right = (joiner.columns(column(values), "k") for values in ([1, 2], [2]))
    for _ in range(3):
        assert len(joiner.join(left, right)) == 1
    for _ in range(4):
        device.driver.stream_begin_capture(stream.handle, CaptureMode.THREAD_LOCAL)
        with pytest.raises(CaptureError, match="captur"):
            joiner.join(left, right)
        with suppress(DriverError):  # a driver may break it as it refuses the launch
            device.driver.graph_destroy(device.driver.stream_end_capture(stream.handle))
        assert len(joiner.join(left, right)) == 1
    statistics = joiner.statistics()
    assert (statistics.replays, statistics.eager, statistics.cache.captures) == (7, 0, 1)


def test_a_join_whose_capture_the_limits_refuse_is_made_launch_by_launch() -> None:
    with open_device("host") as device, Joiner(device, max_graphs=1) as joiner:
        joiner.cache.limits = ost.CaptureLimits(per_key=1)
        for rows in (10, 1000, 10, 1000, 1000):
            assert pairs(joiner.join(column(np.arange(rows)), column([3]), "k")).tolist() == [
                [3, 0]
            ]
        statistics = joiner.statistics()
        assert (statistics.replays, statistics.eager, statistics.cache.captures) == (4, 1, 2)


def test_a_capture_that_is_interrupted_leaves_the_device_as_it_was(
    joiner: Joiner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(joiner_module, "capture", cut)
    with pytest.raises(KeyboardInterrupt):
        joiner.join(column([1, 2]), column([2]), "k")
    monkeypatch.undo()
    check(joiner, column([5, 6]), column([6, 7]))
    assert joiner.statistics().recoveries == 0


def test_a_join_in_a_run_of_a_step_waits_for_no_thread_that_joins(joiner: Joiner) -> None:
    """A step holds its stream's turn; another thread's join must not wait for that turn with what
    the step's own join needs."""
    left, right = column([1, 2]), column([2])
    check(joiner, left, right)
    with joiner.stream.turn.lock:
        other = threading.Thread(target=lambda: check(joiner, left, right))
        other.start()
        other.join(0.2)
        own = threading.Thread(target=joiner.statistics)
        own.start()
        own.join(20)
        assert not own.is_alive(), "the other join holds the joiner while it waits for the turn"
    other.join()


# ------------------------------------------------------------------------------ overflow and retry


@pytest.mark.sanitize
@pytest.mark.parametrize("capacity", [0, 1, 255, 256])
def test_an_output_that_does_not_fit_is_retried(joiner: Joiner, capacity: int) -> None:
    left, right = Shape(300, 200, (np.int64,), 50, 0.0, capacity, False).tables()
    wanted = expected(left, right)
    before = joiner.statistics()
    result = joiner.join(left, right, on="k0", capacity=capacity)
    np.testing.assert_array_equal(pairs(result), wanted)
    assert len(wanted) > 256 and result.retries == 1
    assert joiner.statistics().retries - before.retries == 1
    assert joiner.statistics().joins - before.joins == 1
    assert result.key.output >= len(wanted) > result.key.output // 2


@pytest.mark.parametrize("room", [1023, 1024, 1025])
def test_an_output_that_just_fits(joiner: Joiner, room: int) -> None:
    left, right = column(np.zeros(1024)), column(np.zeros(1))
    result = joiner.join(left, right, on="k", capacity=room)
    assert len(result) == 1024 and result.retries == (room < 1024) * 0  # the class of 1023 is 1024
    result = joiner.join(column(np.zeros(1025)), right, on="k", capacity=room)
    assert len(result) == 1025 and result.retries == (room < 1025)


def test_an_overflow_writes_nothing(joiner: Joiner, monkeypatch: pytest.MonkeyPatch) -> None:
    device = joiner.device
    taken: list[Any] = []
    take = joiner._outputs.take

    def watched(capacity: int) -> Any:
        lease = take(capacity)
        ost.fill(joiner.stream, lease.buffer, 77)
        taken.append(lease)
        return lease

    monkeypatch.setattr(joiner._outputs, "take", watched)
    result = joiner.join(column(np.zeros(40)), column(np.zeros(40)), on="k", capacity=2)
    small, large = taken
    assert (device.to_numpy(small.buffer) == 77).all()
    assert (device.to_numpy(large.buffer)[:, :1600] != 77).any()
    assert (device.to_numpy(large.buffer)[:, 1600:] == 77).all()
    assert len(result) == 1600


def test_more_rows_than_numbers_is_an_error(joiner: Joiner) -> None:
    """65,536 x 65,536 equal keys are 2**32 rows: one more than 32 bits count."""
    rows = 65_536
    left, right = column(np.zeros(rows), np.int32), column(np.zeros(rows), np.int32)
    with pytest.raises(InputError, match=r"4294967296 rows.*4294967295.*nothing was written"):
        joiner.join(left, right, on="k")
    check(joiner, column([1, 2]), column([2, 2]))


# ------------------------------------------------------------------- without reading the count back


def test_many_joins_under_way(joiner: Joiner) -> None:
    rng = np.random.default_rng(8)
    tables = [
        tuple(column(rng.integers(0, 400, n)) for n in rng.integers(1, 500, 2))
        for _ in range(3 * RING_DEPTH)
    ]
    pending = [joiner.submit(left, right, "k", capacity=16) for left, right in tables]
    for (left, right), one in reversed(list(zip(tables, pending, strict=True))):
        np.testing.assert_array_equal(pairs(one.result()), expected(left, right))
        assert one.result() is one.result()


def test_columns_live_until_the_join_is_done_and_no_longer(joiner: Joiner) -> None:
    device, rows = joiner.device, np.arange(1000)
    for _ in range(2):  # takes all memory beforehand: giving some back waits for the stream
        joiner.join(column(rows), column(rows), on="k")
    left, right = ({"k": device.array(rows[::step])} for step in (1, -1))
    seen = [weakref.ref(table["k"]) for table in (left, right)]
    gc.collect()
    device.synchronize()
    with HeldStream(joiner.stream) as held:
        pending = joiner.submit(left, right, "k")
        del left, right
        gc.collect()
        assert all(one() is not None for one in seen)
        assert not pending.done()
        held.release()
    np.testing.assert_array_equal(pairs(pending.result()), in_order(rows, rows[::-1]))
    assert pending.done()
    gc.collect()
    assert all(one() is None for one in seen)


def test_a_full_ring_waits(joiner: Joiner) -> None:
    left = joiner.columns(column([1, 2, 3]), "k")
    joiner.join(left, left)
    with HeldStream(joiner.stream) as held:
        pending = [joiner.submit(left, left) for _ in range(RING_DEPTH)]
        assert joiner.statistics().waits == 0
        held.release_after(0.2)
        pending.append(joiner.submit(left, left))
    assert joiner.statistics().waits == 1
    assert [len(one.result()) for one in pending] == [3] * (RING_DEPTH + 1)


def test_results_outlive_what_made_them_and_memory_is_used_again(joiner: Joiner) -> None:
    left, right = column([1, 2, 3]), column([3, 1])
    kept = joiner.join(left, right, on="k").left_rows[:1]  # a view of a view keeps all of it
    other = joiner.join(column([9, 9, 2]), column([9]), on="k")
    assert kept.to_numpy(joiner.stream)[0] in (0, 2)
    address = other.left_rows.address
    del other
    gc.collect()
    again = joiner.join(left, right, on="k")
    assert again.left_rows.address == address


def test_memory_of_a_result_in_a_cycle_is_not_freed_and_used_again(joiner: Joiner) -> None:
    left = joiner.columns(column(np.arange(300)), "k")
    kept: list[Any] = [joiner.join(left, left)]
    kept.append(kept)
    buffer = weakref.ref(kept[0]._lease.buffer)
    del kept
    gc.collect()
    assert buffer() is not None
    joiner.device.synchronize()
    np.testing.assert_array_equal(pairs(joiner.join(left, left)), [[i, i] for i in range(300)])


def test_an_index_is_used_by_joins_under_way_when_it_is_closed(joiner: Joiner) -> None:
    index = joiner.build_index(column(np.arange(500)), "k")
    pending = joiner.submit(column([7, 499, 500]), index, "k", capacity=8)
    index.close()
    assert pairs(pending.result()).tolist() == [[0, 7], [1, 499]]
    with pytest.raises(ClosedError):
        joiner.join(column([7]), index, on="k")
    check(joiner, column([1, 2]), column([2]))


def test_a_capture_disturbs_no_other_thread(
    joiner: Joiner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new key is captured while another thread uploads, waits and reads."""
    pending = joiner.submit(column(np.arange(50)), column([3]), "k")
    launch, seen = joiner_module.launch, []

    def work() -> None:
        seen.append(pairs(pending.result()).tolist())
        seen.append(joiner.columns(column([1]), "k").rows)

    def launch_beside(*arguments: Any) -> None:
        if not seen:
            other = threading.Thread(target=work)
            other.start()
            other.join()
        launch(*arguments)

    monkeypatch.setattr(joiner_module, "launch", launch_beside)
    call = joiner._call(pending._key)
    joiner.cache.get_or_capture("new", joiner_module._JoinWork(joiner, call, lambda: None).build)
    assert seen == [[[3, 0]], 1]


def test_threads_share_a_joiner(joiner: Joiner) -> None:
    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(12):
            left, right = (column(rng.integers(0, 90, n)) for n in rng.integers(1, 120, 2))
            result = joiner.join(left, right, on="k", capacity=8)
            np.testing.assert_array_equal(pairs(result), expected(left, right))

    in_threads(*(partial(work, seed) for seed in range(4)))


# ------------------------------------------------------------------------------- state and lifetime


def test_a_graph_that_somebody_else_launches_does_nothing(joiner: Joiner) -> None:
    left, right = column([1, 2, 3]), column([3, 1])
    check(joiner, left, right)
    for key in list(joiner.cache.keys()):
        assert joiner.cache.replay(key, joiner.stream)
    check(joiner, left, right)
    assert joiner.statistics().recoveries == 0


def test_an_interruption_after_the_launch_is_recovered_from(
    joiner: Joiner, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = column(np.arange(400)), column(np.arange(0, 800, 2))
    check(joiner, left, right)

    def cut(turn: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(joiner._ring, "launched", cut)
    with pytest.raises(KeyboardInterrupt):
        joiner.join(left, right, on="k0" if "k0" in left else "k")
    monkeypatch.undo()
    # Another result than that of the interrupted join, which the device has said to be done.
    assert pairs(joiner.join(column([5, 6]), column([6, 7]), "k")).tolist() == [[1, 0]]
    check(joiner, left, right)
    assert joiner.statistics().recoveries == 1


def test_an_interruption_at_any_line_spoils_no_later_join(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Memory that was being replaced is not used, and a later join does not get the result of the
    one that was cut."""
    folder = interrupted.PACKAGE + "relational/"
    files = (folder + "ring.py", folder + "workspace.py")
    monkeypatch.setattr(interrupted, "PACKAGE", files)
    monkeypatch.setattr("ostinato.relational.ring._SPINS", 1)  # few rounds of the same lines
    many, few = column(np.arange(40) % 7), column([5, 6, 5])
    with open_device("host") as device:
        for at in itertools.count(1, 1 if request.config.getoption("--all-lines") else 3):
            with Joiner(device, graphs=False) as joiner:
                sides = [joiner.columns(table, "k") for table in (column([2, 3, 2]), few)]
                assert len(joiner.join(*sides)) == 0
                where = interrupted.interrupt(lambda j=joiner: j.join(many, many, "k"), at)
                assert len(joiner.join(*sides)) == 0, where
                result = pairs(joiner.join(many, few, "k"))
                np.testing.assert_array_equal(result, expected(many, few), where or "")
            if where is None:
                break
    assert at > 50


def test_an_eager_chain_cut_in_the_middle_is_recovered_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table is left with slots of the join that was cut."""
    left, right = column(np.arange(400)), column(np.arange(0, 800, 2))
    with open_device("host") as device, Joiner(device, graphs=False) as joiner:
        check(joiner, left, right)
        under_way = joiner.submit(left, right, "k")
        launch, calls = joiner_module.launch, [0]

        def cut(*arguments: Any) -> None:
            calls[0] += 1
            if calls[0] > 3:
                raise KeyboardInterrupt
            launch(*arguments)

        monkeypatch.setattr(joiner_module, "launch", cut)
        with pytest.raises(KeyboardInterrupt):
            joiner.join(left, right, on="k")
        monkeypatch.undo()
        check(joiner, left, right)
        assert joiner.statistics().recoveries == 1
        assert len(under_way.result()) == 200


def test_a_lost_join_is_an_error(joiner: Joiner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that the device does not count: its result never comes, and nobody waits for it."""
    left, right = column([1, 2]), column([2])
    check(joiner, left, right)

    def not_launched(call: object, enter: Callable[[], RingTurn]) -> RingTurn:
        turn = enter()
        joiner._ring.launched(turn)
        return turn

    monkeypatch.setattr(joiner, "_launch", not_launched)
    pending = joiner.submit(left, right, "k")
    monkeypatch.undo()
    with pytest.raises(GraphError, match="submit it again"):
        pending.result()
    check(joiner, left, right)


@pytest.mark.parametrize("graphs", [True, False], ids=["replay", "eager"])
def test_a_join_is_not_captured(device: Device, graphs: bool) -> None:
    left, right = (device.array(np.arange(n)) for n in (400, 300))
    with Joiner(device, graphs=graphs) as joiner:
        one, other = (joiner.columns({"k": buffer}, "k") for buffer in (left, right))
        small = joiner.columns(column([3, 4]), "k")
        index = joiner.build_index(small)
        assert len(joiner.join(small, small)) == 2
        for work in (
            lambda: joiner.join(one, other),  # the table would grow
            lambda: joiner.join(small, small),
            lambda: joiner.join(small, small, capacity=4000),  # memory of a result would be taken
            lambda: joiner.join(small, index),
            lambda: joiner.join(one, index),  # memory for the left side would be taken
            lambda: joiner.build_index(other),
        ):
            with ost.capture(joiner.stream) as capture:
                ost.copy(joiner.stream, left[:300], right)
                with pytest.raises(CaptureError, match="captur"):
                    work()
            assert len(capture.graph) == 1
            assert len(joiner.join(small, small)) == 2
        assert len(joiner.join(one, other)) == 300
        assert len(joiner.join(one, index)) == 2
        check(joiner, column([1, 2]), column([2]))


def test_a_joiner_that_is_dropped(device: Device) -> None:
    """With a join under way: its memory stays until the stream is done with it."""
    left = device.array(np.arange(500))
    for graphs in (True, False):
        stream = device.create_stream()
        joiner = Joiner(device, stream=stream, graphs=graphs)
        assert len(joiner.join({"k": left}, {"k": left}, "k")) == 500
        gc.collect()
        device.synchronize()
        with HeldStream(stream) as held:
            pending = joiner.submit({"k": left}, {"k": left}, "k")
            ring = weakref.ref(joiner._ring.pinned)
            del joiner, pending
            gc.collect()
            assert ring() is not None
            held.release()
        for _ in range(500):  # under a tool that slows the device down it takes some time
            device.synchronize()
            gc.collect()
            if ring() is None:
                break
            time.sleep(0.01)
        assert ring() is None


def test_a_closed_joiner(device: Device) -> None:
    joiner = Joiner(device)
    result = joiner.join(column([1, 2]), column([2]), on="k")
    pending = joiner.submit(column([1, 2]), column([2]), "k")
    index = joiner.build_index(column([1]), "k")
    joiner.close()
    joiner.close()
    for use in (
        lambda: joiner.join(column([1]), column([1]), on="k"),
        lambda: joiner.build_index(column([1]), "k"),
        lambda: joiner.columns(column([1]), "k"),
    ):
        with pytest.raises(ClosedError, match="joiner is closed"):
            use()
    assert device.to_numpy(result.left_rows).tolist() == [1]
    assert pairs(result).tolist() == [[1, 0]]
    assert pairs(pending.result()).tolist() == [[1, 0]]  # it was done, and fitted
    index.close()


def test_a_device_that_is_closed_before_its_joiner() -> None:
    """The ring's memory is gone with it; nothing reads it any more."""
    device = open_device("host")
    joiner = Joiner(device)
    done, left = joiner.submit(column([1, 2]), column([2]), "k"), column([1])
    assert len(done.result()) == 1
    pending = joiner.submit(left, left, "k")
    device.close()
    assert not pending.done() and done.done()
    with pytest.raises(ClosedError):
        pending.result()
    with pytest.raises(ClosedError):
        joiner.join(left, left, "k")
    joiner.close()


def test_memory_that_waits_for_later_joins_is_given_back_when_there_is_none() -> None:
    with Device(HostDriver(total_memory=1 << 20)) as device, Joiner(device) as joiner:
        left, right = (joiner.columns(column([1, 2]), "k") for _ in range(2))
        kept = [joiner.join(left, right, capacity=1 << 14) for _ in range(4)]  # 128 KiB each
        kept.clear()
        assert joiner.statistics().output_bytes == 4 << 17
        assert len(joiner.join(left, right, capacity=1 << 16)) == 2  # 512 KiB
        assert joiner.statistics().output_bytes == 1 << 19
        with pytest.raises(OutOfMemoryError):
            joiner.join(left, right, capacity=1 << 20)
        assert len(joiner.join(left, right)) == 2


def test_a_closed_column_is_refused_and_the_next_join_is_right(joiner: Joiner) -> None:
    buffer = joiner.device.array(np.arange(5))
    columns = joiner.columns({"k": buffer}, "k")
    buffer.close()
    for left, right in ((columns, column([1])), (column([1]), columns)):
        with pytest.raises(ClosedError):
            joiner.join(left, right, on="k")
    check(joiner, column([1, 2]), column([2]))


def test_without_a_joiner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_DEVICE", "host")
    left, right = column([1, 2, 2]), column([2, 5])
    result = hash_join(left, right, on="k")
    assert pairs(result).tolist() == [[1, 0], [2, 0]]
    index = build_index(right, on="k")
    assert pairs(hash_join(left, index, on="k")).tolist() == [[1, 0], [2, 0]]
    default = joiner_module._default[0]
    default.close()
    assert len(hash_join(left, right, on="k")) == 2
    joiner_module._default[0].close()
    joiner_module._default[0].device.close()
    default.device.close()


def test_joiners_in_turn(device: Device) -> None:
    """Chains of several joins overlap, some of which must be repeated; each has its own answer."""
    rng = np.random.default_rng(21)
    with ExitStack() as stack:
        joiners = [stack.enter_context(Joiner(device)) for _ in range(4)]
        one, other = (column(rng.integers(0, 500, n)) for n in (700, 900))
        indexes = [joiner.build_index(other, "k") for joiner in joiners]
        wanted, joins = expected(one, other), []
        for number in range(60):
            joiner, index = joiners[number % 4], indexes[number % 4]
            left, right = (column(rng.integers(0, 300, n)) for n in rng.integers(1, 600, 2))
            capacity = int(rng.choice([4, 4096]))
            pending = joiner.submit(left, right, "k", capacity=capacity)
            joins.append((expected(left, right), pending))
            joins.append((wanted, joiner.submit(one, index, "k")))
        for answer, pending in joins:
            np.testing.assert_array_equal(pairs(pending.result()), answer)
        with pytest.raises(InputError, match="another joiner"):
            joiners[0].join(one, indexes[1], "k")
