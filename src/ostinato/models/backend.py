"""What differs between devices for a decoder: the kernels, the type of the weights, launch shapes.

`host.backend` and `cuda.backend` implement the protocol here.  Everything above it (program, plan,
decoder) is the same for every device, and asks the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from ostinato import Buffer, Kernel, LaunchConfig, Operation, prepare
from ostinato.models.config import LlamaConfig
from ostinato.models.files.checkpoint import Checkpoint
from ostinato.models.program import Argument, KernelCall

__all__ = ["Backend", "BoundCall", "BoundLaunch", "Buffers", "LibraryRows", "Resolve"]

LibraryRows: TypeAlias = int | Literal["auto"] | None
"""From how many rows on a step multiplies with a library where there is one: by `library_rows_for`,
or never.  A piece of a prompt with more than SAMPLED_ROWS does so unless that is never."""
Resolve = Callable[[Argument], object]
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
    arguments: tuple[tuple[str, Argument], ...]

    def operations(self, resolve: Resolve) -> tuple[Operation, ...]:
        """The launch with what stands for its arguments."""
        values = (resolve(value) for _, value in self.arguments)
        return (prepare(self.kernel, self.config, *values),)

    @property
    def programmatic(self) -> bool:
        return self.config.programmatic

    def with_programmatic(self, programmatic: bool) -> BoundLaunch:
        """The same, and whether it may start before the launch before it has ended."""
        return replace(self, config=replace(self.config, programmatic=programmatic))


class Backend(Protocol):
    """How one kind of device runs the program.

    `dtype` is that of matrices and of the KV cache: float32, or uint16 for the bits of bfloat16.
    `packed`: matrices stay as the file packs them (`PackedMatrix`), and `dtype` is the cache's.
    `library`: the one that multiplies in steps of many rows, or why there is none; empty where that
    is no question.
    `spins`: kernels run beside the interpreter, so that the host may look for a token without a
    pause; where they need its lock that would hold them up.  A ring entry reaches the host in one
    store in either case, so what it finds is whole.
    """

    name: str
    dtype: np.dtype[Any]
    packed: bool
    spins: bool

    def piece_rows(self, config: LlamaConfig) -> int:
        """How many tokens of a prompt are best taken at once: the rows of the largest step."""

    @property
    def library(self) -> str:
        """See above."""

    def require_supported(self, config: LlamaConfig, rows: int, sampled: int = 1) -> None:
        """Raises UnsupportedModelError for a model, or steps of up to `rows` rows of which up to
        `sampled` sample, that the kernels cannot compute."""

    def workspace_bytes(self, config: LlamaConfig, rows: Iterable[int], context: int) -> int:
        """Bytes of workspace that serve steps of all these numbers of rows; to be zero at first."""

    def buffers(self, config: LlamaConfig, rows: int) -> Buffers:
        """Shapes and dtypes of what its kernels need besides for steps of up to `rows` rows."""

    def bind(
        self, program: Sequence[KernelCall], config: LlamaConfig, rows: int, context: int
    ) -> tuple[BoundCall, ...]:
        """The program's launches for steps of `rows` rows, with every kernel on the device.

        It may compile and load, so it belongs before a capture.  The end of a step, from `head` on,
        is one launch a call.  Raises CompileError, NoCudaError, DriverError; NotAvailableError if
        the library fails, see `give_up_library`.
        """

    def give_up_library(self, reason: str) -> bool:
        """From here on no library multiplies, for this reason; False if none did."""

    def convert(self, checkpoint: Checkpoint, tensors: Iterable[tuple[str, Buffer]]) -> bool:
        """Converts the file's tensors on the device, into buffers by canonical name.

        Waits until they are there.  False if the device does not convert or there is no file; then
        nothing was done.
        """
