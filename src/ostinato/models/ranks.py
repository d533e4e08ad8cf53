"""Checks that the ranks of a decoder agree, so that none computes nonsense or waits for ever.

Ranks run the same program on the same calls and get the same tokens, bit by bit, if their inputs
are equal.  Three things are compared, so that a difference raises an error on all ranks instead of
a hang or wrong tokens:

    the model, settings, the library's code  when a decoder is made
    each graph, before its first replay      nodes, shapes, order of collectives, machine code
    the caller's calls                       at a step that follows anything but the same step

A plain loop of `decode` compares nothing.  A step that is replayed is launched while its call is
compared: steps of ranks whose calls differ wait for each other on the devices until then, which
the failure of the group ends.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ostinato import Buffer, Device, Graph, GraphExec, Kernel, Operation, __version__
from ostinato.distributed import Group, open_collectives
from ostinato.driver.api import KernelNodeParams
from ostinato.errors import ContextPoisonedError, DriverError, InputError
from ostinato.models.backend import Backend, BoundCall, BoundLaunch, Buffers
from ostinato.models.config import LlamaConfig
from ostinato.models.plan import BufferPlan
from ostinato.models.program import BufferArgument, KernelCall, decode_program
from ostinato.models.sharding import (
    COLLECTIVES,
    BoundCollective,
    Sharding,
    carrying_sums,
    exchanging_products,
    shard_program,
)

_ALIGNED = 256
_TOLD = 8  # the latest calls, for the message of a disagreement


class Ranks:
    """The membership of a decoder in a group.  `sharding`: this rank's share of the model;
    `shared`: shapes and dtypes of the buffers that other ranks read and write, by name."""

    def __init__(
        self,
        group: Group,
        sharding: Sharding,
        device: Device,
        way: str | None = None,
        shared: Buffers | None = None,
    ) -> None:
        self.group = group
        self.sharding = sharding
        sizes = [math.prod(shape) * kind.itemsize for shape, kind in (shared or {}).values()]
        starts = [*accumulate((-(-n // _ALIGNED) * _ALIGNED for n in sizes), initial=0)]
        self.collectives = open_collectives(group, device, way, room=starts[-1])
        self.shared: dict[str, Buffer] = {}
        """The buffers of `shared`; none if the ranks cannot reach each other's memory."""
        if (room := self.collectives.room) is not None:
            for start, (name, (shape, kind)) in zip(starts, (shared or {}).items(), strict=False):
                self.shared[name] = room.view(start, shape, kind)
        self._device = device
        self._agreed: dict[str, str] = {}
        self._calls: deque[str] = deque(maxlen=_TOLD)
        self._chain = hashlib.blake2b(digest_size=16)
        self._compared = True
        self._agreeing: Callable[[], None] | None = None
        self._masks = group.new_lane("masks")
        self.led = False
        """True if rank 0 leads: each of its calls compares those before (`models.leading`)."""

    def close(self) -> None:
        """Closes the collectives, after the graphs that use them are collected.  Idempotent."""
        self._device.context.collect()
        self.collectives.close()

    # --- programs
    def program(
        self,
        *,
        sampled: bool = True,
        whole_logits: bool = False,
        last_row: bool = False,
        lookup: int = 0,
    ) -> tuple[KernelCall, ...]:
        """Returns this rank's program; arguments: see `decode_program` and `shard_program`."""
        part = self.sharding.part
        one = decode_program(part, sampled=sampled, last_row=last_row, lookup=lookup)
        return shard_program(one, self.sharding, whole_logits=whole_logits, last_row=last_row)

    def with_collectives(
        self,
        program: Sequence[KernelCall],
        rows: int,
        *,
        by_products: bool,
        carried: bool,
        shared: bool,
    ) -> tuple[KernelCall | BoundCall, ...]:
        """Returns the program with its collectives bound to the group.  `by_products`: the kernels
        of products compute the sums over all ranks themselves, where these are small enough
        (`Collectives.sums`).  `carried`: the kernels of sums
        write the inputs of the next product, where sums of these rows are in the ranks' memory;
        `shared`: in the buffers of `shared`, where there are some."""
        exchanged = None
        if shared:
            exchanged = self.collectives.shared_sum()
        elif carried:
            exchanged = self.collectives.exchanged_sum(rows * self.sharding.whole.hidden)
        if by_products and self.collectives.sums(rows * self.sharding.whole.hidden) is not None:
            keys = self.collectives.exchanged_sum(2 * rows)
            program = exchanging_products(program, self.sharding, keys)
        elif exchanged is not None:
            program = carrying_sums(program, self.sharding, exchanged, shared=shared)
        return tuple(
            BoundCollective(call, self.collectives, rows, self._programmatic(call, rows))
            if call.kernel in COLLECTIVES
            else call
            for call in program
        )

    def _programmatic(self, call: KernelCall, rows: int) -> bool:
        """True if the collective is one kernel that supports programmatic launch."""
        source = dict(call.arguments).get("source")
        if call.kernel == "accumulate":
            return self.collectives.programmatic(4 * rows * self.sharding.whole.hidden)
        keys = isinstance(source, BufferArgument) and source.name == "key_parts"
        return keys and self.collectives.programmatic(8 * rows, gathers=True)

    def gather_logits(self, plan: BufferPlan) -> tuple[Operation, ...]:
        """Returns the operations that collect all ranks' logits on this rank."""
        part = plan.buffers["logits_part"][: plan.sizes.sequences]
        return self.collectives.all_gather(part, plan.buffers["logits"])

    def fill_masks(
        self,
        fill: Callable[[npt.NDArray[np.uint32]], object],
        words: npt.NDArray[np.uint32],
        span: slice,
    ) -> None:
        """Fills the words of the sequences in `span`: by `fill` on rank 0, with rank 0's words on
        the others.  Raises what `fill` raises, InputError on the other ranks, GroupError."""
        self.agreed()
        group, made = self.group, b""
        try:
            if group.rank == 0:
                fill(words)
                made = words[span].tobytes()
        finally:  # the others wait for it
            label = "rank 0's masks"
            parts = group.channel.exchange(self._masks, label, made, group.deadline)
        if group.rank:
            if not parts[0]:
                raise InputError("rank 0 could not make the masks of this step; its error says why")
            words[span] = np.frombuffer(parts[0], np.uint32).reshape(words[span].shape)

    # --- agreement
    def agree_model(
        self, config: LlamaConfig, backend: Backend, plan: BufferPlan, steps: str
    ) -> None:
        """Compares the model, the decoder's sizes and the graph settings in `steps` (a rank that
        captures and one that does not would wait for each other).  The last norm, which every rank
        has whole, stands for the weights.  Raises DisagreementError on all ranks, GroupError."""
        with self._device.create_stream() as stream:
            norm = plan.weights.buffer("final_norm").to_numpy(stream).tobytes()
        lines = [
            f"ostinato {__version__}, sources {_sources()}",
            f"model {config}",
            f"final norm {hashlib.blake2b(norm, digest_size=16).hexdigest()}",
            f"backend {backend.name}, {backend.dtype}, packed {backend.packed}",
            f"{plan.sizes}",
            steps,
            f"collectives by {self.collectives.name}",
        ]
        self.group.agree("the decoder", lines)

    def agree_graph(
        self, key: str, code: Sequence[str], make: Callable[[], GraphExec]
    ) -> GraphExec:
        """Returns the executable made by `make`, after all ranks have compared theirs for `key`.

        `code`: lines that identify the kernels.  A rank whose `make` fails reports it to the
        others.  A graph made again is compared with the agreed digest, without communication.
        Raises the errors of `make`, DisagreementError on all ranks, GroupError.
        """
        self.agreed()
        lines = [f"ostinato {__version__}", *code]
        try:
            executable = make()
        except ContextPoisonedError:
            raise
        except Exception as error:
            self.group.agree(key, [*lines, f"no graph: {type(error).__name__}: {error}"])
            raise
        try:
            lines += _described(executable.graph)
            digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=32).hexdigest()
            if self._agreed.get(key) != digest:
                self.group.agree(key, lines)
                self._agreed[key] = digest
        except Exception:
            executable.close()
            raise
        return executable

    def code_of(self, bound: Iterable[BoundCall]) -> list[str]:
        """Returns a line for each kernel of ours: its name, and the digest of its machine code, or
        "none" if the driver cannot read the code."""
        lines: dict[str, None] = {}
        for call in bound:
            if isinstance(call, BoundLaunch):
                lines[f"code of {call.kernel.name}: {self._code(call.kernel)}"] = None
        return list(lines)

    def _code(self, kernel: Kernel) -> str:
        try:
            code = self._device.driver.function_code(kernel.function)
        except DriverError:  # the host's kernels have none; the library's version covers them
            return "none"
        return hashlib.blake2b(code.data, digest_size=8).hexdigest()

    def note(self, call: str, *, again: bool = False) -> None:
        """Notes a call of the decoder's caller, which all ranks must make alike.  `again`: note the
        call even right after an equal one."""
        if again or not self._calls or self._calls[-1] != call:
            self._calls.append(call)
            self._chain.update(call.encode() + b"\n")
            self._compared = False

    @property
    def digest(self) -> str:
        """The digest of all calls noted so far."""
        return self._chain.hexdigest()

    def agree_calls(self) -> None:
        """Begins to compare the calls of all ranks if any were noted since the last comparison;
        `agreed` waits for the result.  Raises GroupError."""
        if not self._compared and not self.led:
            self.agreed()
            lines = [*self._calls, f"all calls so far: {self.digest}"]
            self._agreeing = self.group.begin_agreement("calls of the decoder", lines)
            self._compared = True

    def agreed(self) -> None:
        """Returns once all ranks have compared their calls.  Raises DisagreementError on all ranks,
        GroupError."""
        wait, self._agreeing = self._agreeing, None
        if wait is not None:
            wait()

    def check(self) -> None:
        """Raises GroupError if the group has failed: for the ranks' calls, if these differ."""
        if self.group.failure is not None:
            self.agreed()
        self.group.check()


@functools.cache
def _sources() -> str:
    """Returns the digest of the sources that make steps: two builds of one version may differ."""
    digest = hashlib.blake2b(digest_size=8)
    package = Path(__file__).parents[1]
    for folder in (package / "distributed", package / "models"):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _described(graph: Graph) -> list[str]:
    """Returns a line for each node, and the graph's digest, which covers edges and bodies too."""
    lines = []
    for index, node in enumerate(graph.nodes()):
        shape = ""
        if isinstance(params := node.params, KernelNodeParams):
            config = params.config
            shape = f" grid {config.grid} block {config.block} shared {config.shared}"
        lines.append(f"node {index}: {node.kind.name.lower()} {node.name}{shape}")
    return [*lines, f"graph {graph.digest()}"]
