"""Chooses the collectives of a device."""

from __future__ import annotations

from ostinato import Device
from ostinato.distributed.collectives import Collectives, HostCollectives
from ostinato.distributed.exchange import ExchangeCollectives
from ostinato.distributed.group import Group
from ostinato.errors import InputError, NotAvailableError
from ostinato.settings import COLLECTIVE_WAYS, collectives_way


def open_collectives(
    group: Group, device: Device, way: str | None = None, *, room: int = 0
) -> Collectives:
    """Returns collectives on the device of this rank, for work of one stream at a time.

    All ranks call this in the same order.  A failure of the group ends waits in the collectives;
    the group closes them.  `way`, or OSTINATO_COLLECTIVES if None:

        "auto"      small messages in the ranks' memory (`exchange`) if all reach each other's,
                    others by NCCL.  On the host device everything by the group's channel
        "exchange"  small messages in the ranks' memory, or NotAvailableError
        "library"   everything by NCCL, on the host device by the group's channel

    `room`: bytes of `Collectives.room`, which only the ranks' memory has.  Raises GroupError,
    DisagreementError for ways that differ, and NotAvailableError if NCCL is needed and missing.
    """
    group.check()
    chosen = collectives_way() if way is None else way
    if chosen not in COLLECTIVE_WAYS:
        raise InputError(f"way is {way!r}, must be one of {', '.join(COLLECTIVE_WAYS)}")
    group.agree("collectives", [f"collectives {chosen!r}"])
    on_host = device.capabilities.runs_host_functions
    made: Collectives
    if on_host:
        made = HostCollectives(group, device)
    elif device.driver.cuda_context is not None:
        from ostinato.distributed.nccl import NcclCollectives

        made = NcclCollectives(group, device)
    else:
        raise NotAvailableError(f"{device.name} has no collectives")
    if chosen == "exchange" or (chosen == "auto" and not on_host and group.size > 1):
        try:
            made = ExchangeCollectives(group, device, made, room=room)
        except NotAvailableError as error:  # on all ranks
            if chosen == "exchange":
                made.close()
                raise
            made.name += f" (not in peer memory: {error})"
    group.attach(made)
    return made
