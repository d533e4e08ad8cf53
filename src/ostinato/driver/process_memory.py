"""Memory that this process can read, as NumPy arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


def as_numpy(
    address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object
) -> npt.NDArray[Any]:
    """Returns a writable C-order array over memory, without a copy; it keeps `owner` alive."""
    if 0 in shape:
        return np.empty(shape, dtype)
    interface = {
        "shape": shape,
        "typestr": dtype.str,
        "descr": dtype.descr,
        "data": (address, False),
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface, owner=owner))
