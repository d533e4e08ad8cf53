"""The process of a rank other than the first, started by `cli.ranks`.

The first line of standard input is JSON with this rank's place in its group.  At the end of
standard input rank 0 has died, and this process ends.  The work is received over the group.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ostinato.cli.bench import subject_of
from ostinato.cli.endings import FAILED, ending
from ostinato.errors import GroupError, OstinatoError

if TYPE_CHECKING:
    from ostinato.distributed import Group


def main() -> None:
    """Runs the whole process.  Signals have their default action: rank 0 notices the end and
    reports it."""
    status = ending(_follow)
    os._exit(status)  # skips the interpreter's exit: a thread still reads standard input


def _follow() -> None:
    from ostinato.distributed import join_group

    line = sys.stdin.buffer.readline()
    if not line:  # rank 0 has ended already
        raise typer.Exit(FAILED)
    told = json.loads(line)
    threading.Thread(target=_end_with_rank_0, name="rank 0 lives", daemon=True).start()
    rank = told["rank"]
    try:
        with join_group(told["group"], rank=rank, size=told["size"]) as group:
            work = json.loads(group.broadcast("the work"))
            try:
                WORKS[work.pop("kind")](group, told["device"], **work)
            except OstinatoError as error:
                group.fail(error)
                raise typer.Exit(FAILED) from None  # rank 0 prints the error
    except GroupError as error:
        if error.rank == rank:  # this rank could not join, which rank 0 cannot report
            raise
        raise typer.Exit(FAILED) from None  # rank 0 prints the error


def _end_with_rank_0() -> None:
    with suppress(OSError):
        while os.read(sys.stdin.fileno(), 1 << 16):
            pass
    os._exit(FAILED)


def _repeat(group: Group, device: str | None, *, model: str, decoder: dict[str, Any]) -> None:
    """Repeats what the decoder of rank 0 does, until that is closed.

    A supervisor may send SIGTERM to all processes of a service; rank 0 then completes its answers,
    with this rank, and ends both.
    """
    from ostinato.device import open_device
    from ostinato.models import Decoder

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with (
        open_device(device) as opened,
        Decoder(opened, Path(model), group=group, **decoder) as repeated,
    ):
        repeated.follow()


def _bench(
    group: Group,
    device: str | None,
    *,
    subject: dict[str, Any],
    options: dict[str, Any],
    bandwidth: dict[str, Any],
) -> None:
    from ostinato.bench.decode import measure
    from ostinato.bench.floor import Bandwidth
    from ostinato.bench.options import DecodeOptions
    from ostinato.device import open_device

    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }
    with open_device(device) as opened:
        measure(
            opened,
            subject_of(**subject)[1],
            DecodeOptions(**given),
            group=group,
            bandwidth=Bandwidth(**bandwidth),
        )


WORKS: Mapping[str, Callable[..., None]] = {
    "follow": _repeat,
    "bench": _bench,
}
"""The work that rank 0 may request; each is called with the group and this rank's device."""
