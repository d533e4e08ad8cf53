"""Graphs of cuda.core's builder and definitions, of cuda.bindings, and plain handles."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import InputError
from tests.gpu.foreign import (
    Area,
    check_inventory,
    check_rebind,
    check_replay,
    check_showing,
    kernels,
    library,
    read,
)
from tests.sources import BLOCK, CUDA, config, kernel

N = 1000


class Core:
    """y = x + z, then y = 2 y, by cuda.core's kernels in cuda.core's graph."""

    def __init__(self, device: Device) -> None:
        core = library("cuda.core")
        self.device = device
        self.owner = core.Device(0)
        self.owner.set_current()
        self.stream = self.owner.create_stream()
        program = core.Program(CUDA, "c++", core.ProgramOptions(arch=f"sm_{self.owner.arch}"))
        code = program.compile("cubin")
        self.launch = core.launch
        self.add, self.scale = code.get_kernel("add"), code.get_kernel("scale")
        self.config = core.LaunchConfig(grid=-(-N // BLOCK), block=BLOCK)
        self.rng = np.random.default_rng(7)
        self.x, self.z = self.random(), self.random()
        self.y = device.zeros(N, np.float32)

    def random(self) -> ost.Buffer:
        return self.device.array(self.rng.standard_normal(N).astype(np.float32))

    def work(self, on: object, x: ost.Buffer) -> None:
        n = np.uint32(N)
        arguments = (x.address, self.z.address, self.y.address, n)
        self.launch(on, self.config, self.add, *arguments)
        self.launch(on, self.config, self.scale, self.y.address, n)

    def eager_bits(self, x: ost.Buffer) -> bytes:
        self.work(self.stream, x)
        self.stream.sync()
        return read(self.device, self.output)

    @property
    def output(self) -> Area:
        return Area("y", self.y.address, self.y.nbytes)

    @property
    def areas(self) -> list[Area]:
        return [Area("x", self.x.address, self.x.nbytes), self.output]


@pytest.fixture
def core(cuda_device: Device) -> Core:
    return Core(cuda_device)


@pytest.mark.gpu
def test_a_graph_of_cuda_cores_builder(cuda_device: Device, core: Core) -> None:
    builder = core.owner.create_graph_builder()
    builder.begin_building()
    core.work(builder, core.x)
    builder.end_building()
    definition = builder.graph_definition
    graph = ost.Graph.adopt(cuda_device, int(definition.handle), owner=(builder, definition))
    check_inventory(graph, core.areas)
    assert [node.name for node in kernels(graph)] == ["add", "scale"]
    check_showing(graph)
    stream = cuda_device.create_stream()
    theirs = builder.complete()

    def replay() -> None:
        theirs.launch(core.stream)
        core.stream.sync()

    run = check_replay(cuda_device, stream, graph, replay, [core.output])
    fresh = core.random()
    check_rebind(
        cuda_device, stream, run, core.x, fresh, lambda: core.eager_bits(fresh), core.output
    )


@pytest.mark.gpu
def test_a_definition_that_cuda_core_built_by_hand(cuda_device: Device, core: Core) -> None:
    definition = library("cuda.core.graph").GraphDefinition()
    n = np.uint32(N)
    first = definition.launch(core.config, core.add, core.x.address, core.z.address,
                              core.y.address, n)  # fmt: skip
    first.launch(core.config, core.scale, core.y.address, n)
    graph = ost.Graph.adopt(cuda_device, int(definition.handle), owner=definition)
    assert len(graph.edges()) == 1
    check_inventory(graph, core.areas)
    stream = cuda_device.create_stream()
    with graph.instantiate(upload=stream) as run:
        run.launch(stream)
        found = read(cuda_device, core.output)
        assert found == core.eager_bits(core.x)


@pytest.mark.gpu
def test_our_work_in_cuda_cores_builder(cuda_device: Device, core: Core) -> None:
    builder = core.stream.create_graph_builder()
    builder.begin_building(mode="thread_local")
    ours = cuda_device.adopt_stream(core.stream)
    scale = kernel(cuda_device, "scale")
    ost.launch(ours, scale, config(N), core.x, N)
    theirs = builder.end_building().complete()
    before = core.x.to_numpy(ours)
    theirs.launch(core.stream)
    np.testing.assert_array_equal(core.x.to_numpy(ours), 2 * before)


@pytest.mark.gpu
def test_a_graph_of_cuda_bindings(cuda_device: Device) -> None:
    driver = library("cuda.bindings.driver")
    stream, x = cuda_device.create_stream(), cuda_device.zeros(N, np.uint8)

    def checked(answer: tuple[object, ...]) -> object:
        assert int(answer[0]) == 0, answer  # type: ignore[call-overload]
        return answer[1] if len(answer) > 1 else None

    theirs = checked(driver.cuGraphCreate(0))
    params = driver.CUDA_MEMSET_NODE_PARAMS()
    params.dst, params.value, params.elementSize = x.address, 5, 1
    params.width, params.height = N, 1
    context = checked(driver.cuCtxGetCurrent())
    checked(driver.cuGraphAddMemsetNode(theirs, [], 0, params, context))
    graph = ost.Graph.adopt(cuda_device, int(theirs), owner=theirs)  # type: ignore[call-overload]
    assert graph.node(0).memset.dst == x.address and graph.node(0).memset.value == 5
    with graph.instantiate(upload=stream) as run:
        run.launch(stream)
        assert (x.to_numpy(stream) == 5).all()
        y = cuda_device.zeros(N, np.uint8)
        assert run.rebind({x: y}).words[0].confirmed_by == "field"
        run.launch(stream)
        assert (y.to_numpy(stream) == 5).all()
    graph.close()  # lets it go, and does not destroy it
    checked(driver.cuGraphDestroy(theirs))


# ------------------------------------------------------------------------- plain, on both drivers


class Owner:
    """Whatever holds a graph elsewhere."""

    def __init__(self, graph: ost.Graph) -> None:
        self.graph = graph


def test_a_plain_handle(device: Device) -> None:
    stream = device.create_stream()
    x, z = (device.array(np.full(N, v, np.float32)) for v in (1, 2))
    y = device.zeros(N, np.float32)
    add = kernel(device, "add")
    captured = ost.capture_function(stream, lambda: ost.launch(stream, add, config(N), x, z, y, N))
    owner = Owner(captured)
    gone = weakref.ref(owner)
    graph = ost.Graph.adopt(device, int(captured.handle), owner=owner)
    del captured, owner
    gc.collect()
    check_inventory(graph, [Area("x", x.address, x.nbytes), Area("y", y.address, y.nbytes)])
    check_showing(graph)
    node = graph.node(0)
    assert [a.size for a in node.arguments] == [8, 8, 8, 4]
    run = graph.instantiate(upload=stream)
    run.launch(stream)
    assert (y.to_numpy(stream) == 3).all()
    report = run.rebind({x: z})
    assert [w.confirmed_by for w in report.words] == ["allocation"]
    run.launch(stream)
    assert (y.to_numpy(stream) == 4).all()
    graph.close()
    del graph
    gc.collect()
    assert gone() is not None  # the executable needs it
    run.close()
    del run, node
    gc.collect()
    device.synchronize()
    assert gone() is None


def test_a_null_handle_is_refused(device: Device) -> None:
    with pytest.raises(InputError, match="null"):
        ost.Graph.adopt(device, 0, owner=None)
