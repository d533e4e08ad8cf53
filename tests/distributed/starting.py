"""Starts ranks that are processes, for tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from ostinato.distributed import new_group_id

MOMENTS = ("start", "prompt", "between", "loop")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_",
    "TORCHELASTIC_",
    "OMPI_",
    "PMI",
    "SLURM_",
)
End = tuple[int, str, str]
"""Status, the output's last line (libraries print others before it), and error output."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_threads(size: int, work: Callable[[int], None]) -> None:
    """Calls `work` with each rank on a thread of its own."""
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)


def environment(more: dict[str, str]) -> dict[str, str]:
    """Of this process for a rank: with the paths of its modules, without what a launcher said."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    path = os.pathsep.join(p for p in (str(ROOT), *sys.path) if p)
    return {**inherited, "PYTHONPATH": path, **more}


def start(
    *arguments: str,
    group: str | None = None,
    environ: dict[str, str] | None = None,
    program: str = "rank_program.py",
    before: tuple[str, ...] = (),
) -> subprocess.Popen[str]:
    """A rank, see `rank_program`.  `before`: the program that starts it."""
    told = {} if group is None else {"OSTINATO_GROUP": group}
    command = [*before, sys.executable, str(HERE / program), *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(told | (environ or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> End:
    out, err = process.communicate(timeout=500)
    return process.returncode, "".join(out.strip().splitlines()[-1:]), err.strip()


def ranks(size: int, *arguments: str, deadline: float = 60, faulty: str = "") -> list[End]:
    """What every rank ends with; rank 1 is told the fault.  Once the others have ended a stopped
    one goes on, or is killed if it has a GPU."""
    group = new_group_id(size, deadline=deadline)
    started = [
        start(
            *arguments, str(deadline), faulty if rank == 1 else "", group=f"{rank}/{size}/{group}"
        )
        for rank in range(size)
    ]
    try:
        found = [finish(p) for rank, p in enumerate(started) if not (faulty and rank == 1)]
        if faulty:
            if "stop" in faulty:
                started[1].send_signal(signal.SIGCONT if "host" in arguments else signal.SIGKILL)
            found.insert(1, finish(started[1]))
        return found
    finally:
        for process in started:
            process.kill()


def require_typed_errors(found: list[End], fault: str) -> None:
    """That all ranks but 1, which had the fault, ended with an error that names it.  A rank that
    differs has the same error."""
    for rank, (code, _, err) in enumerate(found):
        if rank == 1 and fault not in ("key", "build"):
            assert code == {"raise": 1, "stop": 1, "kill": -signal.SIGKILL}[fault] or (
                fault == "stop" and code == -signal.SIGKILL
            )
            continue
        assert code == 1, found
        last = err.splitlines()[-1]
        if fault == "kill":
            assert last.startswith("ostinato.errors.RankLostError: rank 1 died"), last
        elif fault in ("key", "build"):
            # Ranks of which one goes on with a loop and one ends it wait for each other.
            late = "DeadlineError: rank 1 waited" in last and "'calls of the decoder'" in last
            late = late and "rank 0 was last at 'the token of sequence 0" in last
            assert late or ("DisagreementError" in last and "the ranks differ" in last), last
            assert fault != "build" or "rank 1 has 'another build'" in last or "sources" in last
        elif fault == "raise":
            assert "RankLostError: rank 1 raised ValueError: broken" in last
        else:
            silent = "RankLostError: rank 1 has not been heard of" in last
            assert silent or ("DeadlineError" in last and "did not come: 1" in last), last


def waits(fault: str, moment: str) -> bool:
    """Whether it takes the deadline until the fault is known."""
    return fault == "stop" or (fault, moment) == ("key", "loop")
