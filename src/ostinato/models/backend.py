"""What differs between devices for a decoder: the kernels, the type of the weights, launch shapes.

`host.backend` and `cuda.backend` implement the protocol here.  Everything above it (program, plan,
decoder) is the same for every device, and asks the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from ostinato import Kernel, LaunchConfig, Operation, prepare
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.bricks import Formats
from ostinato.models.files.checkpoint import Checkpoint
from ostinato.models.program import CallArgument, KernelCall
from ostinato.models.weights import WeightTarget

WeightsKind: TypeAlias = Literal["auto", "packed", "bf16"]
"""What matrices are on a device: packed as in the file, or bfloat16; "auto" is what is faster."""
UNPACKED: Formats = MappingProxyType({})
"""No matrix is packed."""

LibraryRows: TypeAlias = int | Literal["auto"] | None
"""The least number of rows of a step that multiplies with a library: a number, "auto" for that of
`library_rows_for`, or None for never.  Pieces of a prompt of more than SAMPLED_ROWS rows always
multiply with it, unless this is None."""
Resolve = Callable[[CallArgument], object]
Buffers = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


class BoundCall(Protocol):
    """What a call of the program became: launches whose kernels are on the device."""

    @property
    def programmatic(self) -> bool:
        """Whether its launch may start before the launch before it has ended."""
        ...

    def with_programmatic(self, programmatic: bool) -> BoundCall:
        """A copy with this `programmatic`; the same where the launch has no choice."""
        ...

    def operations(self, resolve: Resolve) -> tuple[Operation, ...]:
        """Its launches, with what `resolve` gives for the arguments.  Raises NotAvailableError."""
        ...


@dataclass(frozen=True, slots=True)
class BoundLaunch:
    """A call of the program for one number of rows: a loaded kernel, its launch shape, and its
    arguments by parameter, in the kernel's own order."""

    kernel: Kernel
    config: LaunchConfig
    arguments: tuple[tuple[str, CallArgument], ...]

    def operations(self, resolve: Resolve) -> tuple[Operation, ...]:
        """The launch, with what `resolve` gives for its arguments."""
        values = (resolve(value) for _, value in self.arguments)
        return (prepare(self.kernel, self.config, *values),)

    @property
    def programmatic(self) -> bool:
        return self.config.programmatic

    def with_programmatic(self, programmatic: bool) -> BoundLaunch:
        """The same, and whether it may start before the launch before it has ended."""
        return replace(self, config=replace(self.config, programmatic=programmatic))


class Backend(Protocol):
    """How one kind of device runs the program.  Its answers here are those of a device that needs
    and has nothing more: every model, no further buffers, no library, no conversion.

    `dtype` is that of matrices and of the KV cache: float32, or uint16 for the bits of bfloat16.
    `packed`: matrices stay as the file packs them (`PackedMatrix`), and `dtype` is the cache's.
    `formats`, an argument: the matrices that are packed in the device's own order.
    `library`: the library that multiplies in steps of many rows, or why none does; empty for a
    device that has no such libraries.
    `spins`: the host may look for a token in a busy loop.  Off where kernels need the interpreter's
    lock, which such a loop would keep from them.  A ring entry is written in one store in either
    case, so the host never reads half of one.
    """

    name: str
    dtype: np.dtype[Any]
    packed: bool
    spins: bool
    library: str = ""

    def piece_rows(self, config: LlamaConfig) -> int:
        """How many tokens of a prompt are best taken at once: the rows of the largest step."""

    def require_supported(self, config: LlamaConfig, rows: int, sampled: int = 1) -> None:
        """Raises UnsupportedModelError for a model, or steps of up to `rows` rows of which up to
        `sampled` sample, that the kernels cannot compute."""
        return

    def formats(self, checkpoint: Checkpoint, wanted: WeightsKind) -> Formats:
        """The matrices of a checkpoint that are to be packed in the device's own order.

        Raises InputError if the device or the checkpoint cannot give what is wanted.
        """

    def workspace_bytes(
        self,
        config: LlamaConfig,
        rows: Iterable[int],
        context: int,
        *,
        formats: Formats = UNPACKED,
    ) -> int:
        """Bytes of workspace for steps of any of these numbers of rows.  The caller must fill it
        with zeros once."""

    def buffers(self, config: LlamaConfig, rows: int, *, formats: Formats = UNPACKED) -> Buffers:
        """Further buffers that its kernels need for steps of up to `rows` rows, by name: shapes and
        dtypes."""
        return {}

    def exchanges_sums(
        self, config: LlamaConfig, rows: int, context: int, *, formats: Formats = UNPACKED
    ) -> bool:
        """Whether `bind` takes the products of `sharding.exchanging_products` for such steps."""
        return False

    def bind(
        self,
        program: Sequence[KernelCall | BoundCall],
        config: LlamaConfig,
        rows: int,
        context: int,
        *,
        formats: Formats = UNPACKED,
    ) -> tuple[BoundCall, ...]:
        """The program's launches for steps of `rows` rows, with every kernel on the device.  What
        is bound already stays in its place.

        It may compile and load, so it belongs before a capture.  The end of a step, from `head` on,
        is one launch a call.  Raises CompileError, NoCudaError, DriverError; NotAvailableError if
        the library fails, see `give_up_library`.
        """

    def give_up_library(self, reason: str) -> bool:
        """From here on no library multiplies, for this reason; False if none did."""
        return False

    def convert(self, checkpoint: Checkpoint, tensors: Iterable[tuple[str, WeightTarget]]) -> bool:
        """Converts the file's tensors on the device, into buffers by canonical name, or puts their
        packed bytes in order.

        Waits until they are there.  False if the device does not convert or there is no file; then
        nothing was done.
        """
        return False
