"""Sums by a captured graph, which tests change and interrupt; what must hold afterwards."""

from __future__ import annotations

import threading

import numpy as np

import ostinato as ost
from ostinato.device import Device
from tests.sources import config, kernel

N = 16


class Sums:
    """out = a + a by three nodes, captured; `b` and the graph `other` of its sums to go to."""

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.create_stream()
        self.a, self.b = (device.array(np.full(N, v, np.float32)) for v in (3, 5))
        self.outs = [device.zeros(N, np.float32) for _ in range(3)]
        self.graph, self.other = self.captured(self.a), self.captured(self.b)
        self.run = self.graph.instantiate(upload=self.stream)

    def captured(self, source: ost.Buffer) -> ost.Graph:
        return ost.capture_function(self.stream, lambda: self.submit(source))

    def submit(self, source: ost.Buffer) -> None:
        for out in self.outs:
            add = kernel(self.device, "add")
            ost.launch(self.stream, add, config(N), source, source, out, N)

    def clear(self) -> None:
        for out in self.outs:
            ost.fill(self.stream, out, 0)

    def seen(self) -> list[float]:
        """The last element of each output."""
        return [float(out.to_numpy(self.stream)[-1]) for out in self.outs]

    def answers(self, run: ost.GraphExec | None = None) -> list[float]:
        """What a launch gives now."""
        self.clear()
        (run or self.run).launch(self.stream)
        return self.seen()


def assert_sound(device: Device, *streams: ost.Stream) -> None:
    """Nothing is under way, nothing listens, and the streams work."""
    device.context.collect()
    assert not device.context.captures
    assert device.context.taps == ()
    for stream in streams:
        assert not stream.is_capturing()
        done = threading.Event()
        stream.call(done.set)
        stream.synchronize()
        assert done.is_set(), "synchronize came back before the work was done"
