"""Mistakes by which work, or an order of it, is not in the graph."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

import ostinato as ost
from ostinato.step import Cause
from tests.planted.programme import Caught, Programme, Values, plant
from tests.sources import config, kernel


class _TwoOutputs(Programme):
    """ours = theirs = 2 x, each by a launch of its own."""

    takes = "x: input, ours: output, theirs: output"

    def make(self) -> None:
        self.x, self.ours, self.theirs = self.zeros(8), self.zeros(8), self.zeros(8)
        self.side = self.device.create_stream()

    def call(self, number: int) -> None:
        self.write(self.x, number + 1)
        super().call(number)

    def wanted(self, number: int) -> list[float]:
        return [2 * (number + 1)] * 16


@plant(
    Caught.BUILD,
    r"add went to <Stream .*, which is not in the capture",
    thread="RWKV-Vibe/rwkv_lightning#24",
)
class SideStreamNotForked(_TwoOutputs):
    """One launch goes to a stream that is not forked from the captured one."""

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        if not self.planted:
            self.side.wait(stream.record())
        self.launch("add", 8, self.x, self.x, self.theirs, 8, stream=self.side)
        self.launch("add", 8, self.x, self.x, self.ours, 8)
        if not self.planted:
            stream.wait(self.side.record())


@plant(Caught.CHECK, "slot 'theirs'", thread="NVlabs/alpamayo1.5#38")
class OtherLibraryElsewhere(_TwoOutputs):
    """Another library launches on a stream, or a device, that is not captured.

    It does not go through this library, so its launches are not counted.  Right: it is given the
    stream.
    """

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.launch("add", 8, self.x, self.x, self.ours, 8)
        theirs = ost.prepare(kernel(self.device, "add"), config(8), self.x, self.x, self.theirs, 8)
        where = self.side if self.planted else stream
        params = theirs.params
        launch = self.device.driver.launch_kernel
        launch(where.handle, params.function, params.config, params.arguments)


@plant(Caught.CHECK, r"slot 'theirs' .*\(the graph lacks work of the step", cause=Cause.FROZEN)
class HelperThread(_TwoOutputs):
    """A helper thread launches a part; its error in a capture is ignored."""

    def make(self) -> None:
        super().make()
        self.helper = ThreadPoolExecutor(1)

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        def part() -> None:
            self.launch("add", 8, self.x, self.x, self.theirs, 8)

        if self.planted:
            wait([self.helper.submit(part)])
        else:
            part()
        self.launch("add", 8, self.x, self.x, self.ours, 8)


@plant(
    Caught.CHECK,
    "operation 1 is nothing in the graph and add now",
    cause=Cause.FROZEN,
)
class BuilderLacksALaunch(_TwoOutputs):
    """A graph that is built by hand lacks a launch that the step has."""

    def build(self, **options: object) -> ost.GraphedStep | None:
        return super().build(builder=self.built, **options)

    def built(self, stream: ost.Stream, sizes: ost.Sizes) -> ost.GraphExec:
        graph = ost.Graph.create(self.device)
        for out in [self.ours] if self.planted else [self.ours, self.theirs]:
            graph.add_kernel(kernel(self.device, "add"), config(8), self.x, self.x, out, 8)
        return graph.instantiate(upload=stream)

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.launch("add", 8, self.x, self.x, self.ours, 8)
        self.launch("add", 8, self.x, self.x, self.theirs, 8)


@plant(
    Caught.BUILD,
    "1 operations, the eager run before had 2: add at .* is missing",
    thread="vllm-project/vllm#42444",
)
class PlanOfTheWarmUp(Programme):
    """Warm-up and capture share a plan: the work that makes it is not in the graph, nor done again.

    Right: each step has a plan of its own, the captured one too.
    """

    takes = "x: input, out: output"

    def make(self) -> None:
        self.x, self.plan, self.out = self.array([1] * 8), self.zeros(8), self.zeros(8)
        self.planned = False

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        if not self.planned:
            self.launch("add", 8, self.x, self.x, self.plan, 8)
            self.planned = True
        self.launch("add", 8, self.x, self.plan, self.out, 8)

    def call(self, number: int) -> None:
        if number == 1:
            self.planned = self.planted
            self.step.prepare()
        self.planned = False
        self.write(self.x, number + 1)
        super().call(number)

    def wanted(self, number: int) -> list[float]:
        return [3 * (number + 1)] * 8


@plant(
    Caught.BUILD,
    "1 operations, the eager run before had 2: add at .* is missing",
    thread="pytorch/pytorch#81558",
)
class CastKeptFromTheWarmUp(Programme):
    """Weights are cast once in a region that holds warm-up and capture: later ones are not seen.

    Right: the region ends after each call, and what it has cast with it.
    """

    takes = "x: input, w: input, out: output"

    def make(self) -> None:
        self.x, self.w, self.zero = self.array([1] * 8), self.array([2] * 8), self.zeros(8)
        self.cast, self.out, self.is_cast = self.zeros(8), self.zeros(8), False

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        if not self.is_cast:
            self.launch("add", 8, self.w, self.zero, self.cast, 8)
            self.is_cast = True
        self.launch("add", 8, self.x, self.cast, self.out, 8)

    def call(self, number: int) -> None:
        if number == 3:
            self.write(self.w, 7)
        super().call(number)
        self.is_cast = self.planted and number == 0  # the region holds calls 0 and 1

    def wanted(self, number: int) -> list[float]:
        return [3 if number < 3 else 8] * 8


@plant(
    Caught.BUILD,
    "the recording was broken at .*: a copy of the host's bytes",
    thread="PaddlePaddle/Paddle#78568",
)
class HostBytesInARecording(Programme):
    """A recorded step copies from a variable of the host, which is gone, or another, later.

    Right: the caller copies, before the step.
    """

    takes = "x: state, out: output"
    options = {"build": "record"}  # noqa: RUF012

    def make(self) -> None:
        self.x, self.out = self.zeros(8), self.zeros(8)
        self.values = np.zeros(8, np.float32)

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        if self.planted:
            self.x.set(self.values, stream)
        self.launch("add", 8, self.x, self.x, self.out, 8)

    def call(self, number: int) -> None:
        self.values = np.full(8, number, np.float32)
        if not self.planted:
            self.x.set(self.values, self.stream)
        super().call(number)

    def answer(self) -> Values:
        return self.read(self.out)

    def wanted(self, number: int) -> list[float]:
        return [2 * number] * 8


@plant(
    Caught.CHECK,
    r"add and add: no path \(nothing orders two operations",
    thread="NVIDIA/warp#1418",
    cause=Cause.UNORDERED,
    right_eagerly=False,
)
class ForkedTooEarly(Programme):
    """A fork is recorded before the launch whose result it needs, and is usually late enough."""

    takes = "x: input, middle: scratch, out: output"
    options = {"warmups": 0}  # noqa: RUF012

    def make(self) -> None:
        self.x, self.middle, self.out = self.zeros(8), self.zeros(8), self.zeros(8)
        self.side = self.device.create_stream()

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        fork = stream.record()
        self.launch("add", 8, self.x, self.x, self.middle, 8)
        self.side.wait(fork if self.planted else stream.record())
        self.launch("add", 8, self.middle, self.middle, self.out, 8, stream=self.side)
        stream.wait(self.side.record())

    def call(self, number: int) -> None:
        self.write(self.x, number + 1)
        super().call(number)

    def wanted(self, number: int) -> list[float]:
        return [4 * (number + 1)] * 8
