"""Joins against database engines on the same data: equal as multisets of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from ostinato.relational import Joiner
from tests.relational.tables import (
    BORDERS,
    FAR_BORDERS,
    Columns,
    Shape,
    check,
    expected,
    in_order,
    pairs,
    shapes,
)

ONE_JOINER = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # for all examples


def numbered(table: Columns) -> dict[str, Any]:
    rows = np.arange(len(next(iter(table.values()))))
    return {**table, "row": rows}


def by_duckdb(left: Columns, right: Columns) -> np.ndarray:
    duckdb = pytest.importorskip("duckdb")
    arrow = pytest.importorskip("pyarrow")
    same = " and ".join(f"l.{name} = r.{name}" for name in left)
    base = duckdb.connect(":default:")  # one for all examples
    base.register("l", arrow.table(numbered(left)))
    base.register("r", arrow.table(numbered(right)))
    query = f"select l.row as a, r.row as b from l join r on {same}"
    found = base.execute(query).fetchnumpy()
    return in_order(found["a"], found["b"])


def by_polars(left: Columns, right: Columns) -> np.ndarray:
    polars = pytest.importorskip("polars")
    one, other = (polars.DataFrame(numbered(table)) for table in (left, right))
    found = one.join(other, on=list(left), how="inner", suffix="_right")
    return in_order(found["row"].to_numpy(), found["row_right"].to_numpy())


PEERS = {"DuckDB": by_duckdb, "Polars": by_polars}


def agree(joiner: Joiner, shape: Shape, peer: str) -> None:
    left, right = shape.tables()
    wanted = PEERS[peer](left, right)
    np.testing.assert_array_equal(expected(left, right), wanted)  # the other tests stand on it
    index = joiner.build_index(right, list(left))
    for side in (right, index):
        result = joiner.join(left, side, on=list(left))
        np.testing.assert_array_equal(pairs(result), wanted)


@pytest.mark.parametrize("peer", PEERS)
@settings(max_examples=settings().max_examples // 4, suppress_health_check=ONE_JOINER)
@given(shape=shapes())
def test_random_tables(joiner: Joiner, peer: str, shape: Shape) -> None:
    agree(joiner, shape, peer)


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
@settings(max_examples=600, suppress_health_check=ONE_JOINER)
@given(shape=shapes(largest=1500, most_columns=5))
def test_thousands_of_random_tables(joiner: Joiner, peer: str, shape: Shape) -> None:
    agree(joiner, shape, peer)


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize(
    ("left", "right"),
    [(one, other) for one in BORDERS for other in (*BORDERS, *FAR_BORDERS)]
    + [(one, other) for one in FAR_BORDERS for other in (*BORDERS, one)],
)
def test_class_borders(joiner: Joiner, peer: str, left: int, right: int) -> None:
    shape = Shape(left, right, (np.int64, np.uint32), 30_000, 1.0, left + right, True)
    agree(joiner, shape, peer)


@pytest.mark.gpu
@pytest.mark.slow
@settings(max_examples=settings().max_examples // 2, suppress_health_check=ONE_JOINER)
@given(shape=shapes(largest=20_000, most_columns=5))
def test_the_device_agrees_with_the_host(
    cuda_joiner: Joiner, host_joiner: Joiner, shape: Shape
) -> None:
    """For machines with a GPU and no database engine."""
    left, right = shape.tables()
    if len(expected(left, right)) > 10**7:
        return
    result = check(cuda_joiner, left, right)
    np.testing.assert_array_equal(pairs(result), pairs(host_joiner.join(left, right, list(left))))
