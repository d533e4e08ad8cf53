"""The kernels of the property test, for the host driver: 32-bit whole numbers, exact."""

from __future__ import annotations

import ostinato as ost
from ostinato.device import Device
from tests.property.oracle import BLOCK


def covered(launch, n):
    """How many of n elements the grid reaches."""
    return min(n, launch.grid[0] * launch.block[0])


@ost.host_kernel("dst: *i32, src: *const i32, m: i32, c: i32, n: u32")
def affine(launch, dst, src, m, c, n):
    n = covered(launch, n)
    dst[:n] = src[:n] * m + c


@ost.host_kernel("dst: *i32, a: *const i32, b: *const i32, n: u32")
def total(launch, dst, a, b, n):
    n = covered(launch, n)
    dst[:n] = a[:n] + b[:n]


@ost.host_kernel("on: *const i32, handle: cond")
def choose(launch, on, handle):
    launch.set_conditional(handle, int(on[0]) & 1)


@ost.host_kernel("on: *i32, handle: cond")
def begin_loop(launch, on, handle):
    on[0] &= 3
    launch.set_conditional(handle, int(on[0] > 0))


@ost.host_kernel("on: *i32, handle: cond")
def next_round(launch, on, handle):
    on[0] -= 1
    launch.set_conditional(handle, int(on[0] > 0))


@ost.host_kernel("x: *const i32, w: *const i32, out: *i32, c: i32, rows: *const u32, width: u32")
def weigh(launch, x, w, out, c, rows, width):
    n = covered(launch, int(rows[0]) * width)
    out[:n] = x[:n] * w[0] + c


@ost.host_kernel("x: *const i32, w: *const i32, out: *i32, c: i32, n: u32")
def weigh_all(launch, x, w, out, c, n):
    n = covered(launch, n)
    out[:n] = x[:n] * w[0] + c


@ost.host_kernel("x: *const i32, acc: *i32, rows: *const u32, width: u32")
def accumulate(launch, x, acc, rows, width):
    n = covered(launch, int(rows[0]) * width)
    acc[:n] += x[:n]


@ost.host_kernel("x: *const i32, w: *const i32, out: *i32, rows: *const u32, width: u32")
def reduce(launch, x, w, out, rows, width):
    out[:1] += x[: int(rows[0]) * width].sum(dtype=x.dtype, keepdims=True) * w[:1]


@ost.host_kernel(
    "x: *const i32, w: *const i32, acc: *i32, rows: *const u32, columns: *const u32, width: u32"
)
def weigh_corner(launch, x, w, acc, rows, columns, width):
    r, c = int(rows[0]), int(columns[0])
    corner = acc[: r * width].reshape(r, width)[:, :c]
    corner += x[: r * width].reshape(r, width)[:, :c] * w[0]


@ost.host_kernel("x: *i32")
def crash(launch, x):
    raise ZeroDivisionError("this kernel always fails")


SOURCE = ost.Source(
    host=[
        affine,
        total,
        choose,
        begin_loop,
        next_round,
        weigh,
        weigh_all,
        accumulate,
        reduce,
        weigh_corner,
        crash,
    ],
    name="property",
)


def kernel(device: Device, name: str) -> ost.Kernel:
    return device.modules.get_or_compile(SOURCE, name)


def config(n: int) -> ost.LaunchConfig:
    """Enough blocks for n elements."""
    return ost.LaunchConfig(grid=max(1, -(-n // BLOCK)), block=BLOCK)
