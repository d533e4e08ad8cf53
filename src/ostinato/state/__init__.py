"""Device state: values at fixed addresses that graphs read and the host sets between replays."""

from ostinato.state.scalar import DeviceArray, DeviceScalar
from ostinato.state.staging import StagingRing

__all__ = ["DeviceArray", "DeviceScalar", "StagingRing"]
