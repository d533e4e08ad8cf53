"""Operations of torch that wait, run by operations of which only `.item()` waits: each result is
that of the operation, with its strides and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from ostinato.interop.torch.numbers import by_numbers  # needs torch

_aten = torch.ops.aten
_leaves: Any = torch.utils._pytree.tree_leaves


def _works(draw: Any, where: str) -> Iterator[tuple[Any, ...]]:
    """Yields operations with arguments."""

    def number(most: int) -> int:
        return int(torch.randint(0, most, (), generator=draw))

    shape = [1 + number(4) for _ in range(1 + number(3))]
    x = torch.randn(shape, generator=draw).to(where)
    mask = x > (-9.0, 0.0, 0.5, 9.0)[number(4)]
    kind = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)[number(5)]
    whole = torch.randint(0, 2 + number(7), shape, generator=draw).to(where, kind)
    found = mask.sum().item()
    yield _aten.equal.default, x, x.clone()
    yield _aten.equal.default, x, x.round()
    yield _aten.nonzero.default, x.round()
    yield _aten.nonzero.default, mask.mT if x.dim() > 1 else mask
    yield _aten.masked_select.default, x, mask
    yield _aten.index.Tensor, x, [mask]
    yield _aten.index.Tensor, torch.randn(3, *shape, 2).to(where), [None, mask]
    yield _aten.index_put.default, x, [mask], torch.randn(found, generator=draw).to(where)
    yield _aten.index_put.default, x, [mask], torch.tensor(2.0, device=where), True
    yield _aten._unique2.default, whole, True, bool(number(2)), bool(number(2))
    yield _aten._unique2.default, whole.mT if x.dim() > 1 else whole - 1
    if x.dim() == 1:
        yield _aten.repeat_interleave.Tensor, whole.long()
        yield _aten.repeat_interleave.Tensor, whole.long() - 1
        yield _aten.bincount.default, whole
        yield _aten.bincount.default, whole.long() - 1, None, 7
    info = torch.zeros(3, dtype=torch.int32, device=where)
    yield _aten._linalg_check_errors.default, info, "linalg.inv", False
    yield _aten._linalg_check_errors.default, info + 2, "linalg.inv", False


@pytest.mark.parametrize("seed", range(40))
def test_results_and_errors_are_those_of_the_operation(seed: int, where: str) -> None:
    draw = torch.Generator().manual_seed(seed)
    for func, *args in _works(draw, where):
        kwargs: dict[str, Any] = {}
        if func is _aten._linalg_check_errors.default:
            kwargs["is_matrix"] = args.pop()

        def run(func: Any = func, args: Any = args, kwargs: Any = kwargs) -> Any:
            return func(*args, **kwargs)

        parts = by_numbers(func, args, kwargs, torch.device(where), run)
        assert parts is not None, func
        outcomes = []
        for way in (run, parts):
            try:
                outcomes.append(way())
            except RuntimeError as error:
                outcomes.append(str(error))
        for wanted, found in zip(*map(_leaves, outcomes), strict=True):
            if not isinstance(wanted, torch.Tensor):
                assert found == wanted, func
                continue
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), func
            assert torch.equal(found, wanted), func
            assert wanted.numel() < 2 or found.stride() == wanted.stride(), func


def test_what_may_have_another_result_runs_as_it_is(where: str) -> None:
    x = torch.tensor([1.0, float("nan")], device=where)
    mask, places = x > 0, torch.tensor([0, 1], device=where)
    for func, *args in (
        (_aten.equal.default, x, x),  # equal as one memory, in spite of the NaN
        (_aten.equal.default, x, x.double()),
        (_aten.index.Tensor, x, [mask[:1]]),  # an error
        (_aten.index.Tensor, x, [mask.to(torch.uint8)]),  # torch warns of it
        (_aten.bincount.default, places, x),  # sums in no fixed order
    ):
        assert by_numbers(func, args, {}, torch.device(where), list) is None, func


@pytest.mark.parametrize("kind", ["by element", "a view"])
def test_operations_of_other_libraries_run_after_the_right_number_alone(
    kind: str, make_chained: Any, where: str
) -> None:
    """torch's tag and schema do not tell that it reads places from a tensor, or sends messages."""
    name = f"ostinato_{kind.replace(' ', '_')}"
    schema = "(Tensor x) -> Tensor" if kind == "by element" else "(Tensor(a) x) -> Tensor(a)"
    tags = (torch.Tag.pointwise,) if kind == "by element" else ()
    fails = torch.ops.aten.bincount.default

    with torch.library._scoped_library(name, "DEF") as library:
        library.define(f"looked_up{schema}", tags=tags)

        def looked_up(x: Any) -> Any:
            fails(x.long())  # raises an error for numbers below 0
            return x if kind == "a view" else x + 1

        library.impl("looked_up", looked_up, "CompositeExplicitAutograd")
        operation = getattr(torch.ops, name).looked_up

        def f(x: Any) -> Any:
            y = x * 2
            return operation(y) * 2 if (y >= 0).all() else y

        with torch.no_grad():
            step = make_chained(f)
            for scale in [1] * 10 + [-1] * 3 + [1] * 3:
                x = torch.ones(3, device=where) * scale
                assert torch.equal(step(x), f(x))
            assert step.statistics().replays > 2, step.explain()


@pytest.mark.parametrize("name", ["special_zeta", "polygamma", "special_hermite_polynomial_h"])
def test_operations_whose_time_depends_on_values_may_not_run_after_another_number(
    name: str,
) -> None:
    from ostinato.interop.torch.numbers import is_harmless

    operations = getattr(_aten, name)
    assert not any(is_harmless(getattr(operations, each)) for each in operations.overloads())
