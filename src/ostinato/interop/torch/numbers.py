"""Operations that wait for the GPU, by operations of which only `.item()` waits.

A mask as an index waits for the number of its places, `torch.equal` for one truth value.  With that
number the rest needs no wait, so it can be captured (`waits.py`), and a number is compared on the
device (`reading/conditions.py`).  Each result is what the operation itself gives, bit for bit and
with its strides; where that is not known, the operation runs as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_aten = torch.ops.aten
_item = _aten._local_scalar_dense.default
_leaves: Any = torch.utils._pytree.tree_leaves
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
INDEXING = {
    _aten.index.Tensor,
    _aten._unsafe_index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}
"""Operations whose second argument is a list of indices."""
ERRORS = {_aten._linalg_check_errors.default}
REPEAT = _aten.repeat_interleave.Tensor


def key_of(device: torch.device) -> Any:
    """Returns the dispatch key of a device's kernels."""
    return torch._C._parse_dispatch_key(device.type.upper())


@functools.cache
def is_harmless(func: Any) -> bool:
    """True for an operation that cannot fail or run without end, whatever its tensors hold: one
    that reads no place or count from a tensor.  Those that are not known here are none, and so are
    all of other libraries, whatever their tags say.

    If it draws random numbers after another number than the chain's, they are drawn again: the
    generators are put back."""
    if func in _DRAWING:
        return True
    if func.namespace != "aten" or any(word in func.name() for word in _LOOPING):
        return False
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return func.is_view or torch.Tag.pointwise in func.tags or func.overloadpacket in _HARMLESS


_DRAWING = {
    *(_aten.normal_.default, _aten.uniform_.default, _aten.exponential_.default),
    *(_aten.bernoulli_.float, _aten.native_dropout.default),
    *(_aten.rand.default, _aten.randn.default, _aten.rand_like.default, _aten.randn_like.default),
}
_LOOPING = "_polynomial_", "zeta", "polygamma"
"""Words in the names of operations with a loop that is as long as a tensor says: a degree, or the
distance from a number below 0, which can be 1e15."""
_NAMES = """
mm addmm bmm baddbmm mv dot convolution
sum mean var var_mean linalg_vector_norm prod cumsum cumprod count_nonzero
_is_all_true _is_any_true any all max min amax amin aminmax argmax argmin
_softmax _log_softmax logsumexp native_layer_norm
empty empty_like new_empty empty_strided full full_like new_full fill_ eye arange linspace
zeros zeros_like new_zeros zero_ ones ones_like new_ones scalar_tensor clone copy_ _to_copy
_unsafe_view cat stack flip roll tril triu repeat
linalg_inv_ex linalg_cholesky_ex linalg_lu_factor_ex _linalg_solve_ex linalg_solve_triangular
"""
# What the last ones do with matrices that have no inverse, or are no numbers, their results say.
_HARMLESS = {getattr(_aten, name) for name in _NAMES.split()}


def _call(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


def places_of(func: Any, args: Any, kwargs: Any) -> int:
    """Returns the number of places of which the result of an operation has some; 0 if it may have
    others."""
    if func in (_aten.argmax.default, _aten.argmin.default):
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        return int(args[0].numel() if axis is None or not args[0].dim() else args[0].shape[axis])
    return int(args[0].shape[-1]) if func is _aten.multinomial.default else 0


def read_places(func: Any, args: Any) -> tuple[Any, int]:
    """Returns the tensor from which an operation reads places, and does nothing else that may fail,
    with the number of places that it has there; None and 0 for other operations."""
    if func is _aten.gather.default and args[0].dim():
        return args[2], int(args[0].shape[args[1]])
    return None, 0


def by_numbers(
    func: Any,
    args: Any,
    kwargs: Any,
    device: torch.device,
    run: Callable[[], Any],
    within: Callable[..., Any] = _call,
) -> Callable[[], Any] | None:
    """Returns a function that does what an operation that waits does, by operations of which only
    `.item()` waits; None if there is none.

    `device`: where the tensors must be.  `run`: runs the operation itself, if it is about to raise
    an error.  `within`: calls an operation that reads places from a tensor, of which all lie within
    the tensors that it reads and writes, also after another number than the chain's."""
    tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(t.device.type != device.type or t.layout is not torch.strided for t in tensors):
        return None
    if func is _aten.equal.default and _differ_in_content_alone(*args):
        return lambda: _item(_aten.all(_aten.eq(*args)))
    if func in ERRORS:
        return lambda: run() if _item(_aten.any(args[0])) else None
    if func is REPEAT and args[0].numel():
        return lambda: run() if _any_below_0(args[0]) else _repeated(args[0])
    if not _aten.nonzero_static.default.has_kernel_for_dispatch_key(key_of(device)):
        return None
    if func is _aten.nonzero.default and args[0].dim():
        return lambda: _nonzero(args[0], within)
    if func is _aten.masked_select.default and args[0].shape == args[1].shape != ():
        indices = [args[1]]
        if _are_places_and_masks(args[0], indices):
            return lambda: within(_aten.index.Tensor, args[0], [*_places(indices, within)])
    if func in INDEXING and _are_places_and_masks(args[0], args[1]):
        # Places of the caller's may lie anywhere.
        plain = all(index is None or index.dtype is torch.bool for index in args[1])
        call = within if plain else _call
        return lambda: call(func, args[0], [*_places(args[1], within)], *args[2:], **kwargs)
    if func is _aten.bincount.default and _can_count(args, kwargs):
        return lambda: run() if _any_below_0(args[0]) else _counted(within, *args, **kwargs)
    # The CPU sorts only if that is asked for.
    sorts = device.type == "cuda" or len(args) < 2 or args[1]
    if func is _aten._unique2.default and sorts and _are_integers(args[0]):
        return functools.partial(_unique, within, *args, **kwargs)
    return None


def _differ_in_content_alone(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    # Two views of one memory may be equal by that alone, also with NaN in them.
    apart = one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    return bool(alike and apart and one.numel())


def _any_below_0(tensor: torch.Tensor) -> bool:
    return bool(_item(_aten.any(_aten.lt(tensor, 0))))


def _repeated(counts: torch.Tensor) -> torch.Tensor:
    """Does as `repeat_interleave` of numbers that are not below 0."""
    return REPEAT(counts, output_size=_item(_aten.sum(counts)))


def _nonzero(tensor: torch.Tensor, within: Callable[..., Any] = _call) -> torch.Tensor:
    """Does as `nonzero`, whose result lies in memory column by column."""
    count = _item(_aten.count_nonzero(tensor))
    # Places that are too many are left out, and -1 stands for those that are too few.
    places = within(_aten.nonzero_static.default, tensor, size=count)
    if places.stride() != (1, count):
        places = _aten.t(_aten.clone(_aten.t(places), memory_format=torch.contiguous_format))
    return places


def _are_places_and_masks(tensor: torch.Tensor, indices: Sequence[Any]) -> bool:
    """True if all indices are places, or masks that have the tensor's shape there."""
    axis = 0
    for index in indices:
        if index is not None and index.dtype is torch.bool:
            if not index.dim() or index.shape != tensor.shape[axis : axis + index.dim()]:
                return False
            axis += index.dim()
        elif index is None or index.dtype in (torch.int64, torch.int32):
            axis += 1
        else:
            return False
    return True


def _places(indices: Sequence[Any], within: Callable[..., Any] = _call) -> Iterator[Any]:
    """Yields indices with the places in masks instead of these, as torch itself does."""
    for index in indices:
        if index is not None and index.dtype is torch.bool:
            yield from _aten.unbind(_nonzero(index, within), 1)
        else:
            yield index


def _can_count(args: Any, kwargs: Any) -> bool:
    """True if `bincount` only counts: the sum of weights has no fixed order."""
    plain = len(args) < 2 or args[1] is None
    plain = plain and kwargs.get("weights") is None
    return bool(plain and args[0].dim() == 1 and _are_integers(args[0]))


def _are_integers(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _INTEGERS and tensor.numel() > 0


def _counted(
    within: Callable[..., Any], places: torch.Tensor, weights: None = None, minlength: int = 0
) -> torch.Tensor:
    """Does as `bincount` of numbers that are not below 0."""
    places = _aten._to_copy(places, dtype=torch.int64)
    count = _item(_aten.clamp_min(_aten.add(_aten.max(places), 1), minlength))
    found = _aten.new_zeros(places, [count])
    places = _aten.clamp(places, 0, count - 1)  # they lie there, but after another number
    return within(_aten.scatter_add.default, found, 0, places, _aten.ones_like(places))


def _unique(
    within: Callable[..., Any],
    tensor: torch.Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Does as `unique` of integers, which is sorted on a GPU in any case."""
    flat = _aten.reshape(tensor, [-1])
    values, order = within(_aten.sort.default, flat)
    first = _aten.ones_like(flat, dtype=torch.bool)
    _aten.copy_(_aten.slice(first, 0, 1), _aten.ne(values[1:], values[:-1]))
    (places,) = _places([first], within)
    inverse, counts = (_aten.new_empty(tensor, [0], dtype=torch.int64) for _ in range(2))
    if return_inverse:
        names = _aten.sub(_aten.cumsum(first, 0), 1)
        inverse = within(_aten.scatter.src, _aten.empty_like(names), 0, order, names)
        inverse = _aten.reshape(inverse, tensor.shape)
    if return_counts:
        ends = _aten.cat([places[1:], _aten.new_full(places, [1], flat.numel())])
        counts = _aten.sub(ends, places)
    return within(_aten.index.Tensor, values, [places]), inverse, counts
