"""Which memory may stand for which: types, shapes and strides."""

from __future__ import annotations

import numpy as np
import pytest

from ostinato.graphfile.records import Look, look_of, misfit


def look(typestr: str, *shape: int, strides: tuple[int, ...] | None = None) -> Look:
    return Look(typestr, shape, strides)


@pytest.mark.parametrize(
    ("wanted", "given"),
    [
        (look("<f4", 2, 3), look("<f4", 2, 3)),
        (look("<f4", 2, 3), look("<f4", 5, 3)),
        (look("<f4", 1, 3), look("<f4", 3)),
        (look("<f4"), look("<f4", 1)),
        (look("<V2", 4), look("<u2", 4)),
        (look("<i2", 4), look("|V2", 4)),
        (look("<f4", 2, 3), look("|u1", 24)),
        (look("<f4", 2, 3), None),
        (None, look("<f4", 2, 3, strides=(4, 8))),
        (look("<f4", 3, 2, strides=(4, 12)), look("<f4", 3, 2, strides=(4, 12))),
    ],
)
def test_what_fits(wanted: Look | None, given: Look | None) -> None:
    assert not misfit(wanted, given)


@pytest.mark.parametrize(
    ("wanted", "given"),
    [
        (look("<f2", 4), look("<V2", 4)),  # float16 and bfloat16
        (look("<V2", 4), look("<f2", 4)),
        (look("<f4", 4), look("<i4", 4)),
        (look("<f4", 4), look(">f4", 4)),
        (look("<f4", 4), look("<f8", 2)),
        (look("<f4", 2, 3), look("<f4", 3, 2)),
        (look("<f4", 2, 3), look("<f4", 6)),
        (look("<f4", 2, 3), look("|u1", 2, 12)),
        (look("<f4", 2, 3), look("<f4", 2, 3, strides=(4, 8))),
        (look("<f4", 2, 3, strides=(4, 8)), look("<f4", 2, 3)),
    ],
)
def test_what_does_not(wanted: Look, given: Look) -> None:
    assert misfit(wanted, given)


def test_strides_in_order_are_none() -> None:
    class Strided:
        def __init__(self, array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
            self.__cuda_array_interface__ = {
                **array.__array_interface__,
                "strides": array.strides,
                "data": (array.ctypes.data, False),
            }

    array = np.zeros((2, 3), np.float32)
    assert look_of(Strided(array)) == look("<f4", 2, 3)
    assert look_of(Strided(array.T)) == look("<f4", 3, 2, strides=(4, 12))
    assert look_of(object()) is None
