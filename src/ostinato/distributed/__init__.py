"""Several devices that work as one: ranks, their exchanges, and failures that end all of them.

launch        this process's rank and size, and the address of the others (torchrun, mpirun, SLURM)
channel       messages between ranks beside the device; one failure for all
sockets       the channel of ranks that are processes
group         Group: exchanges, agreement, the watchdog
collectives   all-reduce, all-gather, broadcast as operations; those of the host device
nccl          collectives by NCCL, for CUDA devices
exchange      collectives of small messages, in the ranks' own memory
opening       chooses the collectives of a device
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
