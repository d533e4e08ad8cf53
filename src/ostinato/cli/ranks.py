"""`--tensor-parallel`: this process is rank 0 and starts a process for each other rank.

Rank 0 behaves as the command does without the option: it reads the prompt, prints, and handles
Ctrl-C.  The others (`cli.rank`) have process groups of their own, so that a terminal's signals
reach only rank 0, and receive their work over the group.  Their standard output and errors are
printed to the error stream, each line preceded by the rank.

    the work is done            all leave the group, and rank 0 waits for the others to end
    a rank raises               the group fails on all ranks; rank 0 prints the rank and the error
    a process dies or stops     likewise, see `ostinato.distributed.sockets`
    rank 0 is interrupted       the group fails; the others end
    rank 0 dies                 the others' standard input ends, which ends them

No process is left in any case: those that do not end by themselves are killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import typer

from ostinato.cli.plain import say
from ostinato.cli.progress import fetched
from ostinato.errors import DeadlineError, GroupError, OstinatoError, RankLostError

if TYPE_CHECKING:
    from ostinato.distributed import Group

_PROGRAM = "from ostinato.cli.rank import main; main()"
_GRACE_SECONDS = 2.0
"""Time for the other ranks to end by themselves once the group has failed."""


def rank_devices(count: int, device: str | None) -> list[str | None]:
    """Returns the device of each rank: `count` GPUs from the named one on, or from the first; the
    host for all ranks without a GPU, or if it is named.

    Raises BadParameter if there are too few GPUs, InputError for a wrong name.
    """
    from ostinato import settings
    from ostinato.device import open_device
    from ostinato.driver.cuda.driver import gpu_count

    if count == 1:
        return [device]
    name = device or settings.device_name()
    there = gpu_count()
    if name is None:
        name = "cuda:0" if there else "host"
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        open_device(device).close()  # raises for an unknown name; otherwise it is the host
        return ["host"] * count
    first = int(number or "0")
    if first + count > there:
        raise typer.BadParameter(
            f"{count} ranks need the GPUs cuda:{first} to cuda:{first + count - 1}, one each, and "
            f"this machine has {there}; --device host runs ranks on the CPU",
            param_hint="--tensor-parallel",
        )
    return [f"cuda:{first + rank}" for rank in range(count)]


def rank_threads(devices: Sequence[str | None], threads: int | None) -> int | None:
    """Returns the threads of a rank: on the CPU the ranks share the processors."""
    from ostinato.models.host.packed_kernels import default_threads

    if threads is not None or len(devices) == 1 or str(devices[0]).startswith("cuda"):
        return threads
    return max(1, default_threads() // len(devices))


@contextmanager
def other_ranks(
    devices: Sequence[str | None], work: Callable[[], Mapping[str, Any]]
) -> Iterator[Group | None]:
    """Starts a process for each rank but the first, and yields the first rank's group; None for one
    rank.

    `work`: returns the others' work as JSON data: "kind", a key of `cli.rank.WORKS`, and its
    arguments.  After the block the others have ended.  Raises GroupError if one of them failed,
    also after a block without an error; an exception of the block fails the group.
    """
    if len(devices) == 1:
        yield None
        return
    from ostinato.distributed import join_group, new_group_id
    from ostinato.settings import group_deadline

    deadline, size = group_deadline(), len(devices)
    told = json.dumps(dict(work())).encode()
    group_id = new_group_id(size, deadline=deadline)
    ranks: list[_Rank] = []
    try:
        for rank in range(1, size):
            ranks.append(_Rank(rank, size, group_id, devices[rank]))
        with join_group(group_id, rank=0, size=size, deadline=deadline) as group:
            group.broadcast("the work", told)
            yield group
        failure = group.failure
        if failure is not None and failure.rank != 0:
            raise failure.error()
        grace = deadline if failure is None else _GRACE_SECONDS
    except BaseException as error:
        _end(ranks, _GRACE_SECONDS)
        if isinstance(error, GroupError):
            for one in ranks:
                if one.signalled:
                    error.add_note(f"rank {one.rank} was ended by {one.signalled}")
        raise
    late = _end(ranks, grace)
    if failure is not None:  # rank 0 ended the group, which makes the others fail
        return
    if late:
        raise DeadlineError(f"rank {late[0]} did not end within {deadline:g} s", rank=late[0])
    for one in ranks:
        if one.process.returncode:
            raise RankLostError(
                f"the work was done, but rank {one.rank} ended with "
                f"{one.signalled or f'status {one.process.returncode}'}",
                rank=one.rank,
            )


@contextmanager
def following_ranks(
    devices: Sequence[str | None], model: str, options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Starts the other ranks (`other_ranks`), which repeat what this one's decoder does, and yields
    what that decoder is to be made with; nothing for one rank.  `options`: those of each decoder.
    """

    def work() -> dict[str, Any]:
        return {"kind": "follow", "model": str(fetched(model)), "decoder": dict(options)}

    with other_ranks(devices, work) as group:
        yield {} if group is None else {"group": group, "leads": True}


class _Rank:
    """A rank's process.  Threads print its output, and report its death to the group if it dies
    before it has joined."""

    def __init__(self, rank: int, size: int, group_id: str, device: str | None) -> None:
        self.rank, self._size, self._group_id = rank, size, group_id
        path = os.pathsep.join(entry for entry in sys.path if entry)
        # -P: the process imports what this one imports, and no file of the current folder.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path},
            process_group=0,
        )
        self._ending = self._killed = False
        self._threads = [
            threading.Thread(target=work, name=f"rank {rank} {name}", daemon=True)
            for work, name in ((self._pass_on, "says"), (self._watch, "lives"))
        ]
        for thread in self._threads:
            thread.start()
        told = {"group": group_id, "rank": rank, "size": size, "device": device}
        assert self.process.stdin is not None
        with suppress(OSError):  # the process has died, which `_watch` reports
            self.process.stdin.write(json.dumps(told).encode() + b"\n")
            self.process.stdin.flush()

    def _pass_on(self) -> None:
        assert self.process.stdout is not None
        with suppress(OSError, ValueError):  # ValueError: the stream is closed
            for line in self.process.stdout:
                words = line.decode(errors="backslashreplace").rstrip("\n")
                say(f"rank {self.rank}: {words}", stream=sys.stderr)

    def _watch(self) -> None:
        from ostinato.distributed.channel import Failure
        from ostinato.distributed.sockets import HubAddress, connect

        status = self.process.wait()
        if self._ending or not status:
            return
        # Joins in the rank's place and reports its death, so that no rank waits for it.  The hub
        # refuses this if the rank had joined; the hub has then noticed the death itself.
        with suppress(OstinatoError):
            place = [HubAddress.parse(self._group_id)]
            channel = connect(place, self.rank, self._size, deadline=_GRACE_SECONDS)
            how = self.signalled or f"status {status}"
            text = f"the process of rank {self.rank} ended with {how} before it was in the group"
            channel.fail(Failure("lost", self.rank, text))
            channel.close()

    @property
    def signalled(self) -> str:
        """The signal that ended the process, unless this process killed it."""
        status = self.process.returncode
        if status is None or status >= 0 or self._killed:
            return ""
        try:
            return signal.Signals(-status).name
        except ValueError:
            return f"signal {-status}"

    def end(self, until: float) -> bool:
        """Waits until the time `until`, then kills the process; returns whether it ended by
        itself."""
        self._ending = True
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            if self.process.poll() is None:  # late, or this wait was interrupted
                self._killed = True
                self.process.kill()
                self.process.wait()
            for thread in self._threads:  # a process that it started may hold its streams
                thread.join(1.0)
            for stream in (self.process.stdin, self.process.stdout):
                with suppress(OSError):
                    assert stream is not None
                    stream.close()


def _end(ranks: Sequence[_Rank], seconds: float) -> list[int]:
    """Waits for all processes to end, at most `seconds`; returns the ranks that had to be
    killed."""
    until, late = time.monotonic() + seconds, []
    interrupted: BaseException | None = None
    for one in ranks:
        try:
            if not one.end(until if interrupted is None else 0.0):
                late.append(one.rank)
        except BaseException as error:  # Ctrl-C: the others must still be ended
            interrupted = interrupted or error
    if interrupted is not None:
        raise interrupted
    return late
