"""`graphed`: a function or a module of PyTorch that replays a graph of itself.

What is keyed, captured and replayed is in `interop.graphing`; here is what torch does for it.
"""

from __future__ import annotations

import itertools
import operator
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ostinato
from ostinato import (
    Buffer,
    Device,
    Graph,
    GraphCache,
    MemoryRange,
    Node,
    NodeKind,
    Stream,
    every_node,
    open_device,
)
from ostinato.cache import Buckets
from ostinato.errors import InputError, NotAvailableError
from ostinato.interop.graphing.capturing import captured, no_collection
from ostinato.interop.graphing.errors import disturbed, explained
from ostinato.interop.graphing.graphed import Graphed
from ostinato.interop.graphing.guards import Guarded, Watch, same
from ostinato.interop.graphing.library import (
    LIMITS,
    CaptureDisturbed,
    NotGraphable,
    Options,
    cuda_index,
    name_of,
)
from ostinato.interop.graphing.moves import MOST, dense
from ostinato.interop.graphing.recheck import MISSED, Checks, Inexpressible
from ostinato.interop.graphing.stored import Description, Stored, code_text
from ostinato.interop.graphing.trees import Join, is_plain, made_in_python, plain_token
from ostinato.interop.torch.adopting import adopt_graph, as_tensor, drawing

__all__ = ["GraphedModule", "graphed"]

_names = itertools.count()


def graphed(
    function: Callable[..., Any] | None = None,
    /,
    *,
    static: Sequence[str] = (),
    dynamic: Mapping[str, int] | None = None,
    buckets: Buckets | None = None,
    padding: Mapping[str, float] | None = None,
    results: str = "clone",
    gradients: str = "refuse",
    verify: str | int | None = None,
    tolerance: tuple[float, float] | None = None,
    strict: bool = False,
    guard: bool = True,
    generators: Sequence[Any] = (),
    cache: GraphCache | None = None,
    budget: int | str | None = None,
    device: Device | None = None,
    name: str | None = None,
    store: str | Path | None = None,
) -> Any:
    """A function or a module that replays a graph of itself; called like the original.

        step = graphed(model)
        with torch.inference_mode():
            y = step(x)

    The first call of a key runs eagerly.  The second one is captured, and it and all later ones are
    replays.  The key: nesting, shapes, strides, types and devices of the tensors in the
    arguments, plain Python values, torch's modes (gradients, inference, autocast, determinism,
    default type, precision of products), and what the function uses besides its arguments as far as
    it can be seen (`interop.graphing.guards`).  What cannot be captured runs eagerly, with a reason
    in `explain()`.

    * `static`: names of parameters whose tensors are not copied (weights, key-value caches).  The
      graph works on their memory, and is bound anew when it has moved.  May be any object: its
      tensors are found once, its other attributes are not watched.
    * `dynamic`: for a parameter, the axis that is padded to a bucket of `buckets` (powers of two);
      results are cut back.  `padding`: what the padding of a parameter holds, where that matters to
      the answer.  Without it no answer may depend on it, which a check tests.
    * `results`: "clone", or "static": tensors that the next call overwrites, without a copy.
    * `gradients`: "refuse" raises InputError for a call that needs them, "eager" runs it eagerly.
    * `verify`: None, "first" (each graph once), or each how many replays: the call runs eagerly
      too, and the answers are compared bit by bit, or within `tolerance` (relative, absolute).
    * `strict`: an eager run that nobody asked for raises EagerRunError.
    * `guard`: False if nothing that the function uses besides its arguments ever changes or moves:
      then that is not looked at in each call.
    * `generators`: those that the function draws from, besides the default one.
    * `store`: a folder of graphs.  A key that was saved there (`step.save()`, in a process that
      collects machine code: `ostinato.collect_modules`) is restored when it is first called, bound
      to the tensors of this process, without a warm-up and a capture.  What does not fit is
      captured as usual; `statistics().not_restored` says why.
    * `cache`, or `budget` for the bytes of a cache of its own; `device`, if not that which torch
      has as its current one.

    Raises InputError for options that do not fit the function, NotAvailableError without CUDA.
    """
    if function is None:
        given = {k: v for k, v in locals().items() if k != "function"}
        return lambda f: graphed(f, **given)
    if isinstance(function, Graphed):
        raise InputError(f"{function!r} is graphed already")
    if not torch.cuda.is_available():
        raise NotAvailableError("torch has no CUDA device here, so there is nothing to capture")
    index = torch.cuda.current_device() if device is None else cuda_index(device)
    library = Torch(device or _device(index), index, generators)
    options = Options.given(
        static=static,
        dynamic=dynamic,
        buckets=buckets,
        padding=padding,
        results=results,
        gradients=gradients,
        verify=verify,
        tolerance=tolerance,
        strict=strict,
        guard=guard,
    )
    kept = cache or GraphCache(library.device, budget=budget, limits=LIMITS)
    owns = cache is None
    module = function if isinstance(function, torch.nn.Module) else None
    called = function if module is None else module.forward
    if name is None:
        name = name_of(function, next(_names))
    rest: dict[str, Any] = {"name": name, "owns_cache": owns}
    if store is not None:
        rest["stored"] = Stored(library, store, (code_text(called), options.results, MOST))
    if module is not None:
        return GraphedModule(module, called, library, options, kept, **rest)
    return Graphed(called, library, options, kept, **rest)


class GraphedModule(Graphed):
    """A module whose calls replay graphs of its `forward`.

    Everything else is the module's: `state_dict`, `parameters`, attributes, `to`.  Hooks of the
    module itself run in Python at each call, around the replay.  Those of modules inside it are
    captured with it: what they do to tensors is replayed, their Python does not run again.
    """

    def __init__(self, module: torch.nn.Module, *args: Any, **options: Any) -> None:
        self.module = module
        """The module itself, whose calls run eagerly."""
        super().__init__(*args, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for way in self._ways:  # they look at the hooks too
            result = way(args, kwargs)
            if result is not MISSED:
                return result
        module = self.module
        if not (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or _global_hooks()
        ):
            return super().__call__(*args, **kwargs)
        with self._lock:
            before = module.__dict__.get("forward")
            module.__dict__["forward"] = super().__call__
            try:
                return module(*args, **kwargs)
            finally:
                if before is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = before

    def _note(self, checks: Checks) -> None:
        held = self.module.__dict__
        hooks = {name: held[name] for name in _HOOKS}
        checks.some_items(held, hooks)
        module = torch.nn.modules.module
        for each in (
            *hooks.values(),
            module._global_forward_hooks,
            module._global_forward_pre_hooks,
        ):
            checks.size(each, 0)

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # while it is made
            raise AttributeError(name)
        value = getattr(self.module, name)
        if name in _RETURNING_SELF and callable(value):

            def call(*args: Any, **kwargs: Any) -> Any:
                result = value(*args, **kwargs)
                return self if result is self.module else result

            return call
        return value


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_RETURNING_SELF = frozenset(
    [
        "to",
        "cuda",
        "cpu",
        "half",
        "float",
        "double",
        "bfloat16",
        "type",
        "train",
        "eval",
        "requires_grad_",
        "apply",
    ]
)


def _global_hooks() -> bool:
    module = torch.nn.modules.module
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


_devices: dict[int, Device] = {}
_opening = ostinato.new_lock()


def _device(index: int) -> Device:
    """The device that all graphed functions of a GPU share."""
    with _opening:
        device = _devices.get(index)
        if device is None or device.context.closed:
            torch.cuda.current_stream(index)  # torch opens its context first, as it is used to
            device = _devices[index] = open_device(f"cuda:{index}")
        return device


# Without the functions in Python around them: they are asked in each call.
_requires_grad = operator.attrgetter("requires_grad")
_deterministic = torch._C._get_deterministic_algorithms
_precision = torch._C._get_float32_matmul_precision

_overriding = torch._C._len_torch_function_stack
_dispatching = torch._C._len_torch_dispatch_stack


def _default_device() -> Hashable:
    """The device that torch makes tensors on, which is a mode of its own if it was ever set.

    Raises NotGraphable if Python of another mode is to see each operation."""
    stack = torch.overrides._get_current_function_mode_stack()
    others = [m for m in stack if type(m) is not torch.utils._device.DeviceContext]
    others += torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    if others:
        kind = type(others[-1])
        raise NotGraphable(
            f"the mode {kind.__module__}.{kind.__qualname__} is active, whose Python sees each "
            "operation, and a replay runs no Python"
        )
    return str(stack[-1].device)


_captures = threading.RLock()
"""One capture at a time in the process: torch cannot make two, and what is set around one (the
collection of garbage, what transformers is told) counts for the whole process."""


_begin_pool: Any = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None)

_NOT_REGISTERED = "generator not in capture mode"
"""In torch's error for random numbers in a capture that is not its own."""


class _Kept:
    """Something that a pool is kept for."""


@dataclass(slots=True)
class _Made:
    """What became of a capture: a graph and a result, or an error."""

    graph: Graph | None = None
    result: Any = None
    error: str = ""
    disturbed: bool = False
    """Whether something else than the function broke it."""
    asked: bool = False
    """Whether the function asked if it is captured, and was told that it is not."""


class Torch:
    """What torch does for `Graphed` (`interop.graphing.library.Library`)."""

    array_type = torch.Tensor
    plain: tuple[type, ...] = (
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Generator,
    )

    def __init__(self, device: Device, index: int, generators: Sequence[Any] = ()) -> None:
        self.device, self.index = device, index
        self.generators = tuple(generators)
        # The function in Python asks whether CUDA was built in, each time.
        capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
        self.capturing = capturing or torch.cuda.is_current_stream_capturing
        self.current = partial(torch._C._cuda_getCurrentRawStream, index)
        self.address = torch.Tensor.data_ptr
        self.offset = torch.Tensor.storage_offset
        self.clone = torch.Tensor.clone
        self.empty_like = torch.empty_like
        self._streams: dict[int, tuple[Stream, Any]] = {}
        self._keeper: Any = None
        """Keeps the pool: torch ends one whose last graph is destroyed, and refuses it from then
        on."""
        self._side: tuple[Any, Stream] | None = None
        self._pool: Any = None
        self._by_torch = bool(self.generators) or _begin_pool is None
        """Whether torch captures: where a capture of this library would not do (`_capture_here`),
        and in a torch that lets nobody else use its pools."""

    # --- values
    def is_array(self, value: object, /) -> bool:
        return isinstance(value, torch.Tensor)

    def parts(self, value: object, /) -> tuple[Hashable, list[Any]] | None:
        node = torch.utils._pytree.SUPPORTED_NODES.get(type(value))
        if node is None:
            return None
        children, context = node.flatten_fn(value)
        try:
            hash(context)
        except TypeError:
            context = repr(context)
        return context, list(children)

    def joiner(self, like: Any, /) -> Join:
        node = torch.utils._pytree.SUPPORTED_NODES[type(like)]
        children, context = node.flatten_fn(like)

        def join(others: Sequence[Any]) -> Any:
            return node.unflatten_fn([*others], context)  # which may keep the list

        copy = _dict_copier(like, [*children])
        return join if copy is None or not _alike(copy([*children]), join([*children])) else copy

    def watch(self, value: object, /) -> Watch | None:
        return ModuleWatch(value) if isinstance(value, torch.nn.Module) else None

    @staticmethod
    def signature(tensor: torch.Tensor, /) -> tuple[Hashable, ...]:
        needs = tensor.requires_grad
        try:
            stride = tensor.stride()
        except (RuntimeError, NotImplementedError):  # no strides: sparse, nested
            return tuple(tensor.shape), tensor.dtype, tensor.layout, -1, needs
        lazy = tensor.is_neg(), tensor.is_conj()  # the memory holds another value
        return tensor.shape, tensor.dtype, stride, tensor.get_device(), needs, *lazy

    def storage(self, tensor: torch.Tensor, /) -> MemoryRange:
        storage = tensor.untyped_storage()
        return MemoryRange(storage.data_ptr(), storage.nbytes())

    def refusal(self, tensor: torch.Tensor, /) -> str:
        kind = type(tensor)
        if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return (
                f"a tensor of the subclass {kind.__module__}.{kind.__qualname__}, of which a graph "
                "would see the memory alone"
            )
        where = tensor.device
        if where.type != "cuda":
            return (
                f"a tensor on {where} (shape {tuple(tensor.shape)}), which a graph would read "
                "once, when it is captured; move it to the GPU, or give a Python number"
            )
        if where.index != self.index:
            return f"a tensor on {where}, and the graphs are of cuda:{self.index}"
        if tensor.layout is not torch.strided:
            return f"a tensor of the layout {tensor.layout}"
        return ""

    def live(self) -> Callable[[Any], Hashable] | None:
        return _requires_grad if torch.is_grad_enabled() else None

    def wants_gradient(self, result: Any, /) -> bool:
        if not torch.is_grad_enabled():
            return False
        return any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad
            for leaf in torch.utils._pytree.tree_leaves(result)
        )

    def version(self, tensor: torch.Tensor, /) -> int | None:
        return None if tensor.is_inference() else tensor._version

    def modes(self) -> Hashable:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            _deterministic(),
            torch.get_default_dtype(),
            _precision(),
            _default_device() if _overriding() or _dispatching() else None,
        )

    @property
    def reads(self) -> tuple[str | Callable[[Any], Any], ...]:
        methods = torch.Tensor.stride, torch.Tensor.get_device
        return (
            "shape",
            "dtype",
            *methods,
            "requires_grad",
            torch.Tensor.is_neg,
            torch.Tensor.is_conj,
        )

    def situation(self) -> tuple[Callable[[], Any], ...]:
        around = self.capturing, self.current, _overriding, _dispatching
        if torch._C._is_any_autocast_enabled() or _overriding():
            return (*around, self.modes)
        return (
            *around,
            torch.is_grad_enabled,
            torch.is_inference_mode_enabled,
            torch._C._is_any_autocast_enabled,
            _deterministic,
            torch.get_default_dtype,
            _precision,
        )

    # --- streams
    def stream(self) -> Stream:
        handle = torch._C._cuda_getCurrentRawStream(self.index)
        known = self._streams.get(handle)
        if known is None:
            theirs = torch.cuda.current_stream(self.index)
            known = self._streams[handle] = self.device.adopt_stream(theirs), theirs
        return known[0]

    def wait(self, stream: Stream, other: Stream) -> None:
        self._streams[stream.handle][1].wait_stream(self._streams[other.handle][1])

    def _beside(self) -> tuple[Any, Stream]:
        """torch's stream and ours, which are one: that of warm-ups and captures.

        One of our own, since torch gives out the same few streams again and again: cuBLAS has a
        workspace for each stream, which a graph goes on using wherever it is replayed, and which
        nobody else may use at that time.
        """
        if self._side is None:
            stream = self.device.create_stream()
            self._side = torch.cuda.ExternalStream(stream.handle, device=self.index), stream
        return self._side

    def run_beside(self, work: Callable[[], Any]) -> Any:
        (side, _), current = self._beside(), torch.cuda.current_stream(self.index)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                result = work()
        finally:
            current.wait_stream(side)
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(current)
        return result

    # --- captures
    def capture(self, work: Callable[[Stream], Any]) -> tuple[Graph, Any]:
        with _captures, torch.cuda.device(self.index):
            made = self._captured(work, hidden=True)
            if made.error and made.asked and not made.disturbed:
                made = self._captured(work, hidden=False)
        if made.graph is None:
            raise CaptureDisturbed(made.error) if made.disturbed else NotGraphable(made.error)
        if made.graph.only_to_read:
            raise NotGraphable(f"the graph cannot be replayed here: {made.graph.only_to_read}")
        return made.graph, made.result

    def _captured(self, work: Callable[[Stream], Any], *, hidden: bool) -> _Made:
        self._open_pool()
        with _hidden_capture(hidden) as asked:
            made = None if self._by_torch else self._capture_here(work)
            if made is None:
                self._by_torch = True
                made = self._capture_by_torch(work)
        made.asked = bool(asked)
        return made

    def _open_pool(self) -> None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            if _begin_pool is None:
                self._keeper = self._trivial(self._pool)
            else:
                self._keeper = _Kept()
                with self._allocating(self._keeper):
                    pass

    @contextmanager
    def _allocating(self, owner: object) -> Iterator[None]:
        """This thread's tensors come out of the pool, which stays as long as the owner does."""
        _begin_pool(self.index, self._pool)
        release = weakref.finalize(owner, torch._C._cuda_releasePool, self.index, self._pool)
        release.atexit = False
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self.index, self._pool)

    def _capture_here(self, work: Callable[[Stream], Any]) -> _Made | None:
        """A capture by this library, into the pool of torch's allocator.

        torch's own captures take the default generator, so that other threads which draw random
        numbers meanwhile get an exception; this one leaves the generators alone.  None if torch
        must capture: the work draws random numbers, or copies from memory of the host, which torch
        keeps for a graph.
        """
        side, stream = self._beside()
        current, owner = torch.cuda.current_stream(self.index), _Kept()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side), _undisturbed(), self._allocating(owner):
                graph, result = captured(stream, partial(work, stream), _explained)
        except NotGraphable as broken:
            drew = _NOT_REGISTERED in str(broken.__cause__)
            other = isinstance(broken, CaptureDisturbed)
            return None if drew else _Made(error=str(broken), disturbed=other)
        finally:
            current.wait_stream(side)
        nodes = graph.nodes
        if any(drawing(nodes, self.device.driver.memory_range)) or _copies_elsewhere(nodes):
            return None
        # Adopted: what torch's kernels point at is not known to this library.
        adopted = Graph.adopt(self.device, int(graph.handle), owner=(graph, owner))
        return _Made(adopted, result)

    def _capture_by_torch(self, work: Callable[[Stream], Any]) -> _Made:
        side, stream = self._beside()
        current = torch.cuda.current_stream(self.index)
        owner = torch.cuda.CUDAGraph(keep_graph=True)
        for generator in self.generators:
            owner.register_generator_state(generator)
        side.wait_stream(current)
        made = _Made()
        with torch.cuda.stream(side), _undisturbed():
            owner.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                made.result = work(stream)
            except Exception as raised:
                made.error, made.disturbed = _explained(raised), disturbed(raised)
            except BaseException:
                self._end(owner)
                raise
            ended = self._end(owner)
        current.wait_stream(side)
        if not made.error and ended is not None:
            reason = str(ended).strip().partition("\n")[0]
            made.error, made.disturbed = f"the capture failed: {reason}", disturbed(ended)
        if not made.error:
            graph = adopt_graph(self.device, owner, generators=self.generators)
            if len(graph):
                made.graph = graph
            else:
                made.error = "the capture is empty: nothing ran on the caller's current stream"
        return made

    def _end(self, owner: Any) -> RuntimeError | None:
        """Ends a capture; torch's error if it was broken, after mending what that leaves."""
        try:
            owner.capture_end()
        except RuntimeError as error:
            self._mend()
            return error
        return None

    def _mend(self) -> None:
        """torch ends a broken capture half: its allocator goes on filling the pool, and its
        generators take themselves for captured, so that the next eager draw raises.  A capture that
        works puts the generators right; the pool is left to the graphs that have it."""
        pool, self._pool = self._pool, None
        for call in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            try:
                call(self.index, pool)
            except RuntimeError:
                break  # this torch has done it
        if torch.cuda.is_current_stream_capturing():  # it still captures: leave it
            self._side = None
        self._trivial(torch.cuda.graph_pool_handle())
        self._beside()[0].synchronize()

    def _trivial(self, pool: Any) -> Any:
        """A graph that does next to nothing, of a pool."""
        with torch.cuda.stream(self._beside()[0]):
            nothing = torch.zeros(1, device=f"cuda:{self.index}")
            owner = torch.cuda.CUDAGraph(keep_graph=True)
            for generator in self.generators:
                owner.register_generator_state(generator)
            owner.capture_begin(pool=pool, capture_error_mode="thread_local")
            nothing.add_(1)
            owner.capture_end()
        return owner

    # --- memory
    def buffer(self, tensor: torch.Tensor, shape: Sequence[int] | None) -> torch.Tensor:
        like: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
        # Tensors made in inference mode have no version, which tells whether they are written.
        with torch.inference_mode(False), torch.no_grad():
            if shape is not None:
                return torch.zeros(tuple(shape), **like)
            if torch._debug_has_internal_overlap(tensor) == 1:
                return torch.empty(tensor.shape, **like)
            return torch.empty_strided(tensor.shape, tensor.stride(), **like)

    def extent(self, tensor: torch.Tensor, /) -> int | None:
        plain = tensor.layout is torch.strided and not (tensor.is_neg() or tensor.is_conj())
        if not (plain and dense(tensor.shape, tensor.stride())):
            return None
        nbytes = tensor.numel() * tensor.element_size()
        return nbytes if tensor.data_ptr() or not nbytes else None

    def stager(self, buffers: Sequence[torch.Tensor]) -> Callable[[Sequence[Any]], None]:
        into = list(buffers)
        if not into:
            return lambda tensors: None
        copy = into[0].copy_

        def stage(tensors: Sequence[Any]) -> None:
            if len(into) == 1:
                copy(tensors[0])
            else:
                torch._foreach_copy_(into, tensors)

        # Whether gradients are recorded is part of the key.
        return torch.no_grad()(stage) if torch.is_grad_enabled() else stage

    def copy(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            into.copy_(tensor)

    def narrow(self, tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
        return tensor.narrow(axis, 0, size)

    def rest(self, tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
        return tensor.narrow(axis, size, tensor.shape[axis] - size)

    def fill(self, tensor: torch.Tensor, value: float) -> None:
        tensor.fill_(value)

    def poison(self, rest: torch.Tensor, front: torch.Tensor, axis: int) -> None:
        if not rest.numel():
            return
        if rest.is_floating_point() or rest.is_complex():
            rest.fill_(float("nan"))
        elif front.numel():
            rest.copy_(front.narrow(axis, front.shape[axis] - 1, 1).expand_as(rest))

    def difference(
        self, one: torch.Tensor, other: torch.Tensor, tolerance: tuple[float, float] | None
    ) -> str:
        if one.shape != other.shape or one.dtype != other.dtype:
            return (
                f"{one.dtype} of shape {tuple(one.shape)} against {other.dtype} of shape "
                f"{tuple(other.shape)}"
            )
        if not one.numel():
            return ""
        with torch.no_grad():
            if tolerance is not None and (one.is_floating_point() or one.is_complex()):
                relative, absolute = tolerance
                if one.element_size() == 1:  # of these there is little arithmetic
                    one, other = one.float(), other.float()
                same = torch.isclose(one, other, rtol=relative, atol=absolute, equal_nan=True)
            else:
                bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
                if torch.equal(*bits):
                    return ""
                width = one.element_size()
                same = (bits[0] == bits[1]).view(-1, width).all(dim=1).view(one.shape)
            wrong = int((~same).sum())
            if not wrong:
                return ""
            where = (~same).nonzero()[0].tolist() if one.dim() else []
            values = one[tuple(where)].item(), other[tuple(where)].item()
        return (
            f"{wrong} of {one.numel()} elements, the first at {where}: {values[0]} against "
            f"{values[1]}"
        )

    # --- graphs in files
    stable: tuple[type, ...] = (torch.dtype, torch.device, torch.layout, torch.memory_format)

    def release(self) -> Hashable:
        name = torch.cuda.get_device_name(self.index)
        return str(torch.__version__), torch.version.cuda, torch.backends.cudnn.version(), name

    def over(self, buffer: Buffer) -> torch.Tensor:
        return as_tensor(buffer)

    def span(self, tensor: torch.Tensor) -> MemoryRange:
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size = (last + 1) * tensor.element_size() if tensor.numel() else 0
        return MemoryRange(tensor.data_ptr(), size)

    def layout(self, tensor: torch.Tensor, base: int) -> Any:
        if tensor.is_neg() or tensor.is_conj():
            return None
        offset = tensor.data_ptr() - base if tensor.numel() else 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        return [dtype, [*tensor.shape], [*tensor.stride()], offset]

    def view(self, tensor: torch.Tensor, layout: Any) -> torch.Tensor:
        name, shape, strides, offset = layout
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name!r} is no type of torch's")
        first, beside = divmod(offset, dtype.itemsize)
        last = first + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        storage = tensor.untyped_storage()
        if min([first, *shape, *strides]) < 0 or (
            0 not in shape and (beside or (last + 1) * dtype.itemsize > storage.nbytes())
        ):
            raise ValueError("it does not lie in its memory")
        with torch.inference_mode(False), torch.no_grad():
            made = torch.empty(0, dtype=dtype, device=tensor.device)
            return made.set_(storage, first, shape, strides)

    # --- random numbers
    def _states(self) -> list[torch.Generator]:
        return [torch.cuda.default_generators[self.index], *self.generators]

    def save_random(self) -> Any:
        return [generator.get_state() for generator in self._states()]

    def restore_random(self, state: Any) -> None:
        for generator, saved in zip(self._states(), state, strict=True):
            generator.set_state(saved)

    def same_random(self, state: Any) -> bool:
        return all(
            torch.equal(generator.get_state(), saved)
            for generator, saved in zip(self._states(), state, strict=True)
        )


def _dict_copier(like: Any, children: list[Any]) -> Join | None:
    """Makes dicts of a class in Python, such as transformers' results, whose constructors take 10
    µs: the items and the attributes of `like`, with others in the places of its children.

    None unless those are all that it is, and each is a child or a plain value."""
    kind: Any = type(like)
    bases = [base for base in kind.__mro__ if base not in (OrderedDict, dict, object)]
    if not isinstance(like, OrderedDict) or any(
        type(base) is not type or not made_in_python(base) or vars(base).get("__slots__")
        for base in bases
    ):
        return None
    keys, held = tuple(like), vars(like)
    if not same([*like.values()], children) or not all(is_plain(key) for key in keys):
        return None
    places = {}
    for name, value in held.items():
        if keys.count(name) == 1 and like[name] is value:
            places[name] = keys.index(name)
        elif not is_plain(value, Torch.plain):
            return None
    rest = {name: None if name in places else value for name, value in held.items()}
    moved, new, put = [*places.items()], kind.__new__, OrderedDict.__setitem__

    def copy(others: Sequence[Any]) -> Any:
        made = new(kind)
        for key, value in zip(keys, others, strict=False):
            put(made, key, value)
        attributes = made.__dict__
        attributes.update(rest)
        for name, place in moved:
            attributes[name] = others[place]
        return made

    return copy


def _alike(one: Any, other: Any) -> bool:
    """Whether two dicts with attributes hold the same objects, in the same order."""
    return type(one) is type(other) and all(
        [*a] == [*b] and same([*a.values()], [*b.values()])
        for a, b in ((one, other), (vars(one), vars(other)))
    )


@dataclass(frozen=True, slots=True)
class _Attribute:
    """Where an attribute of a module is."""

    path: str
    """From the module that is watched."""
    held: dict[str, Any]
    name: str


_MOST_VERSIONS = 4096
_next_version = itertools.count()
_versions: dict[Hashable, int] = {}
"""Of what modules hold besides tensors, in all graphed functions."""


class ModuleWatch:
    """What a module and those inside it hold, read again at each call: weights, buffers, and
    attributes whose names do not begin with _: plain ones, tensors, and others (`others`)."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)  # whoever calls this has it
        self._find()

    def _find(self) -> None:
        """Finds where to look, and gives a version to what is there, which is the same one whenever
        that is so again, also in another module."""
        named = dict(self._module().named_modules())  # type: ignore[union-attr]
        modules = [*named.values()]
        places = {id(module): place for place, module in enumerate(modules)}
        self._inside = [m._modules for m in modules if m._modules]
        self._children = [*_all(map(_values, self._inside))]
        self._tensors = [d for m in modules for d in (m._parameters, m._buffers) if d]
        every = torch.nn.modules.module
        self._hooks = [every._global_forward_hooks, every._global_forward_pre_hooks]
        self._hooks += [d for m in modules for d in (m._forward_hooks, m._forward_pre_hooks)]
        self._held = [m.__dict__ for m in modules]
        inner = [d for m in modules for d in (m._modules, m._parameters, m._buffers)]
        self._sized = [*self._held, *inner]
        self._lengths = [*map(len, self._sized)]
        self._gets: list[tuple[Callable[[dict[str, Any]], tuple[Any, ...]], dict[str, Any]]] = []
        self._names: list[list[str]] = []
        self._loose: list[_Attribute] = []
        """Tensors that are neither parameters nor buffers."""
        self._others: list[_Attribute] = []
        for path, held in zip(named, self._held, strict=True):
            names = []
            for name, value in held.items():
                if name.startswith("_"):
                    continue
                where = _Attribute(f"{path}.{name}" if path else name, held, name)
                if is_plain(value, Torch.plain):
                    names.append(name)
                elif isinstance(value, torch.Tensor):
                    self._loose.append(where)
                elif not isinstance(getattr(value, "__self__", None), Guarded):  # `GraphedModule`
                    self._others.append(where)
            self._names.append(names)
            if names:  # a getter of one name alone would give no tuple
                self._gets.append((operator.itemgetter(names[0], *names), held))
        self._plain, self._found, self._hooked = self._state()
        found = [*map(id, self._found)]
        state = (
            tuple([(path, type(module)) for path, module in named.items()]),
            tuple([places.get(id(child)) for child in self._children]),
            tuple([tuple([n for n, v in d.items() if v is not None]) for d in inner]),
            tuple(map(tuple, self._names)),
            tuple([plain_token(value) for value in self._plain]),
            tuple([each.path for each in (*self._loose, *self._others)]),
            tuple([found.index(each) for each in found]),
            tuple(self._hooked),
        )
        if len(_versions) > _MOST_VERSIONS:
            _versions.clear()
        self._version = _versions.setdefault(state, next(_next_version))

    def _state(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Plain attributes, others, and hooks.  Raises KeyError for an attribute that is gone."""
        plain = [*_all([get(held) for get, held in self._gets])]
        found = [each.held[each.name] for each in self._others]
        return plain, found, [*map(tuple, self._hooks)] if any(self._hooks) else []

    def _as_before(self) -> bool:
        """Whether all is where it was, and attributes are the same objects: 1, 1.0 and True are
        equal, and do not do the same."""
        # In loops in C where that can be: it is called in each call that goes by its key.
        children = same([*_all(map(_values, self._inside))], self._children)
        if not children or [*map(len, self._sized)] != self._lengths:
            return False
        try:
            plain, found, hooked = self._state()
            loose = all(isinstance(each.held[each.name], torch.Tensor) for each in self._loose)
        except KeyError:
            return False
        alike = same(plain, self._plain) and same(found, self._found)
        return alike and loose and hooked == self._hooked

    def read(self, tokens: list[Hashable], arrays: list[Any]) -> None:
        if not self._as_before():
            self._find()
        tokens.append(self._version)
        arrays += [t for t in _all(map(_values, self._tensors)) if t is not None]
        arrays += [each.held[each.name] for each in self._loose]

    def others(self) -> Iterator[tuple[str, Any]]:
        """Attributes that are no tensors and no plain values, each object once."""
        met: set[int] = set()
        for each, value in zip(self._others, self._found, strict=True):
            if id(value) not in met:
                met.add(id(value))
                yield each.path, value

    def methods(self) -> Iterator[tuple[type, str]]:
        module: Any = self._module()
        for kind in {type(each) for each in module.modules()}:
            yield kind, "forward"

    def describe(self, name: str, description: Description) -> None:
        """All that it holds but for `others`, by names."""
        root: Any = self._module()
        for path, module in root.named_modules(prefix=name):
            forward = module.forward  # it may be one of its own
            description.add(path, type(module), code_text(type(module)), code_text(forward))
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is not None:
                        description.array(f"{path}.{key}", tensor)
            inside = ("_modules", "_parameters", "_buffers")
            description.settings({k: v for k, v in vars(module).items() if k not in inside})
        for each in self._loose:
            description.array(f"{name}.{each.path}", each.held[each.name])

    def note(self, checks: Checks, tokens: list[Hashable], arrays: list[Any]) -> None:
        """Reads, and notes where each value was found."""
        before = len(arrays)
        self.read(tokens, arrays)
        children = [[*held.values()] for held in self._inside]
        tensors = [[*held.values()] for held in self._tensors]
        for held, values in zip(self._inside + self._tensors, children + tensors, strict=True):
            checks.items(held, values)
        for hooks in self._hooks:
            if hooks:
                checks.reads(hooks, tuple)
            else:
                checks.size(hooks, 0)
        for held, length in zip(self._sized, self._lengths, strict=True):
            if not held or "_modules" in held:  # the others are compared above
                checks.size(held, length)
        for held, names in zip(self._held, self._names, strict=True):
            checks.some_items(held, {name: held[name] for name in names})
        loose = [each.held[each.name] for each in self._loose]
        found = [each.held[each.name] for each in self._others]
        for each, value in zip(self._loose + self._others, loose + found, strict=True):
            checks.some_items(each.held, {each.name: value})
        read = [t for t in _all(tensors) if t is not None] + loose
        if not (
            same([*_all(children)], self._children)
            and same(read, arrays[before:])
            and same(self._state()[0], self._plain)
            and same(found, self._found)
        ):
            raise Inexpressible


_all = itertools.chain.from_iterable
_values = dict.values


@contextmanager
def _hidden_capture(hidden: bool) -> Iterator[list[bool]]:
    """Gives a list that is filled if transformers asks whether the stream captures.

    It asks before it looks at data (whether a mask masks anything), and runs other kernels than
    eagerly if it must not look.  While this is `hidden`, it is told that nothing captures, so that
    it does what it does eagerly: the capture has the same kernels, or fails where it does look.
    """
    asked: list[bool] = []
    module: Any = sys.modules.get("transformers.utils.import_utils")
    question = getattr(module, "is_cuda_stream_capturing", None)
    if not hidden or question is None:
        yield asked
        return
    thread = threading.get_ident()

    def answer() -> bool:
        if threading.get_ident() != thread:
            return bool(question())
        asked.append(True)
        return False

    module.is_cuda_stream_capturing = answer
    try:
        yield asked
    finally:
        module.is_cuda_stream_capturing = question


def _copies_elsewhere(nodes: Sequence[Node]) -> bool:
    """Whether a graph copies from or to memory that is not of torch's allocator on a device."""
    copies = [n.memcpy for n in every_node(nodes) if n.kind is NodeKind.MEMCPY]
    found = [address for copy in copies for address in (copy.src, copy.dst)]
    if not found:
        return False
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # another allocator than torch's own
        return True
    ranges = [MemoryRange(s["address"], s["total_size"]) for s in segments]
    return not all(any(r.holds(address) for r in ranges) for address in found)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection, which may destroy graphs, and no cache of autocast, whose tensors
    would be gone at the replay."""
    caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    if torch.is_autocast_enabled("cuda"):
        torch.clear_autocast_cache()
    try:
        with no_collection():
            yield
    finally:
        torch.set_autocast_cache_enabled(caching)


def _explained(error: Exception) -> str:
    return explained(
        error,
        torch,
        ".item(), a print, nonzero, a copy to the CPU, a generator that was not given",
    )
