"""torch on the CPU with captures that are frozen as those of CUDA are: a capture notes the
operations that run and the memory that they use, and a replay runs these again.  No Python of the
function runs in a replay, and what it read is what it was."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ostinato as ost
from ostinato.device import Device
from ostinato.interop.captures import waits
from ostinato.interop.graphed import Graphed
from ostinato.interop.reading import conditions
from ostinato.interop.reading.chains import Wait
from ostinato.interop.reading.library import GraphedOptions, NotGraphable, WaitsForDevice
from ostinato.interop.torch.capturing import explained, noted_backward
from ostinato.interop.torch.gradients import Differentiated
from ostinato.interop.torch.graphing import GraphedModule
from ostinato.interop.torch.library import Torch
from ostinato.interop.torch.waits import Segments, has_parts

_tree_map: Any = torch.utils._pytree.tree_map
_tree_leaves: Any = torch.utils._pytree.tree_leaves


def _same_memory(value: Any) -> Any:
    """Another tensor of the same memory, which stays there if the tensor itself moves."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch.no_grad():
        return torch.ops.aten.alias(value.detach())


class Tape(TorchDispatchMode):  # type: ignore[misc]
    """Notes the operations of a block.  They run, and `undo` takes back what they wrote and
    drew."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, Any, Any, list[Any]]] = []
        self._before: list[tuple[Any, Any]] = []
        self._random = torch.get_rng_state()
        self.broken = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_parts(func, torch.device("cpu")):  # in inference mode: a part of it may wait
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if func.namespace == "profiler" or func in _VIEWS:
            return func(*args, **(kwargs or {}))
        if self.broken or func in _WAITING or _masked(func, args):
            self.broken = True
            raise RuntimeError("operation not permitted when stream is capturing")
        given = _tree_map(_same_memory, (args, kwargs or {}))
        for one in _tree_leaves(given):
            if isinstance(one, torch.Tensor) and not torch._debug_has_internal_overlap(one):
                self._before.append((one, one.clone()))
        result = func(*args, **(kwargs or {}))
        self.noted.append((func, *given, [*map(_same_memory, _tree_leaves(result))]))
        return result

    def undo(self) -> None:
        with torch.inference_mode(), torch.no_grad():
            for one, before in reversed(self._before):
                one.copy_(before)
        torch.set_rng_state(self._random)

    def play(self, first: int = 0, end: int | None = None) -> None:
        with torch.inference_mode(), torch.no_grad():
            for func, args, kwargs, results in self.noted[first:end]:
                made = _tree_leaves(func(*args, **kwargs))
                # Of messages between ranks the function waits for the end, not the operation.
                if func.namespace == "c10d":
                    torch.distributed.Work.unbox(made[-1]).wait()
                elif func.namespace == "_c10d_functional":
                    made = [torch.ops._c10d_functional.wait_tensor(one) for one in made]
                for into, new in zip(results, made, strict=True):
                    if isinstance(into, torch.Tensor) and into.data_ptr() != new.data_ptr():
                        into.copy_(new)


_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_WAITING = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.bincount.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten._linalg_check_errors.default,
    # No tag of torch says that it waits: a chain learns it when it breaks a capture.
    torch.ops.aten._linalg_eigh.default,
)


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _masked(func: Any, args: Any) -> bool:
    if func is not torch.ops.aten.index.Tensor:
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])


class Slot(TorchDispatchMode):  # type: ignore[misc]
    """Passes the operations of a chain to the tape of its present capture."""

    tape: Tape | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.tape is None:
            return func(*args, **(kwargs or {}))
        return self.tape.__torch_dispatch__(func, types, args, kwargs)


_numbers = itertools.count()
_tapes: weakref.WeakValueDictionary[int, Tape] = weakref.WeakValueDictionary()


@ost.host_kernel("number: u64, at: u64", name="play")
def _play(how: Any, number: int, at: int) -> None:
    _tapes[number].play(at, at + 1)


_PLAYER = ost.Source(host=[_play])


class TapeSegment:
    """A capture of a chain."""

    def __init__(self, slot: Slot, device: Device) -> None:
        self.slot, self.device, self.tape = slot, device, Tape()
        slot.tape, OnCpu.inside = self.tape, True

    def active(self) -> bool:
        return not self.tape.broken

    def position(self) -> int:
        return len(self.tape.noted)

    count = position

    def abort(self) -> None:
        self.slot.tape, OnCpu.inside = None, False
        self.tape.undo()

    def end(self) -> ost.Graph | None:
        self.abort()
        if self.tape.broken:
            raise RuntimeError("the capture was broken")
        if not self.tape.noted:
            return None
        # Kernels, since bodies of conditional nodes hold no call.
        number, graph = next(_numbers), ost.Graph.create(self.device)
        _tapes[number] = self.tape
        kernel = self.device.modules.get_or_compile(_PLAYER, "play")
        one, before = ost.LaunchConfig(grid=1, block=1), list[Any]()
        for at in range(len(self.tape.noted)):
            before = [graph.add_kernel(kernel, one, number, at, after=before)]
        graph.keep.append(self.tape)
        return graph

    def refused(self, error: Exception) -> bool:
        return False

    def place(self, before: int, values: Any, tensors: Any) -> TapePlace:
        return TapePlace(self.tape, before, values)


class TapePlace:
    """The numbers among the arguments of the operation that a tape has noted after others."""

    def __init__(self, tape: Tape, index: int, values: Any) -> None:
        assert index == len(tape.noted) - 1
        self.tape, self.index, self.values = tape, index, values

    def find(self, executable: ost.GraphExec, kernels: Any) -> Any:
        players = [node for node in kernels if node.name == "play"]
        if not any(_tapes[int(node.arguments[0].value)] is self.tape for node in players):
            return None
        func, args, kwargs, results = self.tape.noted[self.index]

        def set_all(values: Any) -> None:
            left, new = [*self.values], [*values]

            def changed(leaf: Any) -> Any:
                if type(leaf) is float and left and leaf == left[0]:
                    del left[0]
                    return new.pop(0)
                return leaf

            given = _tree_map(changed, (args, kwargs))
            assert not new
            self.tape.noted[self.index] = func, *given, results

        return set_all


class OnCpu(Torch):
    """What torch does for `Graphed`, on the CPU.  A capture is a host function that computes again
    and copies into the first result."""

    inside = False
    unseen = False
    _of_host = ()
    differentiates = False
    _captures: Any = SimpleNamespace(plans=None, begin_backward=lambda: None)

    def __init__(self, device: Device) -> None:
        self.device, self.index, self.generators = device, -1, ()
        self.where = torch.device("cpu")
        self.capturing = lambda: OnCpu.inside
        self.address = torch.Tensor.data_ptr
        self.offset = torch.Tensor.storage_offset
        self.clone = torch.Tensor.clone
        self.ours = device.create_stream()
        self.current, self.current_device = self.stream, lambda: 0

    def on_host(self, tensor: Any, /) -> bool:
        return False

    def refusal(self, tensor: Any, /) -> str:
        found = super().refusal(tensor)
        return "" if "on cpu" in found else found

    def stream(self) -> ost.Stream:
        self.ours.synchronize()  # torch's work on the CPU is done when its call returns
        return self.ours

    def _states(self) -> list[Any]:
        return [torch.default_generator]

    def run_beside(self, work: Callable[[], Any]) -> Any:
        with noted_backward(self._note_backward):
            return work()

    def _note_backward(self) -> None:
        self.differentiates = True

    def _learns(self) -> bool:
        return torch.is_grad_enabled() or self.differentiates

    def trim(self, *, short: bool) -> None:
        """Captures have no memory of their own."""

    def extent(self, tensor: Any, /) -> None:
        """The host driver's kernels cannot reach torch's memory."""

    @contextmanager
    def _captured(self, chains: bool = False) -> Iterator[None]:
        OnCpu.inside = True
        try:
            yield
        except Exception as error:
            kind = WaitsForDevice if chains and waits(error) else NotGraphable
            raise kind(explained(error)) from None
        finally:
            OnCpu.inside = False

    def capture(self, work: Callable[[Any], Any]) -> tuple[ost.Graph, Any]:
        with self._captured():
            result = work(self.ours)
        inference = torch.is_inference_mode_enabled()

        def again() -> None:
            with torch.inference_mode(inference), torch.no_grad():
                for into, new in zip(
                    _tree_leaves(result), _tree_leaves(work(self.ours)), strict=True
                ):
                    if isinstance(into, torch.Tensor):
                        into.copy_(new)

        graph = ost.Graph.create(self.device)
        graph.add_call(again)
        return graph, result

    def stager(self, buffers: Any) -> Any:
        stage = super().stager(buffers)

        def staged(tensors: Any) -> None:
            self.ours.synchronize()
            stage(tensors)

        return staged


class OnTape(OnCpu):
    """Its captures are tapes."""

    chains = False

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        # torch's memory is not the driver's.
        conditions._read = lambda how, address, nbytes: ctypes.string_at(address, nbytes)
        self.waiting: set[Any] = set()

    @property
    def chain(self) -> Any:
        return self._chain if self.chains else None

    def _chain(self, work: Callable[[Any], Any], links: Any) -> tuple[Any, Any]:
        slot = Slot()

        class Waited:
            """torch knows nothing of the host driver's streams."""

            @staticmethod
            def waited(wait: Wait) -> None:
                def again() -> Any:
                    self.ours.synchronize()
                    return wait.again()

                links.waited(dataclasses.replace(wait, again=again))

            place = staticmethod(links.place)
            attached = staticmethod(links.attached)
            stepped = staticmethod(links.stepped)
            around: Any = None
            copying_out: Any = None

        class Captor:
            relaxed = contextlib.nullcontext

            @staticmethod
            def begin() -> TapeSegment:
                return TapeSegment(slot, self.device)

            @staticmethod
            def launch(graph: ost.Graph, *, harmless: Any) -> None:
                if harmless is not None:  # the CPU draws in the order of its operations
                    (tape,) = [each for each in graph.kept if isinstance(each, Tape)]
                    funcs = [func for func, *_ in tape.noted]
                    starts = [0, *[end for end, _ in harmless]]
                    harmless = [
                        (end, None if any(map(_draws, funcs[start:end])) else uses)
                        for start, (end, uses) in zip(starts, harmless, strict=False)
                        if end > start
                    ]
                links.submitted(graph, self.ours, harmless=harmless)
                self.ours.synchronize()

            @staticmethod
            def fixed(make: Callable[[], Any]) -> Any:
                return make()

            @staticmethod
            def settle(error: str) -> None:
                """Nothing is left pending."""

        mode: Any = Segments(
            cast(Any, Captor), cast(Any, Waited), self.waiting, self.where, self.step_methods
        )
        links.around = Waited.around
        with slot:
            result = mode.run(lambda: work(self.ours))
        return result, WaitsForDevice(mode.why) if mode.why else None

    def differentiable(self, function: Any, state: Any) -> Any:
        return _Synchronised(self.capture, function, state, self._plans_ended)

    def buffer(self, tensor: Any, shape: Any) -> Any:
        made = super().buffer(tensor, shape)
        # The operations of a capture run here, and indices must be some.
        made.untyped_storage().fill_(0)
        return made

    def capture(self, work: Callable[[Any], Any]) -> tuple[ost.Graph, Any]:
        tape = Tape()
        try:
            with self._captured(self.chains), tape:
                result = work(self.ours)
        finally:
            tape.undo()
        graph = ost.Graph.create(self.device)
        graph.add_call(tape.play)
        return graph, result


class _Synchronised(Differentiated):
    def backward(self, *args: Any) -> Any:
        made = super().backward(*args)
        run = made._executable

        class Waiting:
            @staticmethod
            def launch(stream: ost.Stream) -> None:
                run.launch(stream)
                stream.synchronize()

        made._executable = cast(Any, Waiting)
        return made


class _Waiting(Graphed):
    """Its results are read by torch, which knows nothing of the host driver's streams."""

    def _results(self, *args: Any) -> Any:
        self._library.device.synchronize()
        return super()._results(*args)

    def _giver(self, *args: Any) -> Any:
        give, device = super()._giver(*args), self._library.device

        def waited(*args: Any) -> Any:
            device.synchronize()
            return give(*args)

        return waited


class _WaitingModule(GraphedModule, _Waiting):
    pass


def on_cpu(library: OnCpu, function: Any, **options: Any) -> Any:
    """`graphed` on the CPU.  Close it."""
    rest: Any = library, GraphedOptions(**options), ost.GraphCache(library.device)
    library.hooks_apart = options.get("gradients") == "replay"
    named: dict[str, Any] = {"name": "f", "owns_cache": True}
    if isinstance(function, torch.nn.Module):
        return _WaitingModule(function, function.forward, *rest, **named)
    return _Waiting(function, *rest, **named)


def on_tape(device: Device, function: Any, *, chains: bool = False, **options: Any) -> Any:
    """The same with frozen captures, and with chains of them if it waits."""
    library = OnTape(device)
    library.chains = chains
    step = on_cpu(library, function, **options)
    step._maker.mover = None  # a tape has no nodes that copy, also if there is nothing to copy
    # A tape holds memory, not words that point at it.
    step._maker._moved_memory = lambda captured, now: ", and a tape cannot be bound"
    return step
