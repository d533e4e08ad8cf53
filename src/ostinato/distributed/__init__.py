"""Several devices that work as one: ranks, what they exchange, and how a failure ends them all.

launch        who this process is: rank, size, where the others are (torchrun, mpirun, SLURM)
channel       what ranks tell each other beside the device; one failure for all
sockets       the channel of processes
group         Group: exchanges, agreement, the watchdog
collectives   all-reduce, all-gather, broadcast as operations; the host's
nccl          NCCL's, for CUDA devices
exchange      those of small messages, in the ranks' own memory
opening       which of them a device has
"""

from ostinato.distributed.channel import Channel, Failure
from ostinato.distributed.collectives import Collectives
from ostinato.distributed.group import Group, GroupStatistics, LocalGroups, local_groups
from ostinato.distributed.launch import Place, join_group, new_group_id, open_group, place_of
from ostinato.distributed.opening import open_collectives

__all__ = [
    "Channel",
    "Collectives",
    "Failure",
    "Group",
    "GroupStatistics",
    "LocalGroups",
    "Place",
    "join_group",
    "local_groups",
    "new_group_id",
    "open_collectives",
    "open_group",
    "place_of",
]
