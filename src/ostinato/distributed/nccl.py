"""Collectives by NCCL, for CUDA devices: one process per GPU, on one or several hosts.

NCCL is called once for each collective on given buffers: the call is captured, and its launch is
extracted from the graph (`ostinato.lift`), as for products of cuBLASLt.  So a collective is a
launch like any other: in eager runs, captures, recordings and the bodies of loops.  The captured
graph is kept as long as the launch can run: NCCL frees the launch's resources with it.

The first collective of each kind and size is tested on other memory, NCCL's own call beside the
lifted launch, on all ranks together; both must give the same bits.  That also makes NCCL connect
the ranks, which it does not do inside a capture.

Not supported: collectives for which NCCL needs a host thread, as over a network without GPUDirect
in some setups.  Their captured graph has a host node, and NotAvailableError is raised.

NCCL must order its work with captures and graphs by the stream alone.  Otherwise it adds event
nodes to each capture, which no loop's body can contain.  That is a setting of the communicator
since NCCL 2.29, of the environment before (NCCL_GRAPH_MIXING_SUPPORT, set here unless it is set).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ostinato import (
    Buffer,
    Device,
    Graph,
    LaunchConfig,
    Operation,
    Source,
    Stream,
    capture,
    lift,
    prepare,
)
from ostinato.distributed.collectives import Collectives, Gathered, remembered
from ostinato.distributed.group import Group, checked_root
from ostinato.errors import (
    CaptureError,
    ContextPoisonedError,
    DriverError,
    GraphError,
    GroupError,
    NotAvailableError,
)

_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"
_THREADS = 256
_PATIENCE = 5.0
"""Seconds that `close` waits for the other ranks to close too, and process exit for NCCL calls."""
_CALLS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads in which NCCL is called."""


def _call_beside(what: str, call: Callable[[], object]) -> threading.Thread:
    """Calls NCCL on a new thread."""
    thread = threading.Thread(target=call, name=f"ostinato: {what}", daemon=True)
    _CALLS.add(thread)
    thread.start()
    return thread


@atexit.register
def _wait_for_calls() -> None:
    """Waits for NCCL calls at process exit: a process that ends during such a call crashes (seen
    with ranks that ended while their communicator was aborted)."""
    end = time.monotonic() + _PATIENCE
    for thread in list(_CALLS):
        thread.join(max(0.0, end - time.monotonic()))


@cache
def kernels() -> Source:
    """Returns the kernels that collectives need besides NCCL's own."""
    return Source(
        (Path(__file__).parent / "kernels" / "collectives.cu").read_text(encoding="utf-8"),
        signatures={
            "add_reduced": "target: *f32, partial: *f32, count: u32",
            "interleave": "parts: *const u32, out: *out u32, lines: u32, ranks: u32, words: u32",
        },
        name="collectives.cu",
    )


def load_nccl() -> Any:
    """Returns nccl4py with an NCCL library behind it.  Raises NotAvailableError with what is
    missing.

    nccl4py finds the library itself (cuda.pathfinder).  If it does not, a library beside another
    package on the path is loaded first: PyTorch installs one.
    """
    try:
        import nccl.core
        from nccl.bindings import nccl as bindings
    except ImportError as error:
        raise NotAvailableError(
            f"collectives on CUDA devices need nccl4py ({error}): pip install 'ostinato[nccl]'"
        ) from None
    try:
        bindings.get_version()
    except Exception as error:
        if libraries := _libraries():
            with suppress(OSError):  # the next call then reports that there is none
                ctypes.CDLL(str(libraries[0]), mode=ctypes.RTLD_GLOBAL)
        try:
            bindings.get_version()
        except Exception:
            raise NotAvailableError(
                f"no NCCL library was found ({error}): pip install nvidia-nccl-cu13, or put "
                "libnccl.so.2 on LD_LIBRARY_PATH"
            ) from None
    return nccl.core


def _libraries() -> list[Path]:
    """Returns NCCL libraries of packages on the path."""
    found = []
    for entry in sys.path:
        found += sorted(Path(entry or ".").glob("nvidia/nccl*/lib/libnccl.so.2"))
    return found


def description() -> str:
    """Returns NCCL's version and file, or why it is not available."""
    try:
        version = load_nccl().get_version()
    except NotAvailableError as error:
        return f"not available: {error}"
    library = version.libnccl
    return f"{library.version} ({library.path}), nccl4py {version.nccl4py}"


class NcclCollectives(Collectives):
    """The collectives of one NCCL communicator.  All ranks make theirs together."""

    def __init__(self, group: Group, device: Device) -> None:
        super().__init__(group, device)
        context = device.driver.cuda_context
        assert context is not None
        self._context = context
        core = load_nccl()
        from nccl.bindings import nccl as bindings

        self._bindings = bindings
        version = str(core.get_version().libnccl.version)
        self.name = f"NCCL {version}"
        os.environ.setdefault(_MIXING, "0")
        group.agree("NCCL", [self.name, f"{_MIXING}={os.environ[_MIXING]}"])
        mine = core.get_unique_id().as_bytes if group.rank == 0 else b""
        unique = core.UniqueId.from_bytes(group.broadcast("NCCL's id", mine))
        # Older versions lack the setting and the structure that passes it.
        modern = core.get_version().libnccl.version.release >= (2, 29)
        config = core.NCCLConfig(graph_usage_mode=1) if modern else None
        self._communicator: Any = self._guarded(
            "forming NCCL's communicator",
            lambda: core.Communicator.init(group.size, group.rank, unique, config),
        )
        self._comm = bindings.Comm(self._communicator.ptr)
        self._stream: Stream = device.create_stream()
        self._tried: set[tuple[str, int]] = set()
        self._made: dict[tuple[object, ...], tuple[Operation, ...]] = {}
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._scratch: Buffer | None = None
        self._ending = threading.Lock()
        self._aborting: threading.Thread | None = None

    # --- collectives
    def all_reduce(self, source: Buffer, out: Buffer) -> tuple[Operation, ...]:
        count = self._same("all_reduce", source, out)
        return self._operations("all_reduce", source, out, count)

    def accumulate(
        self, target: Buffer, partial: Buffer, *, programmatic: bool = False
    ) -> tuple[Operation, ...]:
        """Implements `Collectives.accumulate`: NCCL's sum in place, then a kernel that adds it."""
        count = self._same("accumulate", target, partial)
        key = ("accumulate", target.address, partial.address, count)
        found = remembered(self._made, key)
        if found is None:
            kernel = self.device.modules.get_or_compile(kernels(), "add_reduced")
            shape = LaunchConfig(-(-count // _THREADS), _THREADS)
            found = self._made[key] = (
                *self._operations("all_reduce", partial, partial, count),
                prepare(kernel, shape, target, partial, count),
            )
        return found

    def all_gather(
        self, source: Buffer, out: Buffer, *, programmatic: bool = False
    ) -> tuple[Operation, ...]:
        """Implements `Collectives.all_gather`.  NCCL concatenates the ranks' buffers; several lines
        are then interleaved by a kernel of ours, which moves whole words of 4 bytes."""
        size = self.group.size
        layout = Gathered.of(source, out, size)
        if layout.lines == 1:
            return self._operations("all_gather", source, out, source.nbytes)
        if layout.nbytes % 4:
            raise NotAvailableError(f"all_gather of lines of {layout.nbytes} bytes, no whole words")
        if self._scratch is None or self._scratch.nbytes < out.nbytes:
            # The smaller buffer is kept by the operations that use it.
            self._scratch = self.device.empty(out.nbytes, "bytes", name="gathered parts")
        parts = self._scratch.view(0, out.nbytes)
        kernel = self.device.modules.get_or_compile(kernels(), "interleave")
        words = layout.nbytes // 4
        threads = min(1024, -(-words // 32) * 32)
        shape = LaunchConfig((layout.lines, size, 1), threads)
        return (
            *self._operations("all_gather", source, parts, source.nbytes),
            prepare(kernel, shape, parts, out.view(dtype="u32"), layout.lines, size, words),
        )

    def broadcast(self, buffer: Buffer, root: int = 0) -> tuple[Operation, ...]:
        name = f"broadcast from {checked_root(root, self.group.size)}"
        return self._operations(name, buffer, buffer, buffer.nbytes)

    def _call(self, name: str, source: int, out: int, count: int) -> None:
        """Calls NCCL on its stream.  `count`: float32 values of a sum, else bytes."""
        nccl, stream = self._bindings, int(self._stream.handle)
        with self._context.made_current():
            if name == "all_reduce":
                kind, total = int(nccl.DataType.Float32), int(nccl.RedOp.Sum)
                nccl.all_reduce(source, out, count, kind, total, self._comm, stream)
            elif name == "all_gather":
                kind = int(nccl.DataType.Uint8)
                nccl.all_gather(source, out, count, kind, self._comm, stream)
            else:
                kind, root = int(nccl.DataType.Uint8), int(name.rpartition(" ")[2])
                nccl.broadcast(source, out, count, kind, root, self._comm, stream)

    # --- operations
    def _operations(
        self, name: str, source: Buffer, out: Buffer, count: int
    ) -> tuple[Operation, ...]:
        """Returns NCCL's call on these buffers, captured and lifted, without running it."""
        self.group.check()
        key = (name, source.address, out.address, count)
        found = remembered(self._made, key)
        if found is None:
            try:
                if (name, count) not in self._tried:
                    self._try_out(name, source, out, count)
                    self._tried.add((name, count))
                found = self._made[key] = self._lifted(name, source, out, count)
            except (ContextPoisonedError, GroupError):
                raise
            except (CaptureError, DriverError, GraphError, self._bindings.NCCLError) as error:
                raise NotAvailableError(f"{name} of {count} by {self.name}: {error}") from error
        return found

    def _lifted(self, name: str, source: Buffer, out: Buffer, count: int) -> tuple[Operation, ...]:
        with capture(self._stream) as under_way:
            self._call(name, source.address, out.address, count)
        graph = under_way.graph
        self._graphs.add(graph)
        order = self.order.range
        return lift(
            graph,
            name=name,
            reads=(source.range, order),
            writes=(out.range, order),
            keep=(self, graph, source, out, self.order),
        )

    def _try_out(self, name: str, source: Buffer, out: Buffer, count: int) -> None:
        """Compares NCCL's own call with the lifted launch, on memory of their own."""
        device, stream, rank = self.device, self._stream, self.group.rank
        rng = np.random.default_rng(rank)
        values = rng.standard_normal(-(-source.nbytes // 4)).astype(np.float32)
        data = values.view(np.uint8)[: source.nbytes]
        alike = source.address == out.address
        with (
            device.array(data) as first,
            device.array(data) as second,
            device.zeros(out.nbytes, "bytes") as wanted,
            device.zeros(out.nbytes, "bytes") as found,
        ):
            into = (first, second) if alike else (wanted, found)
            answers: list[bytes] = []
            for place, (start, end) in enumerate(zip((first, second), into, strict=True)):
                if place == 0:
                    self._guarded(
                        f"NCCL's first {name} of {count}",
                        lambda: self._call(name, first.address, into[0].address, count),
                    )
                else:
                    for operation in self._lifted(name, start, end, count):
                        stream.submit(operation)
                with self.group.watching(f"{name} of {count}, tried out"):
                    answers.append(end.to_numpy(stream).tobytes())
        if answers[0] != answers[1]:
            raise NotAvailableError(
                f"{name} of {count}: what {self.name} launched gives another result when we launch "
                "it, so it is not used; please report this"
            )

    # --- waits and ends
    def _guarded(self, what: str, call: Callable[[], object]) -> Any:
        """Calls NCCL on a thread of its own, since the call may wait forever for other ranks.
        Raises GroupError when the group fails, at the latest at the deadline."""
        results: list[object] = []
        errors: list[BaseException] = []
        done = threading.Event()

        def work() -> None:
            try:
                with self._context.made_current():
                    results.append(call())
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        _call_beside(what, work)
        with self.group.watching(what):
            while not done.wait(0.002) and self.group.failure is None:
                pass
        if errors:
            raise NotAvailableError(f"{what}: {errors[0]}") from errors[0]
        return results[0]

    def abort(self) -> None:
        """Implements `Collectives.abort`.  NCCL's kernels end; its resources are freed once no
        graph has a collective of it."""
        with self._ending:
            communicator, self._communicator = self._communicator, None
            if communicator is not None:
                self._aborting = self._ended(communicator.abort)

    def close(self) -> None:
        """Implements `Collectives.close`.  Graphs with its collectives must be closed before."""
        self._made.clear()
        for graph in list(self._graphs):
            graph.close()
        if not self.device.context.closed:
            self._stream.close()
            super().close()
        with self._ending:
            communicator, self._communicator = self._communicator, None
            thread = self._aborting if communicator is None else self._ended(communicator.destroy)
        # NCCL's `destroy` waits for the other ranks.  A rank that closes because of an exception
        # reports it when it leaves the group, which comes later, and must come before their
        # deadline.  `abort` waits for no rank, but uses the device that the caller closes next.
        end = time.monotonic() + min(_PATIENCE, self.group.deadline / 4)
        while thread is not None and thread.is_alive() and time.monotonic() < end:
            if communicator is not None and self.group.failure is not None:
                break
            thread.join(0.01)
        self.group.detach(self)

    def _ended(self, call: Callable[[], object]) -> threading.Thread:
        """Ends the communicator on a thread: NCCL waits there for graphs and other ranks."""

        def work() -> None:
            with self._context.made_current():
                call()

        return _call_beside("NCCL ends", work)
