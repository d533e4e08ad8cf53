"""The kernels of the property test in both languages: 32-bit whole numbers, exact.

In CUDA one thread does all of a launch, and reads before it writes, as NumPy does: parts of one box
may overlap.
"""

from __future__ import annotations

import ostinato as ost
from ostinato.device import Device
from tests.property.oracle import BLOCK

CUDA = r"""
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(
    cudaGraphConditionalHandle handle, unsigned int value);

typedef unsigned u32;
#define FIRST (blockIdx.x == 0 && threadIdx.x == 0)
#define COVERED(n) min((u32)(n), gridDim.x * blockDim.x)
enum { MOST = 64 };

extern "C" __global__ void affine(u32* dst, const u32* src, int m, int c, u32 n) {
    u32 found[MOST];
    if (!FIRST) return;
    n = COVERED(n);
    for (u32 i = 0; i < n; ++i) found[i] = src[i] * (u32)m + (u32)c;
    for (u32 i = 0; i < n; ++i) dst[i] = found[i];
}
extern "C" __global__ void total(u32* dst, const u32* a, const u32* b, u32 n) {
    u32 found[MOST];
    if (!FIRST) return;
    n = COVERED(n);
    for (u32 i = 0; i < n; ++i) found[i] = a[i] + b[i];
    for (u32 i = 0; i < n; ++i) dst[i] = found[i];
}
extern "C" __global__ void seen(u32* dst) {
    u32 cluster = 1;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(cluster));
#endif
    if (!FIRST) return;
    dst[0] = gridDim.x;
    dst[1] = cluster;
}
extern "C" __global__ void choose(const u32* on, cudaGraphConditionalHandle handle) {
    if (FIRST) cudaGraphSetConditional(handle, on[0] & 1);
}
extern "C" __global__ void choose_of_four(const u32* on, cudaGraphConditionalHandle handle) {
    if (FIRST) cudaGraphSetConditional(handle, on[0] & 3);
}
extern "C" __global__ void begin_loop(u32* on, cudaGraphConditionalHandle handle) {
    if (!FIRST) return;
    on[0] &= 3;
    cudaGraphSetConditional(handle, on[0] > 0);
}
extern "C" __global__ void next_round(u32* on, cudaGraphConditionalHandle handle) {
    if (!FIRST) return;
    on[0] -= 1;
    cudaGraphSetConditional(handle, (int)on[0] > 0);
}
extern "C" __global__ void weigh(const u32* x, const u32* w, u32* out, int c, const u32* rows,
                                 u32 width) {
    if (!FIRST) return;
    u32 n = COVERED(rows[0] * width);
    for (u32 i = 0; i < n; ++i) out[i] = x[i] * w[0] + (u32)c;
}
extern "C" __global__ void weigh_all(const u32* x, const u32* w, u32* out, int c, u32 n) {
    if (!FIRST) return;
    n = COVERED(n);
    for (u32 i = 0; i < n; ++i) out[i] = x[i] * w[0] + (u32)c;
}
extern "C" __global__ void accumulate(const u32* x, u32* acc, const u32* rows, u32 width) {
    if (!FIRST) return;
    u32 n = COVERED(rows[0] * width);
    for (u32 i = 0; i < n; ++i) acc[i] += x[i];
}
extern "C" __global__ void reduce(const u32* x, const u32* w, u32* out, const u32* rows,
                                  u32 width) {
    if (!FIRST) return;
    u32 sum = 0;
    for (u32 i = 0; i < rows[0] * width; ++i) sum += x[i];
    out[0] += sum * w[0];
}
extern "C" __global__ void weigh_corner(const u32* x, const u32* w, u32* acc, const u32* rows,
                                        const u32* columns, u32 width) {
    if (!FIRST) return;
    for (u32 r = 0; r < rows[0]; ++r)
        for (u32 c = 0; c < columns[0]; ++c) acc[r * width + c] += x[r * width + c] * w[0];
}
extern "C" __global__ void crash(u32* x) { __trap(); }
"""


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


@ost.host_kernel("dst: *i32")
def seen(launch, dst):
    dst[:2] = launch.grid[0], (launch.cluster or (1,))[0]


@ost.host_kernel("on: *const i32, handle: cond")
def choose(launch, on, handle):
    launch.set_conditional(handle, int(on[0]) & 1)


@ost.host_kernel("on: *const i32, handle: cond")
def choose_of_four(launch, on, handle):
    launch.set_conditional(handle, int(on[0]) & 3)


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
    cuda=CUDA,
    host=[
        affine,
        total,
        seen,
        choose,
        choose_of_four,
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
