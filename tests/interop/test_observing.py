"""Graphs of `torch.cuda.CUDAGraph` under observation; the class stands over the host driver here,
and is torch's own in tests/gpu/test_observing_gpu.py."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ostinato as ost
from ostinato.device import Device, open_device
from ostinato.errors import ContextPoisonedError, NotAvailableError
from tests.explain.plants import ONE, ROW, Ground

torch: Any = pytest.importorskip("torch")

from ostinato.interop.torch import graphing, observe, observed  # needs torch


class _Base:
    """What torch has in C++: the definition goes when the capture ends, unless it is kept."""

    ground: Ground

    def __init__(self, keep_graph: bool = False) -> None:
        self.keep, self.graph, self.run = keep_graph, None, None
        self.instantiated = self.replayed = 0

    def register_generator_state(self, generator: object) -> None:
        pass

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self.block = ost.capture(self.ground.stream)
        self.capture = self.block.__enter__()

    def capture_end(self) -> None:
        self.block.__exit__(None, None, None)
        self.graph = self.capture.graph
        if not self.keep:
            self.instantiate()
            self.graph = None

    def instantiate(self) -> None:
        assert self.graph is not None
        self.run, self.instantiated = self.graph.instantiate(), self.instantiated + 1

    def raw_cuda_graph(self) -> int:
        if self.graph is None:
            raise RuntimeError("You cannot access the raw cudaGraph_t instance")
        return int(self.graph.handle)

    def replay(self) -> None:
        if self.run is None:
            self.instantiate()
        driver, stream = self.ground.device.driver, self.ground.stream
        driver.exec_launch(self.run.handle, stream.handle)
        self.replayed += 1

    def reset(self) -> None:
        self.graph = self.run = None

    def pool(self) -> tuple[int, int]:
        return 0, 7


class CUDAGraph(_Base):
    """The class of torch, whose methods call those of C++."""

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        super().capture_begin(pool, capture_error_mode)

    def capture_end(self) -> None:
        super().capture_end()

    def instantiate(self) -> None:
        super().instantiate()

    def replay(self) -> None:
        super().replay()

    def reset(self) -> None:
        super().reset()


SEGMENTS = [
    {"device": 0, "address": 1 << 40, "total_size": size, "segment_pool_id": pool, "blocks": []}
    for size, pool in ((64, (0, 7)), (128, (0, 7)), (256, (0, 0)))
]


@pytest.fixture
def ground(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Ground]:
    """torch's names, over a device that a fault may cost."""
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path))
    with open_device("host") as device:
        ground = Ground(device)
        current = SimpleNamespace(
            cuda_stream=ground.stream.handle, __cuda_stream__=lambda: (0, ground.stream.handle)
        )
        monkeypatch.setattr(_Base, "ground", ground, raising=False)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index=None: current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: SEGMENTS)
        monkeypatch.setitem(graphing.devices._open, 0, device)
        yield ground
        gc.collect()


def captured(ground: Ground, *kernels: tuple[Any, ...], keep_graph: bool = False) -> Any:
    """A graph of kernels, by code that knows nothing of an observer."""
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    graph.capture_begin()
    for name, *args in kernels or [("twice", ground.x)] * 2:
        config = ROW if name == "twice" else ONE
        ost.launch(ground.stream, ground.kernel(name), config, *args)
    graph.capture_end()
    return graph


def first(ground: Ground) -> float:
    return float(ground.x.to_numpy(ground.stream)[0])


def test_graphs_of_code_that_knows_nothing_of_us_are_listed(ground: Ground) -> None:
    before = captured(ground)
    with observe():
        graph, other = captured(ground), captured(ground, ("twice", ground.y))
        for _ in range(3):
            graph.replay()
        before.replay()
        assert first(ground) == 4.0**4
        one, two = observed()
    assert (one.graph, one.nodes, one.replays, one.pool_bytes) == (graph, 2, 3, 192)
    assert (two.graph, two.nodes, two.replays) == (other, 1, 0)
    assert f"{Path(__file__).name}:" in one.where and "graph.capture_begin()" in one.where
    assert one.device is ground.device
    assert str(one).startswith(f"graph {one.number} on host: 2 nodes, a pool of 192 bytes, 3 repl")


def test_a_graph_is_instantiated_when_it_would_be_without_an_observer(ground: Ground) -> None:
    with observe():
        assert [captured(ground, keep_graph=keep).instantiated for keep in (False, True)] == [1, 0]


def test_what_is_observed_is_off_by_one_call(ground: Ground) -> None:
    own, before = dict(vars(CUDAGraph)), captured(ground)
    watch = observe()
    assert observe() is watch
    graph, replay = captured(ground), before.replay
    watch.close()
    watch.close()
    assert dict(vars(CUDAGraph)) == own
    replay()  # an engine may keep the method
    graph.replay()
    captured(ground)
    (one,) = observed()
    assert (one.graph, one.replays) == (graph, 0)
    with observe() as again:
        assert again is not watch


def test_a_torch_without_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dummy:
        """The class of a build without CUDA."""

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Dummy)
    own = dict(vars(Dummy))
    with pytest.raises(NotAvailableError, match="without CUDA"):
        observe()
    assert dict(vars(Dummy)) == own


def test_an_audit_works_beside_a_torch_that_has_no_gpu(host_device: Device) -> None:
    assert ost.Graph.create(host_device).audit().pointers == ()


def test_graphs_that_are_gone_or_reset_or_not_captured_are_not_listed(ground: Ground) -> None:
    with observe():
        graph, gone, never = captured(ground), captured(ground), torch.cuda.CUDAGraph()
        graph.reset()
        del gone
        gc.collect()
        assert observed() == ()
        never.capture_begin()
        ost.launch(ground.stream, ground.kernel("twice"), ROW, ground.x)
        never.capture_end()
        assert [one.graph for one in observed()] == [never]


def test_what_is_listed_is_adopted_for_everything_else(ground: Ground) -> None:
    with observe():
        captures = captured(ground), captured(ground, *[("twice", ground.x), ("twice", ground.y)])
        one, two = (each.adopt() for each in observed())
    found = ost.first_difference(ground.stream, one, two)
    assert found is not None and found.a is not None and found.a.path == "1"
    pointers = one.audit().pointers
    assert [(p.node, p.address, p.state) for p in pointers] == [
        ("0", ground.x.address, "live"),
        ("1", ground.x.address, "live"),
    ]
    times = one.instantiate().profile(stream=ground.stream, replays=2)
    assert [node.name for node in times.nodes] == ["twice", "twice"] and len(captures) == 2


def test_a_replay_of_torch_that_faults_names_its_node(ground: Ground) -> None:
    with observe():
        graph = captured(ground, ("twice", ground.x), ("trap", ground.count, 2))
        graph.replay()
        with pytest.raises(ContextPoisonedError) as caught, ost.black_box():
            graph.replay()
            ground.stream.synchronize()
    text = str(caught.value)
    assert "the graph of 2 nodes captured at " in text and Path(__file__).name in text
    assert "node 1 (trap)" in text and "finished: node 0" in text


REPLAYS: dict[str, Callable[[Any], object]] = {
    "again": lambda graph: None,
    "instantiated again": lambda graph: graph.instantiate(),
}


@pytest.mark.parametrize("between", REPLAYS)
def test_watched_replays_give_the_same_answers(ground: Ground, between: str) -> None:
    with observe():
        graph = captured(ground)
        graph.replay()
        with ost.black_box() as box:
            graph.replay()
            REPLAYS[between](graph)
            graph.replay()
            assert repr(box).startswith("<BlackBox of ")
        with ost.black_box(captured(ground).graph.instantiate()):  # of that one alone
            graph.replay()
        graph.replay()
        assert first(ground) == 4.0**5
        assert (observed()[0].replays, graph.replayed) == (5, 3)


def test_a_graph_that_is_captured_again_is_watched_anew(ground: Ground) -> None:
    with observe(), ost.black_box():
        graph = captured(ground)
        graph.replay()
        graph.reset()
        graph.capture_begin()
        ost.launch(ground.stream, ground.kernel("twice"), ROW, ground.y)
        graph.capture_end()
        graph.replay()
        assert observed()[0].replays == 1
    assert (first(ground), float(ground.y.to_numpy(ground.stream)[0])) == (4, 2)


def test_a_graph_that_cannot_be_adopted_is_replayed_by_torch(
    ground: Ground, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostinato.interop.torch import observing

    def adopted(*args: Any, **options: Any) -> ost.Graph:
        graph = observing.definition_of(*args)
        graph.only_to_read = "it draws"
        return graph

    monkeypatch.setattr(observing, "adopt_graph", adopted)
    with observe(), ost.black_box():
        graph = captured(ground)
        for _ in range(2):
            graph.replay()
    assert first(ground) == 16
    (line,) = caplog.messages
    assert "is not watched" in line and "it draws" in line and Path(__file__).name in line


def test_the_replay_that_measures_random_numbers_is_not_counted_or_watched(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostinato.interop.torch import observing

    given = []

    def adopted(device: Device, graph: Any, *, generators: Any) -> ost.Graph:
        graph.replay()
        graph.instantiate()
        given.append(generators)
        return observing.definition_of(device, graph)

    monkeypatch.setattr(observing, "adopt_graph", adopted)
    with observe(), ost.black_box():
        graph = captured(ground)
        graph.register_generator_state("a generator")
        graph.replay()
    assert observed()[0].replays == 1 and given == [["a generator"]]
    assert first(ground) == 4**2, "one replay of torch's, and the one that is watched"


def test_a_bug_report_has_the_tables(ground: Ground, tmp_path: Path) -> None:
    address = ground.allocated()
    with observe() as watch:
        graph = captured(ground, ("touch", address, 0))
        ground.free_all()
        watch.export(tmp_path / "report.txt")
    text = (tmp_path / "report.txt").read_text()
    assert str(observed()[0]) in text and f"torch {torch.__version__}" in text
    assert "touch" in text and "1 pointer, 0 suspect" in text and graph.keep
