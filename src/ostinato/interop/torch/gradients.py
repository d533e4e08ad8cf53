"""Gradients of replays: the backward of a captured call is a graph of its own.

The capture of a call keeps the graph of autograd, and with it the memory of what the backward
needs; a second capture takes the backward.  A replay returns copies of the results that belong to a
node of autograd (`_Replayed`), whose backward replays the second graph and returns copies of its
gradients.  So `.grad` never lies in memory that a later replay overwrites.

Between a replay and its backward, the memory is that of this call: another call of the key takes
another pair of graphs (`pending`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ostinato import Graph, GraphExec, MemoryRange, Stream
from ostinato.interop.reading.library import NotGraphable
from ostinato.interop.reading.slots import points_at, words_of_nodes
from ostinato.interop.torch.capturing import replaced_here
from ostinato.interop.torch.plans import transforms

_tree_map: Any = torch.utils._pytree.tree_map


class _Pass:
    """One replay, until its backward has run."""

    def __init__(self, number: int, versions: list[int], ends: int) -> None:
        self.number, self.versions, self.ends = number, versions, ends


class Backward:
    """The backward of a captured call.

    `outputs`: indices of the results that have gradients, whose gradients are written into
    `buffers`.  `leaves`: indices of the arguments that get gradients, before the `weights`, which
    get them too.  `gradients`: theirs after a launch, None for those without.  `reads`: the weights
    and other tensors whose memory the graph reads.  `kept`: what must live with it.  `ends`: counts
    how often plans of cuFFT that the graph uses may have ended."""

    def __init__(
        self,
        executable: GraphExec,
        outputs: Sequence[int],
        buffers: Sequence[Any],
        leaves: Sequence[int],
        weights: Sequence[Any],
        gradients: Sequence[Any],
        reads: Sequence[Any],
        kept: object,
        ends: Callable[[], int],
    ) -> None:
        self._executable, self._outputs, self._buffers = executable, outputs, [*buffers]
        self._leaves, self._weights, self._gradients = leaves, weights, gradients
        self._reads, self._kept, self._ends = reads, kept, ends
        self._lock: Any = None
        self._take: Callable[[], Stream] | None = None
        self._number = 0
        self._pass: weakref.ref[_Pass] | None = None
        self._given: list[Any] = []

    @property
    def pending(self) -> bool:
        """True while a replay may still be followed by its backward."""
        return self._pass is not None and self._pass() is not None

    def begin(self, leaves: Sequence[Any], lock: Any, take: Callable[[], Stream]) -> None:
        """Implements `ReplayedBackward.begin`."""
        self._given = [leaves[index] for index in self._leaves]
        self._lock, self._take = lock, take

    def attach(self, results: Sequence[Any]) -> list[Any]:
        """Returns the results of a replay as results of autograd."""
        self._number += 1
        made = _Pass(self._number, [tensor._version for tensor in self._reads], self._ends())
        self._pass = weakref.ref(made)
        found, targets = [*results], [*self._given, *self._weights]
        self._given = []
        attached = _Replayed.apply(self, made, [found[i] for i in self._outputs], *targets)
        for index, result in zip(self._outputs, attached, strict=True):
            found[index] = result
        return found

    def run(self, made: _Pass, gradients: Sequence[Any]) -> list[Any]:
        """Returns the gradients of the arguments and weights.  Raises RuntimeError, as torch does,
        if the memory of the call was used again, or a tensor that the backward needs was written;
        or if a plan that it needs has ended."""
        if made.number != self._number:
            raise RuntimeError(
                "a second backward of a replay whose memory a later call has used: its first "
                'backward gave that memory back; use gradients="eager" for such calls'
            )
        if any(t._version != v for t, v in zip(self._reads, made.versions, strict=True)):
            raise RuntimeError(
                "a tensor that the backward of a replay needs was modified in place after the "
                "call, an optimiser's step before the backward, say"
            )
        if self._ends() != made.ends:
            raise RuntimeError(
                "plans of cuFFT that the backward of a replay needs may have ended since the call: "
                "torch.backends.cuda.cufft_plan_cache was cleared, made smaller or filled; call "
                "the function again"
            )
        assert self._take is not None
        with self._lock, torch.no_grad():
            stream = self._take()
            torch._foreach_copy_(self._buffers, list(gradients))
            self._executable.launch(stream)
            self._pass = None
            found = [one for one in self._gradients if one is not None]
            copies = [*map(torch.empty_like, found)]
            if found:
                torch._foreach_copy_(copies, found)  # one launch, where clones take one each
            left = iter(copies)
            return [None if one is None else next(left) for one in self._gradients]


class _Replayed(torch.autograd.Function):  # type: ignore[misc]  # torch has no type for it
    @staticmethod
    def forward(
        ctx: Any, backward: Backward, made: _Pass, results: Sequence[Any], *targets: Any
    ) -> Any:
        ctx.replayed, ctx.made = backward, made
        return tuple(results)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, None, *ctx.replayed.run(ctx.made, gradients)


def detached(result: Any, attached: dict[int, tuple[Any, Any]]) -> Any:
    """Returns a result without the history of its gradients.  Adds each tensor that replaces
    another one to `attached`, by its `id`, with the other."""

    def plain(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.requires_grad):
            return value
        made = value.detach()
        attached[id(made)] = made, value
        return made

    return _tree_map(plain, result)


class Aliases(torch.overrides.TorchFunctionMode):  # type: ignore[misc]  # torch has no type for it
    """Lets torch's functions use other tensors over the same memory for the weights of a function.

    Autograd's node of a weight remembers the stream where it was made, and lives as long as a
    result that needs it.  The capture would find the node of an eager call on the caller's stream,
    which it must not wait for; eager calls would find that of the capture."""

    def __init__(self, weights: Sequence[Any]) -> None:
        super().__init__()
        self._aliases = {id(weight): (weight, _over_the_same(weight)) for weight in weights}

    def of(self, weight: Any) -> Any:
        """Returns the tensor that stands for a weight."""
        return self._aliases[id(weight)][1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.grad.__get__:  # an alias has none
            return func(*args)
        args, kwargs = _tree_map(self._replaced, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _replaced(self, value: Any) -> Any:
        weight, alias = self._aliases.get(id(value), (None, None))
        return value if weight is None else alias


def _overridden(values: Any) -> bool:
    """Answers `torch.overrides.has_torch_function` as without a mode of torch functions, so that
    torch's modules choose between their ways as always: a transformer's layer takes its fast path
    only without one."""
    none = torch._C._disabled_torch_function_impl
    kinds = {type(one) for one in values} - {torch.Tensor}
    return any(getattr(kind, "__torch_function__", none) is not none for kind in kinds)


def _over_the_same(weight: Any) -> Any:
    if isinstance(weight, torch.nn.Parameter):
        return torch.nn.Parameter(weight.detach())
    return weight.detach().requires_grad_()


class Differentiated:
    """Implements `Differentiable`.  `capture` captures into memory of its own: what the backward
    needs lies there from one launch to the next, and graphs of another pool would write it.
    `ends`: counts how often plans of cuFFT may have ended."""

    def __init__(
        self,
        capture: Callable[[Callable[[Stream], Any]], tuple[Graph, Any]],
        function: Callable[..., Any],
        state: Sequence[Any],
        ends: Callable[[], int],
    ) -> None:
        self.capture, self._function, self._state = capture, function, state
        self._ends = ends
        self._weights = [*{id(one): one for one in state if one.requires_grad}.values()]
        self._aliases = Aliases(self._weights)
        self._attached: dict[int, tuple[Any, Any]] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Implements `Differentiable.run`."""
        self._attached.clear()
        with (
            replaced_here(torch.overrides, "has_torch_function", _overridden),
            self._aliases,
            torch.enable_grad(),
        ):
            result = self._function(*args, **kwargs)
        return detached(result, self._attached)

    def backward(self, outputs: Sequence[Any], inputs: Sequence[Any], owner: object) -> Backward:
        """Implements `Differentiable.backward`."""
        attached, weights = self._attached, self._weights
        indices = [i for i, one in enumerate(outputs) if id(one) in attached]
        results = [attached[id(outputs[i])][1] for i in indices]
        leaves = [i for i, one in enumerate(inputs) if one.requires_grad]
        targets = [*[inputs[i] for i in leaves], *map(self._aliases.of, weights), *weights]
        buffers = [torch.zeros_like(one.detach()) for one in results]

        def work(stream: Stream) -> Any:
            return torch.autograd.grad(
                results, targets, buffers, retain_graph=True, allow_unused=True
            )

        graph, found = self.capture(work)
        count = len(leaves) + len(weights)
        gradients, themselves = [*found[:count]], found[count:]
        for index, gradient in enumerate(themselves, len(leaves)):
            if gradient is not None:  # of code that no mode of torch sees, and as a result
                if gradients[index] is not None:
                    raise NotGraphable("some of the code that uses a weight is hidden from torch")
                gradients[index] = gradient
        nodes = graph.nodes()
        words = words_of_nodes(nodes)
        ends = self._ends if transforms(nodes) else int
        reads = [one for one in self._state if points_at(words, memory_of(one))]
        kept = results, inputs, self._aliases, owner
        run = graph.instantiate()
        return Backward(run, indices, buffers, leaves, weights, gradients, reads, kept, ends)


def memory_of(tensor: torch.Tensor) -> MemoryRange:
    """Returns the whole memory that a tensor is a view of."""
    storage = tensor.untyped_storage()
    return MemoryRange(storage.data_ptr(), storage.nbytes())
