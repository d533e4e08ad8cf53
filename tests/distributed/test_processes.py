"""Ranks that are processes: forming a group, launchers' environments, and what dies or stops."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ostinato.distributed import (
    join_group,
    launch,
    new_group_id,
    open_group,
    place_of,
    sockets,
)
from ostinato.distributed.launch import first_host
from ostinato.distributed.sockets import (
    _LENGTHS,
    HubAddress,
    Reader,
    SocketChannel,
    beat_of,
    packed,
)
from ostinato.errors import (
    DeadlineError,
    GroupError,
    InputError,
    NotAvailableError,
    RankLostError,
    SettingsError,
)
from tests.distributed.starting import (
    MOMENTS,
    environment,
    finish,
    free_port,
    on_threads,
    ranks,
    require_typed_errors,
    start,
    waits,
)

FAULTS = ("kill", "stop", "raise", "key", "build")
QUICK = {"kill": "loop", "raise": "prompt"}
"""A moment at which each is quick.  Ranks that differ are shown with threads in `make test`."""


def of_torchrun(rank: int, port: int, size: int = 3) -> dict[str, str]:
    told = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    return told | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_processes_decode_together() -> None:
    found = ranks(2, "host")
    assert [code for code, _, _ in found] == [0, 0], found
    assert found[0][1] == found[1][1] != ""


@pytest.mark.parametrize(
    ("fault", "moment"),
    [
        # Each stop takes a whole deadline; one moment of each fault is enough for each day.
        pytest.param(fault, moment, marks=[pytest.mark.slow] if slow else [])
        for moment in MOMENTS
        for fault in FAULTS
        for slow in [moment != QUICK.get(fault)]
    ],
)
def test_a_fault_of_one_rank_is_a_typed_error_on_the_others(fault: str, moment: str) -> None:
    """Within the deadline, with a status that is not 0, and with its name.  A rank that was stopped
    and goes on later has the error too."""
    deadline = 6 if waits(fault, moment) else 60  # the others are noticed at once
    found = ranks(3, "host", deadline=deadline, faulty=f"{fault} {moment}")
    require_typed_errors(found, fault)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_rank_with_the_hub(fault: str, moment: str) -> None:
    """As torchrun starts them: the hub is in rank 0."""
    deadline = "6" if waits(fault, moment) else "60"
    port = free_port()
    started = [
        start("host", deadline, told, environ=of_torchrun(rank, port))
        for rank, told in enumerate((f"{fault} {moment}", "", ""))
    ]
    others = [finish(process) for process in started[1:]]
    started[0].send_signal(signal.SIGCONT)
    code, _, err = finish(started[0])
    kinds = ("RankLostError", "DeadlineError", "DisagreementError")
    for status, _, text in others:
        assert status == 1
        assert any(f"ostinato.errors.{kind}: " in text.splitlines()[-1] for kind in kinds), text
    if fault == "kill":
        assert code == -signal.SIGKILL
    else:
        wanted = "ValueError: broken" if fault == "raise" else "ostinato.errors."
        assert code == 1 and err.splitlines()[-1].startswith(wanted), err


def test_the_death_of_the_process_with_the_hub_is_noticed() -> None:
    """The hub of torchrun's groups is in rank 0."""
    port = free_port()
    hub = start("host", "5", "kill between", environ=of_torchrun(0, port, 2))
    other = start("host", "5", "", environ=of_torchrun(1, port, 2))
    code, _, err = finish(other)
    assert code == 1 and "RankLostError" in err.splitlines()[-1]
    assert finish(hub)[0] == -signal.SIGKILL


# --------------------------------------------------------------------------------- environments

MASTER = {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x", **MASTER}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123"}
SLURM |= {"SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "gpu[03-06,9]"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, None),
        (
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **MASTER},
            (3, 8, 1, "torchrun", "a", 29500),
        ),
        (OPEN_MPI, (1, 2, 0, "mpirun", None, None)),
        (PMI, (1, 2, 1, "mpirun", None, None)),
        # torchrun or mpirun in a task of srun: one a host, or what mpirun starts its own with.
        ({**TORCHRUN, **SLURM}, (3, 8, 1, "torchrun", "a", 29500)),
        ({**TORCHRUN, **OPEN_MPI}, (3, 8, 1, "torchrun", "a", 29500)),
        ({**OPEN_MPI, **SLURM}, (1, 2, 0, "mpirun", None, None)),
        # srun with PMI: the same ranks, and SLURM knows the hosts.
        ({"PMI_RANK": "5", "PMI_SIZE": "8", **SLURM, **MASTER}, (5, 8, 1, "srun", "a", 29500)),
        # By hand for torch, from what another launcher says.
        ({"RANK": "1", "WORLD_SIZE": "2", **OPEN_MPI}, (1, 2, 0, "mpirun", None, None)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **MASTER, **SLURM},
         (5, 8, 1, "torchrun", "a", 29500)),
        # Half of torchrun's variables beside all of another's.
        ({"WORLD_SIZE": "9", **OPEN_MPI}, (1, 2, 0, "mpirun", None, None)),
        # A batch script, and a step of fewer tasks than the job has.
        ({k: v for k, v in SLURM.items() if "STEP" not in k}, None),
        ({**SLURM, **MASTER, "SLURM_STEP_NUM_TASKS": "6"}, (5, 6, 1, "srun", "a", 29500)),
    ],
)  # fmt: skip
def test_what_launchers_say(environ: dict[str, str], wanted: Any) -> None:
    place = place_of(environ)
    if wanted is None:
        assert place is None
        return
    assert place is not None
    assert (
        place.rank, place.size, place.local_rank, place.launcher, place.host, place.port,
    ) == wanted  # fmt: skip
    assert place.device == f"cuda:{place.local_rank}"


def test_slurm_tells_hosts_and_a_port_follows_from_the_job() -> None:
    place = place_of(SLURM)
    assert place is not None and place.port is not None
    assert (place.rank, place.size, place.local_rank, place.host) == (5, 8, 1, "gpu03")
    assert 20000 <= place.port < 32000
    assert place_of({**SLURM, "SLURM_PROCID": "0"}).port == place.port  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("gpu[03-06,9],cpu1", "gpu03"),
        ("n[1]-ib", "n1-ib"),
        ("rack[2-3]n[07,9],rack4", "rack2n07"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' must be a whole number"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK='' must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "torchrun says rank 2 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "0"}, "no address"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({"OSTINATO_GROUP": "0/2"}, "must be rank/size/host:port:token"),
        ({"OSTINATO_GROUP": "0/2/nohost"}, "id of a group"),
        # Half of a launcher's variables.
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT.* are not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT is not"),
        ({**OPEN_MPI, "MASTER_PORT": "1"}, "MASTER_ADDR is not"),
        ({"PMI_RANK": "0"}, "PMI_SIZE is not set"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1"}, "SLURM_NTASKS is not"),
        # What a container or a shell has set for all its processes, and a launcher for each.
        ({"RANK": "0", "WORLD_SIZE": "1", **OPEN_MPI}, "contradict mpirun.*rank 1 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "1", **SLURM}, "contradict srun.*rank 5 of 8"),
    ],
)
def test_environments_that_cannot_be_read(environ: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        open_group(environ=environ)


def test_mpirun_on_several_hosts_needs_an_address() -> None:
    """At once, and not after a deadline."""
    for environ in (
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        {**PMI, "MPI_LOCALNRANKS": "1"},
    ):
        with pytest.raises(NotAvailableError, match=r"several hosts.*MASTER_ADDR"):
            open_group(environ=environ)


def test_jobs_on_neighbouring_ports_do_not_mix() -> None:
    """Two jobs of torchrun have the same name if none was given; the second looks at the port where
    the first one's hub is."""
    port = free_port()

    found: dict[str, list[bytes]] = {}

    def rank_thread(name: str, rank: int, port: int) -> None:
        with open_group(deadline=60, environ=of_torchrun(rank, port, 2)) as group:
            told = group.exchange("names", f"{name}{rank}".encode())
            found[f"{name}{rank}"] = told

    # Rank 1 of the second job is there before anyone else of it, and before rank 1 of the first.
    threads = []
    for name, rank, first in (
        ("a", 0, port),
        ("b", 1, port - 1),
        ("a", 1, port),
        ("b", 0, port - 1),
    ):
        threads.append(threading.Thread(target=rank_thread, args=(name, rank, first)))
        threads[-1].start()
        time.sleep(0.3)
    for thread in threads:
        thread.join(120)
    assert found == {
        "a0": [b"a0", b"a1"], "a1": [b"a0", b"a1"], "b0": [b"b0", b"b1"], "b1": [b"b0", b"b1"],
    }  # fmt: skip


def of_mpirun(rank: int, port: int) -> dict[str, str]:
    told = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "3"}
    return told | {"PMIX_NAMESPACE": f"job of {port}"}


@pytest.mark.parametrize("environ", [of_torchrun, of_mpirun])
def test_ranks_have_one_group_after_the_other_and_two_at_once(
    environ: Callable[[int, int], dict[str, str]],
) -> None:
    """The hub of the one before is still there when the first rank comes to the next one."""
    port, found = free_port(), {}

    def rank_thread(rank: int) -> None:
        told = []
        for turn in range(5):
            with (
                open_group(deadline=60, environ=environ(rank, port)) as one,
                open_group(deadline=60, environ=environ(rank, port)) as other,
            ):
                for group in (other, one):
                    told.append(group.exchange(f"turn {turn}", b"%d" % rank))
        found[rank] = told

    on_threads(3, rank_thread)
    assert found == {rank: [[b"0", b"1", b"2"]] * 10 for rank in range(3)}


def test_a_rank_that_a_launcher_starts_twice_is_told() -> None:
    port, both = free_port(), []

    def rank_thread(rank: int) -> None:
        with open_group(deadline=60, environ=of_torchrun(rank, port)) as group:
            both.append(group.exchange("both", b""))
            ended.wait(60)

    ended = threading.Event()
    threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    while len(both) < 3:
        time.sleep(0.01)
    with pytest.raises(RankLostError, match="refused it: there is a rank 1 already"):
        open_group(deadline=1, environ=of_torchrun(1, port))
    ended.set()
    for thread in threads:
        thread.join(60)


def test_no_launcher() -> None:
    with pytest.raises(NotAvailableError, match="torchrun"):
        open_group(environ={})


def test_the_deadline_is_a_setting() -> None:
    with pytest.raises(SettingsError, match="OSTINATO_GROUP_DEADLINE='soon': must be seconds"):
        os.environ["OSTINATO_GROUP_DEADLINE"] = "soon"
        try:
            open_group(environ={})
        finally:
            del os.environ["OSTINATO_GROUP_DEADLINE"]


# ------------------------------------------------------------------------------------- the hub


def test_a_rank_that_does_not_come_is_an_error_at_the_deadline() -> None:
    group = new_group_id(2, deadline=0.5)
    with pytest.raises(Exception, match="did not come: 1"):
        join_group(group, rank=0, size=2, deadline=0.5)


def test_the_hub_of_a_group_that_failed_ends_without_those_that_never_came() -> None:
    """It may be in a process that is no rank, lives on and makes more groups.  Within a deadline
    who comes late is told why."""
    group_id = new_group_id(3, deadline=0.5)
    hub = launch._hubs.pop(group_id)
    with pytest.raises(DeadlineError, match="did not come: 1, 2"):
        join_group(group_id, rank=0, size=3, deadline=0.5)
    hub.wait(60)
    assert not hub._thread.is_alive()


def test_no_hub_is_an_error_at_the_deadline() -> None:
    begin = time.monotonic()
    with pytest.raises(RankLostError, match="found no hub"):
        join_group(f"127.0.0.1:{free_port()}:token", rank=0, size=2, deadline=0.3)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize(("rank", "size"), [(0, 3), (2, 2), (-1, 2), (0, 0)])
def test_a_rank_of_another_size_is_refused(rank: int, size: int) -> None:
    group = new_group_id(2, deadline=5)
    with pytest.raises(InputError, match="rank"):
        join_group(group, rank=rank, size=size, deadline=5)


def test_another_token_is_not_let_in() -> None:
    address = HubAddress.parse(new_group_id(2, deadline=5))
    with pytest.raises(RankLostError, match="no hub of this group"):
        join_group(f"{address.host}:{address.port}:wrong", rank=0, size=2, deadline=0.5)


def test_garbage_does_not_disturb_the_hub() -> None:
    group = new_group_id(1, deadline=20)
    address = HubAddress.parse(group)
    hello = {"kind": "hello", "token": "another", "size": 1}
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 100,
        packed({"kind": "part"}),
        packed({**hello, "rank": math.inf}),
        packed({**hello, "rank": 0}, b"a payload before it is known"),
        _LENGTHS.pack(b"ost1", 60_000, 0) + b"[" * 60_000,
    ):
        with socket.create_connection((address.host, address.port)) as stranger:
            stranger.sendall(data)
            stranger.settimeout(20)
            assert stranger.recv(100) == b""  # the hub hangs up
    with join_group(group, rank=0, size=1, deadline=20) as alone:
        assert alone.exchange("x", b"1") == [b"1"]


def test_more_than_a_message_holds_is_an_error_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "_MOST_PAYLOAD", 100)
    group_id, found = new_group_id(2, deadline=20), []

    def rank_thread(rank: int) -> None:
        try:
            with join_group(group_id, rank=rank, size=2, deadline=20) as group:
                with pytest.raises(InputError, match="101 bytes, must be 100 at most"):
                    group.exchange("alone", bytes(101))
                group.exchange("together", bytes(60))
        except GroupError as error:
            found.append(str(error))

    on_threads(2, rank_thread)
    assert found == ["'together': all ranks' parts have more than 100 bytes together"] * 2


@pytest.mark.parametrize("deadline", [0, -1, math.nan, math.inf, "1"])
def test_deadlines_that_are_none(deadline: Any) -> None:
    for call in (
        lambda: new_group_id(2, deadline=deadline),
        lambda: join_group("127.0.0.1:1:token", rank=0, size=2, deadline=deadline),
        lambda: open_group(environ=of_torchrun(0, 29500), deadline=deadline),
    ):
        with pytest.raises(InputError, match="deadline is"):
            call()


@pytest.mark.parametrize(("hub", "deadlines"), [(600, (8, 8)), (8, (600, 600)), (600, (600, 8))])
def test_who_waits_for_less_hears_of_the_others_in_time(
    hub: float, deadlines: tuple[float, float]
) -> None:
    """The id has the default deadline, say, and the ranks have a shorter one.  All say that they
    live as often as the one with the shortest deadline has to hear of the hub, or the hub of it."""
    group_id, found = new_group_id(2, deadline=hub), {}
    meeting = launch._hubs[group_id]

    def rank_thread(rank: int) -> None:
        with join_group(group_id, rank=rank, size=2, deadline=deadlines[rank]) as group:
            assert isinstance(group.channel, SocketChannel)
            found[rank] = group.channel._beat_seconds

    on_threads(2, rank_thread)
    assert meeting._beat == min(beat_of(one) for one in (hub, *deadlines)) == 1.0
    assert found == {r: min(beat_of(one), beat_of(hub)) for r, one in enumerate(deadlines)}


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_an_id_for_no_ranks_is_not_made(size: Any) -> None:
    with pytest.raises(InputError, match="size is"):
        new_group_id(size)


def test_ranks_and_sizes_may_be_numbers_of_numpy() -> None:
    rank, size = np.arange(2, dtype=np.int32)
    with join_group(new_group_id(size), rank=rank, size=size, deadline=20) as alone:
        assert alone.exchange("x", b"1") == [b"1"]


def test_a_hub_that_takes_nothing_holds_no_rank() -> None:
    """It is stopped while a rank sends more than the system keeps for it."""
    program = (
        "from ostinato.distributed import new_group_id\n"
        "print(new_group_id(1, deadline=1), flush=True)\n"
        "input()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment({}),
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            group = join_group(process.stdout.readline().strip(), rank=0, size=1, deadline=1)
            process.send_signal(signal.SIGSTOP)
            found: list[BaseException] = []

            def send() -> None:
                try:
                    group.exchange("much", bytes(64 << 20))
                except GroupError as error:
                    found.append(error)
                group.close()

            thread = threading.Thread(target=send, daemon=True)
            thread.start()
            thread.join(60)
            assert not thread.is_alive(), "it waits for ever"
            assert type(found[0]) is RankLostError and "hub has not been heard of" in str(found[0])
        finally:
            process.kill()


def test_the_last_to_leave_does_not_take_the_hubs_end_for_a_failure() -> None:
    """The hub ends once all have left; the reader may see that before `close` goes on."""
    with join_group(new_group_id(1, deadline=20), rank=0, size=1, deadline=20) as group:
        channel = group.channel
        assert isinstance(channel, SocketChannel)
        send, ended = channel._send, threading.Event()
        channel.on_failure(lambda failure: ended.set())

        def slow(head: dict[str, Any], payload: bytes = b"") -> None:
            send(head, payload)
            if head["kind"] == "leave":
                assert channel._hub is not None
                channel._hub.wait(20)
                ended.wait(0.5)

        channel._send = slow  # type: ignore[method-assign]
        group.close()
        assert group.failure is None


def test_messages_come_in_pieces() -> None:
    data = packed({"kind": "a"}, b"12") + packed({"kind": "b"})
    reader = Reader(most=2)
    found = []
    for byte in data:
        reader.feed(bytes([byte]))
        while (message := reader.next()) is not None:
            found.append(message)
    assert found == [({"kind": "a"}, b"12"), ({"kind": "b"}, b"")]


@pytest.mark.parametrize("text", ["", "host", "host:1", "host:x:t", "host:70000:t", ":1:t"])
def test_ids_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="id of a group"):
        HubAddress.parse(text)
