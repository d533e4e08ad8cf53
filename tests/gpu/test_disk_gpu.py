"""Graphs in files on a GPU, of our own kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import GraphFileError
from tests.gpu.foreign import library
from tests.graphfile import file_runner

pytestmark = pytest.mark.gpu

SOURCE = ost.Source(
    r"""
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(
    cudaGraphConditionalHandle handle, unsigned int value);
#define AT (blockIdx.x * blockDim.x + threadIdx.x)
extern "C" __global__ void axpy(const float* x, float* y, float a, unsigned n) {
    asm volatile("griddepcontrol.wait;" ::: "memory");  // for programmatic launches
    if (AT < n) y[AT] = a * x[AT] + y[AT];
}
extern "C" __global__ void set(float* y, float a, unsigned n) { if (AT < n) y[AT] = a; }
extern "C" __global__ void reversed(const float* x, float* y, unsigned n) {
    extern __shared__ float held[];
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) held[i] = x[i];
    __syncthreads();
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) y[i] = held[n - 1 - i];
}
extern "C" __global__ void ranks(float* y) {
    unsigned rank, blocks;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    if (threadIdx.x == 0) y[blockIdx.x] = rank * 100 + blocks;
}
struct Two { const float* x; float* y; };
extern "C" __global__ void packed(Two two, unsigned n) { if (AT < n) two.y[AT] = two.x[AT] + 1; }
extern "C" __global__ void countdown(cudaGraphConditionalHandle handle, int* left) {
    if (AT == 0) cudaGraphSetConditional(handle, --*left > 0);
}
__device__ int changed;
extern "C" __global__ void change(float* y) { y[0] = atomicAdd(&changed, 1); }
""",
    name="disk",
)
N = 20_000
WIDE = ost.LaunchConfig(80, 256)


def kernel(device: Device, name: str, signature: str | None) -> ost.Kernel:
    return device.modules.get_or_compile(SOURCE, name, signature=signature)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "one.graph"


def run_elsewhere(folder: Path) -> None:
    """Runs all files of a folder in a process that has this library alone."""
    paths = [str(Path(__file__).parents[2]), *(p for p in sys.path if p)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, file_runner.__file__, str(folder), "cuda"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("typed", [True, False], ids=["signatures", "allocations"])
def test_our_own_kernels(cuda_device: Device, path: Path, typed: bool) -> None:
    """Shared memory over 48 KiB, clusters, structs, copies, fills, a fork, a loop, a child."""
    device, stream = cuda_device, cuda_device.create_stream()

    def text(signature: str) -> str | None:
        return signature if typed else None

    axpy = kernel(device, "axpy", text("x: *const f32, y: *f32, a: f32, n: u32"))
    fill = kernel(device, "set", text("y: *out f32, a: f32, n: u32"))
    backwards = kernel(device, "reversed", text("x: *const f32, y: *out f32, n: u32"))
    ranks = kernel(device, "ranks", text("y: *f32"))
    two = kernel(device, "packed", None)
    countdown = kernel(device, "countdown", "handle: cond, left: *i32")
    backwards.allow_shared(4 * N)
    x, w = (device.array(np.random.default_rng(s).random(N, np.float32)) for s in (1, 2))
    y, rank = device.zeros(N, np.float32), device.zeros(16, np.float32)
    left, scratch = device.array([3], np.int32), device.empty(N, np.float32)
    n, a, one = np.uint32(N), np.float32(2), np.float32(1)
    side = device.create_stream()
    with ost.capture(stream) as under_way:
        ost.launch(stream, fill, WIDE, scratch, one, n)
        side.wait(stream.record())
        ost.launch(side, ranks, ost.LaunchConfig(16, 32, cluster=4), rank)
        ost.launch(stream, axpy, WIDE, x, scratch, a, n)
        programmatic = ost.LaunchConfig(80, 256, programmatic=True)
        ost.launch(stream, axpy, programmatic, w, scratch, one, n)
        ost.launch(stream, backwards, ost.LaunchConfig(1, 1024, 4 * N), scratch, y, n)
        both = b"".join(b.address.to_bytes(8, "little") for b in (y, scratch))
        ost.launch(stream, two, WIDE, both, n)
        ost.copy(stream, y, scratch)
        stream.wait(side.record())
    graph = under_way.graph
    inner = ost.Graph.create(device)
    inner.add_kernel(axpy, WIDE, w, y, one, n)
    sources = {edge.source for edge in graph.edges()}
    ends = [node for node in graph.nodes() if node.handle not in sources]
    child = graph.add_child(inner, after=ends)
    handle = graph.condition(1)
    loop = graph.add_conditional("while", handle, after=[child])
    counted = loop.bodies[0].add_kernel(countdown, ost.LaunchConfig(1, 1), handle, left)
    loop.bodies[0].add_kernel(axpy, WIDE, x, y, one, n, after=[counted])
    ost.graphfile.save(
        graph,
        path,
        inputs={"x": x, "left": left},
        outputs={"y": y, "rank": rank, "left": left},
        constants={"w": w},
    )
    new = np.random.default_rng(3).random(N, np.float32)
    np.savez(path.with_suffix(".in.npz"), x=new, left=np.array([5], np.int32))
    x.set(new, stream)
    left.set([5], stream)
    graph.instantiate().launch(stream)
    wanted = {name: b.to_numpy(stream) for name, b in (("y", y), ("rank", rank), ("left", left))}
    assert wanted["left"].tolist() == [0] and wanted["rank"][:5].tolist() == [4, 104, 204, 304, 4]
    run_elsewhere(path.parent)
    found = np.load(path.with_suffix(".out.npz"))
    for name, values in wanted.items():
        assert found[name].tobytes() == values.tobytes(), name
    loaded = ost.graphfile.load(device, path)
    proofs = loaded.manifest().proofs()
    assert proofs["signature" if typed else "allocation"] >= 10


def test_a_module_whose_variable_was_changed_is_refused(cuda_device: Device, path: Path) -> None:
    device, stream = cuda_device, cuda_device.create_stream()
    y, change = device.zeros(1, np.float32), kernel(cuda_device, "change", "y: *f32")
    with ost.capture(stream) as under_way:
        ost.launch(stream, change, ost.LaunchConfig(1, 1), y)
    ost.launch(stream, change, ost.LaunchConfig(1, 1), y)
    with pytest.raises(GraphFileError, match="a variable, changed, that was changed"):
        ost.graphfile.save(under_way.graph, path, outputs={"y": y})


TABLES = ost.Source(
    r"""
__device__ float values[4] = {1, 2, 3, 4};
__device__ float* table[3] = {values + 2, 0, values};
extern "C" __global__ void look(float* y) { y[0] = table[0][0] + table[2][1]; }
extern "C" __global__ void turn() { table[0] = values + 3; }
""",
    name="tables",
)


def test_variables_that_hold_addresses_are_as_they_were_loaded(
    cuda_device: Device, path: Path
) -> None:
    """The loader writes the addresses: they are others in every process."""
    device, stream = cuda_device, cuda_device.create_stream()
    y = device.zeros(1, np.float32)
    look, turn = (
        device.modules.get_or_compile(TABLES, name, signature=text)
        for name, text in (("look", "y: *out f32"), ("turn", ""))
    )
    with ost.capture(stream) as under_way:
        ost.launch(stream, look, ost.LaunchConfig(1, 1), y)
    ost.graphfile.save(under_way.graph, path, outputs={"y": y})
    np.savez(path.with_suffix(".in.npz"))
    run_elsewhere(path.parent)
    assert np.load(path.with_suffix(".out.npz"))["y"].tolist() == [5]
    ost.launch(stream, turn, ost.LaunchConfig(1, 1))
    with pytest.raises(GraphFileError, match="a variable, table, that was changed"):
        ost.graphfile.save(under_way.graph, path, outputs={"y": y})


GAPPED = ost.Source(
    r"""
struct All { const float* x; float* y; bool negative; int rounds; };
extern "C" __global__ void gapped(All all) {
    float sum = 0;
    for (int i = 0; i < all.rounds; i++) sum += all.x[0];
    all.y[0] = all.negative ? -sum : sum;
}
""",
    name="gapped",
)


def test_gaps_in_structs_are_no_numbers(cuda_device: Device, path: Path) -> None:
    """Three bytes between the flag and the count differ, and the word that has all of them."""
    device, stream = cuda_device, cuda_device.create_stream()
    made = device.modules.get_or_compile(GAPPED, "gapped")

    def captured(rest: bytes) -> tuple[ost.Graph, ost.Buffer, ost.Buffer]:
        x, y = device.array([2.0], np.float32), device.zeros(1, np.float32)
        words = b"".join(b.address.to_bytes(8, "little") for b in (x, y))
        with ost.capture(stream) as under_way:
            ost.launch(stream, made, ost.LaunchConfig(1, 1), words + rest)
        return under_way.graph, x, y

    graph, x, y = captured(b"\1\2\3\4\3\0\0\0")
    other, x2, y2 = captured(b"\1\0\0\xff\3\0\0\0")
    ost.graphfile.save(
        graph,
        path,
        inputs={"x": x},
        outputs={"y": y},
        twin=ost.graphfile.Twin(other, {"x": x2, "y": y2}),
    )
    np.savez(path.with_suffix(".in.npz"), x=np.array([5], np.float32))
    run_elsewhere(path.parent)
    assert np.load(path.with_suffix(".out.npz"))["y"].tolist() == [-15]
    loaded = ost.graphfile.load(device, path)
    assert [(s.offset, s.size) for s in loaded.manifest().graph.nodes[0].unused] == [(17, 3)]
    other, x2, y2 = captured(b"\1\2\3\4\4\0\0\0")
    with pytest.raises(GraphFileError, match=r"offset 20: 0x3 .* 0x4 .*the results depend on it"):
        ost.graphfile.save(
            graph,
            path,
            inputs={"x": x},
            outputs={"y": y},
            twin=ost.graphfile.Twin(other, {"x": x2, "y": y2}),
        )


def test_kernels_that_were_loaded_before_collecting_are_refused(
    cuda_device: Device, path: Path
) -> None:
    torch: Any = library("torch")
    from ostinato.interop.torch import adopt_graph

    x = torch.ones(8, device="cuda")
    y = x * 3
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(made):
        y = x * 3
    graph = adopt_graph(cuda_device, made)
    with pytest.raises(GraphFileError, match=r"graphfile\.collect_modules\(\)"):
        ost.graphfile.save(graph, path, inputs={"x": x}, outputs={"y": y})
