"""Finds this process's rank and the other ranks, from its launcher or its caller.

    open_group()                                  torchrun, mpirun, srun, or OSTINATO_GROUP
    group_id = new_group_id(2)                    in one process, which must outlive the group
    join_group(group_id, rank=…, size=2)          in every process: a Ray actor, an engine's worker

A launcher provides rank and size.  It provides the address of the first host (torchrun's
MASTER_ADDR and MASTER_PORT, SLURM's list of hosts) or none (mpirun).  Without an address, ranks on
one host meet by a file that only this user may read, named for the launcher's process; on several
hosts, MASTER_ADDR and MASTER_PORT must be set.  If both are set, they are used with every launcher.

torchrun's own store listens at MASTER_PORT, so the hub takes one of the next ports.  The token of
such a group is the launcher's name for the job.  The token separates jobs but is not a secret: any
process that can reach the port can join, as with the launchers' own stores.  `new_group_id` makes a
random token.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ostinato.distributed.channel import local_channels
from ostinato.distributed.group import Group, checked_deadline
from ostinato.distributed.sockets import LOOPBACK, Hub, HubAddress, connect
from ostinato.errors import InputError, NotAvailableError, RankLostError
from ostinato.lowlevel import whole_number
from ostinato.settings import group_of_process

_PORTS = 16  # ports tried after a launcher's own
_ADDRESS_ADVICE = (
    "set MASTER_ADDR and MASTER_PORT on all of them (mpirun -x MASTER_ADDR=… -x MASTER_PORT=…)"
)
_RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=")
_hubs: dict[str, Hub] = {}
"""Hubs of ids that were made here and not joined yet."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place in its group, as given by its launcher.

    `local_rank`: its number among this host's ranks, and so the number of its GPU.  `host`, `port`:
    of the first rank, if the launcher provides them.  `job`: the launcher's name for the job.
    `hosts_differ`: True if the launcher reports ranks on other hosts.
    """

    rank: int
    size: int
    local_rank: int
    launcher: str
    job: str
    host: str | None = None
    port: int | None = None
    hosts_differ: bool = False

    @property
    def device(self) -> str:
        """The name of this rank's GPU."""
        return f"cuda:{self.local_rank}"


def place_of(environ: Mapping[str, str] | None = None) -> Place | None:
    """Reads the place from the launcher's variables in the environment; None if there are none.

    Read in this order: torchrun's RANK and WORLD_SIZE, Open MPI's, those of MPICH and Intel MPI
    (PMI), SLURM's of a step (`srun`; a batch script by itself is no rank).  torchrun and both kinds
    of mpirun may start their own processes with srun; srun's variables then come last.

    Raises InputError for variables that are invalid or incomplete, and for RANK and WORLD_SIZE that
    torchrun did not set and that contradict another launcher's.
    """
    env = os.environ if environ is None else environ
    mpi, slurm = _of_mpirun(env), _of_slurm(env)
    # Open MPI's and Hydra's own processes may be tasks of srun, whose variables ranks inherit.
    # With srun and PMI both agree, and SLURM's also give the first rank's host.
    other = slurm if mpi is None or (slurm is not None and _same(mpi, slurm)) else mpi
    torch = _of_torch(env, alone=other is None)
    if torch is None or other is None:
        return torch or other
    if "TORCHELASTIC_RUN_ID" in env:
        return torch
    if not _same(torch, other):
        raise InputError(
            f"RANK={torch.rank} and WORLD_SIZE={torch.size} contradict {other.launcher}, which "
            f"says rank {other.rank} of {other.size}: unset those that are not of this job"
        )
    return other if torch.host is None else torch


def _of_torch(env: Mapping[str, str], *, alone: bool) -> Place | None:
    """Reads torchrun's variables.  `alone`: no other launcher is there, so half of them is an
    error."""
    names = [name for name in ("RANK", "WORLD_SIZE") if name in env]
    if not names or (len(names) == 1 and not alone):
        return None
    rank, size = _need(env, "RANK"), _need(env, "WORLD_SIZE")
    run = env.get("TORCHELASTIC_RUN_ID", "none")
    job = f"{run}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    place = _place(env, "torchrun", rank, size, "LOCAL_RANK", job)
    if alone and place.host is None and size > 1:
        raise InputError(
            "RANK and WORLD_SIZE are set, and MASTER_ADDR and MASTER_PORT, which say where rank 0 "
            "is, are not"
        )
    return place


def _of_mpirun(env: Mapping[str, str]) -> Place | None:
    for kind, local, alike in (
        ("OMPI_COMM_WORLD_", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if f"{kind}RANK" not in env:
            continue
        rank, size = _need(env, f"{kind}RANK"), _need(env, f"{kind}SIZE")
        job = env.get("PMIX_NAMESPACE", env.get("PMI_JOBID", ""))
        place = _place(env, "mpirun", rank, size, local, job)
        here = _whole(env, alike)
        return replace(place, hosts_differ=here is not None and here < size)
    return None


def _of_slurm(env: Mapping[str, str]) -> Place | None:
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env:
        return None  # a batch script has SLURM_PROCID=0 too, and no step
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    rank, size = _need(env, "SLURM_PROCID"), _need(env, tasks)
    job = f"{_need(env, 'SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    place = _place(env, "srun", rank, size, "SLURM_LOCALID", job)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if place.host is not None or not nodes:
        return place
    digest = hashlib.blake2b(job.encode(), digest_size=4).digest()
    port = 20000 + int.from_bytes(digest, "big") % 12000
    return replace(place, host=first_host(nodes), port=port)


def _place(
    env: Mapping[str, str], launcher: str, rank: int, size: int, local_name: str, job: str
) -> Place:
    local = _whole(env, local_name)
    host, port = env.get("MASTER_ADDR"), _whole(env, "MASTER_PORT")
    if (host is None) != (port is None):
        there, missing = ("ADDR", "PORT") if port is None else ("PORT", "ADDR")
        raise InputError(f"MASTER_{there} is set and MASTER_{missing} is not: set both or none")
    if port is not None and not (host and 0 < port < (1 << 16) - _PORTS):
        raise InputError(f"MASTER_ADDR={host!r}, MASTER_PORT={port} is no address of rank 0")
    if not 0 <= rank < size:
        raise InputError(f"{launcher} says rank {rank} of {size}")
    return Place(rank, size, rank if local is None else local, launcher, job, host, port)


def _same(one: Place, other: Place) -> bool:
    return (one.rank, one.size) == (other.rank, other.size)


def first_host(nodes: str) -> str:
    """Returns the first host of a SLURM list: "gpu[03-06,9],cpu1" gives "gpu03"."""
    match = re.match(r"(?:[^\[\],]|\[[0-9][^\[\]]*\])+", nodes)
    if match is None:
        raise InputError(f"{nodes!r} is no list of hosts")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", match[0])


def open_group(*, deadline: float | None = None, environ: Mapping[str, str] | None = None) -> Group:
    """Returns the group of the launcher that started this process; waits for its other ranks.

    Raises NotAvailableError without a launcher, or if it does not provide the others' address;
    RankLostError if they do not come within the deadline; InputError.
    """
    env = os.environ if environ is None else environ
    seconds = checked_deadline(deadline)
    told = group_of_process(env)
    if told:
        rank, size, address = _told(told)
        return join_group(address, rank=rank, size=size, deadline=seconds)
    place = place_of(env)
    if place is None:
        raise NotAvailableError(
            "no launcher says which rank this process is: start it with torchrun, mpirun or srun, "
            "or use join_group(group_id, rank=…, size=…)"
        )
    if place.size == 1:
        return Group(local_channels(1)[0], deadline=seconds)
    if place.host is None or place.port is None:
        if place.hosts_differ:
            raise NotAvailableError(
                f"{place.launcher} started ranks on several hosts and does not tell where rank 0 "
                f"is: {_ADDRESS_ADVICE}"
            )
        return _meet_by_file(place, seconds)
    # With the port: jobs of one name on neighbouring ports try each other's hubs.
    name = f"{place.launcher} {place.job} {place.port} {place.size}"
    token = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    ports = range(place.port + 1, place.port + 1 + _PORTS)
    hub = None
    if place.rank == 0:
        hub = _hub_at(place.host, ports, place.size, token, seconds)
        addresses = [HubAddress(LOOPBACK, hub.port, token)]
    else:
        addresses = [HubAddress(place.host, port, token) for port in ports]
    return _joined(addresses, place.rank, place.size, seconds, hub)


def new_group_id(size: int, *, host: str = LOOPBACK, deadline: float | None = None) -> str:
    """Returns a new group's id, for `join_group` in each of its processes; the text is a secret.

    The calling process runs the group's hub and must live as long as the group; it need not be a
    rank.  `host`: the address of this machine at which the others reach it.  Raises InputError for
    an invalid size or deadline.
    """
    ranks = whole_number(size)
    if ranks is None or ranks < 1:
        raise InputError(f"size is {size!r}, must be 1 rank or more")
    token = secrets.token_hex(16)
    hub = Hub(ranks, host=host, port=0, token=token, deadline=checked_deadline(deadline))
    address = str(HubAddress(host, hub.port, token))
    _hubs[address] = hub
    return address


def join_group(group_id: str, *, rank: int, size: int, deadline: float | None = None) -> Group:
    """Returns the group of an id, as rank `rank` of `size`; waits for its other ranks.

    Raises RankLostError if they do not come within the deadline, InputError.
    """
    address, seconds = HubAddress.parse(group_id), checked_deadline(deadline)
    place, ranks = whole_number(rank), whole_number(size)
    if place is None or ranks is None or not 0 <= place < ranks:
        raise InputError(f"rank {rank!r} of {size!r}: a rank is 0 to size - 1")
    return _joined([address], place, ranks, seconds, _hubs.pop(group_id, None))


def _joined(
    addresses: list[HubAddress],
    rank: int,
    size: int,
    deadline: float,
    hub: Hub | None,
    file: Path | None = None,
) -> Group:
    """Connects to the hub and forms the group.  `file`: by which the ranks met; it is removed
    before any rank continues, since their next group has a file of this name too."""
    try:
        channel = connect(addresses, rank, size, deadline=deadline, hub=hub)
    except BaseException:
        if hub is not None:
            hub.close()
        raise
    group = Group(channel, deadline=deadline)
    try:
        group.barrier("forming the group")
        if file is not None:
            if rank == 0:
                file.unlink(missing_ok=True)
            group.barrier("removing the group's file")
    except BaseException:
        group.close()
        raise
    return group


def _hub_at(host: str, ports: range, size: int, token: str, deadline: float) -> Hub:
    for port in ports:
        with suppress(OSError):
            return Hub(size, host=host, port=port, token=token, deadline=deadline)
    raise NotAvailableError(f"no port from {ports[0]} to {ports[-1]} is free for the group's hub")


def _meet_by_file(place: Place, deadline: float) -> Group:
    """Forms the group of a launcher on one host that provides no address: rank 0 writes its address
    into a file named for the launcher's process."""
    path = _meeting_file(place)
    if place.rank == 0:
        token = secrets.token_hex(16)
        hub = Hub(place.size, host=LOOPBACK, port=0, token=token, deadline=deadline)
        address = HubAddress(LOOPBACK, hub.port, token)
        try:
            path.unlink(missing_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(f"{address}\n")
        except OSError as error:
            hub.close()
            raise NotAvailableError(
                f"rank 0 cannot write {path} ({error.strerror}), by which the other ranks find it: "
                f"remove what is there, or {_ADDRESS_ADVICE}"
            ) from error
        try:
            return _joined([address], 0, place.size, deadline, hub, path)
        finally:
            path.unlink(missing_ok=True)
    end = time.monotonic() + deadline
    while True:
        with suppress(OSError), path.open() as file:
            text = file.read()
            # Of the open file: another one may be at its path by now.
            if text.endswith("\n") and os.fstat(file.fileno()).st_uid == os.getuid():
                address = HubAddress.parse(text.strip())
                return _joined([address], place.rank, place.size, deadline, None, path)
        if time.monotonic() > end:
            raise RankLostError(
                f"rank {place.rank} found no file {path} of rank 0 within {deadline:g} s. Where "
                f"ranks have different hosts or containers, {_ADDRESS_ADVICE}",
                rank=place.rank,
            )
        time.sleep(0.01)


def _meeting_file(place: Place) -> Path:
    """Returns a path named for the launcher's process and its start time, unique to the job."""
    name = f"{socket.gethostname()} {place.launcher} {place.job} {_launcher_process()}"
    digest = hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
    return Path(tempfile.gettempdir()) / f"ostinato-{os.getuid()}-{digest}"


def _launcher_process() -> str:
    """Identifies the nearest ancestor without a rank in its environment, by process id and start
    time: a script between the launcher and this process has a rank."""
    pid, began = os.getppid(), ""
    with suppress(OSError, IndexError, ValueError):
        while True:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            began = fields[19]
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if pid <= 1 or not any(entry.startswith(_RANK_VARIABLES) for entry in entries):
                break
            pid = int(fields[1])
    return f"{pid} {began}"


def _told(text: str) -> tuple[int, int, str]:
    rank, _, rest = text.partition("/")
    size, _, address = rest.partition("/")
    if not (rank.isdecimal() and size.isdecimal() and address):
        raise InputError(f"OSTINATO_GROUP={text!r} must be rank/size/host:port:token")
    return int(rank), int(size), address


def _whole(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise InputError(f"{name}={text!r} must be a whole number")
    return int(text)


def _need(env: Mapping[str, str], name: str) -> int:
    value = _whole(env, name)
    if value is None:
        raise InputError(
            f"{name} is not set, and other variables of its launcher are: set all or none of them"
        )
    return value
