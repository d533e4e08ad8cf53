"""The protocol of a decoder's backend: a device's kernels, weight types and launch shapes.

`host.backend` and `cuda.backend` implement it.  Everything above (program, plan, decoder) is the
same for every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from ostinato import Kernel, LaunchConfig, Operation, prepare
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.bricks import Formats
from ostinato.models.files.checkpoint import Checkpoint
from ostinato.models.program import SAMPLED_ROWS, CallArgument, KernelCall
from ostinato.models.weights import WeightTarget

WeightsKind: TypeAlias = Literal["auto", "packed", "bf16"]
"""The form of matrices on a device: packed as in the file, or bfloat16; "auto" is the faster."""
LibraryRows: TypeAlias = int | Literal["auto"] | None
"""The least number of rows for which a step's products use a library: a number, "auto" for the
result of `library_rows_for`, or None for never.  Unless None, pieces of a prompt of more than
SAMPLED_ROWS rows always use it."""
Resolve = Callable[[CallArgument], object]
Buffers = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shapes and dtypes of buffers, by name."""


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """The model that a decoder's kernels compute: its config, the positions of a sequence, and the
    formats of the matrices that are packed in the device's own order."""

    config: LlamaConfig
    context: int
    formats: Formats = field(default_factory=dict)


class BoundCall(Protocol):
    """One or more program calls as launches whose kernels are loaded on the device."""

    @property
    def programmatic(self) -> bool:
        """True if the launch may start before the preceding launch has ended."""
        ...

    def with_programmatic(self, programmatic: bool) -> BoundCall:
        """Returns a copy with this `programmatic`, or an equal one if the launch cannot change."""
        ...

    def operations(self, resolve: Resolve) -> tuple[Operation, ...]:
        """Returns the launches; `resolve` maps each argument.  Raises NotAvailableError."""
        ...


@dataclass(frozen=True, slots=True)
class BoundLaunch:
    """A program call bound for one number of rows: a loaded kernel, its launch shape, and its
    arguments by parameter name, in the kernel's order."""

    kernel: Kernel
    config: LaunchConfig
    arguments: tuple[tuple[str, CallArgument], ...]

    def operations(self, resolve: Resolve) -> tuple[Operation, ...]:
        """Returns the launch; `resolve` maps each argument."""
        values = (resolve(value) for _, value in self.arguments)
        return (prepare(self.kernel, self.config, *values),)

    @property
    def programmatic(self) -> bool:
        return self.config.programmatic

    def with_programmatic(self, programmatic: bool) -> BoundLaunch:
        """Returns a copy with this `programmatic`."""
        return replace(self, config=replace(self.config, programmatic=programmatic))


class Backend(Protocol):
    """The kernels of one kind of device.  The default methods are for a device that supports every
    model and needs no further buffers, no library and no conversion.

    `dtype`: type of matrices and of the KV cache, float32, or uint16 for the bits of bfloat16.
    `packed`: matrices stay as the file packs them (`PackedMatrix`), and `dtype` is the cache's.
    `library`: the library that computes products in steps of many rows, or the reason why none
    does; empty for a device that has no such library.
    `spins`: the host may poll for a token in a busy loop.  False where kernels need the
    interpreter's lock, which such a loop would hold.  A ring entry is written in one store in
    either case, so the host never reads half of an entry.
    `alike_rows`: the most rows of a step in which no bit of a row depends on the other rows.
    """

    name: str
    dtype: np.dtype[Any]
    packed: bool
    spins: bool
    library: str = ""
    alike_rows: int = SAMPLED_ROWS

    def piece_rows(self, config: LlamaConfig) -> int:
        """Returns the rows of the largest step: the number of prompt tokens best read at once."""

    def require_supported(self, config: LlamaConfig, rows: int, sampled: int = 1) -> None:
        """Raises UnsupportedModelError if the kernels cannot compute this model, or its steps of up
        to `rows` rows of which up to `sampled` sample."""
        return

    def formats(self, checkpoint: Checkpoint, wanted: WeightsKind) -> Formats:
        """Returns the formats of the checkpoint's matrices to pack in the device's own order.

        Raises InputError if the device or the checkpoint cannot provide what is `wanted`.
        """

    def workspace_bytes(self, model: DeviceModel, rows: Iterable[int]) -> int:
        """Returns the bytes of workspace for steps of any of these numbers of rows.  The caller
        must zero the workspace once."""

    def buffers(self, model: DeviceModel, rows: int) -> Buffers:
        """Returns shapes and dtypes, by name, of further buffers that the kernels need for steps of
        up to `rows` rows."""
        return {}

    def exchanges_sums(self, model: DeviceModel, rows: int) -> bool:
        """True if `bind` accepts the products of `sharding.exchanging_products` for such steps."""
        return False

    def carries_sums(self, model: DeviceModel, rows: int) -> bool:
        """True if `bind` accepts the sums of `sharding.carrying_sums` for such steps."""
        return False

    def shares_sums(self, model: DeviceModel, rows: int) -> bool:
        """True if `bind` accepts the shared sums of `sharding.carrying_sums` for such steps."""
        return False

    def shared_buffers(self, model: DeviceModel, rows: int, ranks: int) -> Buffers:
        """Returns shapes and dtypes, by name, of the buffers that other ranks write where sums are
        shared, in steps of up to `rows` rows."""
        return {}

    def bind(
        self, program: Sequence[KernelCall | BoundCall], model: DeviceModel, rows: int
    ) -> tuple[BoundCall, ...]:
        """Loads the program's kernels for steps of `rows` rows and returns the launches in order.
        A call of the program that is bound already is kept in its place.

        The method may compile and load kernels, so the caller must call it before a capture.  From
        `head` on, each call becomes one `BoundCall`.  Raises CompileError, NoCudaError,
        DriverError; NotAvailableError if the library fails, see `give_up_library`.
        """

    def give_up_library(self, reason: str) -> bool:
        """Stops using the library, with `reason` for the statistics; False if none was in use."""
        return False

    def convert(self, checkpoint: Checkpoint, tensors: Iterable[tuple[str, WeightTarget]]) -> bool:
        """Converts the file's tensors on the device into their target buffers, by canonical name,
        or reorders their packed bytes.

        Waits until the values are in place.  Returns False, and does nothing, if the device cannot
        convert or the checkpoint has no file.
        """
        return False
