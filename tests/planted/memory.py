"""Mistakes with whose memory it is, and with what a step promises to do with it."""

from __future__ import annotations

import numpy as np

import ostinato as ost
from ostinato.step import Cause, GraphCache
from tests.planted.programme import INPUT, OUTPUT, Caught, Programme, Values, plant


@plant(
    Caught.REMADE,
    "",
    thread="vllm-project/vllm#46067",
)
class ScratchThatGrows(Programme):
    """Scratch is freed and made anew, larger, after graphs were made that point at it.

    Right: it is dropped, and the graphs keep what they point at.
    """

    takes = "x: input rows, out: output rows"

    def make(self) -> None:
        self.x, self.out = self.array([1] * 16), self.zeros(16)
        self.scratch: ost.Buffer | None = None
        self.others: list[ost.Buffer] = []

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        if self.scratch is None or len(self.scratch) < sizes.rows:
            if self.scratch is not None and self.planted:
                self.scratch.close()
            self.scratch = self.device.empty(sizes.rows, np.float32)
        self.launch("add", sizes.rows, self.x, self.x, self.scratch, sizes.rows)
        self.launch("add", sizes.rows, self.scratch, self.scratch, self.out, sizes.rows)

    def sizes(self, number: int) -> dict[str, int]:
        return {"rows": 16 if number == 3 else 4}

    def call(self, number: int) -> None:
        if number == 4:
            self.others = [self.array([9] * 4) for _ in range(4)]  # one may lie where it was
        super().call(number)

    def answer(self) -> Values:
        return self.read(self.out[:4], *self.others)

    def wanted(self, number: int) -> list[float]:
        return [4] * 4 + ([9] * 16 if number == 4 else [])


@plant(
    Caught.ERROR,
    r"node 0 \(add\) argument 0 points at memory that was closed",
    thread="flashinfer-ai/flashinfer#4398",
)
class ClosedUnderAGraph(Programme):
    """A buffer is freed that a graph of the user's own still points at."""

    takes = "out: output"

    def make(self) -> None:
        self.x, self.y, self.out = self.array([1] * 8), self.array([2] * 8), self.zeros(8)

    def build(self, **options: object) -> None:
        self.graph = ost.capture_function(
            self.stream, lambda: self.launch("add", 8, self.x, self.y, self.out, 8)
        ).instantiate(upload=self.stream)

    def call(self, number: int) -> None:
        if number == 3 and self.planted:
            self.x.close()
            self.device.synchronize()
            self.others = [self.array([9] * 8) for _ in range(4)]
        self.graph.launch(self.stream)

    def wanted(self, number: int) -> list[float]:
        return [3] * 8


@plant(
    Caught.CHECK,
    r"slot 'out' .* argument 1 of operation 0 \(add\)",
    thread="ggml-org/llama.cpp#28652",
    cause=Cause.FROZEN,
)
class SharedKey(Programme):
    """A draft and a target model share one key, and so the graph of the model that came first."""

    def make(self) -> None:
        self.x = self.array([1] * 8)
        self.weights = [self.array([2] * 8), self.array([5] * 8)]
        self.outs = [self.zeros(8), self.zeros(8)]

    def build(self, **options: object) -> ost.GraphedStep | None:
        cache = GraphCache(self.device)
        share = {"share": "model"} if self.planted else {}
        self.target, draft = (
            ost.GraphedStep(
                self.model(weights, out),
                stream=self.stream,
                cache=cache,
                slots=[ost.Slot("x", self.x, INPUT), ost.Slot("out", out, OUTPUT)],
                **{**share, **options},  # type: ignore[arg-type]
            )
            for weights, out in zip(self.weights, self.outs, strict=True)
        )
        return draft

    def model(self, weights: ost.Buffer, out: ost.Buffer) -> object:
        return lambda stream, sizes: self.launch("add", 8, self.x, weights, out, 8)

    def call(self, number: int) -> None:
        self.write(self.x, number)
        self.target()
        super().call(number)

    def answer(self) -> Values:
        return self.read(*self.outs)

    def wanted(self, number: int) -> list[float]:
        return [number + 2] * 8 + [number + 5] * 8


@plant(
    Caught.CHECK,
    "slot 'x' at .* changes an input",
    thread="NVIDIA/TensorRT-LLM#7373",
    cause=Cause.INPUT_WRITTEN,
    right_eagerly=False,
)
class InputWritten(Programme):
    """The step prepares its input in place: a caller that fills it once has others next time."""

    takes = "x: input, out: output"

    def make(self) -> None:
        self.x, self.out, self.zero = self.array([3] * 8), self.zeros(8), self.zeros(8)

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        if self.planted:
            self.launch("scale", 8, self.x, 8)
            self.launch("add", 8, self.x, self.zero, self.out, 8)
        else:
            self.launch("add", 8, self.x, self.x, self.out, 8)

    def wanted(self, number: int) -> list[float]:
        return [6] * 8


@plant(
    Caught.CHECK,
    r"slot 'out' at \[128\]: neither run writes it",
    cause=Cause.UNWRITTEN,
    right_eagerly=False,
)
class GridTooSmall(Programme):
    """The grid covers half of the output; the rest keeps what the last user of it left there."""

    takes = "x: input, out: output"
    options = {"warmups": 0}  # noqa: RUF012

    def make(self) -> None:
        self.x, self.out = self.array([1] * 256), self.zeros(256)

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.launch("add", 128 if self.planted else 256, self.x, self.x, self.out, 256)

    def wanted(self, number: int) -> list[float]:
        return [2] * 256


@plant(
    Caught.CHECK,
    "slot 'out' .* depends on what an output held before",
    cause=Cause.OUTPUT_READ,
    right_eagerly=False,
)
class OutputAccumulates(Programme):
    """A product is added to its output, which no launch clears: right only the first time."""

    takes = "x: input, out: output"

    def make(self) -> None:
        self.x, self.out = self.array([1] * 8), self.zeros(8)

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        if not self.planted:
            self.launch("fill", 8, self.out, 0.0, 8)
        self.launch("axpy", 8, self.x, self.one, self.out, 8)

    def wanted(self, number: int) -> list[float]:
        return [1] * 8


@plant(Caught.ERROR, "slots 'kv' and 'window' overlap in memory")
class OverlappingSlots(Programme):
    """A part of a state is declared an input as well: a check would put back half of an update."""

    takes = "kv: state"

    def make(self) -> None:
        self.kv, self.x = self.zeros(8), self.array([1] * 8)

    def slots(self) -> list[ost.Slot]:
        slots = super().slots()
        return [*slots, ost.Slot("window", self.kv[0:2], INPUT)] if self.planted else slots

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.launch("axpy", 8, self.x, self.one, self.kv, 8)

    def wanted(self, number: int) -> list[float]:
        return [number + 1] * 8
