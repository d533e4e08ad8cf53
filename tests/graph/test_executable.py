"""Changing an executable: one argument, one node, every pointer; refusals change nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import UpdateOutcome, UpdateVerdict
from ostinato.driver.context import Hot
from ostinato.driver.host.driver import HostDriver
from ostinato.errors import (
    CaptureError,
    ClosedError,
    DriverError,
    InputError,
    NodeKindError,
    Status,
    UpdateRefusedError,
)
from tests.sources import config, kernel

N = 300

pytestmark = pytest.mark.usefixtures("launcher")  # compiled, and in Python


class Sum:
    """out = a + b, then out *= 2, then a copy of out; all as one graph."""

    def __init__(self, device: Device, stream: ost.Stream) -> None:
        self.device, self.stream = device, stream
        rng = np.random.default_rng(7)
        self.a_host = rng.standard_normal(N).astype(np.float32)
        self.b_host = rng.standard_normal(N).astype(np.float32)
        self.a, self.b = device.array(self.a_host), device.array(self.b_host)
        self.out, self.copy = device.zeros(N, np.float32), device.zeros(N, np.float32)
        with ost.capture(stream) as capture:
            ost.fill(stream, self.out, 0)
            ost.launch(stream, kernel(device, "add"), config(N), self.a, self.b, self.out, N)
            ost.launch(stream, kernel(device, "scale"), config(N), self.out, N)
            ost.copy(stream, self.copy, self.out)
        self.graph = capture.graph
        self.run = self.graph.instantiate(upload=stream)

    def result(self) -> np.ndarray:
        self.run.launch(self.stream)
        return self.copy.to_numpy(self.stream)

    @property
    def expected(self) -> np.ndarray:
        return 2 * (self.a_host + self.b_host)


@pytest.fixture
def sums(device: Device, stream: ost.Stream) -> Sum:
    return Sum(device, stream)


def test_inventory(sums: Sum) -> None:
    nodes = sums.graph.nodes()
    assert [n.kind.name for n in nodes] == ["MEMSET", "KERNEL", "KERNEL", "MEMCPY"]
    assert [n.index for n in nodes] == [0, 1, 2, 3]
    add = nodes[1]
    assert add.name == "add"
    assert add.kernel.config.grid == (3, 1, 1)
    assert [a.name for a in add.arguments] == ["a", "b", "out", "n"]
    assert add.arguments[3].value == N
    assert add.arguments[0].pointers[0].address == sums.a.address
    assert nodes[0].memset.dst == sums.out.address
    assert nodes[3].memcpy.width == 4 * N
    with pytest.raises(NodeKindError, match="MEMSET"):
        _ = nodes[0].kernel
    with pytest.raises(NodeKindError, match="KERNEL"):
        _ = nodes[1].memset
    with pytest.raises(InputError, match=r"no node 4: .* an index below 4"):
        sums.graph.node(4)
    with pytest.raises(InputError, match="diff: a Graph is needed, not GraphExec"):
        sums.graph.diff(sums.run)  # type: ignore[arg-type]


def test_patch_refusals_change_nothing(sums: Sum) -> None:
    for bad in (
        lambda: sums.run.set(1, "c", sums.a),
        lambda: sums.run.set(1, 4, sums.a),
        lambda: sums.run.set(1, "n", -1),
        lambda: sums.run.set(1, "n", 1.5),
        lambda: sums.run.set(1, "a", "text"),
        lambda: sums.run.set(9, "a", sums.a),
        lambda: sums.run.set("scale", "n", 1),  # type: ignore[arg-type]
        lambda: sums.run.set_all([(1, "b", sums.a), (2, "n")]),  # type: ignore[list-item]
        lambda: sums.run.set_all([1]),  # type: ignore[list-item]
        lambda: sums.graph.instantiate(upload=True),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError):
            bad()
    for argument in ("c", 4):
        with pytest.raises(InputError, match=r"^node 1 \(add\): "):
            sums.run.set_all([(2, "n", 10), (1, argument, sums.a)])
    with pytest.raises(NodeKindError):
        sums.run.set(0, 0, sums.a)
    np.testing.assert_array_equal(sums.result(), sums.expected)


def test_config_memset_memcpy(sums: Sum, device: Device) -> None:
    sums.run.set(2, config=ost.LaunchConfig(grid=1, block=128))
    expected = sums.expected
    expected[128:] /= 2
    np.testing.assert_array_equal(sums.result(), expected)
    sums.run.set(2, config=config(N))
    elsewhere = device.zeros(N, np.float32)
    sums.run.set(3, dst=elsewhere, src=sums.out)
    sums.run.launch(sums.stream)
    np.testing.assert_array_equal(elsewhere.to_numpy(sums.stream), sums.expected)
    sums.run.set(0, dst=elsewhere, value=1)
    sums.run.launch(sums.stream)
    # The copy runs last; the fill of `elsewhere` came before it.
    np.testing.assert_array_equal(elsewhere.to_numpy(sums.stream), sums.expected)
    with pytest.raises(InputError):
        sums.run.set(3, dst=elsewhere, src=device.zeros(1, "bytes"))
    with pytest.raises(UpdateRefusedError, match="cooperative"):
        sums.run.set(2, config=ost.LaunchConfig(1, 128, cooperative=True))


def test_rebind_moves_every_pointer_and_reports_it(sums: Sum, device: Device) -> None:
    fresh = device.array(np.random.default_rng(1).standard_normal(N).astype(np.float32))
    report = sums.run.rebind({sums.a: fresh})
    assert [(w.node_index, w.place) for w in report.words] == [(1, "argument 0 (a)")]
    expected = 2 * (fresh.to_numpy(sums.stream) + sums.b_host)
    np.testing.assert_array_equal(sums.result(), expected)

    out = device.zeros(N, np.float32)
    report = sums.run.rebind({sums.out: out})
    assert report.nodes == 4  # memset, both kernels, and the copy's source
    np.testing.assert_array_equal(sums.result(), expected)
    np.testing.assert_array_equal(out.to_numpy(sums.stream), expected)


def test_a_refused_update_names_the_reason_and_changes_nothing(
    sums: Sum, device: Device, stream: ost.Stream
) -> None:
    with ost.capture(stream) as capture:
        ost.fill(stream, sums.out, 0)
    with pytest.raises(UpdateRefusedError, match="TOPOLOGY_CHANGED"):
        sums.run.update(capture.graph)
    with ost.capture(stream) as capture:
        ost.fill(stream, sums.out, 0)
        ost.fill(stream, sums.out, 0)
        ost.launch(stream, kernel(device, "scale"), config(N), sums.out, N)
        ost.copy(stream, sums.copy, sums.out)
    with pytest.raises(UpdateRefusedError, match="node 1"):
        sums.run.update(capture.graph)
    np.testing.assert_array_equal(sums.result(), sums.expected)


def test_closed_executables_refuse(sums: Sum) -> None:
    sums.result()
    sums.run.close()
    sums.run.close()
    with pytest.raises(ClosedError):
        sums.run.launch(sums.stream)
    with pytest.raises(ClosedError):
        sums.run.set(1, "a", sums.a)
    again = sums.graph.instantiate()
    other = sums.device.create_stream()
    again.launch(other)
    other.close()
    with pytest.raises(ClosedError):
        again.launch(other)


@pytest.mark.parametrize("closed", ["executable", "stream"])
def test_what_is_closed_during_its_first_launch_is_not_launched_again(
    host_device: Device, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """By another thread, between the look that all is open and the short way of later launches."""
    sums = Sum(host_device, host_device.create_stream())
    context, other = host_device.context, host_device.create_stream()
    keep_hot = context.keep_hot

    def meanwhile(hot: Hot) -> bool:
        kept = keep_hot(hot)
        (sums.run if closed == "executable" else other).close()
        return kept

    monkeypatch.setattr(context, "keep_hot", meanwhile)
    with suppress(DriverError):  # who launches what another closes has only this launch to lose
        sums.run.launch(other)
    with pytest.raises(ClosedError):
        sums.run.launch(other)


def test_who_listens_since_the_first_launch_hears_the_second(
    host_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = host_device.create_stream()
    sums = Sum(host_device, stream)
    context, keep_hot = host_device.context, host_device.context.keep_hot
    with ExitStack() as stack:
        recordings = []

        def meanwhile(hot: Hot) -> bool:
            kept = keep_hot(hot)
            if not recordings:
                recordings.append(stack.enter_context(ost.record(stream)))
            return kept

        monkeypatch.setattr(context, "keep_hot", meanwhile)
        sums.run.launch(stream)
        assert recordings
        sums.run.launch(stream)
    (recording,) = recordings
    assert [n.kind.name for n in recording.build().nodes()] == ["CHILD_GRAPH"]
    np.testing.assert_array_equal(sums.result(), sums.expected)


def test_who_listens_after_an_interrupted_first_launch_hears_the_next(
    host_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = host_device.create_stream()
    sums = Sum(host_device, stream)

    def interrupt(hot: Hot) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(host_device.context, "keep_hot", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sums.run.launch(stream)
    with ost.record(stream) as recording:
        sums.run.launch(stream)
    assert [n.kind.name for n in recording.build().nodes()] == ["CHILD_GRAPH"]


def test_launching_into_a_capture_is_refused_and_the_capture_goes_on(
    sums: Sum, stream: ost.Stream
) -> None:
    with ost.capture(stream) as capture:
        with pytest.raises(CaptureError, match="add_child"):
            sums.run.launch(stream)
        ost.fill(stream, sums.copy, 0)
    assert len(capture.graph) == 1
    np.testing.assert_array_equal(sums.result(), sums.expected)


def test_rebind_reaches_into_child_graphs(sums: Sum, device: Device) -> None:
    parent = ost.Graph.create(device)
    child = parent.add_child(sums.graph)
    assert child.kind is ost.NodeKind.CHILD_GRAPH
    assert [n.name for n in child.children[0]][1:3] == ["add", "scale"]
    assert parent.count("kernel") == 2
    run = parent.instantiate()
    run.launch(sums.stream)
    np.testing.assert_array_equal(sums.copy.to_numpy(sums.stream), sums.expected)
    report = run.rebind({sums.a: sums.b})
    assert [(w.node_index, w.node_name) for w in report.words] == [(0, "child_graph / add")]
    assert report.left == ()
    run.launch(sums.stream)
    np.testing.assert_array_equal(sums.copy.to_numpy(sums.stream), 4 * sums.b_host)
    fresh = device.array(sums.a_host)
    run.rebind([(sums.b, fresh)])
    run.launch(sums.stream)
    np.testing.assert_array_equal(sums.copy.to_numpy(sums.stream), 4 * sums.a_host)


def test_after_an_update_in_another_order_single_nodes_are_not_mistaken(
    device: Device, stream: ost.Stream
) -> None:
    x, y = device.zeros(N, np.float32), device.zeros(N, np.float32)
    first, second = ost.Graph.create(device), ost.Graph.create(device)
    a = first.add_fill(x, 1)
    first.add_fill(x, 2, after=[a])
    b = second.add_fill(y, 2)
    second.add_edges([(second.add_fill(y, 1), b)])
    run = first.instantiate()
    try:
        run.update(second)  # CUDA takes it, and pairs the nodes along the edges
    except UpdateRefusedError:
        run.launch(stream)
        assert (x.to_numpy(stream) == 2).all()
    else:
        run.launch(stream)
        assert (y.to_numpy(stream) == 2).all()
        with pytest.raises(UpdateRefusedError, match="another order"):
            run.set(0, dst=x, value=3)


@pytest.mark.parametrize("inside", ["child", "body"])
def test_after_an_update_in_another_order_nodes_inside_are_not_mistaken(
    host_device: Device, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    x, graphs = host_device.zeros(N, np.float32), []
    for turned in (False, True):
        graph, inner = (ost.Graph.create(host_device) for _ in range(2))
        if inside == "body":
            condition = graph.condition(default=1)
            (inner,) = graph.add_conditional("if", condition).bodies
        one, two = inner.add_fill(x, 1), inner.add_fill(x, 2)
        inner.add_edges([(two, one) if turned else (one, two)])
        if inside == "child":
            graph.add_child(inner)
        graphs.append(graph)
    run = graphs[0].instantiate()
    taken = UpdateOutcome(UpdateVerdict.SUCCESS)  # as by CUDA, which pairs nodes along the edges
    monkeypatch.setattr(HostDriver, "exec_update", lambda *_: taken)
    run.update(graphs[1])
    (node,) = graphs[0].nodes()
    with pytest.raises(UpdateRefusedError, match="another order"):
        run.set(node.children[0][0], dst=x, value=3)


SET_WRONGLY: dict[str, tuple[Callable[[Any, Sum], None], type[Exception], str]] = {
    "nothing": (lambda run, s: run.set(2), TypeError, r"node 2 \(\w+\) with nothing: .*config=…"),
    "an argument and more": (
        lambda run, s: run.set(2, 0, s.a, enabled=True),
        TypeError,
        "with parameters and value and enabled: a node of kind KERNEL takes .*argument, value",
    ),
    "by position": (lambda run, s: run.set(2, 0, s.a, config(N)), TypeError, "value and config"),
    "half a copy": (lambda run, s: run.set(3, dst=s.out), TypeError, "MEMCPY takes .*dst=…, src=…"),
    "no value": (lambda run, s: run.set(2, 0), InputError, r"node 2 .*0 is no parameters"),
    "a config": (lambda run, s: run.set(2, config=8), InputError, "LaunchConfig is needed"),
    "a fill's argument": (lambda run, s: run.set(0, 0, 1), NodeKindError, "dst=…, value=…"),
    "a fill's config": (lambda run, s: run.set(0, config=config(N)), NodeKindError, "MEMSET"),
    "a kernel's source": (
        lambda run, s: run.set(2, dst=s.out, src=s.a),
        NodeKindError,
        r"node 2 .* has no dst and src: a node of kind KERNEL takes .*config=…",
    ),
    "a copy's value": (lambda run, s: run.set(3, dst=s.out, value=1), NodeKindError, "src=…"),
    "no node": (lambda run, s: run.set(9, enabled=True), InputError, "no node 9"),
}


@pytest.mark.parametrize("how", SET_WRONGLY)
def test_what_a_node_does_not_take_is_said_with_what_it_takes(sums: Sum, how: str) -> None:
    wrong, error, words = SET_WRONGLY[how]
    before = [sums.run.params(node) for node in range(4)]
    with pytest.raises(error, match=words):
        wrong(sums.run, sums)
    assert [sums.run.params(node) for node in range(4)] == before
    np.testing.assert_array_equal(sums.result(), sums.expected)


def test_a_launch_while_recording_becomes_a_child(sums: Sum, stream: ost.Stream) -> None:
    for _ in range(2):
        sums.run.launch(stream)  # the short way, from here on
    with ost.record(stream) as recording:
        ost.fill(stream, sums.out, 9)
        sums.run.launch(stream)
    graph = recording.build()
    assert [n.kind.name for n in graph.nodes()] == ["MEMSET", "CHILD_GRAPH"]
    assert len(graph.edges()) == 1
    graph.instantiate().launch(stream)
    np.testing.assert_array_equal(sums.copy.to_numpy(stream), sums.expected)


def test_events_between_graph_and_stream(device: Device, stream: ost.Stream) -> None:
    """Record and wait nodes built by hand order a graph against work outside of it."""
    x, inside, outside = device.zeros(N, "bytes"), device.create_event(), device.create_event()
    graph = ost.Graph.create(device)
    wait = graph.add_event_wait(outside)
    filled = graph.add_fill(x, 7, after=[wait])
    record = graph.add_event_record(inside, after=[filled])
    assert wait.event_wait.event == outside.handle
    assert record.event_record.event == inside.handle
    with pytest.raises(NodeKindError, match="EVENT_WAIT"):
        _ = wait.event_record
    stream.record(outside)
    graph.instantiate().launch(stream)
    stream.synchronize()
    assert inside.done()
    assert (x.to_numpy(stream) == 7).all()


def test_a_body_has_no_copies(device: Device, stream: ost.Stream) -> None:
    graph, x = ost.Graph.create(device), device.zeros(N, np.float32)
    (body,) = graph.add_conditional("if", graph.condition(1)).bodies
    body.add_child(ost.capture_function(stream, lambda: ost.fill(stream, x, 3)))
    for copied in (graph, body):
        with pytest.raises(DriverError, match="body of a conditional node") as refused:
            copied.clone()
        assert refused.value.status == Status.NOT_SUPPORTED
    graph.instantiate().launch(stream)
    assert (x.to_numpy(stream) == 3).all()


def test_a_body_is_gone_with_its_graph(device: Device, stream: ost.Stream) -> None:
    """A GPU's driver would follow its handle."""
    graph, x = ost.Graph.create(device), device.zeros(N, np.float32)
    (body,) = graph.add_conditional("if", graph.condition(1)).bodies
    graph.close()
    for use in (
        lambda: body.add_fill(x, 1),
        lambda: ost.Capture(stream, into=body).begin(),
        lambda: body.nodes(),
        lambda: ost.Graph.create(device).add_child(body),
    ):
        with pytest.raises(ClosedError, match="the graph is closed"):
            use()
    assert not stream.is_capturing()
