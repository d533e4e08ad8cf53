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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from ostinato import Graph, GraphExec, MemoryRange, Stream
from ostinato.interop.reading.library import NotGraphable
from ostinato.interop.reading.slots import points_at, words_of_nodes

_tree_map: Any = torch.utils._pytree.tree_map


class _Pass:
    """One replay, until its backward has run."""

    def __init__(self, number: int, versions: list[int]) -> None:
        self.number, self.versions = number, versions


class Backward:
    """The backward of a captured call.

    `outputs`: indices of the results that have gradients, whose gradients are written into
    `buffers`.  `leaves`: indices of the arguments that get gradients, before the `weights`, which
    get them too.  `gradients`: theirs after a launch, None for those without.  `reads`: the weights
    and other tensors whose memory the graph reads.  `kept`: what must live with it."""

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
    ) -> None:
        self._executable, self._outputs, self._buffers = executable, outputs, [*buffers]
        self._leaves, self._weights, self._gradients = leaves, weights, gradients
        self._reads, self._kept = reads, kept
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
        made = _Pass(self._number, [tensor._version for tensor in self._reads])
        self._pass = weakref.ref(made)
        found, targets = [*results], [*self._given, *self._weights]
        self._given = []
        attached = _Replayed.apply(self, made, [found[i] for i in self._outputs], *targets)
        for index, result in zip(self._outputs, attached, strict=True):
            found[index] = result
        return found

    def run(self, made: _Pass, gradients: Sequence[Any]) -> list[Any]:
        """Returns the gradients of the arguments and weights.  Raises RuntimeError, as torch does,
        if the memory of the call was used again, or a tensor that the backward needs was
        written."""
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
        assert self._take is not None
        with self._lock, torch.no_grad():
            stream = self._take()
            torch._foreach_copy_(self._buffers, list(gradients))
            self._executable.launch(stream)
            self._pass = None
            return [None if one is None else one.clone() for one in self._gradients]


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


@contextmanager
def aliased(module: torch.nn.Module | None) -> Iterator[dict[int, Any]]:
    """Replaces the weights of a module by other tensors over the same memory, which yields by the
    `id` of the weight.  Autograd's node of a weight would remember the stream of the capture, and
    eager steps would find it there."""
    aliases: dict[int, Any] = {}
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for each in () if module is None else module.modules():
        for name, weight in each._parameters.items():
            if weight is not None and weight.requires_grad:
                if id(weight) not in aliases:
                    aliases[id(weight)] = torch.nn.Parameter(weight.detach())
                replaced.append((each._parameters, name, weight))
    for held, name, weight in replaced:
        held[name] = aliases[id(weight)]
    try:
        yield aliases
    finally:
        for held, name, weight in replaced:
            held[name] = weight


Capturer: TypeAlias = Callable[[Callable[[Stream], Any]], tuple[Graph, Any]]


class Differentiated:
    """Implements `Differentiable`.  `capture` captures into memory of its own: what the backward
    needs lies there from one launch to the next, and graphs of another pool would write it."""

    def __init__(self, capture: Capturer, function: Callable[..., Any]) -> None:
        self.capture, self._function = capture, function
        self._aliases: dict[int, Any] = {}
        self._attached: dict[int, tuple[Any, Any]] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Implements `Differentiable.run`."""
        self._attached.clear()
        module = getattr(self._function, "module", None)
        with aliased(module) as self._aliases, torch.enable_grad():
            return detached(self._function(*args, **kwargs), self._attached)

    def backward(
        self, outputs: Sequence[Any], inputs: Sequence[Any], state: Sequence[Any], owner: object
    ) -> Backward:
        """Implements `Differentiable.backward`."""
        attached, aliases = self._attached, self._aliases
        indices = [i for i, one in enumerate(outputs) if id(one) in attached]
        results = [attached[id(outputs[i])][1] for i in indices]
        leaves = [i for i, one in enumerate(inputs) if one.requires_grad]
        weights = [*{id(one): one for one in state if one.requires_grad}.values()]
        others = [aliases.get(id(weight)) for weight in weights]
        targets = [inputs[i] for i in leaves] + weights + [t for t in others if t is not None]
        buffers = [torch.zeros_like(one.detach()) for one in results]

        def work(stream: Stream) -> Any:
            return torch.autograd.grad(
                results, targets, buffers, retain_graph=True, allow_unused=True
            )

        graph, found = self.capture(work)
        count = len(leaves) + len(weights)
        gradients, by_alias = [*found[:count]], iter(found[count:])
        for index, alias in enumerate(others, len(leaves)):
            other = None if alias is None else next(by_alias)
            if gradients[index] is not None and other is not None:
                raise NotGraphable("a weight of the module is used outside of the module too")
            gradients[index] = other if gradients[index] is None else gradients[index]
        words = words_of_nodes(graph.nodes())
        reads = [one for one in state if points_at(words, memory_of(one))]
        kept = results, inputs, aliases, owner
        run = graph.instantiate()
        return Backward(run, indices, buffers, leaves, weights, gradients, reads, kept)


def memory_of(tensor: torch.Tensor) -> MemoryRange:
    """Returns the whole memory that a tensor is a view of."""
    storage = tensor.untyped_storage()
    return MemoryRange(storage.data_ptr(), storage.nbytes())
