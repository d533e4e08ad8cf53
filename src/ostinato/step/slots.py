"""Slots: the static buffers that a step reads and writes, and the contract for their padding.

The graph of a bucket covers more rows than are in use.  The rows beyond the real size are padding.
The contract, by role:

    "input"    padding holds any value; no row in use may depend on it
    "output"   padding may be written with any value
    "state"    the step must leave padding unchanged, unless the slot has `scratch_padding`
    "scratch"  no rule

A kernel keeps the contract if it reads the real size on the device: `sizes.on_device("rows")`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ostinato.driver.api import require_word
from ostinato.driver.context import Context
from ostinato.driver.signature import dtype_name, exact_array
from ostinato.errors import InputError
from ostinato.memory import Buffer

Values = npt.NDArray[Any]
_ROLES = ("input", "output", "state", "scratch")


@dataclass(frozen=True, slots=True)
class Slot:
    """A static buffer of a step.

    `role` is what the step does with it:

    * "input": the caller fills it before the step, and the step only reads it;
    * "output": the step writes all rows in use, and reads none of it before;
    * "state": the step reads and changes it, and a check puts it back between its runs;
    * "scratch": its content before and after the step does not matter; no check compares it.

    `size` is the name of the size argument that gives the number of rows in use, along the first
    axis; the rows beyond it are padding.  `poison` are two different values with which a check
    fills padding; a kernel must be able to read them (a token id must exist).  Without it, a check
    uses NaN and a large number for floats; for whole numbers, flags and structs it uses values of
    rows in use, in another order.  In a third run, padding of floats without `poison` is a large
    negative number, whole numbers in padding that lie within the range of the rows in use are the
    largest of these, and all other padding keeps its values.  `scratch_padding`: the step may
    change padding rows of a "state".

    No check finds a read of old values beyond the end of a row in use (a short block table in a
    wide row): write the whole row, or let the step read the row's length.

    A buffer without a name gets the slot's, for tables of graphs and reports of faults.

    Raises InputError if `buffer` is not a Buffer, for another role, if `size` is not a name or the
    buffer has no rows, and if the poisons are equal or do not fit the dtype.
    """

    name: str
    buffer: Buffer
    role: Literal["input", "output", "state", "scratch"]
    size: str | None = None
    poison: tuple[float, float] | None = None
    scratch_padding: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.buffer, Buffer):
            raise InputError(
                f"slot {self.name!r}: a Buffer is needed, not {type(self.buffer).__name__} "
                "(device.adopt_array for another library's; .buffer of device state)"
            )
        require_word(f"slot {self.name!r}: role", self.role, _ROLES)
        if not (self.size is None or isinstance(self.size, str)):
            raise InputError(
                f"slot {self.name!r}: size={self.size!r}: the name of a size argument is needed, "
                'such as "rows"'
            )
        if self.size is not None and not self.buffer.shape:
            raise InputError(f"slot {self.name!r} has a size, but its buffer has no rows")
        if self.poison is not None:
            self._check_poison(self.poison)
        self.buffer.name = self.buffer.name or self.name

    def _check_poison(self, poison: tuple[float, float]) -> None:
        dtype = self.buffer.dtype
        try:
            made = [everywhere(dtype, value) for value in poison]
        except (InputError, TypeError) as error:
            raise InputError(
                f"slot {self.name!r}: poisons {poison} do not fit {dtype_name(dtype)}: {error}"
            ) from None
        if len(made) != 2 or made[0].tobytes() == made[1].tobytes():
            raise InputError(
                f"slot {self.name!r}: two poisons that differ are needed, not {poison}"
            )

    def rows(self, sizes: Mapping[str, int]) -> int | None:
        """Returns the number of rows in use; None if all are.

        Raises InputError for a size that this call does not give, or over the buffer's rows.
        """
        if self.size is None:
            return None
        if self.size not in sizes:
            raise InputError(
                f"slot {self.name!r} takes its number of rows from the size {self.size!r}, which "
                f"this call does not give (it gives {', '.join(sizes) or 'none'})"
            )
        used = sizes[self.size]
        if used > len(self.buffer):
            raise InputError(
                f"{self.size}={used}: slot {self.name!r} has only {len(self.buffer)} rows"
            )
        return used

    def poisoned(self, values: Values, rows: int, which: int, turn: int) -> Values:
        """Returns a copy of the slot's values with poison number `which` (0 to 2) in the rows from
        `rows` on.

        `turn` is the slot's index: neighbours get the two values in opposite order, so that padding
        of two whole-number inputs does not repeat one row in use.
        """
        padded = values.copy()
        used, padding = values[:rows], padded[rows:]
        kind = values.dtype.kind
        if self.poison is not None:
            if which < 2:
                padding[...] = everywhere(self.buffer.dtype, self.poison[which])
        elif kind == "f":
            large = np.finfo(values.dtype).max / 4
            padding[...] = (np.nan, large, -large)[which]
        elif kind == "c":
            padding[...] = (complex(np.nan, np.nan), 1e30, -1e30)[which]
        elif kind in "iub":
            low, high = (used.min(), used.max()) if used.size else (0, 1)
            if low == high:
                high = 0 if low else 1
            if which < 2:
                padding[...] = (low, high)[(which + turn) % 2]
            else:  # kept where a maximum or minimum shows it; `high` in all slots elsewhere, since
                # the sum of two inputs is the same when these have changed places
                padding[(low <= padding) & (padding <= high)] = high
        elif len(used) and which < 2:  # structs: copies of used rows, which are valid as a whole
            padding[...] = used[0] if (which + turn) % 2 == 0 else used[-1]
        return padded


def everywhere(dtype: np.dtype[Any], value: float) -> Values:
    """One element that is this number; of a struct all numbers.  Raises InputError if one does not
    fit."""
    if dtype.names is None:
        return exact_array(dtype, value)
    made = np.zeros((), dtype)
    for name in dtype.names:
        made[name] = everywhere(dtype[name].base, value)
    return made


def check_slots(slots: Sequence[Slot], context: Context) -> None:
    """Raises InputError unless all are Slots of one device, with different names and disjoint
    memory."""
    for given in slots:
        if not isinstance(given, Slot):
            raise InputError(f"slots: a list of Slots is needed, and {given!r} is not a Slot")
        context.space.require(given.buffer, f"slot {given.name!r}: its buffer", "the step is of")
    for index, slot in enumerate(slots):
        for other in slots[:index]:
            if slot.name == other.name:
                raise InputError(f"two slots are called {slot.name!r}")
            if slot.buffer.range.overlaps(other.buffer.range):
                raise InputError(
                    f"slots {other.name!r} and {slot.name!r} overlap in memory; declare the whole "
                    "buffer once, with the role of what the step does with it"
                )


def check_verify(verify: object, slots: Sequence[Slot]) -> None:
    """Raises InputError for an unknown value of `verify`, and for a check without slots."""
    if verify == "off":
        return
    number = isinstance(verify, int) and not isinstance(verify, bool) and verify >= 1
    if verify != "first" and not number:
        raise InputError(f'verify={verify!r}: "off", "first", or N >= 1 to check each Nth replay')
    if not slots:
        raise InputError("verify needs the slots that the step reads and writes")
