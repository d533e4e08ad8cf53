"""Small kernels in both languages, so that one test body runs on both drivers."""

from __future__ import annotations

import numpy as np

import ostinato as ost
from ostinato.device import Device

CUDA = r"""
extern "C" __global__ void fill(float* out, float value, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = value;
}
extern "C" __global__ void scale(float* x, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = 2.0f * x[i];
}
extern "C" __global__ void halve(float* x, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = 0.5f * x[i];
}
extern "C" __global__ void add(const float* a, const float* b, float* out, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}
extern "C" __global__ void axpy(const float* x, const float* factor, float* y, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += *factor * x[i];
}
extern "C" __global__ void axpy_rows(const float* x, const float* factor, float* y,
                                     const unsigned* rows, unsigned width) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < *rows * width) y[i] += *factor * x[i];
}
extern "C" __global__ void increment(int* counter, int by) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *counter += by;
}
extern "C" __global__ void total(const float* x, unsigned n, const unsigned* most, float* out) {
    if (blockIdx.x || threadIdx.x) return;
    float sum = 0;
    for (unsigned i = 0; i < min(n, *most); ++i) sum += x[i];
    *out = sum;
}
extern "C" __global__ void scatter(const float* x, const int* at, float* out, unsigned n,
                                   const unsigned* most) {
    if (blockIdx.x || threadIdx.x) return;
    for (unsigned i = 0; i < min(n, *most); ++i) out[at[i]] = x[i];
}
extern "C" __global__ void number(unsigned long long value, unsigned long long* out) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *out = value;
}
extern "C" __global__ void cluster_size(unsigned* out) {
    unsigned size = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
#endif
    if (blockIdx.x == 0 && threadIdx.x == 0) *out = size;
}
"""


def covered(launch, n):
    """How many of n elements the grid reaches."""
    return min(n, launch.grid[0] * launch.block[0])


@ost.host_kernel("out: *out f32, value: f32, n: u32")
def fill(launch, out, value, n):
    out[: covered(launch, n)] = value


@ost.host_kernel("x: *f32, n: u32")
def scale(launch, x, n):
    x[: covered(launch, n)] *= np.float32(2)


@ost.host_kernel("x: *f32, n: u32")
def halve(launch, x, n):
    x[: covered(launch, n)] /= np.float32(2)


@ost.host_kernel("a: *const f32, b: *const f32, out: *out f32, n: u32")
def add(launch, a, b, out, n):
    n = covered(launch, n)
    out[:n] = a[:n] + b[:n]


@ost.host_kernel("x: *const f32, factor: *const f32, y: *f32, n: u32")
def axpy(launch, x, factor, y, n):
    n = covered(launch, n)
    y[:n] += factor[0] * x[:n]


@ost.host_kernel("x: *const f32, factor: *const f32, y: *f32, rows: *const u32, width: u32")
def axpy_rows(launch, x, factor, y, rows, width):
    n = covered(launch, int(rows[0]) * width)
    y[:n] += factor[0] * x[:n]


@ost.host_kernel("counter: *i32, by: i32")
def increment(launch, counter, by):
    counter[0] += by


@ost.host_kernel("x: *const f32, n: u32, most: *const u32, out: *out f32")
def total(launch, x, n, most, out):
    out[0] = x[: min(n, most[0])].sum()


@ost.host_kernel("x: *const f32, at: *const i32, out: *f32, n: u32, most: *const u32")
def scatter(launch, x, at, out, n, most):
    for i in range(min(n, most[0])):
        out[at[i]] = x[i]


@ost.host_kernel("value: u64, out: *out u64")
def number(launch, value, out):
    out[0] = value


@ost.host_kernel("out: *out u32")
def cluster_size(launch, out):
    out[0] = 1 if launch.cluster is None else launch.cluster[0]


SOURCE = ost.Source(
    cuda=CUDA,
    host=[
        *(fill, scale, halve, add, axpy, axpy_rows, increment, total, scatter, number),
        cluster_size,
    ],
    name="tests",
)
BLOCK = 128


def kernel(device: Device, name: str) -> ost.Kernel:
    return device.modules.get_or_compile(SOURCE, name)


def config(n: int) -> ost.LaunchConfig:
    """Enough blocks for n elements."""
    return ost.LaunchConfig(grid=max(1, -(-n // BLOCK)), block=BLOCK)


def preload(device: Device) -> Device:
    """Loads every kernel, so that none is loaded inside a capture; on the CPU one of them, since a
    module is loaded as a whole there, and each kernel costs every test some time."""
    names = list(SOURCE.host)
    device.modules.preload([(SOURCE, names if device.name != "host" else names[:1])])
    return device


def empty_graph(device: Device) -> ost.GraphExec:
    """An executable that does nothing."""
    graph = ost.Graph.create(device)
    graph.add_empty()
    return graph.instantiate()
