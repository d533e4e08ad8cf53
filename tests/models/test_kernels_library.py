"""The launches of a step whose products a library computes, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from benchmarks.kernels.checks import config_of, from_bf16, to_bf16
from ostinato.device import Device
from ostinato.errors import UnsupportedModelError
from ostinato.models.cuda import library as kl
from ostinato.models.cuda import lowering as kc
from ostinato.models.cuda.products import PIECE_ROWS
from ostinato.models.cuda.shapes import default_tuning, has_warpgroups
from ostinato.models.program import (
    ACTIVE,
    SAMPLED_ROWS,
    BufferArgument,
    decode_program,
    loop_call,
)
from tests.emulator.emulator import Emulator
from tests.models.machines import OnDevice, on_kernels
from tests.models.test_kernels_cuda import SHAPES, SMALL

ATTENTIONS = ("piece_attention", "warpgroup_attention")
PIECES_OF_STEPS = {*kc.PIECE_SIGNATURES, "piece_attention"}


def lowered(
    config: Any,
    rows: int,
    *,
    sampled: bool = True,
    loop: bool = False,
    multiprocessors: int = 132,
    warpgroups: bool = False,
) -> Any:
    program = decode_program(config, sampled=sampled, last_row=rows > SAMPLED_ROWS)
    if loop:
        program = (*program, loop_call())
    return kl.lower_with_library(
        program,
        config,
        rows=rows,
        tuning=default_tuning(config, rows=rows, context=512, most=PIECE_ROWS),
        single=default_tuning(config, rows=1, context=512),
        multiprocessors=multiprocessors,
        warpgroups=warpgroups,
    )


@pytest.mark.parametrize("rows", [16, 512])
def test_nothing_starts_early_beside_the_librarys_kernels(rows: int) -> None:
    step = lowered(SMALL, rows)
    assert not step[0].config.programmatic, "a step waits for what was before it"
    for before, one in pairwise(step):
        if isinstance(one, kl.ProductCall):
            continue
        assert one.config.programmatic == isinstance(before, kc.CudaLaunch)


def test_what_a_layer_becomes() -> None:
    step = lowered(replace(SMALL, layers=1), 128)
    names = [one.name if isinstance(one, kl.ProductCall) else one.kernel for one in step]
    assert names == [
        "embed",
        *("norm_rows", "qkv_product", "norm_rope", "piece_attention", "output_product"),
        *("norm_rows", "gate_up_product", "silu_rows", "down_product"),
        *("head", "sample"),
    ]
    batch = [getattr(one, "kernel", "") for one in lowered(replace(SMALL, layers=1), 64)]
    assert batch[4:6] == ["attention", ""]
    assert batch[-3:] == ["norm_rows", "rounded_head", "sample"]
    products = {one.name: one.product for one in step if isinstance(one, kl.ProductCall)}
    assert [p.rows for p in products.values()] == [128] * 4
    assert [name for name, p in products.items() if p.accumulate] == [
        *("output_product", "down_product"),
    ]
    # The end of the step computes only the last row, with the kernels of a step of one row.
    single = kc.lower(decode_program(SMALL), SMALL, rows=1, context=512)
    for one, alone in zip(step[-2:], single[-2:], strict=True):
        assert (one.kernel, one.options, one.config.grid) == (
            *(alone.kernel, alone.options, alone.config.grid),
        )
        given = dict(one.arguments)
        assert given["row_count"] == 1
        assert given["live"] == BufferArgument("live", last=True)


def test_steps_of_all_sizes_share_the_kernels_between_products() -> None:
    found = {
        (one.kernel, one.options)
        for rows in (16, 64, 512)
        for one in lowered(SMALL, rows)
        if isinstance(one, kc.CudaLaunch) and one.kernel in PIECES_OF_STEPS
    }
    assert {kernel for kernel, _ in found} == PIECES_OF_STEPS
    assert len(found) == len(PIECES_OF_STEPS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [16, 128, 512])
def test_every_value_has_a_thread(shape: str, rows: int) -> None:
    config = SHAPES[shape]
    for one in lowered(config, rows):
        if isinstance(one, kc.CudaLaunch) and one.kernel in PIECES_OF_STEPS:
            if one.kernel == "norm_rows":
                assert one.config.grid == (rows, 1, 1)
                continue
            if one.kernel == "piece_attention":
                macros = dict(one.options.defines)
                grid, each = one.config.grid, int(macros["PIECE_ROWS"])
                assert 0 <= grid[1] * each - rows < each
                assert grid[0] * int(macros["PIECE_QUERIES"]) == config.heads
                warps = each * int(macros["PIECE_QUERIES"]) // (16 * int(macros["PIECE_TILES"]))
                assert one.config.block[0] == 32 * warps
                continue
            threads = one.config.grid[0] * one.config.block[0]
            assert one.config.grid[1] == rows
            assert 0 <= threads - config.inner // 8 < one.config.block[0]


PIECES = [  # heads, KV heads, head size, rows, padding, first position; and a window
    (4, 1, 64, 128, 37, 70),
    (3, 1, 128, 128, 0, 0),
    (4, 2, 80, 100, 9, 3),  # as many rows as a plan happens to have
    (2, 2, 24, 128, 127, 131),
    (10, 2, 32, 128, 64, 64),
    (4, 1, 64, 128, 37, 70, 50),
    (3, 1, 128, 128, 0, 0, 33),
    (2, 2, 24, 128, 3, 260, 64),
    (2, 1, 80, 100, 9, 150, 1),
    (4, 1, 32, 128, 0, 130, 1000),
]


OF_WARPGROUPS = [
    (4, 1, 64, 128, 37, 70),
    (3, 1, 128, 128, 0, 0),
    (4, 2, 128, 100, 9, 3),
    (2, 2, 64, 200, 127, 131),
    (14, 2, 64, 150, 30, 300),
    (4, 1, 64, 128, 37, 70, 50),
    (3, 1, 128, 128, 0, 0, 33),
    (2, 1, 128, 100, 9, 150, 1),
    (8, 1, 64, 128, 0, 130, 1000),
]


@on_kernels("piece", PIECES)
@pytest.mark.parametrize("multiprocessors", [1, 132], ids="of {}".format)
def test_attention_of_a_piece_is_right(
    kernels: Any, piece: tuple[int, ...], multiprocessors: int
) -> None:
    check_attention(kernels, *piece, multiprocessors=multiprocessors)


@on_kernels("piece", OF_WARPGROUPS)
@pytest.mark.parametrize(
    "multiprocessors", [1, pytest.param(3, marks=pytest.mark.slow), 132], ids="of {}".format
)
def test_attention_of_a_piece_by_warpgroups_is_right(
    kernels: Any, piece: tuple[int, ...], multiprocessors: int
) -> None:
    """Few multiprocessors: a block has several items, and tiles that it copies ahead."""
    require_warpgroups(kernels)
    check_attention(kernels, *piece, multiprocessors=multiprocessors, warpgroups=True)


@pytest.mark.parametrize(
    ("steep", "level"), [(-3, 0), (1, 0), (3, 0), (7, 0), (50, 0), (0, -300), (3, -300), (-7, 300)]
)
@pytest.mark.parametrize("how", [(1, False), (132, False), (1, True)], ids=str)
def test_sums_of_a_piece_are_rescaled_where_scores_rise(
    emulator: Emulator, steep: float, level: float, how: tuple[int, bool]
) -> None:
    """A little, so that a row's base stays behind its largest score, and by more than it may; and
    where all scores are far below or above 0."""
    piece, (multiprocessors, warpgroups) = (3, 1, 64, 100, 5, 230), how
    given = {"multiprocessors": multiprocessors, "warpgroups": warpgroups}
    check_attention(emulator, *piece, **given, steep=steep, level=level)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "piece",
    [
        (32, 8, 64, 512, 0, 1536),
        (32, 8, 64, 1024, 7, 1500),
        (32, 8, 128, 256, 100, 300),
        (32, 8, 128, 512, 0, 1500, 1024),
    ],
    ids=str,
)
@pytest.mark.parametrize("warpgroups", [False, True])
def test_attention_of_a_large_piece_is_right(
    cuda_device: Device, piece: tuple[int, ...], warpgroups: bool
) -> None:
    if warpgroups:
        require_warpgroups(OnDevice(cuda_device))
    check_attention(OnDevice(cuda_device), *piece, warpgroups=warpgroups)


@on_kernels("head_size", [64, 128])
def test_a_rows_bits_do_not_depend_on_its_piece(kernels: Any, head_size: int) -> None:
    require_warpgroups(kernels)
    config, begin, rows = config_of(4, 2, head_size, inner=88, vocabulary=67, layers=1), 70, 330
    rng = np.random.default_rng(head_size)
    live = np.zeros((rows, 4), np.int32)
    live[:, 1], live[:, 3] = begin + np.arange(rows), ACTIVE
    q = rng.standard_normal((rows, 4, head_size)).astype(np.float32)
    cache = to_bf16(rng.standard_normal((2, 1, 2, begin + rows, head_size)).astype(np.float32))

    def in_pieces(size: int, multiprocessors: int) -> np.ndarray:
        pieces = [slice(at, at + size) for at in range(0, rows, size)]
        has = {"multiprocessors": multiprocessors, "warpgroups": True}
        return np.concatenate(
            [attend(kernels, config, live[p], q[p], cache, **has) for p in pieces]
        )

    whole = in_pieces(rows, 1)  # blocks of the most warpgroups; then of fewer
    for size, multiprocessors in ((110, 132), (165, 6), (165, 1)):
        assert (in_pieces(size, multiprocessors) == whole).all()


def require_warpgroups(machine: Any) -> None:
    if isinstance(machine, OnDevice):
        capability = machine.device.properties.compute_capability
        if not has_warpgroups(capability):
            pytest.skip(f"compute capability {capability} has no warpgroups")


def attend(
    machine: Any,
    config: Any,
    live: np.ndarray,
    q: np.ndarray,
    cache: np.ndarray,
    *,
    multiprocessors: int,
    warpgroups: bool,
) -> np.ndarray:
    """The attention of a step with these rows, as bfloat16."""
    rows, (sequences, _, context) = len(live), cache.shape[1:4]
    launch = next(
        one
        for one in lowered(config, rows, multiprocessors=multiprocessors, warpgroups=warpgroups)
        if isinstance(one, kc.CudaLaunch) and one.kernel in ATTENTIONS
    )
    tunings = [default_tuning(config, rows=n, context=512, most=PIECE_ROWS) for n in (rows, 1)]
    lowering = kl.LibraryLowering(config, rows, *tunings, {}, multiprocessors, warpgroups)
    device = {
        "live": machine.array(live),
        "q": machine.array(q),
        "cache": machine.array(cache),
        "workspace": machine.array(np.zeros(lowering.workspace_bytes // 4, np.float32)),
        "product_in": machine.array(np.full((rows, config.query_size), 0x7FFF, np.uint16)),
    }
    sizes = {"rows": rows, "sequences": sequences, "context": context}
    values = {
        name: device[value.name] if isinstance(value, BufferArgument) else sizes.get(value, value)
        for name, value in launch.arguments
    }
    machine.launch(launch, values)
    machine.synchronize()
    found: np.ndarray = machine.read(device["product_in"])
    return found


def check_attention(
    machine: Any,
    heads: int,
    kv_heads: int,
    head_size: int,
    rows: int,
    padding: int,
    begin: int,
    window: int = 0,
    *,
    multiprocessors: int = 132,
    warpgroups: bool = False,
    steep: float = 0.0,
    level: float = 0.0,
) -> None:
    """`multiprocessors`: that the launch is made for; few of them get blocks of more rows."""
    config = config_of(
        heads, kv_heads, head_size, inner=88, vocabulary=67, layers=1, windows=(window,)
    )
    rng = np.random.default_rng(rows + heads)
    sequences, sequence, end = 3, 1, begin + rows - padding
    context = end + 3
    live = np.zeros((rows, 4), np.int32)
    live[:padding] = (5, 1 << 30, 77, 0)  # padding, whatever it holds
    live[padding:, 1] = begin + np.arange(rows - padding)
    live[padding:, 2:] = sequence, ACTIVE
    q = rng.standard_normal((rows, heads, head_size)).astype(np.float32)
    cache = rng.standard_normal((2, sequences, kv_heads, context, head_size)).astype(np.float32)
    if steep or level:  # scores begin there, and rise by so many powers of two every 40 positions
        q[..., 0] = 8
        rise = level + steep * (np.arange(context) // 40)
        cache[0, ..., 0] += rise * np.log(2) / 8 * head_size**0.5
    q[:padding] = cache[..., end:, :] = np.nan
    cache = from_bf16(to_bf16(cache))
    given = {"multiprocessors": multiprocessors, "warpgroups": warpgroups}
    found = from_bf16(attend(machine, config, live, q, to_bf16(cache), **given)).reshape(q.shape)
    assert not found[:padding].any()
    for row in range(padding, rows):
        length = int(live[row, 1]) + 1
        seen = slice(max(0, length - window) if window else 0, length)
        for head in range(heads):
            keys, content = cache[:, sequence, head // (heads // kv_heads), seen].astype(np.float64)
            if len(content) == 1:
                assert (found[row, head] == content[0]).all(), "its share is 1, exactly"
            scores = keys @ q[row, head] * head_size**-0.5
            shares = np.exp(scores - scores.max())
            wanted = shares @ content / shares.sum()
            error = np.linalg.norm(found[row, head] - wanted) / np.linalg.norm(wanted)
            assert error < 1.5e-2, f"row {row}, head {head}: {error:.1e}"


@pytest.mark.parametrize("rows", [512, 1500, 2048])
def test_buffers_hold_what_each_product_reads_and_writes(rows: int) -> None:
    for config in (*SHAPES.values(), SMALL):
        made = kc.rounded_buffers(config, rows) | kl.library_buffers(config, rows, 1 << 20)
        for one in lowered(config, rows):
            if isinstance(one, kl.ProductCall):
                p = one.product
                assert made[one.inputs.name][0] == (p.rows, p.inputs)
                assert one.out.name == "x" or p.outputs <= made[one.out.name][0][1]


def test_limits_are_said() -> None:
    with pytest.raises(UnsupportedModelError, match="2049 rows"):
        lowered(SMALL, 2049)
    with pytest.raises(UnsupportedModelError, match="head of 128 rows"):
        kl.lower_with_library(
            decode_program(SMALL),
            SMALL,
            rows=128,
            tuning=default_tuning(SMALL, rows=128, context=512, most=PIECE_ROWS),
            single=default_tuning(SMALL),
        )
    # The attention's counters limit the rows, where it has any.
    assert kl.piece_rows(SMALL) == 2048
    assert kl.piece_rows(config_of(64, 8, 128, inner=28672, vocabulary=128256)) == 512
    assert kl.piece_rows(config_of(32, 8, 128, inner=14336, vocabulary=128256)) == 1024
    assert kl.piece_rows(config_of(32, 8, 64, inner=8192, vocabulary=128256)) == 2048
    large = config_of(64, 8, 256, inner=28672, vocabulary=128256)
    assert kl.piece_rows(large) == 256
    lowered(large, 256)
    with pytest.raises(UnsupportedModelError, match="512 rows of 64 heads"):
        lowered(large, 512)
