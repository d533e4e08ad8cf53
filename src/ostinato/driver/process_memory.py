"""Memory that this process can read, as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def as_numpy(
    address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object
) -> npt.NDArray[Any]:
    """Returns a writable C-order array over memory, without a copy; it keeps `owner` alive."""
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.asarray(_Memory(address, shape, dtype, owner))


class _Memory:
    def __init__(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "shape": shape,
            "typestr": dtype.str,
            "descr": dtype.descr,
            "data": (address, False),
            "version": 3,
        }
