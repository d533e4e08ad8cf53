"""What a decoder that is one rank of several does besides: it agrees, and does not wait for ever.

Ranks run the same program on the same calls and get the same tokens, bit by bit, as long as they
are given the same.  Three things are compared, so that a difference is an error on all ranks and no
hang, and no token that means nothing:

    the model, settings, the library's code  when a decoder is made
    each graph, before its first replay      nodes, shapes, order of collectives, machine code
    the caller's calls                       before a step that follows anything but the same step

A plain loop of `decode` compares nothing.
"""

from __future__ import annotations

import functools
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ostinato import Device, Graph, GraphExec, Kernel, Operation, __version__
from ostinato.distributed import Group, open_collectives
from ostinato.driver.api import KernelNodeParams
from ostinato.errors import ContextPoisonedError, DriverError
from ostinato.models.backend import Backend, BoundCall, BoundLaunch
from ostinato.models.config import LlamaConfig
from ostinato.models.plan import BufferPlan
from ostinato.models.program import BufferArgument, KernelCall, decode_program
from ostinato.models.sharding import (
    COLLECTIVES,
    BoundCollective,
    Sharding,
    exchanging_products,
    shard_program,
)

_TOLD = 8  # calls that a message of a disagreement can go back


class Ranks:
    """One decoder's part in its group.  `sharding`: what this rank has of the model."""

    def __init__(
        self, group: Group, sharding: Sharding, device: Device, way: str | None = None
    ) -> None:
        self.group = group
        self.sharding = sharding
        self.collectives = open_collectives(group, device, way)
        self._device = device
        self._agreed: dict[str, str] = {}
        self._calls: deque[str] = deque(maxlen=_TOLD)
        self._chain = hashlib.blake2b(digest_size=16)
        self._compared = True

    def close(self) -> None:
        """Gives the collectives back, once no graph has them any more.  Idempotent."""
        self._device.context.collect()
        self.collectives.close()

    # --- programs
    def program(
        self, *, sampled: bool = True, whole_logits: bool = False, last_row: bool = False
    ) -> tuple[KernelCall, ...]:
        """This rank's layer program; arguments as for `decode_program` and `shard_program`."""
        one = decode_program(self.sharding.part, sampled=sampled, last_row=last_row)
        return shard_program(one, self.sharding, whole_logits=whole_logits, last_row=last_row)

    def with_collectives(
        self, program: Sequence[KernelCall], rows: int, *, by_products: bool
    ) -> tuple[KernelCall | BoundCall, ...]:
        """The program with its collectives bound to the group.  `by_products`: products add their
        sums over all ranks themselves."""
        if by_products:
            program = exchanging_products(program, self.sharding)
        return tuple(
            BoundCollective(call, self.collectives, rows, self._programmatic(call, rows))
            if call.kernel in COLLECTIVES
            else call
            for call in program
        )

    def _programmatic(self, call: KernelCall, rows: int) -> bool:
        """Whether the collective can be one launch in the chain of the program's launches."""
        source = dict(call.arguments).get("source")
        if call.kernel == "accumulate":
            nbytes = 4 * rows * self.sharding.whole.hidden
        elif isinstance(source, BufferArgument) and source.name == "key_parts":
            nbytes = 8 * rows
        else:
            return False
        return self.collectives.programmatic(nbytes)

    def gather_logits(self, plan: BufferPlan) -> tuple[Operation, ...]:
        """What gives this rank all ranks' logits."""
        return self.collectives.all_gather(plan.buffers["logits_part"], plan.buffers["logits"])

    # --- agreement
    def agree_model(
        self, config: LlamaConfig, backend: Backend, plan: BufferPlan, steps: str
    ) -> None:
        """Compares the model, the decoder's sizes, and how its steps come to be graphs (`steps`):
        ranks of which one captures and one does not wait for each other.  Of the weights, the last
        norm's, which every rank has.  Raises DisagreementError on all ranks, GroupError."""
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
        """The executable that `make` gives, once all ranks are known to have the same for `key`.

        `code`: what its kernels are, in lines.  A rank that cannot make one tells the others.
        A graph that is made again is compared with what was agreed on, and nothing travels.
        Raises what `make` raises, DisagreementError on all ranks, GroupError.
        """
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
        """A line for each kernel of ours: its name, and the digest of its machine code if it is
        known."""
        lines: dict[str, None] = {}
        for call in bound:
            if isinstance(call, BoundLaunch):
                lines[f"code of {call.kernel.name}: {self._code(call.kernel)}"] = None
        return list(lines)

    def _code(self, kernel: Kernel) -> str:
        try:
            code = self._device.driver.function_code(kernel.function)
        except DriverError:  # the host's kernels have none; they are of this version
            return "none"
        return hashlib.blake2b(code.data, digest_size=8).hexdigest()

    def note(self, call: str, *, again: bool = False) -> None:
        """A call of the decoder's caller, which all ranks must make alike.  `again`: it counts
        also right after the same call."""
        if again or not self._calls or self._calls[-1] != call:
            self._calls.append(call)
            self._chain.update(call.encode() + b"\n")
            self._compared = False

    def agree_calls(self) -> None:
        """Compares what the callers of all ranks did since the last time, if they did anything.
        Raises DisagreementError on all ranks, GroupError."""
        if not self._compared:
            lines = [*self._calls, f"all calls so far: {self._chain.hexdigest()}"]
            self.group.agree("calls of the decoder", lines)
            self._compared = True


@functools.cache
def _sources() -> str:
    """The digest of what makes steps: two builds of one version may differ."""
    digest = hashlib.blake2b(digest_size=8)
    package = Path(__file__).parents[1]
    for folder in (package / "distributed", package / "models"):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _described(graph: Graph) -> list[str]:
    """A line for each node, and the graph's digest, which covers edges and bodies too."""
    lines = []
    for index, node in enumerate(graph.nodes()):
        shape = ""
        if isinstance(params := node.params, KernelNodeParams):
            config = params.config
            shape = f" grid {config.grid} block {config.block} shared {config.shared}"
        lines.append(f"node {index}: {node.kind.name.lower()} {node.name}{shape}")
    return [*lines, f"graph {graph.digest()}"]
