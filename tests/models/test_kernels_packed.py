"""The compiled kernels: every tensor type, on every instruction set of this processor, against NumPy
over the dequantised weights."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

from ostinato.driver.host_kernel import HostKernel
from ostinato.errors import InputError, SettingsError
from ostinato.models import kernels_packed
from ostinato.models.dequantise import BLOCK_TYPES, SUPPORTED_TYPES, dequantise_rows
from ostinato.models.kernels_host import HOST_KERNELS
from ostinato.models.packed import PackedMatrix, PackedPart
from ostinato.models.plan import rope_table
from ostinato.models.program import ACTIVE, FROM_STATE, SAMPLE
from tests.models.test_kernels_host import NAN, config_of, live_rows, random

pytestmark = pytest.mark.skipif(
    not kernels_packed.compiled(), reason="the extension was not built here"
)
INSTRUCTIONS = kernels_packed._extension.INSTRUCTIONS if kernels_packed.compiled() else ()

# Where a block has its float16 numbers.
HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def blocks(kind: str, rows: int, columns: int, seed: int = 0, scale: float = 0.01) -> np.ndarray:
    """Random bytes with sane scales: every code occurs."""
    rng, block = np.random.default_rng(seed), BLOCK_TYPES[kind]
    if kind == "F32":
        return random((rows, columns), seed).view(np.uint8)
    if kind == "F16":
        return random((rows, columns), seed).astype(np.float16).view(np.uint8)
    if kind == "BF16":
        halves = (random((rows, columns), seed).view(np.uint32) >> 16).astype(np.uint16)
        return halves.view(np.uint8)
    found = rng.integers(0, 256, (rows, columns // block.values, block.size), np.uint8)
    for at in HALVES[kind]:
        values = (rng.standard_normal(found.shape[:2]) * scale).astype(np.float16)
        found[..., at : at + 2] = values[..., None].view(np.uint8)
    return found.reshape(rows, -1)


def values_of(kind: str, packed: np.ndarray, columns: int) -> np.ndarray:
    out = np.empty((len(packed), columns), np.float32)
    dequantise_rows(kind, np.ascontiguousarray(packed), out)
    return out


def run(kernels: dict[str, HostKernel], name: str, **arguments: Any) -> None:
    """Calls a kernel as the driver does: flat views, read-only where the signature says so."""
    kernel = kernels[name]
    values = []
    for parameter in kernel.signature.parameters:
        value = arguments.pop(parameter.name)
        if parameter.pointer:
            value = value.reshape(-1).view(parameter.dtype)
            if not any(p.name == parameter.name and p.writable for p in kernel.pointers):
                value = value.view()
                value.setflags(write=False)
        values.append(value)
    assert not arguments, f"{name} takes no {sorted(arguments)}"
    kernel.function(None, *values)


def close(found: np.ndarray, wanted: np.ndarray, relative: float = 1e-5) -> None:
    """As the issue words it: relative to the largest value."""
    assert np.abs(found - wanted).max() <= relative * np.abs(wanted).max()


def residual(
    kernels: dict[str, HostKernel], weight: np.ndarray, source: np.ndarray, hidden: int
) -> np.ndarray:
    """source @ weight.T by way of a kernel that adds it to zeros."""
    count, width = source.shape
    x = np.zeros((count, hidden), np.float32)
    live = live_rows(*((0, i, 0, ACTIVE) for i in range(count)))
    run(
        kernels, "down_residual", live=live, inner=source, weight=weight, x=x,
        workspace=np.full((count, hidden), NAN), row_count=count, hidden=hidden, width=width,
    )  # fmt: skip
    return x


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_values_are_those_of_the_dequantiser_bit_by_bit(kind: str, instructions: str) -> None:
    """Through the embedding, which is a row's values and nothing else."""
    kernels = kernels_packed.kernels_of(1, instructions)
    columns = 512 if BLOCK_TYPES[kind].values > 1 else 77
    packed = blocks(kind, 9, columns, 3)
    table = PackedMatrix(columns, (PackedPart(kind, 9),)).pack([packed])
    x, live = np.full((9, columns), NAN), np.zeros((9, 4), np.int32)
    run(
        kernels, "embed", rows=live_rows(*((i, 0, 0, ACTIVE) for i in range(9))),
        state=np.zeros((1, 4), np.int32), live=live, table=table, x=x, row_count=9, hidden=columns,
        vocabulary=9, slots=1, context=1,
    )  # fmt: skip
    np.testing.assert_array_equal(x, values_of(kind, packed, columns))


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
@pytest.mark.parametrize("seed", range(3))
def test_products(kind: str, instructions: str, seed: int) -> None:
    """Random sizes; the same bits for any number of threads, and for each row alone."""
    rng, unit = np.random.default_rng(seed), BLOCK_TYPES[kind].values
    rows, count = int(rng.integers(1, 90)), int(rng.integers(2, 80))
    columns = int(rng.integers(1, 5)) * unit if unit > 1 else int(rng.integers(1, 300))
    packed = blocks(kind, rows, columns, seed)
    weight = PackedMatrix(columns, (PackedPart(kind, rows),)).pack([packed])
    source = random((count, columns), seed + 1)
    kernels = kernels_packed.kernels_of(1, instructions)
    found = residual(kernels, weight, source, rows)
    wanted = source.astype(np.float64) @ values_of(kind, packed, columns).T.astype(np.float64)
    close(found, wanted, 3e-6)
    for threads in (2, 5):
        more = kernels_packed.kernels_of(threads, instructions)
        np.testing.assert_array_equal(residual(more, weight, source, rows), found)
    for index in range(count):
        one = residual(kernels, weight, source[index : index + 1], rows)
        np.testing.assert_array_equal(one[0], found[index])


def test_instruction_sets_with_fused_operations_agree_bit_by_bit() -> None:
    fused = [name for name in INSTRUCTIONS if name != "plain"]
    for kind in SUPPORTED_TYPES:
        packed = blocks(kind, 33, 512, 1)
        weight = PackedMatrix(512, (PackedPart(kind, 33),)).pack([packed])
        source = random((7, 512), 5)
        results = [
            residual(kernels_packed.kernels_of(1, name), weight, source, 33) for name in fused
        ]
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])
