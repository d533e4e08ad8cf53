"""PyTorch's operations for `Graphed`: values, modes, streams, memory and random numbers."""

from __future__ import annotations

import ctypes
import importlib
import operator
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from functools import cache, cached_property, partial, wraps
from pathlib import Path
from typing import Any

import torch

from ostinato import Buffer, Device, Graph, MemoryRange, Stream
from ostinato.interop.reading.chains import ChainBuilder
from ostinato.interop.reading.library import NotGraphable
from ostinato.interop.reading.moves import dense
from ostinato.interop.reading.objects import Watch
from ostinato.interop.reading.together import Agreement
from ostinato.interop.torch import recurrent
from ostinato.interop.torch.adopting import as_tensor
from ostinato.interop.torch.capturing import Captures, OwnPool, learns, out_of_memory
from ostinato.interop.torch.counting import countable
from ostinato.interop.torch.gradients import Differentiated, memory_of
from ostinato.interop.torch.plans import ended, require_room
from ostinato.interop.torch.ranks import heard, messages
from ostinato.interop.torch.trees import PLAIN, joiner, parts
from ostinato.interop.torch.waits import run_chain
from ostinato.interop.torch.watching import (
    SCRIPTED,
    CountingWatch,
    ModuleWatch,
    StepWatch,
    WholeWatch,
    stateful,
    steps_of,
)


def _kept(*names: tuple[str, str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields dicts of torch's modules with names in them, for the names that this torch has."""
    for module, name in names:
        try:
            held = vars(importlib.import_module(module))
        except ImportError:
            continue
        if name in held:
            yield held, name


def _getters(*names: str) -> tuple[Callable[[], Any], ...]:
    """Returns functions that read settings, for the settings that this torch has.

    They are the functions in C, without those in Python around them: each call reads them all."""
    found = [getattr(torch._C, f"_get_{name}", None) for name in names]
    return tuple([getter for getter in found if getter is not None])


_requires_grad = operator.attrgetter("requires_grad")
_unattached = operator.attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
"""Returns what a backward does with a tensor, but for its gradient."""


def _learning(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Returns whether a tensor requires gradients, and whether it has one: backward adds to it."""
    return tensor.requires_grad, tensor.is_leaf and tensor.grad is not None


_settings = _getters(
    "deterministic_algorithms",
    "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation",
    "math_sdp_allow_fp16_bf16_reduction",
    "cudnn_enabled",
    "cudnn_deterministic",
    "flash_sdp_enabled",
    "mem_efficient_sdp_enabled",
    "math_sdp_enabled",
    "cudnn_sdp_enabled",
    "cudnn_depthwise_kernel",
    "cublaslt_prefer_grouped_gemm",
    "sm_carveout_experimental",
)
"""Further settings that decide which kernels run."""
_libraries = _getters("blas_preferred_backend", "linalg_preferred_backend")
"""Such settings whose values take long to make and to compare: as long as all the others."""
_sets: dict[str, int] = {}
"""The number of times that these were set, by the name of the setter."""
_autocast_type = partial(torch.get_autocast_dtype, "cuda")
_orders = _getters("sdp_priority_order")
"""Further settings that are lists: which kernel of attention is tried first."""
_deterministic = _getters(
    "deterministic_algorithms_warn_only", "deterministic_fill_uninitialized_memory"
)
"""Further settings that are read if algorithms must be deterministic."""
# The getters that products use; they raise if old and new settings contradict each other.
_legacy = torch._C._get_cublas_allow_tf32, torch._C._get_cudnn_allow_tf32
_each = tuple(
    [
        partial(torch._C._get_fp32_precision_getter, "cuda", name)
        for name in ("matmul", "conv", "rnn")
    ]
)
_tracing: Callable[[], bool] = torch._C._is_tracing
_level: Callable[[], Any] = torch._C._functorch.maybe_current_level
_hooked = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
"""Returns the hooks of all saved tensors, or None."""
_dual = vars(torch.autograd.forward_ad)
_parametrize = vars(torch.nn.utils.parametrize)
_choices = tuple(
    _kept(
        ("torch.nn.attention._registry", "_FLASH_ATTENTION_ACTIVE"),
        ("torch.backends.mha", "_is_fastpath_enabled"),
    )
)
"""Such settings that are kept in Python: other kernels of attention, the fast path of encoders."""


@cache
def _setters() -> tuple[tuple[dict[str, int], str], ...]:
    """Counts from now on what sets `_libraries`; returns the places of the counts.  Lasts as long
    as the process.  What torch does is not changed."""
    for name in ("_set_blas_preferred_backend", "_set_linalg_preferred_backend"):
        setter = getattr(torch._C, name, None)
        if setter is not None:
            _sets[name] = 0
            setattr(torch._C, name, _counted(setter, name))
    return tuple([(_sets, name) for name in _sets])


def _counted(setter: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(setter)
    def counted(*args: Any) -> Any:
        try:
            return setter(*args)
        finally:  # afterwards: what is noted meanwhile is noted with the old count
            _sets[name] += 1

    return counted


_overriding = torch._C._len_torch_function_stack
_dispatching = torch._C._len_torch_dispatch_stack
_empty_here = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
"""`empty_strided` on the current device, as torch.compile's code calls it, which takes half the
time.  None in a torch without CUDA."""


def _precision() -> tuple[Callable[[], Any], ...]:
    """Returns functions that read the precision of products.

    The old ones raise if the new settings of torch 2.9 (`fp32_precision`) have values that the old
    settings cannot express; the new ones take longer."""
    try:
        for function in _legacy:
            function()
    except RuntimeError:
        return _each
    return _legacy


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Methods that return the tensors of which a tensor of another layout consists."""


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns a tensor, or the parts of a sparse one, which has no memory of its own, and the parts
    of its gradient, which may have no other Python object."""
    names = _PARTS.get(tensor.layout)
    found = [tensor] if names is None else [getattr(tensor, name)() for name in names]
    gradient = tensor.grad if tensor.is_leaf else None
    return found if gradient is None else [*found, *_parts(gradient)]


def _repeated(tensor: torch.Tensor) -> list[int]:
    """Returns the axes along which all elements are one in memory: torch refuses to write there."""
    strides = tensor.stride()
    if 0 not in strides:
        return []
    return [axis for axis, size in enumerate(tensor.shape) if size > 1 and not strides[axis]]


def _once(tensor: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """Returns a view of the first elements along some axes."""
    for axis in axes:
        tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _determinism() -> tuple[Callable[[], Any], ...]:
    """Returns functions that read how deterministic algorithms are; none if they need not be so."""
    return _deterministic if torch._C._get_deterministic_algorithms() else ()


def _require_plain_calls() -> None:
    """Raises NotGraphable if torch intercepts each operation below Python."""
    if _tracing():
        raise NotGraphable("torch.jit traces, which a replay gives nothing to see")
    if _dual["_current_level"] >= 0 or _level() is not None:
        raise NotGraphable(
            "a transform of torch.func or forward-mode differentiation is active, and a replay "
            "computes plain values alone"
        )
    if _parametrize["_cache_enabled"]:
        raise NotGraphable(
            "parametrized tensors are computed once and kept (torch.nn.utils.parametrize.cached), "
            "and a replay would read them when they are gone"
        )


def _default_device() -> Hashable:
    """Returns the device on which torch makes tensors, which is a mode of its own once it was set.

    Raises NotGraphable if another mode is active, whose Python must run for each operation."""
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


@cache
def _reader() -> tuple[int, int] | None:
    """Finds the function of torch's stable C interface that returns a tensor's address, for
    `Library.reader`.

    The function takes a pointer to an `at::Tensor`, whose one word is the number in `_cdata`.  The
    offset of that word in Python's objects is searched for; returns None if it is not the same in
    all tensors that are tried."""
    path = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(path)).aoti_torch_get_data_ptr
        one = torch.empty(8, device="cpu")
        tried = one, one[1:], torch.nn.Parameter(torch.empty(3, device="cpu")), one[:0].clone()
        addresses = [each.data_ptr() for each in tried]
    except (OSError, AttributeError, RuntimeError):
        return None
    word, address = ctypes.sizeof(ctypes.c_void_p), ctypes.c_void_p()
    (*places,) = range(object.__basicsize__, torch.Tensor.__basicsize__, word)
    for each in tried:
        held = {at: ctypes.c_void_p.from_address(id(each) + at).value for at in places}
        places = [at for at in places if held[at] == each._cdata]
    if len(places) != 1:
        return None
    for each, known in zip(tried, addresses, strict=True):
        failed = function(ctypes.c_void_p(id(each) + places[0]), ctypes.byref(address))
        if failed or (address.value or 0) != known:
            return None
    return ctypes.cast(function, ctypes.c_void_p).value or 0, places[0]


_SEEDS: tuple[str, ...] = (
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state"),
    *("set_rng_state_all", "set_state", "graphsafe_set_state", "set_offset"),
)
_DRAWING = frozenset(_SEEDS) | {
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
    *("bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "uniform_", "random_"),
    *("exponential_", "geometric_", "log_normal_", "cauchy_", "poisson", "binomial"),
}
"""Names of functions that draw random numbers, on the CPU or a GPU, or that set a generator."""


class Torch:
    """torch's operations for `Graphed` (`interop.reading.library.Library`)."""

    array_type = torch.Tensor
    held: tuple[type, ...] = (torch.cuda.Event, torch.cuda.Stream)
    """Types whose weak references dangle: torch 2.11 frees events without clearing theirs (0 of 50
    were cleared).  Streams have the same kind of base class, and were not tried."""
    plain = PLAIN
    alias = staticmethod(torch.Tensor.detach)
    seeds = _SEEDS
    whole: Any = None
    """The graphed module, whose own hooks run around its replays."""
    hooks_apart = False
    """True if Python calls the hooks of weights in each backward (`gradients="replay"`)."""
    _of_host: tuple[torch.Generator, ...] = (torch.default_generator,)
    """Generators from which no graph draws."""

    def __init__(self, device: Device, index: int, generators: Sequence[Any] = ()) -> None:
        self.device, self.index, self.where = device, index, torch.device("cuda", index)
        self.generators = tuple(generators)
        # The function in Python checks at each call whether CUDA was built in.
        capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
        self.capturing = capturing or torch.cuda.is_current_stream_capturing
        self.current = partial(torch._C._cuda_getCurrentRawStream, index)
        self.current_device: Callable[[], int] = torch._C._cuda_getDevice
        self.address = torch.Tensor.data_ptr
        self.offset = torch.Tensor.storage_offset
        self.clone = torch.Tensor.clone
        self._streams: dict[int, tuple[Stream, Any]] = {}
        self._captures = Captures(device, index, self.generators)
        recurrent.watch()

    @property
    def reader(self) -> tuple[int, int] | None:
        return _reader()

    # --- values
    def is_array(self, value: object, /) -> bool:
        return isinstance(value, torch.Tensor)

    parts = staticmethod(parts)
    joiner = staticmethod(joiner)

    def watch(self, value: object, /) -> Watch | None:
        if isinstance(value, torch._C.ScriptMethod):
            raise NotGraphable(SCRIPTED.format("the function"))
        if isinstance(value, torch.nn.Module):
            return ModuleWatch(value, self._learns, self.hooks, whole=value is self.whole)
        found = stateful(value)
        if found is None:
            return None
        if found in self._counting:
            return CountingWatch(found, self)
        return (StepWatch if found in self._steps else WholeWatch)(found, self)

    def hooks(self, tensor: torch.Tensor, /) -> list[Any]:
        if self.hooks_apart or not self._learns():
            return []
        held = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
        return [each for each in held if each is not None]

    @cached_property
    def _steps(self) -> weakref.WeakKeyDictionary[Any, tuple[str, ...]]:
        """The objects whose methods replays call, with the names of these methods."""
        return weakref.WeakKeyDictionary()

    def step_in_python(self, value: object, named: Collection[str], waits: bool, /) -> bool:
        names = () if value in self._steps else steps_of(value, named)
        if waits and not isinstance(value, torch.amp.GradScaler):
            return False
        if names:
            self._steps[value] = names
            if countable(value):
                self._counting.add(value)
        return bool(names)

    @cached_property
    def _counting(self) -> weakref.WeakSet[Any]:
        """The optimisers among these objects whose steps may be in a graph (`counting`)."""
        return weakref.WeakSet()

    @property
    def step_methods(self) -> list[tuple[Any, str, bool]]:
        """The objects whose methods replays call, each with the name of a method, and True if that
        may be in a graph instead."""
        found = self._steps.items()
        return [(value, name, value in self._counting) for value, names in found for name in names]

    @staticmethod
    def signature(tensor: torch.Tensor, /) -> tuple[Hashable, ...]:
        needs = tensor.requires_grad
        try:
            stride = tensor.stride()
        except (RuntimeError, NotImplementedError):  # no strides: sparse, nested
            shape = () if tensor.is_nested else tuple(tensor.shape)
            return shape, tensor.dtype, tensor.layout, -1, needs
        lazy = tensor.is_neg(), tensor.is_conj()  # the memory holds another value
        return tensor.shape, tensor.dtype, stride, tensor.get_device(), needs, *lazy

    storage = staticmethod(memory_of)

    def memory(self, tensor: torch.Tensor, /) -> list[tuple[MemoryRange, object]]:
        found: list[tuple[MemoryRange, object]] = []
        try:
            with torch._C.DisableTorchFunction():
                for part in _parts(tensor):
                    storage = part.untyped_storage()
                    if storage.device.type != "meta":  # torch has such tensors while it compiles
                        found.append((MemoryRange(storage.data_ptr(), storage.nbytes()), storage))
        except Exception:  # it consists of other tensors, which only code of the user's can name
            return []
        return [piece for piece in found if piece[0].address]

    def on_host(self, tensor: torch.Tensor, /) -> bool:
        return bool(tensor.device.type == "cpu")

    def refusal(self, tensor: torch.Tensor, /) -> str:
        kind = type(tensor)
        if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return (
                f"a tensor of the subclass {kind.__module__}.{kind.__qualname__}, of which a graph "
                "would see the memory alone"
            )
        if tensor.is_nested or tensor.is_quantized:
            return f"a {'nested' if tensor.is_nested else 'quantized'} tensor"
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

    def hidden(self, tensor: torch.Tensor, names: Collection[str], *, copied: bool = False) -> str:
        given = [name for name in vars(tensor) if not name.startswith("_")]
        if not copied:
            given = [name for name in given if name in names]
        if copied and "grad" in names and tensor.is_leaf and tensor.grad is not None:
            given.append("grad")
        if copied and tensor._backward_hooks:  # they change the gradients that a function computes
            given.append("_backward_hooks")
        if not given:
            return ""
        return f"a tensor with an attribute {given[0]!r}, which a replay does not look at again"

    def lost(self, tensor: torch.Tensor, /) -> str:
        given = [name for name in vars(tensor) if not name.startswith("_")]
        if given:
            return f"an attribute {given[0]!r}"
        if type(tensor) is not torch.Tensor:
            return f"its class ({type(tensor).__qualname__})"
        if tensor.retains_grad:
            return "that a backward gives it its gradient"
        return "that it requires gradients" if tensor.requires_grad else ""

    def attached(self, tensors: Sequence[torch.Tensor], /) -> list[tuple[Any, str, Any]]:
        # Frozen ones too: `zero_grad` drops the gradients from before they were frozen.
        leaves = {id(tensor): tensor for tensor in tensors if tensor.is_leaf}
        return [(tensor, "grad", tensor.grad) for tensor in leaves.values()]

    def live(self, *, attached: bool = True) -> Callable[[Any], Hashable] | None:
        if not torch.is_grad_enabled():
            return None
        if attached:
            return _learning
        return _requires_grad if self.hooks_apart else _unattached

    def wants_gradient(self, result: Any, /) -> bool:
        return torch.is_grad_enabled() and learns(result)

    @staticmethod
    def without_gradient(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.retains_grad else tensor.detach()  # the former is `lost`

    def differentiable(self, function: Callable[..., Any], state: Sequence[Any]) -> Differentiated:
        self._captures.begin_backward()
        pool = OwnPool()

        def capture(work: Callable[[Stream], Any]) -> tuple[Graph, Any]:
            with self._captures.apart(pool):
                return self.capture(work)

        return Differentiated(capture, function, state, self._plans_ended)

    def version(self, tensor: torch.Tensor, /) -> int | None:
        return None if tensor.is_inference() else tensor._version

    def _learns(self) -> bool:
        """True if gradients may be computed, also by the function alone."""
        return torch.is_grad_enabled() or bool(self._captures.differentiates)

    def modes(self) -> Hashable:
        _require_plain_calls()
        learns = self._learns()
        if learns and _hooked():
            raise NotGraphable(
                "hooks of all saved tensors are active (torch.autograd.graph.saved_tensors_hooks), "
                "and a replay runs no Python"
            )
        return (
            learns and torch.is_anomaly_enabled(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            _autocast_type(),  # also while it is off: a function may switch it on
            torch.get_default_dtype(),
            # Each without a Python frame: every call that goes by its key reads them.
            *map(operator.call, _settings),
            *map(operator.call, _libraries),
            *map(tuple, map(operator.call, _orders)),
            *map(operator.call, _precision()),
            *map(operator.call, _determinism()),
            # The name of a setting without the handle behind it, which undoes the setting.
            *[c[0] if isinstance(c := held[name], tuple) else c for held, name in _choices],
            _default_device() if _overriding() or _dispatching() else None,
            0 if self._captures.plans is None else require_room(self._plans_ended()),
        )

    def _plans_ended(self) -> int:
        return ended(self._captures.index, self._captures.plans or 0)

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
        around = (
            *(self.capturing, self.current, self.current_device),
            *(_overriding, _dispatching, _tracing),
        )
        if torch._C._is_any_autocast_enabled() or _overriding():
            return (*around, self.modes)
        return (
            *around,
            torch.is_grad_enabled,
            *((torch.is_anomaly_enabled, _hooked) if self._learns() else ()),
            torch.is_inference_mode_enabled,
            torch._C._is_any_autocast_enabled,
            _autocast_type,
            torch.get_default_dtype,
            *_settings,
            *_orders,
            *_precision(),
            *_determinism(),
            *(() if self._captures.plans is None else (self._plans_ended,)),
        )

    def names(self) -> tuple[tuple[dict[str, Any], str], ...]:
        # Transforms of torch.func make tensors without an address, which go by the key.
        kept = (_dual, "_current_level"), (_parametrize, "_cache_enabled"), *_choices
        return *kept, *_setters()

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

    # --- captures
    def run_beside(self, work: Callable[[], Any]) -> Any:
        return self._captures.run_beside(work)

    def capture(self, work: Callable[[Stream], Any]) -> tuple[Graph, Any]:
        return self._captures.capture(work)

    @property
    def unseen(self) -> bool:
        return self._captures.unseen

    @property
    def ranks(self) -> bool:
        distributed = torch.distributed
        return bool(distributed.is_available() and distributed.is_initialized())

    def heard(self, function: Any, name: str) -> Callable[[], Agreement | None]:
        return heard(function, name) if self.ranks else lambda: None

    def messages(self, graph: Graph) -> list[str]:
        return messages(graph) if self.ranks else []

    def chain(
        self, work: Callable[[Stream], Any], parts: ChainBuilder
    ) -> tuple[Any, NotGraphable | None]:
        return run_chain(self._captures, self.step_methods, work, parts)

    out_of_memory = staticmethod(out_of_memory)

    def trim(self, *, short: bool) -> None:
        self._captures.trim(short=short)

    # --- memory
    def buffer(self, tensor: torch.Tensor, shape: Sequence[int] | None) -> torch.Tensor:
        like: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
        # Tensors made in inference mode have no version, which is what counts their writes.
        with torch.inference_mode(False), torch.no_grad():
            if shape is not None:
                made = torch.zeros(tuple(shape), **like)
            else:
                made = torch.empty_strided(tensor.shape, tensor.stride(), **like)
            # Functions test whether an argument is a parameter, and whether it needs gradients.
            if type(tensor) is torch.nn.Parameter:
                return torch.nn.Parameter(made, tensor.requires_grad)
            return made.requires_grad_(tensor.requires_grad)

    def extent(self, tensor: torch.Tensor, /) -> int | None:
        plain = tensor.layout is torch.strided and not (tensor.is_neg() or tensor.is_conj())
        if not (plain and dense(tensor.shape, tensor.stride())):
            return None
        nbytes = tensor.numel() * tensor.element_size()
        return nbytes if tensor.data_ptr() or not nbytes else None

    def recipe(self, tensor: torch.Tensor, /) -> tuple[Any, ...]:
        return tuple(tensor.shape), tensor.stride(), tensor.dtype

    def new(self, *recipe: Any) -> torch.Tensor:
        shape, strides, dtype = recipe
        return torch.empty_strided(shape, strides, dtype=dtype, device=self.where)

    def maker(self) -> Callable[..., Any]:
        here = self.current_device() == self.index
        return self.new if _empty_here is None or not here else _empty_here

    def stager(self, buffers: Sequence[torch.Tensor]) -> Callable[[Sequence[Any]], None]:
        into = [*buffers]
        if not into:
            return lambda tensors: None
        repeated = {index: axes for index, one in enumerate(into) if (axes := _repeated(one))}
        for index, axes in repeated.items():
            into[index] = _once(into[index], axes)
        copy = into[0].copy_

        def stage(tensors: Sequence[Any]) -> None:
            if repeated:
                tensors = [*tensors]
                for index, axes in repeated.items():
                    tensors[index] = _once(tensors[index], axes)
            if len(into) == 1:
                copy(tensors[0])
            else:
                torch._foreach_copy_(into, tensors)

        # The stager is one key's, and whether gradients are recorded is part of the key.
        return torch.no_grad()(stage) if torch.is_grad_enabled() else stage

    def copy(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        axes = _repeated(into)
        with torch.no_grad():
            if axes:
                into, tensor = _once(into, axes), _once(tensor, axes)
            into.copy_(tensor)

    def narrow(self, tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
        return tensor.narrow(axis, 0, size)

    def rest(self, tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
        return tensor.narrow(axis, size, tensor.shape[axis] - size)

    def fill(self, tensor: torch.Tensor, value: float) -> None:
        with torch.no_grad():
            _once(tensor, _repeated(tensor)).fill_(value)

    def poison(self, rest: torch.Tensor, front: torch.Tensor, axis: int) -> None:
        if not rest.numel():
            return
        if rest.is_floating_point() or rest.is_complex():
            self.fill(rest, float("nan"))
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
            one, other = one.resolve_conj().resolve_neg(), other.resolve_conj().resolve_neg()
            if tolerance is not None and (one.is_floating_point() or one.is_complex()):
                relative, absolute = tolerance
                if one.element_size() == 1:  # types of one byte have little arithmetic
                    one, other = one.float(), other.float()
                same = torch.isclose(one, other, rtol=relative, atol=absolute, equal_nan=True)
            else:
                # Not `reshape`: the stride of a single element may be any number.
                flat = [t.contiguous().as_strided((t.numel(),), (1,)) for t in (one, other)]
                bits = [t.view(torch.uint8) for t in flat]
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
    stable: tuple[type, ...] = (
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
        # Enumerations of pybind11 are no Enum.
        *{type(read()) for read in (*_settings, *_libraries)},
    )

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

    def seeding(self) -> Callable[[Collection[str]], str]:
        before = [(g, g.initial_seed(), _drawn(g)) for g in self._states()]
        host, runs = [(g, g.get_state()) for g in self._of_host], recurrent.draws()

        def found(named: Collection[str]) -> str:
            if recurrent.draws() != runs:
                return "the state from which cuDNN draws dropout between recurrent layers"
            for generator, seed, drawn in before:
                if generator.initial_seed() != seed or _drawn(generator) < drawn:
                    return f"the seed or the offset of the generator of {generator.device}"
            if _DRAWING.isdisjoint(named) or all(
                torch.equal(generator.get_state(), state) for generator, state in host
            ):
                return ""
            return "the state of torch's generator of the CPU"

        return found

    def same_random(self, state: Any) -> bool:
        return all(
            torch.equal(generator.get_state(), saved)
            for generator, saved in zip(self._states(), state, strict=True)
        )


def _drawn(generator: torch.Generator) -> int:
    """Returns how far a generator of a GPU has counted; 0 for a generator of the CPU."""
    return int(generator.get_offset()) if generator.device.type == "cuda" else 0


class TorchWithoutCuda(Torch):
    """The operations where torch has no CUDA device, and no call is captured: functions are read,
    streams and modes never are."""

    def __init__(self, device: Device) -> None:
        self.device, self.index, self.generators = device, -1, ()
        self.where = torch.device("cpu")
