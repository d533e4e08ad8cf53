"""What a graph file says of where it was saved."""

from __future__ import annotations

from ostinato.driver.context import Context
from ostinato.graphfile.records import MachineRecord

__all__ = ["machine_of"]


def machine_of(context: Context) -> MachineRecord:
    """The device of a context, its driver, and this library."""
    import ostinato

    driver = context.driver
    properties = driver.properties
    return MachineRecord(
        driver.capabilities.source_language,
        properties.name,
        properties.compute_capability,
        properties.driver_version,
        ostinato.__version__,
    )
