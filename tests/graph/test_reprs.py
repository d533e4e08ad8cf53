"""Every public object of the graph layer says in its repr what it is, and in which state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.relational import Joiner
from tests.sources import config, kernel

N = 16


class Made:
    """One of each, on one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = device.create_stream()
        self.x = device.zeros(N, np.float32)
        self.scale = kernel(device, "scale")
        self.cache = ost.GraphCache(device)

    def work(self, stream: ost.Stream, _: object = None) -> None:
        ost.launch(stream, self.scale, config(N), self.x, N)

    def graph(self) -> ost.Graph:
        return ost.capture_function(self.stream, lambda: self.work(self.stream))

    def closed(self, thing: Any) -> Any:
        thing.close()
        return thing

    def step(self) -> ost.GraphedStep:
        return ost.GraphedStep(
            self.work, stream=self.stream, cache=self.cache, name="decode", warmups=0
        )

    def called(self) -> ost.GraphedStep:
        step = self.step()
        step(rows=4)
        return step

    def lost(self) -> ost.Graph:
        graph = ost.Graph.create(self.device)
        graph.lose("destroyed by a broken capture")
        return graph

    def conditional(self) -> Any:
        graph = ost.Graph.create(self.device)
        return graph.add_conditional("while", graph.condition(1))

    def capture(self, *, ended: bool) -> ost.Capture:
        with ost.capture(self.stream) as capture:
            self.work(self.stream)
            if not ended:
                self.under_way = repr(capture)
        return capture

    def recording(self, *, broken: bool = False) -> Any:
        with ost.record(self.stream) as recording:
            self.work(self.stream)
            if broken:
                self.work(self.device.create_stream())
        return recording

    def profile(self) -> ost.explain.ReplayProfile:
        profile = ost.explain.ReplayProfile()
        step = ost.GraphedStep(
            self.work, stream=self.stream, cache=self.cache, warmups=0, profile=profile
        )
        step(rows=4)
        return profile

    def pending(self) -> Any:
        rows = {"key": np.arange(8)}
        pending = Joiner(self.device, stream=self.stream).submit(rows, rows, on="key")
        pending.result()
        return pending

    def index(self) -> Any:
        return Joiner(self.device).build_index({"key": np.arange(8)}, on="key")


def closed_after(thing: Any) -> str:
    thing.close()
    return repr(thing)


STATES: list[tuple[Callable[[Made], str], tuple[str, ...]]] = [
    (lambda m: repr(m.graph()), ("<Graph ", "open")),
    (lambda m: repr(m.closed(m.graph())), ("<Graph ", "closed")),
    (lambda m: repr(m.lost()), ("<Graph ", "lost")),
    (lambda m: repr(m.conditional()), ("<Conditional WHILE", "node 0", "1 bodies")),
    (lambda m: repr(m.conditional().bodies[0]), ("<Graph ", "not owned")),
    (lambda m: repr(m.graph().nodes()[0]), ("<Node 0 KERNEL 'scale'>",)),
    (lambda m: repr(m.graph().instantiate()), ("<GraphExec ", "ready")),
    (lambda m: repr(m.closed(m.graph().instantiate())), ("<GraphExec ", "closed")),
    (lambda m: repr(m.capture(ended=True)), ("<Capture ", "ended")),
    (lambda m: (m.capture(ended=False), m.under_way)[1], ("<Capture ", "under way")),
    (lambda m: repr(m.recording()), ("<Recording of 1 operation on <Stream",)),
    (lambda m: repr(m.recording(broken=True)), ("<Recording ", "broken")),
    (lambda m: repr(m.cache), ("<GraphCache 0 graphs, 0 bytes",)),
    (lambda m: repr(m.closed(m.cache)), ("<GraphCache ", "closed")),
    (lambda m: repr(m.called()), ("<GraphedStep 'decode'", "1 graphs")),
    (lambda m: repr(m.closed(m.step())), ("<GraphedStep 'decode'", "closed")),
    (lambda m: repr(m.called().hold(rows=4)), ("<HeldReplay, 0 launches>",)),
    (lambda m: closed_after(m.called().hold(rows=4)), ("<HeldReplay", "closed")),
    (lambda m: repr(m.profile()), ("<ReplayProfile of 1 replays, 1 kept>",)),
    (lambda m: repr(Joiner(m.device)), ("<Joiner on ", "0 graphs")),
    (lambda m: closed_after(Joiner(m.device)), ("<Joiner ", "closed")),
    (lambda m: repr(m.pending()), ("<PendingJoin ", "done")),
    (lambda m: repr(m.index()), ("<JoinIndex of <KeyColumns",)),
    (lambda m: closed_after(m.index()), ("<JoinIndex ", "closed")),
]


@pytest.mark.parametrize(("made", "expected"), STATES, ids=[" ".join(e) for _, e in STATES])
def test_a_repr_tells_the_state(
    host_device: Device, made: Callable[[Made], str], expected: tuple[str, ...]
) -> None:
    text = made(Made(host_device))
    assert [part for part in expected if part not in text] == [], text
