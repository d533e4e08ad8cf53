"""Who this process is in its group, and where the others are: its launcher or its caller says.

    open_group()                                  torchrun, mpirun, srun, or OSTINATO_GROUP
    group_id = new_group_id(2)                    in one process, which must outlive the group
    join_group(group_id, rank=…, size=2)          in every process: a Ray actor, an engine's worker

A launcher tells rank and size.  Where the others are, it tells by an address of the first host
(torchrun's MASTER_ADDR and MASTER_PORT, SLURM's list of hosts), or not at all (mpirun): ranks on
one host then meet by a file that only this user may read, named for the launcher's process; on
several, MASTER_ADDR and MASTER_PORT must be set.

torchrun's own store listens at MASTER_PORT, so ours takes one of the next ports.  The token of such
a group is the launcher's name for the job.  It keeps jobs apart and is no secret: who can reach the
port can join, as with the launchers' own stores.  `new_group_id` makes a random one.
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
from dataclasses import dataclass
from pathlib import Path

from ostinato.distributed.channel import local_channels
from ostinato.distributed.group import Group
from ostinato.distributed.sockets import Address, Hub, connect
from ostinato.errors import InputError, NotAvailableError, RankLostError
from ostinato.settings import group_deadline, group_of_process

__all__ = ["Place", "join_group", "new_group_id", "open_group", "place_of"]

_PORTS = 16  # tried after a launcher's own
_LOOPBACK = "127.0.0.1"
_hubs: dict[str, Hub] = {}
"""Hubs of ids that were made here and not joined yet."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place in its group, as its launcher says.

    `local_rank`: which of this host's ranks it is, and so which of its GPUs it takes.  `host`,
    `port`: of the first rank, if the launcher tells them.  `job`: the launcher's name for the job.
    """

    rank: int
    size: int
    local_rank: int
    launcher: str
    job: str
    host: str | None = None
    port: int | None = None

    @property
    def device(self) -> str:
        """The name of this rank's GPU."""
        return f"cuda:{self.local_rank}"


def place_of(environ: Mapping[str, str] | None = None) -> Place | None:
    """What the launcher says in the environment; None if there is none.

    OSTINATO_GROUP (`rank/size/host:port:token`, as `ostinato --tensor-parallel` sets it) comes
    first, then torchrun's RANK, Open MPI's, MPICH's and Intel's, and SLURM's variables.
    Raises InputError for values that cannot be read.
    """
    env = os.environ if environ is None else environ
    host, port = env.get("MASTER_ADDR"), _whole(env, "MASTER_PORT")
    if "RANK" in env and "WORLD_SIZE" in env:
        rank = _need(env, "RANK")
        job = (
            env.get("TORCHELASTIC_RUN_ID", "none")
            + "/"
            + env.get("TORCHELASTIC_RESTART_COUNT", "0")
        )
        local = _whole(env, "LOCAL_RANK")
        return _checked(
            Place(
                rank,
                _need(env, "WORLD_SIZE"),
                rank if local is None else local,
                "torchrun",
                job,
                host,
                port,
            )
        )
    if "OMPI_COMM_WORLD_RANK" in env:
        rank = _need(env, "OMPI_COMM_WORLD_RANK")
        local = _whole(env, "OMPI_COMM_WORLD_LOCAL_RANK")
        job = env.get("PMIX_NAMESPACE", env.get("OMPI_MCA_ess_base_jobid", "none"))
        size = _need(env, "OMPI_COMM_WORLD_SIZE")
        local = rank if local is None else local
        return _checked(Place(rank, size, local, "mpirun", job, host, port))
    if "PMI_RANK" in env and "PMI_SIZE" in env:
        rank = _need(env, "PMI_RANK")
        local = _whole(env, "MPI_LOCALRANKID")
        local = rank if local is None else local
        job = env.get("PMI_JOBID", env.get("HYDI_CONTROL_FD", "none"))
        return _checked(Place(rank, _need(env, "PMI_SIZE"), local, "mpirun", job, host, port))
    if "SLURM_PROCID" in env and "SLURM_NTASKS" in env:
        rank = _need(env, "SLURM_PROCID")
        local = _whole(env, "SLURM_LOCALID")
        job = f"{_need(env, 'SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID', '0')}"
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
        if host is None and nodes:
            host = first_host(nodes)
        if port is None:
            digest = hashlib.blake2b(job.encode(), digest_size=4).digest()
            port = 20000 + int.from_bytes(digest, "big") % 12000
        size = _need(env, "SLURM_NTASKS")
        local = rank if local is None else local
        return _checked(Place(rank, size, local, "srun", job, host, port))
    return None


def first_host(nodes: str) -> str:
    """The first host of a SLURM list: "gpu[03-06,9],cpu1" gives "gpu03"."""
    match = re.match(r"([^\[,]+)(?:\[([0-9]+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise InputError(f"{nodes!r} is no list of hosts")
    return match[1] + (match[2] or "") + (match[3] or "")


def open_group(*, deadline: float | None = None, environ: Mapping[str, str] | None = None) -> Group:
    """The group of the launcher that started this process; waits for its other ranks.

    Raises NotAvailableError if no launcher did, or if it does not tell where the others are;
    RankLostError if they do not come within the deadline; InputError.
    """
    env = os.environ if environ is None else environ
    seconds = _deadline(deadline)
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
    token = hashlib.blake2b(f"{place.launcher} {place.job}".encode(), digest_size=16).hexdigest()
    if place.host is None or place.port is None:
        return _meet_by_file(place, seconds)
    ports = range(place.port + 1, place.port + 1 + _PORTS)
    hub = None
    if place.rank == 0:
        hub = _hub_at(place.host, ports, place.size, token, seconds)
        addresses = [Address(_LOOPBACK, hub.port, token)]
    else:
        addresses = [Address(place.host, port, token) for port in ports]
    return _joined(addresses, place.rank, place.size, seconds, hub)


def new_group_id(size: int, *, host: str = _LOOPBACK, deadline: float | None = None) -> str:
    """A new group's id, for `join_group` in each of its processes; text that is a secret.

    The process that makes it has the group's hub and must live as long as the group; it need not be
    a rank.  `host`: the address of this machine under which the others reach it.
    """
    token = secrets.token_hex(16)
    listen = _LOOPBACK if host in (_LOOPBACK, "localhost") else ""
    hub = Hub(size, host=listen, port=0, token=token, deadline=_deadline(deadline))
    address = str(Address(host, hub.port, token))
    _hubs[address] = hub
    return address


def join_group(group_id: str, *, rank: int, size: int, deadline: float | None = None) -> Group:
    """The group of an id, as rank `rank` of `size`; waits for its other ranks.

    Raises RankLostError if they do not come within the deadline, InputError.
    """
    address = Address.parse(group_id)
    return _joined([address], rank, size, _deadline(deadline), _hubs.pop(group_id, None))


def _joined(
    addresses: list[Address], rank: int, size: int, deadline: float, hub: Hub | None
) -> Group:
    if not (type(size) is int and type(rank) is int and 0 <= rank < size):
        raise InputError(f"rank {rank!r} of {size!r}: a rank is 0 to size - 1")
    try:
        channel = connect(addresses, rank, size, deadline=deadline, hub=hub)
    except BaseException:
        if hub is not None:
            hub.close()
        raise
    group = Group(channel, deadline=deadline)
    try:
        group.barrier("forming the group")
    except BaseException:
        group.close()
        raise
    return group


def _hub_at(host: str, ports: range, size: int, token: str, deadline: float) -> Hub:
    """At the first of the ports that is free; on loopback alone if the others look there."""
    listen = _LOOPBACK if host in (_LOOPBACK, "localhost") else ""
    for port in ports:
        with suppress(OSError):
            return Hub(size, host=listen, port=port, token=token, deadline=deadline)
    raise NotAvailableError(f"no port from {ports[0]} to {ports[-1]} is free for the group's hub")


def _meet_by_file(place: Place, deadline: float) -> Group:
    """Ranks of one launcher on one host, which tells them no address: rank 0 writes its own into a
    file of the launcher's process."""
    path = _meeting_file(place)
    if place.rank == 0:
        token = secrets.token_hex(16)
        hub = Hub(place.size, host=_LOOPBACK, port=0, token=token, deadline=deadline)
        address = Address(_LOOPBACK, hub.port, token)
        with suppress(FileNotFoundError):
            path.unlink()
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(f"{address}\n")
        try:
            return _joined([address], 0, place.size, deadline, hub)
        finally:
            with suppress(FileNotFoundError):
                path.unlink()
    end = time.monotonic() + deadline
    while True:
        with suppress(OSError):
            text = path.read_text()
            if text.endswith("\n") and path.stat().st_uid == os.getuid():
                address = Address.parse(text.strip())
                return _joined([address], place.rank, place.size, deadline, None)
        if time.monotonic() > end:
            raise RankLostError(
                f"rank {place.rank} found no file {path} of rank 0 within {deadline:g} s. Ranks on "
                "several hosts need MASTER_ADDR and MASTER_PORT (mpirun -x MASTER_ADDR=… -x "
                "MASTER_PORT=…)",
                rank=place.rank,
            )
        time.sleep(0.01)


def _meeting_file(place: Place) -> Path:
    """Named for the launcher's process and when it began, so that no other job has it."""
    parent = os.getppid()
    began = ""
    with suppress(OSError, IndexError):
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    name = f"{socket.gethostname()} {place.launcher} {place.job} {parent} {began}"
    digest = hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
    return Path(tempfile.gettempdir()) / f"ostinato-{os.getuid()}-{digest}"


def _deadline(given: float | None) -> float:
    return group_deadline() if given is None else given


def _told(text: str) -> tuple[int, int, str]:
    rank, _, rest = text.partition("/")
    size, _, address = rest.partition("/")
    if not (rank.isdecimal() and size.isdecimal() and address):
        raise InputError(f"OSTINATO_GROUP={text!r} must be rank/size/host:port:token")
    return int(rank), int(size), address


def _checked(place: Place) -> Place:
    if not 0 <= place.rank < place.size or place.local_rank < 0:
        raise InputError(f"{place.launcher} says rank {place.rank} of {place.size}")
    return place


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
        raise InputError(f"{name} is not set, and the launcher's other variables are")
    return value
