"""`open_device`: in a new process a GPU's driver starts while the library is imported, and with it
NumPy and cuda.core.  Either takes 0.3 s."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ostinato import settings

if TYPE_CHECKING:
    from ostinato.device import Device
    from ostinato.driver.cuda.starting import StartingDriver


def open_device(name: str | int | None = None) -> Device:
    """Opens a device: "host" (or "cpu"), "cuda", "cuda:0", …; a number is that of a GPU.

        device = ost.open_device()          # a GPU if there is one
        device = ost.open_device("host")    # the CPU

    Without a name: OSTINATO_DEVICE, else "cuda:0" if there is a GPU, else "host".
    Raises NoCudaError if a CUDA device is named and there is none, InputError for an unknown name,
    SettingsError for an unknown name in OSTINATO_DEVICE.
    """
    starting = None if "ostinato.device" in sys.modules else _started(name)
    try:
        from ostinato import device

        return device.open_device(name)
    finally:
        if starting is not None:
            starting.release()


def _started(name: str | int | None) -> StartingDriver | None:
    """Starts the driver of a GPU that may be meant, to import modules meanwhile; None without one,
    and where the modules of other libraries are collected, which begins before the driver."""
    if name is None or name == "":
        name = settings.device_name() or "cuda"
    kind, _, number = (f"cuda:{name}" if isinstance(name, int) else str(name)).partition(":")
    if kind != "cuda" or not (number or "0").isdecimal() or settings.COLLECT_MODULES.read():
        return None
    from ostinato.driver.cuda.starting import StartingDriver

    return StartingDriver(int(number or 0))
