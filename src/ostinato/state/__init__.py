"""Device state: values at fixed addresses that graphs read and the host sets between replays."""

from ostinato.state.scalar import DeviceArray, DeviceScalar

__all__ = ["DeviceArray", "DeviceScalar"]
