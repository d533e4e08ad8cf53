"""NCCL's collectives with a library that stands for NCCL: what it launches are host kernels.

What NCCL itself does is for tests/gpu; here is what is made of it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.distributed import Group, local_groups, nccl
from ostinato.distributed.nccl import load_nccl
from ostinato.driver.api import CaptureStatus, StreamHandle
from ostinato.driver.host.kernel import HostKernel
from ostinato.driver.signature import Signature
from ostinato.errors import GroupError, NotAvailableError
from tests.distributed.test_local import outcomes


@ost.host_kernel("target: *f32, partial: *f32, count: u32")
def add_reduced(launch: Any, target: Any, partial: Any, count: int) -> None:
    target[:count] += partial[:count]
    partial[:count] = 0


@ost.host_kernel("parts: *const u32, out: *out u32, lines: u32, ranks: u32, words: u32")
def interleave(launch: Any, parts: Any, out: Any, lines: int, ranks: int, words: int) -> None:
    size = lines * ranks * words
    out[:size] = parts[:size].reshape(ranks, lines, words).transpose(1, 0, 2).reshape(-1)


class FakeNccl:
    """A rank's library: calls launch kernels that exchange through the group's channel."""

    def __init__(self, group: Group, device: ost.Device) -> None:
        self.group, self.device = group, device
        self.calls: list[str] = []
        self.kernels: dict[tuple[str, int, str, bool], ost.Kernel] = {}
        self.aborted = self.destroyed = 0
        self.abort_takes = 0.0
        self.ended_at_close = 0, 0
        self.before_destroying: Callable[[], object] = lambda: None
        self.wrong_when_captured = False

    def launch(self, name: str, handle: int, source: int, out: int, nbytes: int, kind: str) -> None:
        self.calls.append(name)
        for captured in (False, True):  # loaded before a capture, as a library's are
            if (name, nbytes, kind, captured) not in self.kernels:
                made = self.kernel(name, nbytes, kind, captured)
                self.kernels[name, nbytes, kind, captured] = made
        status = self.device.driver.stream_capture_info(StreamHandle(handle)).status
        kernel = self.kernels[name, nbytes, kind, status is not CaptureStatus.NONE]
        shape = ost.LaunchConfig(1, 1)
        arguments = kernel.arguments(source, out)
        self.device.driver.launch_kernel(StreamHandle(handle), kernel.function, shape, arguments)

    def kernel(self, name: str, nbytes: int, kind: str, captured: bool) -> ost.Kernel:
        def run(how: Any, given: Any, into: Any) -> None:
            try:
                parts = self.group.channel.exchange("nccl", name, given[:nbytes].tobytes(), 30)
            except GroupError:
                return
            if kind == "sum":
                made = sum(np.frombuffer(p, np.float32) for p in parts)
                data = np.asarray(made, np.float32).tobytes()
            else:
                data = b"".join(parts) if kind == "gather" else parts[int(kind)]
            if captured and self.wrong_when_captured:
                data = bytes(len(data))
            into[: len(data)] = np.frombuffer(data, np.uint8)

        signature = Signature.parse("given: *const u8, into: *u8")
        source = ost.Source(host=[HostKernel(name, run, signature)], name="nccl")
        return self.device.modules.get_or_compile(source, name)

    # --- as nccl.bindings.nccl
    NCCLError = RuntimeError
    DataType = SimpleNamespace(Float32=7, Uint8=1)
    RedOp = SimpleNamespace(Sum=0)

    @staticmethod
    def Comm(pointer: int) -> int:
        return pointer

    def all_reduce(self, s: int, r: int, n: int, kind: int, op: int, c: int, stream: int) -> None:
        assert (kind, op, c) == (7, 0, 99)
        self.launch("ncclAllReduce", stream, s, r, 4 * n, "sum")

    def all_gather(self, s: int, r: int, n: int, kind: int, c: int, stream: int) -> None:
        assert (kind, c) == (1, 99)
        self.launch("ncclAllGather", stream, s, r, n, "gather")

    def broadcast(self, s: int, r: int, n: int, kind: int, root: int, c: int, stream: int) -> None:
        assert (kind, c) == (1, 99)
        self.launch("ncclBroadcast", stream, s, r, n, str(root))

    # --- as nccl.core
    def get_version(self) -> Any:
        version = type("V", (), {"release": (2, 28, 9), "__str__": lambda s: "2.28.9"})()
        return SimpleNamespace(libnccl=SimpleNamespace(version=version))

    def get_unique_id(self) -> Any:
        return SimpleNamespace(as_bytes=b"unique")

    UniqueId = SimpleNamespace(from_bytes=lambda data: data)

    @property
    def Communicator(self) -> Any:
        def init(size: int, rank: int, unique: bytes, config: Any) -> Any:
            assert unique == b"unique" and config is None
            assert (size, rank) == (self.group.size, self.group.rank)

            def abort() -> None:
                threading.Event().wait(self.abort_takes)
                self.aborted += 1

            def destroy() -> None:
                self.before_destroying()
                self.destroyed += 1

            return SimpleNamespace(ptr=99, abort=abort, destroy=destroy)

        return SimpleNamespace(init=init)


_libraries = threading.local()


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ost.Source(host=[add_reduced, interleave], name="collectives")
    monkeypatch.setattr(nccl, "kernels", lambda: source)
    monkeypatch.setattr(nccl, "load_nccl", lambda: _libraries.library)
    monkeypatch.setenv("NCCL_GRAPH_MIXING_SUPPORT", "0")
    package, bindings = ModuleType("nccl"), ModuleType("nccl.bindings")
    bindings.__getattr__ = lambda name: _libraries.library  # type: ignore[method-assign]
    monkeypatch.setitem(__import__("sys").modules, "nccl", package)
    monkeypatch.setitem(__import__("sys").modules, "nccl.bindings", bindings)


class CudaLike:
    """A host device that says it has a CUDA context."""

    def __init__(self, device: ost.Device) -> None:
        self._device = device
        self.driver = _Driver(device.driver)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


class _Driver:
    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.cuda_context = SimpleNamespace(made_current=nullcontext, context=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


@contextmanager
def opened(group: Group) -> Iterator[tuple[ost.Device, nccl.NcclCollectives, FakeNccl]]:
    with ost.open_device("host") as device:
        library = _libraries.library = FakeNccl(group, device)
        made = nccl.NcclCollectives(group, CudaLike(device))  # type: ignore[arg-type]
        group.attach(made)
        try:
            yield device, made, library
        finally:
            made.close()
            library.ended_at_close = library.aborted, library.destroyed


@pytest.mark.parametrize("lines", [1, 3])
def test_collectives_are_what_the_library_launched(lines: int) -> None:
    def work(group: Group) -> None:
        with opened(group) as (device, made, library):
            size = group.size
            values = np.arange(lines * 4, dtype=np.float32).reshape(lines, 4) + group.rank
            every = [
                np.arange(lines * 4, dtype=np.float32).reshape(lines, 4) + r for r in range(size)
            ]
            part, out, target, partial, root = (device.array(values) for _ in range(5))
            gathered = device.zeros((lines, 4 * size), np.float32)
            stream = device.create_stream()
            operations = (
                *made.all_reduce(part, out),
                *made.accumulate(target, partial),
                *made.all_gather(part, gathered),
                *made.broadcast(root, 1),
            )
            assert made.name == "NCCL 2.28.9"
            asked = list(library.calls)
            # Again: nothing is asked of the library, also for another layer's same buffers.
            assert made.accumulate(target, partial) == operations[1:3]
            assert library.calls == asked
            with ost.capture(stream) as under_way:
                for operation in operations:
                    stream.submit(operation)
            names = [node.name for node in under_way.graph.nodes()]
            assert names[:3] == ["ncclAllReduce", "ncclAllReduce", "add_reduced"]
            executable = under_way.graph.instantiate(upload=stream)
            executable.launch(stream)
            total = np.sum(every, axis=0)
            np.testing.assert_array_equal(out.to_numpy(stream), total)
            np.testing.assert_array_equal(target.to_numpy(stream), values + total)
            assert not partial.to_numpy(stream).any()
            wanted = np.concatenate(every, axis=1)
            np.testing.assert_array_equal(gathered.to_numpy(stream), wanted)
            np.testing.assert_array_equal(root.to_numpy(stream), every[1])
            assert library.calls == asked
            executable.close()
        assert (library.aborted, library.destroyed) == (0, 1)

    with local_groups(3, deadline=30) as groups:
        groups.run(work)


def test_a_launch_that_gives_another_result_is_not_used() -> None:
    def work(group: Group) -> None:
        with opened(group) as (device, made, library):
            library.wrong_when_captured = True
            buffer = device.zeros(4, np.float32)
            made.all_reduce(buffer, buffer)

    with local_groups(2, deadline=30) as groups:
        found = outcomes(groups, work)
    own = [one for one in found if isinstance(one, NotAvailableError)]
    assert own and "gives another result" in str(own[0])


def test_a_failure_aborts_the_communicator_once() -> None:
    seen: dict[int, FakeNccl] = {}

    def work(group: Group) -> None:
        with opened(group) as (device, made, library):
            seen[group.rank] = library
            library.abort_takes = 0.5
            buffer = device.zeros(4, np.float32)
            made.all_reduce(buffer, buffer)
            if group.rank == 0:
                raise ValueError("over")
            while group.failure is None:
                group.check()
            group.check()

    with local_groups(2, deadline=30) as groups:
        found = outcomes(groups, work)
    assert isinstance(found[0], ValueError) and isinstance(found[1], GroupError)
    # The device is closed right after, on which an abort still works.
    assert seen[1].ended_at_close == (1, 0)
    assert (seen[1].aborted, seen[1].destroyed) == (1, 0)


def test_a_process_that_ends_waits_for_calls_of_nccl() -> None:
    """NCCL crashes in a thread of a process that ends."""
    program = (
        "import time; from ostinato.distributed import nccl; "
        "nccl._call_beside('x', lambda: (time.sleep(0.5), print('ended', flush=True)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


def test_a_rank_closed_by_an_exception_tells_it_before_others_give_up() -> None:
    """NCCL ends a communicator when all ranks do: who closes first must not wait for that."""
    told = threading.Event()
    waited: list[bool] = []

    def work(group: Group) -> None:
        with opened(group) as (_, _, library):
            library.before_destroying = lambda: waited.append(told.wait(60))
            if group.rank == 0:
                raise ValueError("over")
            try:
                group.barrier()
            finally:
                told.set()

    with local_groups(2, deadline=8) as groups:
        found = outcomes(groups, work)
    assert isinstance(found[0], ValueError)
    assert "rank 0 raised ValueError: over" in str(found[1])
    assert all(waited)


def test_an_nccl_library_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """nccl4py is there, and the library beside it needs others that are not."""
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"no library")

    def get_version() -> None:
        raise RuntimeError("libnccl.so.2 is nowhere")

    bindings = ModuleType("nccl.bindings.nccl")
    bindings.get_version = get_version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nccl.core", ModuleType("nccl.core"))
    monkeypatch.setattr(sys.modules["nccl.bindings"], "nccl", bindings, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotAvailableError, match=r"no NCCL library was found.*nowhere"):
        load_nccl()
