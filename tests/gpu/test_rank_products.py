"""Products of several rows that add the sums of two ranks, which share one GPU: they are threads of
this process, so that a window's address is its handle."""

from __future__ import annotations

import pytest

from ostinato.device import Device, open_device
from ostinato.distributed import Group, local_groups
from ostinato.distributed.collectives import HostCollectives
from ostinato.distributed.exchange import ExchangeCollectives
from ostinato.models.cuda.backend import load_kernel
from tests.distributed.products_program import CUTS, compare

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("cut", CUTS)
def test_products_of_several_rows_add_the_sums_of_two_ranks(
    cuda_device: Device, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """`products_program`: the same results on both ranks, and NumPy's."""
    driver = type(cuda_device.driver)
    monkeypatch.setattr(driver, "memory_share", lambda _, address: str(address).encode())
    monkeypatch.setattr(driver, "memory_open_shared", lambda _, handle: int(handle))
    monkeypatch.setattr(driver, "memory_end_shared", lambda _, address: None)
    # To allocate, as the trial does, may wait for the other rank's kernel, which waits too.
    monkeypatch.setattr(ExchangeCollectives, "_try_out", lambda _: None)

    def work(group: Group) -> list[bytes]:
        with (
            open_device(cuda_device.name) as device,
            ExchangeCollectives(group, device, HostCollectives(group, device)) as made,
        ):
            group.attach(made)
            found = compare(
                group, device, made, cut, lambda launch: load_kernel(device.modules, launch)
            )
            group.barrier()
            return found

    with local_groups(2, deadline=60) as groups:
        one, other = groups.run(work)
    assert one == other
