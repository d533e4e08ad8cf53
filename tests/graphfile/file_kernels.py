"""Kernels of the host for graphs in files: at the top of a module, so that others find them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import ostinato as ost
from ostinato.device import Device


@ost.host_kernel("x: *const i32, y: *i32, n: u32")
def add(_: Any, x: Any, y: Any, n: int) -> None:
    y[:n] += x[:n]


@ost.host_kernel("dst: *i32, src: *const i32, m: i32, c: i32, n: u32")
def affine(_: Any, dst: Any, src: Any, m: int, c: int, n: int) -> None:
    dst[:n] = src[:n] * m + c


@ost.host_kernel("x: *const i32, at: *const i32, y: *i32, n: u32")
def pick(_: Any, x: Any, at: Any, y: Any, n: int) -> None:
    for place in range(n):
        y[place] = x[at[place]]


@ost.host_kernel("on: *const i32, handle: cond")
def choose(launch: Any, on: Any, handle: int) -> None:
    launch.set_conditional(handle, int(on[0]) & 1)


@ost.host_kernel("on: *i32, handle: cond")
def count_down(launch: Any, on: Any, handle: int) -> None:
    on[0] -= 1
    launch.set_conditional(handle, int(on[0] > 0))


@ost.host_kernel("first: u32, both: bytes[16], seed: u64")
def packed(launch: Any, first: int, both: bytes, seed: int) -> None:
    """Two addresses inside one argument: the second's i32 is set to the first's plus `seed`."""
    source, target = (int.from_bytes(both[i : i + 8], "little") for i in (0, 8))
    values = launch.memory(source, 4).view("i4")
    launch.memory(target, 4).view("i4")[:] = values + seed


@ost.host_kernel("all: bytes[32]")
def gapped(launch: Any, all: bytes) -> None:
    """A struct: two addresses as for `packed`, a flag, three bytes that are not read, a number of
    which only whether it is over 100 is used, and two that are added."""
    source, target = (int.from_bytes(all[i : i + 8], "little") for i in (0, 8))
    if all[24] == 0x99 ^ 0xFF:
        os._exit(3)  # what a number can do that is taken for a gap
    made = launch.memory(source, 4).view("i4") * (-1 if all[16] else 1) + all[21] + all[23]
    launch.memory(target, 4).view("i4")[:] = made + (all[20] > 100)


@ost.host_kernel("both: bytes[16], n: u32, m: i32")
def spread(launch: Any, both: bytes, n: int, m: int) -> None:
    """Two addresses inside one argument: n i32 at the second are those at the first times m, plus
    their places."""
    source, target = (int.from_bytes(both[i : i + 8], "little") for i in (0, 8))
    values = launch.memory(source, 4 * n).view("i4") * m + np.arange(n, dtype="i4")
    launch.memory(target, 4 * n).view("i4")[:] = values


@ost.host_kernel("both: bytes[16], n: u32")
def picked(launch: Any, both: bytes, n: int) -> None:
    """Two addresses inside one argument: n i32 at the second are the squares of those at the first,
    which must be below 64, as an index that a kernel asserts."""
    source, target = (int.from_bytes(both[i : i + 8], "little") for i in (0, 8))
    index = launch.memory(source, 4 * n).view("u4")
    launch.memory(target, 4 * n).view("u4")[:] = (np.arange(64, dtype="u4") ** 2)[index]


@ost.host_kernel("tickets: *i32, y: *i32, x: *const i32")
def last_one(_: Any, tickets: Any, y: Any, x: Any) -> None:
    """As kernels that share a sum among blocks: who finds three tickets drawn writes the result,
    and puts the tickets back for the next launch."""
    for _block in range(4):
        if tickets[0] == 3:
            y[0], tickets[0] = x[0] + 1, 0
        else:
            tickets[0] += 1


@ost.host_kernel("seen: *i32, y: *i32, x: *const i32")
def nonzero(_: Any, seen: Any, y: Any, x: Any) -> None:
    """Takes memory that nobody wrote for a flag."""
    y[0] = x[0] + (seen[0] != 0)


@ost.host_kernel("done: *i32, y: *i32, x: *const i32")
def once(_: Any, done: Any, y: Any, x: Any) -> None:
    """Leaves a mark that the next launch finds."""
    y[0] = x[0] + (done[0] == 12345)
    done[0] = 12345


@ost.host_kernel("x: *f32")
def big(launch: Any, x: Any) -> None:
    """Asks for much shared memory."""
    x[0] = launch.shared


def kernel(device: Device, made: ost.HostKernel) -> ost.Kernel:
    return device.modules.get_or_compile(made, made.name)


ONE = ost.LaunchConfig(1, 1)
