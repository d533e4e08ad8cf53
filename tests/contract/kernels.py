"""The same small kernels in CUDA C++ and as host kernels, and a rig to run them on any driver."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from ostinato.driver.api import (
    Driver,
    Edge,
    EdgeData,
    EventHandle,
    ExecHandle,
    FunctionHandle,
    GraphHandle,
    Image,
    InstantiateFlags,
    KernelNodeParams,
    LaunchConfig,
    MemcpyNodeParams,
    MemsetNodeParams,
    NodeHandle,
    NodeParams,
    StreamHandle,
)
from ostinato.driver.host.kernel import HostKernel, host_kernel
from ostinato.driver.signature import Signature
from ostinato.errors import DriverError
from tests.sources import add, cluster_size, fill  # noqa: F401 - the host's of these kernels

CUDA_SOURCE = r"""
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(
    cudaGraphConditionalHandle handle, unsigned int value);

#define INDEX (blockIdx.x * blockDim.x + threadIdx.x)

extern "C" __global__ void fill(float* out, float value, unsigned n) {
    if (INDEX < n) out[INDEX] = value;
}
extern "C" __global__ void add(const float* a, const float* b, float* out, unsigned n) {
    if (INDEX < n) out[INDEX] = a[INDEX] + b[INDEX];
}
extern "C" __global__ void scale(float* x, float s, unsigned n) {
    if (INDEX < n) x[INDEX] *= s;
}
extern "C" __global__ void increment(unsigned* counter) {
    if (INDEX == 0) *counter += 1;
}
extern "C" __global__ void note(unsigned* notes, unsigned* cursor, unsigned number) {
    if (INDEX == 0) notes[atomicAdd(cursor, 1u)] = number;
}
extern "C" __global__ void set_condition(
    cudaGraphConditionalHandle condition, const unsigned* value) {
    if (INDEX == 0) cudaGraphSetConditional(condition, *value);
}
extern "C" __global__ void count_up(
    cudaGraphConditionalHandle condition, unsigned* counter, unsigned limit) {
    if (INDEX == 0) {
        *counter += 1;
        cudaGraphSetConditional(condition, *counter < limit);
    }
}
struct Triple { double a; int b; float c; double d; };
extern "C" __global__ void copy_struct(char first, Triple value, Triple* out, char* letter) {
    if (INDEX == 0) { *out = value; *letter = first; }
}
extern "C" __global__ void numbers(
    signed char a, unsigned short b, int c, float d, long long e, double f, double* out) {
    if (INDEX == 0) { out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = e; out[5] = f; }
}
extern "C" __global__ void cluster_size(unsigned* out) {
    unsigned size = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
#endif
    if (INDEX == 0) *out = size;
}
extern "C" __global__ void nothing() {}
"""


@host_kernel("x: *f32, s: f32, n: u32")
def scale(launch, x, s, n):
    x[:n] *= s


@host_kernel("counter: *u32")
def increment(launch, counter):
    counter[0] += 1


@host_kernel("notes: *u32, cursor: *u32, number: u32")
def note(launch, notes, cursor, number):
    notes[cursor[0]] = number
    cursor[0] += 1


@host_kernel("condition: cond, value: *const u32")
def set_condition(launch, condition, value):
    launch.set_conditional(condition, int(value[0]))


@host_kernel("condition: cond, counter: *u32, limit: u32")
def count_up(launch, condition, counter, limit):
    counter[0] += 1
    launch.set_conditional(condition, int(counter[0] < limit))


@host_kernel("first: i8, value: bytes[24], out: *out u8, letter: *out i8")
def copy_struct(launch, first, value, out, letter):
    out[:24] = np.frombuffer(value, np.uint8)
    letter[0] = first


@host_kernel("a: i8, b: u16, c: i32, d: f32, e: i64, f: f64, out: *out f64")
def numbers(launch, a, b, c, d, e, f, out):
    out[:6] = (a, b, c, d, e, f)


@host_kernel("")
def nothing(launch):
    pass


KERNELS: dict[str, HostKernel] = {
    one.name: one for one in [*globals().values()] if isinstance(one, HostKernel)
}

_cubins: dict[tuple[int, int], bytes] = {}


def load_image(driver: Driver) -> Image:
    """The kernels as the driver takes them."""
    if driver.capabilities.source_language == "host":
        return Image("host", functions=KERNELS)
    capability = driver.properties.compute_capability
    if capability not in _cubins:
        from cuda.core import Program, ProgramOptions

        options = ProgramOptions(std="c++17", arch=f"sm_{capability[0]}{capability[1]}")
        _cubins[capability] = bytes(Program(CUDA_SOURCE, "c++", options).compile("cubin").code)
    return Image("cubin", _cubins[capability])


def arguments(call: str, values: Mapping[str, object]) -> dict[str, object]:
    """The arguments that a call of the protocol needs, from values by their types or names."""
    parameters = inspect.signature(getattr(Driver, call)).parameters
    needed = {n: p for n, p in parameters.items() if n != "self" and p.default is p.empty}
    return {n: values[p.annotation if p.annotation in values else n] for n, p in needed.items()}


class Rig:
    """A driver with the kernels loaded, a stream, and short words for what tests do all day."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.module = driver.module_load(load_image(driver))
        self.functions: dict[str, FunctionHandle] = {
            name: driver.module_function(self.module, name) for name in KERNELS
        }
        for function in self.functions.values():
            driver.function_load(function)
        self.stream = driver.stream_create()
        self._owned: list[int] = []
        self._ends: list[Callable[[], None]] = []

    def close(self) -> None:
        self.driver.stream_destroy(self.stream)
        self.driver.synchronize()
        for end in reversed(self._ends):
            end()
        for address in self._owned:
            self.driver.mem_free(address)
        self.driver.module_unload(self.module)

    # --- objects that live until `close`
    def new_stream(self, **options: Any) -> StreamHandle:
        made = self.driver.stream_create(**options)
        self._ends.append(lambda: self.driver.stream_destroy(made))
        return made

    def new_event(self, **options: Any) -> EventHandle:
        made = self.driver.event_create(**options)
        self._ends.append(lambda: self.driver.event_destroy(made))
        return made

    def new_graph(self) -> GraphHandle:
        made = self.driver.graph_create()
        self._ends.append(lambda: self.driver.graph_destroy(made))
        return made

    def end_capture(self, stream: StreamHandle | None = None) -> GraphHandle:
        made = self.driver.stream_end_capture(self.stream if stream is None else stream)
        self._ends.append(lambda: self.driver.graph_destroy(made))
        return made

    def instantiate(self, graph: GraphHandle, *flags: InstantiateFlags) -> ExecHandle:
        made = self.driver.graph_instantiate(graph, *flags)
        self._ends.append(lambda: self.driver.exec_destroy(made))
        return made

    # --- memory
    def array(self, values: Any, dtype: Any = np.float32) -> int:
        data = np.ascontiguousarray(values, dtype=dtype)
        address = self.driver.mem_alloc(data.nbytes)
        self._owned.append(address)
        self.driver.memcpy_from_host(address, memoryview(data).cast("B"), self.stream)
        self.driver.stream_synchronize(self.stream)
        return address

    def zeros(self, n: int, dtype: Any = np.float32) -> int:
        return self.array(np.zeros(n), dtype)

    def read(self, address: int, n: int, dtype: Any = np.float32) -> Any:
        out = np.empty(n, dtype)
        self.driver.memcpy_to_host(memoryview(out).cast("B"), address, self.stream)
        return out

    def values(self, address: int, n: int, dtype: Any = np.float32) -> list[Any]:
        return list(self.read(address, n, dtype).tolist())

    # --- work
    def params(self, name: str, *arguments: object, block: int = 256) -> KernelNodeParams:
        signature: Signature = KERNELS[name].signature
        return KernelNodeParams(
            self.functions[name], LaunchConfig(1, block), signature.pack(arguments)
        )

    def launch(self, name: str, *arguments: object, stream: StreamHandle | None = None) -> None:
        params = self.params(name, *arguments)
        where = self.stream if stream is None else stream
        self.driver.launch_kernel(where, params.function, params.config, params.arguments)

    def add(
        self,
        graph: GraphHandle,
        dependencies: Sequence[NodeHandle],
        what: str | NodeParams,
        *arguments: object,
        edge_data: Sequence[EdgeData] | None = None,
    ) -> NodeHandle:
        params = self.params(what, *arguments) if isinstance(what, str) else what
        return self.driver.graph_add_node(graph, dependencies, params, edge_data)

    def run(self, graph: GraphHandle, times: int = 1) -> None:
        """Instantiates, launches and waits."""
        executable = self.driver.graph_instantiate(graph)
        for _ in range(times):
            self.driver.exec_launch(executable, self.stream)
        self.driver.stream_synchronize(self.stream)
        self.driver.exec_destroy(executable)

    def edges(self, graph: GraphHandle) -> set[tuple[int, int]]:
        """Edges as pairs of indexes into the graph's nodes."""
        nodes = self.driver.graph_nodes(graph)
        index = {node: i for i, node in enumerate(nodes)}
        return {(index[edge.source], index[edge.target]) for edge in self.driver.graph_edges(graph)}

    def edge(self, source: NodeHandle, target: NodeHandle) -> Edge:
        return Edge(source, target)


@contextlib.contextmanager
def refused(*statuses: int) -> Iterator[pytest.ExceptionInfo[DriverError]]:
    """The block raises a DriverError with one of the statuses."""
    with pytest.raises(DriverError) as caught:
        yield caught
    assert caught.value.status in statuses, str(caught.value)


def copy_of(dst: int, src: int, nbytes: int) -> MemcpyNodeParams:
    return MemcpyNodeParams(dst, src, nbytes)


def words(dst: int, value: int, count: int) -> MemsetNodeParams:
    return MemsetNodeParams(dst, value, 4, count)
